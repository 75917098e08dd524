import json
import os
from pathlib import Path

import pytest
from PIL import Image

from data_files import smooth_photo, write_classes
from prototree.backbones.geometry import Box
from prototree.data.dataset import ImageData, Sample
from prototree.data.folder import read_folder
from prototree.data.images import check_header
from prototree.data.scan import scan_files
from prototree.errors import DataError
from prototree.files import cache_folder


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose head was read."""
    names: list[str] = []

    def look(path: Path) -> tuple[int, int]:
        names.append(path.name)
        return check_header(path)

    monkeypatch.setattr("prototree.data.scan.check_header", look)
    return names


def folder(tmp_path: Path) -> ImageData:
    return read_folder(write_classes(tmp_path / "photos", {"a": 3, "b": 3}))


def cache_file(own_cache: Path) -> Path:
    (file,) = own_cache.rglob("*.json")
    return file


def test_fills_in_sizes_and_clips_boxes(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    smooth_photo((40, 30)).save(path)
    samples = (Sample(path, 0, Box(-1.0, 2.0, 45.0, 9.0)),)
    (sample,) = scan_files(ImageData(tmp_path, "cub", ("a",), samples, ())).train
    assert (sample.size, sample.box) == ((40, 30), Box(0.0, 2.0, 40.0, 9.0))


def test_unusable_files_are_left_out(tmp_path: Path) -> None:
    data = folder(tmp_path)
    bad = [data.train[0].path, data.train[1].path, data.test[0].path]
    bad[0].write_bytes(b"")
    bad[1].write_text("text")
    bad[2].unlink()
    scanned = scan_files(data)
    assert [problem.path for problem in scanned.problems] == bad
    assert (scanned.train[0].path, len(scanned.train), len(scanned.test)) == (data.train[2].path, 2, 1)
    assert "empty (0 bytes)" in scanned.problems[0].reason


def test_strict_makes_them_an_error(tmp_path: Path) -> None:
    data = folder(tmp_path)
    data.train[0].path.write_bytes(b"")
    with pytest.raises(DataError, match=r"1 file of .* cannot be used:\n.*is empty"):
        scan_files(data, strict=True)


def test_second_scan_reads_no_file(tmp_path: Path, looked_at: list[str]) -> None:
    data = folder(tmp_path)
    first = scan_files(data)
    assert len(looked_at) == 6
    assert scan_files(data) == first
    assert len(looked_at) == 6


def test_changed_and_bad_files_are_looked_at_again(tmp_path: Path, looked_at: list[str]) -> None:
    data = folder(tmp_path)
    changed, bad = data.train[0].path, data.train[1].path
    bad.write_bytes(b"")
    scan_files(data)
    looked_at.clear()
    Image.new("RGB", (7, 8)).save(changed)
    os.utime(changed, ns=(1, 1))
    assert scan_files(data).train[0].size == (7, 8)
    assert sorted(looked_at) == sorted([changed.name, bad.name])


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"version": 0, "files": {}}', '{"version": 1, "files": [1]}',
     '{"version": 1, "files": {"a/0.jpg": [1, 2]}}', '{"version": 1, "files": {"a/0.jpg": "x"}}'],
)  # fmt: skip
def test_damaged_cache_is_ignored(tmp_path: Path, own_cache: Path, content: str) -> None:
    data = folder(tmp_path)
    first = scan_files(data)
    file = cache_file(own_cache)
    file.write_text(content)
    assert scan_files(data) == first
    assert len(json.loads(file.read_text())["files"]) == 6, "and written anew"


def test_cache_is_whole_or_absent(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = folder(tmp_path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    assert len(scan_files(data).train) == 4
    assert [path for path in own_cache.rglob("*") if path.is_file()] == []


def test_unwritable_cache_is_only_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PROTOTREE_CACHE", str(tmp_path / "file"))
    assert len(scan_files(folder(tmp_path)).train) == 4


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOTREE_CACHE", "/chosen")
    assert cache_folder() == Path("/chosen")
    monkeypatch.delenv("PROTOTREE_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/prototree")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "prototree"

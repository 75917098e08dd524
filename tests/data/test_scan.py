import hashlib
import json
import os
from pathlib import Path

import pytest
from PIL import Image

from data_files import write_classes
from prototree.data import scan
from prototree.data.dataset import ImageData
from prototree.data.folder import read_folder
from prototree.data.images import check_header
from prototree.data.scan import cache_file, file_digests, scan_files
from prototree.io import cache_folder


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


def only_table(own_cache: Path) -> Path:
    (file,) = own_cache.rglob("*.json")
    return file


def test_unusable_files_are_left_out(tmp_path: Path) -> None:
    data = folder(tmp_path)
    bad = [data.train[0].path, data.train[1].path, data.test[0].path]
    bad[0].write_bytes(b"")
    bad[1].write_text("text")
    bad[2].unlink()
    scanned = scan_files(data)
    assert [file.path for file in scanned.unreadable] == bad
    assert (scanned.train[0].path, len(scanned.train), len(scanned.test)) == (data.train[2].path, 2, 1)
    assert "empty (0 bytes)" in scanned.unreadable[0].reason


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
    file = only_table(own_cache)
    file.write_text(content)
    assert scan_files(data) == first
    assert len(json.loads(file.read_text())["files"]) == 6, "and written anew"
    (path,) = write(tmp_path / "one", a=b"1")
    table = cache_file("digests", path.parent)
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(content.replace("a/0.jpg", "a"))
    assert file_digests([path]) == {path: digest(b"1")}


def test_cache_is_whole_or_absent(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = folder(tmp_path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    assert len(scan_files(data).train) == 4
    assert [path for path in own_cache.rglob("*") if path.is_file()] == []


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PROTOTREE_CACHE", str(tmp_path / "file"))
    assert cache_folder() == tmp_path / "file"
    assert len(scan_files(folder(tmp_path)).train) == 4, "a cache that cannot be written is only slower"
    monkeypatch.delenv("PROTOTREE_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/prototree")


def digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def write(folder: Path, **files: bytes) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


def test_digests_are_those_of_the_bytes_and_each_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [*write(tmp_path / "one", a=b"1", b=b"22"), *write(tmp_path / "two", a=b"333")]
    expected = dict(zip(paths, map(digest, (b"1", b"22", b"333")), strict=True))
    monkeypatch.setattr(scan, "SETTLED", 0)
    assert file_digests(paths) == expected
    monkeypatch.setattr(scan, "open_regular", lambda *_: pytest.fail("read again"))
    assert file_digests(reversed(paths)) == expected


def test_a_file_changed_at_once_is_read_again(tmp_path: Path) -> None:
    first, second = write(tmp_path / "one", a=b"1", b=b"2")
    file_digests([first, second])
    status = first.stat()
    first.write_bytes(b"3")  # as long, and made to look as old
    os.utime(first, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file_digests([first]) == {first: digest(b"3")}
    assert file_digests([second]) == {second: digest(b"2")}


def test_a_file_that_cannot_be_read_has_a_digest_of_its_own(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert len(set(file_digests([tmp_path / "pipe", tmp_path / "gone"]).values())) == 2
    assert not cache_file("digests", tmp_path).exists()

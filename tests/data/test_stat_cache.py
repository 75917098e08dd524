"""Digests of photos: true to the bytes, read once, and never believed when the table is odd."""

import hashlib
import os
from pathlib import Path

import pytest

from prototree.data import stat_cache as remembered
from prototree.data.stat_cache import photo_digests, table_of


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
    monkeypatch.setattr(remembered, "SETTLED", 0)
    assert photo_digests(paths) == expected
    monkeypatch.setattr(remembered, "open_regular", lambda *_: pytest.fail("read again"))
    assert photo_digests(reversed(paths)) == expected


def test_a_file_changed_at_once_is_read_again(tmp_path: Path) -> None:
    first, second = write(tmp_path / "one", a=b"1", b=b"2")
    photo_digests([first, second])
    status = first.stat()
    first.write_bytes(b"3")  # as long, and made to look as old
    os.utime(first, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert photo_digests([first]) == {first: digest(b"3")}
    assert photo_digests([second]) == {second: digest(b"2")}


@pytest.mark.parametrize("rows", ["[]", "{", '{"version":1,"files":{"a":[1]}}', '{"version":1,"files":{"a":7}}', "7"])
def test_an_odd_table_is_not_believed(tmp_path: Path, rows: str) -> None:
    (path,) = write(tmp_path / "one", a=b"1")
    table = table_of("digests", path.parent)
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(rows)
    assert photo_digests([path]) == {path: digest(b"1")}


def test_a_file_that_cannot_be_read_has_a_stamp_of_its_own(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    gone = tmp_path / "gone"
    found = photo_digests([pipe, gone])
    assert len(set(found.values())) == 2
    assert not table_of("digests", tmp_path).exists()

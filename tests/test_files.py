"""Temporary files of processes that are gone."""

import os
from pathlib import Path

import pytest

from prototree.files import remove_leftovers, write_file


def test_only_temporary_files_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    gone, alive = 2**22 + 1, os.getppid()
    kept = [f".a.json.{alive}.tmp", ".a.json.tmp", f"a.json.{gone}.tmp", ".hidden"]
    for name in [*kept, f".a.json.{gone}.tmp", f".b.{os.getpid()}.tmp"]:
        (tmp_path / name).write_text("x")
    (tmp_path / f".run.partial-{gone}").mkdir()
    (tmp_path / f".birds.partial-{gone}-x1y2" / "deep").mkdir(parents=True)
    (tmp_path / f".run.partial-{alive}").mkdir()
    remove_leftovers(tmp_path.glob(".*"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, f".run.partial-{alive}"])


def test_an_interrupted_write_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(tmp_path / "a", b"old")

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "a", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]

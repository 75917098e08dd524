"""Temporary files and locks, also of processes that are killed."""

import os
import signal
import threading
from pathlib import Path

import pytest

from prototree import io
from prototree.errors import CheckpointError, ConfigError
from prototree.io import file_lock, lock_folder, prepared_beside, remove_leftovers, write_file, write_listed


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


def test_what_is_prepared_beside_a_file_goes_also_where_a_process_was_killed(tmp_path: Path) -> None:
    out = tmp_path / "odd [name]"
    if (killed := os.fork()) == 0:
        try:
            with prepared_beside(out) as folder:
                (folder / "half").write_text("x")
                write_file(out, b"old")
                (tmp_path / f".{out.name}.{os.getpid()}.tmp").write_text("half")
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.waitpid(killed, 0)
    assert len(list(tmp_path.iterdir())) == 3
    with prepared_beside(out) as one, prepared_beside(out) as other:
        assert one.is_dir(), "another thread's stays"
        assert {path.name for path in tmp_path.iterdir()} == {out.name, one.name, other.name}
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


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


def test_listed_files_that_cannot_all_be_written_leave_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, synced = tmp_path / "pictures", os.fsync
    write_listed(folder, {"0": b"old", "1": b"same"}, "list.json", {"of": 1})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for passing in range(2):  # the first file is written, its list is not
        left = [passing]

        def full(descriptor: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, "No space left on device")
            synced(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(CheckpointError, match="No space left on device"):
                write_listed(folder, {"0": b"new", "1": b"same"}, "list.json", {"of": 2})
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert list(tmp_path.iterdir()) == [folder]
    write_listed(folder, {"0": b"new", "1": b"same"}, "list.json", {"of": 2})
    assert (folder / "0").read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [folder]


def test_long_names_have_temporary_ones_too(tmp_path: Path) -> None:
    longest = "ü" * 127
    write_file(tmp_path / longest, b"content")
    with prepared_beside(tmp_path / longest) as folder:
        assert folder.is_dir()
    write_listed(tmp_path / ("x" * 255), {"a": b"1"}, "list.json", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x" * 255, longest]


def test_a_folder_is_held_by_one_and_free_again_afterwards(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_folder(tmp_path):
            with pytest.raises(ConfigError):
                lock_folder(tmp_path).__enter__()
            with lock_folder(tmp_path.parent):  # another folder is another matter
                pass
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_killed_process_lets_go_although_its_own_copy_lives_on(tmp_path: Path) -> None:
    held_it, told = os.pipe()
    if (killed := os.fork()) == 0:
        try:
            with lock_folder(tmp_path):
                if copy := os.fork():
                    os.write(told, str(copy).encode())
                signal.pause()
        finally:
            os._exit(1)
    copy = int(os.read(held_it, 20))
    with pytest.raises(ConfigError):
        lock_folder(tmp_path).__enter__()
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    try:
        with lock_folder(tmp_path):
            os.kill(copy, 0)  # it is still there
    finally:
        os.kill(copy, signal.SIGKILL)
        os.close(held_it)
        os.close(told)


def test_a_lock_file_is_waited_for_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, order = tmp_path / "new" / "file.lock", list[str]()

    def wait() -> None:
        with file_lock(path):
            order.append("second")

    thread = threading.Thread(target=wait)
    with file_lock(path):
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]
    assert not path.exists()
    monkeypatch.setattr(io, "fcntl", None)  # as on Windows
    with file_lock(tmp_path / "other" / "file.lock"), lock_folder(tmp_path):
        assert (tmp_path / "other").is_dir()

"""Folders that one program at a time may work in, also when programs are killed."""

import os
import signal
from pathlib import Path

import pytest

from prototree import locks
from prototree.errors import ConfigError
from prototree.locks import file_lock, lock_folder, try_file_lock


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


def test_a_file_that_another_holds_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.lock"
    for _ in range(2):
        with try_file_lock(path) as first, try_file_lock(path) as second:
            assert (first, second) == (True, False)
        assert not path.exists()


def test_without_locks_the_folder_is_made_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)  # as on Windows
    with file_lock(tmp_path / "one" / "file.lock"):
        assert (tmp_path / "one").is_dir()
    with try_file_lock(tmp_path / "two" / "file.lock") as is_ours:
        assert is_ours
        assert (tmp_path / "two").is_dir()

"""Advisory locks on files and folders (flock), for work that one program at a time may do.

A lock goes with the process that holds it, however that ends; copies of the process, such as loader workers, do not
hold it. Where the system or the disk knows no locks, everybody may go on.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prototree.errors import ConfigError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

_folders: set[int] = set()  # descriptors of the folders that this process holds


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep every other program from working in a run's folder; if one is at work there, that is an error at once."""
    release = hold_folder(folder)
    try:
        yield
    finally:
        release()


def hold_folder(folder: Path) -> Callable[[], None]:
    """Lock a folder as `lock_folder` does; returns the function that releases it, which may be called twice."""
    if fcntl is None:
        return lambda: None
    descriptor = os.open(folder, os.O_RDONLY)
    if not _flock(descriptor, wait=False):
        os.close(descriptor)
        raise ConfigError(
            f"another prototree is at work in {folder}; wait until it has ended, or choose another folder"
        )
    _folders.add(descriptor)

    def release() -> None:
        if descriptor in _folders:
            _folders.discard(descriptor)
            os.close(descriptor)

    return release


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a lock file, which is made for that and removed afterwards; waits until nobody else holds it."""
    with _lock_file(path, wait=True):
        yield


@contextmanager
def try_file_lock(path: Path) -> Iterator[bool]:
    """Hold a lock file unless another program does; whether we hold it."""
    with _lock_file(path, wait=False) as is_ours:
        yield is_ours


@contextmanager
def _lock_file(path: Path, *, wait: bool) -> Iterator[bool]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield True
        return
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        is_ours = _flock(descriptor, wait=wait)
        with suppress(FileNotFoundError):  # who held it before has removed the file under this name
            if not is_ours or os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break
        os.close(descriptor)
    try:
        yield is_ours
    finally:
        if is_ours:
            path.unlink(missing_ok=True)  # while it is held, so that nobody holds one without a name
        os.close(descriptor)


def _flock(descriptor: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # some network disks know no locks
        pass
    return True


def _close_inherited() -> None:
    """In a forked child, which may live on for a while when its parent is killed."""
    for descriptor in _folders:
        os.close(descriptor)
    _folders.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)

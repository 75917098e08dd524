"""Files and folders that one program at a time may change, where the system knows locks. No torch here.

A lock goes with the process that holds it, however that ends: nothing stays that a later one would have to judge.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from prototree.errors import ConfigError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

_held: set[int] = set()  # descriptors of folders that this process holds


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keeps every other program from working in a run's folder; if one is at work there, that is an error at once."""
    release = hold(folder)
    try:
        yield
    finally:
        release()


def hold(folder: Path) -> Callable[[], None]:
    """Lock a folder as `held` does; returns the function that releases it, which may be called twice."""
    if fcntl is None:
        return lambda: None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"another prototree is at work in {folder}; wait until it has ended, or choose another folder"
        ) from None
    except OSError:  # some network disks know no locks
        pass
    _held.add(descriptor)

    def release() -> None:
        if descriptor in _held:
            _held.discard(descriptor)
            os.close(descriptor)

    return release


@contextlib.contextmanager
def waited_for(path: Path) -> Iterator[None]:
    """Holds a file, which is made for that and then taken away, once other programs no longer do."""
    with _held_file(path, 0):
        yield


@contextlib.contextmanager
def if_free(path: Path) -> Iterator[bool]:
    """The same without waiting: whether we hold it, or another program does."""
    with _held_file(path, getattr(fcntl, "LOCK_NB", 0)) as is_ours:
        yield is_ours


@contextlib.contextmanager
def _held_file(path: Path, flags: int) -> Iterator[bool]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield True
        return
    lock = _locked(path, flags)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            path.unlink(missing_ok=True)  # while it is held, so that nobody holds one without a name
            os.close(lock)


def _locked(path: Path, flags: int) -> int | None:
    """A file that we alone hold, and that still has its name: who held it before has taken the old one away."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | flags)
        except BlockingIOError:
            os.close(lock)
            return None
        except OSError:  # some network disks know no locks
            pass
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        os.close(lock)


def _let_go() -> None:
    """In a copy of this process, such as one that reads photos: it may live on for a while when this one is killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)

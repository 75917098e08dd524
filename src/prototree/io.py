"""Limited reads, atomic writes, JSON with checksums, file locks, and the cache directory. No pickle."""

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from prototree.errors import CheckpointError, ConfigError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

MAX_TEXT_BYTES = 256 * 2**20  # of a JSON or text file; none is written that could not be read again
CHECKSUM = "sha256"  # in a JSON object: of its content
DIGESTS = "files_sha256"  # in a list of files: the SHA-256 of each

_INDENTED_BYTES = 2**20  # longer files are for programs alone: no line breaks, and a fast writer
_LONGEST_NAME = 200  # bytes of a name that others are made from; file systems take 255
_TEMPORARY = re.compile(r"\..+\.(?:(?P<file>\d+)\.tmp|partial-(?P<folder>\d+)(?:-\w+)?)")  # with its process
_preparing: set[Path] = set()  # folders of other threads of this process
_locked: set[int] = set()  # descriptors of the folders that this process holds


# ---- reading within limits -------------------------------------------------------------------------------------------


def check_regular(status: os.stat_result, limit: int) -> None:
    """Refuse what is no regular file or has more than `limit` bytes, as an `OSError`."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
    if status.st_size > limit:
        raise OSError(errno.EFBIG, f"it has {amount(status.st_size)}, at most {amount(limit)} are read")


def open_regular(path: Path | str, limit: int) -> BufferedReader:
    """Open a regular file of at most `limit` bytes; never waits for a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        check_regular(os.fstat(descriptor), limit)
    except OSError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def read_regular(path: Path | str, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes; anything else is an `OSError` that says what it is."""
    with open_regular(path, limit) as file:
        content = file.read(limit + 1)
    if len(content) > limit:  # it grows while it is read
        raise OSError(errno.EFBIG, f"it is larger than {amount(limit)}")
    return content


def file_digest(path: Path) -> str:
    """SHA-256 of a file of any size."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def amount(n_bytes: int) -> str:
    """A number of bytes, in words."""
    return f"{n_bytes / 2**20:,.0f} MiB" if n_bytes >= 2**20 else f"{n_bytes:,} bytes"


# ---- atomic writes ---------------------------------------------------------------------------------------------------


def make_folder(folder: Path) -> None:
    """Make a folder to write into, with those above it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"the folder {folder} cannot be made ({error.strerror}); choose another place to write to"
        ) from error


def write_file(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Replace a file atomically: temporary file, fsync, rename. Without `sync` for derived files, verified on read."""
    with replacing(path, sync=sync) as file:
        file.write(content)


@contextmanager
def replacing(path: Path, waiting: Path | None = None, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """A file to write to that takes the place of `path` when all is written.

    After an error it is removed, unless it was to stay under a name of the caller's choice, `waiting`.
    """
    temporary = waiting or path.with_name(f".{_bounded(path.name)}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if waiting is None:
            with contextlib.suppress(OSError):  # in a folder that is gone or read-only there is none
                temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            message = f"{path} could not be written ({error.strerror}); what was there is unchanged"
            raise CheckpointError(message) from error
        raise
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a loss of power, where the file system can."""
    with contextlib.suppress(OSError):  # the rename has happened, and callers must not believe otherwise
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def prepared_beside(path: Path) -> Iterator[Path]:
    """A folder beside `path` in which it is prepared, gone afterwards; those of killed processes go first."""
    make_folder(path.parent)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path)
    except OSError as error:  # a name that the file system cannot hold, before anything long is done for it
        raise CheckpointError(f"{path} cannot be written ({error.strerror}); choose another name") from error
    name = _bounded(path.name)
    remove_leftovers(set(path.parent.glob(f".{glob.escape(name)}.*")) - _preparing)
    folder = Path(tempfile.mkdtemp(prefix=f".{name}.partial-{os.getpid()}-", dir=path.parent))
    _preparing.add(folder)
    try:
        yield folder
    finally:
        _preparing.discard(folder)
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(paths: Iterable[Path]) -> None:
    """Remove those of some files and folders that are temporary and belong to a process that no longer runs."""
    for path in list(paths):
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or _is_running(int(match["file"] or match["folder"])):
            continue
        if match["folder"]:
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    """Whether another process has this number now; this one has nothing to keep when it begins."""
    if process == os.getpid():
        return False
    with contextlib.suppress(PermissionError, OverflowError):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
    return True


def _bounded(name: str) -> str:
    """The name, or for a long one its digest: a temporary name is longer than the one it stands for."""
    return name if len(os.fsencode(name)) <= _LONGEST_NAME else _sha256(os.fsencode(name))


# ---- JSON with a checksum --------------------------------------------------------------------------------------------


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically, with a checksum of its content that `read_json` verifies."""
    write_file(path, _json_text(path, content))


def read_json(path: Path, *, by_hand: bool = False) -> dict[str, Any]:
    """Read what `write_json` wrote: an object of bounded size whose checksum is right, without the checksum.

    What people may write `by_hand` needs no checksum; one that is there has to be right all the same.
    """
    try:
        text = read_regular(path, MAX_TEXT_BYTES)
    except OSError as error:
        raise CheckpointError(f"expected a JSON file, but {path} cannot be read ({error.strerror})") from error
    content = parse_json(text, str(path))
    checksum = content.pop(CHECKSUM, None)
    if checksum is None and not by_hand:
        raise CheckpointError(
            f"{path} has no checksum: it is damaged, or another version of prototree wrote it; restore it from a copy, "
            "or make it again with this version"
        )
    if checksum not in (None, _checksum(content)):
        raise CheckpointError(
            f"{path} is damaged or was changed by hand: its content does not have its checksum ({CHECKSUM}); restore "
            "it from a copy"
        )
    return content


def parse_json(text: bytes, name: str) -> dict[str, Any]:
    """The JSON object in a text; `name` is what messages call it."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged ({error}); restore it from a copy") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} is damaged: expected a JSON object, got {type(content).__name__}")
    return content


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add the checksum of a JSON object to it, so that a single changed bit is noticed."""
    content = {key: value for key, value in content.items() if key != CHECKSUM}
    return {**content, CHECKSUM: _checksum(json.loads(json.dumps(content)))}  # as it will be read


def expect_version(content: dict[str, Any], version: int, path: Path | str) -> dict[str, Any]:
    """The same content, if it has a format version that this program reads; without one it is of the first."""
    found = content.get("version", 1)
    if type(found) is not int or not 1 <= found <= version:
        raise CheckpointError(
            f"{path} has format version {found!r}, this program reads up to {version}; it was written by another "
            "version of prototree: use that one, or make it again with this one"
        )
    return content


def _json_text(path: Path, content: Mapping[str, Any]) -> bytes:
    content = with_checksum(content)
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    if len(text.encode(errors="surrogatepass")) < _INDENTED_BYTES:  # a file's name need not be UTF-8
        text = json.dumps(content, indent=1, ensure_ascii=False)
    encoded = text.encode(errors="surrogatepass")
    if len(encoded) > MAX_TEXT_BYTES:
        raise CheckpointError(
            f"{path} would have {amount(len(encoded))}, at most {amount(MAX_TEXT_BYTES)} can be read again; "
            "what was there is unchanged"
        )
    return encoded


def _checksum(content: Mapping[str, Any]) -> str:
    return _sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# ---- a folder of files and the list of them --------------------------------------------------------------------------


def write_listed(
    folder: Path,
    members: Mapping[str, bytes],
    name: str,
    content: Mapping[str, Any],
    *,
    digests: Mapping[str, str] | None = None,
    sync: bool = True,
) -> None:
    """Write files of a folder and a JSON list with their digests, which is there only while it is right.

    `digests` are those of files that stay. All that is new is written beside the folder first and then moved, so that
    a full disk changes nothing.
    """
    listed = {**(digests or {}), **{member: _sha256(wanted) for member, wanted in members.items()}}
    text = _json_text(folder / name, {**content, DIGESTS: listed})
    new = [member for member, wanted in members.items() if not _holds(folder / member, wanted)]
    if not new and _holds(folder / name, text):
        return
    with prepared_beside(folder) as waiting:
        make_folder(folder)
        for member in new:
            write_file(waiting / member, members[member], sync=sync)
        write_file(waiting / name, text)
        try:
            (folder / name).unlink(missing_ok=True)
            for member in (*new, name):
                os.replace(waiting / member, folder / member)
        except OSError as error:
            raise CheckpointError(f"{folder} could not be written ({error.strerror}); try again") from error
    sync_folder(folder)


def read_listed(folder: Path, listed: Mapping[str, Any], member: str) -> bytes:
    """Read a file that a list written by `write_listed` names, and verify its digest."""
    path = folder / member
    try:
        content = read_regular(path, MAX_TEXT_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    if _sha256(content) != listed.get(DIGESTS, {}).get(member):
        raise CheckpointError(f"{path} is damaged: it is not the file that was listed; restore it from a copy")
    return content


def _holds(path: Path, content: bytes) -> bool:
    """Whether exactly this is in a file."""
    with contextlib.suppress(OSError):
        return read_regular(path, len(content)) == content
    return False


# ---- locks (flock): they go with the process, however it ends; where the disk knows none, everybody may go on --------


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep every other program from working in a run's folder; if one is at work there, that is an error at once."""
    with contextlib.ExitStack() as stack:
        stack.callback(hold_folder(folder))
        yield


def hold_folder(folder: Path) -> Callable[[], None]:
    """Lock a folder as `lock_folder` does; returns the function that releases it, which may be called twice."""
    if fcntl is None:
        return lambda: None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(
            f"another prototree is at work in {folder}; wait until it has ended, or choose another folder"
        ) from error
    _locked.add(descriptor)

    def release() -> None:
        if descriptor in _locked:
            _locked.discard(descriptor)
            os.close(descriptor)

    return release


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a lock file, which is made for that and removed afterwards; waits until nobody else holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        _flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):  # who held it before has removed the file under this name
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held, so that nobody holds one without a name
        os.close(descriptor)


def _flock(descriptor: int, operation: int) -> None:
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:  # some network disks know no locks
        if isinstance(error, BlockingIOError):
            raise


def _release_inherited() -> None:
    """A forked child, such as a loader worker, holds no lock: it may live on when its parent is killed."""
    for descriptor in _locked:
        os.close(descriptor)
    _locked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_inherited)


# ---- the cache -------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where we may keep what can be computed again: `$PROTOTREE_CACHE`, or the platform's place for caches."""
    if chosen := os.environ.get("PROTOTREE_CACHE"):
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "prototree"

"""Files that are replaced atomically, and files from outside that are read within limits. No torch here, and no pickle
anywhere."""

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

from prototree.errors import CheckpointError

MAX_TEXT_BYTES = 256 * 2**20
MAX_JSON_BYTES = MAX_TEXT_BYTES
"""What is written is never more than what is read again."""

_INDENTED_BYTES = 2**20  # longer files are for programs alone: no line breaks, and a fast writer
CHECKSUM = "sha256"


def read_regular(path: Path | str, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes; anything else is an `OSError` that says what it is.

    A pipe or a device is never waited for.
    """
    with open_regular(path, limit) as file:
        content = file.read(limit + 1)
    if len(content) > limit:  # it grows while it is read
        raise OSError(errno.EFBIG, f"it is larger than {_size(limit)}")
    return content


def open_regular(path: Path | str, limit: int) -> io.BufferedReader:
    """The same file, open for reading."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        check_regular(os.fstat(descriptor), limit)
    except OSError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def check_regular(status: os.stat_result, limit: int) -> None:
    """Refuses what is no regular file or too large, as an `OSError`."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
    if status.st_size > limit:
        raise OSError(errno.EFBIG, f"it has {_size(status.st_size)}, at most {_size(limit)} are read")


def make_folder(folder: Path) -> None:
    """A folder to write into, with those above it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"the folder {folder} cannot be made ({error.strerror}); choose another place to write to"
        ) from error


def write_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically: temporary file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # in a folder that is gone or read-only there is none
            temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path} could not be written ({error.strerror}); what was there is unchanged") from error
    sync_folder(path.parent)


def write_json(path: Path, content: Any) -> None:
    """Replaces a JSON file atomically."""
    text = _encoded(json.dumps(content, separators=(",", ":"), ensure_ascii=False))
    if len(text) < _INDENTED_BYTES:
        text = _encoded(json.dumps(content, indent=1, ensure_ascii=False))
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path} would have {_size(len(text))}, at most {_size(MAX_JSON_BYTES)} can be read again; "
            "what was there is unchanged"
        )
    write_file(path, text)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of bounded size."""
    try:
        text = read_regular(path, MAX_JSON_BYTES)
    except OSError as error:
        raise CheckpointError(f"expected a JSON file, but {path} cannot be read ({error.strerror})") from error
    return parse_json(text, str(path))


def parse_json(text: bytes, name: str) -> dict[str, Any]:
    """The JSON object in a text; `name` is what messages call it."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged ({error}); restore it from a copy") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} is damaged: expected a JSON object, got {type(content).__name__}")
    return content


def expect_version(content: dict[str, Any], newest: int, path: Path | str) -> dict[str, Any]:
    """The same content, if this program knows its format; one that does not name its version is of the first."""
    version = content.get("version", 1)
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{path} is damaged: expected a format version from 1 to {newest}, got {version!r}")
    if version > newest:
        raise CheckpointError(
            f"{path} has format version {version}, this program reads up to {newest}; it was written by a newer "
            "prototree: update this one (pip install --upgrade prototree)"
        )
    return content


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with its own checksum, so that a single changed bit is noticed."""
    return {**content, CHECKSUM: _checksum(content)}


def is_intact(content: dict[str, Any]) -> bool:
    """Whether an object is what `sealed` gave."""
    return bool(content.get(CHECKSUM) == _checksum(content))


def _checksum(content: dict[str, Any]) -> str:
    own = {key: value for key, value in content.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(own, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder last through a loss of power, where the file system can.

    Where it cannot, that is no error: the rename has happened, and nobody may believe that it has not.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # a file's name need not be UTF-8


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB" if n_bytes >= 2**20 else f"{n_bytes:,} bytes"

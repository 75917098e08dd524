"""Files that are replaced atomically, JSON of bounded size, where caches lie. No torch here, and no pickle anywhere."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from prototree.errors import CheckpointError

MAX_JSON_BYTES = 64 * 2**20
_TEMPORARY = re.compile(
    r"\..+\.(?:(?P<file>\d+)\.tmp|partial-(?P<folder>\d+)(?:-\w+)?)"
)  # with the process that made it


def write_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically: temporary file, fsync, rename."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path, waiting: Path | None = None) -> Iterator[IO[bytes]]:
    """A file to write to that takes the place of `path` when all is written.

    What goes wrong takes it away again, unless it was to wait under a name of the caller's choice.
    """
    temporary = waiting or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if waiting is None:
            temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path} could not be written ({error.strerror}); what was there is unchanged") from error
    except BaseException:
        if waiting is None:
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_leftovers(paths: Iterable[Path]) -> None:
    """Removes those of some files and folders that are temporary and belong to a process that no longer runs."""
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
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def write_json(path: Path, content: Any) -> None:
    """Replaces a JSON file atomically."""
    write_file(path, json.dumps(content, indent=1, ensure_ascii=False).encode())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of bounded size."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB; expected a description of a tree")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"expected a saved tree, but {path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); restore it from a copy") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: expected a JSON object, got {type(content).__name__}")
    return content


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


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder last through a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

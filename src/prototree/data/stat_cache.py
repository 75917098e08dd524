"""What is known about files, kept in the platform's cache folder, so that the next scan is fast.

Each row of a table begins with the length and the time of change of its file; if one differs, the row is ignored.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prototree.data.images import MAX_BYTES
from prototree.errors import CheckpointError
from prototree.files import cache_folder, open_regular, remove_leftovers, write_file

logger = logging.getLogger(__name__)

SETTLED = 2 * 10**9  # nanoseconds since a file changed: sooner, a second change may go by the same tick of the clock
THREADS = 8  # more than cores: on a slow or remote disk they mostly wait
_VERSION = 1

Row = list[int | str]


def table_of(kind: str, folder: Path) -> Path:
    """The file that keeps what is known about the files of a folder."""
    name = hashlib.blake2b(str(folder.resolve()).encode(errors="surrogatepass"), digest_size=12).hexdigest()
    return cache_folder() / kind / f"{name}.json"


def read_table(file: Path) -> dict[str, Row]:
    try:
        content = json.loads(file.read_bytes())
        if content["version"] != _VERSION:
            return {}
        return {str(key): list(row) for key, row in content["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}  # missing, damaged or of another version: look again


def write_table(file: Path, rows: Mapping[str, Row]) -> None:
    """All or nothing, so that a kill leaves the old table; where it cannot be written, the next time is slower."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(file.parent.glob(".*"))
        write_file(file, json.dumps({"version": _VERSION, "files": rows}).encode())
    except (OSError, CheckpointError) as error:
        logger.debug("what is known about these files could not be kept in %s: %s", file, error)


def photo_digests(paths: Iterable[Path]) -> dict[Path, str]:
    """A digest of the bytes of each file, which says what it holds wherever it lies and whenever it was copied."""
    by_folder: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(paths):
        by_folder.setdefault(path.parent, []).append(path)
    found: dict[Path, str] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        for folder, own in by_folder.items():
            found |= _digests(pool, folder, own)
    return found


def _digests(pool: ThreadPoolExecutor, folder: Path, paths: Sequence[Path]) -> dict[Path, str]:
    """Of files of one folder, with the table that is kept for it."""
    file = table_of("digests", folder)
    before = read_table(file)

    def look(path: Path) -> Row:
        try:
            status = os.stat(path)
            # The last is set by the system, so that a photo replaced by one of the same length and time is read again.
            stamp: Row = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
            known = before.get(path.name, [])
            if known[:-1] == stamp:
                return known
            with open_regular(path, MAX_BYTES) as opened:
                digest = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        except (OSError, ValueError):  # a path with a zero byte is a ValueError
            return [f"unreadable {path}"]
        return [*stamp, digest]

    rows, now = dict(zip(paths, pool.map(look, paths), strict=True)), time.time_ns()
    after = {path.name: row for path, row in rows.items() if len(row) == 4 and now - int(row[2]) >= SETTLED}
    if any(before.get(name) != row for name, row in after.items()):
        write_table(file, before | after)
    return {path: str(row[-1]) for path, row in rows.items()}

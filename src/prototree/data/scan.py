"""Scan the headers of all files once, so that a bad one is found before hours of training; digests of files.

A file that is missing, empty, no image or too large is left out and listed as `Unreadable`. Sizes of images and digests
of files are cached per folder, by file size and modification time, so that the next scan only asks the file system.
Unreadable files are scanned each time, since they may have become readable without changing.
"""

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prototree.backbones.geometry import Size
from prototree.data.dataset import ImageData, Sample, Unreadable
from prototree.data.images import MAX_BYTES, check_header, load_image
from prototree.errors import CheckpointError, DataError
from prototree.io import cache_folder, check_regular, open_regular, remove_leftovers, write_file

logger = logging.getLogger(__name__)

THREADS = 8  # more than cores: on a slow or remote disk they mostly wait
SETTLED = 2 * 10**9  # nanoseconds: younger files may change again within one mtime tick, so they are not cached
_SHOWN = 5  # files named in one message
_VERSION = 1

Row = list[int | str]
"""What is cached about a file: its length, its modification time, and what was learnt."""


def scan_files(data: ImageData, *, strict: bool = False, deep: bool = False) -> ImageData:
    """Fill in image sizes, clip boxes to their images, and move unusable files to `unreadable`.

    With `deep` every image is decoded, so that one that breaks off in the middle is found too.
    """
    table = cache_file("scan", data.root)
    before = read_table(table)

    def scan(sample: Sample) -> Row | Unreadable:
        try:
            status = os.stat(sample.path)
            check_regular(status, MAX_BYTES)
            stamp: Row = [status.st_size, status.st_mtime_ns]
            row = before.get(_key(sample, data.root), [])
            if not deep and row[:2] == stamp and len(row) == 4 and all(isinstance(value, int) for value in row):
                return row
            return [*stamp, *(load_image(sample.path).size if deep else check_header(sample.path))]
        except DataError as error:
            return Unreadable(sample.path, str(error))
        except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
            return Unreadable(sample.path, f"{sample.path} cannot be opened: {getattr(error, 'strerror', error)}")

    splits = (data.train, data.test, data.validation_split)
    samples = [sample for split in splits for sample in split]
    with ThreadPoolExecutor(THREADS) as pool:
        results = dict(zip(samples, pool.map(scan, samples), strict=True))
    unreadable = tuple(result for result in results.values() if isinstance(result, Unreadable))
    rows = {sample: result for sample, result in results.items() if isinstance(result, list)}
    after = {_key(sample, data.root): row for sample, row in rows.items()}
    if after != before:
        write_table(table, after)
    if strict and unreadable:
        raise DataError(
            f"{describe_unreadable(data.root, unreadable)}\n"
            "repair or remove such files, or open the data without strict to skip them"
        )
    sized = {sample: _with_size(sample, (int(row[2]), int(row[3]))) for sample, row in rows.items()}
    train, test, validation = (tuple(sized[sample] for sample in split if sample in sized) for split in splits)
    unreadable = data.unreadable + unreadable
    return dataclasses.replace(data, train=train, test=test, validation_split=validation, unreadable=unreadable)


def _key(sample: Sample, root: Path) -> str:
    path, folder = str(sample.path), str(root)
    return path[len(folder) + 1 :] if path.startswith(folder + os.sep) else path


def _with_size(sample: Sample, size: Size) -> Sample:
    box = sample.box.clip(size) if sample.box is not None else None
    if box is not None and min(box.width, box.height) <= 0:
        logger.warning("%s: its box lies outside the image of %d x %d and is not used", sample.path, *size)
        box = None
    return dataclasses.replace(sample, size=size, box=box)


def describe_unreadable(root: Path, unreadable: Sequence[Unreadable]) -> str:
    """How many files cannot be used, and the first of them."""
    shown = "\n".join(file.reason for file in unreadable[:_SHOWN])
    more = f"\n… and {len(unreadable) - _SHOWN} more" if len(unreadable) > _SHOWN else ""
    return f"{len(unreadable)} file{'s' * (len(unreadable) > 1)} of {root} cannot be used:\n{shown}{more}"


def file_digests(paths: Iterable[Path]) -> dict[Path, str]:
    """A digest of the bytes of each file, which says what it holds wherever it lies and whenever it was copied."""
    folders: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(paths):
        folders.setdefault(path.parent, []).append(path)
    digests: dict[Path, str] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        for folder, files in folders.items():
            table = cache_file("digests", folder)
            before = read_table(table)
            rows, now = list(pool.map(_digest, files, (before.get(path.name, []) for path in files))), time.time_ns()
            digests |= {path: str(row[-1]) for path, row in zip(files, rows, strict=True)}
            settled = {
                path.name: row
                for path, row in zip(files, rows, strict=True)
                if len(row) == 4 and now - int(row[2]) >= SETTLED
            }
            if any(before.get(name) != row for name, row in settled.items()):
                write_table(table, before | settled)
    return digests


def _digest(path: Path, before: Row) -> Row:
    """Length, mtime, ctime and digest of a file: what is cached, if the first three are the same."""
    try:
        status = os.stat(path)
        # ctime is set by the system, so that an image replaced by one of the same length and mtime is read again.
        stamp: Row = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        if before[:-1] == stamp:
            return before
        with open_regular(path, MAX_BYTES) as file:
            return [*stamp, hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()]
    except (OSError, ValueError):  # a path with a zero byte is a ValueError
        return [f"unreadable {path}"]


def cache_file(kind: str, folder: Path) -> Path:
    """The file in the user's cache that keeps what is known about the files of a folder."""
    name = hashlib.blake2b(str(folder.resolve()).encode(errors="surrogatepass"), digest_size=12).hexdigest()
    return cache_folder() / kind / f"{name}.json"


def read_table(file: Path) -> dict[str, Row]:
    """Read a cached table; empty if it is missing, damaged or of another version."""
    try:
        content = json.loads(file.read_bytes())
        rows = content["files"].items() if content["version"] == _VERSION else ()
        return {str(key): list(row) for key, row in rows}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def write_table(file: Path, rows: Mapping[str, Row]) -> None:
    """Replace a cached table atomically; where it cannot be written, the next scan is slower."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(file.parent.glob(".*"))
        write_file(file, json.dumps({"version": _VERSION, "files": rows}).encode())
    except (OSError, CheckpointError) as error:
        logger.debug("what is known about these files could not be kept in %s: %s", file, error)

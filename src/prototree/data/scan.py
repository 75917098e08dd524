"""Looks at the head of every file once, so that a bad one is found before hours of training and not during
them.

A file that is missing, empty, no image or too large is left out and listed as a `Problem`. What was learnt
about the good ones (their size in pixels) is kept in a cache, by path, file size and time of change, so that
the next look only asks the file system. Bad files are looked at each time, since they may have become
readable without changing.
"""

import dataclasses
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from prototree.backbones.geometry import Size
from prototree.data.dataset import ImageData, Problem, Sample
from prototree.data.images import MAX_BYTES, check_header, read_photo
from prototree.data.stat_cache import THREADS, Row, read_table, table_of, write_table
from prototree.errors import DataError
from prototree.files import check_regular

logger = logging.getLogger(__name__)

_SHOWN = 5  # problems named in one message


@dataclass(frozen=True)
class _Known:
    """What the cache remembers of a file: its length and time of change, and the upright size of its picture."""

    length: int
    changed: int
    size: Size

    @classmethod
    def from_json(cls, row: Row) -> "_Known":
        length, changed, width, height = map(int, row)
        return cls(length, changed, (width, height))

    def to_json(self) -> Row:
        return [self.length, self.changed, *self.size]


def scan_files(data: ImageData, *, strict: bool = False, deep: bool = False) -> ImageData:
    """The data set with sizes filled in, boxes clipped to their photos, and unusable files moved to `problems`.

    With `deep` every photo is decoded, so that one that breaks off in the middle is found too.
    """
    table = table_of("scan", data.root)
    before = _known(table)
    samples = data.train + data.test + data.validation
    after: dict[str, _Known] = {}
    problems: list[Problem] = []
    sized: list[Sample | None] = []
    for sample, found in zip(samples, _look(samples, data.root, before, deep), strict=True):
        if isinstance(found, Problem):
            problems.append(found)
            sized.append(None)
        else:
            after[_key(sample, data.root)] = found
            sized.append(_with_size(sample, found.size))
    if after != before:
        write_table(table, {key: value.to_json() for key, value in after.items()})
    if strict and problems:
        raise DataError(
            f"{in_words(data.root, problems)}\n"
            "repair or remove such files, or open the data without strict to skip them"
        )
    parts, start = [], 0
    for split in (data.train, data.test, data.validation):
        parts.append(tuple(sample for sample in sized[start : start + len(split)] if sample is not None))
        start += len(split)
    return dataclasses.replace(
        data,
        train=parts[0],
        test=parts[1],
        validation=parts[2],
        problems=data.problems + tuple(problems),
    )


def _known(table: Path) -> dict[str, _Known]:
    try:
        return {key: _Known.from_json(row) for key, row in read_table(table).items()}
    except (ValueError, TypeError):
        return {}  # damaged: look again


def _look(samples: Sequence[Sample], root: Path, before: dict[str, _Known], deep: bool) -> list[_Known | Problem]:
    def look(sample: Sample) -> _Known | Problem:
        try:
            status = os.stat(sample.path)
            check_regular(status, MAX_BYTES)
        except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
            return Problem(sample.path, f"{sample.path} cannot be opened: {getattr(error, 'strerror', error)}")
        known = before.get(_key(sample, root))
        if not deep and known is not None and (known.length, known.changed) == (status.st_size, status.st_mtime_ns):
            return known
        try:
            size = read_photo(sample.path).size if deep else check_header(sample.path)
            return _Known(status.st_size, status.st_mtime_ns, size)
        except DataError as error:
            return Problem(sample.path, str(error))

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(look, samples))


def _key(sample: Sample, root: Path) -> str:
    path, folder = str(sample.path), str(root)
    return path[len(folder) + 1 :] if path.startswith(folder + os.sep) else path


def _with_size(sample: Sample, size: Size) -> Sample:
    box = sample.box.clip(size) if sample.box is not None else None
    if box is not None and min(box.width, box.height) <= 0:
        logger.warning("%s: its box lies outside the photo of %d x %d and is not used", sample.path, *size)
        box = None
    return dataclasses.replace(sample, size=size, box=box)


def in_words(root: Path, problems: Sequence[Problem]) -> str:
    """How many files cannot be used, and the first of them."""
    shown = "\n".join(problem.reason for problem in problems[:_SHOWN])
    more = f"\n… and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    files = "file" if len(problems) == 1 else "files"
    return f"{len(problems)} {files} of {root} cannot be used:\n{shown}{more}"

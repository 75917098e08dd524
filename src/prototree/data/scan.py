"""Looks at the head of every file once, so that a bad one is found before hours of training and not during
them.

A file that is missing, empty, no image or too large is left out and listed as a `Problem`. What was learnt
about the good ones (their size in pixels) is kept in a cache, by path, file size and time of change, so that
the next look only asks the file system. Bad files are looked at each time, since they may have become
readable without changing.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from prototree.data.images import check_header
from prototree.data.samples import ImageData, Problem, Sample
from prototree.errors import CheckpointError, DataError
from prototree.files import cache_folder, remove_leftovers, write_file
from prototree.network.geometry import Size

logger = logging.getLogger(__name__)

_VERSION = 1
_THREADS = 8  # more than cores: on a slow or remote disk they mostly wait
_SHOWN = 5  # problems named in one message


@dataclass(frozen=True)
class _Known:
    """What the cache remembers of a file: its length and time of change, and the upright size of its picture."""

    length: int
    changed: int
    size: Size

    @classmethod
    def from_json(cls, values: list[int]) -> "_Known":
        length, changed, width, height = map(int, values)
        return cls(length, changed, (width, height))

    def to_json(self) -> list[int]:
        return [self.length, self.changed, *self.size]


def scan_files(data: ImageData, *, strict: bool = False) -> ImageData:
    """The data set with sizes filled in, boxes clipped to their photos, and unusable files moved to `problems`."""
    cache_file = _cache_file(data.root)
    before = _read_cache(cache_file)
    samples = data.train + data.test
    after: dict[str, _Known] = {}
    problems: list[Problem] = []
    sized: list[Sample | None] = []
    for sample, found in zip(samples, _look(samples, data.root, before), strict=True):
        if isinstance(found, Problem):
            problems.append(found)
            sized.append(None)
        else:
            after[_key(sample, data.root)] = found
            sized.append(_with_size(sample, found.size))
    if after != before:
        _write_cache(cache_file, after)
    _report(data.root, problems, strict=strict)
    n_train = len(data.train)
    return dataclasses.replace(
        data,
        train=tuple(sample for sample in sized[:n_train] if sample is not None),
        test=tuple(sample for sample in sized[n_train:] if sample is not None),
        problems=data.problems + tuple(problems),
    )


def _look(samples: Sequence[Sample], root: Path, before: dict[str, _Known]) -> list[_Known | Problem]:
    def look(sample: Sample) -> _Known | Problem:
        try:
            status = os.stat(sample.path)
        except OSError as error:
            return Problem(sample.path, f"{sample.path} cannot be opened: {error.strerror or error}")
        known = before.get(_key(sample, root))
        if known is not None and (known.length, known.changed) == (status.st_size, status.st_mtime_ns):
            return known
        try:
            return _Known(status.st_size, status.st_mtime_ns, check_header(sample.path))
        except DataError as error:
            return Problem(sample.path, str(error))

    with ThreadPoolExecutor(_THREADS) as pool:
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


def _report(root: Path, problems: Sequence[Problem], *, strict: bool) -> None:
    if not problems:
        return
    shown = "\n".join(problem.reason for problem in problems[:_SHOWN])
    more = f"\n… and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    text = f"{len(problems)} files of {root} cannot be used:\n{shown}{more}"
    if strict:
        raise DataError(f"{text}\nmend or remove them, or open the data without strict to leave them out")
    logger.warning("%s\nthey are left out", text)


def _cache_file(root: Path) -> Path:
    name = hashlib.blake2b(str(root.resolve()).encode(), digest_size=12).hexdigest()
    return cache_folder() / "scan" / f"{name}.json"


def _read_cache(file: Path) -> dict[str, _Known]:
    try:
        content = json.loads(file.read_bytes())
        if content["version"] != _VERSION:
            return {}
        return {key: _Known.from_json(values) for key, values in content["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}  # missing, damaged or of another version: look again


def _write_cache(file: Path, known: dict[str, _Known]) -> None:
    """All or nothing, so that a kill leaves the old cache; where it cannot be written, the next time is slower."""
    content = {"version": _VERSION, "files": {key: value.to_json() for key, value in known.items()}}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(file.parent.glob(".*"))
        write_file(file, json.dumps(content).encode())
    except (OSError, CheckpointError) as error:
        logger.debug("the scan of this data set could not be cached in %s: %s", file, error)

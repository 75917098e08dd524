"""Maps computed into files: every photo is decoded once for all its views, by all processes, and a kill leaves nothing
half-made.

A file gets its name only when it is complete, with a description beside it that has its SHA-256 and says which entries
could not be read. Both are verified when a process first uses the file; a damaged one is computed again.
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prototree.core.fields import Name, integer, list_of, record, wrong
from prototree.data.loading import Batch, Loader, ViewDataset, photo_loader
from prototree.errors import CheckpointError, DataError, TrainError
from prototree.features.registry import alone
from prototree.files import amount, file_digest, make_folder, read_json, write_json
from prototree.training import distributed

log = logging.getLogger(__name__)

VERSION = 1
KINDS = {".f16": np.float16, ".f32": np.float32}
_VIEWS_AT_ONCE = 32

Tick = Callable[[int, int], None]
"""Called with how many of how many items are done."""

Made = Iterator[tuple[int, list[int], Tensor]]
"""Variant, rows, counted over all files one after the other, and the map of each."""


@dataclass(frozen=True)
class MapFile:
    """A file of maps: V variants × entries × map."""

    path: Path
    shape: tuple[int, ...]

    @property
    def description(self) -> Path:
        return self.path.with_suffix(".json")

    @property
    def temporary(self) -> Path:
        return self.path.with_suffix(".partial")

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[2:])) * np.dtype(KINDS[self.path.suffix]).itemsize

    @property
    def n_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.row_bytes

    @property
    def is_complete(self) -> bool:
        """Whether it is there, whole and undamaged; else it is made again."""
        if not (self.path.exists() and self.description.exists()):
            return False
        try:
            expected, status = self._described()["sha256_maps"], self.path.stat()
            if status.st_size != self.n_bytes or _digest_of(self.path, status.st_size, status.st_mtime_ns) != expected:
                raise CheckpointError(f"{self.path} does not have the content that was written")
        except (CheckpointError, OSError) as error:
            log.warning("cached feature maps are computed again: %s", error)
            return False
        return True

    def unreadable(self) -> frozenset[int]:
        """The entries that could not be read, as the description beside it says."""
        return frozenset(self._described()["unreadable"])

    def describe(self, unreadable: Sequence[int]) -> None:
        """Write the description, which makes the file complete."""
        content = {"version": VERSION, "unreadable": list(unreadable), "sha256_maps": file_digest(self.path)}
        write_json(self.description, content)

    def _described(self) -> dict[str, Any]:
        described, n_entries = read_json(self.description), self.shape[1]
        rows = list_of(integer(0, n_entries - 1), 0, n_entries)
        fields = {"version": integer(VERSION, VERSION), "unreadable": rows, "sha256_maps": _sha256}
        record(fields)(described, ())
        return described

    def rows(self) -> np.ndarray:
        """All of it, read as it is needed."""
        return np.memmap(self.path, dtype=KINDS[self.path.suffix], mode="r", shape=self.shape)

    def reserve(self) -> None:
        """Takes the disk space before the hours are spent, so that a full disk is known at once."""
        free, path, size = shutil.disk_usage(self.path.parent).free, self.temporary, self.n_bytes
        try:
            if free < size:
                raise OSError(28, "No space left on device")
            with open(path, "wb") as file:
                if hasattr(os, "posix_fallocate"):  # not on macOS
                    os.posix_fallocate(file.fileno(), 0, max(size, 1))
                file.truncate(size)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise TrainError(
                f"the cache of maps needs {amount(size)} in {path.parent}, {amount(free)} are free "
                f"({error.strerror}); free some, cache fewer views, or train without a cache"
            ) from error


@lru_cache(maxsize=256)
def _digest_of(path: Path, n_bytes: int, modified: int) -> str:
    """SHA-256 of a file, read once by a process as long as it does not change."""
    return file_digest(path)


def _sha256(value: Any, name: Name) -> None:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise wrong(name, "a SHA-256", value)


def fill_missing(files: Sequence[MapFile], fill: Callable[[list[int]], None]) -> None:
    """Has the files filled that are missing, by their numbers; of several programs that need them, one does."""
    with contextlib.ExitStack() as stack:
        for file in sorted(files, key=lambda one: one.path):  # in one order, so that no two wait for each other
            stack.enter_context(alone(file.path))
        needed = [distributed.any_process(distributed.is_first() and not file.is_complete) for file in files]
        if any(needed):
            fill([number for number, is_needed in enumerate(needed) if is_needed])


@dataclass(frozen=True)
class Job:
    """Files to be filled with maps as they are made."""

    files: Sequence[MapFile]
    make: Callable[[], Made]
    tick: Tick | None = None

    def run(self) -> None:
        """All processes fill their rows of the same files; the first gives them their names at the end."""
        try:
            if distributed.is_first():
                for file in self.files:
                    make_folder(file.path.parent)
                    file.reserve()
            distributed.wait_for_all()
            seen = self._fill()
            distributed.wait_for_all()
            if distributed.is_first():
                self._finish(seen)
        except BaseException:
            if distributed.is_first():
                for file in self.files:
                    file.temporary.unlink(missing_ok=True)
            raise
        distributed.wait_for_all()

    def _fill(self) -> set[int]:
        """Writes this process's rows; returns the rows that could be made, of all processes."""
        starts = np.cumsum([0, *(file.shape[1] for file in self.files)])
        n_rows = sum(file.shape[0] * file.shape[1] for file in self.files) // distributed.shard().world_size
        seen, done = set[int](), 0
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(open(file.temporary, "r+b")) for file in self.files]
            for variant, rows, maps in self.make():
                for row, one in zip(rows, maps.numpy(), strict=True):
                    number = int(np.searchsorted(starts, row, side="right")) - 1
                    file = self.files[number]
                    place = (variant * file.shape[1] + row - int(starts[number])) * file.row_bytes
                    os.pwrite(opened[number].fileno(), one.tobytes(), place)
                seen.update(rows)
                done += len(rows)
                if self.tick:
                    self.tick(done, n_rows)
            for one in opened:
                os.fsync(one.fileno())
        parts = distributed.gather(torch.tensor(sorted(seen), dtype=torch.long))
        if not any(len(part) for part in parts):
            raise DataError("expected at least one readable photo to cache, got none")
        return {int(index) for part in parts for index in part}

    def _finish(self, seen: set[int]) -> None:
        start = 0
        for file in self.files:
            os.replace(file.temporary, file.path)
            unreadable = [row for row in range(file.shape[1]) if start + row not in seen]
            file.describe(unreadable)
            start += file.shape[1]


def from_photos(
    datasets: Sequence[ViewDataset],
    encode: Callable[[Tensor], Tensor],
    *,
    variants: int,
    workers: int,
    device: torch.device,
) -> Made:
    """The maps of all views of several data sets: each photo is decoded once for all its views of a variant.

    On a CPU every core reads photos and looks at them, in turn; elsewhere processes read and the device looks.
    """
    loader: Loader = photo_loader(datasets, _VIEWS_AT_ONCE, shard=distributed.shard(), workers=workers)

    def looked_at(batch: Batch) -> tuple[list[int], Tensor]:
        with torch.inference_mode():
            maps = encode(batch.images.to(device)).contiguous().cpu() if len(batch.labels) else batch.images
        return batch.entries.tolist(), maps

    for variant in range(variants):
        done = loader.each(variant, looked_at) if device.type == "cpu" else map(looked_at, loader.epoch(variant))
        yield from ((variant, entries, maps) for entries, maps in done if entries)

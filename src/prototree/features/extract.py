"""Feature extraction: run a frozen network over views of images into files of feature maps.

A file gets its name only when it is complete, with a header beside it: its SHA-256, what it was made with, which view
each row is, and which rows could not be read. A damaged file is computed again.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prototree.data.loader import Batch, ViewDataset, image_loader
from prototree.errors import CheckpointError, DataError, TrainError
from prototree.io import amount, file_digest, make_folder, read_json, write_json

log = logging.getLogger(__name__)

VERSION = 1
DTYPES = {".f16": np.float16, ".f32": np.float32}
_VIEWS_PER_BATCH, _VIEWS_PER_GPU_BATCH = 32, 256

Tick = Callable[[int, int], None]
"""Progress callback: how many of how many items are done."""

Extracted = Iterator[tuple[int, list[int], Tensor]]
"""Variant, rows (counted over all files one after the other), and the feature map of each row."""


@dataclass(frozen=True)
class FeatureFile:
    """A file of feature maps: V variants × rows × map."""

    path: Path
    shape: tuple[int, ...]
    key: str = ""  # what the maps were made with: weights, preprocessing, augmentation, backend
    rows: tuple[str, ...] = ()  # which view each row is

    @property
    def header(self) -> Path:
        return self.path.with_suffix(".json")

    @property
    def partial(self) -> Path:
        return self.path.with_suffix(".partial")

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[2:])) * np.dtype(DTYPES[self.path.suffix]).itemsize

    @property
    def n_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.row_bytes

    @property
    def is_complete(self) -> bool:
        """Whether it is there, whole and undamaged; otherwise it is computed again."""
        if not (self.path.exists() and self.header.exists()):
            return False
        try:
            expected, status = read_header(self.header)["sha256_maps"], self.path.stat()
            if status.st_size != self.n_bytes or _digest_of(self.path, status.st_size, status.st_mtime_ns) != expected:
                raise CheckpointError(f"{self.path} does not have the content that was written")
        except (CheckpointError, OSError) as error:
            log.warning("cached feature maps are computed again: %s", error)
            return False
        return True

    def unreadable(self) -> frozenset[int]:
        """Rows of images that could not be read."""
        return frozenset(row for row in read_header(self.header)["unreadable"] if row < self.shape[1])

    def open(self) -> np.ndarray:
        """Map the file into memory."""
        return np.memmap(self.path, dtype=DTYPES[self.path.suffix], mode="r", shape=self.shape)

    def reserve(self) -> None:
        """Allocate the disk space before hours are spent, so that a full disk is known at once."""
        make_folder(self.path.parent)
        free = shutil.disk_usage(self.path.parent).free
        try:
            if free < self.n_bytes:
                raise OSError(28, "No space left on device")
            with open(self.partial, "wb") as file:
                if hasattr(os, "posix_fallocate"):  # not on macOS
                    os.posix_fallocate(file.fileno(), 0, max(self.n_bytes, 1))
                file.truncate(self.n_bytes)
        except OSError as error:
            self.partial.unlink(missing_ok=True)
            raise TrainError(
                f"feature maps need {amount(self.n_bytes)} in {self.path.parent}, {amount(free)} are free "
                f"({error.strerror}); free some, or cache fewer views"
            ) from error

    def finish(self, unreadable: Sequence[int]) -> None:
        """Give a filled file its name and its description."""
        os.replace(self.partial, self.path)
        content = {"version": VERSION, "key": self.key, "rows": list(self.rows), "unreadable": list(unreadable)}
        write_json(self.header, {**content, "sha256_maps": file_digest(self.path)})


def read_header(path: Path) -> dict[str, Any]:
    """Read and check the header of a file of feature maps."""
    status = path.stat()
    return _header_of(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)
def _header_of(path: Path, n_bytes: int, modified: int) -> dict[str, Any]:
    header = read_json(path)
    rows, unreadable = header.get("rows"), header.get("unreadable")
    is_valid = (
        header.get("version") == VERSION
        and all(isinstance(header.get(name), str) for name in ("key", "sha256_maps"))
        and isinstance(rows, list)
        and isinstance(unreadable, list)
        and all(isinstance(row, int) and row >= 0 for row in unreadable)
    )
    if not is_valid:
        raise CheckpointError(f"{path} does not describe feature maps of version {VERSION}")
    return header


@lru_cache(maxsize=256)
def _digest_of(path: Path, n_bytes: int, modified: int) -> str:
    """SHA-256 of a file, read once by a process as long as it does not change."""
    return file_digest(path)


def write_files(files: Sequence[FeatureFile], maps: Callable[[], Extracted], tick: Tick | None = None) -> None:
    """Fill files with feature maps as they are computed; a failure leaves nothing half-made."""
    starts = np.cumsum([0, *(file.shape[1] for file in files)])
    n_rows, done, seen = sum(file.shape[0] * file.shape[1] for file in files), 0, set[int]()
    try:
        for file in files:
            file.reserve()
        with ExitStack() as stack:
            opened = [stack.enter_context(open(file.partial, "r+b")) for file in files]
            for variant, rows, batch in maps():
                for row, feature_map in zip(rows, batch.numpy(), strict=True):
                    number = int(np.searchsorted(starts, row, side="right")) - 1
                    file = files[number]
                    offset = (variant * file.shape[1] + row - int(starts[number])) * file.row_bytes
                    os.pwrite(opened[number].fileno(), feature_map.tobytes(), offset)
                seen.update(rows)
                done += len(rows)
                if tick:
                    tick(done, n_rows)
            for handle in opened:
                os.fsync(handle.fileno())
        if not seen:
            raise DataError("expected at least one readable image to cache, got none")
        for file, start in zip(files, starts.tolist(), strict=False):
            file.finish([row for row in range(file.shape[1]) if start + row not in seen])
    except BaseException:
        for file in files:
            file.partial.unlink(missing_ok=True)
        raise


def extract(
    datasets: Sequence[ViewDataset],
    encode: Callable[[Tensor], Tensor],
    *,
    variants: int = 1,
    workers: int = 0,
    device: torch.device,
) -> Extracted:
    """Run the network over all views; each image is decoded once. On a CPU every thread reads images and runs them."""
    n_views = _VIEWS_PER_BATCH if device.type == "cpu" else _VIEWS_PER_GPU_BATCH
    loader = image_loader(datasets, n_views, workers=workers)

    def encoded(batch: Batch) -> tuple[list[int], Tensor]:
        with torch.inference_mode():
            maps = encode_in_memory(encode, batch.images.to(device)) if len(batch.labels) else batch.images
        return batch.entries.tolist(), maps

    for variant in range(variants):
        batches = loader.map(variant, encoded) if device.type == "cpu" else map(encoded, loader.epoch(variant))
        yield from ((variant, rows, maps) for rows, maps in batches if rows)


def encode_in_memory(encode: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Run the network over a batch, in halves where the device's memory does not hold the whole of it."""
    try:
        return encode(images).contiguous().cpu()
    except torch.cuda.OutOfMemoryError:
        if len(images) == 1:
            raise
    return torch.cat([encode_in_memory(encode, half) for half in images.tensor_split(2)])

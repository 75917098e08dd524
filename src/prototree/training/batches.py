"""Where feature maps come from: photos through the whole network, or cached borders through its tail.

**Frozen trunk cache.** While the trunk is frozen, its output for a view of a photo never changes. `cache_borders` runs
it once per view into a file of float16 numbers, and from then on only the tail runs. The file is named after everything
that went into it (trunk weights, preprocessing, augmentation, photos), so that a stale one is never used, and gets that
name only when it is complete.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from prototree.data.loading import BatchOrder, Entry, ViewDataset, make_loader
from prototree.errors import CheckpointError, DataError, TrainError
from prototree.files import read_json, write_file
from prototree.network.backbone import Backbone, FeatureExtractor
from prototree.network.folding import folded
from prototree.training import distributed
from prototree.training.projection import MapBatch

log = logging.getLogger(__name__)

_VERSION = 1
Tick = Callable[[int, int], None]
"""Called with how many of how many items are done."""


@dataclass(frozen=True)
class Inputs:
    """A batch before the part of the network that still runs: photos, or borders of the frozen trunk."""

    values: Tensor
    labels: Int[Tensor, " B"]
    entries: Int[Tensor, " B"]


@runtime_checkable
class Batches(Protocol):
    """Batches for training, the same for the same seed and epoch; in several processes, this one's share of each."""

    @property
    def n_batches(self) -> int: ...
    @property
    def entries(self) -> Sequence[Entry]: ...
    def epoch(self, epoch: int, start: int = 0) -> Iterator[Inputs]:
        """The batches of one epoch, from batch `start` on."""

    def encode(self, features: FeatureExtractor, values: Tensor) -> Float[Tensor, "B D H W"]:
        """Inputs to feature maps."""


class PhotoBatches:
    """Photos through the whole network."""

    def __init__(
        self, dataset: ViewDataset, batch_size: int, *, shuffle: bool, workers: int = 0, strict: bool = False
    ) -> None:
        self._loader = make_loader(
            dataset, batch_size, shuffle=shuffle, shard=distributed.shard(), workers=workers, strict=strict
        )
        self.entries: Sequence[Entry] = dataset.entries

    @property
    def n_batches(self) -> int:
        return len(self._loader)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Inputs]:
        for batch in self._loader.epoch(epoch, start=start):
            yield Inputs(batch.images, batch.labels, batch.entries)

    def encode(self, features: FeatureExtractor, values: Tensor) -> Float[Tensor, "B D H W"]:
        return features(values)  # type: ignore[no-any-return]


class CachedBatches:
    """Borders from a cache through the tail. Epoch e uses the photos as augmented in epoch e mod V."""

    def __init__(self, cache: "BorderCache", batch_size: int, *, shuffle: bool, seed: int = 0) -> None:
        self._cache = cache
        n_items = len(cache.entries)
        self._n_batches = -(-n_items // batch_size)
        shuffle_seed = seed if shuffle else None
        self._order = BatchOrder(n_items, batch_size, shuffle_seed=shuffle_seed, shard=distributed.shard())
        self.entries: Sequence[Entry] = cache.entries

    @property
    def n_batches(self) -> int:
        return self._n_batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Inputs]:
        for positions in self._order.positions(epoch, start):
            yield self._cache.read([index for _, index in positions], epoch)

    def inputs(self, indices: Sequence[int], epoch: int = 0) -> Inputs:
        """The borders of some entries."""
        return self._cache.read(indices, epoch)

    def encode(self, features: FeatureExtractor, values: Tensor) -> Float[Tensor, "B D H W"]:
        return features.from_border(values)


class PhasedBatches:
    """One kind of batches until an epoch, another from then on: borders while the trunk is frozen, photos after."""

    def __init__(self, first: Batches, then: Batches, switch: int) -> None:
        assert first.n_batches == then.n_batches
        self._first, self._then, self._switch = first, then, switch
        self._current = first
        self.entries: Sequence[Entry] = first.entries

    @property
    def n_batches(self) -> int:
        return self._first.n_batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Inputs]:
        self._current = self._first if epoch < self._switch else self._then
        return self._current.epoch(epoch, start)

    def encode(self, features: FeatureExtractor, values: Tensor) -> Float[Tensor, "B D H W"]:
        return self._current.encode(features, values)


@dataclass(frozen=True)
class BorderCache:
    """The trunk's output for every entry of a data set, as augmented in each of V epochs; perhaps in several files."""

    files: tuple[np.ndarray, ...]  # each V × entries × border; one after the other
    entries: Sequence[Entry]
    unreadable: frozenset[int]

    def join(self, other: "BorderCache") -> "BorderCache":
        """The entries of both."""
        unreadable = self.unreadable | {len(self.entries) + index for index in other.unreadable}
        return BorderCache(self.files + other.files, (*self.entries, *other.entries), unreadable)

    def read(self, indices: Sequence[int], epoch: int) -> Inputs:
        usable = [index for index in indices if index not in self.unreadable]
        rows = np.empty((len(usable), *self.files[0].shape[2:]), dtype=np.float32)
        start = 0
        for file in self.files:
            here = [place for place, index in enumerate(usable) if start <= index < start + file.shape[1]]
            rows[here] = file[epoch % len(file), [usable[place] - start for place in here]]
            start += file.shape[1]
        values = torch.from_numpy(rows)
        labels = torch.tensor([self.entries[index].sample.label for index in usable], dtype=torch.long)
        return Inputs(values, labels, torch.tensor(usable, dtype=torch.long))


def maps_of(batches: Batches, features: FeatureExtractor, device: torch.device | None = None) -> Iterator[MapBatch]:
    """All feature maps of epoch 0, in evaluation mode, with labels and places: for projection and evaluation."""
    features.eval()
    for inputs in batches.epoch(0):
        if len(inputs.labels):
            with torch.inference_mode():
                feature_map = batches.encode(features, inputs.values.to(device))
            yield feature_map.clone(), inputs.labels.to(device), inputs.entries.to(device)


def cache_size(backbone: Backbone, n_entries: int, variants: int) -> int:
    """Bytes that the cache will take on disk."""
    return n_entries * variants * int(np.prod(_border_shape(backbone))) * 2


def cache_borders(
    backbone: Backbone,
    dataset: ViewDataset,
    folder: Path,
    *,
    variants: int = 1,
    workers: int = 0,
    tick: Tick | None = None,
) -> BorderCache:
    """The borders of every entry, from disk if they are there, else computed now."""
    if variants < 1:
        raise TrainError(f"expected at least one cached view of each photo, got {variants}")
    shape = (variants, len(dataset), *_border_shape(backbone))
    key = _fingerprint(backbone, dataset, variants)
    path, description = folder / f"{key}.f16", folder / f"{key}.json"
    if not description.exists():
        _write_borders(backbone, dataset, path, shape, workers, tick)
    unreadable = read_json(description)["unreadable"]
    if not path.exists() or path.stat().st_size != int(np.prod(shape)) * 2:
        raise CheckpointError(f"the cache {path} is damaged; delete {description} to compute it again")
    rows = np.memmap(path, dtype=np.float16, mode="r", shape=shape)
    return BorderCache((rows,), dataset.entries, frozenset(unreadable))


def link_caches(caches: Sequence[Path], folder: Path) -> None:
    """Lends a run the maps of others; a cache's name says what it holds, so that only a fitting one is used."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.f16", "*.json"):  # the description last: a cache without one is not used
        for file in (file for cache in caches for file in sorted(cache.glob(pattern))):
            with contextlib.suppress(OSError):  # it is there already, or on another disk
                os.link(file, folder / file.name)


def _write_borders(
    backbone: Backbone, dataset: ViewDataset, path: Path, shape: tuple[int, ...], workers: int, tick: Tick | None
) -> None:
    """All processes fill their rows of one file; the first gives it its name at the end."""
    temporary, size = path.with_suffix(".partial"), int(np.prod(shape)) * 2
    if distributed.is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        _reserve(temporary, size)
    distributed.wait_for_all()
    try:
        seen = _fill(backbone, dataset, temporary, shape, workers, tick)
        distributed.wait_for_all()
        if distributed.is_first():
            os.replace(temporary, path)
            unreadable = sorted(set(range(len(dataset))) - seen)
            write_file(path.with_suffix(".json"), json.dumps({"version": _VERSION, "unreadable": unreadable}).encode())
    except BaseException:
        if distributed.is_first():
            temporary.unlink(missing_ok=True)
        raise
    distributed.wait_for_all()


def _reserve(path: Path, size: int) -> None:
    """Takes the disk space before the hours are spent, so that a full disk is known at once."""
    free = shutil.disk_usage(path.parent).free
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
            f"the cache of the frozen trunk needs {size / 1e9:.2f} GB in {path.parent}, {free / 1e9:.2f} GB are free "
            f"({error.strerror}); free some, cache fewer views, or train without a cache"
        ) from error


@torch.inference_mode()
def _fill(
    backbone: Backbone, dataset: ViewDataset, path: Path, shape: tuple[int, ...], workers: int, tick: Tick | None
) -> set[int]:
    """Writes this process's rows; returns the entries that could be read, of all processes."""
    loader = make_loader(dataset, 32, shard=distributed.shard(), workers=workers)
    row_bytes, device = int(np.prod(shape[2:])) * 2, next(backbone.parameters()).device
    trunk, seen, done = folded(backbone), set[int](), 0
    with open(path, "r+b") as file:
        for variant in range(shape[0]):
            for batch in loader.epoch(variant):
                if len(batch.labels):
                    images = batch.images.to(device).contiguous(memory_format=torch.channels_last)
                    borders = trunk.trunk(images).half().contiguous().cpu().numpy()
                    for index, border in zip(batch.entries.tolist(), borders, strict=True):
                        os.pwrite(file.fileno(), border.tobytes(), (variant * shape[1] + index) * row_bytes)
                seen.update(batch.entries.tolist())
                done += len(batch.labels)
                if tick:
                    tick(done, shape[0] * shape[1] // distributed.shard().world_size)
        os.fsync(file.fileno())
    parts = distributed.gather(torch.tensor(sorted(seen), dtype=torch.long))
    if not any(len(part) for part in parts):
        raise DataError("expected at least one readable photo to cache, got none")
    return {int(index) for part in parts for index in part}


def _border_shape(backbone: Backbone) -> tuple[int, ...]:
    size, was_training = backbone.preprocessing.size, backbone.training
    with torch.inference_mode():
        device = next(backbone.parameters()).device
        shape = backbone.eval().trunk(torch.zeros(1, 3, size, size, device=device)).shape[1:]
    backbone.train(was_training)
    return tuple(shape)


def _fingerprint(backbone: Backbone, dataset: ViewDataset, variants: int) -> str:
    digest = hashlib.sha256(f"{_VERSION} {backbone.name} {backbone.level} {variants} {dataset.seed}".encode())
    digest.update(repr((dataset.preprocessing, dataset.transform)).encode())
    for name, tensor in backbone.trunk_state().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    for entry in dataset.entries:
        digest.update(repr((_file_stamp(entry.sample.path), entry.view)).encode())
    return digest.hexdigest()[:32]


def _file_stamp(path: Path) -> tuple[Any, ...]:
    try:
        stat = path.stat()
    except OSError:
        return (str(path),)
    return str(path), stat.st_size, stat.st_mtime_ns

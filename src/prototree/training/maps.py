"""Maps computed once and kept on disk: one cache, for what a frozen network makes of a view and for whole feature maps.

**Frozen trunk cache.** While the trunk is frozen, its output for a view of a photo never changes. `cache_borders` runs
it once per view into a file of float16 numbers, and from then on only the tail runs. **Feature maps.** `cache_features`
keeps what a finished tree's network makes of a photo, so that a changed prototype is compared in moments.

A file is named after everything that went into it (weights, preprocessing, augmentation, photos), so that a stale one
is never used, and gets that name only when it is complete. Where files lie, and who uses them: `shared_maps`.

Notation used for tensor shapes: V variants of a view, M views of photos, D prototype depth, H W feature map, P patches.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.data.loading import Entry, ViewDataset, make_loader
from prototree.errors import DataError, TrainError
from prototree.files import make_folder, read_json, write_json
from prototree.network.backbone import Backbone
from prototree.network.folding import folded
from prototree.training import distributed
from prototree.training.shared_maps import OWN_CACHE, alone, note_use, shared_folder
from prototree.tree.model import ProtoTree
from prototree.tree.patches import NearestPatches, extract_patches, nearest_patches

_VERSION = 1
_ROWS = 256  # maps compared at a time, so that memory does not grow with the data
_KINDS = {".f16": np.float16, ".f32": np.float32}

Tick = Callable[[int, int], None]
"""Called with how many of how many items are done."""

Forbidden = Mapping[int, Bool[Tensor, " P"]]
"""Patches that may not be found, by the row of their map."""

MapBatch = tuple[Float[Tensor, "_ D H W"], Int[Tensor, " _"], Int[Tensor, " _"]]
"""Feature maps, labels, and the place of each in the data."""


@dataclass(frozen=True)
class Inputs:
    """A batch before the part of the network that still runs: photos, or borders of the frozen trunk."""

    values: Tensor
    labels: Int[Tensor, " B"]
    entries: Int[Tensor, " B"]


@dataclass(frozen=True)
class MapCache:
    """A map for every entry of a data set, as augmented in each of V epochs; perhaps in several files."""

    files: tuple[np.ndarray, ...]  # each V × rows × map; one after the other
    entries: Sequence[Entry]
    unreadable: frozenset[int]
    rows: tuple[int, ...] | None = None  # of each entry in the files; None: the entries are all rows in order

    def only(self, places: Sequence[int]) -> "MapCache":
        """Some of the entries, in the order named."""
        unreadable = frozenset(new for new, old in enumerate(places) if old in self.unreadable)
        rows = tuple(self._rows[place] for place in places)
        return MapCache(self.files, tuple(self.entries[place] for place in places), unreadable, rows)

    def join(self, other: "MapCache") -> "MapCache":
        """The entries of both."""
        unreadable = self.unreadable | {len(self.entries) + index for index in other.unreadable}
        n_rows = sum(file.shape[1] for file in self.files)
        rows = (*self._rows, *(n_rows + row for row in other._rows))
        return MapCache(self.files + other.files, (*self.entries, *other.entries), unreadable, rows)

    @property
    def _rows(self) -> Sequence[int]:
        return range(len(self.entries)) if self.rows is None else self.rows

    def read(self, indices: Sequence[int], epoch: int) -> Inputs:
        usable = [index for index in indices if index not in self.unreadable]
        row_of = usable if self.rows is None else [self.rows[index] for index in usable]
        # Memory of torch's own, aligned: where numbers lie can decide the last bits of a matrix product.
        values = torch.empty(len(usable), *self.files[0].shape[2:])
        rows = values.numpy()
        start = 0
        for file in self.files:
            here = [place for place, row in enumerate(row_of) if start <= row < start + file.shape[1]]
            rows[here] = file[epoch % len(file), [row_of[place] - start for place in here]]
            start += file.shape[1]
        labels = torch.tensor([self.entries[index].sample.label for index in usable], dtype=torch.long)
        return Inputs(values, labels, torch.tensor(usable, dtype=torch.long))


@dataclass(frozen=True)
class StoredMaps:
    """The feature map of each view that could be read, with the entry it belongs to."""

    cache: MapCache
    is_rounded: bool = False  # made from borders, which have 11 bits: right but for the last digits

    @cached_property
    def _places(self) -> list[int]:
        return [place for place in range(len(self.cache.entries)) if place not in self.cache.unreadable]

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self.cache.entries[place] for place in self._places)

    @cached_property
    def labels(self) -> Int[Tensor, " M"]:
        return torch.tensor([entry.sample.label for entry in self.entries], dtype=torch.long)

    def __len__(self) -> int:
        return len(self._places)

    def maps(self, chosen: Sequence[int]) -> Float[Tensor, "M D H W"]:
        """Some of the maps."""
        return self.cache.read([self._places[row] for row in chosen], 0).values

    def batches(self, chosen: Sequence[int] | None = None) -> Iterator[MapBatch]:
        """The maps, all or some, with their labels and rows."""
        wanted = list(range(len(self)) if chosen is None else chosen)
        for start in range(0, len(wanted), _ROWS):
            index = wanted[start : start + _ROWS]
            yield self.maps(index), self.labels[index], torch.tensor(index)

    @torch.no_grad()
    def nearest(self, prototypes: Float[Tensor, "n D H1 W1"], forbidden: Forbidden | None = None) -> NearestPatches:
        """Eq. 1 for each view and prototype: a view all of whose patches are forbidden is infinitely far."""
        found = [nearest_patches(maps, prototypes) for maps, _, _ in self.batches()]
        distance = torch.cat([batch.distance for batch in found])
        patch = torch.cat([batch.patch for batch in found])
        for row, mask in (forbidden or {}).items():
            patches = extract_patches(self.maps([row]), (prototypes.shape[2], prototypes.shape[3]))[0]
            apart = torch.linalg.vector_norm(patches[:, None] - prototypes.flatten(1), dim=2)  # P n
            distance[row], patch[row] = apart.masked_fill(mask[:, None], torch.inf).min(dim=0)
        return NearestPatches(distance, patch)


def cache_size(backbone: Backbone, n_entries: int, variants: int) -> int:
    """Bytes that the cache of the frozen trunk will take on disk."""
    return n_entries * variants * int(np.prod(_border_shape(backbone))) * 2


def cache_borders(
    backbone: Backbone,
    dataset: ViewDataset,
    folder: Path,
    *,
    variants: int = 1,
    workers: int = 0,
    tick: Tick | None = None,
    run: Path | None = None,
) -> MapCache:
    """The trunk's output for every entry, from disk if it is there, else computed now.

    `run` is the folder of the run that uses it; one that an earlier version made may have maps of its own.
    """
    if variants < 1:
        raise TrainError(f"expected at least one cached view of each photo, got {variants}")
    name = f"{_border_name(backbone, dataset, variants)}.f16"
    path, shape = folder / name, (variants, len(dataset), *_border_shape(backbone))
    if run is not None and _is_complete(run / OWN_CACHE / name, shape):
        return _opened(run / OWN_CACHE / name, shape, dataset)
    if run is not None:
        note_use(run, name)
    device = next(backbone.parameters()).device

    def encoder() -> Callable[[Tensor], Tensor]:
        trunk = folded(backbone)
        return lambda images: trunk.trunk(images.contiguous(memory_format=torch.channels_last)).half()

    _fill_once(path, shape, lambda: _Job(dataset, path, shape, encoder(), workers, tick).run(device))
    return _opened(path, shape, dataset)


def stored_borders(backbone: Backbone, dataset: ViewDataset, run: Path) -> MapCache | None:
    """The trunk's output for every entry, where a run or those beside it have it; nothing is computed."""
    name, shape = f"{_border_name(backbone, dataset, 1)}.f16", (1, len(dataset), *_border_shape(backbone))
    for folder in (run / OWN_CACHE, shared_folder(run)):
        if _is_complete(folder / name, shape):
            return _opened(folder / name, shape, dataset)
    return None


def cache_features(
    tree: ProtoTree,
    dataset: ViewDataset,
    folder: Path,
    tick: Tick | None = None,
    borders: MapCache | None = None,
) -> StoredMaps:
    """The feature map of every view under the tree's own network, from disk if it is there, else computed now.

    With the borders of the same entries only the rest of the network runs, and no photo is read.
    """
    shape = (1, len(dataset), tree.features.depth, *tree.features.backbone.map_size)
    path = folder / f"{_feature_name(tree, dataset)}.f32"
    if borders is not None and not _is_complete(path, shape):
        path = folder / f"{_feature_name(tree, dataset, 'features from borders')}.f32"
        _fill_once(path, shape, lambda: _fill_from_borders(tree, borders, path, shape))
        return StoredMaps(_opened(path, shape, dataset), is_rounded=True)
    job = _Job(dataset, path, shape, lambda images: tree.features.eval()(images).float(), 0, tick)
    _fill_once(path, shape, lambda: job.run(tree.prototypes.device))
    return StoredMaps(_opened(path, shape, dataset))


@torch.inference_mode()
def _fill_from_borders(tree: ProtoTree, borders: MapCache, path: Path, shape: tuple[int, ...]) -> None:
    temporary = path.with_suffix(".partial")
    make_folder(path.parent)
    _reserve(temporary, 4 * int(np.prod(shape)))
    features, rows = tree.features.eval(), np.memmap(temporary, dtype=np.float32, mode="r+", shape=shape)
    for start in range(0, shape[1], _ROWS):
        inputs = borders.read(range(start, min(start + _ROWS, shape[1])), 0)
        if len(inputs.entries):
            rows[0, inputs.entries.numpy()] = features.from_border(inputs.values.to(tree.prototypes.device)).cpu()
    rows.flush()
    os.replace(temporary, path)
    write_json(_description(path), {"version": _VERSION, "unreadable": sorted(borders.unreadable)})


def _fill_once(path: Path, shape: tuple[int, ...], fill: Callable[[], None]) -> None:
    """Fills a file that is missing; of several programs that need it at the same time, one does."""
    with alone(path):
        if distributed.any_process(distributed.is_first() and not _is_complete(path, shape)):
            fill()


def remove_unfinished(folder: Path) -> None:
    """Removes maps that a killed process was computing; they begin anew."""
    for path in folder.glob("*.partial"):
        path.unlink(missing_ok=True)


def _description(path: Path) -> Path:
    return path.with_suffix(".json")


def _is_complete(path: Path, shape: tuple[int, ...]) -> bool:
    size = int(np.prod(shape)) * np.dtype(_KINDS[path.suffix]).itemsize
    return _description(path).exists() and path.exists() and path.stat().st_size == size


def _opened(path: Path, shape: tuple[int, ...], dataset: ViewDataset) -> MapCache:
    rows = np.memmap(path, dtype=_KINDS[path.suffix], mode="r", shape=shape)
    return MapCache((rows,), dataset.entries, frozenset(read_json(_description(path))["unreadable"]))


@dataclass(frozen=True)
class _Job:
    """Maps to be computed into a file."""

    dataset: ViewDataset
    path: Path
    shape: tuple[int, ...]  # V × entries × map
    encode: Callable[[Tensor], Tensor]
    workers: int
    tick: Tick | None

    @property
    def _row_bytes(self) -> int:
        return int(np.prod(self.shape[2:])) * np.dtype(_KINDS[self.path.suffix]).itemsize

    def run(self, device: torch.device) -> None:
        """All processes fill their rows of one file; the first gives it its name at the end."""
        temporary = self.path.with_suffix(".partial")
        if distributed.is_first():
            make_folder(self.path.parent)
            _reserve(temporary, self.shape[0] * self.shape[1] * self._row_bytes)
        distributed.wait_for_all()
        try:
            seen = self._fill(temporary, device)
            distributed.wait_for_all()
            if distributed.is_first():
                os.replace(temporary, self.path)
                unreadable = sorted(set(range(len(self.dataset))) - seen)
                write_json(_description(self.path), {"version": _VERSION, "unreadable": unreadable})
        except BaseException:
            if distributed.is_first():
                temporary.unlink(missing_ok=True)
            raise
        distributed.wait_for_all()

    @torch.inference_mode()
    def _fill(self, path: Path, device: torch.device) -> set[int]:
        """Writes this process's rows; returns the entries that could be read, of all processes."""
        # Whole batches: how many images go through a network together decides the last bits of what comes out.
        loader = make_loader(self.dataset, 32, shard=distributed.shard(), turns=True, workers=self.workers)
        seen, done = set[int](), 0
        with open(path, "r+b") as file:
            for variant in range(self.shape[0]):
                for batch in loader.epoch(variant):
                    if len(batch.labels):
                        maps = self.encode(batch.images.to(device)).contiguous().cpu().numpy()
                        for index, one in zip(batch.entries.tolist(), maps, strict=True):
                            place = (variant * self.shape[1] + index) * self._row_bytes
                            os.pwrite(file.fileno(), one.tobytes(), place)
                    seen.update(batch.entries.tolist())
                    done += len(batch.labels)
                    if self.tick:
                        self.tick(done, self.shape[0] * self.shape[1] // distributed.shard().world_size)
            os.fsync(file.fileno())
        parts = distributed.gather(torch.tensor(sorted(seen), dtype=torch.long))
        if not any(len(part) for part in parts):
            raise DataError("expected at least one readable photo to cache, got none")
        return {int(index) for part in parts for index in part}


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
            f"the cache of maps needs {size / 1e9:.2f} GB in {path.parent}, {free / 1e9:.2f} GB are free "
            f"({error.strerror}); free some, cache fewer views, or train without a cache"
        ) from error


def _border_shape(backbone: Backbone) -> tuple[int, ...]:
    size, was_training = backbone.preprocessing.size, backbone.training
    with torch.inference_mode():
        device = next(backbone.parameters()).device
        shape = backbone.eval().trunk(torch.zeros(1, 3, size, size, device=device)).shape[1:]
    backbone.train(was_training)
    return tuple(shape)


def _border_name(backbone: Backbone, dataset: ViewDataset, variants: int) -> str:
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


def _feature_name(tree: ProtoTree, dataset: ViewDataset, kind: str = "features") -> str:
    digest = hashlib.sha256(f"{_VERSION} {kind} {tree.features.backbone.level} {dataset.preprocessing}".encode())
    for name, tensor in tree.features.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    for entry in dataset.entries:
        digest.update(repr((_file_stamp(entry.sample.path), entry.view)).encode())
    return digest.hexdigest()[:32]

"""The feature cache: feature maps of a frozen network, computed once and shared by all runs beside each other.

A file is named after everything that went into it (weights, preprocessing, augmentation, images), so that a stale one
is never used. Notation used for tensor shapes: M views, D prototype dimension, H W feature map, P patches.
"""

import copy
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.crops import FULL_ONLY
from prototree.backbones.inference import ONNXRUNTIME, TORCH, Frozen, add_tensors, frozen, frozen_features
from prototree.backbones.registry import format_options
from prototree.core.model import NearestPatches, ProtoTree, extract_patches, nearest_patches
from prototree.core.projection import MapBatch as MapBatch
from prototree.data.loader import BatchOrder, Entry, Shard, ViewDataset, make_loader
from prototree.data.scan import file_digests
from prototree.errors import CheckpointError, TrainError
from prototree.features.extract import VERSION, Extracted, FeatureFile, Tick, extract, read_header, write_files
from prototree.io import file_lock, read_json, write_json

FOLDER, USED = "prototree-features", "features.json"
_ROWS = 256  # maps compared at a time, so that memory does not grow with the data
_EVAL_BATCH = 32

Forbidden = Mapping[int, Bool[Tensor, " P"]]
"""Patches that may not be found, by the row of their map."""


@dataclass(frozen=True)
class Inputs:
    """A batch: images, or feature maps of a frozen network, with labels and indices in the data."""

    values: Tensor
    labels: Int[Tensor, " B"]
    entries: Int[Tensor, " B"]


@dataclass(frozen=True)
class FeatureMaps:
    """A feature map for every entry of a data set, as augmented in each of V epochs; perhaps in several files."""

    files: tuple[np.ndarray, ...]  # each V × rows × map; one after the other
    entries: Sequence[Entry]
    unreadable: frozenset[int]
    rows: tuple[int, ...] | None = None  # of each entry in the files; None: the entries are all rows in order
    other_crops: tuple["FeatureMaps", ...] = ()  # the same entries at the network's further crops

    @property
    def names(self) -> list[str]:
        """Names of the files."""
        names = [Path(str(file.filename)).name for file in self.files if isinstance(file, np.memmap)]
        return names + [name for crop in self.other_crops for name in crop.names]

    @staticmethod
    def stack_crops(crops: Sequence["FeatureMaps"]) -> "FeatureMaps":
        """Join the maps of all crops of the same entries."""
        first, *others = crops
        unreadable = first.unreadable.union(*(crop.unreadable for crop in others))
        return replace(first, unreadable=unreadable, other_crops=tuple(others))

    @property
    def full_image(self) -> "FeatureMaps":
        """The maps of the full image alone."""
        return replace(self, other_crops=())

    def subset(self, indices: Sequence[int]) -> "FeatureMaps":
        """Select entries, in the order named."""
        unreadable = frozenset(new for new, old in enumerate(indices) if old in self.unreadable)
        rows, entries = tuple(self._rows[index] for index in indices), tuple(self.entries[index] for index in indices)
        crops = tuple(crop.subset(indices) for crop in self.other_crops)
        return FeatureMaps(self.files, entries, unreadable, rows, crops)

    def concat(self, other: "FeatureMaps") -> "FeatureMaps":
        """Append the entries of another set."""
        unreadable = self.unreadable | {len(self.entries) + index for index in other.unreadable}
        n_rows = sum(file.shape[1] for file in self.files)
        rows = (*self._rows, *(n_rows + row for row in other._rows))
        crops = tuple(mine.concat(more) for mine, more in zip(self.other_crops, other.other_crops, strict=True))
        return FeatureMaps(self.files + other.files, (*self.entries, *other.entries), unreadable, rows, crops)

    @property
    def _rows(self) -> Sequence[int]:
        return range(len(self.entries)) if self.rows is None else self.rows

    def read(self, indices: Sequence[int], epoch: int = 0) -> Inputs:
        """Read the maps of some entries; those that could not be computed are left out."""
        usable = [index for index in indices if index not in self.unreadable]
        labels = torch.tensor([self.entries[index].sample.label for index in usable], dtype=torch.long)
        crops = [crop._values(usable, epoch) for crop in (self, *self.other_crops)]
        values = torch.cat(crops, dim=2) if self.other_crops else crops[0]
        return Inputs(values, labels, torch.tensor(usable, dtype=torch.long))

    def _values(self, usable: Sequence[int], epoch: int) -> Tensor:
        row_of = usable if self.rows is None else [self.rows[index] for index in usable]
        rows = np.empty((len(usable), *self.files[0].shape[2:]), self.files[0].dtype)
        start = 0
        for file in self.files:
            here = [index for index, row in enumerate(row_of) if start <= row < start + file.shape[1]]
            rows[here] = file[epoch % len(file), [row_of[index] - start for index in here]]
            start += file.shape[1]
        # Memory of torch's own, aligned: where numbers lie can decide the last bits of a matrix product.
        layout = torch.channels_last if rows.ndim == 4 else torch.preserve_format
        return torch.from_numpy(rows).to(torch.float32, copy=True, memory_format=layout)

    def batches(
        self, batch_size: int, *, epoch: int = 0, seed: int | None = None, shard: Shard | None = None
    ) -> Iterator[Inputs]:
        """Iterate over an epoch; shuffled if there is a seed. Epoch e uses the augmentation of epoch e mod V."""
        order = BatchOrder(len(self.entries), batch_size, shuffle_seed=seed, shard=shard or Shard())
        return (self.read([index for _, index in positions], epoch) for positions in order.positions(epoch, 0))


class FeatureCache:
    """Feature maps that the runs beside each other share: computed when they are missing, noted by who uses them."""

    def __init__(
        self,
        run: Path,
        backend: str = TORCH,
        *,
        workers: int = 0,
        stage: Callable[[str], None] | None = None,
        tick: Tick | None = None,
    ) -> None:
        self._run, self._backend, self._workers, self._stage, self._tick = run, backend, workers, stage, tick

    def compute(
        self, backbone: Backbone, datasets: Sequence[ViewDataset], *, variants: int = 1, announce: bool = True
    ) -> list[FeatureMaps]:
        """Return the frozen network's maps of several data sets of the same images, computing what is missing."""
        if variants < 1:
            raise TrainError(f"expected at least one cached view of each image, got {variants}")
        keys = [_Key.of(backbone, dataset, variants) for dataset in datasets]
        maps = [self._find(key, self._backend) for key in keys]
        missing = {i: datasets[i] for i, part in enumerate(maps) if part is None}
        if self._stage and announce:
            n_views, map_bytes = variants * sum(map(len, missing.values())), 2 * int(np.prod(keys[0].map_shape))
            self._stage(
                f"computing feature maps of {n_views} views, once; they are kept for all runs in the same folder "
                f"({n_views * map_bytes / 1e9:.2f} GB)"
                if missing
                else f"the feature maps of all {sum(map(len, datasets))} views have been computed before"
            )
        if missing:
            network = frozen(backbone, self._backend, threads=1)  # every core runs images of its own
            files = {i: keys[i].file(shared_folder(self._run), network.engine) for i in missing}
            with ExitStack() as stack:
                for path in sorted(file.path for file in files.values()):  # in one order: no two wait for each other
                    stack.enter_context(exclusive(path))
                self._compute(backbone, network, {files[i]: missing[i] for i in missing if not files[i].is_complete})
            maps = [part or _opened(files[i], missing[i].entries) for i, part in enumerate(maps)]
        complete = [part for part in maps if part is not None]
        note_use(self._run, *(name for part in complete for name in part.names))
        return complete

    def _compute(self, backbone: Backbone, network: Frozen, missing: Mapping[FeatureFile, ViewDataset]) -> None:
        if missing:
            files, datasets, device = list(missing), list(missing.values()), next(backbone.parameters()).device
            read = partial(extract, datasets, variants=files[0].shape[0], workers=self._workers, device=device)
            write_files(files, lambda: read(lambda images: network(images).half()), self._tick)

    def full(self, backbone: Backbone, dataset: ViewDataset) -> FeatureMaps:
        """Return the maps of every entry at all crops of the network, computing what is missing."""
        crops = [dataset.center_crop(fraction) for fraction in backbone.crops]
        return FeatureMaps.stack_crops(self.compute(backbone, crops, announce=False))

    def find(self, backbone: Backbone, dataset: ViewDataset) -> FeatureMaps | None:
        """Return the maps of every entry at all crops if they have been computed by any backend, else None."""
        whole = copy.copy(backbone).merge_last_block()
        keys = [_Key.of(whole, dataset.center_crop(fraction), 1) for fraction in backbone.crops]
        for backend in (ONNXRUNTIME, TORCH):
            crops = [maps for key in keys if (maps := self._find(key, backend)) is not None]
            if len(crops) == len(keys):
                return FeatureMaps.stack_crops(crops)
        return None

    def _find(self, key: "_Key", backend: str) -> FeatureMaps | None:
        """Open a complete file with exactly these views, or one that has them among others."""
        folders = dict.fromkeys((shared_folder(self._run), _folder_beside(self._run)))  # one may be read-only
        for folder in folders:
            if (file := key.file(folder, backend)).is_complete:
                return _opened(file, key.entries)
        if key.is_random:  # augmentation depends on the index
            return None
        for path in sorted(path for folder in folders for path in folder.glob("*.f16")):
            with suppress(CheckpointError, OSError):
                header = read_header(path.with_suffix(".json"))
                if header["key"] != key.digest(backend) or not set(key.rows) <= set(header["rows"]):
                    continue
                index_of = {row: index for index, row in enumerate(header["rows"])}
                file = FeatureFile(path, (1, len(header["rows"]), *key.map_shape))
                if file.is_complete:
                    chosen, unreadable = tuple(index_of[row] for row in key.rows), file.unreadable()
                    lost = frozenset(index for index, row in enumerate(chosen) if row in unreadable)
                    return FeatureMaps((file.open(),), key.entries, lost, chosen)
        return None


@dataclass(frozen=True)
class _Key:
    """What feature maps are made with and of."""

    network: str  # digest of weights, preprocessing and augmentation
    rows: tuple[str, ...]  # digest of each view
    map_shape: tuple[int, ...]
    variants: int
    entries: Sequence[Entry]
    is_random: bool

    @classmethod
    def of(cls, backbone: Backbone, dataset: ViewDataset, variants: int) -> "_Key":
        network = f"{backbone.name} {format_options(backbone.options)} {backbone.feature_level}"
        digest = hashlib.sha256(f"{VERSION} {network} {dataset.seed}".encode())
        digest.update(repr((dataset.preprocessing, dataset.transform)).encode())
        add_tensors(digest, backbone.backbone_state())
        size, device, was_training = backbone.preprocessing.size, next(backbone.parameters()).device, backbone.training
        with torch.inference_mode():
            shape = backbone.eval().split_features(torch.zeros(1, 3, size, size, device=device)).shape[1:]
        backbone.train(was_training)
        rows = view_digests(dataset)
        return cls(digest.hexdigest(), rows, tuple(shape), variants, dataset.entries, dataset.is_random)

    def digest(self, backend: str) -> str:
        """Name the network and its backend: maps of two backends differ by rounding and never mix."""
        return f"{self.network[:32]}-{self.variants}-{backend}"

    def file(self, folder: Path, backend: str) -> FeatureFile:
        key = self.digest(backend)
        name = hashlib.sha256(repr((key, self.rows)).encode()).hexdigest()[:32]
        shape = (self.variants, len(self.rows), *self.map_shape)
        return FeatureFile(folder / f"{name}.f16", shape, key, self.rows)


def view_digests(dataset: ViewDataset) -> tuple[str, ...]:
    """Digest each view; images count by name and content, so that a copied or moved folder is known again."""
    content = file_digests(entry.sample.path for entry in dataset.entries)
    keys = ((entry.sample.path.name, content[entry.sample.path], entry.view) for entry in dataset.entries)
    return tuple(hashlib.sha256(repr(key).encode()).hexdigest()[:16] for key in keys)


def _opened(file: FeatureFile, entries: Sequence[Entry]) -> FeatureMaps:
    return FeatureMaps((file.open(),), entries, file.unreadable())


def shared_folder(run: Path) -> Path:
    """Where the feature maps of a run and of those beside it lie; in the run itself if its parent is read-only."""
    shared = _folder_beside(run)
    return shared if os.access(shared if shared.exists() else shared.parent, os.W_OK) else run / FOLDER


def _folder_beside(run: Path) -> Path:
    return run.resolve().parent / FOLDER


def files_used(run: Path) -> list[str]:
    """Files of the shared folder that a run has noted."""
    path = run / USED
    return [str(name) for name in read_json(path).get("files", [])] if path.exists() else []


def note_use(run: Path, *names: str) -> None:
    """Note that a run uses files of the shared folder, so that `clean` knows what nobody else needs."""
    used = files_used(run)
    if new := [name for name in names if name not in used]:
        run.mkdir(parents=True, exist_ok=True)
        write_json(run / USED, {"files": [*used, *new]})


def link_files(source: Path, run: Path) -> None:
    """Lend a run the feature maps of another folder; a name says what a file holds, so only a fitting one is used."""
    target = shared_folder(run)
    for pattern in ("*.f16", "*.json"):  # the description last: a file without one is not used
        for file in sorted(source.glob(pattern)):
            target.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):  # it is there already, or on another disk
                os.link(file, target / file.name)


def remove_unfinished(folder: Path) -> None:
    """Remove feature maps that a killed process was computing."""
    for path in folder.glob("*.partial"):
        path.unlink(missing_ok=True)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait for other programs that compute the same file; where nothing may be written, none does."""
    read_only = path.parent.exists() and not os.access(path.parent, os.W_OK)
    with nullcontext() if read_only else file_lock(path.with_suffix(".lock")):
        yield


@dataclass(frozen=True)
class EvalBatches:
    """Every view in order for a finished tree: cached maps of its backbone, or images through its network."""

    entries: Sequence[Entry]
    maps: FeatureMaps | None
    dataset: ViewDataset
    batch_size: int = _EVAL_BATCH
    workers: int = 0
    strict: bool = False

    def inputs(self) -> Iterator[Inputs]:
        """Iterate over cached maps or images."""
        if self.maps is not None:
            yield from self.maps.batches(self.batch_size)
            return
        loader = make_loader(self.dataset, self.batch_size, workers=self.workers, strict=self.strict)
        for batch in loader.epoch(0):
            yield Inputs(batch.images, batch.labels, batch.entries)

    def encoded(self, features: FeatureExtractor, device: torch.device | None = None) -> Iterator[MapBatch]:
        """Iterate over feature maps with labels and indices."""
        network = None if self.maps is not None else frozen_features(features)
        features.eval()
        for batch in self.inputs():
            if len(batch.labels):
                with torch.inference_mode():
                    values = batch.values.to(device)
                    feature_map = network(values) if network is not None else features.from_map(values)
                yield feature_map.clone(), batch.labels.to(device), batch.entries.to(device)


def eval_batches(
    features: FeatureExtractor, dataset: ViewDataset, *, run: Path | None = None, workers: int = 0
) -> EvalBatches:
    """Prepare every view for a finished tree: from what its run has cached, else through the network."""
    maps = FeatureCache(run).find(features.backbone, dataset) if run is not None else None
    return EvalBatches(dataset.entries, maps, dataset, workers=workers)


@dataclass(frozen=True)
class StoredMaps:
    """The feature map of each view that could be read, under one tree's network, with the entry it belongs to."""

    cache: FeatureMaps
    is_rounded: bool = False  # made from cached maps of the backbone, which have 11 bits: right but for rounding

    @cached_property
    def _indices(self) -> list[int]:
        return [index for index in range(len(self.cache.entries)) if index not in self.cache.unreadable]

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self.cache.entries[index] for index in self._indices)

    @cached_property
    def labels(self) -> Int[Tensor, " M"]:
        return torch.tensor([entry.sample.label for entry in self.entries], dtype=torch.long)

    def __len__(self) -> int:
        return len(self._indices)

    def maps(self, chosen: Sequence[int]) -> Float[Tensor, "M D H W"]:
        return self.cache.read([self._indices[row] for row in chosen]).values

    def batches(self, chosen: Sequence[int] | None = None) -> Iterator[MapBatch]:
        """Iterate over the maps, all or some, with their labels and rows."""
        wanted = list(range(len(self)) if chosen is None else chosen)
        for start in range(0, len(wanted), _ROWS):
            rows = wanted[start : start + _ROWS]
            yield self.maps(rows), self.labels[rows], torch.tensor(rows)

    @torch.no_grad()
    def nearest(self, prototypes: Float[Tensor, "n D H1 W1"], forbidden: Forbidden | None = None) -> NearestPatches:
        """Eq. 1 for each view and prototype; a view all of whose patches are forbidden is infinitely far."""
        batches = [nearest_patches(maps, prototypes) for maps, _, _ in self.batches()]
        distance = torch.cat([batch.distance for batch in batches])
        patch = torch.cat([batch.patch for batch in batches])
        for row, mask in (forbidden or {}).items():
            patches = extract_patches(self.maps([row]), (prototypes.shape[2], prototypes.shape[3]))[0]
            dists = torch.linalg.vector_norm(patches[:, None] - prototypes.flatten(1), dim=2)  # P n
            distance[row], patch[row] = dists.masked_fill(mask[:, None], torch.inf).min(dim=0)
        return NearestPatches(distance, patch)


def cache_tree_features(
    tree: ProtoTree, dataset: ViewDataset, folder: Path, tick: Tick | None = None, kept: FeatureMaps | None = None
) -> StoredMaps:
    """Return the map of every view under the tree's network; with `kept` maps of its backbone only the head runs."""
    backbone = tree.features.backbone
    crops = f" {backbone.crops}" if backbone.crops != FULL_ONLY else ""
    options = format_options(backbone.options)
    digest = hashlib.sha256(f"{VERSION} {options} {backbone.feature_level} {dataset.preprocessing}{crops}".encode())
    add_tensors(digest, tree.features.state_dict())
    rows = view_digests(dataset)
    digest.update(repr((rows, kept is not None)).encode())
    height, width = backbone.map_size
    shape = (1, len(dataset), tree.features.prototype_dim, len(backbone.crops) * height, width)
    file = FeatureFile(folder / f"{digest.hexdigest()[:32]}.f32", shape, rows=rows)
    device = tree.prototypes.device

    def maps() -> Extracted:
        if kept is None:
            yield from extract([dataset], frozen_features(tree.features, threads=1), device=device)
            return
        tree.eval()
        for batch in kept.batches(_ROWS):
            with torch.inference_mode():
                z = tree.features.from_map(batch.values.to(device)).float().contiguous().cpu()
            yield 0, batch.entries.tolist(), z

    with exclusive(file.path):
        if not file.is_complete:
            write_files([file], maps, tick)
    return StoredMaps(_opened(file, dataset.entries), is_rounded=kept is not None)

"""Maps computed once and kept on disk: one cache, for what a frozen network makes of a view and for whole feature maps.

**Frozen trunk cache.** While the trunk is frozen, its output for a view of a photo never changes. `cache_borders` runs
it once per view into a file of float16 numbers, and from then on only the tail runs. **Feature maps.** `cache_features`
keeps what a finished tree's network makes of a photo, so that a changed prototype is compared in moments.

A file is named after everything that went into it (weights, preprocessing, augmentation, photos), so that a stale one
is never used, and gets that name only when it is complete. Where files lie, and who uses them: `shared_maps`.

Notation used for tensor shapes: V variants of a view, M views of photos, D prototype depth, H W feature map, P patches.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.backbones.backbone import Backbone
from prototree.backbones.crops import FULL_ONLY
from prototree.backbones.inference import ONNXRUNTIME, TORCH, frozen, frozen_features
from prototree.backbones.preprocessing import Preprocessing
from prototree.core.model import ProtoTree
from prototree.core.patches import NearestPatches, extract_patches, nearest_patches
from prototree.data.dataset import ImageData
from prototree.data.loading import Entry, ViewDataset, Views
from prototree.data.stat_cache import photo_digests
from prototree.data.views import View, evaluation_views
from prototree.errors import TrainError
from prototree.features.extract import VERSION, Job, Made, MapFile, Tick, fill_missing, from_photos
from prototree.features.registry import OWN_CACHE, folder_beside, note_use, shared_folder
from prototree.training import distributed

_ROWS = 256  # maps compared at a time, so that memory does not grow with the data

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
    closer: tuple["MapCache", ...] = ()  # the same entries at the network's further looks

    @property
    def names(self) -> list[str]:
        """Of the files."""
        own = [Path(str(file.filename)).name for file in self.files if isinstance(file, np.memmap)]
        return own + [name for cache in self.closer for name in cache.names]

    @staticmethod
    def stack_crops(crops: Sequence["MapCache"]) -> "MapCache":
        """Maps of all looks at the same entries, from those of each."""
        first, *closer = crops
        return replace(
            first, unreadable=first.unreadable.union(*(one.unreadable for one in closer)), closer=tuple(closer)
        )

    def only(self, places: Sequence[int]) -> "MapCache":
        """Some of the entries, in the order named."""
        unreadable = frozenset(new for new, old in enumerate(places) if old in self.unreadable)
        rows = tuple(self._rows[place] for place in places)
        entries, closer = tuple(self.entries[place] for place in places), (one.only(places) for one in self.closer)
        return MapCache(self.files, entries, unreadable, rows, tuple(closer))

    def join(self, other: "MapCache") -> "MapCache":
        """The entries of both."""
        unreadable = self.unreadable | {len(self.entries) + index for index in other.unreadable}
        n_rows = sum(file.shape[1] for file in self.files)
        rows = (*self._rows, *(n_rows + row for row in other._rows))
        closer = tuple(one.join(more) for one, more in zip(self.closer, other.closer, strict=True))
        return MapCache(self.files + other.files, (*self.entries, *other.entries), unreadable, rows, closer)

    def same(self, entries: Sequence[Entry]) -> "MapCache":
        """The maps of other entries, each of which is a view that this one has too."""
        place = {_key(entry): number for number, entry in enumerate(self.entries)}
        return self.only([place[_key(entry)] for entry in entries])

    @property
    def _rows(self) -> Sequence[int]:
        return range(len(self.entries)) if self.rows is None else self.rows

    def read(self, indices: Sequence[int], epoch: int) -> Inputs:
        usable = [index for index in indices if index not in self.unreadable]
        labels = torch.tensor([self.entries[index].sample.label for index in usable], dtype=torch.long)
        crops = [one._values(usable, epoch) for one in (self, *self.closer)]
        values = torch.cat(crops, dim=2) if self.closer else crops[0]
        return Inputs(values, labels, torch.tensor(usable, dtype=torch.long))

    def _values(self, usable: Sequence[int], epoch: int) -> Tensor:
        row_of = usable if self.rows is None else [self.rows[index] for index in usable]
        rows = np.empty((len(usable), *self.files[0].shape[2:]), self.files[0].dtype)
        start = 0
        for file in self.files:
            here = [place for place, row in enumerate(row_of) if start <= row < start + file.shape[1]]
            rows[here] = file[epoch % len(file), [row_of[place] - start for place in here]]
            start += file.shape[1]
        # Memory of torch's own, aligned: where numbers lie can decide the last bits of a matrix product. The channels
        # of a patch side by side, as the head wants them.
        layout = torch.channels_last if rows.ndim == 4 else torch.preserve_format
        return torch.from_numpy(rows).to(torch.float32, copy=True, memory_format=layout)


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
    engine: str = TORCH,
) -> MapCache:
    """The trunk's output for every entry, from disk if it is there, else computed now.

    `run` is the folder of the run that uses it; one that an earlier version made may have maps of its own.
    """
    options = {"variants": variants, "workers": workers, "tick": tick, "run": run, "engine": engine}
    return cache_all_borders(backbone, [dataset], folder, **options)[0]  # type: ignore[arg-type]


def cache_all_borders(
    backbone: Backbone,
    datasets: Sequence[ViewDataset],
    folder: Path,
    *,
    variants: int = 1,
    workers: int = 0,
    tick: Tick | None = None,
    run: Path | None = None,
    engine: str = TORCH,
    begin: Callable[[int], None] | None = None,
) -> list[MapCache]:
    """The same for several data sets of the same photos, each of which is decoded once for all of them.

    `begin` hears how many views have to be looked at, before they are.
    """
    if variants < 1:
        raise TrainError(f"expected at least one cached view of each photo, got {variants}")
    names = [_border_name(backbone, dataset, variants) for dataset in datasets]
    shapes = [(variants, len(dataset), *_border_shape(backbone)) for dataset in datasets]

    def files(chosen: str) -> list[MapFile]:
        places = zip(names, shapes, strict=True)
        return [_place(folder, run, _file_name(name, chosen), shape) for name, shape in places]

    found = files(engine)
    if begin is not None:
        begin(variants * sum(len(one) for one, file in zip(datasets, found, strict=True) if not file.is_complete))
    if distributed.any_process(not all(file.is_complete for file in found)):
        with distributed.one_after_the_other():  # the first may have to convert it
            trunk = frozen(backbone, engine, threads=1)  # every core looks at photos of its own
        found = files(trunk.engine)
        device = next(backbone.parameters()).device

        def fill(missing: list[int]) -> None:
            wanted = [datasets[number] for number in missing]
            make = partial(
                from_photos, wanted, lambda images: trunk(images).half(), variants=variants, workers=workers,
                device=device,
            )  # fmt: skip
            Job([found[number] for number in missing], make, tick).run()

        fill_missing(found, fill)
    if run is not None:
        for file in found:
            if file.path.parent != run / OWN_CACHE:
                note_use(run, file.path.name)
    return [_opened(file, dataset) for file, dataset in zip(found, datasets, strict=True)]


def kept_borders(
    backbone: Backbone,
    dataset: ViewDataset,
    run: Path,
    among: Sequence[ViewDataset] = (),
    engines: Sequence[str] = (ONNXRUNTIME, TORCH),
) -> MapCache | None:
    """The backbone's maps of every entry, at all its looks, where a run or those beside it have them; none is computed.

    Maps of another set of views are as good, if it has these views among others.
    """
    whole = copy.copy(backbone).unsplit()
    wanted = {_key(entry) for entry in dataset.entries}
    sets = (dataset, *(other for other in among if wanted <= {_key(entry) for entry in other.entries}))

    def found(share: float, engine: str) -> MapCache | None:
        for wider in (one.looking(share) for one in sets):
            name, shape = _border_name(whole, wider, 1), (1, len(wider), backbone.n_channels, *backbone.map_size)
            file = _place(shared_folder(run), run, _file_name(name, engine), shape)
            if file.is_complete:
                own = _opened(file, wider)
                return own if wider.entries is dataset.entries else own.same(dataset.entries)
        return None

    for engine in engines:
        crops = [one for share in backbone.crops if (one := found(share, engine)) is not None]
        if len(crops) == len(backbone.crops):
            return MapCache.stack_crops(crops)
    return None


def kept_sets(data: ImageData, source_views: Views, preprocessing: Preprocessing) -> list[ViewDataset]:
    """The sets of views whose maps runs keep: of training photos, of test photos, or of both, divided in parts."""
    sets = ((data.train, source_views), (data.test, evaluation_views), (data.every, source_views))
    return [ViewDataset(samples, views, preprocessing) for samples, views in sets]


def cache_features(
    tree: ProtoTree, dataset: ViewDataset, folder: Path, tick: Tick | None = None, kept: MapCache | None = None
) -> StoredMaps:
    """The feature map of every view under the tree's own network, from disk if it is there, else computed now.

    `kept` are the backbone's maps of the same entries, where there are any: only the head is left to do.
    """
    name = _feature_name(tree, dataset) if kept is None else f"{_feature_name(tree, dataset)}-kept"
    backbone = tree.features.backbone
    n_rows, n_columns = backbone.map_size
    shape = (1, len(dataset), tree.features.prototype_dim, len(backbone.crops) * n_rows, n_columns)
    file, device = MapFile(folder / f"{name}.f32", shape), tree.prototypes.device

    def make() -> Made:
        if kept is not None:
            return _from_borders(tree, kept)
        network = frozen_features(tree.features, threads=1)
        return from_photos([dataset], network, variants=1, workers=0, device=device)

    fill_missing([file], lambda _: Job([file], make, tick).run())
    return StoredMaps(_opened(file, dataset), is_rounded=kept is not None)


def _from_borders(tree: ProtoTree, kept: MapCache) -> Made:
    """The head on kept maps of the backbone; with several processes each does its share."""
    features, device = tree.features.eval(), tree.prototypes.device
    starts = range(0, len(kept.entries), _ROWS)
    for start in starts[distributed.shard().rank :: distributed.shard().world_size]:
        inputs = kept.read(range(start, min(start + _ROWS, len(kept.entries))), 0)
        with torch.inference_mode():
            yield 0, inputs.entries.tolist(), features.from_map(inputs.values.to(device)).float().contiguous().cpu()


def remove_unfinished(folder: Path) -> None:
    """Removes maps that a killed process was computing, so that they are computed again."""
    for path in folder.glob("*.partial"):
        path.unlink(missing_ok=True)


def _key(entry: Entry) -> tuple[Path, View]:
    return entry.sample.path, entry.view


def _place(folder: Path, run: Path | None, name: str, shape: tuple[int, ...]) -> MapFile:
    """Where a file of maps will be, or is: a complete one is used also where nothing may be written."""
    for known in (run / OWN_CACHE, folder_beside(run)) if run is not None else ():
        if known != folder and (file := MapFile(known / name, shape)).is_complete:
            return file
    return MapFile(folder / name, shape)


def _file_name(name: str, engine: str) -> str:
    """Maps of two engines differ in their last digits and never mix."""
    return f"{name}.f16" if engine == TORCH else f"{name}-{engine}.f16"


def _opened(file: MapFile, dataset: ViewDataset) -> MapCache:
    return MapCache((file.rows(),), dataset.entries, file.unreadable())


def _border_shape(backbone: Backbone) -> tuple[int, ...]:
    size, was_training = backbone.preprocessing.size, backbone.training
    with torch.inference_mode():
        device = next(backbone.parameters()).device
        shape = backbone.eval().trunk(torch.zeros(1, 3, size, size, device=device)).shape[1:]
    backbone.train(was_training)
    return tuple(shape)


def _border_name(backbone: Backbone, dataset: ViewDataset, variants: int) -> str:
    digest = hashlib.sha256(f"{VERSION} {backbone.name} {backbone.feature_level} {variants} {dataset.seed}".encode())
    digest.update(repr((dataset.preprocessing, dataset.transform)).encode())
    for name, tensor in backbone.trunk_state().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    _add_views(digest, dataset)
    return digest.hexdigest()[:32]


def _add_views(digest: "hashlib._Hash", dataset: ViewDataset) -> None:
    """Photos count by name and content, so that a copied or moved folder is known again."""
    held = photo_digests(entry.sample.path for entry in dataset.entries)
    for entry in dataset.entries:
        path = entry.sample.path  # views at random depend on the name
        digest.update(repr((path.name, held[path], entry.view)).encode())


def _feature_name(tree: ProtoTree, dataset: ViewDataset) -> str:
    backbone = tree.features.backbone
    crops = f" {backbone.crops}" if backbone.crops != FULL_ONLY else ""
    digest = hashlib.sha256(f"{VERSION} features {backbone.feature_level} {dataset.preprocessing}{crops}".encode())
    for name, tensor in tree.features.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    _add_views(digest, dataset)
    return digest.hexdigest()[:32]

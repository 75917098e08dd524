"""Feature maps of photos, computed once and kept on disk, so that a changed prototype is compared in moments.

Notation used for tensor shapes: M views of photos, D prototype depth, H W feature map, P patches of a map.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from prototree.data.loading import Entry, ViewDataset
from prototree.errors import DataError
from prototree.files import read_json, write_file
from prototree.training.batches import PhotoBatches, Tick, maps_of
from prototree.training.projection import MapBatch
from prototree.tree.model import ProtoTree
from prototree.tree.patches import NearestPatches, extract_patches, nearest_patches

_VERSION = 1
_ROWS = 256  # maps compared at a time, so that memory does not grow with the data

Forbidden = Mapping[int, Bool[Tensor, " P"]]
"""Patches that may not be found, by the row of their map."""


@dataclass(frozen=True)
class StoredMaps:
    """The feature map of each view, with the entry it belongs to; views that could not be read are left out."""

    rows: ndarray  # M×D×H×W, float32, on disk
    entries: tuple[Entry, ...]  # M

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def labels(self) -> Int[Tensor, " M"]:
        return torch.tensor([entry.sample.label for entry in self.entries], dtype=torch.long)

    def maps(self, chosen: Sequence[int]) -> Float[Tensor, "M D H W"]:
        """Some of the maps."""
        return torch.from_numpy(np.array(self.rows[list(chosen)]))

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


def store_maps(tree: ProtoTree, dataset: ViewDataset, folder: Path, tick: Tick | None = None) -> StoredMaps:
    """The maps of every view under the tree's own network: from disk if they are there, else computed now.

    The file is named after all that went into it, so that a stale one is never used, and gets its name when complete.
    """
    name = _fingerprint(tree, dataset)
    path, description = folder / f"{name}.f32", folder / f"{name}.json"
    shape = (tree.features.depth, *tree.features.backbone.map_size)
    size = int(np.prod(shape)) * 4
    if not description.exists() or path.stat().st_size != len(read_json(description)["read"]) * size:
        _compute(tree, dataset, path, tick)
    read = read_json(description)["read"]
    if not read:
        raise DataError("expected at least one readable photo, got none")
    rows = np.memmap(path, dtype=np.float32, mode="r", shape=(len(read), *shape))
    return StoredMaps(rows, tuple(dataset.entries[index] for index in read))


def _compute(tree: ProtoTree, dataset: ViewDataset, path: Path, tick: Tick | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, read = path.with_suffix(f".{os.getpid()}.partial"), []
    try:
        with open(temporary, "wb") as file:
            for maps, _, entries in maps_of(PhotoBatches(dataset, 32, shuffle=False), tree.features):
                file.write(maps.float().contiguous().numpy().tobytes())
                read += entries.tolist()
                if tick:
                    tick(len(read), len(dataset))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    write_file(path.with_suffix(".json"), json.dumps({"version": _VERSION, "read": read}).encode())


def _fingerprint(tree: ProtoTree, dataset: ViewDataset) -> str:
    digest = hashlib.sha256(repr((_VERSION, dataset.preprocessing, tree.features.backbone.level)).encode())
    for name, tensor in tree.features.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    for entry in dataset.entries:
        stat = entry.sample.path.stat() if entry.sample.path.exists() else None
        stamp = (stat.st_size, stat.st_mtime_ns) if stat else ()
        digest.update(repr((str(entry.sample.path), stamp, entry.view)).encode())
    return digest.hexdigest()[:32]

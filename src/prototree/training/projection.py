"""Every prototype becomes its nearest latent training patch (Eq. 6, and Eq. S1 with class constraints).

Notation used for tensor shapes: B batch, D prototype depth, H W feature map, P prototypes, K classes.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.backbones.geometry import Box
from prototree.backbones.inference import frozen_features
from prototree.backbones.preprocessing import Preprocessing
from prototree.backbones.thread_map import side_by_side
from prototree.core.localization import peak_box, peak_places
from prototree.core.model import ProtoTree, PrototypeSource
from prototree.core.nodes import LN2
from prototree.core.patches import extract_patches, nearest_patches
from prototree.data.dataset import name_in
from prototree.data.loading import Entry, ViewDataset
from prototree.data.views import photo_size, to_photo
from prototree.errors import DataError
from prototree.features.cache import MapBatch
from prototree.training import distributed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourcePhotos:
    """Which photo and view stands at each place in the data."""

    root: Path
    entries: Sequence[Entry]


@dataclass(frozen=True)
class Nearest:
    """For each prototype the nearest patch found so far. Ties go to the lowest place in the data, then in the map."""

    distance: Float[Tensor, " P"]
    place: Int[Tensor, " P"]  # in the data
    patch: Int[Tensor, " P"]  # in the map, row-major
    vector: Float[Tensor, "P E"]

    def merge(self, other: "Nearest") -> "Nearest":
        closer = (other.distance < self.distance) | (
            (other.distance == self.distance) & torch.isfinite(other.distance) & (other.place < self.place)
        )
        return Nearest(
            torch.where(closer, other.distance, self.distance),
            torch.where(closer, other.place, self.place),
            torch.where(closer, other.patch, self.patch),
            torch.where(closer[:, None], other.vector, self.vector),
        )


def side_classes(tree: ProtoTree) -> tuple[Bool[Tensor, "N K"], Bool[Tensor, "N K"]]:
    """The majority classes of the leaves to the left and to the right of each node."""
    majority = tree.leaf_logits.argmax(dim=1).cpu().numpy()
    sides = np.zeros((2, tree.topology.n_nodes, tree.n_classes), dtype=bool)
    for leaf, (path, turns) in enumerate(zip(tree.topology.paths, tree.topology.goes_right, strict=True)):
        on_path = path >= 0
        sides[turns[on_path].astype(int), path[on_path], majority[leaf]] = True
    left, right = torch.from_numpy(sides).to(tree.leaf_logits.device)
    return left, right


def prototype_classes(tree: ProtoTree) -> Bool[Tensor, "P K"]:
    """𝒴' of Eq. S1: the classes below each prototype's node; where a node has two, those on the prototype's side."""
    left, right = side_classes(tree)
    return left | right if tree.question.kind == "presence" else torch.cat([right, left])


@torch.no_grad()
def find_nearest(
    tree: ProtoTree, maps: Iterable[MapBatch], *constraints: Bool[Tensor, "P K"] | None
) -> tuple[Nearest, ...]:
    """One pass over the data: the nearest patch to each prototype, once per constraint (None: any class).

    Memory does not grow with the data. In several processes, each passes its share, and all get the same answer.
    """
    n_prototypes, prototypes = tree.n_prototypes, tree.prototypes.detach()
    empty = Nearest(
        torch.full((n_prototypes,), torch.inf, dtype=prototypes.dtype, device=prototypes.device),
        torch.full((n_prototypes,), -1, device=prototypes.device),
        torch.zeros(n_prototypes, dtype=torch.long, device=prototypes.device),
        prototypes.flatten(1).clone(),
    )
    found = [empty for _ in constraints]
    for feature_map, labels, places in maps:
        if not len(labels) or not n_prototypes:
            continue
        nearest = nearest_patches(feature_map.to(prototypes.dtype), prototypes)
        patches = extract_patches(feature_map, (prototypes.shape[2], prototypes.shape[3])).to(prototypes.dtype)
        for i, allowed in enumerate(constraints):
            distance = nearest.distance
            if allowed is not None:
                distance = distance.masked_fill(~allowed[:, labels].T, torch.inf)
            found[i] = found[i].merge(_best_in_batch(distance, nearest.patch, patches, places))
    return tuple(_over_processes(one) for one in found)


@dataclass(frozen=True)
class Projected:
    """The tree whose prototypes are training patches, and how far they moved."""

    tree: ProtoTree
    nearest: Nearest
    unconstrained: Nearest | None = None

    @property
    def mean_distance(self) -> float:
        """Mean distance from a prototype to its patch before projection, as in Table 2."""
        return float(self.nearest.distance.mean()) if len(self.nearest.distance) else 0.0

    @property
    def constraint_cost(self) -> float | None:
        """How much farther the class-constrained patches are on average (5.86e-5 in the supplement)."""
        if self.unconstrained is None or not len(self.nearest.distance):
            return None
        return float((self.nearest.distance - self.unconstrained.distance).mean())

    @property
    def n_duplicates(self) -> int:
        """How many prototypes share their patch with an earlier one."""
        patches = torch.stack([self.nearest.place, self.nearest.patch], dim=1)
        return len(patches) - len(torch.unique(patches, dim=0))


@torch.no_grad()
def project(
    tree: ProtoTree,
    maps: Iterable[MapBatch],
    places: SourcePhotos | None = None,
    *,
    project_within_class: bool = True,
    compare: bool = False,
) -> Projected:
    """A new tree in which each prototype is replaced by its nearest training patch.

    `places` says which photo and view each place in the data is, for the sources that the tree keeps. `compare` also
    keeps the patches found without class constraints, in the same pass.

    Examples:
        >>> projected = project(tree, [(maps, labels, places)], project_within_class=False)  # B×D×H×W, B, B
        >>> projected.tree.prototypes.shape  # N×D×1×1, each a patch of the maps
        torch.Size([3, 16, 1, 1])
    """
    constraint = prototype_classes(tree) if project_within_class else None
    found = find_nearest(tree, maps, *([constraint, None] if constraint is not None else [None]))
    nearest, unconstrained = found[0], found[-1]
    if not torch.isfinite(unconstrained.distance).all():
        raise DataError("expected at least one training image to project on, got none")
    orphans = torch.nonzero(~torch.isfinite(nearest.distance))[:, 0]
    if len(orphans):
        log.warning(
            "%d prototypes have no training image of any class below them; all classes are used for them", len(orphans)
        )
        nearest = nearest.merge(_only(unconstrained, orphans))
    topology = tree.topology
    projected = tree.with_topology(topology, np.arange(topology.n_nodes), np.arange(topology.n_leaves))
    projected.prototypes.copy_(nearest.vector.view_as(tree.prototypes))
    if places is not None:
        rows = zip(nearest.place.tolist(), nearest.patch.tolist(), nearest.distance.tolist(), strict=True)
        projected.sources = tuple(_source(tree, places, *row) for row in rows)
    return Projected(projected, nearest, unconstrained if compare else None)


def measure_again(projected: Projected, entries: Sequence[Entry]) -> None:
    """Each prototype as the network sees its patch now, and where around that patch its photo is like it.

    Maps that came from a cache had been rounded.
    """
    tree, nearest = projected.tree.eval(), projected.nearest
    size, boxes = (tree.prototypes.shape[2], tree.prototypes.shape[3]), dict[int, Box]()
    network = frozen_features(tree.features, threads=1)

    @torch.no_grad()
    def look_again(place: int) -> tuple[Tensor, Tensor, list[Box]]:
        image = _image_of(entries[place], tree.preprocessing)
        feature_map = network(image[None].to(tree.prototypes.device))
        patches = extract_patches(feature_map, size)[0].to(tree.prototypes.dtype)
        nodes = torch.nonzero(nearest.place == place)[:, 0]
        own = patches[nearest.patch[nodes]]
        apart = torch.cdist(own, patches, compute_mode="donot_use_mm_for_euclid_dist").view(-1, *tree.grid.shape)
        apart = apart / (LN2 * tree.reach[nodes, None, None])
        rows, columns = peak_places(apart, nearest.patch[nodes], tree.grid.rows_per_crop)
        peaks = [peak_box(tree.grid, *peak) for peak in zip(rows.tolist(), columns.tolist(), strict=True)]
        return nodes, own, [_in_photo(peak, entries[place], tree.preprocessing) for peak in peaks]

    places = torch.unique(nearest.place).tolist()
    in_turn = map if tree.prototypes.is_cuda else side_by_side
    for nodes, own, shown in in_turn(look_again, places):
        tree.prototypes.data[nodes] = own.view(len(nodes), *tree.prototypes.shape[1:])
        boxes.update(zip(nodes.tolist(), shown, strict=True))
    tree.sources = tuple(
        source and replace(source, shown=boxes[number].edges) for number, source in enumerate(tree.sources)
    )


def _image_of(entry: Entry, preprocessing: Preprocessing) -> Float[Tensor, "3 h w"]:
    return ViewDataset([entry.sample], lambda _: (entry.view,), preprocessing)[0].image


def _best_in_batch(
    distance: Float[Tensor, "B P"],
    patch: Int[Tensor, "B P"],
    patches: Float[Tensor, "B cells E"],
    places: Int[Tensor, " B"],
) -> Nearest:
    shortest, image = distance.min(dim=0)
    node = torch.arange(distance.shape[1], device=distance.device)
    which = patch[image, node]
    return Nearest(shortest, places.to(distance.device)[image], which, patches[image, which])


def _over_processes(found: Nearest) -> Nearest:
    parts = [distributed.gather(t) for t in (found.distance, found.place, found.patch, found.vector)]
    merged, *others = (Nearest(*part) for part in zip(*parts, strict=True))
    for other in others:
        merged = merged.merge(other)
    return merged


def _only(nearest: Nearest, nodes: Int[Tensor, " n"]) -> Nearest:
    distance = torch.full_like(nearest.distance, torch.inf)
    distance[nodes] = nearest.distance[nodes]
    return replace(nearest, distance=distance)


def _in_photo(box: Box, entry: Entry, preprocessing: Preprocessing) -> Box:
    return to_photo(box, entry.view, photo_size(entry.sample), preprocessing)


def _source(tree: ProtoTree, places: SourcePhotos, place: int, patch: int, distance: float) -> PrototypeSource:
    entry = places.entries[place]
    row, column = tree.grid.place(patch)
    box = _in_photo(tree.grid.box(row, column), entry, tree.preprocessing)
    region = entry.view.region
    return PrototypeSource(
        image=name_in(places.root, entry.sample.path),
        label=entry.sample.label,
        view=entry.view.name,
        patch=(row, column),
        box=box.edges,
        distance=distance,
        region=region.edges if region is not None else None,
        flip=entry.view.flip,
    )

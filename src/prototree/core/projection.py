"""Projection: replace each prototype by its nearest training patch (Eq. 6), of the classes below it by default (S1).

Notation used for tensor shapes: B batch, D prototype dimension, H W feature map, P prototypes, K classes, E = D·H₁·W₁.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.core.model import ProtoTree, extract_patches, nearest_patches
from prototree.errors import DataError

log = logging.getLogger(__name__)

MapBatch = tuple[Float[Tensor, "_ D H W"], Int[Tensor, " _"], Int[Tensor, " _"]]
"""Feature maps, labels, and the index of each in the data."""


@dataclass(frozen=True)
class Nearest:
    """The nearest patch to each prototype so far. Ties go to the lowest index in the data, then in the map."""

    distance: Float[Tensor, " P"]
    index: Int[Tensor, " P"]  # of the image in the data
    patch: Int[Tensor, " P"]  # in the map, row-major
    vector: Float[Tensor, "P E"]

    def merge(self, other: "Nearest") -> "Nearest":
        is_tie = (other.distance == self.distance) & torch.isfinite(other.distance)
        return self.where((other.distance < self.distance) | (is_tie & (other.index < self.index)), other)

    def where(self, chosen: Bool[Tensor, " P"], other: "Nearest") -> "Nearest":
        """Take the patches of `other` where chosen."""
        return Nearest(
            torch.where(chosen, other.distance, self.distance),
            torch.where(chosen, other.index, self.index),
            torch.where(chosen, other.patch, self.patch),
            torch.where(chosen[:, None], other.vector, self.vector),
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
    return left | right if tree.node_function.kind == "presence" else torch.cat([right, left])


@torch.no_grad()
def find_nearest(
    tree: ProtoTree, maps: Iterable[MapBatch], *constraints: Bool[Tensor, "P K"] | None
) -> tuple[Nearest, ...]:
    """Find the nearest patch to each prototype in one pass, once per constraint (None: any class)."""
    prototypes = tree.prototypes.detach()
    rows = torch.arange(len(prototypes), device=prototypes.device)
    infinite = torch.full_like(rows, torch.inf, dtype=prototypes.dtype)
    best = [Nearest(infinite, torch.full_like(rows, -1), torch.zeros_like(rows), prototypes.flatten(1).clone())]
    best *= len(constraints)
    for feature_map, labels, indices in maps:
        if not len(labels) or not len(prototypes):
            continue
        nearest = nearest_patches(feature_map.to(prototypes.dtype), prototypes)
        patches = extract_patches(feature_map, (prototypes.shape[2], prototypes.shape[3])).to(prototypes.dtype)
        for i, allowed in enumerate(constraints):
            distance = nearest.distance
            if allowed is not None:
                distance = distance.masked_fill(~allowed[:, labels].T, torch.inf)
            shortest, image = distance.min(dim=0)
            patch = nearest.patch[image, rows]
            index = indices.to(distance.device)[image]
            best[i] = best[i].merge(Nearest(shortest, index, patch, patches[image, patch]))
    return tuple(best)


@dataclass(frozen=True)
class Projection:
    """The tree whose prototypes are training patches, and how far they moved."""

    tree: ProtoTree
    nearest: Nearest
    unconstrained: Nearest | None = None

    @property
    def mean_distance(self) -> float:
        """Mean distance from a prototype to its patch before projection, as in Table 2."""
        return float(self.nearest.distance.mean()) if len(self.nearest.distance) else 0.0

    @property
    def class_constraint_gap(self) -> float | None:
        """How much farther the class-constrained patches are on average (5.86e-5 in the supplement)."""
        if self.unconstrained is None or not len(self.nearest.distance):
            return None
        return float((self.nearest.distance - self.unconstrained.distance).mean())

    @property
    def n_duplicates(self) -> int:
        """How many prototypes share their patch with an earlier one."""
        patches = torch.stack([self.nearest.index, self.nearest.patch], dim=1)
        return len(patches) - len(torch.unique(patches, dim=0))


@torch.no_grad()
def project(
    tree: ProtoTree, maps: Iterable[MapBatch], *, project_within_class: bool = True, compare: bool = False
) -> Projection:
    """Return a new tree in which each prototype is its nearest training patch.

    `compare` also keeps the patches found without class constraints, in the same pass.
    """
    constraints = [prototype_classes(tree), None] if project_within_class else [None]
    results = find_nearest(tree, maps, *constraints)
    nearest, unconstrained = results[0], results[-1]
    if not torch.isfinite(unconstrained.distance).all():
        raise DataError("expected at least one training image to project on, got none")
    is_orphan = ~torch.isfinite(nearest.distance)
    if is_orphan.any():
        log.warning(
            "%d prototypes have no training image of any class below them; all classes are used", is_orphan.sum()
        )
        nearest = nearest.where(is_orphan, unconstrained)
    topology = tree.topology
    projected = tree.with_topology(topology, np.arange(topology.n_nodes), np.arange(topology.n_leaves))
    projected.prototypes.copy_(nearest.vector.view_as(tree.prototypes))
    return Projection(projected, nearest, unconstrained if compare else None)

"""Gives a distance its meaning: how the training photos of both sides are spread around the boundary of a node.

Notation used for tensor shapes: B batch, P prototypes, n nodes, K classes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from prototree.core.model import ProtoTree
from prototree.core.nodes import LN2
from prototree.explain.records import SPREAD_LIMITS, SPREAD_LINES, SPREAD_RANGES, Spread
from prototree.training import distributed


def decisive(
    tree: ProtoTree, nodes: Sequence[int], right: Float[Tensor, "B n"], left: Float[Tensor, "B n"] | None = None
) -> Float[Tensor, "B n"]:
    """What decides at each node, from the distances to its prototypes.

    Presence: the distance in units of the reach; below 1 goes right. Choice: how much nearer the right prototype is
    than the left one, as a share of both distances; above 0 goes right, 1 is a patch that is the right prototype.
    """
    if left is None:
        return right / (LN2 * tree.reach[list(nodes)])
    return (left - right) / (left + right).clamp_min(torch.finfo(right.dtype).tiny)


def class_sides(tree: ProtoTree) -> tuple[Bool[ndarray, "N K"], Bool[ndarray, "N K"]]:
    """For each node the classes of the leaves on its right, and of those on its left; a class of both is in neither."""
    topology = tree.topology
    sides = np.zeros((2, topology.n_nodes, tree.n_classes), dtype=bool)
    labels = tree.leaf_logits.detach().argmax(dim=1).cpu().numpy()
    for path, turns, label in zip(topology.paths, topology.goes_right, labels, strict=True):
        on_way = path >= 0
        sides[turns[on_way].astype(int), path[on_way], label] = True
    left, right = sides
    return right & ~left, left & ~right


class SpreadCounts:
    """Counts photos batch by batch. Memory does not grow with the data."""

    def __init__(self, tree: ProtoTree, nodes: Sequence[int]) -> None:
        device = tree.prototypes.device
        self._tree, self._nodes = tree, list(nodes)
        self._sides = [torch.as_tensor(side[self._nodes], device=device) for side in class_sides(tree)]
        self._counts = torch.zeros((2, len(self._nodes), SPREAD_RANGES), dtype=torch.long, device=device)

    def add(self, right: Float[Tensor, "B n"], left: Float[Tensor, "B n"] | None, labels: Int[Tensor, " B"]) -> None:
        """Photos of these classes, with their distances to each node's prototypes."""
        low, high = SPREAD_LIMITS[self._tree.question.kind]
        at = decisive(self._tree, self._nodes, right, left)
        # What lies beyond is counted in the outermost ranges.
        place = ((at - low) / (high - low) * SPREAD_RANGES).floor().clamp(0, SPREAD_RANGES - 1).long().T
        for counts, side in zip(self._counts, self._sides, strict=True):
            counts.scatter_add_(1, place, side[:, labels].long())

    def gather(self) -> "SpreadCounts":
        """In several processes: from now on each has counted what all have."""
        distributed.sum_over(self._counts)
        return self

    def spreads(self) -> list[Spread]:
        """One per node."""
        kind = self._tree.question.kind
        right, left = self._counts.tolist()
        return [
            Spread(*SPREAD_LIMITS[kind], SPREAD_LINES[kind], tuple(own), tuple(other))
            for own, other in zip(right, left, strict=True)
        ]

"""Pruning (§5.1): leaves that learned nothing go, and with them every node that no longer decides anything."""

from dataclasses import dataclass

import torch

from prototree.core.leaves import class_log_probs
from prototree.core.model import ProtoTree
from prototree.errors import PruneError


@dataclass(frozen=True)
class Pruned:
    """The smaller tree, and what was taken away."""

    tree: ProtoTree
    threshold: float
    leaves_before: int
    leaves_after: int

    @property
    def prototypes_before(self) -> int:
        return self.tree.node_function.prototypes_per_node * (self.leaves_before - 1)

    @property
    def pruned_fraction(self) -> float:
        """The fraction of prototypes that were removed, as in Table 2."""
        return 1 - self.tree.n_prototypes / max(self.prototypes_before, 1)

    def __str__(self) -> str:
        text = (
            f"pruned at {self.threshold:.4g}: {self.leaves_before} → {self.leaves_after} leaves, "
            f"{self.prototypes_before} → {self.tree.n_prototypes} prototypes ({self.pruned_fraction:.1%} removed)"
        )
        if self.leaves_after == self.leaves_before and self.leaves_before > 2 * self.tree.n_classes:
            text += "; nothing was removed, but there are more than two leaves per class: the threshold may be too low"
        return text


def default_threshold(n_classes: int) -> float:
    """Twice the uniform probability: 0.01 for the paper's 200 classes. For two classes, halfway from there to 1."""
    return min(2 / n_classes, (1 + 1 / n_classes) / 2)


@torch.no_grad()
def prune(tree: ProtoTree, threshold: float | None = None) -> Pruned:
    """Drop leaves with max σ(c) ≤ threshold, emptied subtrees, and parents left with one child, the root too.

    The new tree holds copies of the prototypes and leaves it kept and shares the feature extractor.
    """
    threshold = default_threshold(tree.n_classes) if threshold is None else threshold
    if not 0 <= threshold < 1:
        raise PruneError(f"expected a threshold from 0 to 1, got {threshold}; the default is 2 / number of classes")
    confidence = class_log_probs(tree.leaf_logits).exp().amax(dim=1)
    kept = (confidence > threshold).cpu().numpy()
    if not kept.any():
        most = confidence.max()
        raise PruneError(
            f"threshold {threshold:.4g} removes all {len(kept)} leaves (largest maximum {most:.4g}); lower it"
        )
    smaller = tree.with_topology(*tree.topology.keep_leaves(kept))
    return Pruned(smaller, threshold, tree.topology.n_leaves, smaller.topology.n_leaves)

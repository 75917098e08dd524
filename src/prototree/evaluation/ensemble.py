"""Metrics of an ensemble of trees (§6.2, Table 1).

Notation used for tensor shapes: B batch, K classes, T trees.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prototree.core.ensemble import Ensemble, TreeVote
from prototree.core.topology import HARD, STRATEGIES, Strategy
from prototree.errors import DataError


@dataclass(frozen=True)
class GroupMetrics:
    """The metrics of some trees together (Table 1)."""

    n_trees: int
    accuracy: dict[str, float]  # by strategy
    top5: float  # soft
    n_prototypes: int  # in all trees: the size of the global explanation
    mean_path_prototypes: dict[str, float]  # on the paths of one image through all trees


@dataclass(frozen=True)
class EnsembleMetrics:
    """An ensemble on one data set."""

    n_images: int
    alone: list[GroupMetrics]  # each tree
    ensembles: list[GroupMetrics]  # the first 1, 2, … trees together

    @property
    def all_trees(self) -> GroupMetrics:
        return self.ensembles[-1]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


ImageBatch = tuple[Float[Tensor, "_ 3 h w"], Int[Tensor, " _"]]
"""Preprocessed images and their labels."""


@torch.no_grad()
def ensemble_metrics(
    ensemble: Ensemble, batches: Iterable[ImageBatch], vote: Callable[[Tensor], list[TreeVote]] | None = None
) -> EnsembleMetrics:
    """Compute all metrics in one pass over the images.

    With `vote`, batches may be anything that it makes ballots of, such as maps of a backbone that the trees share.
    """
    vote, n_trees = vote or ensemble.votes, len(ensemble.trees)
    for tree in ensemble.trees:
        tree.eval()
    alone, together = _Tally(n_trees), _Tally(n_trees)
    for images, labels in batches:
        if len(labels):
            ballots = vote(images)
            for strategy in STRATEGIES:
                own = torch.stack([one.decisions.class_probs(strategy) for one in ballots])
                weighted = torch.stack([one.weighted(strategy) for one in ballots]).cumsum(dim=0)
                alone.add(strategy, own, labels)
                together.add(strategy, torch.cat([own[:1], weighted[1:]]), labels)  # largest where the mean is
            for strategy in HARD:
                lengths = torch.stack([one.decisions.path(strategy).length.sum() for one in ballots]).cpu()
                alone.length[strategy] += lengths
                together.length[strategy] += lengths.cumsum(dim=0)
    if not alone.n_images:
        raise DataError("expected at least one image to evaluate on, got none")
    sizes = torch.tensor([tree.n_prototypes for tree in ensemble.trees])
    return EnsembleMetrics(
        alone.n_images,
        alone=alone.metrics([1] * n_trees, sizes.tolist()),
        ensembles=together.metrics(list(range(1, n_trees + 1)), sizes.cumsum(0).tolist()),
    )


class _Tally:
    """Counts for T trees, or for T groups of trees."""

    def __init__(self, n_groups: int) -> None:
        self.n_images, self.in_top5 = 0, torch.zeros(n_groups, dtype=torch.float64)
        self.right = {strategy: torch.zeros_like(self.in_top5) for strategy in STRATEGIES}
        self.length = {strategy: torch.zeros_like(self.in_top5) for strategy in HARD}

    def add(self, strategy: Strategy, scores: Float[Tensor, "T B K"], labels: Int[Tensor, " B"]) -> None:
        self.right[strategy] += (scores.argmax(dim=2) == labels).sum(dim=1).cpu()
        if strategy == "soft":
            best = scores.topk(min(5, scores.shape[2]), dim=2).indices
            self.in_top5 += (best == labels[None, :, None]).any(dim=2).sum(dim=1).cpu()
            self.n_images += len(labels)

    def metrics(self, n_trees: list[int], n_prototypes: list[int]) -> list[GroupMetrics]:
        return [
            GroupMetrics(
                n_trees=trees,
                accuracy={s: float(self.right[s][t] / self.n_images) for s in STRATEGIES},
                top5=float(self.in_top5[t] / self.n_images),
                n_prototypes=prototypes,
                mean_path_prototypes={s: float(self.length[s][t] / self.n_images) for s in HARD},
            )
            for t, (trees, prototypes) in enumerate(zip(n_trees, n_prototypes, strict=True))
        ]

"""The numbers of several trees that vote (§6.2, Table 1).

Notation used for tensor shapes: B batch, K classes, M images, T trees.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prototree.core.ensemble import Ballot, Ensemble
from prototree.core.strategies import HARD, STRATEGIES, Strategy
from prototree.errors import DataError
from prototree.training import distributed


@dataclass(frozen=True)
class Vote:
    """The numbers of some trees together (Table 1)."""

    n_trees: int
    accuracy: dict[str, float]  # by strategy
    top5: float  # soft
    n_prototypes: int  # in all trees: the size of the global explanation
    local_size: dict[str, float]  # prototypes on the paths of one photo through all trees, on average


@dataclass(frozen=True)
class EnsembleMetrics:
    """An ensemble on one data set."""

    n_images: int
    alone: list[Vote]  # each tree
    votes: list[Vote]  # the first 1, 2, … trees together

    @property
    def all_trees(self) -> Vote:
        return self.votes[-1]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


ImageBatch = tuple[Float[Tensor, "_ 3 h w"], Int[Tensor, " _"]]
"""Preprocessed photos and their labels."""


@torch.no_grad()
def ensemble_metrics(
    ensemble: Ensemble, batches: Iterable[ImageBatch], vote: Callable[[Tensor], list[Ballot]] | None = None
) -> EnsembleMetrics:
    """All numbers from one pass over the photos. In several processes each passes its share; all get the same.

    With `vote`, batches may be anything that it makes ballots of, such as maps of a backbone that the trees share.
    """
    vote = vote or ensemble.ballots
    for tree in ensemble.trees:
        tree.eval()
    n_trees = len(ensemble.trees)
    alone, votes = _Tally(n_trees), _Tally(n_trees)
    for images, labels in batches:
        if len(labels):
            ballots = vote(images)
            for strategy in STRATEGIES:
                own = torch.stack([one.decisions.class_probs(strategy) for one in ballots])
                weighted = torch.stack([one.weighted(strategy) for one in ballots]).cumsum(dim=0)
                alone.judge(strategy, own, labels)
                votes.judge(strategy, torch.cat([own[:1], weighted[1:]]), labels)  # largest where the mean is
            for strategy in HARD:
                lengths = torch.stack([one.decisions.path(strategy).length.sum() for one in ballots])
                alone.length[strategy] += lengths.cpu()
                votes.length[strategy] += lengths.cumsum(dim=0).cpu()
    sizes = torch.tensor([tree.n_prototypes for tree in ensemble.trees])
    n_images = alone.gather()
    votes.gather()
    return EnsembleMetrics(
        n_images,
        alone=alone.result([1] * n_trees, sizes.tolist()),
        votes=votes.result(list(range(1, n_trees + 1)), sizes.cumsum(0).tolist()),
    )


class _Tally:
    """Counts for T trees, or for T groups of trees."""

    def __init__(self, n_groups: int) -> None:
        zeros = torch.zeros(n_groups, dtype=torch.float64)
        self.n_images = torch.zeros(1, dtype=torch.float64)
        self.right = {strategy: zeros.clone() for strategy in STRATEGIES}
        self.length = {strategy: zeros.clone() for strategy in HARD}
        self.in_top5 = zeros.clone()

    def judge(self, strategy: Strategy, scores: Float[Tensor, "T B K"], labels: Int[Tensor, " B"]) -> None:
        self.right[strategy] += (scores.argmax(dim=2) == labels).sum(dim=1).cpu()
        if strategy == "soft":
            best = scores.topk(min(5, scores.shape[2]), dim=2).indices
            self.in_top5 += (best == labels[None, :, None]).any(dim=2).sum(dim=1).cpu()
            self.n_images += len(labels)

    def gather(self) -> int:
        """Sums over all processes; how many images there were."""
        for total in (self.n_images, self.in_top5, *self.right.values(), *self.length.values()):
            distributed.sum_over(total)
        if not self.n_images:
            raise DataError("expected at least one image to evaluate on, got none")
        return int(self.n_images)

    def result(self, n_trees: list[int], n_prototypes: list[int]) -> list[Vote]:
        return [
            Vote(
                n_trees=trees,
                accuracy={s: float(self.right[s][t] / self.n_images) for s in STRATEGIES},
                top5=float(self.in_top5[t] / self.n_images),
                n_prototypes=prototypes,
                local_size={s: float(self.length[s][t] / self.n_images) for s in HARD},
            )
            for t, (trees, prototypes) in enumerate(zip(n_trees, n_prototypes, strict=True))
        ]

"""How good a tree is, and what lies between two trees, on the photos that feedback comes from.

Notation used for tensor shapes: M photos.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from prototree.core.model import ProtoTree, TreePrediction
from prototree.core.strategies import STRATEGIES, Strategy


@dataclass(frozen=True)
class Figures:
    """How good a tree is on the photos that feedback comes from."""

    n_photos: int
    accuracy: dict[str, float]  # by strategy
    fidelity: dict[str, float]  # agreement of a hard strategy with soft
    path_length: dict[str, float]  # prototypes asked, on average
    class_accuracy: tuple[float | None, ...]  # of the greedy path; None for a class without photos
    n_prototypes: int


@dataclass(frozen=True)
class Changed:
    """A photo that is answered differently."""

    place: int  # in the list of photos
    label: int
    before: int
    after: int


@dataclass(frozen=True)
class Comparison:
    """Two trees on the same photos."""

    before: Figures
    after: Figures
    changed: tuple[Changed, ...]  # by the greedy path


def figures_of(tree: ProtoTree, decisions: TreePrediction, labels: Int[Tensor, " M"]) -> Figures:
    """The numbers of a tree that has decided about some photos."""
    answers: dict[Strategy, Tensor] = {strategy: decisions.labels(strategy) for strategy in STRATEGIES}
    right = answers["greedy"] == labels
    return Figures(
        n_photos=len(labels),
        accuracy={s: _share(answers[s] == labels) for s in STRATEGIES},
        fidelity={s: _share(answers[s] == answers["soft"]) for s in STRATEGIES[1:]},
        path_length={s: float(decisions.path(s).length.double().mean()) for s in STRATEGIES[1:]},
        class_accuracy=tuple(
            _share(right[labels == k]) if (labels == k).any() else None for k in range(tree.n_classes)
        ),
        n_prototypes=tree.n_prototypes,
    )


def changed_answers(before: TreePrediction, after: TreePrediction, labels: Int[Tensor, " M"]) -> tuple[Changed, ...]:
    """The photos that are answered differently."""
    then, now = before.labels("greedy"), after.labels("greedy")
    changed = torch.nonzero(then != now)[:, 0].tolist()
    return tuple(Changed(i, int(labels[i]), int(then[i]), int(now[i])) for i in changed)


def _share(hits: Bool[Tensor, " M"]) -> float:
    return int(hits.sum()) / len(hits)

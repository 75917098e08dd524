"""How well a tree tells photos of classes that it does not know from photos of its own.

A photo is rejected when the answer is hardly sure or its patches are unusually far from those that decide. As a score:
the place that a photo would have among the own ones, by confidence and by distance, whichever is worse.

Notation used for tensor shapes: M photos.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from prototree.core.confidence import ACCEPTED
from prototree.evaluation.metrics import Judged


@dataclass(frozen=True)
class OODMetrics:
    """The figures of one set of images of no known class."""

    n_photos: int
    auroc: dict[str, float]  # by score: how often a photo of the tree's own classes scores higher; 0.5 is chance
    accepted: float  # share of the images of no known class that pass where 95 % of the own photos do
    coverage: float  # share that gets an answer with the limits stored in the tree


def tell_apart(own: Judged, ood: Judged) -> OODMetrics:
    """From what one tree said of both."""
    ours, theirs = _scores(own, own), _scores(own, ood)
    limit = ours["both"].sort().values[int((1 - ACCEPTED) * len(own.place))]
    return OODMetrics(
        n_photos=len(ood.place),
        auroc={score: auroc(ours[score], theirs[score]) for score in ours},
        accepted=float((theirs["both"] >= limit).double().mean()),
        coverage=float(ood.is_known.double().mean()),
    )


def auroc(high: Float[Tensor, " M"], low: Float[Tensor, " m"]) -> float:
    """The probability that one of the first is higher than one of the second; a tie counts half."""
    order = low.sort().values
    below = torch.searchsorted(order, high.contiguous())
    not_above = torch.searchsorted(order, high.contiguous(), right=True)
    return float((below + not_above).double().mean()) / (2 * len(low))


def _scores(own: Judged, judged: Judged) -> dict[str, Float[Tensor, " M"]]:
    confidence, distance = judged.confidence.double(), -judged.ood_score.double()
    places = (_place(own.confidence.double(), confidence), _place(-own.ood_score.double(), distance))
    return {"confidence": confidence, "distance": distance, "both": torch.minimum(*places)}


def _place(own: Float[Tensor, " M"], values: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """The share of own photos with a lower value."""
    return torch.searchsorted(own.sort().values, values.contiguous()).double() / len(own)

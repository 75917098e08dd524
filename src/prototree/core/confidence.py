"""How sure an answer is, so that of the answers that are called 70 % sure, 70 of 100 are right; and when to give none.

Path probabilities are not that: a tree that was trained to tell its training photos apart is surer than it is right.
The margin of the greedy leaf over the best leaf of another class is turned into a confidence by two numbers, which are
fitted on photos that the tree (or one trained like it) has not seen.

Every tree has an answer for everything, be it noise or a page of text. Two things tell that a photo is none of the
classes: the answer is hardly sure, or some question on the path found nothing as near as photos that turn that way
usually have. Both limits are set so that at least 95 of 100 photos of the own classes get an answer.

Notation used for tensor shapes: B batch, N nodes, P prototypes, L leaves, M photos.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.core.routing import DecisionPath

ACCEPTED = 0.95  # share of photos of the own classes that get an answer
MOST_DOUBT = 0.5  # an answer that is more likely right than wrong is always given, unless the photo is strange
MAX_MARGIN = 50.0  # of a tree that knows no other class, or is sure beyond all digits
MAX_SLOPE, MAX_OFFSET = 1e10, 1e12  # far beyond a step; what is added stays finite in single precision
_RIDGE = 1e-3
_STEPS = 50


@dataclass(frozen=True)
class Calibration:
    """σ(slope·margin + offset), and the limits beyond which a tree says that it does not know."""

    slope: float = 1.0
    offset: float = 0.0
    n_photos: int = 0  # it was fitted on; 0: not fitted
    least: float = 0.0  # that an answer has to be sure
    farthest: float = 1e6  # that a photo may be from a question's patch, where 1 is usual

    def of(self, margin: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        slope, offset = _within(self.slope, MAX_SLOPE), _within(self.offset, MAX_OFFSET)
        return torch.sigmoid(slope * margin + offset)

    def knows(self, confidence: Float[Tensor, " B"], ood_score: Float[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Whether to give an answer at all."""
        return (confidence >= self.least) & (ood_score <= self.farthest)


def margin(
    log_path_probs: Float[Tensor, "B L"], leaf: Int[Tensor, " B"], leaf_labels: Int[Tensor, " L"]
) -> Float[Tensor, " B"]:
    """Log-probability of the path that was taken, less that of the best path to another class; may be below 0."""
    own = log_path_probs.gather(1, leaf[:, None])[:, 0]
    same = leaf_labels[None, :] == leaf_labels[leaf][:, None]
    others = log_path_probs.masked_fill(same, -torch.inf).amax(dim=1)
    return (own - others).clamp(-MAX_MARGIN, MAX_MARGIN)


def distance_ratio(
    distance: Float[Tensor, "B P"], path: DecisionPath, distance_p95: Float[Tensor, " turns"]
) -> Float[Tensor, "B height"]:
    """At each turn of a path, the distance to the patch that stands for it, where 1 is what is usual; 0 if unknown.

    `distance_p95` has a distance for every right turn, then for every left one; 0 where none is known.
    """
    n_nodes = len(distance_p95) // 2
    nodes, turns = path.nodes.clamp_min(0), (~path.goes_right).long() * n_nodes
    if not n_nodes:
        return distance.new_zeros(len(distance), 0)
    taken = distance.gather(1, nodes + turns if distance.shape[1] > n_nodes else nodes)
    limit = distance_p95[nodes + turns]
    return torch.where((path.nodes >= 0) & (limit > 0), taken / limit.clamp_min(1e-12), 0)


def fit_calibration(
    margins: Float[Tensor, " M"], ood_score: Float[Tensor, " M"], is_right: Bool[Tensor, " M"]
) -> Calibration:
    """From photos that the tree has not seen: the two numbers, and the limits that 95 of 100 of them pass together."""
    slope, offset = _logistic(margins, is_right)
    fitted = Calibration(slope, offset, len(margins))
    # The first of the order is the worst; a photo is as bad as the worse of its two places.
    by_margin, by_strangeness = margins.sort().values, ood_score.sort(descending=True).values
    place = torch.minimum(_place(margins, by_margin), _place(-ood_score, -by_strangeness))
    cut = int(place.sort().values[int((1 - ACCEPTED) * len(margins))])
    least = min(float(fitted.of(by_margin[cut : cut + 1])), MOST_DOUBT) if slope > 0 else 0.0
    return replace(fitted, least=least, farthest=float(by_strangeness[cut]) or Calibration.farthest)


def _place(values: Float[Tensor, " M"], order: Float[Tensor, " M"]) -> Int[Tensor, " M"]:
    return torch.searchsorted(order.contiguous(), values.contiguous())


def _logistic(margins: Float[Tensor, " M"], is_right: Bool[Tensor, " M"]) -> tuple[float, float]:
    """Regression by Newton's method, with a breath of ridge so that it ends where all answers are right."""
    x = margins.double()
    centre, spread = x.mean(), x.std().clamp_min(1e-6)
    rows = torch.stack([(x - centre) / spread, torch.ones_like(x)], dim=1)
    target, weights = is_right.double(), torch.zeros(2, dtype=torch.float64)
    for _ in range(_STEPS):
        p = torch.sigmoid(rows @ weights)
        hessian = (rows * (p * (1 - p))[:, None]).T @ rows + _RIDGE * torch.eye(2, dtype=torch.float64)
        weights = weights - torch.linalg.solve(hessian, rows.T @ (p - target) + _RIDGE * weights)
    slope = _within(float(weights[0] / spread), MAX_SLOPE)
    return slope, _within(float(weights[1] - weights[0] * centre / spread), MAX_OFFSET)


def _within(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)

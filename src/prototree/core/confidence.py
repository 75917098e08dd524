"""Calibrated confidence, out-of-distribution score and abstention. Not in the paper.

Platt scaling turns the margin of the greedy leaf over the best leaf of another class into a confidence. A tree abstains
where it is low, or where a node on the path found no patch as near as 95 % of the images that go that way have.
Notation used for tensor shapes: B batch, N nodes, P prototypes, L leaves, M images.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

COVERAGE = 0.95  # fraction of images of the known classes that get an answer
MAX_MIN_CONFIDENCE = 0.5  # an answer that is more likely right than wrong is given, unless the image is out of place
MAX_MARGIN = 50.0  # of a tree that knows no other class, or is sure beyond all digits
MAX_SLOPE, MAX_OFFSET = 1e10, 1e12  # far beyond a step; sums stay finite in single precision
_L2_PENALTY = 1e-3
_NEWTON_STEPS = 50


@dataclass(frozen=True)
class Calibration:
    """Platt scaling, confidence = σ(slope·margin + offset), and the limits beyond which a tree abstains."""

    slope: float = 1.0
    offset: float = 0.0
    n_images: int = 0  # held out, on which it was fitted; 0: not fitted
    min_confidence: float = 0.0  # below it the tree abstains
    max_ood_score: float = 1e6  # above it the tree abstains

    def of(self, margin: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """The confidence at these margins."""
        slope, offset = _clamped(self.slope, MAX_SLOPE), _clamped(self.offset, MAX_OFFSET)
        return torch.sigmoid(slope * margin + offset)

    def accepts(self, confidence: Float[Tensor, " B"], ood_score: Float[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Whether to give an answer at all."""
        return (confidence >= self.min_confidence) & (ood_score <= self.max_ood_score)


def margin(
    log_path_probs: Float[Tensor, "B L"], leaf: Int[Tensor, " B"], leaf_labels: Int[Tensor, " L"]
) -> Float[Tensor, " B"]:
    """Log-probability of the path that was taken, less that of the best path to another class; may be below 0."""
    taken = log_path_probs.gather(1, leaf[:, None])[:, 0]
    same = leaf_labels[None, :] == leaf_labels[leaf][:, None]
    others = log_path_probs.masked_fill(same, -torch.inf).amax(dim=1)
    return (taken - others).clamp(-MAX_MARGIN, MAX_MARGIN)


def distance_ratio(
    distance: Float[Tensor, "B P"],
    nodes: Int[Tensor, "B height"],
    goes_right: Bool[Tensor, "B height"],
    distance_p95: Float[Tensor, " sides"],
) -> Float[Tensor, "B height"]:
    """Distance to the prototype of the side taken at each step of a path, over `distance_p95`; 0 where that is 0."""
    n_nodes = len(distance_p95) // 2
    if not n_nodes:
        return distance.new_zeros(len(distance), 0)
    node = nodes.clamp_min(0)
    side = node + (~goes_right).long() * n_nodes
    taken = distance.gather(1, side if distance.shape[1] > n_nodes else node)
    limit = distance_p95[side]
    return torch.where((nodes >= 0) & (limit > 0), taken / limit.clamp_min(1e-12), 0)


def fit_calibration(
    margins: Float[Tensor, " M"], ood_score: Float[Tensor, " M"], is_right: Bool[Tensor, " M"]
) -> Calibration:
    """Fit Platt scaling on held-out images, and the limits that 95 % of them pass together."""
    slope, offset = _logistic(margins, is_right)
    fitted = Calibration(slope, offset, len(margins))
    # The first of each order is the worst; an image ranks as low as the worse of its two ranks.
    by_margin, by_score = margins.sort().values, ood_score.sort(descending=True).values
    margin_rank = torch.searchsorted(by_margin, margins.contiguous())
    score_rank = torch.searchsorted(-by_score, -ood_score.contiguous())
    cut = int(torch.minimum(margin_rank, score_rank).sort().values[int((1 - COVERAGE) * len(margins))])
    lowest = min(float(fitted.of(by_margin[cut : cut + 1])), MAX_MIN_CONFIDENCE) if slope > 0 else 0.0
    highest = float(by_score[cut]) or Calibration.max_ood_score
    return replace(fitted, min_confidence=lowest, max_ood_score=highest)


def _logistic(margins: Float[Tensor, " M"], is_right: Bool[Tensor, " M"]) -> tuple[float, float]:
    """Logistic regression by Newton's method, with Platt's smoothed targets (1999).

    They are what so many right and wrong answers support: after 24 right ones 25/26, so that few images promise little.
    A small L2 penalty keeps the slope finite on separable data.
    """
    x = margins.double()
    centre, spread = x.mean(), x.std().clamp_min(1e-6)
    rows = torch.stack([(x - centre) / spread, torch.ones_like(x)], dim=1)
    n_right, n_wrong = int(is_right.sum()), int((~is_right).sum())
    target = torch.where(is_right, (n_right + 1) / (n_right + 2), 1 / (n_wrong + 2)).double()
    weights = torch.zeros(2, dtype=torch.float64)
    for _ in range(_NEWTON_STEPS):
        p = torch.sigmoid(rows @ weights)
        hessian = (rows * (p * (1 - p))[:, None]).T @ rows + _L2_PENALTY * torch.eye(2, dtype=torch.float64)
        weights = weights - torch.linalg.solve(hessian, rows.T @ (p - target) + _L2_PENALTY * weights)
    slope = _clamped(float(weights[0] / spread), MAX_SLOPE)
    return slope, _clamped(float(weights[1] - weights[0] * centre / spread), MAX_OFFSET)


def _clamped(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)

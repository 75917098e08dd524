"""How sure an answer is, so that of the answers that are called 70 % sure, 70 of 100 are right.

Path probabilities are not that: a tree that was trained to tell its training photos apart is surer than it is right.
The lead of the greedy leaf over the best leaf of another class is turned into a sureness by two numbers, which are
fitted on photos that the tree (or one trained like it) has not seen.

Notation used for tensor shapes: B batch, L leaves, M photos.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MAX_LEAD = 50.0  # of a tree that knows no other class, or is sure beyond all digits
_RIDGE = 1e-3
_STEPS = 50


@dataclass(frozen=True)
class Sureness:
    """σ(slope·lead + offset)."""

    slope: float = 1.0
    offset: float = 0.0
    n_photos: int = 0  # it was fitted on; 0: not fitted

    def of(self, lead: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        return torch.sigmoid(self.slope * lead + self.offset)


def lead(
    log_path_probs: Float[Tensor, "B L"], leaf: Int[Tensor, " B"], leaf_labels: Int[Tensor, " L"]
) -> Float[Tensor, " B"]:
    """Log-probability of the path that was taken, less that of the best path to another class; may be below 0."""
    own = log_path_probs.gather(1, leaf[:, None])[:, 0]
    same = leaf_labels[None, :] == leaf_labels[leaf][:, None]
    others = log_path_probs.masked_fill(same, -torch.inf).amax(dim=1)
    return (own - others).clamp(-MAX_LEAD, MAX_LEAD)


def fit_sureness(leads: Float[Tensor, " M"], is_right: Bool[Tensor, " M"]) -> Sureness:
    """Logistic regression by Newton's method, with a breath of ridge so that it ends where all answers are right."""
    x = leads.double()
    centre, spread = x.mean(), x.std().clamp_min(1e-6)
    rows = torch.stack([(x - centre) / spread, torch.ones_like(x)], dim=1)
    target, weights = is_right.double(), torch.zeros(2, dtype=torch.float64)
    for _ in range(_STEPS):
        p = torch.sigmoid(rows @ weights)
        hessian = (rows * (p * (1 - p))[:, None]).T @ rows + _RIDGE * torch.eye(2, dtype=torch.float64)
        weights = weights - torch.linalg.solve(hessian, rows.T @ (p - target) + _RIDGE * weights)
    slope = float(weights[0] / spread)
    return Sureness(slope, float(weights[1] - weights[0] * centre / spread), len(x))

"""The question that a node asks, in one seam: is this patch there, or which of two is nearer (Eq. 2, generalised).

*Presence*: one prototype, similarity 2^(−(d/r)^β) with a reach r for each prototype and one sharpness β for the tree.
The paper is r = ln 2 and β = 1, which is exp(−d). An image goes right if it comes nearer than the reach.
*Choice*: two prototypes, one for each side, and p_right = σ(γ·(d_left − d_right)). An image goes to the nearer one.

Reaches are kept in units of ln 2, so that the paper's is exactly 1 in any precision.

Notation used for tensor shapes: B batch, N nodes, P prototypes: N, or 2N, first all right ones, then all left ones.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from prototree.errors import ConfigError

NodeKind = Literal["presence", "pairwise"]
LN2 = math.log(2.0)
# β below 1 would make the slope at distance 0 infinite; above these, decisions are hard to the last digit.
SHARPNESS_RANGE: dict[NodeKind, tuple[float, float]] = {"presence": (1.0, 64.0), "pairwise": (0.01, 1000.0)}
REACH_RANGE = (1e-6, 1e6)

# A projected prototype can be at distance 0, where 1 − p_right is 0; this keeps its logarithm and gradient finite.
_SMALLEST = 1e-7


@dataclass(frozen=True)
class NodeFunction:
    """What every node of a tree asks, and how sharply."""

    kind: NodeKind = "presence"
    sharpness: float = 1.0  # β of presence, γ of choice

    def __post_init__(self) -> None:
        if self.kind not in SHARPNESS_RANGE:
            raise ConfigError(f"expected a question of {' or '.join(SHARPNESS_RANGE)}, got {self.kind!r}")
        low, high = SHARPNESS_RANGE[self.kind]
        if not low <= self.sharpness <= high:
            raise ConfigError(f"expected a sharpness from {low:g} to {high:g} for {self.kind}, got {self.sharpness:g}")

    @property
    def patches_each(self) -> int:
        """How many prototypes a node has."""
        return 1 if self.kind == "presence" else 2

    @property
    def falloff(self) -> float:
        """β of the similarity of one prototype; 1 for a pairwise node, which compares distances."""
        return self.sharpness if self.kind == "presence" else 1.0

    def log_similarity(self, distance: Float[Tensor, "*pairs"], reach: Float[Tensor, "..."]) -> Float[Tensor, "*pairs"]:
        """−(s·d)^β with s = (ln 2)^(1/β) / r; `reach`, in units of ln 2, is spread over the distances."""
        scale = LN2 ** (1 / self.falloff - 1) / reach
        return -torch.pow(scale * distance, self.falloff)

    def similarity(self, distance: Float[Tensor, "*pairs"], reach: Float[Tensor, "..."]) -> Float[Tensor, "*pairs"]:
        """From 1 at distance 0 to one half at the reach, and on to 0."""
        return torch.exp(self.log_similarity(distance, reach))

    def relative_distance(self, similarity: Float[Tensor, "*pairs"]) -> Float[Tensor, "*pairs"]:
        """The distance, in units of the reach, at which patches have this similarity; finite where it is 0."""
        return (-similarity.clamp(torch.finfo(similarity.dtype).tiny, 1.0).log2()).pow(1 / self.falloff)

    def log_turns(
        self, distance: Float[Tensor, "B P"], reach: Float[Tensor, " P"]
    ) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]:
        """Log-probabilities of going left and right at each node, finite whatever the distance."""
        if self.kind == "pairwise":
            right, left = distance.chunk(2, dim=1)
            advantage = self.sharpness * (left - right)
            return logsigmoid(-advantage), logsigmoid(advantage)
        log_right = self.log_similarity(distance, reach)
        return log_one_minus(log_right), log_right


PAPER = NodeFunction()


def log_one_minus(log_probability: Float[Tensor, "*pairs"]) -> Float[Tensor, "*pairs"]:
    """log(1 − p) from log p, finite at p = 1."""
    return torch.log(-torch.expm1(log_probability.clamp_max(-_SMALLEST)))

"""What a node computes: the probability of going right from the distances to its prototypes (Eq. 2, generalised).

*Presence*: one prototype, similarity 2^(−(d/r)^β) with a radius r for each prototype and one sharpness β for the tree.
The paper is r = ln 2 and β = 1, which is exp(−d). *Pairwise*: two prototypes, and p_right = σ(γ·(d_left − d_right)).
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
# Rounded to single precision, in which trees store their radii: the paper's radius divides it to 1 in any precision.
LN2 = float(torch.tensor(math.log(2.0), dtype=torch.float32))
# β below 1 would make the slope at distance 0 infinite; above these, decisions are hard to the last digit.
SHARPNESS_RANGE: dict[NodeKind, tuple[float, float]] = {"presence": (1.0, 64.0), "pairwise": (0.01, 1000.0)}
RADIUS_RANGE = (1e-6, 1e6)

# A projected prototype can be at distance 0, where 1 − p_right is 0; this keeps its logarithm and gradient finite.
_SMALLEST = 1e-7


@dataclass(frozen=True)
class NodeFunction:
    """The kind of a tree's nodes, and the slope of their decisions (an inverse temperature)."""

    kind: NodeKind = "presence"
    sharpness: float = 1.0  # β of presence, γ of pairwise

    def __post_init__(self) -> None:
        if self.kind not in SHARPNESS_RANGE:
            raise ConfigError(f"expected nodes of kind {' or '.join(SHARPNESS_RANGE)}, got {self.kind!r}")
        low, high = SHARPNESS_RANGE[self.kind]
        if not low <= self.sharpness <= high:
            raise ConfigError(f"expected a sharpness from {low:g} to {high:g} for {self.kind}, got {self.sharpness:g}")

    @property
    def prototypes_per_node(self) -> int:
        return 1 if self.kind == "presence" else 2

    @property
    def falloff(self) -> float:
        """β of the similarity of one prototype; 1 for a pairwise node, which compares distances."""
        return self.sharpness if self.kind == "presence" else 1.0

    def log_similarity(self, distance: Float[Tensor, "*pairs"], radius: Float[Tensor, "..."]) -> Tensor:
        """−ln 2 · (d/r)^β; `radius` broadcasts over the distances. With the paper's radius, ln 2, it is −d."""
        # A tensor by a tensor, because a number by a tensor is not rounded the same: here ln 2 / ln 2 is 1.
        scale = radius.new_tensor(LN2 ** (1 / self.falloff)) / radius
        return -torch.pow(scale * distance, self.falloff)

    def similarity(self, distance: Float[Tensor, "*pairs"], radius: Float[Tensor, "..."]) -> Float[Tensor, "*pairs"]:
        """From 1 at distance 0 to one half at the radius, and on to 0."""
        return torch.exp(self.log_similarity(distance, radius))

    def relative_distance(self, similarity: Float[Tensor, "*pairs"]) -> Float[Tensor, "*pairs"]:
        """The distance, in units of the radius, at which patches have this similarity; finite where it is 0."""
        return (-similarity.clamp(torch.finfo(similarity.dtype).tiny, 1.0).log2()).pow(1 / self.falloff)

    def log_p_left_right(
        self, distance: Float[Tensor, "B P"], radius: Float[Tensor, " P"]
    ) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]:
        """Eq. 2: log-probabilities of going left and right at each node, finite whatever the distance."""
        if self.kind == "pairwise":
            right, left = distance.chunk(2, dim=1)
            advantage = self.sharpness * (left - right)
            return logsigmoid(-advantage), logsigmoid(advantage)
        log_right = self.log_similarity(distance, radius)
        return log_one_minus(log_right), log_right


PAPER = NodeFunction()


def log_one_minus(log_probability: Float[Tensor, "*pairs"]) -> Float[Tensor, "*pairs"]:
    """log(1 − p) from log p, finite at p = 1."""
    return torch.log(-torch.expm1(log_probability.clamp_max(-_SMALLEST)))

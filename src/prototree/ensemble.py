"""Several trees that vote by the mean of their class probabilities (§6)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from prototree.errors import ConfigError
from prototree.model import ProtoTree
from prototree.routing import Strategy


@dataclass(frozen=True)
class Ensemble:
    """Trees over the same classes that see photos in the same way."""

    trees: Sequence[ProtoTree]

    def __post_init__(self) -> None:
        if not self.trees:
            raise ConfigError("expected at least one tree in an ensemble, got none")
        first = self.trees[0]
        for number, tree in enumerate(self.trees[1:], start=2):
            if tree.class_names != first.class_names:
                odd = sorted(set(tree.class_names) ^ set(first.class_names))[:3] or ["their order"]
                raise ConfigError(f"tree {number} knows other classes than the first ({', '.join(odd)}); leave it out")
            if tree.preprocessing != first.preprocessing:
                raise ConfigError(
                    f"tree {number} expects other input than the first: {tree.preprocessing} instead of "
                    f"{first.preprocessing}; leave it out"
                )

    @property
    def n_prototypes(self) -> int:
        """All prototypes of all trees: the size of the global explanation."""
        return sum(tree.topology.n_nodes for tree in self.trees)

    @torch.no_grad()
    def class_probs(self, images: Float[Tensor, "B 3 h w"], strategy: Strategy = "soft") -> Float[Tensor, "B K"]:
        """The mean of the trees' class probabilities."""
        return torch.stack([tree.predict(images).class_probs(strategy) for tree in self.trees]).mean(dim=0)

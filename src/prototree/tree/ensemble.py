"""Several trees that vote with the mean of their class probabilities (§6.2).

Notation used for tensor shapes: B batch, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prototree.errors import ConfigError
from prototree.network.backbone import Backbone
from prototree.tree.model import Decisions, ProtoTree
from prototree.tree.strategies import Strategy


@dataclass(frozen=True)
class Ensemble:
    """Trees with the same classes and the same preprocessing, which vote.

    Examples:
        >>> both = Ensemble([tree, tree])
        >>> [one.soft.shape for one in both.predict(torch.rand(2, 3, 64, 64))]  # B×K for each tree
        [torch.Size([2, 3]), torch.Size([2, 3])]
    """

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

    @cached_property
    def _backbone_of(self) -> list[int]:
        """For each tree the first one with the same backbone: grown on frozen features, they need it only once."""
        backbones = [tree.features.backbone for tree in self.trees]
        return [next(i for i, other in enumerate(backbones) if _equal(own, other)) for own in backbones]

    @property
    def n_prototypes(self) -> int:
        """All prototypes of all trees: the size of the global explanation."""
        return sum(tree.n_prototypes for tree in self.trees)

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "B 3 h w"]) -> list[Decisions]:
        """The decisions of each tree."""
        maps: dict[int, Tensor] = {}
        decisions = []
        for tree, backbone in zip(self.trees, self._backbone_of, strict=True):
            if backbone not in maps:
                maps[backbone] = tree.features.backbone(images)
            decisions.append(tree.decide(tree.route(tree.features.from_map(maps[backbone]))))
        return decisions

    @property
    def shares_backbone(self) -> bool:
        """Whether all trees see the same maps."""
        return not any(self._backbone_of)

    @torch.no_grad()
    def predict_map(self, backbone_map: Float[Tensor, "B C H W"]) -> list[Decisions]:
        """The decisions of each tree from the map of the backbone that all of them share."""
        return [tree.decide(tree.route(tree.features.from_map(backbone_map))) for tree in self.trees]

    def class_probs(self, images: Float[Tensor, "B 3 h w"], strategy: Strategy = "soft") -> Float[Tensor, "B K"]:
        """The mean of the trees' class probabilities."""
        return torch.stack([decisions.class_probs(strategy) for decisions in self.predict(images)]).mean(dim=0)


def _equal(one: Backbone, other: Backbone) -> bool:
    if one is other:
        return True
    first, second = one.state_dict(), other.state_dict()
    same_kind = (one.name, one.level, first.keys()) == (other.name, other.level, second.keys())
    return same_kind and all(torch.equal(first[name], second[name]) for name in first)

"""Several trees that vote with the mean of their class probabilities (§6.2).

In a vote a tree answers less sharply than by itself. Alone it has to be calibrated; among others it should
also say which classes come next, because they may come first elsewhere. Single paths count as much as the tree is sure
of them. Both were chosen on photos of other species than those that results are reported for (`docs/lab-notes.md`).

Notation used for tensor shapes: B batch, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prototree.backbones.backbone import Backbone
from prototree.core.leaves import predict
from prototree.core.model import ProtoTree, TreeOutput, TreePrediction
from prototree.core.nodes import SHARPNESS_RANGE
from prototree.core.patches import NearestPatches
from prototree.core.strategies import Strategy
from prototree.errors import ConfigError

SHARPNESS_IN_A_VOTE = 0.5  # of the tree's own; the paper's β = 1 is the least there is, and stays


@dataclass(frozen=True)
class Ballot:
    """What one tree decides by itself, and what it says in a vote."""

    decisions: TreePrediction
    soft: Float[Tensor, "B K"]

    def weighted(self, strategy: Strategy) -> Float[Tensor, "B K"]:
        """Class probabilities times their weight in the vote: 1, or the confidence for the greedy path."""
        if strategy == "soft":
            return self.soft
        probs = self.decisions.class_probs(strategy)
        return self.decisions.confidence[:, None] * probs if strategy == "greedy" else probs


@torch.no_grad()
def ballot(tree: ProtoTree, routed: TreeOutput) -> Ballot:
    """A tree's part in a vote about images that have gone through it."""
    least, own = SHARPNESS_RANGE[tree.question.kind][0], tree.question.sharpness
    question = replace(tree.question, sharpness=max(least, SHARPNESS_IN_A_VOTE * own))
    softer = tree.routed(NearestPatches(routed.distance, routed.patch), question)
    table = tree.leaf_table()
    return Ballot(tree.decide(routed, table), predict(softer.log_path_probs, table.probs))


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
    def ballots(self, images: Float[Tensor, "B 3 h w"]) -> list[Ballot]:
        """What each tree says in the vote; a backbone that several share runs once."""
        maps: dict[int, Tensor] = {}
        found = []
        for tree, backbone in zip(self.trees, self._backbone_of, strict=True):
            if backbone not in maps:
                maps[backbone] = tree.features.backbone(images)
            found.append(ballot(tree, tree.route(tree.features.from_map(maps[backbone]))))
        return found

    def predict(self, images: Float[Tensor, "B 3 h w"]) -> list[TreePrediction]:
        """What each tree decides by itself."""
        return [one.decisions for one in self.ballots(images)]

    @property
    def shares_backbone(self) -> bool:
        """Whether all trees see the same maps."""
        return not any(self._backbone_of)

    @torch.no_grad()
    def ballots_of_map(self, backbone_map: Float[Tensor, "B C H W"]) -> list[Ballot]:
        """The same from the map of the one backbone that all trees share."""
        return [ballot(tree, tree.route(tree.features.from_map(backbone_map))) for tree in self.trees]

    def class_probs(self, images: Float[Tensor, "B 3 h w"], strategy: Strategy = "soft") -> Float[Tensor, "B K"]:
        """The weighted mean of the trees' class probabilities; a single tree answers as by itself."""
        return counted(self.ballots(images), strategy)


def counted(ballots: Sequence[Ballot], strategy: Strategy) -> Float[Tensor, "B K"]:
    """The class probabilities of a vote."""
    if len(ballots) == 1:
        return ballots[0].decisions.class_probs(strategy)
    total = torch.stack([one.weighted(strategy) for one in ballots]).sum(dim=0)
    return total / total.sum(dim=1, keepdim=True)


def _equal(one: Backbone, other: Backbone) -> bool:
    if one is other:
        return True
    first, second = one.state_dict(), other.state_dict()
    same_kind = (one.name, one.feature_level, first.keys()) == (other.name, other.feature_level, second.keys())
    return same_kind and all(torch.equal(first[name], second[name]) for name in first)

"""Several trees that average their class probabilities (§6.2). Notation: B batch, K classes.

In an ensemble a tree's nodes are less sharp than by itself: it should also say which classes come next, because they
may come first in others. Greedy paths are weighted by their confidence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from prototree.backbones.backbone import Backbone
from prototree.backbones.geometry import Preprocessing
from prototree.core.leaves import predict
from prototree.core.model import NearestPatches, ProtoTree, TreeOutput, TreePrediction
from prototree.core.nodes import SHARPNESS_RANGE
from prototree.core.topology import Strategy
from prototree.errors import ConfigError

Images = Float[Tensor, "B 3 h w"] | Sequence[Tensor]  # several have different h and w
ENSEMBLE_SHARPNESS = 0.5  # times the tree's own; the paper's β = 1 is the least there is, and stays


@dataclass(frozen=True)
class TreeVote:
    """What one tree predicts by itself, and its class probabilities in an ensemble."""

    decisions: TreePrediction
    soft: Float[Tensor, "B K"]

    def weighted(self, strategy: Strategy) -> Float[Tensor, "B K"]:
        """Class probabilities times their weight in the ensemble: 1, or the confidence for the greedy path."""
        if strategy == "soft":
            return self.soft
        probs = self.decisions.class_probs(strategy)
        return self.decisions.confidence[:, None] * probs if strategy == "greedy" else probs


@torch.no_grad()
def tree_vote(tree: ProtoTree, output: TreeOutput) -> TreeVote:
    """A tree's part in an ensemble, for images that have gone through it."""
    lowest, sharpness = SHARPNESS_RANGE[tree.node_function.kind][0], tree.node_function.sharpness
    node_function = replace(tree.node_function, sharpness=max(lowest, ENSEMBLE_SHARPNESS * sharpness))
    softer = tree.forward_distances(NearestPatches(output.distance, output.patch), node_function)
    table = tree.leaf_table()
    return TreeVote(tree.decode(output, table), predict(softer.log_path_probs, table.probs))


@dataclass(frozen=True)
class Ensemble:
    """Average the class probabilities of several trees with the same classes (§6.2).

    Attributes:
        trees: The trees, at least one. They may differ in network and preprocessing.

    Raises:
        ConfigError: The trees do not fit together.

    Examples:
        >>> both = Ensemble([tree, tree])
        >>> [prediction.soft.shape for prediction in both.predict(torch.rand(2, 3, 64, 64))]  # B×K for each tree
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

    @cached_property
    def inputs(self) -> tuple[Preprocessing, ...]:
        """The ways in which the trees want images prepared, each once."""
        return tuple(dict.fromkeys(tree.preprocessing for tree in self.trees))

    @cached_property
    def _backbone_index(self) -> list[int]:
        """For each tree the first one with the same features: grown on a frozen network, they need them only once."""
        return [next(i for i, other in enumerate(self.trees) if _same_features(tree, other)) for tree in self.trees]

    @property
    def distinct(self) -> dict[int, Backbone]:
        """The backbones whose features differ, each by the number of the first tree that has it."""
        return {index: self.trees[index].features.backbone for index in self._backbone_index}

    @property
    def n_prototypes(self) -> int:
        """All prototypes of all trees: the size of the global explanation."""
        return sum(tree.n_prototypes for tree in self.trees)

    @torch.no_grad()
    def votes(self, images: Images) -> list[TreeVote]:
        """The vote of each tree; a backbone that several share runs once."""
        batches = [images] if isinstance(images, Tensor) else list(images)
        if len(batches) != len(self.inputs):
            raise ConfigError(f"expected a batch for each of {len(self.inputs)} ways to prepare it, got {len(batches)}")
        batch_for = dict(zip(self.inputs, batches, strict=True))
        own = {index: batch_for[self.trees[index].preprocessing] for index in self.distinct}
        return self.votes_of_maps({index: backbone(own[index]) for index, backbone in self.distinct.items()})

    @torch.no_grad()
    def votes_of_maps(self, maps: Mapping[int, Float[Tensor, "B C H W"]]) -> list[TreeVote]:
        """The vote of each tree from the feature maps of the `distinct` backbones."""
        each = zip(self.trees, (maps[index] for index in self._backbone_index), strict=True)
        return [tree_vote(tree, tree.forward_features(tree.features.from_map(z))) for tree, z in each]

    def predict(self, images: Images) -> list[TreePrediction]:
        """Predict with each tree by itself.

        Args:
            images: A batch of preprocessed images, or one for each of `inputs`.

        Returns:
            One prediction for each tree.
        """
        return [vote.decisions for vote in self.votes(images)]

    def class_probs(self, images: Images, strategy: Strategy = "soft") -> Float[Tensor, "B K"]:
        """Average the trees' class probabilities; a single tree predicts as by itself.

        Args:
            images: A batch of preprocessed images, or one for each of `inputs`.
            strategy: soft, max_path or greedy; greedy paths are weighted by their confidence.

        Returns:
            Images × classes.
        """
        return average(self.votes(images), strategy)


def average(votes: Sequence[TreeVote], strategy: Strategy) -> Float[Tensor, "B K"]:
    """Average the votes of an ensemble, weighted; a single tree predicts as by itself."""
    if len(votes) == 1:
        return votes[0].decisions.class_probs(strategy)
    total = torch.stack([vote.weighted(strategy) for vote in votes]).sum(dim=0)
    return total / total.sum(dim=1, keepdim=True)


def _same_features(tree: ProtoTree, other: ProtoTree) -> bool:
    """Whether two trees see the same feature maps."""
    first, second = tree.features.backbone, other.features.backbone
    kinds = [(b.name, b.feature_level, b.crops, t.preprocessing) for b, t in ((first, tree), (second, other))]
    ours, theirs = first.state_dict(), second.state_dict()
    is_same_kind = kinds[0] == kinds[1] and ours.keys() == theirs.keys()
    return is_same_kind and all(torch.equal(ours[key], theirs[key]) for key in ours)

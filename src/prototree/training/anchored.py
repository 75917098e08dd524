"""What the recipe `warm` learns: the head as a classifier, then the head under a tree whose prototypes stay patches.

Notation used for tensor shapes: B batch, C channels of the backbone's map, P patches, N nodes, K classes.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, one_hot, relu

from prototree.network.backbone import FeatureExtractor
from prototree.training.batches import Batches, CachedBatches, maps_of
from prototree.training.engine import Group, Objective
from prototree.training.growth import Start, wide_head
from prototree.training.leaf_training import Visit
from prototree.training.maps import Inputs
from prototree.training.objectives import LABEL_SMOOTHING, Cosine, Schedule, SoftTargets, TreeObjective
from prototree.training.projection import Nearest, find_nearest, reachable_classes
from prototree.training.recipes.warm import Warm
from prototree.tree.model import ProtoTree
from prototree.tree.patches import nearest_patches

FEWEST_PATCHES = 60  # of a map that a step sees, whatever their share
LOGIT_GAIN = 4.0  # pooled values lie in [0, 1]; without it the classifier's logits grow slowly


class HeadObjective(Objective):
    """The head as a plain classifier: patches, max-pooled, and a linear layer."""

    def __init__(self, features: FeatureExtractor, n_classes: int, recipe: Warm, pace: Cosine) -> None:
        super().__init__()
        self.features = features
        self.linear = nn.Linear(features.depth, n_classes)
        self._recipe, self._pace = recipe, pace
        self._mixed: tuple[Tensor, Tensor] | None = None

    def groups(self, epoch: int) -> list[Group]:
        parameters = [*self.features.head.parameters(), *self.linear.parameters()]
        return [Group(parameters, self._recipe.head_rate, self._recipe.head_decay)]

    def pace(self, epoch: int, share: float) -> float:
        return self._pace.at(epoch + share)

    def start_epoch(self, epoch: int, *, is_continued: bool) -> None:
        self.features.backbone.freeze(True)
        self.train()

    def forward(self, values: Tensor) -> Float[Tensor, "B K"]:
        recipe, x = self._recipe, self.features.backbone.tail(values)
        self._mixed = None
        if self.training:
            x = random_patches(x, recipe.patch_share)
            if torch.rand(()) < recipe.cutmix:
                x, *mixed = cutmix(x)
                self._mixed = (mixed[0], mixed[1])
        pooled = torch.sigmoid(wide_head(self.features)(x, recipe.channel_dropout)).amax(dim=(2, 3))
        return self.linear(LOGIT_GAIN * dropout(pooled, recipe.pooled_dropout, self.training))  # type: ignore[no-any-return]

    def loss(self, outputs: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
        target = one_hot(inputs.labels, outputs.shape[1]).float()
        if self._mixed is not None:
            partner, own = self._mixed
            target = own * target + (1 - own) * target[partner]
        losses = cross_entropy(outputs, target, reduction="none", label_smoothing=LABEL_SMOOTHING)
        return losses, (outputs.argmax(dim=1) == inputs.labels).float()

    @torch.no_grad()
    def probs(self, batches: Batches, temperature: float) -> Float[Tensor, "entries K"]:
        """Softened class probabilities of every entry."""
        self.eval()
        device = self.linear.weight.device
        found = torch.full((len(batches.entries), self.linear.out_features), 1 / self.linear.out_features)
        for inputs in batches.epoch(0):
            found[inputs.entries] = (self(inputs.values.to(device)) / temperature).softmax(dim=1).cpu()
        return found


class AnchoredObjective(TreeObjective):
    """Algorithm 1 with prototypes that are, at every step, the latent patches of their sources."""

    anchors: Float[Tensor, "N C 1 1"]

    def __init__(
        self,
        tree: ProtoTree,
        batches: Batches,
        recipe: Warm,
        epochs: int,
        targets: SoftTargets,
        start: Start,
        sources: CachedBatches,
    ) -> None:
        super().__init__(tree, batches, Schedule(epochs, freeze_epochs=epochs), targets=targets)
        tree.prototypes.requires_grad_(False)
        tree.leaf_logits.requires_grad_(False)
        tree.leaf_logits.copy_(one_hot(start.leaf_class, tree.n_classes) * (len(batches.entries) / tree.n_classes))
        self.register_buffer("anchors", start.anchors)
        self._recipe, self._sources = recipe, sources
        self._moves = () if start.is_given else recipe.move_sources
        self._turns = Turns.of(tree)
        self._pace = Cosine(epochs, batches.n_batches)

    def groups(self, epoch: int) -> list[Group]:
        return [Group(list(self.tree.features.head.parameters()), self._recipe.rate, self._recipe.weight_decay)]

    def pace(self, epoch: int, share: float) -> float:
        return self._pace.at(epoch + share)

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.tree.features
        x, anchors = random_patches(features.backbone.tail(values), self._recipe.patch_share), self.anchors
        # Photos and sources through the head together, so that batch norm treats them alike.
        n_rows = -(-len(anchors) // x.shape[3])
        filled = torch.cat([anchors, anchors[:1].expand(n_rows * x.shape[3] - len(anchors), -1, -1, -1)])
        rows = filled.reshape(n_rows, x.shape[3], -1).transpose(1, 2)[:, :, None]
        z = features.from_map(torch.cat([x, rows]))
        prototypes = z[len(x) :, :, 0].transpose(1, 2).flatten(0, 1)[: len(anchors), :, None, None]
        routed = self.tree.route(z[: len(x)], prototypes)
        return routed.distance, routed.patch, routed.log_path_probs

    def loss(self, outputs: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
        losses, hits = super().loss(outputs, inputs)
        misses = self._turns.misses(outputs[0], inputs.labels, self._recipe.near, self._recipe.far)
        return losses + self._recipe.margin * misses, hits

    def sweep_labels(self, visit: Visit) -> None:
        """The plain photos with their labels."""
        for z, labels, _ in maps_of(self._sources, self.tree.features, self.tree.prototypes.device):
            visit(self.tree.route(z), labels)

    def end_epoch(self, epoch: int) -> None:
        if epoch + 1 in {round(share * self._schedule.epochs) for share in self._moves}:
            self._move_to_medoids()

    @torch.no_grad()
    def _move_to_medoids(self) -> None:
        """One k-medoids step: each source becomes the patch nearest to the mean of those it now stands for.

        That is the mean of the nearest patches of the photos whose class lies right of the node.
        """
        self.update_prototypes()
        device, features = self.anchors.device, self.tree.features
        right, total = classes_right(self.tree).to(device), torch.zeros_like(self.tree.prototypes).flatten(1)
        count = total.new_zeros(len(total), 1)
        for z, labels, _ in maps_of(self._sources, features, device):
            belongs = right[:, labels].T.float()  # B N
            patch = nearest_patches(z, self.tree.prototypes).patch
            winners = z.flatten(2).gather(2, patch[:, None].expand(-1, z.shape[1], -1))  # B D N
            total += torch.einsum("bdn,bn->nd", winners, belongs)
            count += belongs.sum(dim=0)[:, None]
        self.tree.prototypes.copy_((total / count.clamp_min(1))[:, :, None, None])
        (nearest,) = find_nearest(self.tree, maps_of(self._sources, features, device), right)
        found = torch.isfinite(nearest.distance) & first_of_each(nearest).to(device)
        values = self._sources.inputs(nearest.place[found].tolist()).values.to(device)
        rows = torch.arange(len(values), device=device)
        self.anchors[found] = values.flatten(2)[rows, :, nearest.patch[found]][:, :, None, None]

    @torch.no_grad()
    def update_prototypes(self) -> None:
        """The prototypes as the finished head sees their sources."""
        self.eval()
        self.tree.prototypes.copy_(self.tree.features.from_map(self.anchors))


@dataclass(frozen=True)
class Turns:
    """Which way the photos of each class should turn at each node."""

    right: Bool[Tensor, "K N"]
    left: Bool[Tensor, "K N"]

    @classmethod
    def of(cls, tree: ProtoTree) -> "Turns":
        """Towards the leaf in which a class has the majority; no way at all for a class that has none."""
        right, below = classes_right(tree), reachable_classes(tree).cpu()
        return cls(right.T, (below & ~right).T)

    def misses(
        self, distance: Float[Tensor, "B N"], labels: Int[Tensor, " B"], near: float, far: float
    ) -> Float[Tensor, " B"]:
        """How much farther than `near` right turns are and how much nearer than `far` left turns, summed.

        The soft targets alone leave similarities at the share of photos that turn right, far below one half.
        """
        right, left = (side.to(distance.device)[labels] for side in (self.right, self.left))
        return (right * relu(distance - near) + left * relu(far - distance)).sum(dim=1)


def first_of_each(nearest: Nearest) -> Bool[Tensor, " N"]:
    """Of the prototypes that would have the same patch, the nearest alone: one picture twice says nothing new."""
    taken: set[tuple[int, int]] = set()
    first = torch.zeros(len(nearest.distance), dtype=torch.bool)
    for node in nearest.distance.argsort(stable=True).tolist():
        patch = (int(nearest.place[node]), int(nearest.patch[node]))
        first[node] = patch not in taken
        taken.add(patch)
    return first


def classes_right(tree: ProtoTree) -> Bool[Tensor, "N K"]:
    """The majority classes of the leaves to the right of each node."""
    right = torch.zeros(tree.topology.n_nodes, tree.n_classes, dtype=torch.bool)
    majority = tree.leaf_logits.argmax(dim=1).tolist()
    for leaf, (path, turns) in enumerate(zip(tree.topology.paths, tree.topology.goes_right, strict=True)):
        right[path[turns], majority[leaf]] = True
    return right


def random_patches(x: Float[Tensor, "B C H W"], share: float) -> Float[Tensor, "B C 1 P"]:
    """The same random patches of every map of a batch."""
    n_patches = x.shape[2] * x.shape[3]
    order = torch.randperm(n_patches, device=x.device)
    return x.flatten(2)[:, :, order[: max(FEWEST_PATCHES, math.ceil(share * n_patches))]][:, :, None]


def cutmix(x: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B C H W"], Int[Tensor, " B"], Float[Tensor, "B 1"]]:
    """Random patches replaced by those of another photo; returns the partner and the share of one's own."""
    partner = torch.randperm(len(x), device=x.device)
    keep = torch.rand(len(x), 1, *x.shape[2:], device=x.device) < torch.rand(len(x), 1, 1, 1, device=x.device)
    return torch.where(keep, x, x[partner]), partner, keep.float().mean(dim=(2, 3))

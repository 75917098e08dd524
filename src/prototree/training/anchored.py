"""What the recipe `distill` learns: the head as a classifier, then the head under a tree whose prototypes stay patches.

Notation used for tensor shapes: B batch, C channels of the backbone's map, N nodes, P prototypes, K classes, M photos.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, one_hot, relu

from prototree.backbones.backbone import FeatureExtractor
from prototree.core.leaves import class_log_probs, log_predict, log_predict_classes
from prototree.core.model import ProtoTree, TreeOutput
from prototree.core.nodes import LN2, REACH_RANGE, NodeFunction, NodeKind
from prototree.core.patches import NearestPatches, nearest_patches
from prototree.features.batches import Batches, CachedBatches, maps_of
from prototree.features.cache import Inputs
from prototree.training import distributed
from prototree.training.baseline import LOGIT_GAIN
from prototree.training.chance import WholeBatch
from prototree.training.grow import Start, wide_head
from prototree.training.leaf_training import LeafTrainer, Visit
from prototree.training.loop import Group, Objective
from prototree.training.nearest_gradient import nearest_followed
from prototree.training.objectives import LABEL_SMOOTHING, Cosine, Schedule, SoftTargets, TreeObjective
from prototree.training.occlusion_loss import Matches, OccludedPairs, Pairs, hiding_loss, own_sides
from prototree.training.projection import side_classes
from prototree.training.recipes.distill import Distill
from prototree.training.target_rows import TargetRows, target_rows

FEWEST_OF_HEAD, FEWEST_OF_TREE = 60, 40  # patches of a map that a step sees, whatever their share
FIRST_SHARPNESS: dict[NodeKind, float] = {"presence": 1.0, "pairwise": 3.0}  # where the recipe leaves it open
MOST_USUAL = 10_000_000  # distances per turn that this is computed from
USUAL = 0.95  # share of the photos of the classes on a side whose distance counts as usual


Measured = tuple[NearestPatches, Int[Tensor, " B"]]
"""How far photos are from all prototypes, and their labels."""


class HeadObjective(Objective):
    """The head as a plain classifier: patches, max-pooled, and a linear layer.

    A second linear layer asks every patch by itself, and the best patch for each class counts: what the pooled
    classifier may gather from many places, a node of a tree must find in one.
    """

    def __init__(self, features: FeatureExtractor, n_classes: int, recipe: Distill, pace: Cosine) -> None:
        super().__init__()
        self.features = features
        self.linear = nn.Linear(features.prototype_dim, n_classes)
        self.by_patch = nn.Linear(features.prototype_dim, n_classes) if recipe.single_patch_loss_weight else None
        self._recipe, self._pace = recipe, pace
        self._mixed: tuple[Tensor, Tensor] | None = None

    def groups(self, epoch: int) -> list[Group]:
        layers = (self.features.head, self.linear, self.by_patch)
        parameters = [parameter for layer in layers if layer is not None for parameter in layer.parameters()]
        return [Group(parameters, self._recipe.lr_head, self._recipe.head_weight_decay)]

    def pace(self, epoch: int, share: float) -> float:
        return self._pace.at(epoch + share)

    def start_epoch(self, epoch: int, *, is_continued: bool) -> None:
        self.features.backbone.freeze(True)
        self.train()

    def forward(self, values: Tensor) -> tuple[Float[Tensor, "B K"], ...]:
        """Logits of the pooled classifier and, while learning, of the best single patches."""
        recipe, x, head = self._recipe, self.features.backbone.tail(values), wide_head(self.features)
        self._mixed = None
        if not self.training:
            return (self.linear(LOGIT_GAIN * torch.sigmoid(head(x)).amax(dim=(2, 3))),)
        batch, rows = WholeBatch.around(x), random_patches(x, recipe.head_patch_fraction, FEWEST_OF_HEAD)
        if torch.rand(()) < recipe.cutmix:
            rows, *mixed = batch.cutmix(rows)
            self._mixed = (mixed[0], mixed[1])
        channels = head.first.in_channels, head.first.out_channels
        before, between = (batch.kept(number, recipe.channel_dropout, rows) for number in channels)
        z = torch.sigmoid(head.learning(rows, (before, between)))
        strongest = z.max(dim=1).values * batch.kept(z.shape[2], recipe.pooled_dropout, z)
        pooled = self.linear(LOGIT_GAIN * strongest)
        return (pooled,) if self.by_patch is None else (pooled, best_patch_logits(self.by_patch, z))

    def loss(self, outputs: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
        pooled, *by_patch = outputs
        target = one_hot(inputs.labels, pooled.shape[1]).to(pooled.dtype)
        if self._mixed is not None:
            partner, own = self._mixed
            others = one_hot(torch.cat(distributed.gather(inputs.labels))[partner], pooled.shape[1])
            target = own * target + (1 - own) * others

        def missed(logits: Tensor) -> Tensor:
            return cross_entropy(logits, target, reduction="none", label_smoothing=LABEL_SMOOTHING)

        losses = missed(pooled) + sum(self._recipe.single_patch_loss_weight * missed(logits) for logits in by_patch)
        return losses, (pooled.argmax(dim=1) == inputs.labels).float()

    @torch.no_grad()
    def probs(self, batches: Batches, temperature: float, folder: Path) -> TargetRows:
        """Softened class probabilities of every entry; where they are many, in a file in `folder`."""
        self.eval()
        device = self.linear.weight.device
        found = target_rows(len(batches.entries), self.linear.out_features, folder, self._recipe.room)
        for inputs in batches.epoch(0):
            found.put(inputs.entries, (self(inputs.values.to(device))[0] / temperature).softmax(dim=1).cpu())
        return found.finished()


class AnchoredObjective(TreeObjective):
    """Prototypes that are, at every step, the latent patches of their sources, and leaves with one class each.

    Questions begin soft and become sharp. The tree's answer is compared with the teacher's softened one; towards the
    end it is softened itself, so that it need not become as unsure as the teacher. In the last third the tree learns to
    need what it shows (`hiding`).
    """

    anchors: Float[Tensor, "P C 1 1"]

    def __init__(
        self,
        tree: ProtoTree,
        batches: Batches,
        recipe: Distill,
        epochs: int,
        targets: SoftTargets,
        start: Start,
        sources: CachedBatches,
        twins: OccludedPairs | None = None,
    ) -> None:
        super().__init__(tree, batches, Schedule(epochs, freeze_epochs=epochs), LeafTrainer(), targets)
        tree.prototypes.requires_grad_(False)
        tree.leaf_logits.requires_grad_(False)
        tree.leaf_logits.zero_().scatter_(1, start.leaf_class[:, None], len(batches.entries) / tree.n_classes)
        self.register_buffer("anchors", start.anchors)
        self.log_reach = nn.Parameter(tree.reach.log()) if tree.question.kind == "presence" else None
        self._recipe, self._sources, self._epochs, self._twins = recipe, sources, epochs, twins
        self._hides_from = 2 * epochs // 3 if twins is not None else epochs
        self._hides = False
        self._leaf_class = start.leaf_class.cpu()
        self._begin = start.sharpness_start or recipe.sharpness_start or FIRST_SHARPNESS[tree.question.kind]
        self._turns = Turns.of(tree) if self.log_reach is not None else None
        self._pace, self._done = Cosine(epochs, batches.n_batches), 0.0
        self._measured: list[Measured] = []  # of the finished tree, where they are few enough to be kept

    def groups(self, epoch: int) -> list[Group]:
        head = Group(list(self.tree.features.head.parameters()), self._recipe.rate, self._recipe.weight_decay)
        return [head] if self.log_reach is None else [head, Group([self.log_reach], self._recipe.rate)]

    def train(self, mode: bool = True) -> "AnchoredObjective":
        super().train(mode)
        wide_head(self.tree.features).norm.eval()  # on the statistics of the photos: see `following`
        return self

    def start_epoch(self, epoch: int, *, is_continued: bool) -> None:
        super().start_epoch(epoch, is_continued=is_continued)
        self._hides = epoch >= self._hides_from
        if epoch == self._hides_from and self.log_reach is None and not is_continued:
            self.update_tree()  # for the reaches, which stay the same until the end
            self.train()

    def pace(self, epoch: int, share: float) -> float:
        self._done = (epoch + share) / self._epochs
        return self._pace.at(epoch + share)

    @property
    def _question(self) -> NodeFunction:
        """As sharp as it is by now."""
        end = self.tree.question.sharpness
        return replace(self.tree.question, sharpness=between(self._begin, end, self._done / self._recipe.sharp_at))

    @property
    def _temper(self) -> float:
        """How much the tree's own answer is softened by now."""
        start, stop = self._recipe.student_temperature_start, self._recipe.student_temperature_end
        return between(1.0, self._recipe.temperature, (self._done - start) / max(stop - start, 1e-9))

    def forward(self, values: Tensor) -> tuple[Tensor, ...]:
        x = random_patches(self.tree.features.backbone.tail(values), self._recipe.patch_fraction, FEWEST_OF_TREE)
        found = nearest_followed(self.tree.features.from_map, x.transpose(1, 2)[:, :, None], self.anchors)
        reach = None if self.log_reach is None else self.log_reach.exp()
        routed = self.tree.routed(found.nearest, self._question, reach)
        outputs = routed.distance, routed.patch, routed.log_path_probs, routed.p_right
        if self._twins is None or not self._hides:
            return outputs
        twins = self._twins.draw(WholeBatch.around(x), x.device)
        return (*outputs, self._hiding_loss(twins))

    def _hiding_loss(self, twins: Pairs) -> Float[Tensor, ""]:
        """How far the tree, as it would be if it were finished now, is from needing what it shows."""
        tree, encode, kind = self.tree, self.tree.features.from_map, self.tree.question.kind
        own = own_sides(tree, self._leaf_class, twins.labels).to(twins.places.device)
        both = own if kind == "presence" else own | own.roll(tree.topology.n_nodes, dims=1)
        unit = LN2 * (tree.reach if self.log_reach is None else self.log_reach.detach().exp())
        after = nearest_followed(encode, twins.hidden, self.anchors, both)
        with torch.no_grad():
            before = Matches.of(encode(twins.plain), after.prototypes, twins.places, unit, tree.grid)
        return hiding_loss(before, after.nearest.distance, twins.places, own, unit, kind)

    def loss(self, outputs: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
        log_y = self._answer(TreeOutput(*outputs[:4]).log_path_probs)
        target = self._target(inputs)
        if not target.is_floating_point():
            target = one_hot(target, log_y.shape[1]).to(log_y.dtype)
        losses = -(target * (log_y / self._temper).log_softmax(dim=1)).sum(dim=1)
        if self.log_reach is not None and self._turns is not None and self._recipe.margin:
            unit, recipe = self.log_reach.exp(), self._recipe
            misses = self._turns.misses(outputs[0], inputs.labels, recipe.near * unit, recipe.far * unit)
            losses = losses + recipe.margin * misses
        for own in outputs[4:]:  # which sum up over processes, whereas the mean of all losses is taken
            losses = losses + self._recipe.hiding * own * sum(distributed.lengths(len(losses))) / max(len(losses), 1)
        return losses, (log_y.argmax(dim=1) == inputs.labels).float()

    def _answer(self, log_path_probs: Float[Tensor, "B L"]) -> Float[Tensor, "B K"]:
        """Eq. 4, in short where every class has a leaf of its own, as in every tree but some that were edited."""
        n_leaves, n_classes = self.tree.leaf_logits.shape
        leaf_of_class = self._leaf_class.argsort()
        if n_leaves == n_classes and torch.equal(self._leaf_class[leaf_of_class], torch.arange(n_classes)):
            return log_predict_classes(log_path_probs, leaf_of_class, len(self._batches.entries) / n_classes)
        return log_predict(log_path_probs, class_log_probs(self.tree.leaf_logits))

    def after_batch(self, inputs: Inputs) -> None:
        """Leaves stay as they are until the end."""

    def sweep_labels(self, visit: Visit) -> None:
        """The plain photos with their labels."""
        for nearest, labels in self._measured or self._measure():
            visit(self.tree.routed(nearest), labels)

    @torch.no_grad()
    def update_tree(self) -> None:
        """The prototypes as the head sees their sources now, and their reaches."""
        self.eval()
        self.tree.prototypes.copy_(self.tree.features.from_map(self.anchors))
        if self.log_reach is not None:
            self.tree.reach.copy_(self.log_reach.exp())
        self._measured = []
        if len(self._sources.entries) * self.tree.n_prototypes <= self._recipe.room.distances:
            self._measured = list(self._measure())
        seen = self._measured or self._measure()
        learn_usual(self.tree, ((nearest.distance, labels) for nearest, labels in seen))

    def _measure(self) -> Iterator[Measured]:
        """The plain photos as the tree is now."""
        prototypes = self.tree.prototypes.detach()
        for z, labels, _ in maps_of(self._sources, self.tree.features, prototypes.device):
            yield nearest_patches(z.to(prototypes.dtype), prototypes), labels


@torch.no_grad()
def learn_usual(tree: ProtoTree, seen: Iterable[tuple[Float[Tensor, "M P"], Int[Tensor, " M"]]]) -> None:
    """How far most photos of the classes on each side of a node are from the patch that stands for that side.

    Where a node compares two patches, that is how far they reach. Of each photo only its own class's turns are kept.
    """
    own, is_choice = torch.cat(side_classes(tree)[::-1]), tree.question.kind == "pairwise"
    turns, found = [torch.zeros(0, dtype=torch.int32)], [tree.distance_p95.new_zeros(0).cpu()]
    for distance, labels in seen:
        turn, photo = torch.nonzero(own[:, labels], as_tuple=True)
        turns.append(turn.int().cpu())
        found.append(distance[photo, turn if is_choice else turn % tree.topology.n_nodes].cpu())
    every, apart = (torch.cat(distributed.gather(torch.cat(rows))) for rows in (turns, found))
    counts = every.bincount(minlength=len(own)).tolist()
    for number, mine in enumerate(apart[every.argsort(stable=True)].split(counts)):
        some = mine[:: -(-len(mine) // MOST_USUAL) or 1]
        tree.distance_p95[number] = torch.quantile(some, USUAL) if len(some) else 0
    if is_choice:
        tree.reach.copy_(torch.where(tree.distance_p95 > 0, tree.distance_p95 / math.log(2), 1).clamp(*REACH_RANGE))


@dataclass(frozen=True)
class Turns:
    """Which way the photos of each class should turn at each node."""

    right: Bool[Tensor, "K N"]
    left: Bool[Tensor, "K N"]

    @classmethod
    def of(cls, tree: ProtoTree) -> "Turns":
        """Towards the leaf in which a class has the majority; no way at all for a class that has none."""
        left, right = side_classes(tree)
        return cls(right.T, (left & ~right).T)

    def misses(
        self,
        distance: Float[Tensor, "B N"],
        labels: Int[Tensor, " B"],
        near: Float[Tensor, " N"],
        far: Float[Tensor, " N"],
    ) -> Float[Tensor, " B"]:
        """How much farther than `near` right turns are and how much nearer than `far` left turns, summed."""
        right, left = (side.to(distance.device)[labels] for side in (self.right, self.left))
        return (right * relu(distance - near) + left * relu(far - distance)).sum(dim=1)


def best_patch_logits(linear: nn.Linear, z: Float[Tensor, "B patches D"]) -> Float[Tensor, "B K"]:
    """For each class what the patch says that speaks for it most."""
    # The gain on the few weights, not on all patches.
    return functional.linear(z, LOGIT_GAIN * linear.weight, linear.bias).max(dim=1).values


def between(start: float, end: float, share: float) -> float:
    """From one value to another as the share goes from 0 to 1, and no further."""
    return start + (end - start) * min(max(share, 0.0), 1.0)


def random_patches(x: Float[Tensor, "B C H W"], share: float, fewest: int) -> Float[Tensor, "B patches C"]:
    """The same random patches of every map of a batch."""
    n_patches = x.shape[2] * x.shape[3]
    order = torch.randperm(n_patches, device=x.device)
    chosen = order[: max(fewest, math.ceil(share * n_patches))]
    return x.flatten(2).transpose(1, 2).index_select(1, chosen)

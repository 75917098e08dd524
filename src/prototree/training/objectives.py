"""Algorithm 1: what is learned by gradients, at which rates, beside the leaves (§4, Table S2)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from prototree.backbones.backbone import Backbone
from prototree.core.leaves import class_log_probs, predict
from prototree.core.model import ProtoTree, TreeOutput
from prototree.features.batches import Batches
from prototree.features.cache import Inputs
from prototree.progress import Observer
from prototree.training import distributed
from prototree.training.leaf_training import Interleaved, LeafTrainer, Target, Visit
from prototree.training.loop import Group, Loop, Objective, Options
from prototree.training.target_rows import TargetRows

WARM_UP = 50  # steps in which a rate that will fall with a cosine rises, at the most a tenth of all
LABEL_SMOOTHING = 0.1  # of classifiers
TUNED_SHARE = 0.5  # of the way that tuning moved a pretrained network (Wortsman et al., CVPR 2022)


@dataclass(frozen=True)
class Schedule:
    """Rates and when they change. Epochs count from 0."""

    epochs: int
    freeze_epochs: int = 30
    lr_prototypes: float = 1e-3
    lr_last_block: float = 1e-3
    lr_backbone: float = 1e-5
    weight_decay: float = 0.0
    milestones: tuple[int, ...] = ()
    gamma: float = 0.5

    def factor(self, epoch: int) -> float:
        """What the rates are multiplied with."""
        return float(self.gamma ** sum(epoch >= milestone for milestone in self.milestones))

    def is_frozen(self, epoch: int) -> bool:
        """Whether the trunk stays as it is in this epoch."""
        return epoch < self.freeze_epochs


@dataclass(frozen=True)
class Cosine:
    """A pace that rises to 1 in the first steps and falls to 0 with the last."""

    epochs: int
    n_batches: int  # in an epoch

    def at(self, epoch: float) -> float:
        warm_up = min(WARM_UP / self.n_batches, self.epochs / 10)
        return min(1.0, (epoch + 0.01 * warm_up) / warm_up) * 0.5 * (1 + math.cos(math.pi * epoch / self.epochs))


@dataclass(frozen=True)
class SoftTargets:
    """A teacher's class probabilities for every entry of the data, mixed with the labels (§3, distillation)."""

    probs: TargetRows
    weight: float

    def of(self, labels: Int[Tensor, " B"], entries: Int[Tensor, " B"]) -> Float[Tensor, "B K"]:
        taught = self.probs[entries.cpu()].to(labels.device)
        return self.weight * taught + (1 - self.weight) * one_hot(labels, taught.shape[1])


class TreeObjective(Objective):
    """A tree with its leaves' way of learning: lines 5–10 of Algorithm 1."""

    def __init__(
        self,
        tree: ProtoTree,
        batches: Batches,
        schedule: Schedule,
        leaf_trainer: LeafTrainer | None = None,
        targets: SoftTargets | None = None,
    ) -> None:
        super().__init__()
        self.tree = tree
        self._batches, self._schedule, self._targets = batches, schedule, targets
        self.leaf_trainer = leaf_trainer or Interleaved()
        self._routed: TreeOutput | None = None
        self.leaf_trainer.prepare(tree)

    def groups(self, epoch: int) -> list[Group]:
        """The paper's three rates, and weight decay on the 1×1 convolution alone."""
        schedule, features = self._schedule, self.tree.features
        factor = schedule.factor(epoch)
        prototypes = [self.tree.prototypes]
        if self.tree.leaf_logits.requires_grad:
            prototypes.append(self.tree.leaf_logits)
        return [
            Group(prototypes, schedule.lr_prototypes * factor),
            Group(list(features.head.parameters()), schedule.lr_last_block * factor, schedule.weight_decay),
            Group(list(features.backbone.tail_parameters()), schedule.lr_last_block * factor),
            Group(list(features.backbone.trunk_parameters()), schedule.lr_backbone * factor),
        ]

    def start_epoch(self, epoch: int, *, is_continued: bool) -> None:
        # In every epoch, not once: a continued run must freeze as well.
        self.tree.features.backbone.freeze(self._schedule.is_frozen(epoch))
        if not is_continued:
            self.leaf_trainer.start_epoch(self.tree, self.sweep)
        self.train()

    def sweep(self, visit: Visit) -> None:
        """All training images through the tree as it is, with the targets they are trained on."""
        self._sweep(lambda routed, inputs: visit(routed, self._target(inputs)))

    def sweep_labels(self, visit: Visit) -> None:
        """The same with their labels."""
        self._sweep(lambda routed, inputs: visit(routed, inputs.labels))

    @torch.no_grad()
    def _sweep(self, visit: Callable[[TreeOutput, Inputs], None]) -> None:
        self.eval()
        device = self.tree.prototypes.device
        for inputs in self._batches.epoch(0):
            if len(inputs.labels):
                inputs = Inputs(inputs.values.to(device), inputs.labels.to(device), inputs.entries)
                visit(self.tree.route(self._batches.encode(self.tree.features, inputs.values)), inputs)

    def forward(self, values: Tensor) -> tuple[Tensor, ...]:
        feature_map = self._batches.encode(self.tree.features, values)
        if not len(values):  # this process's share of a small batch: nothing, but all parameters take part
            nothing = 0 * (feature_map.sum() + self.tree.prototypes.sum())
            nodes = nothing.expand(0, self.tree.topology.n_nodes)
            return nodes, values.new_zeros(0), nothing.expand(0, 1), nodes
        routed = self.tree.route(feature_map)
        return routed.distance, routed.patch, routed.log_path_probs, routed.p_right

    def loss(self, outputs: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
        if not len(inputs.labels):
            self._routed = None
            return outputs[0].sum(dim=1), outputs[0].new_zeros(0)
        self._routed = TreeOutput(*outputs)
        log_path_probs = self._routed.log_path_probs
        losses = -self.tree.log_likelihood(self._routed, self._target(inputs))
        with torch.no_grad():
            probs = predict(log_path_probs.detach(), class_log_probs(self.tree.leaf_logits).exp())
        return losses, (probs.argmax(dim=1) == inputs.labels).float()

    def after_batch(self, inputs: Inputs) -> None:
        self.leaf_trainer.after_batch(self.tree, self._routed, self._target(inputs), self._batches.n_batches)

    def _target(self, inputs: Inputs) -> Target:
        if self._targets is None:
            return inputs.labels
        return self._targets.of(inputs.labels, inputs.entries)


class ClassifierObjective(Objective):
    """The backbone as a plain classifier on the same data: §4's "training it on a specific prediction task first"."""

    def __init__(
        self, backbone: Backbone, n_classes: int, pace: "Cosine", rate: float, backbone_rate: float | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.linear = nn.Linear(backbone.n_channels, n_classes)
        self._pace, self._rate, self._backbone_rate = pace, rate, rate if backbone_rate is None else backbone_rate

    def groups(self, epoch: int) -> list[Group]:
        return [
            Group(list(self.linear.parameters()), self._rate),
            Group(list(self.backbone.parameters()), self._backbone_rate),
        ]

    def pace(self, epoch: int, share: float) -> float:
        return self._pace.at(epoch + share)

    def start_epoch(self, epoch: int, *, is_continued: bool) -> None:
        self.backbone.freeze(False)

    def forward(self, images: Float[Tensor, "B 3 h w"]) -> Float[Tensor, "B K"]:
        return self.linear(self.backbone(images).mean(dim=(2, 3)))  # type: ignore[no-any-return]

    def loss(self, outputs: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
        losses = cross_entropy(outputs, inputs.labels, reduction="none", label_smoothing=LABEL_SMOOTHING)
        return losses, (outputs.argmax(dim=1) == inputs.labels).float()


@torch.no_grad()
def blend_with_start(backbone: Backbone, before: Mapping[str, Tensor]) -> None:
    """Leaves a tuned network between where it began and where it ended: it forgets less of what it knew."""
    for name, tensor in backbone.state_dict().items():
        if tensor.is_floating_point():
            tensor.lerp_(before[name].to(tensor.device), 1 - TUNED_SHARE)


def train(
    objective: Objective, batches: Batches, epochs: int, options: Options, observer: Observer | None = None
) -> None:
    """Trains in this process or, under `torchrun`, in all of them."""
    distributed.synchronise_batch_norm(objective)
    objective.to(options.device)
    if options.channels_last:
        objective.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    Loop(objective, batches, epochs, options, observer).run()

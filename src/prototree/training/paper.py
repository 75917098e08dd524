"""The paper's recipe: Algorithm 1 from top to bottom (§4, Tables S2 and S3). The numbers are the algorithm's lines."""

import copy
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.config import LABEL_SMOOTHING, PaperSettings
from prototree.core.leaves import Labels, SoftLabels, class_log_probs, leaf_counts, leaf_update, predict
from prototree.core.model import ProtoTree, TreeOutput
from prototree.core.topology import Topology
from prototree.data.crops import training_views
from prototree.data.loader import ViewDataset, make_loader, stable_seed
from prototree.errors import ConfigError
from prototree.features.cache import FeatureMaps, Inputs
from prototree.training import distributed
from prototree.training.finetuned import FinetunedClassifier, save_finetuned
from prototree.training.loop import Context, Loop, ParamGroup
from prototree.training.teacher import soft_labels

_GAMMA = 0.5  # factor of all learning rates at each milestone (Table S2)
_WISE_FT_ALPHA = 0.5  # of the way that fine-tuning moved a pretrained network (Wortsman et al., CVPR 2022)


def train(context: Context, cfg: PaperSettings, start: ProtoTree | None = None) -> ProtoTree:
    """Train a full tree, everything by gradients but the leaves; pruning and projection follow in `pipeline.stages`."""
    if start is not None:
        raise ConfigError("the recipe 'paper' starts its own tree: its prototypes move while they learn")
    assert cfg.height is not None
    backbone = context.backbone(split=cfg.train_last_block)
    images = augmented_images(context, backbone)
    if context.config.pretrain_epochs:
        pretrain(context, backbone, images, context.config.pretrain_epochs, cfg.lr_last_block, cfg.lr_backbone)
    pretrained = copy.deepcopy(backbone) if cfg.baseline else None
    size, names = (cfg.prototype_size, cfg.prototype_size), context.data.class_names
    tree = ProtoTree(Topology.full(cfg.height), context.features(backbone), names, size)  # 1: initialise T
    distributed.convert_sync_bn(tree)
    tree.leaf_logits.requires_grad_(cfg.leaf_update == "gradient")
    batches = Batches(context, images, cfg, tree)
    if pretrained is not None:
        train_baseline(context, cfg, pretrained, batches)
    teacher = soft_labels(context, cfg.teacher, cfg.distill_temperature) if cfg.teacher else None

    def target(batch: Inputs) -> Labels | SoftLabels:
        if teacher is None:
            return batch.labels
        probs = teacher[batch.entries.cpu()].to(batch.labels.device)
        return cfg.distill_weight * probs + (1 - cfg.distill_weight) * one_hot(batch.labels, probs.shape[1])

    context.observer.stage(f"training {tree.n_prototypes} prototypes for {cfg.epochs} epochs")
    loop = Loop(context, "tree", tree, param_groups(tree, cfg, 0), cfg.epochs, adam_epsilon=cfg.adam_epsilon)
    for epoch in loop.epochs():  # 2: for each epoch
        tree.features.backbone.freeze(epoch < cfg.freeze_epochs)
        if cfg.leaf_update == "two_pass":
            refit_leaves(tree, ((out, target(batch)) for out, batch in batches.forward(tree, epoch)))
        train_mode(tree, tree.features.backbone, cfg)
        groups, epoch_start = param_groups(tree, cfg, epoch), tree.leaf_logits.detach().clone()
        for batch in loop.batches(batches.epoch(epoch), batches.n_batches):  # 3–4: for each mini-batch (x, y)
            loop.set_lr(groups)
            out, losses, correct = None, empty_loss(tree), batch.labels.float()
            if len(batch.labels):  # else an empty share of the batch in this process
                with loop.autocast():
                    out = tree.forward_features(batches.encode(tree.features, batch))  # 5: ŷ = T(x), Eq. 1–4
                    losses = -tree.log_likelihood(out, target(batch))  # 6: cross-entropy
                y_hat = predict(out.log_path_probs.detach(), class_log_probs(tree.leaf_logits.detach()).exp())
                correct = (y_hat.argmax(dim=1) == batch.labels).float()
            loop.step(losses, correct)  # 7: update ω and P
            if cfg.leaf_update == "interleaved":
                update_leaves(tree, epoch_start, out, target(batch), batches.n_batches)  # 8–10: c of each leaf, Eq. 5
    return tree  # 15: prune, 16: project


def train_mode(network: nn.Module, backbone: Backbone, cfg: PaperSettings) -> None:
    """Set the training mode; batch norm of the backbone, but for its last block, may keep its statistics."""
    network.train()
    if cfg.freeze_batch_norm:
        for module in backbone.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        for block in backbone.last_modules:
            block.train()


def param_groups(tree: ProtoTree, cfg: PaperSettings, epoch: int) -> list[ParamGroup]:
    """The paper's learning rates (Table S2), and weight decay on the 1×1 convolution alone."""
    prototypes = [tree.prototypes, *([tree.leaf_logits] if tree.leaf_logits.requires_grad else [])]
    network = network_groups(tree.features.backbone, tree.features.head, cfg, epoch)
    return [ParamGroup(prototypes, cfg.lr_prototypes * decay(cfg, epoch)), *network]


def network_groups(backbone: Backbone, head: nn.Module, cfg: PaperSettings, epoch: int) -> list[ParamGroup]:
    """Return the groups of what is put on the backbone, of its last block, and of the rest of it."""
    factor = decay(cfg, epoch)
    return [
        ParamGroup(list(head.parameters()), cfg.lr_last_block * factor, cfg.weight_decay),
        ParamGroup(list(backbone.last_block_parameters()), cfg.lr_last_block * factor),
        ParamGroup(list(backbone.backbone_parameters()), cfg.lr_backbone * factor),
    ]


def decay(cfg: PaperSettings, epoch: int) -> float:
    """γ to the power of the milestones that have passed."""
    return float(_GAMMA ** sum(epoch >= milestone for milestone in cfg.milestones))


@torch.no_grad()
def update_leaves(
    tree: ProtoTree, epoch_start: Tensor, out: TreeOutput | None, target: Labels | SoftLabels, n_batches: int
) -> None:
    """Eq. 5 on one mini-batch, summed over processes, with the leaves as they are."""
    counts = torch.zeros_like(tree.leaf_logits)
    if out is not None:
        counts = leaf_counts(out.log_path_probs.detach(), class_log_probs(tree.leaf_logits), target).contiguous()
    distributed.all_reduce_sum(counts)
    tree.leaf_logits.copy_(leaf_update(tree.leaf_logits, epoch_start, counts, n_batches))


@torch.no_grad()
def refit_leaves(tree: ProtoTree, outputs: Iterator[tuple[TreeOutput, Labels | SoftLabels]]) -> None:
    """Eq. 5 over all images at once (Kontschieder et al., ICCV 2015)."""
    log_probs, total = class_log_probs(tree.leaf_logits.detach()), torch.zeros_like(tree.leaf_logits)
    for out, target in outputs:
        total += leaf_counts(out.log_path_probs, log_probs, target)
    tree.leaf_logits.copy_(distributed.all_reduce_sum(total))


def empty_loss(module: nn.Module) -> Tensor:
    """A loss of no images, through which every parameter gets a gradient of zero."""
    total = torch.stack([p.flatten()[:1].sum() for p in module.parameters() if p.requires_grad]).sum()
    return (total * 0).expand(0)


def augmented_images(context: Context, backbone: Backbone) -> ViewDataset:
    """All training views, augmented anew in every epoch."""
    views, config = partial(training_views, kind=context.data.kind), context.config
    return context.views(views, backbone.preprocessing, context.data.train, config.augment, config.seed)


class Batches:
    """Images through the whole network; while the backbone is frozen, its cached feature maps if asked for."""

    def __init__(self, context: Context, images: ViewDataset, cfg: PaperSettings, tree: ProtoTree) -> None:
        config = context.config
        self._config, self._frozen_epochs = config, cfg.freeze_epochs
        self._loader = make_loader(
            images, config.batch_size, shuffle=True, shard=distributed.shard(), workers=config.workers,
            strict=config.fail_on_bad_images,
        )  # fmt: skip
        self.n_batches = len(self._loader)
        self._maps: FeatureMaps | None = None
        self._is_cached = False
        if cfg.cache_views and cfg.freeze_epochs:
            backbone = tree.features.backbone.to(context.device)
            backbone.freeze(True)
            with distributed.main_first():
                self._maps = context.cache.compute(backbone, [images], variants=cfg.cache_views)[0]

    def epoch(self, epoch: int) -> Iterator[Inputs]:
        """Iterate over this process's share of every batch of an epoch."""
        self._is_cached = self._maps is not None and epoch < self._frozen_epochs
        if self._maps is not None and self._is_cached:
            config, shard = self._config, distributed.shard()
            yield from self._maps.batches(config.batch_size, epoch=epoch, seed=config.seed, shard=shard)
            return
        for batch in self._loader.epoch(epoch):
            yield Inputs(batch.images, batch.labels, batch.entries)

    def encode(self, network: FeatureExtractor | FinetunedClassifier, batch: Inputs) -> Tensor:
        """f(x; ω): what a network makes of a batch."""
        return network.from_split(batch.values) if self._is_cached else network(batch.values)

    @torch.no_grad()
    def forward(self, tree: ProtoTree, epoch: int = 0) -> Iterator[tuple[TreeOutput, Inputs]]:
        """All training images of an epoch through the tree as it is."""
        tree.eval()
        device = tree.prototypes.device
        for batch in self.epoch(epoch):
            if len(batch.labels):
                batch = Inputs(batch.values.to(device), batch.labels.to(device), batch.entries)
                yield tree.forward_features(self.encode(tree.features, batch)), batch


def train_baseline(context: Context, cfg: PaperSettings, backbone: Backbone, batches: Batches) -> None:
    """Fine-tune the network as a plain classifier: the same epochs, rates, milestones and images as the tree's."""
    context.observer.stage(f"fine-tuning the network as a plain classifier for {cfg.epochs} epochs, to compare with")
    torch.manual_seed(stable_seed("baseline", context.config.seed))
    classifier = FinetunedClassifier(backbone, context.data.n_classes)
    distributed.convert_sync_bn(classifier)
    groups = network_groups(backbone, classifier.linear, cfg, 0)
    loop = Loop(context, "baseline", classifier, groups, cfg.epochs, adam_epsilon=cfg.adam_epsilon)
    for epoch in loop.epochs():
        backbone.freeze(epoch < cfg.freeze_epochs)
        train_mode(classifier, backbone, cfg)
        groups = network_groups(backbone, classifier.linear, cfg, epoch)
        for batch in loop.batches(batches.epoch(epoch), batches.n_batches):
            loop.set_lr(groups)
            losses, correct = empty_loss(classifier), batch.labels.float()
            if len(batch.labels):
                with loop.autocast():
                    logits = batches.encode(classifier, batch)
                    losses = cross_entropy(logits, batch.labels, reduction="none")
                correct = (logits.argmax(dim=1) == batch.labels).float()
            loop.step(losses, correct)
    if distributed.is_main():
        save_finetuned(classifier, context.folder)


def pretrain(
    context: Context, backbone: Backbone, images: ViewDataset, epochs: int, lr: float, lr_pretrained: float
) -> None:
    """Train the backbone as a plain classifier first (§4); weights it had are left halfway to their end (WiSE-FT)."""
    context.observer.stage(f"training the backbone as a plain classifier for {epochs} epochs")
    config = context.config
    loader = make_loader(images, config.batch_size, shuffle=True, shard=distributed.shard(), workers=config.workers)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    classifier = FinetunedClassifier(backbone, context.data.n_classes)
    distributed.convert_sync_bn(classifier)
    groups = [
        ParamGroup(list(classifier.linear.parameters()), lr),
        ParamGroup(list(backbone.parameters()), lr_pretrained if backbone.weights else lr),
    ]
    loop = Loop(context, "backbone", classifier, groups, epochs)
    for epoch in loop.epochs():
        classifier.train()
        backbone.freeze(False)
        inputs = (Inputs(batch.images, batch.labels, batch.entries) for batch in loader.epoch(epoch))
        for batch in loop.batches(inputs, len(loader)):
            loop.set_lr(groups, loop.cosine_lr())
            if not len(batch.labels):
                loop.step(empty_loss(classifier), batch.labels.float())
                continue
            with loop.autocast():
                logits = classifier(batch.values)
                losses = cross_entropy(logits, batch.labels, reduction="none", label_smoothing=LABEL_SMOOTHING)
            loop.step(losses, (logits.argmax(dim=1) == batch.labels).float())
    if backbone.weights:
        with torch.no_grad():
            for name, tensor in backbone.state_dict().items():
                if tensor.is_floating_point():
                    tensor.lerp_(before[name].to(tensor.device), 1 - _WISE_FT_ALPHA)

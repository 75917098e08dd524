"""The default recipe: frozen network, tree grown from the classes, distilled from a classifier on the same features.

(1) The backbone stays frozen, and its feature maps of a few views
of every image are computed once. (2) The head learns as a max-pooled classifier, which is the baseline and the teacher.
(3) The tree starts with one leaf per class, grown from a class hierarchy. (4) While the head learns from the teacher's
softened probabilities, every prototype *is* its source patch, encoded by the head as it is at that step, so that
projection moves nothing. Decisions begin soft and become sharp; towards the end the tree's own probabilities are
softened like the teacher's. In the last third the occlusion loss makes each match depend on the displayed box.
(5) A second tree that has not seen a fraction of the images calibrates the confidence.

Notation used for tensor shapes: B batch, C channels of the backbone's map, P prototypes, L leaves, K classes, M images.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.crops import FULL_ONLY, Crops, patch_grid
from prototree.config import DistillSettings
from prototree.core import leaves
from prototree.core.model import NearestPatches, ProtoTree, nearest_patches
from prototree.core.nodes import LN2, RADIUS_RANGE, NodeFunction
from prototree.core.projection import side_classes
from prototree.data.crops import FULL_IMAGE, OccludedViews, evaluation_views, random_views, source_views
from prototree.data.dataset import class_counts, repeat_factors
from prototree.data.loader import Entry, ViewDataset, stable_seed
from prototree.features.cache import FeatureMaps
from prototree.training.calibrate import MIN_HELD_OUT, CalibrationFile, Fitted, fit, held_out_images, predict_held_out
from prototree.training.grow import InitialTree, from_existing_tree, grow_tree, reestimate_bn, sample_maps, standardise
from prototree.training.head import (
    SoftLabels,
    compute_soft_labels,
    nearest_with_grad,
    random_patches,
    save_baseline,
    train_head,
    wide_head,
)
from prototree.training.last_blocks import finetune_last_blocks
from prototree.training.loop import Context, Loop, ParamGroup
from prototree.training.occlusion_loss import OccludedPairs, salient_boxes
from prototree.training.paper import pretrain, refit_leaves

log = logging.getLogger(__name__)

_HEAD_VIEWS, _TREE_VIEWS = 38_000, 54_000  # that head and tree see, where the settings do not say how many epochs
_MANY_CLASSES = 50  # beyond, they see as many views of each class as they would of so many classes
_PROBE_VIEWS, _FINETUNE_VIEWS = 20_000, 50_000  # that the head and the last blocks see where these are fine-tuned
_FINETUNE_HELD_OUT = 0.1
_MIN_EPOCHS, _MIN_TREE_EPOCHS, _MAX_EPOCHS = 6, 12, 200
_FINETUNE_FRACTION = 0.25  # of the usual length, when an edited tree is trained further
_PATCH_FRACTION, _MIN_PATCHES = 0.5, 40  # of a map that a step of the tree sees
_SHARPNESS_START, _ANNEAL_UNTIL = 3.0, 0.7  # of the decisions, and the fraction of training after which they stay sharp
_STUDENT_START, _STUDENT_END = 0.4, 0.9  # fractions of training between which the tree's probabilities are softened
_OCCLUDE_FROM = (2, 3)  # of training
_LEAF_SWEEPS = 3  # of Eq. 5 over all images at the end
_LR_HEAD = 2e-3  # of the head as a classifier
_LR_PRETRAIN = 2e-4  # of a pretrained backbone while it is trained as a classifier
_QUANTILE, _MAX_VALUES = 0.95, 10_000_000  # of the distances that a side's images have
_MAX_DISTANCES = 25_000_000  # that are kept between sweeps


@dataclass(frozen=True)
class Features:
    """Feature maps of the frozen network."""

    prototypes: FeatureMaps  # the views that prototypes come from, at all crops: as a finished tree sees them
    train: FeatureMaps  # all views to learn from, at one crop each
    crops: Crops
    occluded: FeatureMaps | None = None  # images with boxes occluded, at all crops

    def select(self, new_index: Callable[[Entry], int | None]) -> "Features":
        """Keep the images that have a new index in the data, under that index."""

        def kept(maps: FeatureMaps) -> FeatureMaps:
            indices = {i: new for i, entry in enumerate(maps.entries) if (new := new_index(entry)) is not None}
            entries = [replace(maps.entries[i], sample_index=new) for i, new in indices.items()]
            return replace(maps.subset(list(indices)), entries=tuple(entries))

        occluded = None if self.occluded is None else kept(self.occluded)
        return Features(kept(self.prototypes), kept(self.train), self.crops, occluded)


def train(context: Context, cfg: DistillSettings, start: ProtoTree | None = None) -> ProtoTree:
    """Train a tree, and calibrate its confidence; with `start`, train the head of an edited tree further."""
    if start is not None:
        return finetune(context, cfg, start)
    backbone = context.backbone(split=cfg.finetune_blocks)
    if context.config.pretrain_epochs:
        images = context.views(  # new in every epoch
            source_views, backbone.preprocessing, context.data.train, "light", context.config.seed
        )
        pretrain(context, backbone, images, context.config.pretrain_epochs, cfg.lr, _LR_PRETRAIN)
    if cfg.finetune_blocks:
        finetune_blocks(context, cfg, backbone)
    features = compute_features(context, cfg, backbone.merge_last_block(), crops_of(cfg))  # 1
    tree = train_tree(context, cfg, backbone, features)  # 2–4
    held_out = held_out_images(features.prototypes.entries, cfg.calibration_fraction)
    if cfg.calibration_fraction and not held_out:
        log.warning(
            "the confidence is not calibrated: that takes %d images to hold out, more than %g of each class; it then "
            'only ranks answers, and the tree never says "I don\'t know" by itself; add images, or raise '
            "--calibration-fraction",
            *(MIN_HELD_OUT, cfg.calibration_fraction),
        )
    return calibrate(context, cfg, tree, features, held_out) if held_out else tree  # 5


def train_tree(
    context: Context, cfg: DistillSettings, backbone: Backbone, features: Features, name: str = ""
) -> ProtoTree:
    """Train head, tree and leaves from cached feature maps."""
    features = replace(features, train=oversample(features.train, context.data.n_classes))
    extractor = context.features(backbone)
    targets, sample, labels = train_teacher(context, cfg, extractor, features, name)
    reestimate_bn(extractor.to("cpu"), sample)
    initial = grow_tree(extractor, sample, labels, context.config.seed)
    node = NodeFunction("pairwise", cfg.sharpness)
    tree = ProtoTree(initial.topology, extractor, context.data.class_names, node_function=node)
    epochs = cfg.epochs or _epochs_for(_TREE_VIEWS, features.train, tree.n_classes, _MIN_TREE_EPOCHS)
    return distill(context, cfg, tree.set_crops(features.crops), initial, features, targets, epochs, name)


def finetune(context: Context, cfg: DistillSettings, start: ProtoTree) -> ProtoTree:
    """Train the head of an edited tree further; its prototypes stay the patches that were chosen.

    Where the confidence was calibrated before, it is calibrated again, on the validation images. Training takes the
    recipe's sharpness; the one that was fitted before would leave the tree as unsure as its teacher.
    """
    backbone, images = start.features.backbone.merge_last_block(), context.data.validation
    is_calibrated = bool(cfg.calibration_fraction and start.calibration.n_images and len(images) >= MIN_HELD_OUT)
    if is_calibrated:
        start.node_function = replace(start.node_function, sharpness=cfg.sharpness)
    features = compute_features(context, cfg, backbone, backbone.crops)
    features = replace(features, train=oversample(features.train, context.data.n_classes))
    targets, _, _ = train_teacher(context, cfg, context.features(backbone), features, "")
    initial = from_existing_tree(start, features.prototypes, context.data.folder)
    usual = _epochs_for(_TREE_VIEWS, features.train, start.n_classes, _MIN_TREE_EPOCHS)
    epochs = cfg.epochs or max(1, round(_FINETUNE_FRACTION * usual))
    tree = distill(context, cfg, start, initial, features, targets, epochs, "")
    if is_calibrated:
        views = ViewDataset(images, evaluation_views, tree.preprocessing)
        maps = context.cache.full(backbone, views)
        fit(tree, predict_held_out(tree, maps, range(len(images)), context.config.batch_size)).apply_to(tree)
    return tree


def finetune_blocks(context: Context, cfg: DistillSettings, backbone: Backbone) -> None:
    """Fine-tune the backbone's last blocks as a classifier, on the views that the tree will see."""
    backbone.to(context.device).freeze(True)
    maps = reduce(FeatureMaps.concat, context.cache.compute(backbone, training_views(context, cfg, backbone)))
    n_classes = context.data.n_classes
    probe, both = (_epochs_for(n_views, maps, n_classes, minimum=2) for n_views in (_PROBE_VIEWS, _FINETUNE_VIEWS))
    held_out = held_out_images(maps.entries, _FINETUNE_HELD_OUT)
    if not held_out:
        log.warning(
            "the network stays frozen: to fine-tune it takes %d images to hold out, more than %g of each class; "
            "add images, or set --finetune-blocks 0",
            *(MIN_HELD_OUT, _FINETUNE_HELD_OUT),
        )
        return
    finetune_last_blocks(context, backbone, oversample(maps, n_classes), held_out, (probe, both))


def training_views(context: Context, cfg: DistillSettings, backbone: Backbone) -> list[ViewDataset]:
    """Data sets of all views of the training images: plain ones, and random crops."""
    samples = context.data.all_samples if context.config.fold else context.data.train
    views = [context.views(source_views, backbone.preprocessing, samples)]
    if cfg.views > 2:
        # The same for every seed, so that runs can share the cache.
        more = partial(random_views, count=cfg.views - 2, seed=0)
        views.append(context.views(more, backbone.preprocessing, samples, context.config.augment))
    return views


def compute_features(context: Context, cfg: DistillSettings, backbone: Backbone, crops: Crops) -> Features:
    """Run the frozen network over all views, or read their maps; in a fold over all images, so that folds share."""
    preprocessing, cache = backbone.preprocessing, context.cache
    samples = context.data.all_samples if context.config.fold else context.data.train
    backbone.to(context.device).freeze(True)
    plain, *more = training_views(context, cfg, backbone)
    maps = cache.compute(backbone, [*(plain.center_crop(fraction) for fraction in crops), *more])
    prototypes = FeatureMaps.stack_crops(maps[: len(crops)])
    train_maps = reduce(FeatureMaps.concat, maps[len(crops) :], maps[0])
    occluded = None
    if cfg.occlusion_weight:
        full = prototypes.subset([i for i, entry in enumerate(prototypes.entries) if entry.view == FULL_IMAGE])
        boxes = salient_boxes(full, patch_grid(backbone.map_size, preprocessing.size, crops), preprocessing)
        views = [context.views(OccludedViews(boxes), preprocessing, samples).center_crop(part) for part in crops]
        if len(views[0]):
            occluded = FeatureMaps.stack_crops(cache.compute(backbone, views))
    features = Features(prototypes, train_maps, crops, occluded)
    if not context.config.fold:
        return features
    index_of = {sample.path: index for index, sample in enumerate(context.data.train)}
    return features.select(lambda entry: index_of.get(entry.sample.path))


def oversample(maps: FeatureMaps, n_classes: int) -> FeatureMaps:
    """Repeat the entries of rare classes; those of even data stay as they are."""
    factors = repeat_factors(class_counts((entry.sample for entry in maps.entries), n_classes))
    if max(factors) == 1:
        return maps
    repeated = ((i, factors[entry.sample.label]) for i, entry in enumerate(maps.entries))
    return maps.subset([index for index, factor in repeated for _ in range(factor)])


def train_teacher(
    context: Context, cfg: DistillSettings, extractor: FeatureExtractor, features: Features, name: str
) -> tuple[SoftLabels, Float[Tensor, "M C H W"], Int[Tensor, " M"]]:
    """Train the head as a classifier; return its soft labels, and a sample of backbone maps with their labels."""
    maps, config = features.train, context.config
    sample, labels = sample_maps(features.prototypes.full_image)
    standardise(extractor.to("cpu"), sample)
    epochs = cfg.head_epochs or _epochs_for(_HEAD_VIEWS, maps, context.data.n_classes)
    baseline = train_head(context, f"{name}head", extractor, maps, epochs, _LR_HEAD)
    if not name:
        save_baseline(baseline, context.folder)
    assert cfg.distill_temperature is not None
    return compute_soft_labels(baseline, maps, config.batch_size, cfg.distill_temperature, config.seed), sample, labels


def distill(
    context: Context,
    cfg: DistillSettings,
    tree: ProtoTree,
    initial: InitialTree,
    features: Features,
    soft_labels: SoftLabels,
    epochs: int,
    name: str,
) -> ProtoTree:
    """Train the head under the tree; at every step each prototype is the encoded patch that it comes from."""
    maps, anchors, batch_size = features.train, initial.anchors.to(context.device), context.config.batch_size
    count = len(maps.entries) / tree.n_classes  # images that a leaf has seen of its class
    tree.prototypes.requires_grad_(False)
    tree.leaf_logits.requires_grad_(False).zero_().scatter_(1, initial.leaf_class[:, None], count)
    log_predict = eq_4(tree, initial.leaf_class, count)
    occluded = OccludedPairs.of(tree, initial.leaf_class, features.prototypes, features.occluded)
    occlude_from = _OCCLUDE_FROM[0] * epochs // _OCCLUDE_FROM[1] if occluded else epochs
    context.observer.stage(f"training {tree.n_prototypes} prototypes for {epochs} epochs")
    groups = [ParamGroup(list(tree.features.head.parameters()), cfg.lr, cfg.weight_decay)]
    loop = Loop(context, f"{name}tree", tree, groups, epochs)
    for epoch in loop.epochs():
        tree.features.backbone.freeze(True)
        if epoch == occlude_from:
            finish(tree, anchors, features.prototypes, batch_size)  # for the radii, which stay the same from now on
        tree.train()
        wide_head(tree.features).norm.eval()
        for batch in loop.map_batches(maps):
            if not len(batch.labels):
                continue
            loop.set_lr(groups, loop.cosine_lr())
            with loop.autocast():
                patches = random_patches(batch.values, _PATCH_FRACTION, _MIN_PATCHES)
                nearest, _ = nearest_with_grad(tree.features.from_map, patches.transpose(1, 2)[:, :, None], anchors)
                out = tree.forward_distances(nearest, annealed(tree, initial, loop.progress))  # Eq. 2–3
                log_y = log_predict(out.log_path_probs)  # Eq. 4
                teacher = soft_labels(batch.entries).to(log_y.device)
                losses = distillation_loss(cfg, log_y, teacher, batch.labels, loop.progress)
                if occluded and epoch >= occlude_from:
                    losses = losses + cfg.occlusion_weight * occluded.loss(tree, anchors)
            loop.step(losses, (log_y.argmax(dim=1) == batch.labels).float())
    measured = finish(tree, anchors, features.prototypes, batch_size)
    for _ in range(_LEAF_SWEEPS):
        pairs = measured or _measure(tree, features.prototypes, batch_size)
        refit_leaves(tree, ((tree.forward_distances(nearest), labels) for nearest, labels in pairs))
    return tree


def annealed(tree: ProtoTree, initial: InitialTree, progress: float) -> NodeFunction:
    """The tree's node function, as sharp as it is at this point of training."""
    start, end = initial.sharpness or _SHARPNESS_START, tree.node_function.sharpness
    return replace(tree.node_function, sharpness=lerp(start, end, progress / _ANNEAL_UNTIL))


def distillation_loss(
    cfg: DistillSettings,
    log_y: Float[Tensor, "B K"],
    teacher: Float[Tensor, "B K"],
    labels: Int[Tensor, " B"],
    progress: float,
) -> Float[Tensor, " B"]:
    """Cross-entropy with the teacher's probabilities and the labels; the tree's own are softened towards the end."""
    target = cfg.distill_weight * teacher + (1 - cfg.distill_weight) * one_hot(labels, log_y.shape[1])
    softening = (progress - _STUDENT_START) / (_STUDENT_END - _STUDENT_START)
    temperature = lerp(1.0, cfg.distill_temperature or 1.0, softening)
    return -(target * (log_y / temperature).log_softmax(dim=1)).sum(dim=1)


def eq_4(tree: ProtoTree, leaf_class: Int[Tensor, " L"], count: float) -> Callable[[Tensor], Tensor]:
    """Return Eq. 4 in log space, for leaves that have counted `count` images of one class each.

    Where every class has one leaf, as in every tree but some that were edited, such a leaf gives its own class e^c and
    each other one 1, divided by e^c + K − 1: no work with the whole matrix.
    """
    leaf_of_class, n_classes = leaf_class.cpu().argsort(), tree.n_classes
    if not torch.equal(leaf_class.cpu()[leaf_of_class], torch.arange(n_classes)):
        leaf_log_probs = leaves.class_log_probs(tree.leaf_logits)
        return lambda log_path_probs: leaves.log_predict(log_path_probs, leaf_log_probs.to(log_path_probs.device))
    log_total = count + math.log1p((n_classes - 1) * math.exp(-count))
    log_gain = math.log(-math.expm1(-count)) - log_total + count

    def log_predict(log_path_probs: Tensor) -> Tensor:
        log_probs = log_path_probs[:, leaf_of_class] + log_gain
        return torch.logaddexp(log_probs, log_probs.new_tensor(-log_total))

    return log_predict


Measured = tuple[NearestPatches, Int[Tensor, " B"]]
"""Nearest patches of images to all prototypes, and the images' labels."""


@torch.no_grad()
def finish(tree: ProtoTree, anchors: Tensor, maps: FeatureMaps, batch_size: int) -> list[Measured]:
    """Set prototypes to their encoded patches, fit radii, and return all distances, unless they are too many."""
    tree.eval()
    tree.prototypes.copy_(tree.features.from_map(anchors))
    is_small = len(maps.entries) * tree.n_prototypes <= _MAX_DISTANCES
    measured = list(_measure(tree, maps, batch_size)) if is_small else []
    pairs = measured or _measure(tree, maps, batch_size)
    fit_distance_p95(tree, ((nearest.distance, labels) for nearest, labels in pairs))
    return measured


@torch.no_grad()
def _measure(tree: ProtoTree, maps: FeatureMaps, batch_size: int) -> Iterator[Measured]:
    prototypes = tree.prototypes.detach()
    tree.eval()
    for batch in maps.batches(batch_size):
        if len(batch.labels):
            z = tree.features.from_map(batch.values.to(prototypes.device))
            yield nearest_patches(z.to(prototypes.dtype), prototypes), batch.labels.to(prototypes.device)


@torch.no_grad()
def fit_distance_p95(tree: ProtoTree, seen: Iterable[tuple[Float[Tensor, "M P"], Int[Tensor, " M"]]]) -> None:
    """Fit how far 95 % of the images of a side's classes are from its patch; of pairwise nodes that is the radius."""
    sides, is_pairwise = torch.cat(side_classes(tree)[::-1]), tree.node_function.kind == "pairwise"
    numbers, values = [torch.zeros(0, dtype=torch.int32)], [tree.distance_p95.new_zeros(0).cpu()]
    for distance, labels in seen:
        side, image = torch.nonzero(sides[:, labels], as_tuple=True)
        numbers.append(side.int().cpu())
        values.append(distance[image, side if is_pairwise else side % tree.topology.n_nodes].cpu())
    number, value = torch.cat(numbers), torch.cat(values)
    counts = number.bincount(minlength=len(sides)).tolist()
    for row, dists in enumerate(value[number.argsort(stable=True)].split(counts)):
        dists = dists[:: -(-len(dists) // _MAX_VALUES) or 1]
        tree.distance_p95[row] = torch.quantile(dists, _QUANTILE) if len(dists) else 0
    if is_pairwise:
        tree.radius.copy_(torch.where(tree.distance_p95 > 0, tree.distance_p95, LN2).clamp(*RADIUS_RANGE))


def calibrate(
    context: Context, cfg: DistillSettings, tree: ProtoTree, features: Features, held_out: frozenset[int]
) -> ProtoTree:
    """Calibrate the confidence with a second tree that has not seen some images; runs on the same features share it."""
    backbone, config = tree.features.backbone, context.config
    settings = {**config.resume_key(), **cfg.resume_key(), "threads": torch.get_num_threads()}  # which change rounding
    if backbone.weights and not (config.pretrain_epochs or cfg.finetune_blocks):
        del settings["seed"]
        context = replace(context, config=replace(config, seed=0))
    used = [maps for maps in (features.train, features.prototypes, features.occluded) if maps is not None]

    def fit_second_tree() -> Fitted:
        context.observer.stage(f"training a second tree without {len(held_out)} images, to calibrate the confidence")
        state = torch.get_rng_state()
        torch.manual_seed(stable_seed("second tree", context.config.seed))
        others = features.select(lambda entry: None if entry.sample_index in held_out else entry.sample_index)
        other = train_tree(context, cfg, backbone, others, "calibration/")
        torch.set_rng_state(state)
        return fit(other, predict_held_out(other, features.prototypes, held_out, config.batch_size))

    with CalibrationFile.of(context.folder, used, settings) as file:
        if file.saved is not None:
            context.observer.stage("the confidence has been calibrated before, with the same images and settings")
        return (file.saved or file.save(fit_second_tree())).apply_to(tree)


def crops_of(cfg: DistillSettings) -> Crops:
    """The crops that the network sees: the full image, and perhaps its centre."""
    return (*FULL_ONLY, cfg.center_crop) if cfg.center_crop else FULL_ONLY


def lerp(start: float, end: float, fraction: float) -> float:
    """Interpolate linearly from one value to another as the fraction goes from 0 to 1, and no further."""
    return start + (end - start) * min(max(fraction, 0.0), 1.0)


def _epochs_for(n_views: int, maps: FeatureMaps, n_classes: int, minimum: int = _MIN_EPOCHS) -> int:
    """Epochs in which so many views are seen; of many classes, as many views of each as of 50."""
    wanted = n_views * max(n_classes, _MANY_CLASSES) / _MANY_CLASSES
    return min(max(round(wanted / len(maps.entries)), minimum), _MAX_EPOCHS)

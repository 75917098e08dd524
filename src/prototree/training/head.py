"""The head as a max-pooled classifier (teacher and baseline), and backpropagation through nearest patches alone.

A second linear layer classifies every patch by itself, and the best patch of each class counts: what the pooled
classifier may gather from many patches, a node of a tree must find in one.

Notation used for tensor shapes: B batch, C channels of the backbone's map, D prototype dimension, H W feature map,
P prototypes, K classes.
"""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, one_hot

from prototree.backbones.backbone import FeatureExtractor, WideHead
from prototree.config import LABEL_SMOOTHING
from prototree.core import checkpoint
from prototree.core.model import NearestPatches, nearest_patches, pair_distances
from prototree.errors import CheckpointError
from prototree.features.cache import FeatureMaps
from prototree.training.loop import Context, Loop, ParamGroup

FOLDER, _HEADER = "baseline", "baseline.json"
_LOGIT_GAIN = 4.0  # pooled values lie in [0, 1]; without it the logits grow slowly
_WEIGHT_DECAY = 0.05
_PATCH_FRACTION, _MIN_PATCHES = 0.75, 60  # of a map that a step sees; with fewer the tree is a worse one
_CUTMIX = 0.5  # fraction of batches in which images swap patches
_CHANNEL_DROPOUT, _POOLED_DROPOUT = 0.1, 0.2

Encode = Callable[[Float[Tensor, "B C H W"]], Float[Tensor, "B D H W"]]
SoftLabels = Callable[[Int[Tensor, " B"]], Float[Tensor, "B K"]]
"""Class probabilities of entries, by their indices."""


class Baseline(nn.Module):
    """Patches through a head of its own, max-pooled, and a linear layer: the same features without a tree."""

    takes_images: ClassVar[bool] = False  # but the tree's own feature maps

    def __init__(self, head: WideHead, linear: nn.Linear) -> None:
        super().__init__()
        self.head, self.linear = head, linear

    def forward(self, backbone_map: Float[Tensor, "B C H W"]) -> Float[Tensor, "B K"]:
        pooled = torch.sigmoid(self.head(backbone_map)).amax(dim=(2, 3))
        return self.linear(_LOGIT_GAIN * pooled)  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """The head as a classifier while it learns: of the pooled patches, and of each patch by itself."""

    def __init__(self, head: WideHead, n_classes: int) -> None:
        super().__init__()
        self.head = head
        self.linear, self.by_patch = (nn.Linear(head.last.out_channels, n_classes) for _ in range(2))

    def losses(
        self, maps: Float[Tensor, "B C H W"], labels: Int[Tensor, " B"]
    ) -> tuple[Float[Tensor, " B"], Float[Tensor, "B K"]]:
        """Return the loss of each image, with CutMix of patches and dropout of channels, and the logits."""
        rows = random_patches(maps, _PATCH_FRACTION, _MIN_PATCHES)
        target = one_hot(labels, self.linear.out_features).to(rows.dtype)
        if torch.rand(()) < _CUTMIX:
            rows, target = _cutmix(rows, target)
        channels = self.head.first.in_channels, self.head.first.out_channels
        masks = [_dropout_mask(rows, number, _CHANNEL_DROPOUT) for number in channels]
        z = torch.sigmoid(self.head.forward_train(rows, (masks[0], masks[1])))
        pooled = z.max(dim=1).values * _dropout_mask(z, z.shape[2], _POOLED_DROPOUT)
        logits, by_patch = self.linear(_LOGIT_GAIN * pooled), self.by_patch
        # The gain on the few weights, not on all patches.
        best_patch = functional.linear(z, _LOGIT_GAIN * by_patch.weight, by_patch.bias).max(dim=1).values
        return _smoothed(logits, target) + _smoothed(best_patch, target), logits

    def baseline(self) -> Baseline:
        """Return the classifier of the pooled patches alone."""
        return Baseline(self.head, self.linear).eval()


def train_head(
    context: Context, name: str, features: FeatureExtractor, maps: FeatureMaps, epochs: int, lr: float
) -> Baseline:
    """Train the head as a classifier, with CutMix of patches and dropout of channels."""
    model = Classifier(wide_head(features), context.data.n_classes)
    context.observer.stage(f"training the head as a plain classifier for {epochs} epochs")
    groups = [ParamGroup(list(model.parameters()), lr, _WEIGHT_DECAY)]
    loop = Loop(context, name, model, groups, epochs)
    for _ in loop.epochs():
        model.train()
        for batch in loop.map_batches(maps):
            loop.set_lr(groups, loop.cosine_lr())
            with loop.autocast():
                losses, logits = model.losses(batch.values, batch.labels)
            loop.step(losses, (logits.argmax(dim=1) == batch.labels).float())
    return model.baseline()


def _smoothed(logits: Float[Tensor, "B K"], target: Float[Tensor, "B K"]) -> Float[Tensor, " B"]:
    return cross_entropy(logits, target, reduction="none", label_smoothing=LABEL_SMOOTHING)


def _dropout_mask(like: Tensor, n_channels: int, fraction: float) -> Float[Tensor, "B n_channels"]:
    """Factors of channels: 0 for a random fraction of them, and more than 1 for the others."""
    return like.new_empty(len(like), n_channels).bernoulli_(1 - fraction).div_(1 - fraction)


def _cutmix(
    rows: Float[Tensor, "B patches C"], target: Float[Tensor, "B K"]
) -> tuple[Float[Tensor, "B patches C"], Float[Tensor, "B K"]]:
    """Replace random patches by those of another image of the batch, and mix the targets accordingly."""
    n_images, n_patches, _ = rows.shape
    partner = torch.randperm(n_images, device=rows.device)
    keep = torch.rand(n_images, n_patches, 1, device=rows.device) < torch.rand(n_images, 1, 1, device=rows.device)
    kept = keep.to(rows.dtype).mean(dim=1)
    return torch.where(keep, rows, rows[partner]), kept * target + (1 - kept) * target[partner]


def random_patches(x: Float[Tensor, "B C H W"], fraction: float, minimum: int) -> Float[Tensor, "B patches C"]:
    """Choose the same random patches of every map of a batch."""
    n_patches = x.shape[2] * x.shape[3]
    order = torch.randperm(n_patches, device=x.device)
    chosen = order[: max(minimum, math.ceil(fraction * n_patches))]
    return x.flatten(2).transpose(1, 2).index_select(1, chosen)


def nearest_with_grad(
    encode: Encode,
    maps: Float[Tensor, "B C H W"],
    anchors: Float[Tensor, "P C 1 1"],
    wanted: Bool[Tensor, "B P"] | None = None,
) -> tuple[NearestPatches, Float[Tensor, "P D 1 1"]]:
    """Return the nearest patch of each image to each prototype, and the prototypes, which are the encoded anchors.

    Distances have a gradient where they are wanted; None: all of them. Every patch goes through the head by itself, and
    only the nearest ones pass a gradient on. So all patches go through it once without one; then the few that were
    found, six of forty in a trained tree, go through it again. That gives the same gradient for a fraction of the work.
    It needs a head whose batch norm is frozen, or the other patches would have a part in it.
    """
    rows, sources, n_patches = flatten_patches(maps), anchors.flatten(1), maps.shape[2] * maps.shape[3]
    with torch.no_grad():
        z, prototypes = _encode_rows(encode, rows, sources)
        whole = z.view(len(maps), n_patches, z.shape[1]).transpose(1, 2)[:, :, None]
        nearest = nearest_patches(whole, prototypes[:, :, None, None], exact=False)
        distance, patch = nearest.distance, nearest.patch
    wanted = torch.ones_like(distance, dtype=torch.bool) if wanted is None else wanted
    image, prototype = torch.nonzero(wanted, as_tuple=True)
    chosen, index = (image * n_patches + patch[image, prototype]).unique(return_inverse=True)
    # Images and sources together, so that a patch that is its own prototype is at a distance of 0.
    z, prototypes = _encode_rows(encode, rows[chosen], sources)
    with torch.autocast(maps.device.type, enabled=False):  # distances stay in full precision
        z, prototypes = z.to(anchors.dtype), prototypes.to(anchors.dtype)
        dists = pair_distances(z, prototypes, index, prototype)
    distance = distance.to(dists.dtype).index_put((image, prototype), dists)
    return NearestPatches(distance, patch), prototypes[:, :, None, None]


def flatten_patches(maps: Float[Tensor, "B C H W"]) -> Float[Tensor, "rows C"]:
    """List all patches of all maps, one below the other."""
    return maps.flatten(2).transpose(1, 2).flatten(0, 1)


def _encode_rows(encode: Encode, *rows: Float[Tensor, "_ C"]) -> tuple[Float[Tensor, "_ D"], ...]:
    z = encode(torch.cat(rows).T[None, :, None])[0, :, 0].T
    return z.split([len(part) for part in rows])  # type: ignore[no-any-return]


@torch.no_grad()
def compute_soft_labels(
    baseline: Baseline, maps: FeatureMaps, batch_size: int, temperature: float, seed: int
) -> SoftLabels:
    """Compute the baseline's softened probabilities of every entry, in a file that the system may page out."""
    n_classes = baseline.linear.out_features
    device = baseline.linear.weight.device
    with tempfile.TemporaryFile() as file:
        rows = np.memmap(file, np.float32, "w+", shape=(len(maps.entries), n_classes))
    rows[sorted(maps.unreadable)] = 1 / n_classes
    for batch in maps.batches(batch_size, seed=seed):
        rows[batch.entries.numpy()] = (baseline(batch.values.to(device)) / temperature).softmax(dim=1).cpu().numpy()
    return lambda entries: torch.from_numpy(rows[entries.cpu().numpy()])


def save_baseline(baseline: Baseline, folder: Path) -> None:
    """Save a trained baseline in the folder of a run."""
    checkpoint.write_state(folder / FOLDER, _HEADER, {"version": checkpoint.VERSION}, baseline.state_dict())


def load_baseline(features: FeatureExtractor, n_classes: int, folder: Path) -> Baseline | None:
    """Load the baseline of a run, for maps of its backbone; None where the run has none."""
    if not (folder / FOLDER / _HEADER).exists():
        return None
    head = WideHead(features.backbone.n_channels, features.head_hidden_dim, features.prototype_dim)
    baseline = Baseline(head, nn.Linear(features.prototype_dim, n_classes))
    try:
        baseline.load_state_dict(checkpoint.read_state(folder / FOLDER, _HEADER)[1])
    except RuntimeError as error:
        raise CheckpointError(f"{folder / FOLDER} does not fit the run ({str(error)[:200]}); delete it") from error
    return baseline.eval()


def wide_head(features: FeatureExtractor) -> WideHead:
    """Return the head with a hidden layer, which this recipe needs."""
    assert isinstance(features.head, WideHead)
    return features.head

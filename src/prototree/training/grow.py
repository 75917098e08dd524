"""The initial tree: a Ward hierarchy of the classes, and for each side of a node the patch with the highest gain.

Notation used for tensor shapes: C channels of the backbone's map, D prototype dimension, P prototypes, L leaves,
K classes, M images.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy.cluster.hierarchy import ClusterNode, linkage, to_tree
from torch import Tensor

from prototree.backbones.backbone import FeatureExtractor
from prototree.core.model import ProtoTree, nearest_patches
from prototree.core.topology import Topology
from prototree.data.dataset import image_name
from prototree.data.loader import stable_seed
from prototree.errors import DataError
from prototree.features.cache import FeatureMaps
from prototree.training.head import wide_head

MEDIAN_DISTANCE = 0.7  # of a random patch to the nearest patch of another image when the tree starts
_CANDIDATES, _CANDIDATES_PER_CLASS = 2000, 40  # random patches to choose the first prototypes from, at least
_IMAGES, _IMAGES_PER_CLASS = 1200, 12  # that the choice is based on, at least
_BN_MAPS = 500  # that batch norm's statistics are estimated on, about
_MAX_NUMBERS = 200_000_000  # in the maps that the choice is based on: 0.8 GB
_MAX_PAIRS = 100_000_000  # of images and candidates whose distances are all computed; beyond, each node has its own few
_NODE_IMAGES, _NODE_CANDIDATES = 400, 1000


@dataclass(frozen=True)
class InitialTree:
    """A tree of one leaf per class, and the patch that each prototype is."""

    topology: Topology
    leaf_class: Int[Tensor, " L"]
    anchors: Float[Tensor, "P C 1 1"]  # in the backbone's map
    sharpness: float | None = None  # that nodes begin with; None: as the recipe has it


def sample_maps(maps: FeatureMaps) -> tuple[Float[Tensor, "M C H W"], Int[Tensor, " M"]]:
    """Read backbone maps and labels of all images, or of as many of each class as memory allows."""
    seen: Counter[int] = Counter()
    rank = []  # within the class
    for entry in maps.entries:
        rank.append(seen[entry.sample.label])
        seen[entry.sample.label] += 1
    limit = max(_MAX_NUMBERS // maps.read([0]).values.shape[1:].numel(), 2 * len(seen))
    batch = maps.read(sorted(sorted(range(len(rank)), key=lambda index: rank[index])[:limit]))
    return batch.values, batch.labels


def standardise(features: FeatureExtractor, maps: Float[Tensor, "M C H W"]) -> None:
    """Set the mean and standard deviation of the channels that the head standardises with."""
    head = wide_head(features)
    head.mean.copy_(maps.mean(dim=(0, 2, 3))[:, None, None])
    head.std.copy_(maps.std(dim=(0, 2, 3)).clamp_min(1e-6)[:, None, None])


@torch.no_grad()
def reestimate_bn(features: FeatureExtractor, maps: Float[Tensor, "M C H W"]) -> None:
    """Re-estimate batch-norm statistics on clean features: dropout has biased them, and they are frozen from now on."""
    head, maps = wide_head(features), maps[:: max(1, len(maps) // _BN_MAPS)]
    norm: Any = head.norm
    weight = head.first.weight.flatten(1)
    rows = ((maps - head.mean) / head.std).permute(0, 2, 3, 1).flatten(0, 2)
    mean = rows.mean(dim=0)
    centred = rows.sub_(mean)
    covariance = centred.T @ centred / max(len(rows) - 1, 1)
    norm.running_mean.copy_(weight @ mean)
    norm.running_var.copy_(((weight @ covariance) * weight).sum(dim=1))


@torch.no_grad()
def rescale_distances(
    features: FeatureExtractor, maps: Float[Tensor, "M C H W"], median: float, generator: torch.Generator
) -> None:
    """Centre the sigmoid's input and scale it until the median nearest distance is `median`.

    At the published initialisation it is 2.6, so that nearly everything goes left and right branches starve.
    """
    head = wide_head(features.eval())
    logits = head(maps)
    centre = logits.mean(dim=(0, 2, 3), keepdim=True)
    points = logits.flatten(2).transpose(1, 2).flatten(0, 1)
    picked = points[torch.randint(len(points), (100,), generator=generator)][:, :, None, None]
    low, high = 1e-3, 20.0
    for _ in range(25):
        gain = math.sqrt(low * high)
        z, prototypes = (torch.sigmoid(gain * (y - centre)) for y in (logits, picked))
        is_far = nearest_patches(z, prototypes, exact=False).distance.median() >= median
        low, high = (low, gain) if is_far else (gain, high)
    assert head.last.bias is not None
    head.last.weight.mul_(gain)
    head.last.bias.sub_(centre.flatten()).mul_(gain)


@torch.no_grad()
def grow_tree(
    features: FeatureExtractor, maps: Float[Tensor, "M C H W"], labels: Int[Tensor, " M"], seed: int
) -> InitialTree:
    """Grow the initial tree from the class hierarchy; also brings the head's distances to scale."""
    generator = torch.Generator().manual_seed(stable_seed("grow", seed))
    features.to("cpu")  # where the maps are; it takes seconds
    rescale_distances(features, maps[:: max(1, len(maps) // 200)], MEDIAN_DISTANCE, generator)
    z = _encode(features.eval(), maps)
    n_classes, n_patches = int(labels.max()) + 1, z.shape[2] * z.shape[3]
    n_candidates = max(_CANDIDATES, _CANDIDATES_PER_CLASS * n_classes)
    image = torch.randint(len(z), (n_candidates,), generator=generator)
    patch = torch.randint(n_patches, (n_candidates,), generator=generator)
    candidates = z.flatten(2)[image, :, patch][:, :, None, None]
    images = torch.randperm(len(z), generator=generator)[: max(_IMAGES, _IMAGES_PER_CLASS * n_classes)]
    pooled = z.amax(dim=(2, 3))
    means = torch.stack([pooled[rows].mean(dim=0) for rows in _rows_by_class(labels, n_classes)])
    grower = _TreeGrower(z, images, candidates, labels[images], labels[image])
    grower.grow(class_hierarchy(means.double().numpy()))
    topology, nodes, leaf_ids = Topology.from_children(grower.left, grower.right)
    sides = (grower.right_patch, grower.left_patch)
    chosen = torch.cat([torch.tensor(side, dtype=torch.long)[nodes] for side in sides])
    anchors = maps.flatten(2)[image[chosen], :, patch[chosen]][:, :, None, None]
    return InitialTree(topology, torch.tensor(grower.leaf_class)[leaf_ids], anchors)


def _encode(features: FeatureExtractor, maps: Float[Tensor, "M C H W"]) -> Float[Tensor, "M D H W"]:
    """Encode maps in chunks into one tensor: of many classes, they are gigabytes."""
    shape = (len(maps), features.prototype_dim, *maps.shape[2:])
    z = torch.empty(shape, dtype=maps.dtype, memory_format=torch.channels_last)
    for source, target in zip(maps.split(64), z.split(64), strict=True):
        target.copy_(features.from_map(source))
    return z


def from_existing_tree(tree: ProtoTree, sources: FeatureMaps, root: Path) -> InitialTree:
    """Start from a tree whose prototypes are patches already, and stay those patches while the head is trained."""
    index_of = {(image_name(root, entry.sample.path), entry.view.name): i for i, entry in enumerate(sources.entries)}
    anchors = []
    for number, source in enumerate(tree.sources):
        if source is None or (source.image, source.crop) not in index_of:
            origin = "is no patch of an image" if source is None else f"comes from {source.image}, {source.crop}"
            raise DataError(f"expected every prototype to be a patch of a training image, but number {number} {origin}")
        seen = sources.read([index_of[source.image, source.crop]]).values
        anchors.append(seen[0, :, *source.patch, None, None])
    leaf_class = tree.leaf_logits.argmax(dim=1)
    return InitialTree(tree.topology, leaf_class, torch.stack(anchors), tree.node_function.sharpness)


Hierarchy = int | tuple[Any, Any]
"""A class, or two groups of classes, each a hierarchy (run-time type checks cannot follow an alias into itself)."""


def class_hierarchy(means: Float[ndarray, "K D"]) -> Hierarchy:
    """Cluster the classes by Ward's method into a binary tree; the group with the lower class stands first."""

    def split(node: ClusterNode) -> Hierarchy:
        if node.is_leaf():
            return int(node.id)
        children = sorted((node.left, node.right), key=lambda child: min(child.pre_order()))
        return split(children[0]), split(children[1])

    return split(to_tree(linkage(means, "ward"))) if len(means) > 1 else 0


def _classes(part: Hierarchy) -> list[int]:
    return [part] if isinstance(part, int) else [label for half in part for label in _classes(half)]


class _TreeGrower:
    """Split groups of classes from the root down, each side by the candidate patch with the highest gain."""

    def __init__(
        self,
        z: Float[Tensor, "views D H W"],
        images: Int[Tensor, " M"],
        candidates: Float[Tensor, "candidates D 1 1"],
        labels: Int[Tensor, " M"],
        candidate_class: Int[Tensor, " candidates"],
    ) -> None:
        self._z, self._images, self._candidates = z, images, candidates
        is_small = len(images) * len(candidates) <= _MAX_PAIRS
        self._dists = self._measure(images, candidates) if is_small else None
        n_classes = int(torch.cat([labels, candidate_class]).max()) + 1
        self._rows, self._columns = (_rows_by_class(of, n_classes) for of in (labels, candidate_class))
        self._free = torch.ones(len(candidate_class), dtype=torch.bool)
        self.left, self.right, self.right_patch, self.left_patch, self.leaf_class = (list[int]() for _ in range(5))

    def grow(self, part: Hierarchy) -> int:
        """Grow a subtree; return its root, or ~leaf."""
        if isinstance(part, int):
            self.leaf_class.append(part)
            return ~(len(self.leaf_class) - 1)
        everything = _classes(part)
        (_, candidate), side = max((self._best(_classes(half), everything), i) for i, half in enumerate(part))
        self._claim(candidate, self.right_patch)
        self._claim(self._best(_classes(part[1 - side]), everything)[1], self.left_patch)
        node = len(self.left)
        for child in (self.left, self.right):
            child.append(0)
        self.left[node] = self.grow(part[1 - side])
        self.right[node] = self.grow(part[side])
        return node

    def _claim(self, candidate: int, chosen: list[int]) -> None:
        self._free[candidate] = False  # one patch, one prototype
        chosen.append(candidate)

    def _best(self, part: list[int], everything: list[int]) -> tuple[float, int]:
        """The highest information gain of a free candidate from these classes, and which it is."""
        inside = set(part)
        rows, others = _select(self._rows, part), _select(self._rows, [k for k in everything if k not in inside])
        columns = _select(self._columns, part)
        columns = columns[self._free[columns]]
        if not len(columns):
            columns = torch.nonzero(self._free)[:, 0]
        if self._dists is None:
            rows, others = rows[: _NODE_IMAGES // 2], others[: _NODE_IMAGES // 2]
            both, order = torch.cat([rows, others]).sort()
            columns = columns[:_NODE_CANDIDATES]
            dists = self._measure(self._images[both], self._candidates[columns])
        else:
            both, order = torch.cat([rows, others]).sort()
            dists = self._dists[both][:, columns]
        gain = information_gain(dists, order < len(rows))
        return float(gain.max()), int(columns[gain.argmax()])

    def _measure(self, images: Int[Tensor, " m"], candidates: Float[Tensor, "n D 1 1"]) -> Float[Tensor, "m n"]:
        return torch.cat(
            [nearest_patches(self._z[chunk], candidates, exact=False).distance for chunk in images.split(64)]
        )


def _rows_by_class(labels: Int[Tensor, " M"], n_classes: int) -> list[Int[Tensor, " _"]]:
    return list(labels.argsort(stable=True).split(labels.bincount(minlength=n_classes).tolist()))


def _select(by_class: list[Int[Tensor, " _"]], classes: list[int]) -> Int[Tensor, " _"]:
    return torch.cat([by_class[label] for label in classes]).sort().values


def information_gain(
    distance: Float[Tensor, "images candidates"], right: Bool[Tensor, " images"]
) -> Float[Tensor, " candidates"]:
    """Information gain of each candidate's split: nearer than halfway between the two sides' mean distances?"""
    is_near = distance < (distance[right].mean(dim=0) + distance[~right].mean(dim=0)) / 2
    p_right, p_near = right.float().mean(), is_near.float().mean(dim=0)
    both = (is_near & right[:, None]).float().mean(dim=0)
    if_near, if_far = both / p_near.clamp_min(1e-6), (p_right - both) / (1 - p_near).clamp_min(1e-6)
    return _entropy(p_right) - p_near * _entropy(if_near) - (1 - p_near) * _entropy(if_far)


def _entropy(p: Tensor) -> Tensor:
    p = p.clamp(1e-6, 1 - 1e-6)
    return -(p * p.log() + (1 - p) * (1 - p).log())

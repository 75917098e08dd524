"""A tree to start from, grown from the classes: who is told apart from whom, and by which training patches.

Where a node asks for one patch, groups of alike classes part from the rest one after the other, and so do the classes
within a group. Where it compares two, the classes are parted in two alike groups, each again, and so on. Each prototype
starts as the training patch that tells its own side best from the other.

Notation used for tensor shapes: C channels of the backbone's map, D prototype depth, P prototypes, L leaves, K classes,
M photos looked at.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.backbones.backbone import FeatureExtractor, WideHead
from prototree.core.model import ProtoTree
from prototree.core.nodes import NodeKind
from prototree.core.patches import rough_nearest
from prototree.core.topology import Topology
from prototree.data.dataset import name_in
from prototree.data.loading import derived_seed
from prototree.errors import DataError
from prototree.features.batches import CachedBatches
from prototree.training.class_hierarchy import Part, classes_in, halves, hierarchy
from prototree.training.memory_budget import USUAL_ROOM, Room

N_CANDIDATES, CANDIDATES_A_CLASS = 2000, 40  # random patches to choose the first prototypes from, at least
LOOKED_AT, LOOKED_AT_A_CLASS = 1200, 12  # views that the choice is based on, at least
RESTED_ON = 500  # maps, about, that batch norm's statistics are taken from
NODE_VIEWS, NODE_CANDIDATES = 400, 1000  # that a node compares where there is no room for all distances


@dataclass(frozen=True)
class Start:
    """A tree of one leaf per class, and the patch that each prototype is."""

    topology: Topology
    leaf_class: Int[Tensor, " L"]
    anchors: Float[Tensor, "P C 1 1"]  # in the backbone's map
    sharpness_start: float | None = None  # that questions begin with; None: as the recipe has it


def standardise(features: FeatureExtractor, maps: Float[Tensor, "M C H W"]) -> None:
    """Sets the channels' mean and spread."""
    head = wide_head(features)
    head.mean.copy_(maps.mean(dim=(0, 2, 3))[:, None, None])
    head.std.copy_(maps.std(dim=(0, 2, 3)).clamp_min(1e-6)[:, None, None])


@torch.no_grad()
def rest_norm(features: FeatureExtractor, maps: Float[Tensor, "M C H W"]) -> None:
    """Sets batch norm's mean and variance to those of the patches of these maps: it rests while the tree learns.

    What it remembers from the classifier is of maps with channels dropped and, after few steps, of its start.
    """
    head, maps = wide_head(features), maps[:: max(1, len(maps) // RESTED_ON)]
    norm, weight = head.norm, head.first.weight.flatten(1)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    rows = ((maps - head.mean) / head.std).permute(0, 2, 3, 1).flatten(0, 2)
    mean = rows.mean(dim=0)
    apart = rows.sub_(mean)
    covariance = apart.T @ apart / max(len(rows) - 1, 1)
    norm.running_mean.copy_(weight @ mean)
    norm.running_var.copy_(((weight @ covariance) * weight).sum(dim=1))


@torch.no_grad()
def calibrate(
    features: FeatureExtractor, maps: Float[Tensor, "M C H W"], median: float, generator: torch.Generator
) -> None:
    """Centres the sigmoid's input and scales it until the median nearest distance is `median`.

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
        is_far = rough_nearest(z, prototypes).distance.median() >= median
        low, high = (low, gain) if is_far else (gain, high)
    assert head.last.bias is not None
    head.last.weight.mul_(gain)
    head.last.bias.sub_(centre.flatten()).mul_(gain)


@torch.no_grad()
def grow(
    features: FeatureExtractor,
    maps: Float[Tensor, "M C H W"],
    labels: Int[Tensor, " M"],
    question: NodeKind,
    max_mean_depth: float,
    init_median_distance: float,
    seed: int,
    room: Room = USUAL_ROOM,
) -> Start:
    """The tree that training starts from; also brings the head's distances to scale."""
    generator = torch.Generator().manual_seed(derived_seed("grow", seed))
    features.to("cpu")  # where the maps are; it takes seconds
    calibrate(features, maps[:: max(1, len(maps) // 200)], init_median_distance, generator)
    z = _seen_by(features.eval(), maps)
    n_classes, n_patches = int(labels.max()) + 1, z.shape[2] * z.shape[3]
    n_candidates = max(N_CANDIDATES, CANDIDATES_A_CLASS * n_classes)
    photo = torch.randint(len(z), (n_candidates,), generator=generator)
    patch = torch.randint(n_patches, (n_candidates,), generator=generator)
    candidates = z.flatten(2)[photo, :, patch][:, :, None, None]
    looked_at = torch.randperm(len(z), generator=generator)[: max(LOOKED_AT, LOOKED_AT_A_CLASS * n_classes)]
    pooled = z.amax(dim=(2, 3))
    means = torch.stack([pooled[rows].mean(dim=0) for rows in _rows_by_class(labels, n_classes)])
    apart, points = _Apart(z, looked_at, candidates, room), means.double().numpy()
    planter = _Planter(apart, labels[looked_at], labels[photo], question)
    planter.grow(hierarchy(points, max_mean_depth) if question == "presence" else halves(points))
    topology, nodes, leaf_ids = Topology.from_children(planter.left, planter.right)
    sides = [torch.tensor(side)[nodes] for side in (planter.chosen_right, planter.chosen_left) if side]
    chosen = torch.cat(sides)
    anchors = maps.flatten(2)[photo[chosen], :, patch[chosen]][:, :, None, None]
    return Start(topology, torch.tensor(planter.leaf_class)[leaf_ids], anchors)


def _seen_by(features: FeatureExtractor, maps: Float[Tensor, "M C H W"]) -> Float[Tensor, "M D H W"]:
    """The feature maps, each put where it stays: of many classes, they are gigabytes."""
    shape = (len(maps), features.prototype_dim, *maps.shape[2:])
    z = torch.empty(shape, dtype=maps.dtype, memory_format=torch.channels_last)
    for some, own in zip(maps.split(64), z.split(64), strict=True):
        own.copy_(features.from_map(some))
    return z


def start_from(tree: ProtoTree, sources: CachedBatches, root: Path) -> Start:
    """A tree whose prototypes are patches already: the head is trained further, and they stay those patches.

    Only the patch of a photo that is nearest to a prototype learns from it, so the head learns to tell what is like the
    chosen patch, not what happens to be beside it.
    """
    place = {(name_in(root, entry.sample.path), entry.view.name): i for i, entry in enumerate(sources.entries)}
    anchors = []
    for number, source in enumerate(tree.sources):
        if source is None or (source.image, source.view) not in place:
            found = "is no patch of a photo" if source is None else f"comes from {source.image}, {source.view}"
            raise DataError(f"expected every prototype to be a patch of a training photo, but number {number} {found}")
        seen = sources.inputs([place[source.image, source.view]]).values
        anchors.append(seen[0, :, *source.patch, None, None])
    return Start(tree.topology, tree.leaf_logits.argmax(dim=1), torch.stack(anchors), tree.question.sharpness)


class _Apart:
    """How far views are from candidates: all known at once, or looked up a few at a time where they are too many."""

    def __init__(
        self,
        z: Float[Tensor, "views D H W"],
        views: Int[Tensor, " M"],
        candidates: Float[Tensor, "candidates D 1 1"],
        room: Room,
    ) -> None:
        self._z, self._views, self._candidates = z, views, candidates
        self._known: Tensor | None = None
        self.is_known = len(views) * len(candidates) <= room.pairs
        if self.is_known:
            self._known = self._measured(views, candidates)

    def between(self, rows: Int[Tensor, " m"], columns: Int[Tensor, " n"]) -> Float[Tensor, "m n"]:
        """Some views and some candidates."""
        if self._known is not None:
            return self._known[rows][:, columns]
        return self._measured(self._views[rows], self._candidates[columns])

    def _measured(self, views: Int[Tensor, " m"], candidates: Float[Tensor, "n D 1 1"]) -> Float[Tensor, "m n"]:
        return torch.cat([rough_nearest(self._z[some], candidates).distance for some in views.split(64)])


class _Planter:
    """Splits groups of classes one after the other, each by the candidate that tells it best from the rest."""

    def __init__(
        self,
        apart: _Apart,
        labels: Int[Tensor, " M"],
        candidate_class: Int[Tensor, " candidates"],
        question: NodeKind,
    ) -> None:
        self._is_choice, self._apart = question == "pairwise", apart
        n_classes = int(torch.cat([labels, candidate_class]).max()) + 1
        self._rows, self._candidates = (_rows_by_class(some, n_classes) for some in (labels, candidate_class))
        self._free = torch.ones(len(candidate_class), dtype=torch.bool)
        self.left: list[int] = []
        self.right: list[int] = []
        self.chosen_right: list[int] = []
        self.chosen_left: list[int] = []
        self.leaf_class: list[int] = []

    def grow(self, part: Part) -> int:
        """A subtree for this part; returns its root, or ~leaf."""
        if isinstance(part, int):
            self.leaf_class.append(part)
            return ~(len(self.leaf_class) - 1)
        if len(part) == 1:
            return self.grow(part[0])
        (_, candidate), place = max((self._best(classes_in(one), classes_in(part)), i) for i, one in enumerate(part))
        rest = part[:place] + part[place + 1 :]
        self._take(candidate, self.chosen_right)
        if self._is_choice:
            self._take(self._best(classes_in(rest), classes_in(part))[1], self.chosen_left)
        node = len(self.left)
        self.left.append(0)
        self.right.append(0)
        self.left[node] = self.grow(rest)
        self.right[node] = self.grow(part[place])
        return node

    def _take(self, candidate: int, chosen: list[int]) -> None:
        """One patch, one prototype."""
        self._free[candidate] = False
        chosen.append(candidate)

    def _best(self, part: list[int], among: list[int]) -> tuple[float, int]:
        inside = set(part)
        own, others = _of(self._rows, part), _of(self._rows, [label for label in among if label not in inside])
        columns = _of(self._candidates, part)
        columns = columns[self._free[columns]]
        if not len(columns):
            columns = torch.nonzero(self._free)[:, 0]
        if not self._apart.is_known:
            own, others = own[: NODE_VIEWS // 2], others[: NODE_VIEWS // 2]
            columns = columns[:NODE_CANDIDATES]
        rows, order = torch.cat([own, others]).sort()
        gain = information_gain(self._apart.between(rows, columns), order < len(own))
        return float(gain.max()), int(columns[gain.argmax()])


def _rows_by_class(labels: Int[Tensor, " M"], n_classes: int) -> list[Int[Tensor, " _"]]:
    """Where each class is, in order."""
    return list(labels.argsort(stable=True).split(labels.bincount(minlength=n_classes).tolist()))


def _of(by_class: list[Int[Tensor, " _"]], classes: list[int]) -> Int[Tensor, " _"]:
    return torch.cat([by_class[label] for label in classes]).sort().values


def information_gain(
    distance: Float[Tensor, "photos candidates"], right: Bool[Tensor, " photos"]
) -> Float[Tensor, " candidates"]:
    """Of each candidate's question: nearer than halfway between the two sides' means?"""
    said = distance < (distance[right].mean(dim=0) + distance[~right].mean(dim=0)) / 2
    p_right, p_said = right.float().mean(), said.float().mean(dim=0)
    both = (said & right[:, None]).float().mean(dim=0)
    if_yes, if_no = both / p_said.clamp_min(1e-6), (p_right - both) / (1 - p_said).clamp_min(1e-6)
    return _entropy(p_right) - p_said * _entropy(if_yes) - (1 - p_said) * _entropy(if_no)


def sample_maps(sources: CachedBatches, room: Room = USUAL_ROOM) -> tuple[Float[Tensor, "M C H W"], Int[Tensor, " M"]]:
    """Backbone maps and labels of all photos, or of as many of each class as there is room for."""
    seen: Counter[int] = Counter()
    turn = []  # how many of its class come before it
    for entry in sources.entries:
        turn.append(seen[entry.sample.label])
        seen[entry.sample.label] += 1
    most = max(room.maps // sources.inputs([0]).values.shape[1:].numel(), 2 * len(seen))
    inputs = sources.inputs(sorted(sorted(range(len(turn)), key=lambda place: turn[place])[:most]))
    return inputs.values, inputs.labels


def wide_head(features: FeatureExtractor) -> WideHead:
    """The head that this recipe needs."""
    assert isinstance(features.head, WideHead)
    return features.head


def _entropy(p: Tensor) -> Tensor:
    p = p.clamp(1e-6, 1 - 1e-6)
    return -(p * p.log() + (1 - p) * (1 - p).log())

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
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from prototree.data.loading import derived_seed
from prototree.data.samples import name_in
from prototree.errors import DataError
from prototree.network.backbone import FeatureExtractor, WideHead
from prototree.training.batches import CachedBatches
from prototree.tree.model import ProtoTree
from prototree.tree.patches import nearest_patches
from prototree.tree.questions import QuestionKind
from prototree.tree.topology import Topology

N_CANDIDATES, CANDIDATES_A_CLASS = 2000, 40  # random patches to choose the first prototypes from, at least
LOOKED_AT, LOOKED_AT_A_CLASS = 1200, 12  # views that the choice is judged by, at least
MAX_NUMBERS = 2e8  # of feature maps held in memory while choosing

Part = int | list[Any]
"""A class, or a group of parts."""


@dataclass(frozen=True)
class Start:
    """A tree of one leaf per class, and the patch that each prototype is."""

    topology: Topology
    leaf_class: Int[Tensor, " L"]
    anchors: Float[Tensor, "P C 1 1"]  # in the backbone's map
    first_sharpness: float | None = None  # that questions begin with; None: as the recipe has it


def standardise(features: FeatureExtractor, maps: Float[Tensor, "M C H W"]) -> None:
    """Sets the channels' mean and spread."""
    head = wide_head(features)
    head.mean.copy_(maps.mean(dim=(0, 2, 3))[:, None, None])
    head.std.copy_(maps.std(dim=(0, 2, 3)).clamp_min(1e-6)[:, None, None])


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
        is_far = nearest_patches(z, prototypes).distance.median() >= median
        low, high = (low, gain) if is_far else (gain, high)
    assert head.last.bias is not None
    head.last.weight.mul_(gain)
    head.last.bias.sub_(centre.flatten()).mul_(gain)


@torch.no_grad()
def grow(
    features: FeatureExtractor,
    maps: Float[Tensor, "M C H W"],
    labels: Int[Tensor, " M"],
    question: QuestionKind,
    mean_path: float,
    median_distance: float,
    seed: int,
) -> Start:
    """The tree that training starts from; also brings the head's distances to scale."""
    generator = torch.Generator().manual_seed(derived_seed("grow", seed))
    features.to("cpu")  # where the maps are; it takes seconds
    calibrate(features, maps[:: max(1, len(maps) // 200)], median_distance, generator)
    z = torch.cat([features.eval().from_map(part) for part in maps.split(64)])
    n_classes, n_patches = int(labels.max()) + 1, z.shape[2] * z.shape[3]
    n_candidates = max(N_CANDIDATES, CANDIDATES_A_CLASS * n_classes)
    photo = torch.randint(len(z), (n_candidates,), generator=generator)
    patch = torch.randint(n_patches, (n_candidates,), generator=generator)
    candidates = z.flatten(2)[photo, :, patch][:, :, None, None]
    looked_at = torch.randperm(len(z), generator=generator)[: max(LOOKED_AT, LOOKED_AT_A_CLASS * n_classes)]
    distance = torch.cat([nearest_patches(z[some], candidates).distance for some in looked_at.split(64)])
    pooled = z.amax(dim=(2, 3))
    means = torch.stack([pooled[labels == k].mean(dim=0) for k in range(n_classes)])
    planter, points = _Planter(distance, labels[looked_at], labels[photo], question), means.double().numpy()
    planter.grow(hierarchy(points, mean_path) if question == "presence" else halves(points, list(range(n_classes))))
    topology, nodes, leaf_ids = Topology.from_children(planter.left, planter.right)
    sides = [torch.tensor(side)[nodes] for side in (planter.chosen_right, planter.chosen_left) if side]
    chosen = torch.cat(sides)
    anchors = maps.flatten(2)[photo[chosen], :, patch[chosen]][:, :, None, None]
    return Start(topology, torch.tensor(planter.leaf_class)[leaf_ids], anchors)


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


def hierarchy(means: Float[ndarray, "K D"], longest: float) -> Part:
    """Groups of alike classes, and groups of groups where else the way to a class would be long.

    As few levels as a mean path of `longest` allows: a prototype then stands for few classes that are alike.
    """
    everything = list(range(len(means)))
    levels = 2
    while (found := _nest(means, everything, levels)) and mean_path(found) > longest and 2**levels < len(means):
        levels += 1
    return found


def halves(means: Float[ndarray, "K D"], classes: list[int]) -> Part:
    """Two groups of alike classes, and each again, down to single ones."""
    if len(classes) == 1:
        return classes[0]
    return [halves(means, [classes[place] for place in group]) for group in ward_groups(means[classes], 2)]


def mean_path(part: Part) -> float:
    """Decisions to a class on average, if the parts of a part leave it one by one in any order."""
    return sum(_depths(part)) / len(_depths(part))


def _nest(means: Float[ndarray, "K D"], classes: list[int], levels: int) -> Part:
    if levels == 1 or len(classes) <= 2:
        return list(classes)
    groups = ward_groups(means[classes], round(1.4 * len(classes) ** (1 / levels)))
    return [_nest(means, [classes[place] for place in group], levels - 1) for group in groups]


def _depths(part: Part) -> list[float]:
    if isinstance(part, int):
        return [0.0]
    # The i-th to leave has met i nodes, the last two one and the same.
    own = (len(part) + 1) / 2 - 1 / len(part)
    return [own + depth for one in part for depth in _depths(one)]


def _classes(part: Part) -> list[int]:
    return [part] if isinstance(part, int) else [label for one in part for label in _classes(one)]


class _Planter:
    """Splits groups of classes one after the other, each by the candidate that tells it best from the rest."""

    def __init__(
        self,
        distance: Float[Tensor, "M candidates"],
        labels: Int[Tensor, " M"],
        candidate_class: Int[Tensor, " candidates"],
        question: QuestionKind,
    ) -> None:
        self._is_choice = question == "choice"
        self._distance, self._labels, self._candidate_class = distance, labels, candidate_class
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
        (_, candidate), place = max((self._best(_classes(one), _classes(part)), i) for i, one in enumerate(part))
        rest = part[:place] + part[place + 1 :]
        self._take(candidate, self.chosen_right)
        if self._is_choice:
            self._take(self._best(_classes(rest), _classes(part))[1], self.chosen_left)
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
        rows = torch.isin(self._labels, torch.tensor(among))
        own = torch.isin(self._candidate_class, torch.tensor(part))
        columns = torch.nonzero(self._free & own if (self._free & own).any() else self._free)[:, 0]
        gain = information_gain(self._distance[rows][:, columns], torch.isin(self._labels[rows], torch.tensor(part)))
        return float(gain.max()), int(columns[gain.argmax()])


def information_gain(
    distance: Float[Tensor, "photos candidates"], right: Bool[Tensor, " photos"]
) -> Float[Tensor, " candidates"]:
    """Of each candidate's question: nearer than halfway between the two sides' means?"""
    said = distance < (distance[right].mean(dim=0) + distance[~right].mean(dim=0)) / 2
    p_right, p_said = right.float().mean(), said.float().mean(dim=0)
    both = (said & right[:, None]).float().mean(dim=0)
    if_yes, if_no = both / p_said.clamp_min(1e-6), (p_right - both) / (1 - p_said).clamp_min(1e-6)
    return _entropy(p_right) - p_said * _entropy(if_yes) - (1 - p_said) * _entropy(if_no)


def sample_maps(sources: CachedBatches) -> tuple[Float[Tensor, "M C H W"], Int[Tensor, " M"]]:
    """Backbone maps and labels of all photos, or of as many of each class as memory is spent on."""
    seen: Counter[int] = Counter()
    turn = []  # how many of its class come before it
    for entry in sources.entries:
        turn.append(seen[entry.sample.label])
        seen[entry.sample.label] += 1
    most = max(int(MAX_NUMBERS / sources.inputs([0]).values.shape[1:].numel()), 2 * len(seen))
    inputs = sources.inputs(sorted(sorted(range(len(turn)), key=lambda place: turn[place])[:most]))
    return inputs.values, inputs.labels


def wide_head(features: FeatureExtractor) -> WideHead:
    """The head that this recipe needs."""
    assert isinstance(features.head, WideHead)
    return features.head


def _entropy(p: Tensor) -> Tensor:
    p = p.clamp(1e-6, 1 - 1e-6)
    return -(p * p.log() + (1 - p) * (1 - p).log())


def ward_groups(points: Float[ndarray, "K D"], n_groups: int) -> list[list[int]]:
    """Merges the two clusters whose union raises the variance least, until `n_groups` are left."""
    members = [[k] for k in range(len(points))]
    centres, sizes = points.astype(np.float64).copy(), np.ones(len(points))
    cost = _costs(centres, sizes)
    while len(members) > max(n_groups, 1):
        first, second = sorted(map(int, np.unravel_index(cost.argmin(), cost.shape)))
        total = sizes[first] + sizes[second]
        centres[first] = (sizes[first] * centres[first] + sizes[second] * centres[second]) / total
        sizes[first] = total
        members[first] += members.pop(second)
        centres, sizes = np.delete(centres, second, axis=0), np.delete(sizes, second)
        cost = np.delete(np.delete(cost, second, axis=0), second, axis=1)
        cost[first] = cost[:, first] = _costs_of(first, centres, sizes)
    return [sorted(group) for group in members]


def _costs(centres: Float[ndarray, "n D"], sizes: Float[ndarray, " n"]) -> Float[ndarray, "n n"]:
    return np.stack([_costs_of(i, centres, sizes) for i in range(len(centres))])


def _costs_of(one: int, centres: Float[ndarray, "n D"], sizes: Float[ndarray, " n"]) -> Float[ndarray, " n"]:
    cost = sizes * sizes[one] / (sizes + sizes[one]) * np.square(centres - centres[one]).sum(axis=1)
    cost[one] = np.inf
    return np.asarray(cost)

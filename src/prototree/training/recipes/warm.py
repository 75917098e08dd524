"""A start and a training for frozen features, small data and no GPU: the recipe `warm`.

The model is the paper's; how it gets there is not. (1) The head learns as a plain max-pooled classifier, which is
also the teacher. (2) The tree starts with one leaf a class: groups of alike classes leave a spine of left turns one by
one, and so do the classes within a group; each prototype starts as the training patch that tells best who leaves.
(3) While the head learns from the teacher's softened probabilities, every prototype *is* its source patch, seen through
the head as it is at that step, so that projection at the end moves nothing. (4) Beside the soft targets, every decision
on the way to a photo's own class is asked to fall on its side of one half, by a margin and no further.

Notation used for tensor shapes: B batch, C channels of the backbone's map, D prototype depth, P patches, N nodes,
L leaves, K classes, M photos looked at.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, one_hot, relu

from prototree.data.samples import name_in
from prototree.errors import DataError
from prototree.network.backbone import FeatureExtractor, WideHead
from prototree.training.batches import Batches, CachedBatches, Inputs, maps_of
from prototree.training.clustering import ward_groups
from prototree.training.engine import Group, Objective
from prototree.training.leaf_training import Visit
from prototree.training.objectives import LABEL_SMOOTHING, Cosine, Schedule, SoftTargets, TreeObjective
from prototree.training.projection import Nearest, find_nearest, reachable_classes
from prototree.tree.model import ProtoTree
from prototree.tree.patches import nearest_patches
from prototree.tree.topology import Topology

HEAD_VIEWS, TREE_VIEWS = 38_000, 90_000  # to see where the settings leave the number of epochs open
EPOCHS = (6, 200)  # but large data at least and small data at most so often
PATCH_SHARE, FEWEST_PATCHES = 0.75, 60  # of a map that a step sees: cheaper, yet a small part is seldom missed
HEAD_RATE, HEAD_DECAY = 2e-3, 0.05
CUTMIX_SHARE = 0.5
CHANNEL_DROPOUT, POOLED_DROPOUT = 0.1, 0.2  # while the head learns as a classifier; the tree trains without
LOGIT_GAIN = 4.0  # pooled values lie in [0, 1]; without it the classifier's logits grow slowly
MEDIAN_DISTANCE = 0.7  # of a random patch to the nearest patch of another photo when the tree starts
N_CANDIDATES, CANDIDATES_A_CLASS = 1500, 30  # random patches to choose the first prototypes from, at least
MEAN_PATH = 9.0  # decisions on the way to a leaf that the hierarchy may take on average
MARGIN_WEIGHT = 0.1
NEAR, FAR = 0.5, 1.0  # distances asked for at right and left turns to the own class; a similarity of ½ is at 0.69
MEDOID_EPOCHS = (0.1, 0.2)  # shares of the training after which sources move to the middle of what they stand for
SHARE_ON = 0.25  # of the training's length, where a tree is given that learns on
MAX_NUMBERS = 2e8  # of feature maps held in memory while choosing


Part = int | list[Any]
"""A class, or a group of parts."""


class HeadObjective(Objective):
    """The head as a plain classifier: patches, max-pooled, and a linear layer."""

    def __init__(self, features: FeatureExtractor, n_classes: int, epochs: int, n_batches: int) -> None:
        super().__init__()
        self.features = features
        self.linear = nn.Linear(features.depth, n_classes)
        self._pace = Cosine(epochs, n_batches)
        self._mixed: tuple[Tensor, Tensor] | None = None

    def groups(self, epoch: int) -> list[Group]:
        return [Group([*self.features.head.parameters(), *self.linear.parameters()], HEAD_RATE, HEAD_DECAY)]

    def pace(self, epoch: int, share: float) -> float:
        return self._pace.at(epoch + share)

    def start_epoch(self, epoch: int, *, is_continued: bool) -> None:
        self.features.backbone.freeze(True)
        self.train()
        wide_head(self.features).dropout = CHANNEL_DROPOUT

    def forward(self, values: Tensor) -> Float[Tensor, "B K"]:
        x = some_patches(self.features.backbone.tail(values)) if self.training else self.features.backbone.tail(values)
        self._mixed = None
        if self.training and torch.rand(()) < CUTMIX_SHARE:
            x, *mixed = cutmix(x)
            self._mixed = (mixed[0], mixed[1])
        pooled = self.features.from_map(x).amax(dim=(2, 3))
        return self.linear(LOGIT_GAIN * dropout(pooled, POOLED_DROPOUT, self.training))  # type: ignore[no-any-return]

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


@dataclass(frozen=True)
class Start:
    """A tree of one leaf a class, and the patch that each prototype is."""

    topology: Topology
    leaf_class: Int[Tensor, " L"]
    anchors: Float[Tensor, "N C 1 1"]  # in the backbone's map
    is_given: bool = False  # whether the patches are to stay as someone chose them


class AnchoredObjective(TreeObjective):
    """Algorithm 1 with prototypes that are, at every step, the latent patches of their sources."""

    anchors: Float[Tensor, "N C 1 1"]

    def __init__(
        self,
        tree: ProtoTree,
        batches: Batches,
        schedule: Schedule,
        targets: SoftTargets,
        start: Start,
        sources: CachedBatches,
    ) -> None:
        super().__init__(tree, batches, schedule, targets=targets)
        tree.prototypes.requires_grad_(False)
        tree.leaf_logits.requires_grad_(False)
        tree.leaf_logits.copy_(one_hot(start.leaf_class, tree.n_classes) * (len(batches.entries) / tree.n_classes))
        self.register_buffer("anchors", start.anchors)
        self._moves = () if start.is_given else MEDOID_EPOCHS
        self._sources = sources
        self._turns = Turns.of(tree)
        self._pace = Cosine(schedule.epochs, batches.n_batches)

    def groups(self, epoch: int) -> list[Group]:
        return [Group(list(self.tree.features.head.parameters()), self._schedule.lr_tail, self._schedule.weight_decay)]

    def pace(self, epoch: int, share: float) -> float:
        return self._pace.at(epoch + share)

    def start_epoch(self, epoch: int, *, is_continued: bool) -> None:
        super().start_epoch(epoch, is_continued=is_continued)
        wide_head(self.tree.features).dropout = 0.0

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.tree.features
        x, anchors = some_patches(features.backbone.tail(values)), self.anchors
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
        return losses + MARGIN_WEIGHT * self._turns.misses(outputs[0], inputs.labels), hits

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
        self.settle()
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
    def settle(self) -> None:
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

    def misses(self, distance: Float[Tensor, "B N"], labels: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """How far each photo's decisions are from `NEAR` or `FAR`, summed; nothing for those that are there.

        The soft targets alone leave similarities at the share of photos that turn right, far below one half.
        """
        right, left = (side.to(distance.device)[labels] for side in (self.right, self.left))
        return (right * relu(distance - NEAR) + left * relu(FAR - distance)).sum(dim=1)


def first_of_each(nearest: Nearest) -> Bool[Tensor, " N"]:
    """Of the prototypes that would have the same patch, the nearest alone: one picture twice says nothing new."""
    taken: set[tuple[int, int]] = set()
    first = torch.zeros(len(nearest.distance), dtype=torch.bool)
    for node in nearest.distance.argsort(stable=True).tolist():
        patch = (int(nearest.place[node]), int(nearest.patch[node]))
        first[node] = patch not in taken
        taken.add(patch)
    return first


def standardise(features: FeatureExtractor, maps: Float[Tensor, "M C H W"]) -> None:
    """Sets the channels' mean and spread."""
    head = wide_head(features)
    head.mean.copy_(maps.mean(dim=(0, 2, 3))[:, None, None])
    head.std.copy_(maps.std(dim=(0, 2, 3)).clamp_min(1e-6)[:, None, None])


@torch.no_grad()
def calibrate(features: FeatureExtractor, maps: Float[Tensor, "M C H W"], generator: torch.Generator) -> None:
    """Centres the sigmoid's input and scales it until the median nearest distance is `MEDIAN_DISTANCE`.

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
        is_far = nearest_patches(z, prototypes).distance.median() >= MEDIAN_DISTANCE
        low, high = (low, gain) if is_far else (gain, high)
    assert head.last.bias is not None
    head.last.weight.mul_(gain)
    head.last.bias.sub_(centre.flatten()).mul_(gain)


@torch.no_grad()
def grow(
    features: FeatureExtractor, maps: Float[Tensor, "M C H W"], labels: Int[Tensor, " M"], generator: torch.Generator
) -> Start:
    """The tree that training starts from."""
    z = torch.cat([features.eval().from_map(part) for part in maps.split(64)])
    n_classes, n_patches = int(labels.max()) + 1, z.shape[2] * z.shape[3]
    n_candidates = max(N_CANDIDATES, CANDIDATES_A_CLASS * n_classes)
    photo = torch.randint(len(z), (n_candidates,), generator=generator)
    patch = torch.randint(n_patches, (n_candidates,), generator=generator)
    candidates = z.flatten(2)[photo, :, patch][:, :, None, None]
    distance = torch.cat([nearest_patches(part, candidates).distance for part in z.split(64)])
    pooled = z.amax(dim=(2, 3))
    means = torch.stack([pooled[labels == k].mean(dim=0) for k in range(n_classes)])
    planter = _Planter(distance, labels, labels[photo])
    planter.grow(hierarchy(means.double().numpy()))
    topology, nodes, leaf_ids = Topology.from_children(planter.left, planter.right)
    chosen = torch.tensor(planter.chosen)[nodes]
    anchors = maps.flatten(2)[photo[chosen], :, patch[chosen]][:, :, None, None]
    return Start(topology, torch.tensor(planter.leaf_class)[leaf_ids], anchors)


def given(tree: ProtoTree, sources: CachedBatches, root: Path) -> Start:
    """A tree whose prototypes are patches already: the head learns on, and they stay those patches.

    Only the patch of a photo that is nearest to a prototype learns from it, so the head learns to tell what is like the
    chosen patch, not what happens to be beside it.
    """
    place = {(name_in(root, entry.sample.path), entry.view.name): i for i, entry in enumerate(sources.entries)}
    anchors = []
    for node, source in enumerate(tree.sources):
        if source is None or (source.image, source.view) not in place:
            found = "is no patch of a photo" if source is None else f"comes from {source.image}, {source.view}"
            raise DataError(f"expected every prototype to be a patch of a training photo, but number {node} {found}")
        seen = sources.inputs([place[source.image, source.view]]).values
        anchors.append(seen[0, :, *source.patch, None, None])
    return Start(tree.topology, tree.leaf_logits.argmax(dim=1), torch.stack(anchors), is_given=True)


def hierarchy(means: Float[ndarray, "K D"]) -> Part:
    """Groups of alike classes, and groups of groups where else the way to a class would be long.

    As few levels as `MEAN_PATH` allows: a prototype then stands for few classes that are alike.
    """
    everything = list(range(len(means)))
    levels = 2
    while (found := _nest(means, everything, levels)) and mean_path(found) > MEAN_PATH and 2**levels < len(means):
        levels += 1
    return found


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
    ) -> None:
        self._distance, self._labels, self._candidate_class = distance, labels, candidate_class
        self._free = torch.ones(len(candidate_class), dtype=torch.bool)
        self.left: list[int] = []
        self.right: list[int] = []
        self.chosen: list[int] = []
        self.leaf_class: list[int] = []

    def grow(self, part: Part) -> int:
        """A subtree for this part; returns its root, or ~leaf."""
        if isinstance(part, int):
            self.leaf_class.append(part)
            return ~(len(self.leaf_class) - 1)
        if len(part) == 1:
            return self.grow(part[0])
        (_, candidate), place = max((self._best(_classes(one), _classes(part)), i) for i, one in enumerate(part))
        self._free[candidate] = False
        node = len(self.left)
        self.chosen.append(candidate)
        self.left.append(0)
        self.right.append(0)
        self.left[node] = self.grow(part[:place] + part[place + 1 :])
        self.right[node] = self.grow(part[place])
        return node

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


def classes_right(tree: ProtoTree) -> Bool[Tensor, "N K"]:
    """The majority classes of the leaves to the right of each node."""
    right = torch.zeros(tree.topology.n_nodes, tree.n_classes, dtype=torch.bool)
    majority = tree.leaf_logits.argmax(dim=1).tolist()
    for leaf, (path, turns) in enumerate(zip(tree.topology.paths, tree.topology.goes_right, strict=True)):
        right[path[turns], majority[leaf]] = True
    return right


def some_maps(sources: CachedBatches) -> tuple[Float[Tensor, "M C H W"], Int[Tensor, " M"]]:
    """Backbone maps and labels of all photos, or of as many of each class as memory is spent on."""
    seen: Counter[int] = Counter()
    turn = []  # how many of its class come before it
    for entry in sources.entries:
        turn.append(seen[entry.sample.label])
        seen[entry.sample.label] += 1
    most = max(int(MAX_NUMBERS / sources.inputs([0]).values.numel()), 2 * len(seen))
    inputs = sources.inputs(sorted(sorted(range(len(turn)), key=lambda place: turn[place])[:most]))
    return inputs.values, inputs.labels


def some_patches(x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C 1 P"]:
    """The same random patches of every map of a batch."""
    n_patches = x.shape[2] * x.shape[3]
    order = torch.randperm(n_patches, device=x.device)
    return x.flatten(2)[:, :, order[: max(FEWEST_PATCHES, math.ceil(PATCH_SHARE * n_patches))]][:, :, None]


def cutmix(x: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B C H W"], Int[Tensor, " B"], Float[Tensor, "B 1"]]:
    """Random patches replaced by those of another photo; returns the partner and the share of one's own."""
    partner = torch.randperm(len(x), device=x.device)
    keep = torch.rand(len(x), 1, *x.shape[2:], device=x.device) < torch.rand(len(x), 1, 1, 1, device=x.device)
    return torch.where(keep, x, x[partner]), partner, keep.float().mean(dim=(2, 3))


def head_epochs(n_entries: int) -> int:
    """How often the head as a classifier sees everything."""
    return _epochs(HEAD_VIEWS, n_entries)


def tree_epochs(n_entries: int, share: float = 1.0) -> int:
    """How often the tree sees everything, or for a share of that."""
    return max(1, round(share * _epochs(TREE_VIEWS, n_entries)))


def wide_head(features: FeatureExtractor) -> WideHead:
    """The head that this recipe needs."""
    assert isinstance(features.head, WideHead)
    return features.head


def _epochs(n_views: int, n_entries: int) -> int:
    return min(max(round(n_views / n_entries), EPOCHS[0]), EPOCHS[1])


def _entropy(p: Tensor) -> Tensor:
    p = p.clamp(1e-6, 1 - 1e-6)
    return -(p * p.log() + (1 - p) * (1 - p).log())

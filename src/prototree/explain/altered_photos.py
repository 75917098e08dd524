"""What a node decides when a photo is altered: with the box hidden that is shown for it, with random boxes of the same
size hidden, and with noise all over.

Notation used for tensor shapes: B pairs of a photo and a prototype, h w pixels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from prototree.backbones.geometry import Box
from prototree.core.localization import peak_box
from prototree.core.model import ProtoTree
from prototree.core.nodes import LN2
from prototree.data import Part
from prototree.data.loading import ViewDataset, derived_seed
from prototree.evaluation.parts import BOX_SHARE, HidingShare, parts_inside
from prototree.explain.attribution import (
    RANDOM_BOXES,
    Features,
    Probes,
    attribute,
    hidden,
    patch_distances,
    random_boxes,
)
from prototree.explain.localization import grids_of, peaks, smallest_box
from prototree.explain.prototypes import Progress

TICKS = 20  # what a pair costs, in photos
NOISE = 0.2  # standard deviation, in normalised pixels
_PAIRS_AT_ONCE = 16
_BATCH = 32


@dataclass(frozen=True)
class Pair:
    """A photo, by its place in the data, that goes to a prototype's side, and its nearest patch."""

    photo: int
    prototype: int
    patch: int
    peak: tuple[float, float]  # row and column, between the patches


@dataclass(frozen=True)
class Outcome:
    """What became of a prototype's photos."""

    stability: float | None = None  # share of the photos in which noise leaves the same parts in the box
    hiding: dict[str, HidingShare] = field(default_factory=dict)


@dataclass(frozen=True)
class _Answer:
    """What a node says of one image, seen from the prototype of a pair."""

    distance: float  # in units of the reach
    away: bool  # to the other side
    within: bool  # some prototype of the node is within reach
    peak: tuple[float, float]

    @property
    def lost(self) -> bool:
        """Whether the node no longer says that this prototype is there."""
        return self.away or not self.within


@dataclass(frozen=True)
class _Result:
    """One pair's outcome: before, and for each method with the box hidden, then with random boxes hidden."""

    prototype: int
    is_stable: bool
    before: _Answer
    after: dict[str, list[_Answer]]


@torch.no_grad()
def alter_pairs(
    tree: ProtoTree,
    network: Features,
    dataset: ViewDataset,
    pairs: Sequence[Pair],
    parts: Sequence[tuple[Part, ...]],
    *,
    attribution: Features | None,
    progress: Progress,
) -> list[Outcome]:
    """For each prototype of the tree what hiding and noise do to its photos. `parts` are in pixels of the input.

    `attribution` is a network that knows gradients, where boxes of attribution are to be hidden too.
    """
    results: list[_Result] = []
    ordered = sorted(pairs, key=lambda pair: pair.photo)
    for first in range(0, len(ordered), _PAIRS_AT_ONCE):
        some = ordered[first : first + _PAIRS_AT_ONCE]
        photos = {photo: dataset[photo].image for photo in {pair.photo for pair in some}}
        images = torch.stack([photos[pair.photo] for pair in some]).to(tree.prototypes.device)
        results += _Trial(tree, network, some, images).results(parts, attribution)
        progress.add(TICKS * len(some))
    by_prototype = {
        number: list(own)
        for number, own in groupby(sorted(results, key=lambda one: one.prototype), key=lambda one: one.prototype)
    }
    return [_tested(by_prototype.get(number, []), has_parts=any(parts)) for number in range(tree.n_prototypes)]


class _Trial:
    """A few pairs, all their altered photos together."""

    def __init__(
        self, tree: ProtoTree, network: Features, pairs: Sequence[Pair], images: Float[Tensor, "B 3 h w"]
    ) -> None:
        self._tree, self._network, self._pairs, self._images = tree, network, pairs, images
        seed = derived_seed("altered photos", *(n for pair in pairs for n in (pair.photo, pair.prototype)))
        self._generator = torch.Generator().manual_seed(seed)
        self._prototypes = torch.tensor([pair.prototype for pair in pairs])

    def results(self, parts: Sequence[tuple[Part, ...]], attribution: Features | None) -> list[_Result]:
        grid, every = self._tree.grid, range(len(self._pairs))
        before = self._asked(self._images, every)
        boxes: dict[str, list[Box]] = {
            "peak": [peak_box(grid, *pair.peak) for pair in self._pairs],
            "cell": [grid.box(*grid.place(pair.patch)) for pair in self._pairs],
        }
        if attribution is not None:
            boxes["attribution"] = self._attributed(attribution)
        after = {method: list(self._hidden(own)) for method, own in boxes.items()}
        noise = torch.randn(self._images.shape, generator=self._generator).to(self._images)
        moved = self._asked(self._images + NOISE * noise, every)
        found = []
        for i, pair in enumerate(self._pairs):
            old, new = (
                parts_inside(parts[pair.photo], grid.box(*peak).square(BOX_SHARE * grid.side))
                for peak in (pair.peak, moved[i].peak)
            )
            own = {method: rows[i] for method, rows in after.items()}
            found.append(_Result(pair.prototype, old == new, before[i], own))
        return found

    def _hidden(self, boxes: Sequence[Box]) -> Iterator[list[_Answer]]:
        """For each pair what happens when its box is hidden, and then random ones of its size."""
        side, each = self._images.shape[-1], 1 + RANDOM_BOXES
        hide = [one for box in boxes for one in (box, *random_boxes(box, side, RANDOM_BOXES, self._generator))]
        rows = [i for i in range(len(boxes)) for _ in range(each)]
        found = self._asked(hidden(self._images[rows], hide), rows)
        for i in range(0, len(rows), each):
            yield found[i : i + each]

    def _asked(self, images: Float[Tensor, "B 3 h w"], rows: Sequence[int]) -> list[_Answer]:
        """Images through the tree, each with the prototype of one of the pairs."""
        tree, found = self._tree, list[_Answer]()
        numbers = self._prototypes[list(rows)].to(images.device)
        for some, own in zip(images.split(_BATCH), numbers.split(_BATCH), strict=True):
            feature_map = self._network(some)
            routed, each = tree.route(feature_map), torch.arange(len(some), device=images.device)
            node, is_right = own % tree.topology.n_nodes, own < tree.topology.n_nodes
            apart = patch_distances(feature_map, tree.prototypes[own]).view(len(some), *tree.grid.shape)
            distance = routed.distance / (LN2 * tree.reach)
            away = (routed.p_right[each, node] > 0.5) != is_right
            within = (distance.unflatten(1, (-1, tree.topology.n_nodes)) <= 1).any(dim=1)[each, node]
            middles = peaks(tree, apart, routed.patch[each, own], own)
            columns = (distance[each, own].tolist(), away.tolist(), within.tolist(), middles.tolist())
            found += [_Answer(d, a, w, (row, column)) for d, a, w, (row, column) in zip(*columns, strict=True)]
        return found

    def _attributed(self, network: Features) -> list[Box]:
        """The boxes that hold half of what brings the patch near to its prototype."""
        patch = torch.tensor([pair.patch for pair in self._pairs], device=self._images.device)
        probes = Probes.of(self._tree, self._images, self._prototypes.tolist(), patch)
        with torch.enable_grad():
            grids = grids_of(attribute(network, probes, self._generator))
        return [smallest_box(grid, self._tree.preprocessing) for grid in grids]


def _tested(results: Sequence[_Result], *, has_parts: bool) -> Outcome:
    if not results:
        return Outcome()
    n_photos = len(results)

    def hiding(method: str) -> HidingShare:
        boxes = [one.after[method][0] for one in results]
        chance = [answer for one in results for answer in one.after[method][1:]]
        within = [one.after[method] for one in results if not one.before.lost]
        return HidingShare(
            n_photos,
            flip_rate=_mean([one.away for one in boxes]),
            random_flip_rate=_mean([one.away for one in chance]),
            distance=_mean([one.before.distance for one in results]),
            distance_hidden=_mean([one.distance for one in boxes]),
            random_distance_hidden=_mean([one.distance for one in chance]),
            n_in_radius=len(within),
            lost=_mean([own[0].lost for own in within]) if within else None,
            random_loss_rate=_mean([one.lost for own in within for one in own[1:]]) if within else None,
        )

    stability = sum(one.is_stable for one in results) / n_photos if has_parts else None
    return Outcome(stability, {method: hiding(method) for method in results[0].after})


def _mean(values: Sequence[float | bool]) -> float:
    return sum(values) / len(values)

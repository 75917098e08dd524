"""Whether prototypes mean what they show: where their patches lie on the object, and what hiding them does.

One pass over the training and one over the test photos, each shown whole, says which photos come nearest to a prototype
and which go to its side on their greedy path. A sample of these is then altered (`explain.altered_photos`).

Notation used for tensor shapes: M photos, P prototypes.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.backbones.geometry import Box
from prototree.backbones.inference import frozen_features
from prototree.core.model import ProtoTree
from prototree.core.patches import distance_map
from prototree.data import ImageData, Part, Sample
from prototree.data.loading import ViewDataset, derived_seed
from prototree.data.views import FULL, evaluation_views, from_photo, parts_in_view, photo_size
from prototree.errors import ConfigError
from prototree.evaluation.parts import (
    BOX_SHARE,
    NEAREST,
    PLACES,
    WIDE_SHARE,
    Baseline,
    BySplit,
    PartFigures,
    Place,
    PrototypeParts,
    Split,
    parts_inside,
    purest,
)
from prototree.explain.altered_photos import TICKS, Pair, alter_pairs
from prototree.explain.bird_differences import on_differences
from prototree.explain.localization import peaks
from prototree.explain.prototypes import Progress, fast_features
from prototree.features.batches import looking, maps_of
from prototree.features.extract import Tick

PHOTOS_TESTED = 10  # of those that go to a prototype's side
_PHOTOS_AT_ONCE = 32
_CHANCE_DRAWS = 5


@dataclass(frozen=True)
class Seen:
    """All photos of a split, whole, with each prototype's nearest patch."""

    samples: Sequence[Sample]
    parts: Sequence[tuple[Part, ...]]  # M, in pixels of the network's input
    distance: Float[Tensor, "M P"]
    patch: Int[Tensor, "M P"]
    peak: Float[Tensor, "M P 2"]  # row and column, between the patches
    goes: Bool[Tensor, "M P"]  # whether the photo's greedy path turns to the prototype's side
    columns: int  # of patches in a map

    def place(self, place: Place, photo: int, prototype: int) -> tuple[float, float]:
        """Row and column of the peak, or of the nearest patch."""
        if place == "peak":
            row, column = self.peak[photo, prototype].tolist()
            return row, column
        patch = int(self.patch[photo, prototype])
        return float(patch // self.columns), float(patch % self.columns)


def measure_parts(
    tree: ProtoTree,
    data: ImageData,
    *,
    photos: int = PHOTOS_TESTED,
    attribution: bool = True,
    tick: Tick | None = None,
    workers: int = 0,
    run: Path | None = None,
    among: Sequence[ViewDataset] = (),
) -> PartFigures:
    """The figures of a tree: purity and consistency on training and test photos; stability and hiding on up to `photos`
    test photos for each prototype. Without part annotations only hiding is measured.

    `run` is the folder of the tree's run, whose maps of the photos, or of the sets of views `among`, are used.

    >>> measure_parts(run.tree(), run.data()).purity("test")
    """
    if photos < 0:
        raise ConfigError(f"expected a number of photos to test of at least 0, got {photos}")
    network = frozen_features(tree.eval().features)
    splits: dict[Split, Sequence[Sample]] = {"train": data.train, "test": data.test}
    most_pairs = photos * tree.n_prototypes
    progress = Progress(tick, sum(map(len, splits.values())) + TICKS * most_pairs)
    figures = [PrototypeParts(one) for one in range(tree.n_prototypes)]
    baselines: dict[Split, Baseline] = {}
    for split, samples in splits.items():
        seen = look(tree, samples, run=run, among=among, workers=workers, progress=progress)
        if any(seen.parts):
            figures = [_with_parts(tree, seen, split, one) for one in figures]
            baselines[split] = _baseline(tree, seen)
    pairs = [pair for one in range(tree.n_prototypes) for pair in _sampled(seen, one, photos)]
    dataset = ViewDataset(seen.samples, evaluation_views, tree.preprocessing)
    slower = fast_features(tree) if attribution else None
    tests = alter_pairs(tree, network, dataset, pairs, seen.parts, attribution=slower, progress=progress)
    touches = on_differences(tree, data)
    figures = [
        replace(one, stability=own.stability, hiding=own.hiding, on_difference=touches.get(one.prototype, {}))
        for one, own in zip(figures, tests, strict=True)
    ]
    return PartFigures(tuple(figures), baselines)


@torch.no_grad()
def look(
    tree: ProtoTree,
    samples: Sequence[Sample],
    *,
    run: Path | None = None,
    among: Sequence[ViewDataset] = (),
    workers: int,
    progress: Progress,
) -> Seen:
    """Every photo through the tree; one that cannot be read goes nowhere."""
    dataset = ViewDataset(samples, evaluation_views, tree.preprocessing)
    batches = looking(tree.features, dataset, run=run, among=among, workers=workers)
    n_photos, n_prototypes = len(samples), tree.n_prototypes
    distance = torch.full((n_photos, n_prototypes), torch.inf)
    patch = torch.zeros((n_photos, n_prototypes), dtype=torch.long)
    peak = torch.zeros((n_photos, n_prototypes, 2))
    goes = torch.zeros((n_photos, n_prototypes), dtype=torch.bool)
    for feature_map, _, places in progress.watch(maps_of(batches, tree.features, tree.prototypes.device)):
        routed, rows = tree.route(feature_map), places.cpu()
        distance[rows], patch[rows] = routed.distance.cpu(), routed.patch.cpu()
        apart = distance_map(feature_map, tree.prototypes)
        numbers = torch.arange(n_prototypes, device=apart.device).repeat(len(apart))
        peak[rows] = peaks(tree, apart.flatten(0, 1), routed.patch.flatten(), numbers).view(len(apart), -1, 2).cpu()
        path = tree.decide(routed).greedy
        goes[rows] = taken_sides(tree, path.nodes.cpu(), path.goes_right.cpu())
    parts = [parts_in_view(sample, FULL, tree.preprocessing) for sample in samples]
    return Seen(samples, parts, distance, patch, peak, goes, tree.grid.shape[1])


def taken_sides(
    tree: ProtoTree, nodes: Int[Tensor, "B height"], goes_right: Bool[Tensor, "B height"]
) -> Bool[Tensor, "B P"]:
    """The prototypes to whose side a path turns; where a node asks for one patch, a turn to the left is to none."""
    taken = torch.zeros(len(nodes), tree.n_prototypes, dtype=torch.bool)
    photo, step = torch.nonzero(nodes >= 0, as_tuple=True)
    prototype = nodes[photo, step] + tree.topology.n_nodes * (~goes_right[photo, step]).long()
    there = prototype < tree.n_prototypes
    taken[photo[there], prototype[there]] = True
    return taken


def _with_parts(tree: ProtoTree, seen: Seen, split: Split, one: PrototypeParts) -> PrototypeParts:
    number = one.prototype
    nearest = nearest_photos(seen.distance[:, number])
    going = torch.nonzero(seen.goes[:, number])[:, 0].tolist()

    def added(before: Mapping[Place, BySplit], photos: list[int], share: float) -> dict[Place, BySplit]:
        after = dict(before)
        for place in PLACES:
            boxes = [tree.grid.box(*seen.place(place, i, number)).square(share * tree.grid.side) for i in photos]
            found = purest([parts_inside(seen.parts[i], box) for i, box in zip(photos, boxes, strict=True)])
            if found is not None:
                after[place] = {**after.get(place, {}), split: found}
        return after

    return replace(
        one,
        purity=added(one.purity, nearest, BOX_SHARE),
        consistency=added(one.consistency, going, BOX_SHARE),
        same_part_wide=added(one.same_part_wide, going, WIDE_SHARE),
    )


def nearest_photos(distance: Float[Tensor, " M"]) -> list[int]:
    """The nearest ten, nearest first; fewer where there are fewer."""
    order = torch.sort(distance, stable=True).indices[:NEAREST].tolist()
    return [i for i in order if torch.isfinite(distance[i])]


def _baseline(tree: ProtoTree, seen: Seen) -> Baseline:
    """The purity of boxes around random patches on the object and around its middle; the first is a mean over draws."""
    chance, side = random.Random(derived_seed("parts by chance")), BOX_SHARE * tree.grid.side
    frames = [_object_frame(tree, sample) for sample in seen.samples]
    on_object = [_patches_in(tree, frame) for frame in frames]
    shares: list[float] = []
    middles: list[float] = []
    for number in range(tree.n_prototypes):
        photos = nearest_photos(seen.distance[:, number])
        draws = [[chance.choice(on_object[i]) for i in photos] for _ in range(_CHANCE_DRAWS)]
        for boxes in draws:
            shares += _purity([(seen.parts[i], box.square(side)) for i, box in zip(photos, boxes, strict=True)])
        middles += _purity([(seen.parts[i], frames[i].square(side)) for i in photos])
    return Baseline(sum(shares) / max(len(shares), 1), sum(middles) / max(len(middles), 1))


def _purity(photos: Sequence[tuple[tuple[Part, ...], Box]]) -> list[float]:
    """One figure, or none where no part is shown."""
    found = purest([parts_inside(parts, box) for parts, box in photos])
    return [] if found is None else [found.share]


def _object_frame(tree: ProtoTree, sample: Sample) -> Box:
    """The object's box in pixels of the network's input; all of the input where there is none."""
    if sample.box is None:
        return Box.whole((tree.grid.side, tree.grid.side))
    corners = ((sample.box.left, sample.box.top), (sample.box.right, sample.box.bottom))
    first, last = (from_photo(corner, FULL, photo_size(sample), tree.preprocessing) for corner in corners)
    return Box(*first, *last)


def _patches_in(tree: ProtoTree, frame: Box) -> list[Box]:
    """The cells of patches whose middle lies in a frame; of all patches where it is too small for any."""
    every = [tree.grid.box(*tree.grid.place(patch)) for patch in range(tree.grid.n_patches)]
    return [box for box in every if frame.contains(*box.middle)] or every


def _sampled(seen: Seen, prototype: int, count: int) -> list[Pair]:
    """Some of the photos that go to the prototype's side, evenly spread over the data."""
    going = torch.nonzero(seen.goes[:, prototype])[:, 0].tolist()
    if len(going) > count:
        going = [going[(2 * i + 1) * len(going) // (2 * count)] for i in range(count)]
    return [
        Pair(photo, prototype, int(seen.patch[photo, prototype]), seen.place("peak", photo, prototype))
        for photo in going
    ]

"""Prototype quality: part purity, consistency, stability and the occlusion test, for every prototype of a tree.

*Part purity* is PIP-Net's (Nauta et al., 2023), *consistency* and *stability* are those of Huang et al. (2023), over
images that go to a prototype's side of its node instead of those of its class. `docs/research/faithfulness.md` defines
each.
Notation used for tensor shapes: M images, P prototypes.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.backbones.geometry import Box
from prototree.backbones.inference import frozen_features
from prototree.core import checkpoint
from prototree.core.model import ProtoTree, distance_map
from prototree.data import ImageData, Part, Sample
from prototree.data.crops import FULL_IMAGE, evaluation_views, from_image, image_size, parts_in_view
from prototree.data.loader import ViewDataset, stable_seed
from prototree.errors import ConfigError
from prototree.evaluation.occlusion_test import BOX_FRACTION, TICKS, Pair, parts_inside, run_occlusion_test
from prototree.evaluation.schema import (
    ByMethod,
    Method,
    OcclusionRates,
    OnDifference,
    PartFraction,
    PrototypeQuality,
    Purity,
    PurityBaseline,
    QualityMetrics,
    Split,
    Touching,
)
from prototree.explanation.localization import peaks
from prototree.explanation.prototypes import Progress, fast_features
from prototree.features.cache import eval_batches
from prototree.features.extract import Tick
from prototree.progress import Observer
from prototree.run import Run

METHODS: tuple[Method, ...] = ("peak", "cell")
SPLITS: tuple[Split, ...] = ("train", "test")
NEAREST = 10  # images that purity is measured on
IMAGES_TESTED = 10  # of those that go to a prototype's side
WIDE_FRACTION = 72 / 224  # of the input's side: the box of Huang et al.
CONSISTENT = 0.8  # fraction of the images that must show the same part
PART_RELATED = 0.5  # purity above which PIP-Net calls a prototype related to a part
_RANDOM_DRAWS = 5

Value = TypeVar("Value")


def evaluate_prototypes(
    run: str | Path | Run,
    *,
    data: str | Path | None = None,
    images: int = IMAGES_TESTED,
    observer: Observer | None = None,
) -> QualityMetrics:
    """Measure the prototype quality of a run's last tree; adds it to metrics.json.

    `images` is how many test images per prototype are occluded. Without part annotations only occlusion is measured.

    Examples:
        >>> evaluate_prototypes("runs/cub50").purity["peak"]["test"].mean  # doctest: +SKIP
        0.64
    """
    run, observer = Run.open(run), observer or Observer()
    tree, opened, workers = run.tree(), run.data(data), run.config.workers
    if not any(sample.parts for sample in (*opened.train, *opened.test)):
        observer.stage("the data does not say where parts are; only occlusion is measured")
    observer.stage(f"finding {tree.n_prototypes} prototypes in the images, and occluding them")
    metrics = measure_prototypes(tree, opened, images=images, tick=observer.caching, workers=workers, run=run.folder)
    run.update_metrics(prototype_quality={"tree": checkpoint.fingerprint(tree), **metrics.to_json()})
    return metrics


def measure_prototypes(
    tree: ProtoTree,
    data: ImageData,
    *,
    images: int = IMAGES_TESTED,
    attribution: bool = True,
    tick: Tick | None = None,
    workers: int = 0,
    run: Path | None = None,
) -> QualityMetrics:
    """Measure purity and consistency on training and test images; stability and occlusion on up to `images` test images
    for each prototype. `run` is the folder of the tree's run, whose feature maps are used.
    """
    if images < 0:
        raise ConfigError(f"expected a number of images to test of at least 0, got {images}")
    network, rows = frozen_features(tree.eval().features), range(tree.n_prototypes)
    splits: dict[Split, Sequence[Sample]] = {"train": data.train, "test": data.test}
    progress = Progress(tick, sum(map(len, splits.values())) + TICKS * images * len(rows))
    matches = {
        split: match_split(tree, samples, run=run, workers=workers, progress=progress)
        for split, samples in splits.items()
    }
    with_parts = {split: match for split, match in matches.items() if any(match.parts)}
    tested = matches["test"]
    pairs = [pair for row in rows for pair in tested.sample(row, images)]
    dataset = ViewDataset(tested.samples, evaluation_views, tree.preprocessing)
    slower = fast_features(tree) if attribution else None
    tests = run_occlusion_test(tree, network, dataset, pairs, tested.parts, attribution=slower, progress=progress)
    differences: dict[int, dict[Method, OnDifference]] = {}
    if (data.root / "parts" / "looks.txt").exists():  # generated birds, whose differing parts are known
        from prototree_birds.ground_truth import on_differences

        differences = on_differences(tree, data)
    qualities = [
        PrototypeQuality(
            row,
            purity=_part_fractions(tree, with_parts, row, BOX_FRACTION, nearest=True),
            consistency=_part_fractions(tree, with_parts, row, BOX_FRACTION),
            consistency_wide=_part_fractions(tree, with_parts, row, WIDE_FRACTION),
            stability=test.stability,
            occlusion=test.occlusion,
            on_discriminative_part=differences.get(row, {}),
        )
        for row, test in enumerate(tests)
    ]
    return summarise(qualities, {split: _purity_baseline(tree, match) for split, match in with_parts.items()})


def summarise(qualities: list[PrototypeQuality], baselines: dict[Split, PurityBaseline]) -> QualityMetrics:
    """Average the quality of a tree's prototypes."""

    def means(metric: str, mean: Callable[[list[float]], Value]) -> dict[Method, dict[Split, Value]]:
        """Average a metric over the prototypes for which it is known."""
        values: dict[Method, dict[Split, Value]] = {}
        for method, split in product(METHODS, SPLITS):
            known = [getattr(quality, metric).get(method, {}).get(split) for quality in qualities]
            if fractions := [part.fraction for part in known if part is not None]:
                values.setdefault(method, {})[split] = mean(fractions)
        return values

    def purity(values: list[float]) -> Purity:
        return Purity(fmean(values), pstdev(values), fmean(float(value > PART_RELATED) for value in values))

    def consistency(values: list[float]) -> float:
        return fmean(float(value >= CONSISTENT) for value in values)

    def by_method(metric: str) -> dict[Method, list[Any]]:
        values: dict[Method, list[Any]] = {}
        for quality in qualities:
            for method, value in getattr(quality, metric).items():
                values.setdefault(method, []).append(value)
        return values

    stability = [quality.stability for quality in qualities if quality.stability is not None]
    return QualityMetrics(
        prototypes=qualities,
        purity=means("purity", purity),
        baselines=baselines,
        consistency=means("consistency", consistency),
        consistency_wide=means("consistency_wide", consistency),
        stability=fmean(stability) if stability else None,
        occlusion={method: mean_rates(rates) for method, rates in by_method("occlusion").items()},
        on_discriminative_part={
            method: Touching(len(boxes), fmean(float(b.touches) for b in boxes), fmean(b.by_chance for b in boxes))
            for method, boxes in by_method("on_discriminative_part").items()
        },
    )


def mean_rates(rates: list[OcclusionRates]) -> OcclusionRates:
    """Average occlusion rates over all images tested, each with each prototype on its path."""
    counts = {name: sum(getattr(rate, name) for rate in rates) for name in ("n_images", "n_in_radius")}

    def mean(name: str) -> float | None:
        weight = "n_in_radius" if "loss" in name else "n_images"
        total = sum(getattr(rate, weight) * (getattr(rate, name) or 0.0) for rate in rates)
        return total / counts[weight] if counts[weight] else None

    names = [name for name in OcclusionRates.__dataclass_fields__ if name not in counts]
    return OcclusionRates(**counts, **{name: mean(name) for name in names})  # type: ignore[arg-type]


@dataclass(frozen=True)
class SplitMatches:
    """All images of a split, whole, with each prototype's nearest patch."""

    samples: Sequence[Sample]
    parts: Sequence[tuple[Part, ...]]  # M, in pixels of the network's input
    distance: Float[Tensor, "M P"]  # infinite for an image that cannot be read
    patch: Int[Tensor, "M P"]
    peak: Float[Tensor, "M P 2"]  # row and column, between the patches
    goes: Bool[Tensor, "M P"]  # whether the image's greedy path goes to the prototype's side

    def going(self, row: int) -> list[int]:
        """List the images that go to a prototype's side."""
        indices: list[int] = torch.nonzero(self.goes[:, row])[:, 0].tolist()
        return indices

    def sample(self, row: int, count: int) -> list[Pair]:
        """Pick some of the images that go to the prototype's side, evenly spread over the data."""
        going = self.going(row)
        if len(going) > count:
            going = [going[(2 * i + 1) * len(going) // (2 * count)] for i in range(count)]
        peak, patch = self.peak[:, row].tolist(), self.patch[:, row].tolist()
        return [Pair(index, row, patch[index], (peak[index][0], peak[index][1])) for index in going]


@torch.no_grad()
def match_split(
    tree: ProtoTree, samples: Sequence[Sample], *, run: Path | None, workers: int, progress: Progress
) -> SplitMatches:
    """Send every image through the tree; one that cannot be read goes nowhere."""
    dataset = ViewDataset(samples, evaluation_views, tree.preprocessing)
    batches = eval_batches(tree.features, dataset, run=run, workers=workers)
    shape = (len(samples), tree.n_prototypes)
    distance, peak = torch.full(shape, torch.inf), torch.zeros((*shape, 2))
    patch, goes = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    for feature_map, _, indices in progress.watch(batches.encoded(tree.features, tree.prototypes.device)):
        routed, rows = tree.forward_features(feature_map), indices.cpu()
        distance[rows], patch[rows] = routed.distance.cpu(), routed.patch.cpu()
        dists = distance_map(feature_map, tree.prototypes)
        numbers = torch.arange(shape[1], device=dists.device).repeat(len(dists))
        peak[rows] = peaks(tree, dists.flatten(0, 1), routed.patch.flatten(), numbers).view(len(dists), -1, 2).cpu()
        path = tree.decode(routed).greedy
        goes[rows] = prototypes_taken(tree, path.nodes.cpu(), path.goes_right.cpu())
    parts = [parts_in_view(sample, FULL_IMAGE, tree.preprocessing) for sample in samples]
    return SplitMatches(samples, parts, distance, patch, peak, goes)


def prototypes_taken(
    tree: ProtoTree, nodes: Int[Tensor, "B height"], goes_right: Bool[Tensor, "B height"]
) -> Bool[Tensor, "B P"]:
    """Mark the prototypes to whose side a path goes; a presence node has none on its left."""
    taken = torch.zeros(len(nodes), tree.n_prototypes, dtype=torch.bool)
    image, step = torch.nonzero(nodes >= 0, as_tuple=True)
    prototype = nodes[image, step] + tree.topology.n_nodes * (~goes_right[image, step]).long()
    exists = prototype < tree.n_prototypes
    taken[image[exists], prototype[exists]] = True
    return taken


def nearest_images(distance: Float[Tensor, " M"]) -> list[int]:
    """List the nearest ten images, nearest first; fewer where there are fewer."""
    order = torch.sort(distance, stable=True).indices[:NEAREST].tolist()
    return [i for i in order if torch.isfinite(distance[i])]


def _part_fractions(
    tree: ProtoTree, matches: Mapping[Split, SplitMatches], row: int, fraction: float, *, nearest: bool = False
) -> ByMethod:
    """Find the purest part of a prototype's boxes in its nearest images, or else in all that go to its side."""
    grid, values = tree.grid, ByMethod()
    for method, (split, match) in product(METHODS, matches.items()):
        inside = []
        for i in nearest_images(match.distance[:, row]) if nearest else match.going(row):
            at = match.peak[i, row].tolist() if method == "peak" else grid.row_column(int(match.patch[i, row]))
            inside.append(parts_inside(match.parts[i], grid.box(*at).square(fraction * grid.side)))
        if (best := purest(inside)) is not None:
            values.setdefault(method, {})[split] = best
    return values


def purest(images: Iterable[Mapping[str, bool]]) -> PartFraction | None:
    """Find the part that lies in the box in the largest fraction of the images that show it; of equals, in more images.

    None where no image shows any part.
    """
    inside: dict[str, list[bool]] = {}
    for image in images:
        for part, is_inside in image.items():
            inside.setdefault(part, []).append(is_inside)
    if not inside:
        return None
    part = max(inside, key=lambda name: (sum(inside[name]) / len(inside[name]), sum(inside[name])))
    return PartFraction(part, sum(inside[part]) / len(inside[part]), len(inside[part]))


def _purity_baseline(tree: ProtoTree, matches: SplitMatches) -> PurityBaseline:
    """Measure boxes around random patches on the object (a mean over draws) and around its middle."""
    rng, side, grid = random.Random(stable_seed("parts by chance")), BOX_FRACTION * tree.grid.side, tree.grid
    cells = [grid.box(*grid.row_column(patch)) for patch in range(grid.n_patches)]
    objects = [_object_box(tree, sample) for sample in matches.samples]
    on_object = [[cell for cell in cells if box.contains(*cell.middle)] or cells for box in objects]

    def purity(images: list[int], boxes: list[Box]) -> list[float]:
        pairs = zip(images, boxes, strict=True)
        best = purest(parts_inside(matches.parts[i], box.square(side)) for i, box in pairs)
        return [] if best is None else [best.fraction]

    at_random, in_middle = list[float](), list[float]()
    for row in range(tree.n_prototypes):
        images = nearest_images(matches.distance[:, row])
        for boxes in [[rng.choice(on_object[i]) for i in images] for _ in range(_RANDOM_DRAWS)]:
            at_random += purity(images, boxes)
        in_middle += purity(images, [objects[i] for i in images])
    return PurityBaseline(sum(at_random) / max(len(at_random), 1), sum(in_middle) / max(len(in_middle), 1))


def _object_box(tree: ProtoTree, sample: Sample) -> Box:
    """The object's box in pixels of the network's input; all of the input where there is none."""
    if sample.box is None:
        return Box.whole((tree.grid.side, tree.grid.side))
    corners = ((sample.box.left, sample.box.top), (sample.box.right, sample.box.bottom))
    first, last = (from_image(corner, FULL_IMAGE, image_size(sample), tree.preprocessing) for corner in corners)
    return Box(*first, *last)

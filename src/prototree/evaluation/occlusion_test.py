"""Occlusion test (deletion test): does a node decide otherwise when the box that is shown for it is occluded?

Compared with random boxes of the same size; noise all over the image tests whether the match stays on the same parts.
Notation used for tensor shapes: B pairs of an image and a prototype, h w pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prototree.backbones.geometry import Box
from prototree.core.localization import peak_box
from prototree.core.model import ProtoTree
from prototree.data import Part
from prototree.data.loader import ViewDataset, stable_seed
from prototree.evaluation.schema import Method, OcclusionRates
from prototree.explanation.attribution import (
    RANDOM_BOXES,
    Features,
    Probes,
    attribute,
    hidden,
    patch_distances,
    random_boxes,
)
from prototree.explanation.localization import find_in_grid, peaks
from prototree.explanation.prototypes import Progress

TICKS = 20  # what a pair costs, in images
BOX_FRACTION = 1 / 7  # of the input's side: PIP-Net's box around a patch
NOISE = 0.2  # standard deviation, in normalised pixels
_PAIRS_AT_ONCE = 16
_BATCH = 32


class Pair(NamedTuple):
    """An image, by its index in the data, that goes to a prototype's side, and its nearest patch."""

    image: int
    prototype: int
    patch: int
    peak: tuple[float, float]  # row and column, between the patches


@dataclass(frozen=True)
class PairSummary:
    """What became of a prototype's images."""

    stability: float | None = None  # fraction of the images in which noise leaves the same parts in the box
    occlusion: dict[Method, OcclusionRates] = field(default_factory=dict)  # by the method that the box comes from


class _State(NamedTuple):
    """How a node decides about one image, seen from the prototype of a pair."""

    distance: float  # in units of the radius
    flips: bool  # to the other side
    is_lost: bool  # flips, or no prototype of the node is within its radius
    peak: tuple[float, float]


class _PairResult(NamedTuple):
    """Before, and for each method with the box occluded, then with random boxes occluded."""

    is_stable: bool
    before: _State
    after: dict[Method, list[_State]]


@torch.no_grad()
def run_occlusion_test(
    tree: ProtoTree,
    network: Features,
    dataset: ViewDataset,
    pairs: Sequence[Pair],
    parts: Sequence[tuple[Part, ...]],
    *,
    attribution: Features | None,
    progress: Progress,
) -> list[PairSummary]:
    """Occlude boxes and add noise to the images of each prototype of the tree. `parts` are in pixels of the input.

    `attribution` is a network that knows gradients, where boxes of attribution are to be tested too.
    """
    results: list[list[_PairResult]] = [[] for _ in range(tree.n_prototypes)]
    ordered = sorted(pairs, key=lambda pair: pair.image)
    for first in range(0, len(ordered), _PAIRS_AT_ONCE):
        group = ordered[first : first + _PAIRS_AT_ONCE]
        pixels = {index: dataset[index].image for index in {pair.image for pair in group}}
        images = torch.stack([pixels[pair.image] for pair in group]).to(tree.prototypes.device)
        for pair, result in zip(group, _test_group(tree, network, group, images, parts, attribution), strict=True):
            results[pair.prototype].append(result)
        progress.add(TICKS * len(group))
    return [_summary(pair_results, has_parts=any(parts)) for pair_results in results]


def _test_group(
    tree: ProtoTree,
    network: Features,
    pairs: Sequence[Pair],
    images: Float[Tensor, "B 3 h w"],
    parts: Sequence[tuple[Part, ...]],
    attribution: Features | None,
) -> list[_PairResult]:
    """Test a few pairs, all their altered images together."""
    grid, side, n_boxes = tree.grid, images.shape[-1], 1 + RANDOM_BOXES
    seed = stable_seed("altered photos", *(n for pair in pairs for n in (pair.image, pair.prototype)))
    generator, prototypes = torch.Generator().manual_seed(seed), torch.tensor([pair.prototype for pair in pairs])
    before = _states(tree, network, images, prototypes)
    boxes: dict[Method, list[Box]] = {
        "peak": [peak_box(grid, *pair.peak) for pair in pairs],
        "cell": [grid.box(*grid.row_column(pair.patch)) for pair in pairs],
    }
    if attribution is not None:
        patch = torch.tensor([pair.patch for pair in pairs], device=images.device)
        probes = Probes.of(tree, images, prototypes.tolist(), patch)
        with torch.enable_grad():
            maps = attribute(attribution, probes, generator)
        boxes["attribution"] = [find_in_grid("attribution", values, tree.preprocessing).box for values in maps]
    after: dict[Method, list[_State]] = {}
    rows = torch.arange(len(pairs)).repeat_interleave(n_boxes)
    for method, shown in boxes.items():
        occluded = [each for box in shown for each in (box, *random_boxes(box, side, generator))]
        after[method] = _states(tree, network, hidden(images[rows], occluded), prototypes[rows])
    noise = torch.randn(images.shape, generator=generator).to(images)
    noisy = _states(tree, network, images + NOISE * noise, prototypes)
    results = []
    for i, pair in enumerate(pairs):
        squares = (grid.box(*peak).square(BOX_FRACTION * grid.side) for peak in (pair.peak, noisy[i].peak))
        clean_parts, noisy_parts = (parts_inside(parts[pair.image], square) for square in squares)
        states = {method: after[method][i * n_boxes : (i + 1) * n_boxes] for method in after}
        results.append(_PairResult(clean_parts == noisy_parts, before[i], states))
    return results


def _states(tree: ProtoTree, network: Features, images: Float[Tensor, "B 3 h w"], prototypes: Tensor) -> list[_State]:
    """Send images through the tree, each with its own prototype."""
    states, n_nodes = list[_State](), tree.topology.n_nodes
    for pixels, asked in zip(images.split(_BATCH), prototypes.to(images.device).split(_BATCH), strict=True):
        feature_map = network(pixels)
        routed, rows = tree.forward_features(feature_map), torch.arange(len(pixels), device=images.device)
        node, is_right = asked % n_nodes, asked < n_nodes
        dists = patch_distances(feature_map, tree.prototypes[asked]).view(len(pixels), *tree.grid.shape)
        distance = routed.distance / tree.radius
        flips = (routed.p_right[rows, node] > 0.5) != is_right
        in_radius = (distance.unflatten(1, (-1, n_nodes)) <= 1).any(dim=1)[rows, node]
        middles = peaks(tree, dists, routed.patch[rows, asked], asked)
        columns = (distance[rows, asked].tolist(), flips.tolist(), (flips | ~in_radius).tolist(), middles.tolist())
        states += [_State(d, f, lost, (row, column)) for d, f, lost, (row, column) in zip(*columns, strict=True)]
    return states


def _summary(results: Sequence[_PairResult], *, has_parts: bool) -> PairSummary:
    """Average what became of the images of one prototype."""
    if not results:
        return PairSummary()

    def rates(method: Method) -> OcclusionRates:
        boxes = [result.after[method][0] for result in results]
        random = [state for result in results for state in result.after[method][1:]]
        in_radius = [result.after[method] for result in results if not result.before.is_lost]
        return OcclusionRates(
            len(results),
            flip_rate=_mean([state.flips for state in boxes]),
            random_flip_rate=_mean([state.flips for state in random]),
            distance=_mean([result.before.distance for result in results]),
            distance_occluded=_mean([state.distance for state in boxes]),
            random_distance_occluded=_mean([state.distance for state in random]),
            n_in_radius=len(in_radius),
            loss_rate=_mean([states[0].is_lost for states in in_radius]) if in_radius else None,
            random_loss_rate=_mean([s.is_lost for states in in_radius for s in states[1:]]) if in_radius else None,
        )

    stability = _mean([result.is_stable for result in results]) if has_parts else None
    return PairSummary(stability, {method: rates(method) for method in results[0].after})


def _mean(values: Sequence[float | bool]) -> float:
    return sum(values) / len(values)


def parts_inside(parts: Sequence[Part], box: Box) -> dict[str, bool]:
    """Tell of every part shown, left and right ones as one, whether (one of) it lies in the box."""
    inside: dict[str, bool] = {}
    for part in parts:
        name = " ".join(word for word in part.name.split() if word not in ("left", "right")) or part.name
        inside[name] = inside.get(name, False) or box.contains(part.x, part.y)
    return inside

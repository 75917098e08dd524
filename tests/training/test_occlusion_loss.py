"""The occlusion loss: a match must depend on the displayed box, and on nothing else."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import one_hot

from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.crops import patch_grid
from prototree.backbones.geometry import Box, PatchGrid
from prototree.config import DistillSettings
from prototree.core.localization import peak_box, peak_places
from prototree.core.model import ProtoTree, distance_map, nearest_patches
from prototree.core.nodes import NodeFunction
from prototree.core.projection import side_classes
from prototree.core.topology import Topology
from prototree.data import ImageData
from prototree.data.crops import FULL_IMAGE, OccludedView, OccludedViews, source_views
from prototree.data.dataset import Sample
from prototree.data.loader import Entry, ViewDataset
from prototree.features.cache import FeatureCache, FeatureMaps, Inputs
from prototree.training import distill, occlusion_loss
from prototree.training.grow import InitialTree, rescale_distances, sample_maps, standardise
from prototree.training.head import wide_head
from prototree.training.occlusion_loss import (
    CleanMatches,
    OccludedPairs,
    class_sides,
    overlap_fraction,
    salient_squares,
)
from tiny_training import tiny_context

GRID = PatchGrid(rows=9, columns=9, side=288)


def test_the_squares_are_where_a_map_stands_out_and_do_not_overlap() -> None:
    maps = 5 + 0.01 * random_maps(0, 2, 6, 9, 9, dtype=torch.float32)  # as strong everywhere
    maps[0, :, 2, 6] += torch.tensor([9.0, 0, 0, 0, 0, -9])
    maps[0, :, 7, 1] += torch.tensor([0, 0, 4.0, 0, 0, 0])
    maps[1, :, 4, 4] -= 5
    first, second = salient_squares(maps, GRID, 2)[0].tolist()
    assert first == pytest.approx(peak_box(GRID, 2.0, 6.0).edges, abs=8)
    assert second == pytest.approx(peak_box(GRID, 7.0, 1.0).edges, abs=8)
    assert salient_squares(maps, GRID, 1)[1, 0].tolist() == pytest.approx(peak_box(GRID, 4.0, 4.0).edges, abs=8)
    noise = random_maps(1, 30, 6, 18, 9, dtype=torch.float32)
    for pair in salient_squares(noise, patch_grid((9, 9), 288, (1.0, 0.7)), 2):
        centres = (pair[:, :2] + pair[:, 2:]) / 2
        assert (centres[0] - centres[1]).abs().max() > 288 / 14, "the second is elsewhere"
    assert salient_squares(torch.ones(1, 4, 9, 9), GRID, 2).isfinite().all(), "where nothing stands out, too"


def test_the_fraction_of_a_square_that_is_occluded() -> None:
    squares = torch.tensor([[[0.0, 0, 10, 10], [5, 5, 15, 15], [90, 90, 100, 100]]])
    assert overlap_fraction(squares, torch.tensor([[0.0, 0, 10, 20]])).tolist() == [pytest.approx([1.0, 0.5, 0.0])]


def pairwise_tree(backbone: Backbone, topology: Topology, leaf_class: torch.Tensor, hidden: int = 0) -> ProtoTree:
    features = FeatureExtractor(backbone, 8, hidden)
    names = [str(label) for label in range(int(leaf_class.max()) + 1)]
    tree = ProtoTree(topology, features, names, node_function=NodeFunction("pairwise", 6.0))
    tree.leaf_logits.data.zero_().scatter_(1, leaf_class[:, None], 5.0)
    return tree


def test_class_sides_are_those_of_the_leaves(tiny_backbone: Backbone) -> None:
    topology, _, _ = Topology.from_children([~0, ~1], [1, ~2])
    tree = pairwise_tree(tiny_backbone, topology, torch.tensor([2, 0, 1]))
    left, right = side_classes(tree)
    assert class_sides(tree, torch.tensor([2, 0, 1])).tolist() == torch.cat([right, left]).T.tolist()
    assert not class_sides(tree, torch.tensor([2, 0, 0]))[1].any(), "a class without a leaf"


RADIUS = torch.tensor([0.5, 1.0])  # of the right and of the left patch of one node
SQUARES = torch.tensor([[[0.0, 0, 10, 10], [50, 50, 60, 60]]])
OVER, BESIDE, PARTLY = [0.0, 0, 10, 10], [80.0, 80, 90, 90], [0.0, 0, 10, 3]
RIGHT, LEFT = [True, False], [False, True]


@pytest.mark.parametrize(
    ("before", "after", "box", "side", "elsewhere", "expected"),
    [
        ([0.3, 0.9], [0.4, 0.9], OVER, RIGHT, torch.inf, 1.15 * 0.5 - 0.4),
        ([0.3, 0.9], [0.6, 0.9], OVER, RIGHT, torch.inf, 0),  # it has left
        ([0.3, 0.9], [0.4, 0.9], OVER, LEFT, torch.inf, 0),  # not the patch of its class
        ([0.9, 0.3], [0.4, 0.9], OVER, RIGHT, torch.inf, 0),  # it did not go to that side before
        ([0.3, 0.9], [0.4, 0.9], OVER, RIGHT, 0.45, 0),  # it matches elsewhere, too
        ([0.3, 0.9], [0.4, 0.9], OVER, RIGHT, 0.55, 1.15 * 0.5 - 0.4),
        ([0.3, 0.9], [0.4, 0.9], BESIDE, RIGHT, torch.inf, 0),
        ([0.3, 0.9], [0.6, 0.9], BESIDE, RIGHT, torch.inf, 0.6 - 0.95 * 0.5),  # it shall stay within the radius
        ([0.3, 0.9], [0.4, 0.45], BESIDE, RIGHT, torch.inf, 0.1 - 0.05),  # and on its side
        ([0.3, 0.9], [0.6, 0.45], PARTLY, RIGHT, torch.inf, 0),  # neither covered nor untouched
    ],
)
def test_covered_matches_shall_leave_and_others_stay(
    before: list[float], after: list[float], box: list[float], side: list[bool], elsewhere: float, expected: float
) -> None:
    matches = CleanMatches(torch.tensor([before]), SQUARES, torch.tensor([[elsewhere, 9.0]]))
    distance = torch.tensor([after], requires_grad=True)
    loss = occlusion_loss.occlusion_loss(matches, distance, torch.tensor([box]), torch.tensor([side]), RADIUS)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-6)
    loss.backward()
    if expected and box == OVER:
        assert distance.grad is not None
        assert distance.grad.tolist() == [[-1.0, 0.0]], "away from the patch"


def test_matches_are_the_nearest_patches_and_what_would_be_displayed() -> None:
    z, prototypes = random_maps(0, 3, 5, 18, 9), random_maps(1, 4, 5, 1, 1)
    grid, radius = patch_grid((9, 9), 288, (1.0, 0.7)), torch.tensor([0.5, 0.6, 0.7, 0.8], dtype=z.dtype)
    boxes = torch.tensor([[0.0, 0, 41, 41], [100, 120, 141, 161], [200, 0, 241, 41]], dtype=z.dtype)
    matches, nearest = CleanMatches.of(z, prototypes, boxes, radius, grid), nearest_patches(z, prototypes)
    torch.testing.assert_close(matches.distance, nearest.distance)
    dists = distance_map(z, prototypes)
    squares = [peak_box(grid, *map(float, grid.row_column(patch))) for patch in range(grid.n_patches)]
    for image, box in enumerate(boxes.tolist()):
        far = [patch for patch, square in enumerate(squares) if not overlap(square, Box(*box).enlarge(1.0))]
        assert 0 < len(far) < grid.n_patches
        for row in range(4):
            y, x = peak_places(dists[image, row][None] / radius[row], nearest.patch[image, row][None], 9)
            assert matches.squares[image, row].tolist() == pytest.approx(
                peak_box(grid, float(y), float(x)).edges, abs=1e-3
            )
            torch.testing.assert_close(matches.elsewhere[image, row], dists[image, row].flatten()[far].min())
    small_boxes = torch.full_like(boxes, 30.0) + torch.tensor([-9.0, -9, 9, 9])
    small = CleanMatches.of(z[:, :, :2, :2], prototypes, small_boxes, radius, PatchGrid(rows=2, columns=2, side=60))
    assert (small.elsewhere == 0).all(), "all patches are near the occluded box"


def overlap(first: Box, other: Box) -> bool:
    across = min(first.right, other.right) - max(first.left, other.left)
    return across > 0 and min(first.bottom, other.bottom) - max(first.top, other.top) > 0


def test_pairs_are_the_same_image_with_and_without(tiny_backbone: Backbone, squares: ImageData, tmp_path: Path) -> None:
    cache, preprocessing = FeatureCache(tmp_path / "run"), tiny_backbone.preprocessing
    (plain,) = cache.compute(
        tiny_backbone.merge_last_block(), [ViewDataset(squares.train, source_views, preprocessing)]
    )
    full = plain.subset([index for index, entry in enumerate(plain.entries) if entry.view == FULL_IMAGE])
    grid = patch_grid(tiny_backbone.map_size, preprocessing.size, (1.0,))
    views = OccludedViews(occlusion_loss.salient_boxes(full, grid, preprocessing))
    (occluded,) = cache.compute(tiny_backbone, [ViewDataset(squares.train, views, preprocessing)])
    assert len(occluded.entries) == 12 * occlusion_loss.BOXES_PER_IMAGE, "every second image of each class"
    leaf_class = torch.arange(4) % 3
    tree = pairwise_tree(tiny_backbone, Topology.full(2), leaf_class)
    pairs = OccludedPairs.of(tree, leaf_class, plain, occluded)
    assert pairs is not None
    for before, after, edges in zip(pairs.plain.entries, pairs.occluded.entries, pairs.boxes, strict=True):
        assert (before.sample, before.view) == (after.sample, FULL_IMAGE)
        assert isinstance(after.view, OccludedView)
        assert all(0 <= edge <= 1 for edge in after.view.box.edges)
        assert edges.tolist() == pytest.approx([64 * edge for edge in after.view.box.edges], abs=1e-4)
    anchors = pairs.plain.read([0]).values[:, :, 0, 0].expand(tree.n_prototypes, -1)[:, :, None, None].contiguous()
    assert pairs.loss(tree, anchors).isfinite()
    unread = replace(plain, unreadable=frozenset({0}))
    fewer = OccludedPairs.of(tree, leaf_class, unread, occluded)
    assert fewer is not None
    assert len(fewer.boxes) == len(pairs.boxes) - occlusion_loss.BOXES_PER_IMAGE
    everything = replace(plain, unreadable=frozenset(range(len(plain.entries))))
    assert OccludedPairs.of(tree, leaf_class, everything, occluded) is None
    assert OccludedPairs.of(tree, leaf_class, plain, None) is None


N_IMAGES, EPOCHS, MANIFEST, TRACE = 40, 30, 3.0, 6.0
NOISE = torch.tensor([1.0, 1.0, 0.1, 0.1])[:, None, None]  # marks are the harder ones to see


class MarksAndTraces(FeatureMaps):
    """Made-up maps of two classes: one cell has a mark of the class and a trace of it; occlusion removes the mark."""

    def read(self, indices: Sequence[int], epoch: int = 0) -> Inputs:
        entries, generator = [self.entries[index] for index in indices], torch.Generator().manual_seed(0)
        values = torch.zeros(N_IMAGES, 256, 4, 4)
        values[:, :4] = torch.randn(N_IMAGES, 4, 4, 4, generator=generator) * NOISE
        values = values[[entry.sample_index for entry in entries]]
        for row, entry in enumerate(entries):
            if not isinstance(entry.view, OccludedView):
                values[row, entry.sample.label, 1, 1] += MANIFEST
            values[row, 2 + entry.sample.label, 1, 1] += TRACE
        labels = torch.tensor([entry.sample.label for entry in entries])
        return Inputs(values, labels, torch.tensor(list(indices)))

    def subset(self, indices: Sequence[int]) -> FeatureMaps:
        return MarksAndTraces((), tuple(self.entries[index] for index in indices), frozenset())


def test_a_tree_learns_to_need_what_it_displays(tiny_backbone: Backbone, squares: ImageData, tmp_path: Path) -> None:
    samples = [Sample(Path(f"{number}.png"), number % 2) for number in range(N_IMAGES)]
    view = OccludedView("hidden", box=Box(0.25, 0.25, 0.5, 0.5), fill="blur", seed=0)
    plain, occluded = (
        MarksAndTraces((), tuple(Entry(*pair, view) for pair in enumerate(samples)), frozenset())
        for view in (FULL_IMAGE, view)
    )
    labels, matched = torch.arange(N_IMAGES) % 2, []
    soft_labels = 0.9 * one_hot(labels, 2) + 0.05
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        tree = pairwise_tree(tiny_backbone.merge_last_block(), Topology.full(1), torch.tensor([0, 1]), hidden=16)
        maps, _ = sample_maps(plain)
        standardise(tree.features, maps)
        rescale_distances(tree.features, maps, 0.7, torch.Generator().manual_seed(0))
        norm = wide_head(tree.features).norm
        before, gain = {name: value.clone() for name, value in norm.named_buffers()}, norm.weight.detach().clone()
        initial = InitialTree(tree.topology, torch.tensor([0, 1]), maps[[1, 0], :, 1, 1][:, :, None, None])
        features = distill.Features(plain, plain, (1.0,), occluded if weight else None)
        cfg = DistillSettings(occlusion_weight=weight, distill_temperature=2.0)
        context = tiny_context(tmp_path / str(weight), squares, batch_size=8)
        distill.distill(context, cfg, tree, initial, features, lambda rows: soft_labels[rows], EPOCHS, "")
        assert all(torch.equal(before[name], value) for name, value in norm.named_buffers()), "batch norm is frozen"
        assert not torch.equal(norm.weight, gain), "its gain and bias learn"
        with torch.no_grad():
            clean, hidden = (
                tree.forward_features(tree.features.from_map(part.read(range(N_IMAGES)).values))
                for part in (plain, occluded)
            )
        assert tree.decode(clean).labels("greedy").tolist() == labels.tolist()
        sides = class_sides(tree, torch.tensor([0, 1]))[labels]
        assert (clean.distance <= tree.radius)[sides].float().mean() > 0.85
        matched.append(float((hidden.distance <= tree.radius)[sides].float().mean()))
    assert matched[0] >= 0.2, f"the trace is often enough: {matched}"
    assert matched[1] < matched[0] / 2, f"it is not any more: {matched}"

"""That a tree learns to need what it shows."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn.functional import one_hot

from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.crops import patch_grid
from prototree.backbones.geometry import Box, PatchGrid
from prototree.core.localization import peak_box, peak_places
from prototree.core.model import ProtoTree
from prototree.core.nodes import LN2, NodeFunction, NodeKind
from prototree.core.patches import distance_map, nearest_patches
from prototree.core.topology import Topology
from prototree.data import open_data
from prototree.data.dataset import Sample
from prototree.data.loading import Entry, ViewDataset
from prototree.data.occlusion import HiddenView, HiddenViews
from prototree.data.views import FULL, source_views
from prototree.features.batches import CachedBatches
from prototree.features.cache import Inputs, MapCache, cache_borders
from prototree.training import occlusion_loss
from prototree.training.anchored import AnchoredObjective
from prototree.training.chance import WholeBatch
from prototree.training.grow import Start, calibrate, sample_maps, standardise
from prototree.training.loop import Options
from prototree.training.objectives import SoftTargets, train
from prototree.training.occlusion_loss import (
    Matches,
    OccludedPairs,
    hidden_share,
    hiding_loss,
    own_sides,
    striking_squares,
)
from prototree.training.projection import side_classes
from prototree.training.recipes.distill import Distill
from tiny_training import write_squares

GRID = PatchGrid(rows=9, columns=9, side=288)


def test_the_squares_are_where_a_map_stands_out_and_do_not_overlap() -> None:
    maps = 5 + 0.01 * random_maps(0, 2, 6, 9, 9, dtype=torch.float32)  # as strong everywhere
    maps[0, :, 2, 6] += torch.tensor([9.0, 0, 0, 0, 0, -9])
    maps[0, :, 7, 1] += torch.tensor([0, 0, 4.0, 0, 0, 0])
    maps[1, :, 4, 4] -= 5
    first, second = striking_squares(maps, GRID, 2)[0].tolist()
    assert first == pytest.approx(peak_box(GRID, 2.0, 6.0).edges, abs=8)
    assert second == pytest.approx(peak_box(GRID, 7.0, 1.0).edges, abs=8)
    assert striking_squares(maps, GRID, 1)[1, 0].tolist() == pytest.approx(peak_box(GRID, 4.0, 4.0).edges, abs=8)
    noise = random_maps(1, 30, 6, 18, 9, dtype=torch.float32)
    twice = patch_grid((9, 9), 288, (1.0, 0.7))
    for one, other in striking_squares(noise, twice, 2):
        middles = [(square[:2] + square[2:]) / 2 for square in (one, other)]
        assert (middles[0] - middles[1]).abs().max() > 288 / 14, "the second is another place"


def test_a_map_that_is_the_same_everywhere_has_squares_too() -> None:
    assert striking_squares(torch.ones(1, 4, 9, 9), GRID, 2).isfinite().all()


def test_how_much_of_a_square_is_hidden() -> None:
    squares = torch.tensor([[[0.0, 0, 10, 10], [5, 5, 15, 15], [90, 90, 100, 100]]])
    share = hidden_share(squares, torch.tensor([[0.0, 0, 10, 20]]))
    assert share.tolist() == [pytest.approx([1.0, 0.5, 0.0])]


@pytest.mark.parametrize("kind", ["presence", "pairwise"])
def test_own_sides_are_those_of_the_class(tiny_backbone: Backbone, kind: NodeKind) -> None:
    topology, _, _ = Topology.from_children([~0, ~1], [1, ~2])
    features = FeatureExtractor(tiny_backbone, 4)
    tree = ProtoTree(topology, features, ["a", "b", "c"], question=NodeFunction(kind, 6.0))
    leaf_class = torch.tensor([2, 0, 1])
    tree.leaf_logits.data.zero_().scatter_(1, leaf_class[:, None], 5.0)
    left, right = side_classes(tree)
    expected = right if kind == "presence" else torch.cat([right, left])
    assert own_sides(tree, leaf_class, torch.arange(3)).tolist() == expected.T.tolist()
    assert not own_sides(tree, torch.tensor([2, 0, 0]), torch.tensor([1])).any(), "a class without a leaf"


UNIT = torch.tensor([0.5, 1.0])  # of the right and of the left patch of one node
SQUARES = torch.tensor([[[0.0, 0, 10, 10], [50, 50, 60, 60]]])
OVER, BESIDE = torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([[80.0, 80, 90, 90]])
OWN = torch.tensor([[True, False]])
NOWHERE = torch.full((1, 2), torch.inf)


def loss(
    before: list[float],
    after: list[float],
    place: torch.Tensor,
    own: torch.Tensor = OWN,
    elsewhere: torch.Tensor = NOWHERE,
) -> float:
    matches = Matches(torch.tensor([before]), SQUARES, elsewhere)
    return float(hiding_loss(matches, torch.tensor([after]), place, own, UNIT, "pairwise"))


def test_a_photo_shall_leave_the_reach_of_a_patch_whose_square_is_hidden() -> None:
    assert loss([0.3, 0.9], [0.4, 0.9], OVER) == pytest.approx(1.15 * 0.5 - 0.4)
    assert loss([0.3, 0.9], [0.6, 0.9], OVER) == 0, "it has left"
    assert loss([0.3, 0.9], [0.4, 0.9], OVER, ~OWN) == 0, "it is not the patch of its class"
    assert loss([0.9, 0.3], [0.4, 0.9], OVER) == 0, "it did not turn to that side before"
    assert loss([0.3, 0.9], [0.4, 0.9], OVER, elsewhere=torch.tensor([[0.45, 9.0]])) == 0, "it matches elsewhere, too"
    assert loss([0.3, 0.9], [0.4, 0.9], OVER, elsewhere=torch.tensor([[0.55, 9.0]])) > 0


def test_matches_are_the_nearest_patches_and_what_would_be_shown() -> None:
    z, prototypes = random_maps(0, 3, 5, 18, 9), random_maps(1, 4, 5, 1, 1)
    grid, unit = patch_grid((9, 9), 288, (1.0, 0.7)), torch.tensor([0.5, 0.6, 0.7, 0.8], dtype=z.dtype)
    places = torch.tensor([[0.0, 0, 41, 41], [100, 120, 141, 161], [200, 0, 241, 41]], dtype=z.dtype)
    found, nearest = Matches.of(z, prototypes, places, unit, grid), nearest_patches(z, prototypes)
    torch.testing.assert_close(found.distance, nearest.distance)
    apart = distance_map(z, prototypes)
    for photo, place in enumerate(places.tolist()):
        around = Box(*place).enlarge(1.0)
        for number in range(4):
            row, column = peak_places(apart[photo, number][None] / unit[number], nearest.patch[photo, number][None], 9)
            shown = peak_box(grid, float(row), float(column))
            assert found.squares[photo, number].tolist() == pytest.approx(shown.edges, abs=1e-3)
            squares = [peak_box(grid, *map(float, grid.place(patch))) for patch in range(grid.n_patches)]
            far = [patch for patch, square in enumerate(squares) if not overlap(square, around)]
            assert 0 < len(far) < grid.n_patches
            expected = apart[photo, number].flatten()[far].min()
            torch.testing.assert_close(found.elsewhere[photo, number], expected)
    small = Matches.of(
        z[:, :, :2, :2],
        prototypes,
        torch.full_like(places, 30.0) + torch.tensor([-9.0, -9, 9, 9]),
        unit,
        PatchGrid(rows=2, columns=2, side=60),
    )
    assert (small.elsewhere == 0).all(), "all patches are near the hidden place"


def overlap(one: Box, other: Box) -> bool:
    across = min(one.right, other.right) - max(one.left, other.left)
    return across > 0 and min(one.bottom, other.bottom) - max(one.top, other.top) > 0


def test_a_photo_shall_stay_where_something_else_is_hidden() -> None:
    assert loss([0.3, 0.9], [0.4, 0.9], BESIDE) == 0
    assert loss([0.3, 0.9], [0.6, 0.9], BESIDE) == pytest.approx(0.6 - 0.95 * 0.5)
    assert loss([0.3, 0.9], [0.4, 0.45], BESIDE) == pytest.approx(0.1 - 0.05, abs=1e-6)
    half = torch.tensor([[0.0, 0, 10, 3]])
    assert loss([0.3, 0.9], [0.6, 0.45], half) == 0, "neither hidden nor untouched"


def test_with_one_patch_out_of_reach_is_turned_away() -> None:
    matches = Matches(torch.tensor([[0.3, 0.9]]), SQUARES, NOWHERE)
    own = torch.tensor([[True, True]])
    far = hiding_loss(matches, torch.tensor([[0.6, 0.9]]), OVER, own, UNIT, "presence")
    assert float(far) == pytest.approx(0.1 - 0.1 + 0.0, abs=1e-6), "gone; the other stays with a lead of 0.1"
    near = hiding_loss(matches, torch.tensor([[0.4, 1.2]]), OVER, own, UNIT, "presence")
    assert float(near) == pytest.approx((1.15 * 0.5 - 0.4) + (1.2 - 0.95) + (0.1 + 0.2))


def test_the_gradient_takes_the_hidden_photo_away() -> None:
    after = torch.tensor([[0.4, 0.9]], requires_grad=True)
    hiding_loss(Matches(torch.tensor([[0.3, 0.9]]), SQUARES, NOWHERE), after, OVER, OWN, UNIT, "pairwise").backward()
    assert after.grad is not None
    assert after.grad.tolist() == [[-1.0, 0.0]]


@pytest.fixture
def maps(tiny_backbone: Backbone, tmp_path: Path) -> tuple[MapCache, MapCache]:
    """Of squares: both views that prototypes come from, and two hidden places of every second photo of each class."""
    data, preprocessing = open_data(write_squares(tmp_path / "squares", train=5)), tiny_backbone.preprocessing
    judged = cache_borders(
        tiny_backbone.unsplit(), ViewDataset(data.train, source_views, preprocessing), tmp_path / "cache"
    )
    grid = patch_grid(tiny_backbone.map_size, preprocessing.size, (1.0,))
    whole = judged.only([place for place, one in enumerate(judged.entries) if one.view == FULL])
    views = HiddenViews(occlusion_loss.striking_places(whole, grid, preprocessing))
    hidden = ViewDataset(data.train, views, preprocessing)
    return judged, cache_borders(tiny_backbone, hidden, tmp_path / "cache")


def test_every_second_photo_of_a_class_has_hidden_places(maps: tuple[MapCache, MapCache]) -> None:
    _, hidden = maps
    assert len(hidden.entries) == 3 * 3 * occlusion_loss.PLACES
    assert {one.sample.label for one in hidden.entries} == {0, 1, 2}
    for one in hidden.entries:
        assert isinstance(one.view, HiddenView)
        assert all(0 <= edge <= 1 for edge in one.view.place.edges)


def test_twins_are_the_same_photo_with_and_without(tiny_backbone: Backbone, maps: tuple[MapCache, MapCache]) -> None:
    judged, hidden = maps
    twins = OccludedPairs.of(judged, hidden, tiny_backbone.preprocessing)
    assert twins is not None
    assert len(twins) == len(hidden.entries)
    for plain, covered, edges in zip(twins.plain.entries, twins.hidden.entries, twins.places, strict=True):
        assert (plain.sample, plain.view) == (covered.sample, FULL)
        assert isinstance(covered.view, HiddenView)
        assert edges.tolist() == pytest.approx([64 * edge for edge in covered.view.place.edges], abs=1e-4)
    torch.manual_seed(0)
    pairs = twins.draw(WholeBatch(0, 4, 4), torch.device("cpu"))
    assert len(pairs.labels) == len(pairs.plain) == len(pairs.hidden) == occlusion_loss.PHOTOS_A_STEP
    assert (pairs.plain != pairs.hidden).flatten(1).any(dim=1).all()
    torch.manual_seed(0)
    parts = []
    for edges in ((0, 1), (1, 1), (1, 4)):  # three processes, one of which has no photo of the batch
        state = torch.get_rng_state()
        parts.append(twins.draw(WholeBatch(*edges, 4), torch.device("cpu")))
        torch.set_rng_state(state)
    assert [len(part.labels) for part in parts] == [2, 0, 6]
    assert torch.equal(torch.cat([part.hidden for part in parts]), pairs.hidden)


def test_photos_that_cannot_be_read_have_no_twin(tiny_backbone: Backbone, maps: tuple[MapCache, MapCache]) -> None:
    judged, hidden = maps
    first = next(place for place, one in enumerate(judged.entries) if one.sample == hidden.entries[0].sample)
    unread = MapCache(judged.files, judged.entries, frozenset({first}))
    twins = OccludedPairs.of(unread, hidden, tiny_backbone.preprocessing)
    assert twins is not None
    assert len(twins) == len(hidden.entries) - occlusion_loss.PLACES
    everything = MapCache(judged.files, judged.entries, frozenset(range(len(judged.entries))))
    assert OccludedPairs.of(everything, hidden, tiny_backbone.preprocessing) is None


N_PHOTOS, N_CHANNELS, CELLS, EPOCHS = 40, 256, 4, 60
NOISE = torch.tensor([1.0, 1.0, 0.1, 0.1])[:, None, None]  # marks are the harder ones to see


class MarksAndTraces(MapCache):
    """Made-up maps of two classes: one cell has a mark of the class and a trace of it, and hiding takes the mark."""

    def read(self, indices: Sequence[int], epoch: int) -> Inputs:
        chosen = [self.entries[index] for index in indices]
        numbers = torch.Generator().manual_seed(0)
        values = torch.zeros(N_PHOTOS, N_CHANNELS, CELLS, CELLS)
        values[:, :4] = torch.randn(N_PHOTOS, 4, CELLS, CELLS, generator=numbers) * NOISE
        values = values[[one.sample_index for one in chosen]]
        for row, one in enumerate(chosen):
            if not isinstance(one.view, HiddenView):
                values[row, one.sample.label, 1, 1] += 3
            values[row, 2 + one.sample.label, 1, 1] += 3
        labels = torch.tensor([one.sample.label for one in chosen])
        return Inputs(values, labels, torch.tensor(list(indices)))

    def only(self, places: Sequence[int]) -> MapCache:
        return MarksAndTraces((), tuple(self.entries[place] for place in places), frozenset())


def marks_and_traces() -> tuple[MarksAndTraces, MarksAndTraces]:
    """Plain, and with the mark hidden."""
    samples = [Sample(Path(f"{number}.png"), number % 2) for number in range(N_PHOTOS)]
    hidden = HiddenView("hidden", place=Box(0.25, 0.25, 0.5, 0.5), fill="blur", seed=0)
    plain, without_mark = (
        MarksAndTraces((), tuple(Entry(*pair, view) for pair in enumerate(samples)), frozenset())
        for view in (FULL, hidden)
    )
    return plain, without_mark


def test_a_tree_learns_to_need_what_it_shows(tiny_backbone: Backbone) -> None:
    (plain, hidden), kept = marks_and_traces(), {}
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        batches = CachedBatches(plain, 8, shuffle=True)
        twins = OccludedPairs.of(plain, hidden, tiny_backbone.preprocessing)
        tree = learn(tiny_backbone.unsplit(), batches, twins, weight)
        with torch.no_grad():
            near, far = (
                tree.route(tree.features.from_map(one.read(range(N_PHOTOS), 0).values)) for one in (plain, hidden)
            )
        right = [entry.sample.label for entry in plain.entries]
        assert (tree.decide(near).labels("greedy").tolist()) == right
        own = own_sides(tree, tree.leaf_logits.argmax(dim=1), torch.tensor(right))
        assert (near.distance <= LN2 * tree.reach)[own].float().mean() > 0.85
        kept[weight] = float((far.distance <= LN2 * tree.reach)[own].float().mean())
    assert kept[0.0] >= 0.2, f"the trace is often enough: {kept}"
    assert kept[1.0] < kept[0.0] / 2, f"it is not any more: {kept}"


def test_batch_norm_is_at_rest_while_a_tree_learns(tiny_backbone: Backbone) -> None:
    plain, hidden = marks_and_traces()
    batches, twins = CachedBatches(plain, 8, shuffle=True), OccludedPairs.of(plain, hidden, tiny_backbone.preprocessing)
    objective = objective_of(tiny_backbone.unsplit(), batches, twins, 1.0)
    norm = objective.tree.features.head.norm
    before = {name: value.clone() for name, value in norm.named_buffers()}
    learned = norm.weight.detach().clone()
    train(objective, batches, EPOCHS, Options())
    assert not norm.training
    assert all(torch.equal(before[name], value) for name, value in norm.named_buffers())
    assert not torch.equal(norm.weight, learned), "its gain and bias learn"


def learn(backbone: Backbone, batches: CachedBatches, twins: OccludedPairs | None, weight: float) -> ProtoTree:
    objective = objective_of(backbone, batches, twins, weight)
    train(objective, batches, EPOCHS, Options())
    objective.update_tree()
    return objective.tree


def objective_of(
    backbone: Backbone, batches: CachedBatches, twins: OccludedPairs | None, weight: float
) -> AnchoredObjective:
    recipe = Distill(hiding=weight, temperature=2.0, margin=1.0)
    features = FeatureExtractor(backbone, 8, head_hidden_dim=16)
    maps, _ = sample_maps(batches)
    standardise(features, maps)
    calibrate(features, maps, recipe.init_median_distance, torch.Generator().manual_seed(0))
    start = Start(Topology.full(1), torch.tensor([0, 1]), maps[1, :, 1, 1][None, :, None, None])
    tree = ProtoTree(start.topology, features, ["a", "b"], question=NodeFunction("presence", 6.0))
    probs = 0.9 * one_hot(torch.arange(N_PHOTOS) % 2, 2) + 0.05
    return AnchoredObjective(tree, batches, recipe, EPOCHS, SoftTargets(probs, 1.0), start, batches, twins)

"""The recipe `distill`: what each step promises, and that it learns."""

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core import checkpoint
from prototree.core.model import ProtoTree
from prototree.core.nodes import NodeFunction, NodeKind
from prototree.core.patches import nearest_patches
from prototree.core.topology import Topology
from prototree.data import open_data
from prototree.data.dataset import Sample
from prototree.data.loading import Entry, ViewDataset
from prototree.data.views import FULL, evaluation_views, source_views
from prototree.explain.tree import spreads_of
from prototree.features.batches import CachedBatches
from prototree.features.cache import Inputs, MapCache, cache_borders
from prototree.features.registry import maps_used
from prototree.pipeline.fit import fit
from prototree.training import anchored, class_hierarchy, grow
from prototree.training.baseline import load_baseline
from prototree.training.chance import WholeBatch
from prototree.training.memory_budget import Room
from prototree.training.objectives import LABEL_SMOOTHING, Cosine, SoftTargets
from prototree.training.recipes.distill import Distill, temperature_for
from tiny_training import NETWORK, TINY_DISTILL, assert_prototypes_are_their_patches, write_squares

SHORT = {"pretrain_epochs": 1, "head_epochs": 2, "epochs": 2}  # where nothing needs to be learned well


@pytest.fixture
def features(tiny_backbone: Backbone) -> FeatureExtractor:
    torch.manual_seed(0)
    return FeatureExtractor(tiny_backbone, 16, head_hidden_dim=8).eval()


@pytest.fixture
def maps(tiny_backbone: Backbone) -> torch.Tensor:
    return 5 + 3 * random_maps(1, 30, tiny_backbone.n_channels, 3, 3, dtype=torch.float32)


def test_standardised_channels_have_mean_zero_and_spread_one(features: FeatureExtractor, maps: torch.Tensor) -> None:
    grow.standardise(features, maps)
    head = grow.wide_head(features)
    seen = (maps - head.mean) / head.std
    torch.testing.assert_close(seen.mean(dim=(0, 2, 3)), torch.zeros(maps.shape[1]), atol=1e-4, rtol=0)
    torch.testing.assert_close(seen.std(dim=(0, 2, 3)), torch.ones(maps.shape[1]), atol=1e-3, rtol=0)


def test_at_rest_batch_norm_does_what_it_does_with_all_patches(features: FeatureExtractor, maps: torch.Tensor) -> None:
    head = grow.wide_head(features).double()
    grow.standardise(features, maps.double() - 3)  # so that means matter
    grow.rest_norm(features, maps.double())
    at_rest = head.eval()(maps.double())
    torch.testing.assert_close(at_rest, head.train()(maps.double()), rtol=0.01, atol=0.01)  # n − 1 against n
    spread = torch.cat([at_rest, head.eval()(2 * maps.double())]).std()
    assert spread > 0.1, "so that the tolerance means something"


def test_calibration_brings_the_median_distance_where_it_should_be(
    features: FeatureExtractor, maps: torch.Tensor
) -> None:
    grow.standardise(features, maps)
    grow.calibrate(features, maps, 0.7, torch.Generator().manual_seed(0))
    z = features.from_map(maps).detach()
    points = z.flatten(2).transpose(1, 2).flatten(0, 1)[::3][:, :, None, None]
    median = nearest_patches(z, points).distance.median().item()
    assert median == pytest.approx(0.7, abs=0.15)


def test_the_best_patch_of_each_class_counts() -> None:
    linear = torch.nn.Linear(4, 3)
    z = torch.rand(2, 6, 4, generator=torch.Generator().manual_seed(0))
    single = [linear(anchored.LOGIT_GAIN * z[:, patch]) for patch in range(6)]
    torch.testing.assert_close(anchored.best_patch_logits(linear, z), torch.stack(single).amax(dim=0))


def test_the_head_learns_to_know_classes_by_single_patches(features: FeatureExtractor, maps: torch.Tensor) -> None:
    labels = torch.arange(30) % 3
    inputs = Inputs(maps, labels, torch.arange(30))
    pace, losses = Cosine(1, 1), {}
    for weight in (0.0, 2.0):
        torch.manual_seed(0)
        objective = anchored.HeadObjective(features, 3, Distill(single_patch_loss_weight=weight, cutmix=0.0), pace)
        n_parameters = sum(parameter.numel() for parameter in objective.groups(0)[0].parameters)
        assert n_parameters == sum(p.numel() for p in objective.parameters() if p.requires_grad) - sum(
            p.numel() for p in features.backbone.parameters() if p.requires_grad
        )
        objective.train()
        pooled, *by_patch = objective(maps)
        losses[weight], _ = objective.loss((pooled, *by_patch), inputs)
        plain, _ = objective.loss((pooled,), inputs)
        expected = plain + sum(
            weight * cross_entropy(logits, labels, reduction="none", label_smoothing=LABEL_SMOOTHING)
            for logits in by_patch
        )
        torch.testing.assert_close(losses[weight], expected)
        assert len(by_patch) == bool(weight)
        assert len(objective.eval()(maps)) == 1  # the teacher is the pooled classifier alone


@pytest.mark.parametrize(("n_classes", "expected"), [(2, 2.5), (12, 2.5), (50, 2.5), (200, 1.95), (10_000, 1.47)])
def test_the_temperature_follows_the_number_of_classes(n_classes: int, expected: float) -> None:
    temperature = temperature_for(n_classes)
    assert temperature == pytest.approx(expected, abs=0.01)
    if n_classes > 50:  # what the softened teacher keeps for its answer
        lead = np.log(9 * n_classes)
        assert 1 / (1 + (n_classes - 1) * np.exp(-lead / temperature)) == pytest.approx(0.19, abs=0.005)


def test_information_gain_prefers_the_question_that_tells_the_sides_apart() -> None:
    right = torch.tensor([True, True, False, False])
    distance = torch.tensor([[0.1, 0.1, 0.5], [0.2, 0.9, 0.5], [0.9, 0.2, 0.5], [0.8, 0.8, 0.5]])
    gain = grow.information_gain(distance, right)
    assert gain.argmax() == 0
    assert gain[0].item() == pytest.approx(np.log(2), abs=1e-4)
    assert gain[2].item() == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("question", ["presence", "pairwise"])
def test_the_first_tree_has_one_leaf_a_class_and_real_patches(
    features: FeatureExtractor, maps: torch.Tensor, question: NodeKind
) -> None:
    labels = torch.arange(30) % 6
    for label in range(6):  # each class has a patch of its own
        maps[labels == label, label * 7 : label * 7 + 7, 1, 1] += 40
    grow.standardise(features, maps)
    again = copy.deepcopy(features)
    start = grow.grow(features, maps, labels, question, max_mean_depth=9.0, init_median_distance=0.7, seed=0)
    # Without room for all distances each node measures for itself, and chooses the same.
    other = grow.grow(
        again, maps, labels, question, max_mean_depth=9.0, init_median_distance=0.7, seed=0, room=Room(0.0)
    )
    assert torch.equal(start.anchors, other.anchors)
    assert start.topology.left.tolist() == other.topology.left.tolist()
    assert sorted(start.leaf_class.tolist()) == list(range(6))
    each = 1 if question == "presence" else 2
    assert len(start.anchors) == each * start.topology.n_nodes
    patches = maps.flatten(2).transpose(1, 2).flatten(0, 1)
    for anchor in start.anchors[:, :, 0, 0]:
        assert (patches == anchor).all(dim=1).any()
    assert len(torch.unique(start.anchors.flatten(1), dim=0)) == len(start.anchors), "one patch, one prototype"


def _groups(points: np.ndarray, n_groups: int) -> list[list[int]]:
    found = class_hierarchy.Dendrogram.of(points)
    return [found.classes(cluster) for cluster in found.groups(found.everything, n_groups)]


def test_wards_groups_are_the_clusters_that_are_there() -> None:
    random = np.random.default_rng(0)
    centres = 100 * np.eye(4)
    points = np.concatenate([centres[k] + random.normal(size=(3 + k, 4)) for k in range(4)])
    assert sorted(map(tuple, _groups(points, 4))) == [
        (0, 1, 2),
        (3, 4, 5, 6),
        (7, 8, 9, 10, 11),
        tuple(range(12, 18)),
    ]
    assert len(_groups(points, 1)) == 1
    assert len(_groups(points, 100)) == 18


def test_cutmix_mixes_by_patches_and_tells_the_share() -> None:
    rows = torch.arange(4.0)[:, None, None].expand(4, 9, 2)
    mixed, partner, own = WholeBatch.around(rows).cutmix(rows)
    for image in range(4):
        kept = (mixed[image, :, 0] == rows[image, :, 0]).float().mean()
        assert (mixed[image, :, 0] == mixed[image, :, 1]).all(), "patches, not single numbers"
        if partner[image] != image:
            assert own[image].item() == pytest.approx(kept.item())
            assert set(mixed[image].unique().tolist()) <= {float(image), float(partner[image])}


@pytest.mark.parametrize(("n_views", "epochs"), [(3, 200), (4494, 12), (1_000_000, 6)])
def test_small_data_is_seen_more_often(n_views: int, epochs: int) -> None:
    assert Distill()._tree_epochs(n_views, 1.0) == epochs


@pytest.mark.parametrize("n_classes", [1, 2, 3, 5, 12, 50, 200, 500])
def test_the_hierarchy_holds_every_class_once_within_reach(n_classes: int) -> None:
    means = np.random.default_rng(0).normal(size=(n_classes, 6))
    found = class_hierarchy.hierarchy(means, 9.0)
    assert sorted(class_hierarchy.classes_in(found)) == list(range(n_classes))
    assert class_hierarchy.max_mean_depth(found) <= max(9.0, np.log2(n_classes) + 1.5)


def test_the_mean_path_counts_decisions() -> None:
    assert class_hierarchy.max_mean_depth([0, 1]) == 1
    assert class_hierarchy.max_mean_depth([0, 1, 2]) == pytest.approx((1 + 2 + 2) / 3)
    assert class_hierarchy.max_mean_depth([[0, 1], [2, 3]]) == 2
    assert class_hierarchy.max_mean_depth(0) == 0


def test_misses_ask_each_turn_for_its_side_and_no_more(tiny_backbone: Backbone) -> None:
    # node 0: right is class 2; left is node 1: right is class 1, left is class 0
    topology, _, leaf_ids = Topology.from_children([1, ~0], [~2, ~1])
    tree = ProtoTree(topology, FeatureExtractor(tiny_backbone, 4), 3)
    tree.leaf_logits.copy_(10 * torch.nn.functional.one_hot(torch.tensor([0, 1, 2])[leaf_ids], 3))
    turns = anchored.Turns.of(tree)
    satisfied = torch.tensor([[1.0, 1.0], [1.0, 0.5], [0.5, 0.0]])
    near, far = torch.full((2,), 0.5), torch.ones(2)
    assert turns.misses(satisfied, torch.arange(3), near, far).tolist() == [0, 0, 0]
    wrong = torch.tensor([[0.25, 0.25], [0.25, 0.75], [0.75, 3.0]])
    assert turns.misses(wrong, torch.arange(3), near, far).tolist() == [1.5, 1.0, 0.25]


def test_halves_part_every_class_from_every_other() -> None:
    means = np.random.default_rng(0).normal(size=(13, 4))
    found = class_hierarchy.halves(means)
    assert sorted(class_hierarchy.classes_in(found)) == list(range(13))
    assert class_hierarchy.max_mean_depth(found) < 6


@pytest.mark.parametrize(("share", "value"), [(-1.0, 2.0), (0.0, 2.0), (0.25, 3.0), (1.0, 6.0), (7.0, 6.0)])
def test_values_rise_from_one_end_to_the_other_and_stay(share: float, value: float) -> None:
    assert anchored.between(2.0, 6.0, share) == value


def test_choosing_sees_every_class_even_where_memory_is_short(tiny_backbone: Backbone, tmp_path: Path) -> None:
    data = open_data(write_squares(tmp_path / "squares"))
    dataset = ViewDataset(data.train, source_views, tiny_backbone.preprocessing)
    cache = cache_borders(tiny_backbone.unsplit(), dataset, tmp_path / "cache")
    sources = CachedBatches(cache, 8, shuffle=False)
    _, labels = grow.sample_maps(sources, Room(0.0))
    assert labels.bincount().tolist() == [2, 2, 2]
    assert len(grow.sample_maps(sources)[0]) == len(dataset)


@pytest.mark.parametrize("memory", [0.0, 1.4])
def test_without_memory_answers_go_to_a_file_and_distances_are_measured_again(
    tiny_backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: float
) -> None:
    data, recipe = open_data(write_squares(tmp_path / "squares")), Distill(memory=memory, temperature=2.0)
    dataset = ViewDataset(data.train, source_views, tiny_backbone.preprocessing)
    sources = CachedBatches(cache_borders(tiny_backbone.unsplit(), dataset, tmp_path / "cache"), 8, shuffle=False)
    features = FeatureExtractor(tiny_backbone, 16, head_hidden_dim=8)
    maps, labels = grow.sample_maps(sources)
    grow.standardise(features, maps)
    head = anchored.HeadObjective(features, 3, recipe, Cosine(1, sources.n_batches))
    probs = head.probs(sources, recipe.temperature, tmp_path)
    assert isinstance(probs, torch.Tensor) == bool(memory)
    start = grow.grow(features, maps, labels, "pairwise", recipe.max_mean_depth, recipe.init_median_distance, 0)
    tree = ProtoTree(start.topology, features, data.class_names, question=NodeFunction("pairwise", 6.0))
    objective = anchored.AnchoredObjective(tree, sources, recipe, 1, SoftTargets(probs, 1.0), start, sources)
    objective.update_tree()
    reads, read = list[int](), MapCache.read
    monkeypatch.setattr(MapCache, "read", lambda *those: reads.append(1) or read(*those))
    for _ in range(2):
        objective.sweep_labels(lambda routed, target: None)
    assert len(reads) == (0 if memory else 2 * sources.n_batches)


def test_a_tree_of_presences_learns_too(tmp_path: Path) -> None:
    photos = write_squares(tmp_path / "squares", train=20, test=6)
    run = fit(photos, tmp_path / "run", settings=TINY_DISTILL | {"question": "presence"})
    found = run.metrics["stages"]["projected"]
    assert found["accuracy"]["soft"] >= 0.8
    assert found["n_prototypes"] == 2
    assert not torch.equal(run.tree().reach, torch.ones(2)), "reaches are learned"
    assert_prototypes_are_their_patches(run)


def test_a_warm_run_learns_and_projection_moves_nothing(tmp_path: Path) -> None:
    photos = write_squares(tmp_path / "squares", train=20, test=6)
    run = fit(photos, tmp_path / "run", settings=TINY_DISTILL)
    found = run.metrics["stages"]["projected"]
    assert found["accuracy"]["soft"] >= 0.8
    assert found["n_prototypes"] == 4
    assert run.metrics["projection"]["mean_distance"] < 0.02, "the cache rounds to float16, nothing else differs"
    assert found["accuracy"] == run.metrics["stages"]["pruned"]["accuracy"]
    assert run.tree().features.backbone.crops == (1.0, 0.7)
    assert len(maps_used(run.folder)) == 7, "sources, test photos and hidden places at two looks, varied views at one"
    assert_prototypes_are_their_patches(run)
    spreads = spreads_of(run, run.tree())  # a decision is shown among the training photos before the first report
    assert sorted(spreads) == [0, 1]
    assert all(sum(one.right) and sum(one.left) for one in spreads.values())

    # The classifier that taught it is judged beside it.
    tree, data = run.tree(), open_data(photos)
    baseline = load_baseline(tree.features, 3, run.folder)
    assert baseline is not None
    views = ViewDataset(data.test, evaluation_views, tree.preprocessing)
    with torch.no_grad():
        said = baseline(tree.features.backbone(torch.stack([views[i].image for i in range(len(views))]))).argmax(dim=1)
    right = [int(label) == sample.label for label, sample in zip(said, data.test, strict=True)]
    assert run.metrics["classifier"] == sum(right) / len(right) >= 0.8


def test_the_same_again_and_what_is_continued_have_the_same_weights(tmp_path: Path) -> None:
    photos = write_squares(tmp_path / "squares", train=4, test=1)
    first = fit(photos, tmp_path / "run", settings=TINY_DISTILL | SHORT, stages=["train"])
    expected = checkpoint.load(first.folder / "trained").state_dict()
    continued = fit(photos, tmp_path / "run", settings=TINY_DISTILL | SHORT, resume=True, stages=["train"])
    again = fit(photos, tmp_path / "again", settings=TINY_DISTILL | SHORT, stages=["train"])
    for other in (checkpoint.load(run.folder / "trained").state_dict() for run in (continued, again)):
        assert [name for name in expected if not torch.equal(expected[name], other[name])] == []


@pytest.mark.parametrize("train", [1, 2])
def test_two_classes_and_a_photo_of_each_are_enough_to_run(tmp_path: Path, train: int) -> None:
    photos = write_squares(tmp_path / "squares", train=train, test=1)
    for split in ("train", "test"):
        shutil.rmtree(photos / split / "blue")
    run = fit(photos, tmp_path / "run", settings=TINY_DISTILL | SHORT)
    assert run.metrics["stages"]["projected"]["n_prototypes"] == 2


def test_a_pretrained_backbone_is_tuned_at_its_own_rate(tmp_path: Path) -> None:
    photos = write_squares(tmp_path / "squares", train=4, test=2)
    torch.manual_seed(1)
    weights = tmp_path / "weights.safetensors"
    save_file(Backbone(NETWORK, None, image_size=32).net.state_dict(), weights)
    settings = TINY_DISTILL | {"weights": str(weights), "pretrain_epochs": 2, "head_epochs": 1, "epochs": 1}
    before = Backbone(NETWORK, str(weights), image_size=32, feature_level=-3).net.conv_stem.weight
    moved = []
    for rate in (0.0, 1e-4, 1e-2):
        run = fit(photos, tmp_path / f"{rate}", settings=settings | {"lr_pretrain": rate}, stages=["train"])
        now = run.tree().features.backbone.net.conv_stem.weight
        tuned = checkpoint.read_state(run.folder / "pretrained", "state.json")[1]["model.backbone.net.conv_stem.weight"]
        torch.testing.assert_close(now, (before + tuned) / 2, msg="half way back")
        moved.append((now - before).abs().mean().item())
    assert moved[0] == 0
    assert 0 < moved[1] < 2e-3
    assert moved[2] > 5 * moved[1]


def test_too_few_photos_to_learn_how_sure_answers_are_is_said(caplog: pytest.LogCaptureFixture) -> None:
    photos = [Entry(i, Sample(Path(f"{i}.jpg"), i % 6), FULL) for i in range(96)]
    maps: Any = SimpleNamespace(plain=SimpleNamespace(entries=photos))
    assert Distill()._held(maps) == frozenset()
    assert "that takes 20 photos to hold out, and one in 5 of each class gives 18" in caplog.text

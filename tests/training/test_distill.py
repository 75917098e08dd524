"""The default recipe: what each step promises, and that it learns."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from conftest import random_maps
from prototree.core import leaves
from prototree.core.model import ProtoTree
from prototree.core.nodes import NodeFunction
from prototree.core.projection import side_classes
from prototree.core.topology import Topology
from prototree.data import open_data
from prototree.data.crops import evaluation_views
from prototree.data.loader import ViewDataset
from prototree.evaluation.tables import baseline_text
from prototree.features.cache import files_used
from prototree.pipeline.fit import fit
from prototree.run import Run
from prototree.training import distill
from prototree.training.head import load_baseline
from tiny_training import (
    TINY_DISTILL,
    Crash,
    PowerCutError,
    assert_prototypes_are_their_patches,
    assert_same,
    feature_maps,
    tiny_context,
    weights_of,
    write_squares,
)

SHORT = TINY_DISTILL | {"pretrain_epochs": 1, "head_epochs": 2, "epochs": 2, "calibration_fraction": 0.5}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("distill")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(folder / "cache"))
        return fit(write_squares(folder / "squares", train=20, test=6), folder / "run", settings=TINY_DISTILL)


def test_a_run_learns_and_projection_moves_nothing(run: Run) -> None:
    metrics = run.metrics["stages"]["projected"]
    assert metrics["accuracy"]["soft"] >= 0.8
    assert metrics["n_prototypes"] == 4
    assert run.metrics["projection"]["mean_distance"] < 0.02, "the cache rounds to float16, nothing else differs"
    assert metrics["accuracy"] == run.metrics["stages"]["pruned"]["accuracy"]
    assert run.tree().features.backbone.crops == (1.0, 0.7)
    assert_prototypes_are_their_patches(run)
    # Sources, test images and occluded ones at two crops each, varied views at one.
    assert len(files_used(run.folder)) == 7


def test_the_baseline_is_measured_beside_the_tree(run: Run) -> None:
    tree, data = run.tree(), open_data(run.metrics["source"])
    baseline = load_baseline(tree.features, 3, run.folder)
    assert baseline is not None
    views = ViewDataset(data.test, evaluation_views, tree.preprocessing)
    with torch.no_grad():
        logits = baseline(tree.features.backbone(torch.stack([views[i].image for i in range(len(views))])))
    right = [int(label) == sample.label for label, sample in zip(logits.argmax(dim=1), data.test, strict=True)]
    assert run.metrics["baseline_accuracy"] == sum(right) / len(right) >= 0.8
    assert baseline_text(run.metrics) in (run.folder / "results.md").read_text()
    assert baseline_text(run.metrics)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("undisturbed")
    images = write_squares(folder / "squares", train=14, test=1)
    return fit(images, folder / "run", settings=SHORT, stages=["train"])


SLOW = [pytest.param(epochs, marks=pytest.mark.slow) for epochs in (0, 2, 6)]


@pytest.mark.parametrize("epochs_done", [4, 8, *SLOW])  # of 1 + 2 + 2 + 2 + 2: backbone, head, tree, and a second tree
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(
    undisturbed: Run, tmp_path: Path, epochs_done: int
) -> None:
    train = partial(fit, undisturbed.source, tmp_path / "run", settings=SHORT, stages=["train"])
    expected = undisturbed.tree("trained")
    with pytest.raises(PowerCutError):
        train(observer=Crash("epoch", epochs_done))
    resumed = train(resume=True).tree("trained")
    assert_same(weights_of(resumed), weights_of(expected))
    assert (resumed.calibration, resumed.node_function) == (expected.calibration, expected.node_function)
    assert resumed.calibration.n_images == 21


@pytest.mark.parametrize(("train", "batch_size"), [(1, 8), (2, 1)])
def test_two_classes_and_an_image_of_each_are_enough(
    tmp_path: Path, train: int, batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    images = write_squares(tmp_path / "squares", train=train, test=1)
    for split in ("train", "test"):
        shutil.rmtree(images / split / "blue")
    run = fit(images, tmp_path / "run", settings=SHORT | {"batch_size": batch_size})
    assert run.metrics["stages"]["projected"]["n_prototypes"] == 2
    assert "the confidence is not calibrated" in caplog.text


def test_unreadable_images_are_left_out_even_of_whole_batches(tmp_path: Path) -> None:
    data = open_data(write_squares(tmp_path / "squares", train=3, test=1))
    broken = data.train[1].path
    broken.write_bytes(broken.read_bytes()[:1000])
    tree = distill.train(
        context := tiny_context(tmp_path / "run", data, **SHORT | {"batch_size": 1}), context.config.recipe
    )
    assert tree.leaf_logits.sum().item() == pytest.approx(16, rel=1e-3), "two views of eight images"


def leaf_class_tree(tiny_tree: ProtoTree, leaf_class: list[int], count: float) -> ProtoTree:
    topology = Topology.from_children([1, ~0], [~2, ~1])[0]
    tree = ProtoTree(topology, tiny_tree.features, 3, node_function=NodeFunction("pairwise", 6.0))
    tree.leaf_logits.data.zero_().scatter_(1, torch.tensor(leaf_class)[:, None], count)
    return tree


@pytest.mark.parametrize("count", [0.5, 8.0, 300.0])
@pytest.mark.parametrize("leaf_class", [[2, 0, 1], [0, 1, 1]])  # one leaf per class, and an edited tree
def test_the_short_form_of_eq_4_is_eq_4(tiny_tree: ProtoTree, leaf_class: list[int], count: float) -> None:
    tree = leaf_class_tree(tiny_tree, leaf_class, count)
    log_path_probs = random_maps(0, 7, 3, dtype=torch.float32).log_softmax(dim=1)
    result = distill.eq_4(tree, torch.tensor(leaf_class), count)(log_path_probs)
    expected = leaves.log_predict(log_path_probs, leaves.class_log_probs(tree.leaf_logits.detach()))
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-5)


def test_a_radius_reaches_95_of_100_images_of_its_side(tiny_tree: ProtoTree) -> None:
    tree, labels = leaf_class_tree(tiny_tree, [0, 1, 2], 9.0), torch.arange(300) % 3
    distance = random_maps(0, 300, 4, dtype=torch.float32)
    distill.fit_distance_p95(tree, zip(distance.split(100), labels.split(100), strict=True))
    left, right = side_classes(tree)
    for row, classes in enumerate(torch.cat([right, left])):
        side = distance[classes[labels], row]
        assert tree.distance_p95[row].item() == pytest.approx(torch.quantile(side, 0.95).item())
    torch.testing.assert_close(tree.radius, tree.distance_p95)


def test_excluded_images_are_in_none_of_the_maps() -> None:
    maps = feature_maps(random_maps(0, 6, 2, 1, 1, dtype=torch.float32), [0, 1, 2, 0, 1, 2])
    features = distill.Features(maps, maps, (1.0,), maps).select(
        lambda entry: None if entry.sample_index in {1, 4} else entry.sample_index
    )
    for part in (features.prototypes, features.train, features.occluded):
        assert part is not None
        assert [entry.sample_index for entry in part.entries] == [0, 2, 3, 5]


def test_images_of_rare_classes_are_seen_more_often() -> None:
    labels = [0] * 50 + [1] * 12 + [2]
    maps = feature_maps(random_maps(0, 63, 2, 1, 1, dtype=torch.float32), labels, frozenset({55}))
    seen = distill.oversample(maps, 3)
    labels_seen = [entry.sample.label for entry in seen.entries]
    assert [labels_seen.count(label) for label in range(3)] == [50, 24, 7]
    assert len(seen.unreadable) == 2
    assert torch.equal(seen.read(range(len(seen.entries) - 7, len(seen.entries))).values, maps.read([62] * 7).values)
    even = feature_maps(random_maps(0, 6, 2, 1, 1, dtype=torch.float32), [0, 1, 2] * 2)
    assert distill.oversample(even, 3) is even


@pytest.mark.parametrize(
    ("n_views", "n_classes", "epochs"), [(3, 3, 200), (3600, 50, 15), (100_000, 50, 12), (13_500, 200, 16)]
)
def test_small_data_and_many_classes_are_seen_more_often(n_views: int, n_classes: int, epochs: int) -> None:
    maps = feature_maps(torch.zeros(n_views, 1, 1, 1), [0] * n_views)
    assert distill._epochs_for(distill._TREE_VIEWS, maps, n_classes, distill._MIN_TREE_EPOCHS) == epochs

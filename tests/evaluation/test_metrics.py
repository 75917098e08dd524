"""Metrics of trees and ensembles recomputed by independent slow loops, and wrong predictions made by hand."""

import copy
import dataclasses
import json
import math
import statistics
from pathlib import Path

import pytest
import torch

import oracle
from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.confidence import Calibration
from prototree.core.ensemble import Ensemble
from prototree.core.model import ProtoTree, TreePrediction
from prototree.core.nodes import NodeFunction, NodeKind
from prototree.core.pruning import prune
from prototree.core.topology import Topology
from prototree.errors import ConfigError, DataError
from prototree.evaluation import plots
from prototree.evaluation.metrics import (
    ErrorCollector,
    ImagePredictions,
    compute_metrics,
    ensemble_metrics,
    evaluate_all,
    evaluate_maps,
)
from prototree.evaluation.schema import read_metrics
from prototree.evaluation.tables import class_table, confusion_pairs
from prototree.io import MAX_TEXT_BYTES, write_json

N, K = 40, 7


@pytest.fixture
def tree(tiny_backbone: Backbone) -> ProtoTree:
    tree = ProtoTree(Topology.full(3), FeatureExtractor(tiny_backbone, 4), K)
    tree.prototypes.data = random_maps(1, 7, 4, 1, 1)
    tree.leaf_logits.data = (9 * random_maps(2, 8, K)).square() / 9
    tree.leaf_logits.data[3] = 0
    return prune(tree, 0.2).tree  # paths of different lengths


@pytest.fixture
def data() -> list[tuple[torch.Tensor, ...]]:
    z, labels = random_maps(3, N, 4, 2, 2), torch.arange(N) % (K - 1)  # the last class has no test image
    return list(zip(z.split(16), labels.split(16), torch.arange(N).split(16), strict=True))


def test_every_metric_by_a_slow_loop(tree: ProtoTree, data: list[tuple[torch.Tensor, ...]]) -> None:
    found = evaluate_maps(tree, data)
    z = torch.cat([batch[0] for batch in data])
    labels = torch.cat([batch[1] for batch in data]).tolist()
    p, c, topology = tree.prototypes.detach(), tree.leaf_logits.detach(), tree.topology
    pi, sigma, ways = oracle.path_probs(z, p, topology), oracle.softmax(c), oracle.routes(topology)
    y_hat = oracle.prediction(pi, c)
    leaf = {"max_path": oracle.max_path(pi), "greedy": [oracle.greedy(image, p, topology) for image in z]}
    said = {"soft": [int(row.argmax()) for row in y_hat]}
    said |= {s: [int(sigma[ell].argmax()) for ell in leaves] for s, leaves in leaf.items()}

    def share(hits: list[bool]) -> float:
        return sum(hits) / N

    for strategy, labels_said in said.items():
        assert found.accuracy[strategy] == share([a == b for a, b in zip(labels_said, labels, strict=True)])
    for strategy, leaves in leaf.items():
        agree = [a == b for a, b in zip(said[strategy], said["soft"], strict=True)]
        assert found.fidelity[strategy] == share(agree)
        lengths = [len(ways[ell]) for ell in leaves]
        path = found.path_length[strategy]
        assert (path.min, path.max) == (min(lengths), max(lengths))
        assert path.mean == pytest.approx(statistics.fmean(lengths))
        assert path.std == pytest.approx(statistics.pstdev(lengths))
    top5 = [
        label in sorted(range(K), key=lambda k: -row[k].item())[:5] for row, label in zip(y_hat, labels, strict=True)
    ]
    assert found.top5 == share(top5)
    confusion = [[0] * K for _ in range(K)]
    for label, prediction in zip(labels, said["greedy"], strict=True):
        confusion[label][prediction] += 1
    assert found.confusion == [(k, j, n) for k, row in enumerate(confusion) for j, n in enumerate(row) if n]
    assert found.class_accuracy == [row[k] / sum(row) if sum(row) else None for k, row in enumerate(confusion)]
    assert found.class_accuracy[-1] is None
    error = 0.0
    for b in range(15):
        inside = [i for i in range(N) if min(int(y_hat[i].max() * 15), 14) == b]
        if inside:
            accuracy = statistics.fmean(float(said["soft"][i] == labels[i]) for i in inside)
            confidence = statistics.fmean(y_hat[i].max().item() for i in inside)
            error += len(inside) / N * abs(accuracy - confidence)
    assert found.ece == pytest.approx(error, abs=1e-6)
    assert found.leaf_max_probs == pytest.approx([row.max().item() for row in sigma])
    assert sum(found.leaf_max_hist) == found.n_leaves == topology.n_leaves
    assert (found.n_images, found.n_prototypes) == (N, topology.n_nodes)
    assert json.loads(json.dumps(found.to_json()))["accuracy"] == found.accuracy


def test_several_trees_are_judged_in_one_pass(tree: ProtoTree, data: list[tuple[torch.Tensor, ...]]) -> None:
    smaller = prune(tree, 0.6).tree
    once = iter(data)  # can be read only once
    both = evaluate_all({"large": tree, "small": smaller}, once)
    assert both["large"] == evaluate_maps(tree, data)
    assert both["small"] == evaluate_maps(smaller, data)
    leaf = tree.with_topology(*tree.topology.keep_leaves(torch.arange(tree.topology.n_leaves).eq(1).numpy()))
    found = evaluate_maps(leaf, data)
    assert (found.path_length["greedy"].max, found.fidelity) == (0, {"max_path": 1.0, "greedy": 1.0})


def test_nothing_to_evaluate_on(tree: ProtoTree) -> None:
    with pytest.raises(DataError):
        evaluate_maps(tree, [])
    with pytest.raises(DataError):
        ensemble_metrics(Ensemble([tree]), [])


def test_thousands_of_classes_are_measured_written_and_read_again(tmp_path: Path) -> None:
    k, m = 3_000, 9_000
    features = FeatureExtractor(Backbone("resnet18", None, image_size=32, feature_level=-3), 4)
    label, said = (torch.randint(k, (m,), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    said[: m // 2] = label[: m // 2]
    whole, share = torch.zeros(m, dtype=torch.long), torch.zeros(m)
    numbers = (whole, whole, share, share, share, whole.bool(), whole.bool())
    predicted = ImagePredictions(torch.arange(m), label, said, said, said, *numbers)
    found = compute_metrics(ProtoTree(Topology.full(2), features, k), predicted)
    metrics = {"version": 1, "classes": [f"class {i}" for i in range(k)], "stages": {"projected": found.to_json()}}
    write_json(tmp_path / "metrics.json", metrics)
    again = read_metrics(tmp_path)
    assert sum(count for _, _, count in confusion_pairs(again, "projected")) == m
    table = class_table(again, "projected")
    assert len(table.rows) == sum(share is not None for share in found.class_accuracy) > 2700
    assert len(table.to_markdown()) < MAX_TEXT_BYTES
    matrix = plots.confusion(confusion_pairs(again, "projected"), again["classes"], "")
    assert matrix.axes[0].images[0].get_size()[0] <= 1000


def tree_of_four(backbone: Backbone) -> ProtoTree:
    """Leaf k says class k; each prototype asks for one channel, so that a map sets each similarity by hand."""
    tree = ProtoTree(Topology.full(2), FeatureExtractor(backbone, 3), 5)
    tree.prototypes.data = torch.eye(3)[:, :, None, None] * 10
    tree.leaf_logits.data = torch.eye(4, 5) * 20
    return tree


def map_with(*similarities: float) -> torch.Tensor:
    """One patch for each node, at the distance that gives this similarity; far from the other prototypes."""
    patches = [torch.eye(3)[node] * (10 + math.log(s)) for node, s in enumerate(similarities)]
    return torch.stack(patches, dim=1)[None, :, None]  # 1 3 1 3


def test_the_responsible_node_is_where_the_path_left_that_of_the_true_class(tiny_backbone: Backbone) -> None:
    finder = ErrorCollector(tree_of_four(tiny_backbone))
    # Goes left at the root (0.2), then right at node 1 (0.9): leaf 1. The similarity at node 2 is 0.6.
    feature_map = map_with(0.2, 0.9, 0.6)
    maps = [(feature_map.repeat(4, 1, 1, 1), torch.arange(4), torch.arange(4))]
    assert list(finder.watch(maps)) == maps
    by_label = {error.label: error for error in finder.errors}
    assert set(by_label) == {0, 2, 3}
    assert all(error.prediction == 1 for error in finder.errors)
    assert (by_label[0].node, by_label[0].goes_right) == (1, True)
    assert by_label[0].p_right == pytest.approx(0.9, abs=1e-5)
    assert by_label[0].margin == pytest.approx(math.log(0.9 / 0.1), abs=1e-4)
    assert (by_label[3].node, by_label[3].goes_right) == (0, False)
    assert by_label[3].p_right == pytest.approx(0.2, abs=1e-5)
    assert by_label[3].margin == pytest.approx(math.log(0.8 * 0.9 / (0.2 * 0.6)), abs=1e-4)
    by_node = finder.by_node()
    assert [(b.node, b.n_errors, b.n_goes_right) for b in by_node] == [(0, 2, 0), (1, 1, 1)]
    assert by_node[0].mean_abs_margin == pytest.approx(0.3, abs=1e-5)


def test_errors_are_written_in_the_order_of_the_data_with_nodes_counted_from_1(tiny_backbone: Backbone) -> None:
    finder = ErrorCollector(tree_of_four(tiny_backbone))
    finder.update(map_with(0.2, 0.9, 0.6).repeat(3, 1, 1, 1), torch.tensor([0, 4, 3]), torch.tensor([7, 5, 6]))
    content = finder.to_json()
    assert [(image["index"], image["node"]) for image in content["images"]] == [(5, None), (6, 1), (7, 2)]
    assert content["images"][0]["margin"] is None, "no leaf stands for class 4"
    assert [node["node"] for node in content["nodes"]] == [1, 2]
    assert content["node_kind"] == "presence"


@pytest.fixture
def trees(tiny_tree: ProtoTree) -> list[ProtoTree]:
    others = []
    for seed in (1, 2):
        tree = tiny_tree.with_topology(*tiny_tree.topology.keep_leaves(torch.arange(8).ne(seed).numpy()))
        tree.leaf_logits.data = 5 * torch.rand(7, 5, generator=torch.Generator().manual_seed(seed))
        others.append(tree)
    return [tiny_tree, *others]


@pytest.mark.parametrize("strategy", ["soft", "max_path"])
def test_probabilities_are_averaged_not_their_logarithms(trees: list[ProtoTree], strategy: str) -> None:
    images = torch.rand(4, 3, 64, 64)
    expected = sum(tree.predict(images).class_probs(strategy) for tree in trees) / 3  # they ask as the paper's do
    torch.testing.assert_close(Ensemble(trees).class_probs(images, strategy), expected)
    torch.testing.assert_close(expected.sum(dim=1), torch.ones(4))


def test_a_greedy_path_counts_as_much_as_its_tree_is_sure_of_it(trees: list[ProtoTree]) -> None:
    images = torch.rand(4, 3, 64, 64)
    trees[1].calibration, trees[2].calibration = Calibration(0.0, 2.0), Calibration(0.0, -2.0)  # always 88 %, 12 %
    found = Ensemble(trees[1:]).class_probs(images, "greedy")
    sure, unsure = (tree.predict(images).class_probs("greedy") for tree in trees[1:])
    weight = torch.sigmoid(torch.tensor(2.0))
    torch.testing.assert_close(found, weight * sure + (1 - weight) * unsure)


@pytest.mark.parametrize(
    ("kind", "own", "in_vote"), [("pairwise", 8.0, 4.0), ("presence", 6.0, 3.0), ("presence", 1.5, 1.0)]
)
def test_in_a_vote_questions_are_half_as_sharp_but_alone_they_are_not(
    tiny_tree: ProtoTree, kind: NodeKind, own: float, in_vote: float
) -> None:
    def tree_of(sharpness: float) -> ProtoTree:
        generator, node_function = torch.Generator().manual_seed(0), NodeFunction(kind, sharpness)
        options = {"generator": generator, "node_function": node_function}
        tree = ProtoTree(tiny_tree.topology, tiny_tree.features, 5, **options)
        tree.leaf_logits.data = 5 * torch.rand(8, 5, generator=torch.Generator().manual_seed(1))
        return tree.eval()

    images = torch.rand(4, 3, 64, 64)
    sharp, soft = tree_of(own), tree_of(in_vote)
    assert not torch.allclose(sharp.predict(images).soft, soft.predict(images).soft)
    torch.testing.assert_close(Ensemble([sharp, sharp]).class_probs(images), soft.predict(images).soft)
    torch.testing.assert_close(Ensemble([sharp]).class_probs(images), sharp.predict(images).soft)


def test_trees_that_do_not_fit_together_are_refused(trees: list[ProtoTree]) -> None:
    names = trees[0].class_names
    for trees[2].class_names in ((*names[:4], "magpie"), (*names[1:], names[0])):
        with pytest.raises(ConfigError):
            Ensemble(trees)
    with pytest.raises(ConfigError):
        Ensemble([])


def test_trees_with_other_input_or_crops_get_their_own(trees: list[ProtoTree]) -> None:
    larger, cropped = copy.deepcopy(trees[1]), copy.deepcopy(trees[2])
    larger.preprocessing = dataclasses.replace(larger.preprocessing, size=96, resize=96)
    cropped.features.backbone.crops = (1.0, 0.5)
    ensemble = Ensemble([trees[0], larger, cropped])
    assert ensemble.inputs == (trees[0].preprocessing, larger.preprocessing)
    assert list(ensemble.distinct) == [0, 1, 2]
    images, others = torch.rand(4, 3, 64, 64), torch.rand(4, 3, 96, 96)
    expected = (trees[0].predict(images).soft + larger.predict(others).soft + cropped.predict(images).soft) / 3
    torch.testing.assert_close(ensemble.class_probs([images, others]), expected)
    with pytest.raises(ConfigError):
        ensemble.class_probs(images)


def test_every_number_of_an_ensemble_by_a_slow_loop(trees: list[ProtoTree]) -> None:
    images, labels = torch.rand(9, 3, 64, 64, generator=torch.Generator().manual_seed(3)), torch.arange(9) % 5
    ensemble, batches = Ensemble(trees), zip(images.split(4), labels.split(4), strict=True)
    found = ensemble_metrics(ensemble, ((ensemble.votes(batch), own) for batch, own in batches))
    each = [tree.predict(images) for tree in trees]
    assert found.n_images == 9

    def weight(one: TreePrediction, strategy: str, i: int) -> float:
        return float(one.confidence[i]) if strategy == "greedy" else 1.0

    for strategy in ("soft", "max_path", "greedy"):
        alone = [one.accuracy[strategy] for one in found.alone]
        assert alone == [sum((one.labels(strategy) == labels).tolist()) / 9 for one in each]
        for group in found.ensembles:
            probs = [
                sum(weight(one, strategy, i) * one.class_probs(strategy)[i] for one in each[: group.n_trees])
                for i in range(9)
            ]
            right = [int(p.argmax()) == int(label) for p, label in zip(probs, labels, strict=True)]
            assert group.accuracy[strategy] == sum(right) / 9
            if strategy != "soft":
                lengths = sum(int(one.path(strategy).length.sum()) for one in each[: group.n_trees])
                assert group.mean_path_prototypes[strategy] == pytest.approx(lengths / 9)
    assert [group.n_trees for group in found.ensembles] == [1, 2, 3]
    assert [group.n_prototypes for group in found.ensembles] == [7, 13, 19]
    assert [one.n_prototypes for one in found.alone] == [7, 6, 6]
    assert found.ensembles[0] == found.alone[0]
    assert found.all_trees.top5 == 1.0  # of five classes


def test_the_same_backbone_runs_once_and_another_is_noticed(
    trees: list[ProtoTree], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = copy.deepcopy(trees[1])
    changed = copy.deepcopy(trees[2])
    with torch.no_grad():
        next(changed.features.backbone.parameters()).add_(0.1)
    ensemble = Ensemble([trees[0], copied, changed])
    calls = []
    forward = type(copied.features.backbone).forward
    monkeypatch.setattr(
        type(copied.features.backbone), "forward", lambda self, x: calls.append(self) or forward(self, x)
    )
    images = torch.rand(2, 3, 64, 64)
    found = ensemble.class_probs(images)
    assert len(calls) == 2
    expected = sum(tree.predict(images).soft for tree in ensemble.trees) / 3
    torch.testing.assert_close(found, expected)

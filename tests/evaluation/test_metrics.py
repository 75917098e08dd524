"""Every number recomputed by an independent slow loop."""

import json
import statistics
from pathlib import Path

import pytest
import torch

import oracle
from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree
from prototree.core.pruning import prune
from prototree.core.topology import Topology
from prototree.errors import DataError
from prototree.evaluation import plots
from prototree.evaluation.metrics import ImagePredictions, compute_metrics, evaluate_all, evaluate_maps
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


def test_nothing_to_evaluate_on(tree: ProtoTree) -> None:
    with pytest.raises(DataError, match="at least one image"):
        evaluate_maps(tree, [])


def test_a_single_leaf_can_be_evaluated(tree: ProtoTree, data: list[tuple[torch.Tensor, ...]]) -> None:
    leaf = tree.with_topology(*tree.topology.keep_leaves(torch.arange(tree.topology.n_leaves).eq(1).numpy()))
    found = evaluate_maps(leaf, data)
    assert found.path_length["greedy"].max == 0
    assert found.fidelity == {"max_path": 1.0, "greedy": 1.0}


def test_ten_thousand_classes_are_measured_written_and_read_again(tmp_path: Path) -> None:
    k, m = 10_000, 30_000
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
    assert len(table.rows) == sum(share is not None for share in found.class_accuracy) > 9000
    assert len(table.to_markdown()) < MAX_TEXT_BYTES
    matrix = plots.confusion(confusion_pairs(again, "projected"), again["classes"], "")
    assert matrix.axes[0].images[0].get_size()[0] <= 1000

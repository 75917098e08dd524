import math

import pytest
import torch

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.evaluation.errors import ErrorCollector, LabelledAccuracy


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


def test_a_class_that_no_leaf_stands_for_by_nodes_no_node(tiny_backbone: Backbone) -> None:
    finder = ErrorCollector(tree_of_four(tiny_backbone), "greedy")
    finder.update(map_with(0.9, 0.9, 0.9), torch.tensor([4]), torch.tensor([7]))
    (error,) = finder.errors
    assert (error.index, error.node, error.margin) == (7, None, None)
    assert finder.by_node() == []
    assert finder.to_json()["images"][0]["node"] is None


def test_errors_are_written_in_the_order_of_the_data_with_nodes_counted_from_1(tiny_backbone: Backbone) -> None:
    finder = ErrorCollector(tree_of_four(tiny_backbone))
    finder.update(map_with(0.2, 0.9, 0.6).repeat(3, 1, 1, 1), torch.tensor([0, 4, 3]), torch.tensor([7, 5, 6]))
    content = finder.to_json()
    assert [(image["index"], image["node"]) for image in content["images"]] == [(5, None), (6, 1), (7, 2)]
    assert [node["node"] for node in content["nodes"]] == [1, 2]
    assert content["node_kind"] == "presence"


def test_predictions_beside_the_labels_of_a_list() -> None:
    counts = LabelledAccuracy(("crow", "wren"))
    pairs = [("crow", "crow"), ("wren", "crow"), ("wren", "wren"), ("wren", None), ("owl", "crow")]
    for label, prediction in pairs:
        counts.add(label, prediction)
    assert counts.n_images == 4
    accuracy, unknown = counts.words()
    assert "2 of 3" in accuracy
    assert "'owl'" in unknown
    assert [row[:3] for row in counts.table().rows] == [("wren", "33.3 %", "3"), ("crow", "100.0 %", "1")]

"""Decisions about one image, against what the tree itself decides."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray
from PIL import Image

import prototree
from conftest import grow, tree_shapes
from prototree.backbones.backbone import Backbone
from prototree.core import checkpoint
from prototree.core.confidence import Calibration
from prototree.core.model import NearestPatches, ProtoTree, greedy_leaves
from prototree.core.nodes import NodeFunction
from prototree.core.topology import Topology
from prototree.data import ImageData
from prototree.data.images import read_image
from prototree.data.transforms import eval_transform
from prototree.errors import CheckpointError, ConfigError
from prototree.explanation.assets import PrototypePictures, pictures_of
from prototree.explanation.decision import (
    MARGIN,
    explain_decision,
    explain_image,
    find_counterfactual,
    open_explainers,
    smallest_change,
)
from prototree.explanation.records import DecisionExplanation, EnsembleExplanation
from prototree.run import Run
from tiny_explain import projected

Squares = tuple[Run, ImageData]
N_NODES = 7


@pytest.fixture
def pairwise(tiny_backbone: Backbone, squares: Squares) -> ProtoTree:
    """A projected tree of 7 nodes and 14 prototypes, of which one reaches nowhere."""
    tree = projected(tiny_backbone, squares[1], node_function=NodeFunction("pairwise", 6.0))
    tree.radius[N_NODES] = 1e-6
    return tree


def image_of(squares: Squares) -> Path:
    return squares[1].test[0].path


@pytest.mark.parametrize("kind", ["presence", "pairwise"])
def test_a_decision_says_what_the_tree_decides(squares: Squares, pairwise: ProtoTree, kind: str) -> None:
    run, data = squares
    tree = pairwise if kind == "pairwise" else run.tree()
    n_nodes, pictures = tree.topology.n_nodes, PrototypePictures(tree, data)
    for sample in data.test[:3]:
        explained = explain_image(tree, sample.path, pictures, label=sample.label, notes={0: "red", n_nodes: "blue"})
        with torch.no_grad():
            routed = tree(eval_transform(read_image(sample.path), tree.preprocessing)[None])
        decisions = tree.decode(routed)
        assert explained.class_probs == pytest.approx(tuple(decisions.soft[0].tolist()))
        assert explained.node_kind == kind
        assert list(explained.paths) == ["greedy", "max_path"]
        for strategy, path in explained.paths.items():
            expected = decisions.path(strategy)
            nodes = [node for node in expected.nodes[0].tolist() if node >= 0]
            assert path.leaf == int(expected.leaf[0])
            assert [step.node for step in path.steps] == nodes
            assert [step.goes_right for step in path.steps] == expected.goes_right[0].tolist()[: len(nodes)]
            assert [step.p_right for step in path.steps] == pytest.approx(expected.p_right[0].tolist()[: len(nodes)])
            assert path.class_probs == pytest.approx(tuple(decisions.class_probs(strategy)[0].tolist()))
            for step in path.steps:
                assert [side.prototype for side in step.sides][-1] == step.node
                assert len(step.sides) == (2 if kind == "pairwise" else 1)
                for side in step.sides:
                    assert side.distance == pytest.approx(float(routed.distance[0, side.prototype]))
                    is_near = side.distance <= float(tree.radius[side.prototype])
                    assert side.in_radius == (is_near if kind == "pairwise" else step.p_right > 0.5)
                    assert np.array_equal(side.picture, pictures.crop(side.prototype))
                    assert [where.method for where in side.match.locations] == ["peak", "cell"]
                    assert side.match.locations[0].occlusion is None
        for step in explained.paths["greedy"].steps:
            assert not step.is_minority_path
            assert step.chosen.distance == min(side.distance for side in step.sides)
        root = explained.paths["greedy"].steps[0]
        assert root.note == "red"
        assert root.left is None or (root.left.note == "blue" and not root.left.in_radius)
    assert explained.size == (40, 40)
    assert explained.image == sample.path.name


def test_what_the_runner_up_needed_is_enough(pairwise: ProtoTree, squares: Squares) -> None:
    data, tree = squares[1], pairwise
    for sample in data.test:
        explained = explain_image(tree, sample.path, PrototypePictures(tree, data))
        routed = tree(eval_transform(read_image(sample.path), tree.preprocessing)[None])
        counterfactuals, distance = explained.counterfactuals["greedy"], routed.distance.detach().clone()
        for flip in counterfactuals.flips:
            assert {flip.nearer.prototype, flip.nearer.than} == {flip.node, flip.node + N_NODES}
            distance[0, flip.nearer.prototype] -= flip.nearer.by
        changed = tree.decode(tree.forward_distances(NearestPatches(distance, routed.patch)))
        assert int(changed.labels("greedy")[0]) == counterfactuals.label != explained.answer


def test_attribution_and_occlusion_on_request(squares: Squares) -> None:
    run, _ = squares
    explanation = explain_image(run, image_of(squares), attribution=True, occlusion=True)
    for step in explanation.paths["max_path"].steps:
        assert [where.method for where in step.right.match.locations] == ["peak", "cell", "attribution", "occlusion"]
        for where in step.right.match.locations:
            assert where.occlusion.before == pytest.approx(step.p_right, abs=1e-5)


@pytest.mark.usefixtures("as_users_run_it")
def test_a_run_a_path_and_a_tree_are_explained_alike(squares: Squares, tmp_path: Path) -> None:
    run, path = squares[0], image_of(squares)
    checkpoint.save(run.tree(), tmp_path / "tree")
    models = (run, run.folder, str(run.folder), run.tree(), tmp_path / "tree")
    explained = [prototree.explain(model, path) for model in models]
    assert len({(one.class_probs, one.confidence) for one in explained}) == 1
    with pytest.raises(ConfigError, match="int"):
        prototree.explain(3, path)
    opened = Image.open(path)
    for image in (opened, opened.convert("RGBA")):
        in_memory = explain_image(run, image, name="mine")
        assert (in_memory.class_probs, in_memory.image) == (explained[0].class_probs, "mine")


def test_boxes_of_a_wide_image_are_in_its_own_pixels(squares: Squares) -> None:
    run = squares[0]
    explanation = explain_image(run.tree(), Image.open(image_of(squares)).resize((1200, 80)), pictures_of(run))
    rows, columns = run.tree().features.backbone.map_size
    box = explanation.paths["max_path"].steps[0].right.match.locations[0].box
    assert (box.width, box.height) == pytest.approx((1200 / columns, 80 / rows))
    assert explanation.photo.shape == (32, 480, 3)


def test_a_tree_that_is_one_leaf_has_nothing_to_explain(squares: Squares) -> None:
    tree = squares[0].tree()
    leaf = tree.with_topology(Topology.from_children([], [], ~0)[0], np.array([], dtype=int), np.array([0]))
    explanation = explain_image(leaf, image_of(squares), attribution=True)
    assert all(path.steps == () for path in explanation.paths.values())
    assert explanation.counterfactuals == {"greedy": None}


def test_several_trees_are_explained_with_their_mean(squares: Squares) -> None:
    run, path = squares[0], image_of(squares)
    explained = explain_decision(open_explainers([run.tree(), run.tree("pruned")]), path)
    assert isinstance(explained, EnsembleExplanation)
    assert explained.class_probs == pytest.approx(
        tuple(np.mean([one.class_probs for one in explained.decisions], axis=0))
    )
    assert isinstance(prototree.explain([run, run.folder], path), EnsembleExplanation)
    (alone,) = open_explainers([run.folder])
    expected, fast = (explain_decision([one], path) for one in (alone, alone.for_many()))
    assert isinstance(expected, DecisionExplanation)
    assert fast.class_probs == pytest.approx(expected.class_probs, abs=1e-4)
    with pytest.raises(CheckpointError):
        open_explainers([run.folder / "nowhere"])


def test_why_a_tree_abstains(pairwise: ProtoTree, squares: Squares) -> None:
    path, tree = image_of(squares), pairwise
    assert explain_image(tree, path).abstention is None
    tree.distance_p95.fill_(1.0)
    with torch.no_grad():
        decisions = tree.predict(eval_transform(read_image(path), tree.preprocessing)[None])
    tree.calibration = Calibration(min_confidence=0.5, max_ood_score=float(decisions.ood_score) - 1e-3)
    abstention = explain_image(tree, path).abstention
    assert abstention.node == int(decisions.greedy.nodes[0, decisions.distance_ratio[0].argmax()])
    assert abstention.distance_ratio == pytest.approx(float(decisions.ood_score))
    tree.calibration = Calibration(slope=0.0, offset=-1.0, min_confidence=0.5)
    explained = explain_image(tree, path)
    assert explained.abstention.node is None
    assert explained.confidence is None


def leaf_of(log_odds: ndarray, topology: Topology) -> ndarray:
    """The leaf that each row of log-odds leads to, by the tree's own routing."""
    return greedy_leaves(torch.sigmoid(torch.from_numpy(log_odds)), topology).numpy()


def log_odds_of(probability: float) -> float:
    return float(np.log(probability) - np.log1p(-probability))


@settings(deadline=None, max_examples=60)
@given(shape=tree_shapes.filter(bool), seed=st.integers(0, 1000))
def test_the_changes_change_the_answer_and_less_does_not(shape: list[int], seed: int) -> None:
    topology, rng = grow(shape), np.random.default_rng(seed)
    log_odds, labels = rng.normal(0, 2, topology.n_nodes), rng.integers(0, 3, topology.n_leaves)
    others = np.setdiff1d(labels, [labels[leaf_of(log_odds[None], topology)[0]]])
    if not len(others):
        return
    changed = log_odds.copy()
    for change in smallest_change(log_odds, topology, np.flatnonzero(labels == others[0])):
        assert log_odds_of(change.p_right) == pytest.approx(log_odds[change.node], abs=1e-6)
        changed[change.node] = log_odds_of(change.needed)
    assert labels[leaf_of(changed[None], topology)[0]] == others[0]
    # Any way to spend a little less, also on nodes that the answer leaves alone, does not do it.
    cost = np.abs(changed - log_odds).sum()
    budget = 0.98 * cost - 2 * MARGIN * topology.n_nodes
    if budget <= 0:
        return
    spent = budget * rng.dirichlet(np.full(topology.n_nodes, 0.5), 4000)
    tried = np.concatenate([spent * rng.choice([-1, 1], spent.shape), (budget / cost * (changed - log_odds))[None]])
    assert not (labels[leaf_of(log_odds + tried, topology)] == others[0]).any()


def test_the_runner_up_is_the_next_class_that_a_leaf_stands_for() -> None:
    topology, log_odds, class_probs = Topology.full(1), np.array([2.0]), np.array([0.6, 0.3, 0.1])
    found = find_counterfactual(log_odds, topology, np.array([2, 0]), class_probs, 0)
    assert found.label == 2  # class 1 is more probable, but no leaf stands for it
    assert [change.node for change in found.flips] == [0]
    assert find_counterfactual(log_odds, topology, np.array([0, 0]), class_probs, 0) is None


@pytest.mark.parametrize(("leaf", "prototype", "than", "by"), [(3, 0, 3, 0.4), (0, 4, 1, 0.3)])
def test_a_pairwise_node_says_which_prototype_would_have_to_be_nearer_and_by_how_much(
    leaf: int, prototype: int, than: int, by: float
) -> None:
    """At a sharpness at which probabilities are 0 and 1 to the last digit, distances still tell."""
    topology, node_function = Topology.full(2), NodeFunction("pairwise", 500.0)
    distance = torch.tensor([[0.9, 0.4, 0.4, 0.5, 0.7, 0.7]], dtype=torch.float64)  # right ones, then left ones
    left, right = node_function.log_p_left_right(distance, torch.ones(6, dtype=torch.float64))
    (change,) = smallest_change((right - left)[0].numpy(), topology, np.array([leaf]), node_function.sharpness)
    assert (change.nearer.prototype, change.nearer.than) == (prototype, than)
    assert change.nearer.by == pytest.approx(by, abs=1e-5)
    distance[0, prototype] -= change.nearer.by
    assert leaf_of(500 * (distance[:, 3:] - distance[:, :3]).numpy(), topology)[0] == leaf

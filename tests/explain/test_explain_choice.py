"""Explanations of a tree whose nodes choose between two patches, against what the tree itself decides."""

from pathlib import Path

import numpy as np
import pytest
import torch

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.confidence import Calibration
from prototree.core.model import ProtoTree
from prototree.core.nodes import LN2, NodeFunction
from prototree.core.patches import NearestPatches
from prototree.core.topology import Topology
from prototree.data import ImageData, open_data
from prototree.data.images import read_image
from prototree.data.loading import ViewDataset
from prototree.data.transforms import to_input
from prototree.data.views import FULL
from prototree.explain.decisions import explain_image
from prototree.explain.prototype_pictures import PrototypePictures, write_pictures
from prototree.explain.prototypes import explain_prototypes
from prototree.features.batches import PhotoBatches, maps_of
from prototree.inference.answers import ask
from prototree.training.projection import SourcePhotos, project
from tiny_training import write_squares

N_NODES = 7


@pytest.fixture
def data(tmp_path: Path) -> ImageData:
    return open_data(write_squares(tmp_path / "photos", train=6, test=3))


@pytest.fixture
def tree(tiny_backbone: Backbone, data: ImageData) -> ProtoTree:
    """A projected tree of 7 nodes and 14 prototypes, of which one reaches nowhere."""
    torch.manual_seed(0)
    features = FeatureExtractor(tiny_backbone, 8)
    tree = ProtoTree(Topology.full(3), features, data.class_names, question=NodeFunction("pairwise", 6.0)).eval()
    tree.leaf_logits.data = 5 * torch.rand(8, 3)
    batches = PhotoBatches(ViewDataset(data.train, lambda _: (FULL,), tree.preprocessing), 16, shuffle=False)
    tree = project(tree, maps_of(batches, tree.features), SourcePhotos(data.root, batches.entries)).tree.eval()
    tree.reach[N_NODES] = 1e-6
    return tree


def test_a_decision_is_what_the_tree_decides(tree: ProtoTree, data: ImageData) -> None:
    pictures, notes = PrototypePictures(tree, data), {0: "red", N_NODES: "blue"}
    for sample in data.test:
        explained = explain_image(tree, sample.path, pictures, notes=notes)
        with torch.no_grad():
            routed = tree(to_input(read_image(sample.path), tree.preprocessing)[None])
        decisions = tree.decide(routed)
        assert explained.question == "pairwise"
        assert list(explained.paths) == ["greedy", "max_path"]
        for strategy, path in explained.paths.items():
            expected = decisions.path(strategy)
            assert path.leaf == int(expected.leaf[0])
            assert [step.node for step in path.steps] == expected.nodes[0].tolist()
            assert [step.goes_right for step in path.steps] == expected.goes_right[0].tolist()
            assert [step.p_right for step in path.steps] == pytest.approx(expected.p_right[0].tolist())
            for step in path.steps:
                assert step.left is not None
                assert (step.right.prototype, step.left.prototype) == (step.node, step.node + N_NODES)
                for side in step.sides:
                    assert side.distance == pytest.approx(float(routed.distance[0, side.prototype]))
                    assert side.in_reach == (side.distance <= LN2 * float(tree.reach[side.prototype]))
                    assert np.array_equal(side.picture, pictures.crop(side.prototype))
                assert (step.right.distance < step.left.distance) == (step.p_right > 0.5)
        for step in explained.paths["greedy"].steps:
            assert not step.against_odds
            assert step.left is not None
            assert step.chosen.distance == min(step.right.distance, step.left.distance)
        root = explained.paths["greedy"].steps[0]
        assert root.left is not None
        assert (root.note, root.left.note) == ("red", "blue")
        assert not root.left.in_reach


def test_what_the_runner_up_needed_is_enough(tree: ProtoTree, data: ImageData) -> None:
    for sample in data.test:
        explained = explain_image(tree, sample.path, PrototypePictures(tree, data))
        routed = tree(to_input(read_image(sample.path), tree.preprocessing)[None])
        for strategy, runner_up in explained.runner_up.items():
            assert runner_up is not None
            distance = routed.distance.detach().clone()
            for flip in runner_up.flips:
                assert flip.nearer is not None
                assert {flip.nearer.prototype, flip.nearer.than} == {flip.node, flip.node + N_NODES}
                distance[0, flip.nearer.prototype] -= flip.nearer.by
            changed = tree.decide(tree.routed(NearestPatches(distance, routed.patch)))
            assert int(changed.labels(strategy)[0]) == runner_up.label


def test_both_prototypes_of_every_node_are_explained(tree: ProtoTree, data: ImageData) -> None:
    explained = explain_prototypes(tree, data, range(tree.n_prototypes), nearest=1, notes={N_NODES + 1: "tail"})
    assert [one.prototype for one in explained] == list(range(2 * N_NODES))
    assert [one.node for one in explained] == [*range(N_NODES)] * 2
    assert [one.side for one in explained] == ["right"] * N_NODES + ["left"] * N_NODES
    assert explained[N_NODES + 1].note == "tail"
    for right, left in zip(explained[:N_NODES], explained[N_NODES:], strict=True):
        assert np.add(right.right_share, left.right_share) == pytest.approx(1.0)
    for one in explained[:3]:
        source = tree.sources[one.prototype]
        assert source is not None
        assert one.source.image == source.image
        assert one.reach == pytest.approx(LN2 * float(tree.reach[one.prototype]))


def test_pictures_of_both_are_stored(tree: ProtoTree, data: ImageData, tmp_path: Path) -> None:
    write_pictures(tree, data, tmp_path / "pictures")
    pictures = PrototypePictures(tree, None, tmp_path / "pictures")
    assert pictures.complete
    assert np.array_equal(pictures.crop(2 * N_NODES - 1), PrototypePictures(tree, data).crop(2 * N_NODES - 1))


def test_an_answer_says_rather_this_than_that(tree: ProtoTree, data: ImageData) -> None:
    answer = ask(tree, data.test[0].path)
    decisions = tree.predict(to_input(read_image(data.test[0].path), tree.preprocessing)[None])
    assert answer.label == tree.class_names[int(decisions.labels("greedy")[0])]
    for turn in answer.path:
        near, far = (turn.node, turn.node + N_NODES) if turn.present else (turn.node + N_NODES, turn.node)
        assert (turn.rather, turn.than) == (near, far)
        assert f"more like {near} than {far}" in str(answer)


def test_what_is_unusually_far_or_unsure_is_not_known(tree: ProtoTree, data: ImageData) -> None:
    path = data.test[0].path
    assert explain_image(tree, path).doubt is None
    tree.distance_p95.fill_(1.0)
    with torch.no_grad():
        decisions = tree.predict(to_input(read_image(path), tree.preprocessing)[None])
    tree.calibration = Calibration(least=0.5, farthest=float(decisions.ood_score) - 1e-3)
    doubt = explain_image(tree, path).doubt
    assert doubt is not None
    assert doubt.node == int(decisions.greedy.nodes[0, decisions.distance_ratio[0].argmax()])
    assert doubt.times_usual == pytest.approx(float(decisions.ood_score))
    answer = ask(tree, path)
    assert not answer.known
    assert str(answer).startswith(f"I don't know (best guess {answer.label})")
    assert answer.confidence is None
    assert answer.reason == doubt.reason
    assert "%" not in str(answer)
    tree.calibration = Calibration(slope=0.0, offset=-1.0, least=0.5)
    doubt = explain_image(tree, path).doubt
    assert doubt is not None
    assert doubt.node is None
    assert explain_image(tree, path).confidence is None

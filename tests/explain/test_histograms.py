"""How training photos lie about the line that decides, against a plain count."""

from pathlib import Path

import pytest
import torch

from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree
from prototree.core.nodes import NodeFunction
from prototree.core.topology import Topology
from prototree.explain.histograms import class_sides, decisive
from prototree.explain.neighbours import find_matches
from prototree.explain.stored_histograms import count_spreads, keep_spreads, kept_spreads
from prototree.files import read_json, write_json

N_PHOTOS, N_CLASSES = 23, 4
QUESTIONS = [NodeFunction("presence", 6.0), NodeFunction("pairwise", 6.0)]


def tree_of(backbone: Backbone, question: NodeFunction) -> ProtoTree:
    generator = torch.Generator().manual_seed(0)
    tree = ProtoTree(
        Topology.full(2), FeatureExtractor(backbone, 8), N_CLASSES, generator=generator, question=question
    ).eval()
    with torch.no_grad():
        tree.reach.copy_(torch.rand(tree.n_prototypes, generator=generator) + 0.5)
        tree.leaf_logits.copy_(torch.eye(4) * 9)
    return tree


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.kind)
def test_photos_are_counted_on_the_side_of_their_class(tiny_backbone: Backbone, question: NodeFunction) -> None:
    tree = tree_of(tiny_backbone, question)
    maps, labels = random_maps(3, N_PHOTOS, 8, 4, 4, dtype=torch.float32), torch.arange(N_PHOTOS) % N_CLASSES
    places = torch.arange(N_PHOTOS)
    batches = [(maps[some], labels[some], some) for some in places.split(5)]
    spreads = find_matches(tree, batches, range(tree.n_prototypes), 2).spreads
    turns = tree.route(maps).p_right > 0.5
    for node, (right, left) in enumerate([((2, 3), (0, 1)), ((1,), (0,)), ((3,), (2,))]):
        spread = spreads[node]
        below = round((spread.line - spread.low) / spread.width)
        for counts, classes in ((spread.right, right), (spread.left, left)):
            own = torch.isin(labels, torch.tensor(classes))
            under = sum(counts[:below])
            goes = int((turns[own, node]).sum())
            assert sum(counts) == int(own.sum())
            assert goes == (under if question.kind == "presence" else sum(counts) - under)
    if question.kind == "pairwise":
        assert spreads[3:] == spreads[:3]  # both prototypes of a node say the same


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.kind)
def test_what_training_keeps_is_what_a_report_counts(
    tiny_backbone: Backbone, question: NodeFunction, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = tree_of(tiny_backbone, question)
    maps, labels = random_maps(3, N_PHOTOS, 8, 4, 4, dtype=torch.float32), torch.arange(N_PHOTOS) % N_CLASSES
    batches = [(maps[some], labels[some], some) for some in torch.arange(N_PHOTOS).split(5)]
    counted = torch.arange(N_PHOTOS) % 2 == 0
    spreads = count_spreads(tree, batches, counted)
    assert tuple(spreads) == find_matches(tree, batches, range(3), 2, counted).spreads
    assert kept_spreads(tree, tmp_path) == {}
    keep_spreads(tree, spreads, tmp_path)
    assert kept_spreads(tree, tmp_path) == dict(enumerate(spreads))
    path, other = tmp_path / "spreads.json", tree_of(tiny_backbone, question)
    other.prototypes.data.add_(1)
    assert kept_spreads(other, tmp_path) == {}, "they are of another tree"
    assert not caplog.text
    write_json(path, read_json(path) | {"spreads": [[[-1] * 64] * 2]})
    assert kept_spreads(tree, tmp_path) == {}
    assert "cannot be used: its photos are counted in other ranges" in caplog.text


def test_a_photo_that_is_there_twice_is_counted_once(tiny_backbone: Backbone) -> None:
    tree = tree_of(tiny_backbone, QUESTIONS[0])
    maps = random_maps(3, 4, 8, 4, 4, dtype=torch.float32)
    batch = [(maps, torch.tensor([0, 0, 1, 1]), torch.arange(4))]
    counted = torch.tensor([True, False, True, False])
    spread = find_matches(tree, batch, [1], 2, counted).spreads[0]
    assert (sum(spread.right), sum(spread.left)) == (1, 1)


def test_a_class_on_both_sides_is_counted_on_neither(tiny_backbone: Backbone) -> None:
    tree = tree_of(tiny_backbone, QUESTIONS[0])
    with torch.no_grad():
        tree.leaf_logits.copy_(torch.eye(4)[[0, 1, 0, 2]] * 9)
    right, left = class_sides(tree)
    assert right[0].tolist() == [False, False, True, False]
    assert left[0].tolist() == [False, True, False, False]
    assert right[2].tolist() == [False, False, True, False]
    assert left[2].tolist() == [True, False, False, False]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.kind)
def test_what_decides_agrees_with_the_turn(tiny_backbone: Backbone, question: NodeFunction) -> None:
    tree = tree_of(tiny_backbone, question)
    routed = tree.route(random_maps(5, 9, 8, 4, 4, dtype=torch.float32))
    right, left = routed.distance[:, :3], routed.distance[:, 3:] if question.kind == "pairwise" else None
    at = decisive(tree, range(3), right, left)
    assert torch.equal(routed.p_right > 0.5, at < 1 if question.kind == "presence" else at > 0)

"""Nearest images, class pass rates and histograms of each prototype, against a plain sort and count of everything."""

from collections.abc import Iterator

import pytest
import torch

from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree, distance_map
from prototree.core.nodes import NodeFunction
from prototree.core.topology import Topology
from prototree.explanation.neighbours import HistogramCounts, count_histograms, decisive, explain_classes, find_matches
from prototree.features.cache import MapBatch

N_PHOTOS, N_CLASSES = 23, 4
QUESTIONS = [NodeFunction("presence", 6.0), NodeFunction("pairwise", 6.0)]


@pytest.fixture(params=[(1, 1), (2, 3)])
def tree(tiny_backbone: Backbone, request: pytest.FixtureRequest) -> ProtoTree:
    generator = torch.Generator().manual_seed(0)
    tree = ProtoTree(Topology.full(3), FeatureExtractor(tiny_backbone, 8), N_CLASSES, request.param, generator)
    return tree.eval()


def batches(maps: torch.Tensor, labels: torch.Tensor, size: int = 5) -> Iterator[MapBatch]:
    for places in torch.arange(len(maps)).split(size):
        yield maps[places], labels[places], places


@pytest.mark.parametrize("size", [1, 5, 23])
def test_running_best_is_the_best_of_all(tree: ProtoTree, size: int) -> None:
    maps, labels = random_maps(3, N_PHOTOS, 8, 4, 4, dtype=torch.float32), torch.arange(N_PHOTOS) % N_CLASSES
    nodes = [4, 0, 6]
    found = find_matches(tree, batches(maps, labels, size), nodes, 6)
    similarity = torch.exp(-distance_map(maps, tree.prototypes.detach()[nodes]))  # photos × nodes × rows × columns
    best, patch = similarity.flatten(2).max(dim=2)
    order = best.argsort(dim=0, descending=True)[:6].T
    assert torch.equal(found.index, order)
    assert torch.equal(found.patch, patch.T.gather(1, order))
    assert torch.allclose(torch.exp(-found.distance), best.T.gather(1, order), atol=1e-5)
    for i in range(3):
        assert torch.allclose(found.maps[i], similarity[order[i], i], atol=1e-5)
    right = torch.stack([(best[labels == k] > 0.5).float().mean(dim=0) for k in range(N_CLASSES)], dim=1)
    assert torch.allclose(found.share, right)


def test_fewer_photos_than_asked_for_and_equal_distances_in_the_order_of_the_data(tree: ProtoTree) -> None:
    maps = random_maps(3, 2, 8, 4, 4, dtype=torch.float32)
    found = find_matches(tree, batches(maps, torch.tensor([0, 2])), [1], 4)
    assert sorted(found.index[0].tolist()) == [-1, -1, 0, 1]
    assert torch.isfinite(found.distance).tolist() == [[True, True, False, False]]
    assert found.share[0, 1] == 0  # a class without photos
    same = maps[:1].expand(9, -1, -1, -1)
    found = find_matches(tree, batches(same, torch.zeros(9, dtype=torch.long), 2), [0], 3)
    assert found.index.tolist() == [[0, 1, 2]]


def test_a_choice_shares_out_every_class_between_its_two_prototypes(tiny_backbone: Backbone) -> None:
    tree = tree_of(tiny_backbone, QUESTIONS[1])
    maps, labels = random_maps(3, N_PHOTOS, 8, 4, 4, dtype=torch.float32), torch.arange(N_PHOTOS) % N_CLASSES
    found = find_matches(tree, batches(maps, labels), range(6), 2)
    goes_right = tree.forward_features(maps).p_right > 0.5
    right = torch.stack([goes_right[labels == k].float().mean(dim=0) for k in range(N_CLASSES)], dim=1)
    assert torch.allclose(found.share[:3], right)
    assert torch.allclose(found.share[:3] + found.share[3:], torch.ones(3, N_CLASSES))
    alone = find_matches(tree, batches(maps, labels), [4], 2)  # its rival is compared, but not explained
    assert torch.equal(alone.share[0], found.share[4])
    assert torch.equal(alone.index[0], found.index[4])


def tree_of(backbone: Backbone, node_function: NodeFunction) -> ProtoTree:
    generator = torch.Generator().manual_seed(0)
    tree = ProtoTree(
        Topology.full(2), FeatureExtractor(backbone, 8), N_CLASSES, generator=generator, node_function=node_function
    ).eval()
    with torch.no_grad():
        tree.radius.copy_(torch.rand(tree.n_prototypes, generator=generator) + 0.5)
        tree.leaf_logits.copy_(torch.eye(4) * 9)
    return tree


@pytest.mark.parametrize("node_function", QUESTIONS, ids=lambda node_function: node_function.kind)
def test_photos_are_counted_on_the_side_of_their_class(tiny_backbone: Backbone, node_function: NodeFunction) -> None:
    tree = tree_of(tiny_backbone, node_function)
    maps, labels = random_maps(3, N_PHOTOS, 8, 4, 4, dtype=torch.float32), torch.arange(N_PHOTOS) % N_CLASSES
    histograms = find_matches(tree, batches(maps, labels), range(tree.n_prototypes), 2).histograms
    turns = tree.forward_features(maps).p_right > 0.5
    for node, (right, left) in enumerate([((2, 3), (0, 1)), ((1,), (0,)), ((3,), (2,))]):
        histogram = histograms[node]
        below = round((histogram.line - histogram.low) / histogram.width)
        for counts, classes in ((histogram.right, right), (histogram.left, left)):
            own = torch.isin(labels, torch.tensor(classes))
            under = sum(counts[:below])
            goes = int((turns[own, node]).sum())
            assert sum(counts) == int(own.sum())
            assert goes == (under if node_function.kind == "presence" else sum(counts) - under)
    if node_function.kind == "pairwise":
        assert histograms[3:] == histograms[:3]  # both prototypes of a node say the same


@pytest.mark.parametrize("node_function", QUESTIONS, ids=lambda node_function: node_function.kind)
def test_what_training_counts_is_what_a_report_counts(tiny_backbone: Backbone, node_function: NodeFunction) -> None:
    tree = tree_of(tiny_backbone, node_function)
    maps, labels = random_maps(3, N_PHOTOS, 8, 4, 4, dtype=torch.float32), torch.arange(N_PHOTOS) % N_CLASSES
    counted = torch.arange(N_PHOTOS) % 2 == 0
    histograms = count_histograms(tree, batches(maps, labels), counted)
    assert tuple(histograms) == find_matches(tree, batches(maps, labels), range(3), 2, counted).histograms


def test_a_class_on_both_sides_is_counted_on_neither(tiny_backbone: Backbone) -> None:
    tree = tree_of(tiny_backbone, QUESTIONS[0])
    with torch.no_grad():
        tree.leaf_logits.copy_(torch.eye(4)[[0, 1, 0, 2]] * 9)
    counts = HistogramCounts(tree, [0, 2])
    counts.add(torch.ones(3, 2), None, torch.arange(3))
    assert [(sum(h.right), sum(h.left)) for h in counts.histograms()] == [(1, 1), (1, 1)]
    counts.add(torch.ones(1, 2), None, torch.tensor([0]))
    assert [(sum(h.right), sum(h.left)) for h in counts.histograms()] == [(1, 1), (1, 2)]


@pytest.mark.parametrize("node_function", QUESTIONS, ids=lambda node_function: node_function.kind)
def test_what_decides_agrees_with_the_turn(tiny_backbone: Backbone, node_function: NodeFunction) -> None:
    tree = tree_of(tiny_backbone, node_function)
    routed = tree.forward_features(random_maps(5, 9, 8, 4, 4, dtype=torch.float32))
    right, left = routed.distance[:, :3], routed.distance[:, 3:] if node_function.kind == "pairwise" else None
    at = decisive(tree, range(3), right, left)
    assert torch.equal(routed.p_right > 0.5, at < 1 if node_function.kind == "presence" else at > 0)


def test_classes_with_their_row_of_the_confusion_matrix() -> None:
    first, second, third = explain_classes([(), (), ()], [(0, 0, 3), (0, 2, 1), (1, 0, 1), (1, 2, 2)])
    assert (first.n_test, first.accuracy, first.confused_with) == (4, 0.75, ((2, 1),))
    assert (second.accuracy, second.confused_with) == (0.0, ((2, 2), (0, 1)))
    assert (third.n_test, third.accuracy) == (0, None)

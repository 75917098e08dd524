"""The nearest photos of each prototype, against a plain sort of everything."""

from collections.abc import Iterator

import pytest
import torch

from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree
from prototree.core.nodes import NodeFunction
from prototree.core.patches import distance_map
from prototree.core.topology import Topology
from prototree.explain.neighbours import find_matches
from prototree.features.cache import MapBatch

N_PHOTOS, N_CLASSES = 23, 4


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
    assert torch.equal(found.place, order)
    assert torch.equal(found.patch, patch.T.gather(1, order))
    assert torch.allclose(torch.exp(-found.distance), best.T.gather(1, order), atol=1e-5)
    for i in range(3):
        assert torch.allclose(found.maps[i], similarity[order[i], i], atol=1e-5)
    right = torch.stack([(best[labels == k] > 0.5).float().mean(dim=0) for k in range(N_CLASSES)], dim=1)
    assert torch.allclose(found.share, right)


def test_fewer_photos_than_asked_for(tree: ProtoTree) -> None:
    maps = random_maps(3, 2, 8, 4, 4, dtype=torch.float32)
    found = find_matches(tree, batches(maps, torch.tensor([0, 2])), [1], 4)
    assert sorted(found.place[0].tolist()) == [-1, -1, 0, 1]
    assert torch.isfinite(found.distance).tolist() == [[True, True, False, False]]
    assert found.share[0, 1] == 0  # a class without photos


def test_equal_distances_stay_in_the_order_of_the_data(tree: ProtoTree) -> None:
    same = random_maps(3, 1, 8, 4, 4, dtype=torch.float32).expand(9, -1, -1, -1)
    found = find_matches(tree, batches(same, torch.zeros(9, dtype=torch.long), 2), [0], 3)
    assert found.place.tolist() == [[0, 1, 2]]


def test_a_choice_shares_out_every_class_between_its_two_prototypes(tiny_backbone: Backbone) -> None:
    torch.manual_seed(0)
    tree = ProtoTree(
        Topology.full(2), FeatureExtractor(tiny_backbone, 8), N_CLASSES, question=NodeFunction("pairwise", 6.0)
    ).eval()
    maps, labels = random_maps(3, N_PHOTOS, 8, 4, 4, dtype=torch.float32), torch.arange(N_PHOTOS) % N_CLASSES
    found = find_matches(tree, batches(maps, labels), range(6), 2)
    goes_right = tree.route(maps).p_right > 0.5
    right = torch.stack([goes_right[labels == k].float().mean(dim=0) for k in range(N_CLASSES)], dim=1)
    assert torch.allclose(found.share[:3], right)
    assert torch.allclose(found.share[:3] + found.share[3:], torch.ones(3, N_CLASSES))
    alone = find_matches(tree, batches(maps, labels), [4], 2)  # its rival is compared, but not explained
    assert torch.equal(alone.share[0], found.share[4])
    assert torch.equal(alone.place[0], found.place[4])

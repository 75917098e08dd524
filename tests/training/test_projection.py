"""Eq. 6 and S1 against the oracle, and what projection promises."""

from pathlib import Path

import pytest
import torch

import oracle
from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.geometry import Box
from prototree.core.model import ProtoTree
from prototree.core.patches import nearest_patches
from prototree.core.topology import Topology
from prototree.data.dataset import Sample
from prototree.data.loading import Entry
from prototree.data.views import View
from prototree.errors import DataError
from prototree.training.projection import SourcePhotos, project, prototype_classes

SIZES = [(1, 1), (2, 2), (3, 1)]


def make_tree(backbone: Backbone, size: tuple[int, int] = (1, 1), dtype: torch.dtype = torch.float64) -> ProtoTree:
    tree = ProtoTree(Topology.full(2), FeatureExtractor(backbone, 5), 4, size)
    tree.prototypes.data = random_maps(1, 3, 5, *size, dtype=dtype)
    tree.leaf_logits.data = 5 * torch.eye(4, dtype=dtype)  # leaf k is sure of class k
    return tree


def maps(n: int = 12, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return random_maps(2, n, 5, 4, 4, dtype=dtype), torch.arange(n) % 4


def batches(z: torch.Tensor, labels: torch.Tensor, size: int = 5) -> list[tuple[torch.Tensor, ...]]:
    places = torch.arange(len(z))
    return list(zip(z.split(size), labels.split(size), places.split(size), strict=True))


@pytest.mark.parametrize("constrain", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_projection_agrees_with_the_oracle(tiny_backbone: Backbone, size: tuple[int, int], constrain: bool) -> None:
    tree, (z, labels) = make_tree(tiny_backbone, size), maps()
    result = project(tree, batches(z, labels), project_within_class=constrain, compare=True)
    below = {0: {0, 1, 2, 3}, 1: {0, 1}, 2: {2, 3}}
    for node in range(3):
        allowed = [i for i in range(12) if not constrain or int(labels[i]) in below[node]]
        found = [(*oracle.nearest(z[i], tree.prototypes[node].detach()), i) for i in allowed]
        distance, patch, place = min(found, key=lambda f: (f[0].item(), f[2]))
        assert result.nearest.place[node] == place
        assert result.nearest.patch[node] == patch
        assert result.nearest.distance[node].item() == pytest.approx(distance.item(), abs=1e-9)
        assert torch.equal(result.tree.prototypes[node], oracle.patches(z[place], size)[patch])
    if constrain:
        assert result.constraint_cost is not None
        assert result.constraint_cost >= 0


@pytest.mark.parametrize("size", SIZES)
def test_a_projected_prototype_is_at_distance_zero_from_its_patch(
    tiny_backbone: Backbone, size: tuple[int, int]
) -> None:
    tree, (z, labels) = make_tree(tiny_backbone, size, torch.float32), maps(dtype=torch.float32)
    result = project(tree, batches(z, labels))
    own = nearest_patches(z[result.nearest.place], result.tree.prototypes).distance.diagonal()
    assert (own == 0).all()
    assert torch.equal(project(result.tree, batches(z, labels)).tree.prototypes, result.tree.prototypes)


@pytest.mark.parametrize("size", [1, 5, 12])
def test_ties_go_to_the_first_whatever_the_batch_size(tiny_backbone: Backbone, size: int) -> None:
    tree = make_tree(tiny_backbone)
    z = random_maps(2, 1, 5, 4, 4).expand(12, -1, -1, -1)
    result = project(tree, batches(z, torch.arange(12) % 4, size))
    assert result.nearest.place.tolist() == [0, 0, 2], "the first photo of a class below the node"
    assert result.n_duplicates <= 1


def test_prototype_classes_are_the_majorities_below(tiny_backbone: Backbone) -> None:
    found = prototype_classes(make_tree(tiny_backbone))
    assert found.tolist() == [[True] * 4, [True, True, False, False], [False, False, True, True]]


def test_a_node_without_photos_of_its_classes_falls_back_to_all(
    tiny_backbone: Backbone, caplog: pytest.LogCaptureFixture
) -> None:
    tree, (z, _) = make_tree(tiny_backbone), maps()
    result = project(tree, batches(z, torch.zeros(12, dtype=torch.long)))  # nothing of classes 2 and 3
    free = project(tree, batches(z, torch.zeros(12, dtype=torch.long)), project_within_class=False)
    assert "1 prototypes have no training image of any class below them" in caplog.text
    assert torch.equal(result.tree.prototypes[2], free.tree.prototypes[2])


def test_nothing_to_project_on(tiny_backbone: Backbone) -> None:
    with pytest.raises(DataError, match="at least one training image"):
        project(make_tree(tiny_backbone), [])


def test_a_tree_without_prototypes_stays_as_it_is(tiny_backbone: Backbone) -> None:
    tree = make_tree(tiny_backbone)
    leaf = tree.with_topology(*tree.topology.keep_leaves(torch.arange(4).eq(1).numpy()))
    result = project(leaf, batches(*maps()))
    assert result.tree.topology.n_leaves == 1
    assert (result.mean_distance, result.n_duplicates) == (0.0, 0)


def test_sources_name_the_photo_and_the_box_in_its_pixels(tiny_backbone: Backbone) -> None:
    # The network sees 64 px as a 4×4 map: a cell is 16 px of its input, and this view squashes 128×32 into 64×64.
    tree, (z, labels) = make_tree(tiny_backbone), maps(1)
    sample = Sample(Path("/data/birds/a.jpg"), 0, size=(200, 100))
    places = SourcePhotos(Path("/data"), [Entry(0, sample, View("box", Box(10.0, 20.0, 138.0, 52.0)))])
    result = project(tree, batches(z, labels), places)
    for node, source in enumerate(result.tree.sources):
        assert source is not None
        row, column = divmod(int(result.nearest.patch[node]), 4)
        assert (source.image, source.view, source.patch) == ("birds/a.jpg", "box", (row, column))
        left, top = 10 + column * 32, 20 + row * 8
        assert source.box == pytest.approx((left, top, left + 32, top + 8))
        assert (source.region, source.flip) == ((10.0, 20.0, 138.0, 52.0), False)
        assert source.distance == pytest.approx(result.nearest.distance[node].item())
    assert tree.sources == (None,) * 3

"""Eq. 6 and S1 against the oracle, and what projection promises."""

import pytest
import torch

import oracle
from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree, nearest_patches
from prototree.core.nodes import NodeFunction
from prototree.core.projection import project, prototype_classes
from prototree.core.topology import Topology
from prototree.errors import DataError

SIZES = [(1, 1), (2, 2), (3, 1)]


def make_tree(backbone: Backbone, size: tuple[int, int] = (1, 1), dtype: torch.dtype = torch.float64) -> ProtoTree:
    tree = ProtoTree(Topology.full(2), FeatureExtractor(backbone, 5), 4, size)
    tree.prototypes.data = random_maps(1, 3, 5, *size, dtype=dtype)
    tree.leaf_logits.data = 5 * torch.eye(4, dtype=dtype)  # leaf k is sure of class k
    return tree


def maps(n: int = 12, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return random_maps(2, n, 5, 4, 4, dtype=dtype), torch.arange(n) % 4


def batches(z: torch.Tensor, labels: torch.Tensor, size: int = 5) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(z.split(size), labels.split(size), torch.arange(len(z)).split(size), strict=True))


@pytest.mark.parametrize("constrain", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_projection_agrees_with_the_oracle(tiny_backbone: Backbone, size: tuple[int, int], constrain: bool) -> None:
    tree, (z, labels) = make_tree(tiny_backbone, size), maps()
    result = project(tree, batches(z, labels), project_within_class=constrain, compare=True)
    below = {0: {0, 1, 2, 3}, 1: {0, 1}, 2: {2, 3}}
    for node in range(3):
        allowed = [i for i in range(12) if not constrain or int(labels[i]) in below[node]]
        candidates = [(*oracle.nearest(z[i], tree.prototypes[node].detach()), i) for i in allowed]
        distance, patch, index = min(candidates, key=lambda candidate: (candidate[0].item(), candidate[2]))
        assert (result.nearest.index[node], result.nearest.patch[node]) == (index, patch)
        assert result.nearest.distance[node].item() == pytest.approx(distance.item(), abs=1e-9)
        assert torch.equal(result.tree.prototypes[node], oracle.patches(z[index], size)[patch])
    assert result.class_constraint_gap is not None
    assert result.class_constraint_gap >= 0
    assert result.mean_distance == pytest.approx(result.nearest.distance.mean().item())


@pytest.mark.parametrize("size", SIZES)
def test_a_projected_prototype_is_its_patch(tiny_backbone: Backbone, size: tuple[int, int]) -> None:
    tree, (z, labels) = make_tree(tiny_backbone, size, torch.float32), maps(dtype=torch.float32)
    result = project(tree, batches(z, labels))
    assert (nearest_patches(z[result.nearest.index], result.tree.prototypes).distance.diagonal() == 0).all()
    assert torch.equal(project(result.tree, batches(z, labels)).tree.prototypes, result.tree.prototypes)


@pytest.mark.parametrize("size", [1, 5, 12])
def test_ties_go_to_the_first_whatever_the_batch_size(tiny_backbone: Backbone, size: int) -> None:
    z = random_maps(2, 1, 5, 4, 4).expand(12, -1, -1, -1)
    result = project(make_tree(tiny_backbone), batches(z, torch.arange(12) % 4, size))
    assert result.nearest.index.tolist() == [0, 0, 2], "the first image of a class below the node"
    assert result.n_duplicates <= 1


def test_prototype_classes_are_the_majorities_below_or_on_the_side(tiny_backbone: Backbone) -> None:
    tree = make_tree(tiny_backbone)
    below = [[True] * 4, [True, True, False, False], [False, False, True, True]]
    assert prototype_classes(tree).tolist() == below
    pair = ProtoTree(tree.topology, tree.features, 4, node_function=NodeFunction("pairwise", 6.0))
    pair.leaf_logits.data = 5 * torch.eye(4)
    right = [[0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 1]]
    left = [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]
    assert prototype_classes(pair).int().tolist() == right + left


def test_a_node_without_images_of_its_classes_falls_back_to_all(
    tiny_backbone: Backbone, caplog: pytest.LogCaptureFixture
) -> None:
    tree, (z, _) = make_tree(tiny_backbone), maps()
    labels = torch.zeros(12, dtype=torch.long)  # nothing of classes 2 and 3
    result, free = (project(tree, batches(z, labels), project_within_class=within) for within in (True, False))
    assert "1 prototypes" in caplog.text
    assert torch.equal(result.tree.prototypes[2], free.tree.prototypes[2])


def test_nothing_to_project_on_and_nothing_to_project(tiny_backbone: Backbone) -> None:
    tree = make_tree(tiny_backbone)
    with pytest.raises(DataError):
        project(tree, [])
    leaf = tree.with_topology(*tree.topology.keep_leaves(torch.arange(4).eq(1).numpy()))
    result = project(leaf, batches(*maps()))
    assert result.tree.topology.n_leaves == 1
    assert (result.mean_distance, result.n_duplicates) == (0.0, 0)

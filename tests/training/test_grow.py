"""The initial tree: the class hierarchy, the scale of distances, and the patches with the highest information gain."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree, PrototypeSource, nearest_patches
from prototree.errors import DataError
from prototree.training import grow
from prototree.training.grow import Hierarchy, class_hierarchy
from prototree.training.head import wide_head
from tiny_training import feature_maps


@pytest.fixture
def features(tiny_backbone: Backbone) -> FeatureExtractor:
    torch.manual_seed(0)
    return FeatureExtractor(tiny_backbone, 16, head_hidden_dim=8).eval()


@pytest.fixture
def maps(tiny_backbone: Backbone) -> torch.Tensor:
    return 5 + 3 * random_maps(1, 30, tiny_backbone.n_channels, 3, 3, dtype=torch.float32)


def test_standardised_channels_have_mean_0_and_standard_deviation_1(
    features: FeatureExtractor, maps: torch.Tensor
) -> None:
    grow.standardise(features, maps)
    head = wide_head(features)
    z = (maps - head.mean) / head.std
    torch.testing.assert_close(z.mean(dim=(0, 2, 3)), torch.zeros(maps.shape[1]), atol=1e-4, rtol=0)
    torch.testing.assert_close(z.std(dim=(0, 2, 3)), torch.ones(maps.shape[1]), atol=1e-3, rtol=0)


def test_re_estimated_batch_norm_is_that_of_all_patches(features: FeatureExtractor, maps: torch.Tensor) -> None:
    head = wide_head(features).double()
    grow.standardise(features, maps.double() - 3)  # so that means matter
    grow.reestimate_bn(features, maps.double())
    frozen = head.eval()(maps.double())
    torch.testing.assert_close(frozen, head.train()(maps.double()), rtol=0.01, atol=0.01)  # n − 1 against n
    assert torch.cat([frozen, head.eval()(2 * maps.double())]).std() > 0.1, "so that the tolerance means something"


def test_rescaling_brings_the_median_distance_where_it_should_be(
    features: FeatureExtractor, maps: torch.Tensor
) -> None:
    grow.standardise(features, maps)
    grow.rescale_distances(features, maps, 0.7, torch.Generator().manual_seed(0))
    z = features.from_map(maps).detach()
    points = z.flatten(2).transpose(1, 2).flatten(0, 1)[::3][:, :, None, None]
    assert nearest_patches(z, points).distance.median().item() == pytest.approx(0.7, abs=0.15)


def test_information_gain_prefers_the_patch_that_separates_the_sides() -> None:
    right = torch.tensor([True, True, False, False])
    distance = torch.tensor([[0.1, 0.1, 0.5], [0.2, 0.9, 0.5], [0.9, 0.2, 0.5], [0.8, 0.8, 0.5]])
    gain = grow.information_gain(distance, right)
    assert gain.tolist() == pytest.approx([np.log(2), np.log(2) - 0.5 * np.log(4), 0], abs=1e-4)


def test_the_initial_tree_has_one_leaf_per_class_and_real_patches(
    features: FeatureExtractor, maps: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = torch.arange(30) % 6
    for label in range(6):  # each class has a patch of its own
        maps[labels == label, label * 7 : label * 7 + 7, 1, 1] += 40
    grow.standardise(features, maps)
    again = copy.deepcopy(features)
    initial = grow.grow_tree(features, maps, labels, seed=0)
    assert sorted(initial.leaf_class.tolist()) == list(range(6))
    assert len(initial.anchors) == 2 * initial.topology.n_nodes == 10
    patches = maps.flatten(2).transpose(1, 2).flatten(0, 1)
    assert all((patches == anchor).all(dim=1).any() for anchor in initial.anchors[:, :, 0, 0])
    assert len(torch.unique(initial.anchors.flatten(1), dim=0)) == 10, "one patch, one prototype"
    monkeypatch.setattr(grow, "_MAX_PAIRS", 0)  # each node measures for itself, and chooses the same
    other = grow.grow_tree(again, maps, labels, seed=0)
    assert torch.equal(initial.anchors, other.anchors)
    assert initial.topology.left.tolist() == other.topology.left.tolist()


def test_an_existing_tree_keeps_its_patches(tiny_tree: ProtoTree) -> None:
    maps = random_maps(0, 2, 256, 4, 4, dtype=torch.float32)
    sources = feature_maps(maps, [0, 1])
    box = (0.0, 0.0, 1.0, 1.0)
    places = [(row % 2, (row % 4, row % 3)) for row in range(tiny_tree.n_prototypes)]
    tiny_tree.sources = tuple(
        PrototypeSource(f"{index}.png", index, "full", patch, box, 0.0, None, False) for index, patch in places
    )
    initial = grow.from_existing_tree(tiny_tree, sources, Path())
    assert torch.equal(initial.anchors[:, :, 0, 0], torch.stack([maps[i, :, *patch] for i, patch in places]))
    assert initial.sharpness == tiny_tree.node_function.sharpness
    for lost in (None, PrototypeSource("gone.png", 0, "full", (0, 0), box, 0.0, None, False)):
        tiny_tree.sources = (lost, *tiny_tree.sources[1:])
        with pytest.raises(DataError):
            grow.from_existing_tree(tiny_tree, sources, Path())


def ward(points: np.ndarray, classes: list[int]) -> Hierarchy:
    """Ward's method as it is written: merge the cheapest of all pairs, again and again."""
    clusters: list[tuple[Hierarchy, list[int]]] = [(k, [k]) for k in classes]
    while len(clusters) > 1:
        cost = {}
        for j, (_, second) in enumerate(clusters):
            for i, (_, first) in enumerate(clusters[:j]):
                gap = points[first].mean(axis=0) - points[second].mean(axis=0)
                cost[i, j] = len(first) * len(second) / (len(first) + len(second)) * float(gap @ gap)
        i, j = min(cost, key=lambda pair: cost[pair])
        pair = sorted((clusters[i], clusters[j]), key=lambda cluster: min(cluster[1]))
        clusters = [cluster for k, cluster in enumerate(clusters) if k not in (i, j)]
        clusters.append(((pair[0][0], pair[1][0]), pair[0][1] + pair[1][1]))
    return clusters[0][0]


@pytest.mark.parametrize("n_classes", [1, 2, 3, 7, 24])
def test_the_class_hierarchy_is_wards(n_classes: int) -> None:
    points = np.random.default_rng(n_classes).normal(size=(n_classes, 5))
    assert class_hierarchy(points) == ward(points, list(range(n_classes)))


def test_classes_with_equal_means_are_separated_too() -> None:
    assert sorted(grow._classes(class_hierarchy(np.zeros((9, 3))))) == list(range(9))


def test_a_sample_has_every_class_even_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = [0] * 5 + [1] * 5 + [2] * 5
    maps = feature_maps(random_maps(0, 15, 4, 2, 2, dtype=torch.float32), labels, frozenset({0}))
    assert grow.sample_maps(maps)[1].bincount().tolist() == [4, 5, 5]  # the first image cannot be read
    monkeypatch.setattr(grow, "_MAX_NUMBERS", 0)
    assert grow.sample_maps(maps)[1].bincount().tolist() == [1, 2, 2]

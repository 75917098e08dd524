"""Prototypes in their own images and in those nearest to them, of a small trained run."""

import numpy as np
import pytest
import torch

from conftest import random_maps
from prototree.backbones.backbone import Backbone
from prototree.core.nodes import NodeFunction
from prototree.core.topology import Topology
from prototree.data import Box, ImageData
from prototree.data.crops import FULL_IMAGE, View
from prototree.explanation.prototypes import explain_prototypes, fast_features
from prototree.run import Run
from tiny_explain import projected

Squares = tuple[Run, ImageData]


def test_hottest_place_of_a_match_lies_in_or_beside_its_box(squares: Squares) -> None:
    run, data = squares
    for prototype in explain_prototypes(run.tree(), data, [0, 1], occlusion=True):
        for match in (prototype.source, *prototype.nearest):
            heat, box = match.locations[0].heat, match.locations[0].box
            assert heat.shape == match.photo.shape[:2]
            row, column = np.unravel_index(heat.argmax(), heat.shape)
            x, y = (column + 0.5) * match.size[0] / heat.shape[1], (row + 0.5) * match.size[1] / heat.shape[0]
            assert box.enlarge(1.0).contains(float(x), float(y))
        assert [where.method for where in prototype.source.locations] == ["peak", "cell", "attribution", "occlusion"]


def test_one_prototype_alone_is_the_same_as_among_all(squares: Squares) -> None:
    run, data = squares
    tree = run.tree()
    together = explain_prototypes(tree, data, range(tree.topology.n_nodes))[1]
    (alone,) = explain_prototypes(tree, data, [1])
    assert alone.class_pass_rate == together.class_pass_rate
    assert [match.image for match in alone.nearest] == [match.image for match in together.nearest]
    assert alone.source.locations[0].box.edges == pytest.approx(together.source.locations[0].box.edges, abs=1e-3)
    leaf = tree.with_topology(Topology.from_children([], [], ~0)[0], np.array([], dtype=int), np.array([0]))
    assert explain_prototypes(leaf, data, range(0)) == ()


@pytest.mark.parametrize(
    ("view", "size"),
    [
        (FULL_IMAGE, (1, 1)),
        (View("crop", Box(4.0, 8.0, 36.0, 40.0)), (2, 1)),
        (View("mirror", None, True), (1, 1)),
        (View("mirror", None, True), (2, 1)),
    ],
)
def test_sources_are_found_again_in_crops_and_mirrored_views(
    tiny_backbone: Backbone, squares: Squares, view: View, size: tuple[int, int]
) -> None:
    data = squares[1]
    tree = projected(tiny_backbone, data, lambda _: (view,), size, height=1)
    for prototype in explain_prototypes(tree, data, [0], nearest=0):
        source = tree.sources[prototype.node]
        box = next(where.box for where in prototype.source.locations if where.method == "cell")
        assert box.edges == pytest.approx(source.patch_box)
        assert prototype.source.similarity == pytest.approx(1.0, abs=1e-3)
        assert prototype.nearest == ()


def test_a_tree_that_was_never_projected_shows_its_nearest_patches(squares: Squares) -> None:
    run, data = squares
    tree = run.tree("pruned")
    assert tree.sources[0] is None
    (explained,) = explain_prototypes(tree, data, [0], nearest=2)
    assert explained.source.image == explained.nearest[0].image
    assert explained.source.similarity == pytest.approx(explained.nearest[0].similarity, abs=1e-3)


def test_both_prototypes_of_a_pairwise_node_are_explained(tiny_backbone: Backbone, squares: Squares) -> None:
    data, n_nodes = squares[1], 3
    tree = projected(tiny_backbone, data, node_function=NodeFunction("pairwise", 6.0), height=2)
    explained = explain_prototypes(tree, data, range(tree.n_prototypes), nearest=1, notes={n_nodes + 1: "last_block"})
    assert [one.prototype for one in explained] == list(range(2 * n_nodes))
    assert [one.node for one in explained] == [*range(n_nodes)] * 2
    assert [one.side for one in explained] == ["right"] * n_nodes + ["left"] * n_nodes
    assert explained[n_nodes + 1].note == "last_block"
    for right, left in zip(explained[:n_nodes], explained[n_nodes:], strict=True):
        assert np.add(right.class_pass_rate, left.class_pass_rate) == pytest.approx(1.0)
    for one in explained[:3]:
        assert one.source.image == tree.sources[one.prototype].image
        assert one.radius == pytest.approx(float(tree.radius[one.prototype]))


def test_fast_features_are_the_features(squares: Squares) -> None:
    tree = squares[0].tree()
    images = random_maps(0, 2, 3, 32, 32, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in tree.state_dict().items()}
    with torch.no_grad():
        assert torch.allclose(fast_features(tree)(images), tree.features(images), atol=1e-4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tree.state_dict().items())

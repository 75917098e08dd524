"""Contracts 4 and 5 on whole trees, and the errors for input that does not fit."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
from conftest import grow, random_maps, tree_shapes
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree, PrototypeSource
from prototree.core.topology import Topology
from prototree.errors import ShapeError

# The backbone only lends its depth here; feature maps are given directly.
ORACLE_SETTINGS = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_tree(
    backbone: Backbone, topology: Topology, seed: int, size: tuple[int, int] = (1, 1), n_classes: int = 3
) -> ProtoTree:
    tree = ProtoTree(topology, FeatureExtractor(backbone, 4), n_classes, size)
    tree.prototypes.data = random_maps(seed, *tree.prototypes.shape)
    tree.leaf_logits.data = 6 * random_maps(seed + 1, topology.n_leaves, n_classes)
    return tree


def test_parameter_counts_of_table_s1() -> None:
    tree = ProtoTree(Topology.full(8), FeatureExtractor(Backbone("resnet50", None), 256), 200)
    assert tree.prototypes.numel() == 65_280
    assert tree.leaf_logits.numel() == 51_200
    assert sum(p.numel() for p in tree.parameters()) == 23_508_032 + 524_288 + 65_280 + 51_200


def test_initialisation_is_the_papers(tiny_backbone: Backbone) -> None:
    tree = ProtoTree(Topology.full(7), FeatureExtractor(tiny_backbone, 64), 9)
    assert tree.prototypes.mean().item() == pytest.approx(0.5, abs=0.01)
    assert tree.prototypes.std().item() == pytest.approx(0.1, abs=0.01)
    assert (tree.leaf_logits == 0).all()
    assert not tree.leaf_logits.requires_grad


def test_the_same_seed_gives_the_same_tree(tiny_backbone: Backbone) -> None:
    def make() -> ProtoTree:
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(4)
        return ProtoTree(Topology.full(3), FeatureExtractor(tiny_backbone, 8), 5, generator=generator)

    one, other = make().state_dict(), make().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@given(tree_shapes, st.integers(0, 1000), st.sampled_from([((3, 3), (1, 1)), ((3, 4), (2, 2)), ((4, 2), (3, 1))]))
@ORACLE_SETTINGS
def test_decisions_agree_with_the_oracle(
    tiny_backbone: Backbone, shape: list[int], seed: int, sizes: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    tree = random_tree(tiny_backbone, grow(shape), seed, sizes[1])
    z = random_maps(seed + 2, 3, 4, *sizes[0])
    decisions = tree.decide(tree.route(z))
    pi = oracle.path_probs(z, tree.prototypes.detach(), tree.topology)
    torch.testing.assert_close(decisions.soft, oracle.prediction(pi, tree.leaf_logits.detach()))
    sigma = oracle.softmax(tree.leaf_logits.detach())
    greedy = [oracle.greedy(image, tree.prototypes.detach(), tree.topology) for image in z]
    assert decisions.greedy.leaf.tolist() == greedy
    torch.testing.assert_close(decisions.class_probs("greedy"), sigma[greedy])
    torch.testing.assert_close(decisions.class_probs("max_path"), sigma[oracle.max_path(pi)])
    assert decisions.labels().tolist() == decisions.soft.argmax(dim=1).tolist()


@given(tree_shapes.filter(len), st.integers(0, 1000))
@ORACLE_SETTINGS
def test_loss_gradients_agree_with_the_oracle(tiny_backbone: Backbone, shape: list[int], seed: int) -> None:
    tree = random_tree(tiny_backbone, grow(shape), seed)
    z, labels = random_maps(seed + 2, 2, 4, 2, 3).requires_grad_(), torch.tensor([0, 2])
    fast = torch.autograd.grad(-tree.log_likelihood(tree.route(z), labels).mean(), (z, tree.prototypes))
    y_hat = oracle.prediction(oracle.path_probs(z, tree.prototypes, tree.topology), tree.leaf_logits.detach())
    slow = torch.autograd.grad(-y_hat[[0, 1], labels].log().mean(), (z, tree.prototypes))
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_images_and_their_feature_maps_give_the_same(tiny_tree: ProtoTree) -> None:
    images = torch.rand(3, 3, 64, 64)
    with torch.no_grad():
        from_maps = tiny_tree.decide(tiny_tree.route(tiny_tree.features(images)))
    assert torch.equal(tiny_tree.predict(images).soft, from_maps.soft)


def test_a_tree_of_some_nodes_predicts_what_the_oracle_predicts_on_them(tiny_backbone: Backbone) -> None:
    tree = random_tree(tiny_backbone, Topology.full(3), 5)
    source = PrototypeSource("a.jpg", 1, "full", (0, 1), (0.0, 0.0, 8.0, 8.0), 0.1)
    tree.sources = (None,) * 6 + (source,)
    kept = np.array([True, False, False, False, True, True, False, True])
    topology, nodes, leaf_ids = tree.topology.keep_leaves(kept)
    smaller = tree.with_topology(topology, nodes, leaf_ids)
    z = random_maps(7, 4, 4, 2, 2)
    pi = oracle.path_probs(z, smaller.prototypes.detach(), smaller.topology)
    torch.testing.assert_close(pi.sum(dim=1), torch.ones(4, dtype=torch.float64))
    expected = oracle.prediction(pi, tree.leaf_logits.detach()[leaf_ids])
    torch.testing.assert_close(smaller.decide(smaller.route(z)).soft, expected)
    assert smaller.prototypes.shape[0] == 3
    assert smaller.sources == tuple(tree.sources[node] for node in nodes)
    assert tree.topology.n_nodes == 7, "the old tree is unchanged"
    assert smaller.features is tree.features


def test_distances_stay_in_full_precision_under_autocast(tiny_tree: ProtoTree) -> None:
    images = torch.rand(2, 3, 64, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routed = tiny_tree(images)
    assert routed.distance.dtype == torch.float32
    assert routed.log_path_probs.dtype == torch.float32
    feature_map = torch.rand(2, 8, 4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = tiny_tree.route(feature_map).distance
    assert torch.equal(found, tiny_tree.route(feature_map).distance), "not the dtype alone, the digits too"


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("shape", [(0, 3, 64, 64), (2, 1, 64, 64), (3, 64, 64)])
def test_images_of_a_wrong_shape(tiny_tree: ProtoTree, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="non-empty batch of images"):
        tiny_tree(torch.zeros(shape))


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("shape", [(0, 8, 4, 4), (2, 7, 4, 4), (8, 4, 4)])
def test_feature_maps_of_a_wrong_shape(tiny_tree: ProtoTree, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="non-empty feature maps B×8×H×W"):
        tiny_tree.route(torch.zeros(shape))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_numbers(tiny_tree: ProtoTree, value: float) -> None:
    feature_map = torch.rand(2, 8, 4, 4)
    feature_map[1, 3, 2, 2] = value
    with pytest.raises(ShapeError, match="finite features, got NaN or infinity"):
        tiny_tree.route(feature_map)


def test_leaves_that_are_not_numbers_give_no_answer(tiny_tree: ProtoTree) -> None:
    tiny_tree.leaf_logits.data[1, 2] = torch.nan
    with pytest.raises(ShapeError, match="finite leaves, got NaN or infinity"):
        tiny_tree.predict(torch.rand(1, 3, 64, 64))


def test_one_class_is_not_enough(tiny_backbone: Backbone) -> None:
    with pytest.raises(ShapeError, match="at least 2 classes, got 1"):
        ProtoTree(Topology.full(2), FeatureExtractor(tiny_backbone, 4), 1)


def test_prototypes_larger_than_the_map_are_refused_at_once(tiny_backbone: Backbone) -> None:
    with pytest.raises(ShapeError, match=r"no larger than the feature map \(4, 4\), got \(5, 1\)"):
        ProtoTree(Topology.full(2), FeatureExtractor(tiny_backbone, 4), 3, prototype_size=(5, 1))


def test_the_soft_strategy_has_no_path(tiny_tree: ProtoTree) -> None:
    decisions = tiny_tree.predict(torch.rand(1, 3, 64, 64))
    assert decisions.path("greedy") is decisions.greedy
    with pytest.raises(ShapeError, match="takes every path"):
        decisions.path("soft")


@given(tree_shapes, st.integers(0, 1000), st.sampled_from([(1, 1), (2, 1)]), st.sampled_from([0, 10**9]))
@ORACLE_SETTINGS
def test_following_one_path_is_the_greedy_decision(
    tiny_backbone: Backbone, shape: list[int], seed: int, size: tuple[int, int], few: int
) -> None:
    tree, z = random_tree(tiny_backbone, grow(shape), seed, size), random_maps(seed + 2, 3, 4, 4, 4)
    expected = tree.decide(tree.route(z)).greedy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prototree.core.model._FEW_A_LEVEL", few)  # both ways to it
        for found, one in [(tree.follow(z), slice(None)), *((tree.follow(z[i : i + 1]), [i]) for i in range(3))]:
            assert torch.equal(found.leaf, expected.leaf[one])
            assert torch.equal(found.nodes, expected.nodes[one])
            torch.testing.assert_close(found.p_right, expected.p_right[one], rtol=1e-9, atol=1e-12)

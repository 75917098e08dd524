"""Eq. 2 and its generalisation: against the oracle, by properties, by gradients, and the paper's values bit for bit."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from conftest import grow, random_maps, tree_shapes
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core import checkpoint
from prototree.core.model import ProtoTree, greedy_leaves, log_path_probs, nearest_patches
from prototree.core.nodes import LN2, PAPER, NodeFunction, log_one_minus
from prototree.core.pruning import prune
from prototree.core.topology import Topology
from prototree.errors import ConfigError


@given(tree_shapes, st.integers(0, 1000), st.floats(1.0, 8.0), st.floats(0.3, 3.0))
@settings(deadline=None)
def test_presence_agrees_with_the_oracle(shape: list[int], seed: int, sharpness: float, radius: float) -> None:
    topology, node_function = grow(shape), NodeFunction("presence", sharpness)
    z, p = random_maps(seed, 2, 4, 2, 3), random_maps(seed + 1, topology.n_nodes, 4, 1, 1)
    radii = torch.full((topology.n_nodes,), radius, dtype=torch.float64)
    turns = node_function.log_p_left_right(nearest_patches(z, p).distance, radii)
    right_of = oracle.presence(radius, sharpness)
    expected = oracle.path_probs(z, p, topology, right_of)
    torch.testing.assert_close(log_path_probs(*turns, topology).exp(), expected, atol=5e-7, rtol=1e-7)
    found = greedy_leaves(turns[1].exp(), topology).tolist()
    assert found == [oracle.greedy(image, p, topology, right_of) for image in z]


@given(tree_shapes, st.integers(0, 1000), st.floats(0.5, 12.0))
@settings(deadline=None)
def test_pairwise_agrees_with_the_oracle(shape: list[int], seed: int, sharpness: float) -> None:
    topology, node_function = grow(shape), NodeFunction("pairwise", sharpness)
    z, p = random_maps(seed, 2, 4, 2, 3), random_maps(seed + 1, 2 * topology.n_nodes, 4, 1, 1)
    turns = node_function.log_p_left_right(nearest_patches(z, p).distance, torch.ones(len(p), dtype=torch.float64))
    right_of = oracle.choice(sharpness)
    expected = oracle.path_probs(z, p, topology, right_of)
    torch.testing.assert_close(log_path_probs(*turns, topology).exp(), expected, atol=1e-12, rtol=1e-9)
    found = greedy_leaves(turns[1].exp(), topology).tolist()
    assert found == [oracle.greedy(image, p, topology, right_of) for image in z]


def test_the_papers_values_are_the_paper_to_the_last_bit() -> None:
    for dtype in (torch.float32, torch.float64):
        distance = 4 * random_maps(0, 50, 7, dtype=dtype)
        left, right = PAPER.log_p_left_right(distance, torch.full((7,), LN2, dtype=dtype))
        assert torch.equal(right, -distance)
        assert torch.equal(left, torch.log(-torch.expm1(-distance.clamp_min(1e-7))))


@pytest.mark.parametrize("node_function", [PAPER, NodeFunction("presence", 6.0), NodeFunction("pairwise", 6.0)])
def test_gradients_are_right(node_function: NodeFunction) -> None:
    distance = (2 * random_maps(0, 3, 4) + 0.05).requires_grad_()
    radius = (random_maps(1, 4) + 0.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda d, r: node_function.log_p_left_right(d, r), (distance, radius))


@pytest.mark.parametrize(
    "node_function",
    [PAPER, NodeFunction("presence", 2.5), NodeFunction("presence", 64.0), NodeFunction("pairwise", 9.0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everything_stays_finite_from_no_distance_to_far(node_function: NodeFunction, dtype: torch.dtype) -> None:
    row = [0.0, 1e-38, 1e-12, 1e-7, 1e-3, LN2, 1.0, 1.5]
    row += [100.0, 1e4] if node_function.falloff < 10 else [2.0, 2.5]
    distance = torch.tensor([row], dtype=dtype, requires_grad=True)
    radius = torch.ones(len(row), dtype=dtype, requires_grad=True)
    for log_probability in node_function.log_p_left_right(distance, radius):
        gradients = torch.autograd.grad(log_probability.sum(), (distance, radius), allow_unused=True, retain_graph=True)
        assert torch.isfinite(log_probability).all()
        assert (log_probability <= 0).all()
        assert all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None)


@given(st.floats(0.0, 5.0), st.floats(0.05, 4.0), st.floats(1.0, 20.0))
@settings(deadline=None)
def test_similarity_is_one_at_nothing_and_one_half_at_the_radius(d: float, radius: float, sharpness: float) -> None:
    node_function, unit = NodeFunction("presence", sharpness), torch.tensor([radius], dtype=torch.float64)
    at = lambda x: float(node_function.similarity(torch.tensor([x], dtype=torch.float64), unit)[0])  # noqa: E731
    assert at(0.0) == 1.0
    assert at(radius) == pytest.approx(0.5, abs=1e-9)
    assert at(d) >= at(d + 0.1)
    if abs(d - radius) > 1e-6:
        assert (at(d) > 0.5) == (d < radius)


def test_log_one_minus_is_accurate_for_small_and_large_distances() -> None:
    distance = torch.logspace(-6.9, 2, 50, dtype=torch.float64)[None]
    truth = torch.log(-torch.expm1(-distance))
    torch.testing.assert_close(log_one_minus(-distance.float()).double(), truth, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "sharpness", "message"),
    [("presence", 0.9, "0.9"), ("presence", math.nan, "got nan"), ("pairwise", 0.0, "0.01"), ("riddle", 1.0, "riddle")],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_node_functions_out_of_range_are_refused(kind: str, sharpness: float, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NodeFunction(kind, sharpness)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.fixture(params=[NodeFunction("presence", 6.0), NodeFunction("pairwise", 6.0)], ids=["presence", "pairwise"])
def tree(request: pytest.FixtureRequest, tiny_backbone: Backbone) -> ProtoTree:
    torch.manual_seed(0)
    topology = Topology.from_children([1, ~0, ~1], [~3, 2, ~2])[0]
    features = FeatureExtractor(copy.deepcopy(tiny_backbone), 4)  # the backbone is shared by tests
    tree = ProtoTree(topology, features, 3, node_function=request.param).double()
    tree.radius.copy_(0.5 + random_maps(5, tree.n_prototypes))
    tree.leaf_logits.data = 5 * random_maps(6, 4, 3)
    return tree.eval()


def test_save_and_load_give_back_radii_and_node_function_bit_for_bit(tree: ProtoTree, tmp_path) -> None:
    tree = tree.float()
    checkpoint.save(tree, tmp_path)
    again = checkpoint.load(tmp_path)
    assert again.node_function == tree.node_function
    assert torch.equal(again.radius, tree.radius)
    maps = random_maps(0, 6, 4, 3, 3, dtype=torch.float32)
    assert torch.equal(again.forward_features(maps).log_path_probs, tree.forward_features(maps).log_path_probs)


def test_pruning_keeps_each_nodes_prototypes_and_radii(tree: ProtoTree) -> None:
    tree.leaf_logits.data = torch.tensor([[9.0, 0, 0], [0, 9, 0], [0, 0, 0], [0, 0, 9]]).double()
    pruned = prune(tree, 0.5)
    smaller, each = pruned.tree, tree.node_function.prototypes_per_node
    assert (pruned.prototypes_before, pruned.tree.n_prototypes) == (3 * each, 2 * each)
    assert smaller.topology.n_nodes == 2
    assert smaller.n_prototypes == 2 * tree.node_function.prototypes_per_node
    for number in range(smaller.n_prototypes):
        same = [k for k in range(tree.n_prototypes) if torch.equal(tree.prototypes[k], smaller.prototypes[number])]
        assert len(same) == 1
        assert tree.radius[same[0]] == smaller.radius[number]
        assert tree.node_of(same[0])[1] == smaller.node_of(number)[1], "a prototype stays on its side"
    maps = random_maps(0, 6, 4, 3, 3)
    right_of = {
        "pairwise": oracle.choice(6.0),
        "presence": lambda z, p, node: oracle.presence(float(smaller.radius[node]), 6.0)(z, p, node),
    }[tree.node_function.kind]
    expected = oracle.path_probs(maps, smaller.prototypes.detach(), smaller.topology, right_of)
    torch.testing.assert_close(smaller.forward_features(maps).log_path_probs.exp(), expected, atol=1e-9, rtol=1e-7)

"""Contract 2 (log space, finite everywhere) and the routing part of contracts 4 and 5."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from conftest import grow, random_maps, tree_shapes
from prototree.core import routing
from prototree.core.nodes import PAPER
from prototree.core.patches import nearest_patches
from prototree.core.topology import Topology


def log_path_probs(distance: torch.Tensor, topology: Topology) -> torch.Tensor:
    return routing.log_path_probs(
        *PAPER.log_turns(distance, torch.ones(distance.shape[1], dtype=distance.dtype)), topology
    )


@given(tree_shapes, st.integers(0, 1000))
@settings(deadline=None)
def test_path_probabilities_agree_with_the_oracle(shape: list[int], seed: int) -> None:
    topology = grow(shape)
    z, p = random_maps(seed, 2, 4, 2, 3), random_maps(seed + 1, topology.n_nodes, 4, 1, 1)
    found = log_path_probs(nearest_patches(z, p).distance, topology)
    torch.testing.assert_close(found.exp(), oracle.path_probs(z, p, topology), atol=1e-12, rtol=1e-10)


@given(tree_shapes, st.integers(0, 1000))
@settings(deadline=None)
def test_both_hard_strategies_agree_with_the_oracle(shape: list[int], seed: int) -> None:
    topology = grow(shape)
    z, p = random_maps(seed, 3, 3, 2, 2), random_maps(seed + 1, topology.n_nodes, 3, 1, 1)
    distance = nearest_patches(z, p).distance
    assert routing.greedy_leaves(torch.exp(-distance), topology).tolist() == [
        oracle.greedy(image, p, topology) for image in z
    ]
    found = routing.max_path_leaves(log_path_probs(distance, topology)).tolist()
    pi = oracle.path_probs(z, p, topology)
    assert torch.allclose(pi.gather(1, torch.tensor(found)[:, None])[:, 0], pi.amax(dim=1), rtol=1e-9)


def test_gradcheck_through_a_lopsided_tree() -> None:
    topology = Topology.from_children([1, ~0, ~1], [~3, 2, ~2])[0]
    distance = (random_maps(0, 3, topology.n_nodes) + 0.05).requires_grad_()
    assert torch.autograd.gradcheck(lambda d: log_path_probs(d, topology), distance)


def test_probabilities_sum_to_one_in_a_tall_tree_in_float32() -> None:
    topology = Topology.full(11)
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-6, 1e-2, 1.0, 20.0):
        distance = scale * torch.rand(8, topology.n_nodes, generator=generator)
        total = log_path_probs(distance, topology).exp().sum(dim=1)
        torch.testing.assert_close(total, torch.ones(8), atol=1e-5, rtol=0)


def test_the_root_has_log_probability_zero() -> None:
    single_leaf = Topology(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert log_path_probs(torch.zeros(3, 0), single_leaf).tolist() == [[0.0]] * 3
    one_node = Topology(np.array([~0]), np.array([~1]))
    found = log_path_probs(torch.tensor([[math.log(4)]]), one_node)
    torch.testing.assert_close(found, torch.tensor([[math.log(3 / 4), math.log(1 / 4)]]))


def test_greedy_is_not_max_path() -> None:
    # The root leans right (0.6), but behind it the way is split in even parts: 0.3 each against 0.4 × 0.9 on the left.
    topology = Topology.full(2)
    similarity = torch.tensor([[0.6, 0.1, 0.5]])
    distance = -similarity.log()
    log_probs = log_path_probs(distance, topology)
    torch.testing.assert_close(log_probs.exp(), torch.tensor([[0.36, 0.04, 0.3, 0.3]]))
    assert routing.max_path_leaves(log_probs).tolist() == [0]
    assert routing.greedy_leaves(similarity, topology).tolist() == [2]  # exactly 0.5 goes left


@given(tree_shapes, st.integers(0, 1000))
@settings(deadline=None)
def test_a_path_tells_nodes_turns_and_probabilities(shape: list[int], seed: int) -> None:
    topology = grow(shape)
    p_right = random_maps(seed, 4, topology.n_nodes)
    leaf = torch.tensor([seed * k % topology.n_leaves for k in range(4)])
    path = routing.path_to(leaf, p_right, topology)
    ways = oracle.routes(topology)
    for b in range(4):
        way = ways[int(leaf[b])]
        assert path.length[b] == len(way)
        for step, (node, right) in enumerate(way):
            assert (path.nodes[b, step], path.goes_right[b, step]) == (node, right)
            assert path.p_right[b, step] == p_right[b, node]
        assert (path.nodes[b, len(way) :] == -1).all()

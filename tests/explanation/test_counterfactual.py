"""The smallest change that makes another class the answer: it does so, and nothing smaller does."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray

from conftest import grow, tree_shapes
from prototree.core.model import greedy_leaves
from prototree.core.nodes import PAPER, NodeFunction
from prototree.core.topology import Topology
from prototree.explanation.counterfactual import MARGIN, find_counterfactual, smallest_change


def leaf_of(log_odds: ndarray, topology: Topology) -> ndarray:
    """The leaf that each row of log-odds leads to, by the tree's own routing."""
    return greedy_leaves(torch.sigmoid(torch.from_numpy(log_odds)), topology).numpy()


def log_odds_of(probability: float) -> float:
    return float(np.log(probability) - np.log1p(-probability))


@settings(deadline=None, max_examples=60)
@given(shape=tree_shapes.filter(bool), seed=st.integers(0, 1000))
def test_the_changes_change_the_answer_and_less_does_not(shape: list[int], seed: int) -> None:
    topology, rng = grow(shape), np.random.default_rng(seed)
    log_odds, labels = rng.normal(0, 2, topology.n_nodes), rng.integers(0, 3, topology.n_leaves)
    others = np.setdiff1d(labels, [labels[leaf_of(log_odds[None], topology)[0]]])
    if not len(others):
        return
    changed = log_odds.copy()
    for change in smallest_change(log_odds, topology, np.flatnonzero(labels == others[0])):
        assert log_odds_of(change.p_right) == pytest.approx(log_odds[change.node], abs=1e-6)
        changed[change.node] = log_odds_of(change.needed)
    assert labels[leaf_of(changed[None], topology)[0]] == others[0]
    # Any way to spend a little less, also on nodes that the answer leaves alone, does not do it.
    cost = np.abs(changed - log_odds).sum()
    budget = 0.98 * cost - 2 * MARGIN * topology.n_nodes
    if budget <= 0:
        return
    spent = budget * rng.dirichlet(np.full(topology.n_nodes, 0.5), 4000)
    tried = np.concatenate([spent * rng.choice([-1, 1], spent.shape), (budget / cost * (changed - log_odds))[None]])
    assert not (labels[leaf_of(log_odds + tried, topology)] == others[0]).any()


def test_every_wrong_decision_crosses_one_half() -> None:
    topology = Topology.full(2)  # leaves 0 and 1 below node 1, 2 and 3 below node 2
    log_odds = np.array([log_odds_of(p) for p in (0.9, 0.2, 0.6)])
    changes = smallest_change(log_odds, topology, np.array([1]))
    assert [change.node for change in changes] == [0, 1]
    assert changes[0].needed < 0.5 < changes[1].needed
    assert [change.needed for change in changes] == pytest.approx([0.5, 0.5], abs=1e-4)


def test_the_runner_up_is_the_next_class_that_a_leaf_stands_for() -> None:
    topology, log_odds, class_probs = Topology.full(1), np.array([2.0]), np.array([0.6, 0.3, 0.1])
    found = find_counterfactual(log_odds, topology, np.array([2, 0]), class_probs, 0)
    assert found.label == 2  # class 1 is more probable, but no leaf stands for it
    assert [change.node for change in found.flips] == [0]
    assert find_counterfactual(log_odds, topology, np.array([0, 0]), class_probs, 0) is None


def test_a_prototype_at_distance_zero_can_be_changed() -> None:
    left, right = PAPER.log_p_left_right(torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    (change,) = smallest_change((right - left)[0].numpy(), Topology.full(1), np.array([0]))
    assert change.needed == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize(("leaf", "prototype", "than", "by"), [(3, 0, 3, 0.4), (0, 4, 1, 0.3)])
def test_a_pairwise_node_says_which_prototype_would_have_to_be_nearer_and_by_how_much(
    leaf: int, prototype: int, than: int, by: float
) -> None:
    """At a sharpness at which probabilities are 0 and 1 to the last digit, distances still tell."""
    topology, node_function = Topology.full(2), NodeFunction("pairwise", 500.0)
    distance = torch.tensor([[0.9, 0.4, 0.4, 0.5, 0.7, 0.7]], dtype=torch.float64)  # right ones, then left ones
    left, right = node_function.log_p_left_right(distance, torch.ones(6, dtype=torch.float64))
    (change,) = smallest_change((right - left)[0].numpy(), topology, np.array([leaf]), node_function.sharpness)
    assert (change.nearer.prototype, change.nearer.than) == (prototype, than)
    assert change.nearer.by == pytest.approx(by, abs=1e-5)
    distance[0, prototype] -= change.nearer.by
    assert leaf_of(500 * (distance[:, 3:] - distance[:, :3]).numpy(), topology)[0] == leaf

"""The smallest change that flips a decision: it does flip it, and nothing smaller does."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray

from conftest import grow, tree_shapes
from prototree.core.nodes import PAPER, NodeFunction
from prototree.core.routing import greedy_leaves, log_path_probs, max_path_leaves
from prototree.core.strategies import Strategy
from prototree.core.topology import Topology
from prototree.explain.counterfactual import MARGIN, runner_up, smallest_flip

STRATEGIES: tuple[Strategy, ...] = ("max_path", "greedy")


def leaf_of(log_odds: ndarray, topology: Topology, strategy: Strategy) -> ndarray:
    """The leaf that each row of log-odds leads to, by the tree's own routing."""
    left, right = map(torch.from_numpy, turns(log_odds))
    if strategy == "greedy":
        return greedy_leaves(torch.exp(right), topology).numpy()
    return max_path_leaves(log_path_probs(left, right, topology)).numpy()


def turns(log_odds: ndarray) -> tuple[ndarray, ndarray]:
    """Log-probabilities of going left and right."""
    return -np.logaddexp(0.0, log_odds), -np.logaddexp(0.0, -log_odds)


def log_odds_of(similarity: float) -> float:
    return float(np.log(similarity) - np.log1p(-similarity))


def random_case(topology: Topology, seed: int) -> tuple[ndarray, ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(0, 2, topology.n_nodes), random.integers(0, 3, topology.n_leaves)


@settings(deadline=None, max_examples=60)
@given(shape=tree_shapes.filter(bool), seed=st.integers(0, 1000), strategy=st.sampled_from(STRATEGIES))
def test_the_flips_flip_the_decision_and_less_does_not(shape: list[int], seed: int, strategy: Strategy) -> None:
    topology = grow(shape)
    log_odds, labels = random_case(topology, seed)
    answer = labels[leaf_of(log_odds[None], topology, strategy)[0]]
    others = np.setdiff1d(labels, [answer])
    if not len(others):
        return
    leaves = np.flatnonzero(labels == others[0])
    flips = smallest_flip(*turns(log_odds), topology, leaves, strategy)
    changed = log_odds.copy()
    for flip in flips:
        assert log_odds_of(flip.p_right) == pytest.approx(log_odds[flip.node], abs=1e-6)
        changed[flip.node] = log_odds_of(flip.needed)
    assert labels[leaf_of(changed[None], topology, strategy)[0]] == others[0]
    # Any way to spend a little less, also on nodes that the answer leaves alone, does not do it.
    cost = np.abs(changed - log_odds).sum()
    budget = 0.98 * cost - 2 * MARGIN * topology.n_nodes
    if budget <= 0:
        return
    random = np.random.default_rng(seed)
    shares = random.dirichlet(np.full(topology.n_nodes, 0.5), 4000)
    spent = budget * shares * random.choice([-1, 1], shares.shape)
    own = changed - log_odds  # and the answer itself, scaled down and mixed with others
    mixed = random.random((1000, 1)) * own + random.normal(0, 0.1 * cost / topology.n_nodes, (1000, len(own)))
    mixed *= np.minimum(1.0, budget / np.abs(mixed).sum(axis=1, keepdims=True))
    tried = np.concatenate([spent, mixed, (budget / cost * own)[None]])
    assert not (labels[leaf_of(log_odds + tried, topology, strategy)] == others[0]).any()


def test_greedy_crosses_one_half_at_every_wrong_turn() -> None:
    topology = Topology.full(2)  # leaves 0 and 1 below node 1, 2 and 3 below node 2
    log_odds = np.array([log_odds_of(p) for p in (0.9, 0.2, 0.6)])
    flips = smallest_flip(*turns(log_odds), topology, np.array([1]), "greedy")
    assert [flip.node for flip in flips] == [0, 1]
    assert [flip.needed for flip in flips] == pytest.approx([0.5, 0.5], abs=1e-4)
    assert flips[0].needed < 0.5 < flips[1].needed


def test_max_path_by_brute_force() -> None:
    """Two nodes in a chain, every change on a fine grid."""
    topology, _, _ = Topology.from_children([1, ~0], [~2, ~1])
    for similarity in ([0.7, 0.4], [0.55, 0.9], [0.9, 0.5], [0.2, 0.95]):
        log_odds = np.array([log_odds_of(s) for s in similarity])
        now = leaf_of(log_odds[None], topology, "max_path")[0]
        grid = np.stack(np.meshgrid(*[np.linspace(-5, 5, 801)] * 2, indexing="ij"), axis=-1).reshape(-1, 2)
        ends = leaf_of(log_odds + grid, topology, "max_path")
        for leaf in set(range(3)) - {int(now)}:
            cheapest = np.abs(grid[ends == leaf]).sum(axis=1).min()
            flips = smallest_flip(*turns(log_odds), topology, np.array([leaf]), "max_path")
            found = sum(abs(log_odds_of(flip.needed) - log_odds_of(flip.p_right)) for flip in flips)
            assert found == pytest.approx(cheapest, abs=0.03)
            assert found <= cheapest + 5e-3  # the grid can only be dearer


def test_one_change_for_several_rivals() -> None:
    """Where a deeper node holds up two constraints at once, raising it beyond its own need is cheaper."""
    topology, _, _ = Topology.from_children([~0, ~1, ~2], [1, 2, ~3])
    log_odds = np.array([0.0, 0.0, -3.0])
    flips = smallest_flip(*turns(log_odds), topology, np.array([3]), "max_path")
    found = sum(abs(log_odds_of(flip.needed) - log_odds_of(flip.p_right)) for flip in flips)
    grid = np.stack(np.meshgrid(*[np.linspace(0, 6, 121)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    ends = leaf_of(log_odds + grid, topology, "max_path")
    assert found == pytest.approx(grid[ends == 3].sum(axis=1).min(), abs=0.1)


def test_runner_up_is_the_next_class_that_a_leaf_stands_for() -> None:
    topology = Topology.full(1)
    log_turns, soft = turns(np.array([2.0])), np.array([0.6, 0.3, 0.1])
    found = runner_up(*log_turns, topology, np.array([2, 0]), soft, 0, "greedy")
    assert found is not None
    assert found.label == 2  # class 1 is more probable, but no leaf stands for it
    assert [flip.node for flip in found.flips] == [0]
    assert runner_up(*log_turns, topology, np.array([0, 0]), soft, 0, "greedy") is None


def test_a_prototype_at_distance_zero_can_be_flipped() -> None:
    left, right = PAPER.log_turns(torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    flips = smallest_flip(left[0].numpy(), right[0].numpy(), Topology.full(1), np.array([0]), "max_path")
    assert flips[0].needed == pytest.approx(0.5, abs=1e-4)


def test_a_choice_says_which_prototype_would_have_to_be_nearer_and_by_how_much() -> None:
    """At a sharpness at which probabilities are 0 and 1 to the last digit, distances still tell."""
    topology, question = Topology.full(2), NodeFunction("pairwise", 500.0)
    distance = torch.tensor([[0.9, 0.4, 0.4, 0.5, 0.7, 0.7]], dtype=torch.float64)  # right ones, then left ones
    left, right = (side[0].numpy() for side in question.log_turns(distance, torch.ones(6, dtype=torch.float64)))
    (flip,) = smallest_flip(left, right, topology, np.array([3]), "greedy", question.sharpness)
    assert flip.node == 0
    assert flip.p_right == pytest.approx(0.0)
    assert flip.nearer is not None
    assert (flip.nearer.prototype, flip.nearer.than) == (0, 3)
    assert flip.nearer.by == pytest.approx(0.4, abs=1e-5)
    changed = distance.clone()
    changed[0, 0] -= flip.nearer.by
    assert leaf_of(500 * (changed[:, 3:] - changed[:, :3]).numpy(), topology, "greedy")[0] == 3
    (back,) = smallest_flip(left, right, topology, np.array([0]), "greedy", question.sharpness)
    assert back.nearer is not None
    assert (back.nearer.prototype, back.nearer.than) == (4, 1)
    assert back.nearer.by == pytest.approx(0.3, abs=1e-5)

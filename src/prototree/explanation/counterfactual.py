"""Counterfactual explanation: the smallest change of similarities that makes another class the answer (§5.3).

A change is measured as the sum over nodes of how far the log-odds of going right move. So 0.5 → 0.6 counts less than
0.98 → 0.999, as it should: the second asks ten times the belief. The answer is that of the greedy path, so every wrong
decision on the way to the new leaf must cross 0.5, and no other node need change.

Notation used for shapes: N nodes, L leaves, K classes, m some leaves.
"""

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from prototree.core.topology import Topology
from prototree.explanation.records import Counterfactual, Flip, Nearer

MARGIN = 1e-4  # how far past the balance a changed similarity goes, in log-odds: enough to be no tie in float32


def find_counterfactual(
    log_odds: Float[ndarray, " N"],
    topology: Topology,
    leaf_labels: Int[ndarray, " L"],
    class_probs: Float[ndarray, " K"],
    predicted: int,
    pairwise_sharpness: float | None = None,
) -> Counterfactual | None:
    """Find the runner-up class, by the probabilities over all paths, and what would have made it the answer.

    Only classes that some leaf stands for can be the runner-up; None where there is no other. At pairwise nodes,
    their sharpness turns log-odds into distances.
    """
    others = [int(label) for label in np.unique(leaf_labels) if label != predicted]
    if not others:
        return None
    label = max(others, key=lambda k: class_probs[k])
    return Counterfactual(
        label, smallest_change(log_odds, topology, np.flatnonzero(leaf_labels == label), pairwise_sharpness)
    )


def smallest_change(
    log_odds: Float[ndarray, " N"],
    topology: Topology,
    leaves: Int[ndarray, " m"],
    pairwise_sharpness: float | None = None,
) -> tuple[Flip, ...]:
    """Find the smallest change with which one of these leaves becomes the end of the greedy path."""
    nodes, goes_right = topology.paths[leaves], topology.goes_right[leaves]
    odds = log_odds.astype(np.float64)[nodes]
    # p > 0.5 goes right, so 0.5 itself goes left.
    wrong = np.where(goes_right, odds <= 0, odds > 0) & (nodes >= 0)
    change = np.where(wrong, MARGIN + np.abs(odds), 0.0)
    best = int(change.sum(axis=1).argmin())
    return tuple(
        _change(topology, int(nodes[best, i]), float(odds[best, i]), float(change[best, i]), pairwise_sharpness)
        for i in np.flatnonzero(change[best])
    )


def _change(topology: Topology, node: int, log_odds: float, change: float, pairwise_sharpness: float | None) -> Flip:
    """Describe the change of one node: to the right if its log-odds are not above 0, else to the left."""
    goes_right, nearer = log_odds <= 0, None
    if pairwise_sharpness is not None:  # log-odds are γ·(d_left − d_right)
        sides = (node, node + topology.n_nodes)
        prototype, sibling = sides if goes_right else sides[::-1]
        nearer = Nearer(prototype, sibling, change / pairwise_sharpness)
    needed = log_odds + change if goes_right else log_odds - change
    p_right, p_needed = np.exp(-np.logaddexp(0.0, [-log_odds, -needed]))
    return Flip(node, float(p_right), float(p_needed), nearer)

"""What another class would have needed: the smallest change of similarities that flips a decision (§5.3).

A change is measured as the sum over nodes of how far the log-odds of going right move. So 0.5 → 0.6 counts less than
0.98 → 0.999, as it should: the second asks ten times the belief. In this measure only nodes on the way to the new leaf
need to change. A change anywhere else weakens one rival path by less than it costs, and the same change where that
rival parts from the way weakens all rivals there by exactly what it costs.

*Greedy*: every wrong turn on the way must cross 0.5. *Max-path*: let x be the log-odds of each turn on the way, root
first, and δ ≥ 0 what is added to them. No leaf that parts from the way at node i may be more probable than its end:

    x_i + δ_i + Σ_{j>i} log σ(x_j + δ_j) ≥ M_i,    M_i the best log-probability below the other child of i.

The left side is concave in δ, so minimising Σδ is a convex problem with as many unknowns as the way has nodes. It is
solved by Newton steps with a logarithmic barrier.

Notation used for shapes: N nodes, L leaves, h nodes on the way.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from prototree.core.strategies import Strategy
from prototree.core.topology import Topology
from prototree.explain.records import Flip, Nearer, RunnerUp

# How far past the balance a changed similarity goes, in log-odds: enough to be no tie in float32.
MARGIN = 1e-4
_NEGLIGIBLE = 1e-5
_GAP = 1e-7  # of the solution to the best one


@dataclass(frozen=True)
class _Way:
    """From the root to one leaf: its nodes, its turns, the log-odds of each, and what is to be beaten at each."""

    nodes: Int[ndarray, " h"]
    goes_right: ndarray
    log_odds: Float[ndarray, " h"]
    rival: Float[ndarray, " h"]  # M_i

    def change(self, strategy: Strategy) -> Float[ndarray, " h"]:
        if strategy == "greedy":
            # s > 0.5 goes right, so 0.5 itself is a turn to the left.
            wrong = np.where(self.goes_right, self.log_odds <= 0, self.log_odds < 0)
            return np.where(wrong, MARGIN - self.log_odds, 0.0)
        return _cheapest(self.log_odds, self.rival)


def runner_up(
    log_left: Float[ndarray, " N"],
    log_right: Float[ndarray, " N"],
    topology: Topology,
    leaf_labels: Int[ndarray, " L"],
    soft: Float[ndarray, " K"],
    answer: int,
    strategy: Strategy,
    choice_sharpness: float | None = None,
) -> RunnerUp | None:
    """The class next in line, by the whole tree's probabilities, and what would have made it the answer.

    Only classes that some leaf stands for can be next in line; None where there is no other. Where nodes choose between
    two patches, their sharpness turns log-odds into distances.
    """
    others = [int(label) for label in np.unique(leaf_labels) if label != answer]
    if not others:
        return None
    label = max(others, key=lambda k: soft[k])
    leaves = np.flatnonzero(leaf_labels == label)
    return RunnerUp(label, smallest_flip(log_left, log_right, topology, leaves, strategy, choice_sharpness))


def smallest_flip(
    log_left: Float[ndarray, " N"],
    log_right: Float[ndarray, " N"],
    topology: Topology,
    leaves: Int[ndarray, " m"],
    strategy: Strategy,
    choice_sharpness: float | None = None,
) -> tuple[Flip, ...]:
    """The smallest change with which one of these leaves becomes the end of the path."""
    left, right = log_left.astype(np.float64), log_right.astype(np.float64)
    edges = np.where(topology.goes_right, right[topology.paths], left[topology.paths])
    edges = np.where(topology.paths >= 0, edges, 0.0)
    log_probs = edges.sum(axis=1)
    # A unit of change moves the balance of two leaves by at most a unit, so a leaf that lies farther behind than the
    # best change found costs cannot be cheaper.
    behind = log_probs.max() - log_probs[leaves]
    best, way = np.full(1, np.inf), None
    for leaf, deficit in sorted(zip(leaves.tolist(), behind.tolist(), strict=True), key=lambda pair: pair[1]):
        if strategy == "max_path" and deficit >= best.sum():
            break
        candidate = _way_to(leaf, topology, edges, right - left)
        change = candidate.change(strategy)
        if change.sum() < best.sum():
            best, way = change, candidate
    assert way is not None
    flips = []
    for i in np.flatnonzero(best).tolist():
        node, moved, nearer = int(way.nodes[i]), float(best[i]), None
        if choice_sharpness is not None:  # log-odds are γ·(d_left − d_right)
            sides = (node, node + topology.n_nodes)
            wanted, other = sides if way.goes_right[i] else sides[::-1]
            nearer = Nearer(wanted, other, moved / choice_sharpness)
        flips.append(Flip(node, float(np.exp(right[node])), _needed(way, i, moved), nearer))
    return tuple(flips)


def _needed(way: _Way, i: int, change: float) -> float:
    """The probability of going right that node i of the way needs."""
    log_odds = way.log_odds[i] + change
    return float(1 / (1 + np.exp(-log_odds if way.goes_right[i] else log_odds)))


def _way_to(leaf: int, topology: Topology, edges: Float[ndarray, "L height"], log_odds: Float[ndarray, " N"]) -> _Way:
    length = int(topology.depths[leaf])
    nodes, turns = topology.paths[leaf, :length], topology.goes_right[leaf, :length]
    together = (topology.paths[:, :length] == nodes) & (topology.goes_right[:, :length] == turns)
    parts_at = together.cumprod(axis=1).sum(axis=1)  # how many steps each leaf goes along
    below = edges[:, ::-1].cumsum(axis=1)[:, ::-1]  # log-probability from each node of a leaf's path to the leaf
    below = np.concatenate([below, np.zeros((len(edges), 1))], axis=1)
    rival = np.array([below[parts_at == i, i + 1].max() for i in range(length)])
    return _Way(nodes, turns, np.where(turns, log_odds[nodes], -log_odds[nodes]), rival)


def _cheapest(log_odds: Float[ndarray, " h"], rival: Float[ndarray, " h"]) -> Float[ndarray, " h"]:
    """The δ of least sum that meets all constraints, and is 0 where it need not be more."""
    if (_slack(np.zeros_like(log_odds), log_odds, rival) >= MARGIN).all():
        return np.zeros_like(log_odds)
    change = _climb(np.zeros_like(log_odds), log_odds, rival, 1.0)
    sharpness = 1.0
    while 2 * len(change) / sharpness > _GAP:
        change = _newton(change, log_odds, rival, sharpness)
        sharpness *= 8
    # The barrier stays inside; drop what it kept above 0 for no reason, then restore what that cost, deepest first.
    change = np.where(change < _NEGLIGIBLE, 0.0, change)
    return _climb(change, log_odds, rival, MARGIN)


def _slack(
    change: Float[ndarray, " h"], log_odds: Float[ndarray, " h"], rival: Float[ndarray, " h"]
) -> Float[ndarray, " h"]:
    log_turn = -np.logaddexp(0.0, -(log_odds + change))
    below = log_turn[::-1].cumsum()[::-1] - log_turn
    slack: ndarray = log_odds + change + below - rival
    return slack


def _climb(
    change: Float[ndarray, " h"], log_odds: Float[ndarray, " h"], rival: Float[ndarray, " h"], margin: float
) -> Float[ndarray, " h"]:
    """Raises what is short of its constraint to `margin` above it; a later δ only relaxes the earlier constraints."""
    change = change.copy()
    for i in reversed(range(len(change))):
        missing = margin - _slack(change, log_odds, rival)[i]
        change[i] = max(change[i] + max(missing, 0.0), margin if margin >= 1 else 0.0)
    return change


def _newton(
    change: Float[ndarray, " h"], log_odds: Float[ndarray, " h"], rival: Float[ndarray, " h"], sharpness: float
) -> Float[ndarray, " h"]:
    """Minimises sharpness·Σδ − Σ log slack − Σ log δ from a point inside."""

    def value(point: Float[ndarray, " h"]) -> float:
        inside = np.concatenate([point, _slack(point, log_odds, rival)])
        return float(sharpness * point.sum() - np.log(inside).sum()) if (inside > 0).all() else np.inf

    count = len(change)
    for _ in range(60):
        slack = _slack(change, log_odds, rival)
        rate = 1 / (1 + np.exp(log_odds + change))  # of log σ
        jacobian = np.triu(np.broadcast_to(rate, (count, count)), 1) + np.eye(count)
        gradient = sharpness - (jacobian / slack[:, None]).sum(axis=0) - 1 / change
        scaled = jacobian / slack[:, None]
        reached = (1 / slack).cumsum() - 1 / slack  # Σ over the constraints above
        hessian = scaled.T @ scaled + np.diag(rate * (1 - rate) * reached + change**-2.0)
        step = -np.linalg.solve(hessian, gradient)
        decrease = -float(gradient @ step)
        if decrease < 1e-10:
            break
        length, now = 1.0, value(change)
        while value(change + length * step) > now - 0.1 * length * decrease and length > 1e-12:
            length /= 2
        change = change + length * step
    return change

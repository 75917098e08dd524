"""Ward's hierarchical clustering, for grouping classes. Small on purpose: K points, K³ steps at worst."""

import numpy as np
from jaxtyping import Float
from numpy import ndarray


def ward_groups(points: Float[ndarray, "K D"], n_groups: int) -> list[list[int]]:
    """Merges the two clusters whose union raises the variance least, until `n_groups` are left."""
    members = [[k] for k in range(len(points))]
    centres, sizes = points.astype(np.float64).copy(), np.ones(len(points))
    cost = _costs(centres, sizes)
    while len(members) > max(n_groups, 1):
        first, second = sorted(map(int, np.unravel_index(cost.argmin(), cost.shape)))
        total = sizes[first] + sizes[second]
        centres[first] = (sizes[first] * centres[first] + sizes[second] * centres[second]) / total
        sizes[first] = total
        members[first] += members.pop(second)
        centres, sizes = np.delete(centres, second, axis=0), np.delete(sizes, second)
        cost = np.delete(np.delete(cost, second, axis=0), second, axis=1)
        cost[first] = cost[:, first] = _costs_of(first, centres, sizes)
    return [sorted(group) for group in members]


def _costs(centres: Float[ndarray, "n D"], sizes: Float[ndarray, " n"]) -> Float[ndarray, "n n"]:
    return np.stack([_costs_of(i, centres, sizes) for i in range(len(centres))])


def _costs_of(one: int, centres: Float[ndarray, "n D"], sizes: Float[ndarray, " n"]) -> Float[ndarray, " n"]:
    cost = sizes * sizes[one] / (sizes + sizes[one]) * np.square(centres - centres[one]).sum(axis=1)
    cost[one] = np.inf
    return np.asarray(cost)

"""Which classes are alike: Ward's method, and groups of groups cut from what it finds.

Every cluster that Ward's method merges stays whole in all later ones, so that one run answers for every group, and for
the groups within it. Clusters are merged along chains of nearest neighbours, which takes time in the square of the
number of classes and no more memory than their means.

Notation used for array shapes: K classes, D prototype depth.
"""

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

Part = int | list[Any]
"""A class, or a group of parts."""


@dataclass(frozen=True)
class Dendrogram:
    """Clusters within clusters: 0 to K − 1 are the single classes, the others were merged of two, the last is all."""

    n_classes: int
    merged: list[tuple[int, int]]  # of cluster K, K + 1 and so on
    cost: list[float]  # what each merger added to the variance within clusters

    @classmethod
    def of(cls, points: Float[ndarray, "K D"]) -> "Dendrogram":
        """Always the two clusters whose union raises the variance least."""
        clusters, found, costs = _Clusters(points), list[tuple[int, int]](), list[float]()
        chain: list[int] = []
        while clusters.n_left > 1:
            chain = chain or [0]
            cost = clusters.costs_of(chain[-1])
            nearest = int(cost.argmin())
            if len(chain) == 1 or cost[nearest] < cost[chain[-2]]:
                chain.append(nearest)
                continue
            first, second = sorted(chain[-2:])  # each is the other's nearest
            costs.append(float(cost[chain[-2]]))
            found.append(clusters.merge(first, second, len(points) + len(found)))
            chain = [second if place == clusters.n_left else place for place in chain[:-2]]
        return cls(len(points), found, costs)

    @property
    def everything(self) -> int:
        return self.n_classes + len(self.merged) - 1

    def groups(self, cluster: int, n_groups: int) -> list[int]:
        """The clusters that a cluster was when so many of its parts were left, by their first classes."""
        parts = [self._by_cost(cluster)]
        while len(parts) < n_groups and parts[0][1] >= self.n_classes:
            for part in self.merged[heapq.heappop(parts)[1] - self.n_classes]:
                heapq.heappush(parts, self._by_cost(part))
        return sorted((part for _, part in parts), key=lambda part: self.classes(part)[0])

    def classes(self, cluster: int) -> list[int]:
        """In order."""
        found, waiting = list[int](), [cluster]
        while waiting:
            one = waiting.pop()
            if one < self.n_classes:
                found.append(one)
            else:
                waiting += self.merged[one - self.n_classes]
        return sorted(found)

    def _by_cost(self, cluster: int) -> tuple[float, int]:
        return (-self.cost[cluster - self.n_classes] if cluster >= self.n_classes else np.inf), cluster


class _Clusters:
    """Those that are left, in the first rows of arrays."""

    def __init__(self, points: Float[ndarray, "K D"]) -> None:
        self.n_left = len(points)
        self._centres, self._sizes = points.astype(np.float64).copy(), np.ones(len(points))
        self._squares, self._names = np.square(self._centres).sum(axis=1), list(range(len(points)))

    def costs_of(self, place: int) -> Float[ndarray, " n"]:
        """What merging a cluster with each of the others would cost."""
        n, sizes, squares = self.n_left, self._sizes[: self.n_left], self._squares[: self.n_left]
        apart = squares + squares[place] - 2 * (self._centres[:n] @ self._centres[place])
        cost = sizes * sizes[place] / (sizes + sizes[place]) * np.maximum(apart, 0)
        cost[place] = np.inf
        return np.asarray(cost)

    def merge(self, first: int, second: int, name: int) -> tuple[int, int]:
        """Puts the union in the first one's place and the last one of all in the second's; returns the two names."""
        pair, last = (self._names[first], self._names[second]), self.n_left - 1
        total = self._sizes[first] + self._sizes[second]
        weights = self._sizes[[first, second]] / total
        self._centres[first] = weights @ self._centres[[first, second]]
        self._squares[first] = np.square(self._centres[first]).sum()
        self._sizes[first], self._names[first] = total, name
        for rows in (self._centres, self._squares, self._sizes):
            rows[second] = rows[last]
        self._names[second] = self._names[last]
        self.n_left = last
        return pair


def hierarchy(means: Float[ndarray, "K D"], longest: float) -> Part:
    """Groups of alike classes, and groups of groups where else the way to a class would be long.

    As few levels as a mean path of `longest` allows: a prototype then stands for few classes that are alike.
    """
    found, levels = Dendrogram.of(means), 2
    while (
        (part := _nest(found, found.everything, levels)) and max_mean_depth(part) > longest and 2**levels < len(means)
    ):
        levels += 1
    return part


def halves(means: Float[ndarray, "K D"]) -> Part:
    """Two groups of alike classes, and each again, down to single ones."""
    found = Dendrogram.of(means)

    def parted(cluster: int) -> Part:
        return cluster if cluster < found.n_classes else [parted(part) for part in found.groups(cluster, 2)]

    return parted(found.everything)


def max_mean_depth(part: Part) -> float:
    """Decisions to a class on average, if the parts of a part leave it one by one in any order."""
    depths = _depths(part)
    return sum(depths) / len(depths)


def classes_in(part: Part) -> list[int]:
    """All classes of a part."""
    return [part] if isinstance(part, int) else [label for one in part for label in classes_in(one)]


def _nest(found: Dendrogram, cluster: int, levels: int) -> Part:
    classes = found.classes(cluster)
    if levels == 1 or len(classes) <= 2:
        return list(classes)
    groups = found.groups(cluster, round(1.4 * len(classes) ** (1 / levels)))
    return [_nest(found, group, levels - 1) for group in groups]


def _depths(part: Part) -> list[float]:
    if isinstance(part, int):
        return [0.0]
    # The i-th to leave has met i nodes, the last two one and the same.
    own = (len(part) + 1) / 2 - 1 / len(part)
    return [own + depth for one in part for depth in _depths(one)]

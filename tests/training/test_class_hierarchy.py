"""Which classes are alike: the chains of nearest neighbours find what merging one pair after the other finds."""

import numpy as np
import pytest

from prototree.training import class_hierarchy
from prototree.training.class_hierarchy import Part


def slow_groups(points: np.ndarray, n_groups: int) -> list[list[int]]:
    """Ward's method as it is written: the cheapest of all pairs, again and again."""
    members = [[k] for k in range(len(points))]
    while len(members) > max(n_groups, 1):
        cost = {}
        for j in range(len(members)):
            for i in range(j):
                n, m = len(members[i]), len(members[j])
                apart = points[members[i]].mean(axis=0) - points[members[j]].mean(axis=0)
                cost[i, j] = n * m / (n + m) * float(apart @ apart)
        i, j = min(cost, key=lambda pair: cost[pair])
        members[i] += members.pop(j)
    return sorted(sorted(group) for group in members)


def slow_halves(points: np.ndarray, classes: list[int]) -> Part:
    if len(classes) == 1:
        return classes[0]
    return [slow_halves(points, [classes[i] for i in group]) for group in slow_groups(points[classes], 2)]


@pytest.mark.parametrize("n_classes", [1, 2, 3, 7, 24])
def test_one_run_finds_what_merging_the_cheapest_pair_finds(n_classes: int) -> None:
    points = np.random.default_rng(n_classes).normal(size=(n_classes, 5))
    assert class_hierarchy.halves(points) == slow_halves(points, list(range(n_classes)))
    found = class_hierarchy.Dendrogram.of(points)
    for n_groups in range(1, n_classes + 1):
        groups = [found.classes(cluster) for cluster in found.groups(found.everything, n_groups)]
        assert groups == slow_groups(points, n_groups)


def test_classes_that_are_the_same_are_parted_too() -> None:
    assert sorted(class_hierarchy.classes_in(class_hierarchy.halves(np.zeros((9, 3))))) == list(range(9))

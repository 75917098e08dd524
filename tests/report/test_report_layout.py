"""Places on paper: nothing overlaps, children stand by their parents, the sheet is used, and any depth is fine."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import grow, tree_shapes
from prototree.core.topology import Topology
from prototree.report.cards import LEAF_SIZE, NODE_SIZE, SPACING
from prototree.report.layout import CardPlace, Layout, Size, arrange, parts, reading_order
from sample_explanations import random_topology, spine


def children(topology: Topology) -> tuple[list[int], list[int]]:
    return topology.left.tolist(), topology.right.tolist()


def size_of(id_: int) -> Size:
    return NODE_SIZE if id_ >= 0 else LEAF_SIZE


def fit(layout: Layout, sheet: Size = (1320.0, 760.0)) -> float:
    return min(sheet[0] / layout.width, sheet[1] / layout.height)


def apart(one: CardPlace, other: CardPlace) -> bool:
    across = one.x + one.width <= other.x - 10 or other.x + other.width <= one.x - 10
    down = one.y + one.height <= other.y - 10 or other.y + other.height <= one.y - 10
    return across or down


@given(tree_shapes, st.sets(st.integers(0, 8)), st.sampled_from([0.5, 1.0, 1.7, 3.0]))
def test_cards_do_not_overlap_whatever_is_folded(shape: list[int], closed: set[int], aspect: float) -> None:
    left, right = children(grow(shape))
    layout = arrange(left, right, size_of, closed=closed, aspect=aspect, spacing=SPACING)
    assert all(apart(one, other) for one, other in combinations(layout.places.values(), 2))
    for place in layout.places.values():
        assert 0 <= place.x <= place.x + place.width <= layout.width + 1e-6
        assert 0 <= place.y <= place.y + place.height <= layout.height + 1e-6


@given(tree_shapes)
def test_children_stand_below_or_beside_their_parents(shape: list[int]) -> None:
    left, right = children(grow(shape))
    places = arrange(left, right, size_of).places
    assert list(places) == [id_ for id_, _ in reading_order(left, right)]
    for node in range(len(left)):
        own, first, second = places[node], places[left[node]], places[right[node]]
        assert {first.level, second.level} == {own.level + 1}
        if own.shape == "below":
            assert first.x < second.x
            assert first.y == second.y > own.y + own.height
        elif own.shape == "stacked":
            assert own.y + own.height < first.y < second.y
        else:
            beside, below = (first, second) if own.shape == "left aside" else (second, first)
            assert beside.y == own.y
            assert beside.x > own.x + own.width
            assert below.y > own.y + own.height


@pytest.mark.parametrize(
    ("topology", "least"),
    [
        (random_topology(11), 0.85), (spine(12), 0.5), (Topology.full(5), 0.45),
        (random_topology(200, seed=1), 0.16), (random_topology(1000, seed=1), 0.065),
    ],
)  # fmt: skip
def test_the_sheet_is_used(topology: Topology, least: float) -> None:
    """As large as they can be on a usual screen."""
    assert fit(arrange(*children(topology), size_of, aspect=1320 / 760, spacing=SPACING)) > least


def test_a_chain_of_two_thousand_nodes_is_no_trouble() -> None:
    layout = arrange(*children(spine(2000)), size_of)
    assert layout.n_levels == 2001
    assert len(layout.ends) == 2001


@given(st.integers(1, 80), st.integers(2, 12), st.integers(1, 5), st.integers(0, 5))
def test_parts_show_every_node_once_and_fit(n_nodes: int, most_ends: int, most_levels: int, seed: int) -> None:
    left, right = children(random_topology(n_nodes, seed))
    shown: list[int] = []
    roots = []
    for root, closed in parts(left, right, most_ends=most_ends, most_levels=most_levels):
        layout = arrange(left, right, size_of, root=root, closed=closed)
        assert len(layout.ends) <= most_ends
        assert layout.n_levels <= most_levels + 1
        shown += [id_ for id_ in layout.places if id_ >= 0 and id_ not in closed]
        shown += [id_ for id_ in layout.places if id_ < 0]
        roots.append((root, closed))
    assert sorted(shown) == list(range(-n_nodes - 1, n_nodes))
    continued = [node for _, closed in roots for node in closed]
    assert sorted(continued) == sorted(root for root, _ in roots if root != 0)

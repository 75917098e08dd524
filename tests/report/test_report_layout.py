"""Places on paper: nothing overlaps, parents stand over their children, and any depth is fine."""

from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from conftest import grow, tree_shapes
from prototree.report.cards import LEAF_HEIGHT, LEAF_WIDTH, LEVEL, NODE_HEIGHT, NODE_WIDTH, SLOT
from prototree.report.layout import arrange, parts
from prototree.tree.topology import Topology
from sample_explanations import random_topology, spine


def children(topology: Topology) -> tuple[list[int], list[int]]:
    return topology.left.tolist(), topology.right.tolist()


@given(tree_shapes)
def test_every_parent_stands_over_the_middle_of_its_children(shape: list[int]) -> None:
    left, right = children(grow(shape))
    places = arrange(left, right).places
    assert len(places) == 2 * len(left) + 1
    for node in range(len(left)):
        below = places[left[node]], places[right[node]]
        assert places[node].x == (below[0].x + below[1].x) / 2
        assert below[0].x < places[node].x < below[1].x
        assert {place.level for place in below} == {places[node].level + 1}


@given(tree_shapes, st.sets(st.integers(0, 8)))
def test_cards_do_not_overlap_whatever_is_folded(shape: list[int], closed: set[int]) -> None:
    left, right = children(grow(shape))
    layout = arrange(left, right, closed=closed)
    levels = defaultdict(list)
    for id_, place in layout.places.items():
        width = LEAF_WIDTH if id_ in layout.ends else NODE_WIDTH
        levels[place.level].append((place.x * SLOT, width))
    for cards in levels.values():
        cards.sort()
        for (x, width), (next_x, next_width) in pairwise(cards):
            assert next_x - x > (width + next_width) / 2
    assert max(NODE_HEIGHT, LEAF_HEIGHT) < LEVEL


@given(tree_shapes)
def test_ends_stand_one_slot_apart_in_reading_order(shape: list[int]) -> None:
    topology = grow(shape)
    layout = arrange(*children(topology))
    assert [layout.places[end].x for end in layout.ends] == list(range(topology.n_leaves))
    turns = {leaf: tuple(way) for leaf, way in enumerate(topology.goes_right.tolist())}
    in_order = [turns[~end][: topology.depths[~end]] for end in layout.ends]
    assert in_order == sorted(in_order)  # what lacks a prototype stands left of what has it


def test_a_chain_of_two_thousand_nodes_is_no_trouble() -> None:
    layout = arrange(*children(spine(2000)))
    assert layout.n_levels == 2001
    assert len(layout.ends) == 2001


@given(st.integers(1, 80), st.integers(2, 12), st.integers(1, 5), st.integers(0, 5))
def test_parts_show_every_node_once_and_fit(n_nodes: int, most_ends: int, most_levels: int, seed: int) -> None:
    left, right = children(random_topology(n_nodes, seed))
    shown: list[int] = []
    roots = []
    for root, closed in parts(left, right, most_ends=most_ends, most_levels=most_levels):
        layout = arrange(left, right, root=root, closed=closed)
        assert len(layout.ends) <= most_ends
        assert layout.n_levels <= most_levels + 1
        shown += [id_ for id_ in layout.places if id_ >= 0 and id_ not in closed]
        shown += [id_ for id_ in layout.places if id_ < 0]
        roots.append((root, closed))
    assert sorted(shown) == list(range(-n_nodes - 1, n_nodes))
    continued = [node for _, closed in roots for node in closed]
    assert sorted(continued) == sorted(root for root, _ in roots if root != 0)

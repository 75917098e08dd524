"""Layout: nothing overlaps, children stand by their parents, the sheet is used, and any depth is fine."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import grow, tree_shapes
from prototree.core.topology import Topology
from prototree.reporting.layout import LEAF_SIZE, NODE_SIZE, Card, Size, arrange, reading_order
from sample_explanations import random_topology, spine


def children(topology: Topology) -> tuple[list[int], list[int]]:
    return topology.left.tolist(), topology.right.tolist()


def size_of(id_: int) -> Size:
    return NODE_SIZE if id_ >= 0 else LEAF_SIZE


def are_separate(card: Card, other: Card) -> bool:
    across = card.x + card.width <= other.x - 10 or other.x + other.width <= card.x - 10
    down = card.y + card.height <= other.y - 10 or other.y + other.height <= card.y - 10
    return across or down


@given(tree_shapes, st.sets(st.integers(0, 8)), st.sampled_from([0.5, 1.0, 1.7, 3.0]))
def test_cards_do_not_overlap_whatever_is_folded(shape: list[int], closed: set[int], aspect: float) -> None:
    left, right = children(grow(shape))
    layout = arrange(left, right, size_of, closed=closed, aspect=aspect)
    assert all(are_separate(card, other) for card, other in combinations(layout.cards.values(), 2))
    for card in layout.cards.values():
        assert 0 <= card.x <= card.x + card.width <= layout.width + 1e-6
        assert 0 <= card.y <= card.y + card.height <= layout.height + 1e-6


@given(tree_shapes)
def test_children_stand_below_or_beside_their_parents(shape: list[int]) -> None:
    left, right = children(grow(shape))
    cards = arrange(left, right, size_of).cards
    assert list(cards) == [id_ for id_, _ in reading_order(left, right)]
    for node in range(len(left)):
        card, first, second = cards[node], cards[left[node]], cards[right[node]]
        if card.shape == "below":
            assert first.x < second.x
            assert first.y == second.y > card.y + card.height
        elif card.shape == "stacked":
            assert card.y + card.height < first.y < second.y
        else:
            beside, below = (first, second) if card.shape == "left aside" else (second, first)
            assert beside.y == card.y
            assert beside.x > card.x + card.width
            assert below.y > card.y + card.height


@pytest.mark.parametrize(
    ("topology", "least"),
    [
        (random_topology(11), 0.85), (spine(12), 0.5), (Topology.full(5), 0.45),
        (random_topology(200, seed=1), 0.16),
        pytest.param(random_topology(1000, seed=1), 0.065, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_sheet_is_used(topology: Topology, least: float) -> None:
    """As large as they can be on a usual screen."""
    layout = arrange(*children(topology), size_of, aspect=1320 / 760)
    assert min(1320 / layout.width, 760 / layout.height) > least


def test_a_chain_deeper_than_recursion_goes_is_no_trouble() -> None:
    cards = arrange(*children(spine(1100)), size_of).cards
    assert max(card.level for card in cards.values()) == 1100
    assert sum(id_ < 0 for id_ in cards) == 1101

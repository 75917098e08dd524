"""Layout: nothing overlaps, left children stand on the left, the sheet is used, and any depth is fine."""

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


SHEETS = st.sampled_from([(100.0, 200.0), (1320.0, 760.0), (900.0, 300.0)])  # small ones make the tree compact


@given(tree_shapes, st.sets(st.integers(0, 8)), SHEETS)
def test_cards_do_not_overlap_whatever_is_folded(shape: list[int], closed: set[int], sheet: Size) -> None:
    left, right = children(grow(shape))
    layout = arrange(left, right, size_of, closed=closed, sheet=sheet)
    assert all(are_separate(card, other) for card, other in combinations(layout.cards.values(), 2))
    for card in layout.cards.values():
        assert -1e-6 <= card.x <= card.x + card.width <= layout.width + 1e-6
        assert 0 <= card.y <= card.y + card.height <= layout.height + 1e-6


def middle(card: Card) -> float:
    return card.x + card.width / 2


@given(tree_shapes, SHEETS)
def test_the_left_child_stands_left_and_the_right_one_right(shape: list[int], sheet: Size) -> None:
    left, right = children(grow(shape))
    cards = arrange(left, right, size_of, sheet=sheet).cards
    assert list(cards) == [id_ for id_, _ in reading_order(left, right)]
    for node in range(len(left)):
        card, first, second = cards[node], cards[left[node]], cards[right[node]]
        assert middle(first) < middle(card) < middle(second)
        for child, aside in ((first, "left aside"), (second, "right aside")):
            assert child.y == card.y if card.shape == aside else child.y > card.y + card.height


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_that_the_sheet_has_room_for_is_tidy(seed: int) -> None:
    left, right = children(random_topology(11, seed))
    layout = arrange(left, right, size_of, sheet=(10_000.0, 10_000.0))
    for scale, is_tidy in ((0.71, True), (0.69, False)):  # as large as is readable, or not quite
        found = arrange(left, right, size_of, sheet=(scale * layout.width, scale * layout.height))
        assert ({card.shape for card in found.cards.values()} == {"below"}) == is_tidy
    root, first, second = (layout.cards[id_] for id_ in (0, left[0], right[0]))
    assert middle(root) == pytest.approx((middle(first) + middle(second)) / 2)


@pytest.mark.parametrize("seed", range(4))
def test_no_line_to_a_card_beside_or_below_runs_through_another(seed: int) -> None:
    left, right = children(random_topology(60, seed))
    cards = arrange(left, right, size_of).cards
    for node in range(len(left)):
        card = cards[node]
        for child, side in ((left[node], -1), (right[node], 1)):
            to = cards[child]
            if to.y == card.y:  # a level line from the card's edge
                start, end = (card.x + card.width, to.x) if side > 0 else (to.x + to.width, card.x)
                line = Card(start, card.y + 44, end - start, 0, 0)
            else:  # the last and longest piece of the line: straight down to the child
                line = Card(middle(to), card.y + card.height + 15, 0, to.y - card.y - card.height - 15, 0)
            hit = [
                id_
                for id_, other in cards.items()
                if id_ not in (node, child)
                and other.x < line.x + line.width
                and line.x < other.x + other.width
                and other.y < line.y + line.height
                and line.y < other.y + other.height
            ]
            assert not hit


@pytest.mark.parametrize(
    ("topology", "least"),
    [
        (random_topology(11), 0.65), (spine(12), 0.5), (Topology.full(5), 0.45),
        (random_topology(200, seed=1), 0.13),
        pytest.param(random_topology(1000, seed=1), 0.05, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_sheet_is_used(topology: Topology, least: float) -> None:
    """As large as they can be on a usual screen."""
    layout = arrange(*children(topology), size_of, sheet=(1320.0, 760.0))
    assert min(1320 / layout.width, 760 / layout.height) > least


def test_a_chain_deeper_than_recursion_goes_is_no_trouble() -> None:
    cards = arrange(*children(spine(1100)), size_of).cards
    assert max(card.level for card in cards.values()) == 1100
    assert sum(id_ < 0 for id_ in cards) == 1101

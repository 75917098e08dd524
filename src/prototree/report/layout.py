"""Where the nodes and leaves of a tree stand on paper: pure arithmetic, the same for the page, SVG and PDF.

A place is known by its id as in `Topology`: a node, or `~leaf`. The children of a node stand side by side below it, one
above the other, or one of them beside it: whatever lets the whole tree fill a sheet of the wanted proportions best.
With everything side by side, many leaves would be wider than any page, and a chain would leave half of it empty.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

Size = tuple[float, float]
_PROPORTIONS = 2.0  # how far from the wanted ones parts are told apart: e² times as wide, or as high
Shape = Literal["below", "stacked", "left aside", "right aside"]
"""How the children of a node stand: both below it side by side, one above the other, or one of them beside it."""


@dataclass(frozen=True)
class Spacing:
    """How far cards stand apart."""

    across: float = 14.0
    below: float = 46.0  # between a node and children side by side
    under: float = 40.0  # between cards one above the other
    indent: float = 30.0  # of children one above the other
    aside: float = 56.0  # between a node and the child beside it


@dataclass(frozen=True)
class CardPlace:
    """The upper left corner of a card, its size, and how many turns lie above it."""

    x: float
    y: float
    width: float
    height: float
    level: int
    shape: Shape = "below"  # of a node

    @property
    def middle(self) -> float:
        """Across."""
        return self.x + self.width / 2


@dataclass(frozen=True)
class Layout:
    """Every place in reading order: a parent before its children, what is left before what is right."""

    places: dict[int, CardPlace]
    ends: tuple[int, ...]  # leaves, and nodes whose children are not shown
    width: float
    height: float

    @property
    def n_levels(self) -> int:
        return 1 + max(place.level for place in self.places.values())


@dataclass(frozen=True)
class _Way:
    """One way to lay out a subtree: how large it gets, where its root's card begins, and which ways lie within."""

    width: float
    height: float
    card: float  # across
    shape: Shape = "below"
    left: "_Way | None" = None
    right: "_Way | None" = None


def arrange(
    left: Sequence[int],
    right: Sequence[int],
    size_of: Callable[[int], Size],
    *,
    root: int = 0,
    closed: Collection[int] = (),
    aspect: float = 1.7,
    spacing: Spacing = Spacing(),  # noqa: B008 (it is frozen)
) -> Layout:
    """The layout of the tree below `root` that fits best into a sheet `aspect` times as wide as high.

    What lies below the `closed` nodes is left out. `size_of` says how large the card of an id is.
    """
    order = reading_order(left, right, root=root, closed=closed)
    ways: dict[int, list[_Way]] = {}
    most = most_ways(len(left))
    for id_, _ in reversed(order):
        width, height = size_of(id_)
        if id_ < 0 or id_ in closed:
            ways[id_] = [_Way(width, height, 0.0)]
        else:
            below = ways.pop(left[id_]), ways.pop(right[id_])
            ways[id_] = _best(
                [way for pair in product(*below) for way in _joined(*pair, (width, height), spacing)], aspect, most
            )
    first = order[0][0]
    best = min(ways[first], key=lambda way: (max(way.width, aspect * way.height), way.height))
    places = _placed(best, order, left, right, size_of, spacing)
    ends = tuple(id_ for id_, _ in order if id_ < 0 or id_ in closed)
    return Layout(places, ends, best.width, best.height)


def most_ways(n_nodes: int) -> int:
    """How many ways of laying out each subtree are kept: fewer in large trees, so that they do not take long."""
    return 24 if n_nodes <= 400 else 16


def _joined(left: _Way, right: _Way, card: Size, spacing: Spacing) -> list[_Way]:
    """A node of this size over two subtrees, in every shape."""
    width, height = card
    second = left.width + spacing.across
    # Over the middle between the cards of its children.
    place = min(max((left.card + second + right.card) / 2, 0.0), max(second + right.width - width, 0.0))
    both_high = height + left.height + right.height + 2 * spacing.under
    return [
        _Way(
            max(second + right.width, place + width), height + spacing.below + max(left.height, right.height),
            place, "below", left, right,
        ),
        _Way(max(width, spacing.indent + max(left.width, right.width)), both_high, 0.0, "stacked", left, right),
        _aside(right, left, card, spacing, "right aside", left, right),
        _aside(left, right, card, spacing, "left aside", left, right),
    ]  # fmt: skip


def _aside(beside: _Way, below: _Way, card: Size, spacing: Spacing, shape: Shape, left: _Way, right: _Way) -> _Way:
    """One subtree begins beside the node, the other below it."""
    start = max(card[0] + spacing.aside, below.width + spacing.across)
    return _Way(
        start + beside.width, max(card[1] + spacing.below + below.height, beside.height), 0.0, shape, left, right
    )


def _best(ways: list[_Way], aspect: float, most: int) -> list[_Way]:
    """Those that no other beats in both width and height; of many, the smallest of each proportion.

    Narrow and flat ones are kept too: a large tree is made of parts of all proportions.
    """
    kept: list[_Way] = []
    for way in sorted(ways, key=lambda way: (way.width, way.height)):
        if not kept or way.height < kept[-1].height:
            kept.append(way)
    if len(kept) <= most:
        return kept
    smallest: dict[int, _Way] = {}
    for way in kept:
        off = min(max(math.log(way.width / (aspect * way.height)), -_PROPORTIONS), _PROPORTIONS)
        range_ = math.floor((off + _PROPORTIONS) / (2 * _PROPORTIONS) * most)
        if range_ not in smallest or way.width * way.height < smallest[range_].width * smallest[range_].height:
            smallest[range_] = way
    return list(smallest.values())


def _placed(
    way: _Way,
    order: list[tuple[int, int]],
    left: Sequence[int],
    right: Sequence[int],
    size_of: Callable[[int], Size],
    spacing: Spacing,
) -> dict[int, CardPlace]:
    corners = {order[0][0]: (way, 0.0, 0.0)}
    places = {}
    for id_, level in order:
        own, x, y = corners.pop(id_)
        width, height = size_of(id_)
        places[id_] = CardPlace(x + own.card, y, width, height, level, own.shape)
        if own.left is None or own.right is None:
            continue
        below = y + height + (spacing.under if own.shape == "stacked" else spacing.below)
        if own.shape == "stacked":
            corners[left[id_]] = own.left, x + spacing.indent, below
            corners[right[id_]] = own.right, x + spacing.indent, below + own.left.height + spacing.under
        elif own.shape == "below":
            corners[left[id_]] = own.left, x, below
            corners[right[id_]] = own.right, x + own.left.width + spacing.across, below
        else:
            pair = ((left[id_], own.left), (right[id_], own.right))
            (aside, beside), (under, hangs) = pair if own.shape == "left aside" else pair[::-1]
            corners[aside] = beside, x + max(width + spacing.aside, hangs.width + spacing.across), y
            corners[under] = hangs, x, below
    return places


def reading_order(
    left: Sequence[int], right: Sequence[int], *, root: int = 0, closed: Collection[int] = ()
) -> list[tuple[int, int]]:
    """Each id with its level, a parent before its children, left before right; any depth, no recursion."""
    order, waiting = [], [(root if left else ~0, 0)]
    while waiting:
        id_, level = waiting.pop()
        order.append((id_, level))
        if id_ >= 0 and id_ not in closed:
            waiting += [(right[id_], level + 1), (left[id_], level + 1)]
    return order


def parts(
    left: Sequence[int], right: Sequence[int], *, most_ends: int, most_levels: int
) -> list[tuple[int, frozenset[int]]]:
    """Cuts the tree into pieces that fit a page: each one's root, and the nodes where another piece goes on.

    A piece grows from its root level by level while it has at most `most_ends` ends and `most_levels` levels of nodes.
    """
    pieces, roots = [], [0] if left else []
    for root in roots:  # grows while it is read
        shown, border = {root}, [(root, 0)]
        for node, level in border:  # breadth first
            for child in (left[node], right[node]):
                if child >= 0 and level + 1 < most_levels and len(shown) + 2 <= most_ends:
                    shown.add(child)
                    border.append((child, level + 1))
        closed = [
            child
            for node, _ in sorted(border, key=lambda pair: pair[1])
            for child in (left[node], right[node])
            if child >= 0 and child not in shown
        ]
        pieces.append((root, frozenset(closed)))
        roots += closed
    return pieces

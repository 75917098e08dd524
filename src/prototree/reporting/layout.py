"""Tree layout: where the cards of nodes and leaves stand. Pure arithmetic, the same in tree.js.

An id is as in `Topology`: a node, or `~leaf`. A tree that a sheet has room for is drawn tidily: children side by side
below their parent, which stands over the middle between them. A larger one is drawn compactly, each subtree in the
shape that lets the whole fill the sheet best. In every shape the left child stands left of its parent, the right one
right of it.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

Ids = Sequence[int]
Size = tuple[float, float]
SizeOf = Callable[[int], Size]
Shape = Literal["below", "left aside", "right aside", "left lower", "right lower"]
"""How the children of a node stand: side by side below it, one beside it and one below, or one lower than the other."""

READABLE = 0.7  # a sheet has room for a tidy tree if it fits at this scale
_PROPORTIONS = 2.0  # subtrees are told apart up to e² times as wide or as high as wanted


@dataclass(frozen=True)
class Spacing:
    """Distances between cards."""

    across: float = 14.0
    below: float = 44.0  # between a node and its children
    under: float = 44.0  # between a subtree and one that stands lower
    aside: float = 56.0  # between a node and the child beside it
    lean: float = 30.0  # how far left or right of its parent a child stands at least


# tree.css has the same sizes.
NODE_SIZE: Size = (208.0, 122.0)
LEAF_SIZE: Size = (112.0, 132.0)
FAMILY_SIZE: Size = (168.0, 158.0)  # of a node on a page whose subtree is folded away
SPACING = Spacing()


class Card(NamedTuple):
    """The upper left corner of a card, its size, its level, and how its children stand."""

    x: float
    y: float
    width: float
    height: float
    level: int
    shape: Shape = "below"


class Layout(NamedTuple):
    """Every card in reading order, and the size of the sheet."""

    cards: dict[int, Card]
    width: float
    height: float


class _Option(NamedTuple):
    """One way to lay out a subtree: its size, the middle of its root's card, and where in it its two subtrees are."""

    width: float
    height: float
    middle: float
    shape: Shape = "below"
    children: tuple[tuple["_Option", float, float], ...] = ()  # left and right, each with its corner


def arrange(
    left: Ids,
    right: Ids,
    size_of: SizeOf,
    *,
    root: int = 0,
    closed: Collection[int] = (),
    sheet: Size = (1320.0, 760.0),
) -> Layout:
    """Lay out the tree below `root`: tidily if it fits into the sheet at a readable scale, else compactly.

    What lies below the `closed` nodes is left out. `size_of` says how large the card of an id is.
    """
    order, aspect = reading_order(left, right, root=root, closed=closed), sheet[0] / sheet[1]

    def options(*, compact: bool) -> list[_Option]:
        most, found = max_options(len(left)), dict[int, list[_Option]]()
        for id_, _ in reversed(order):
            width, height = size_of(id_)
            if id_ < 0 or id_ in closed:
                found[id_] = [_Option(width, height, width / 2)]
                continue
            pairs = product(found.pop(left[id_]), found.pop(right[id_]))
            shapes = _compact_shapes if compact else _tidy_shape
            joined = [option for pair in pairs for option in shapes(*pair, (width, height))]
            found[id_] = _pareto(joined, aspect, most)
        return found[order[0][0]]

    (best,) = options(compact=False)
    if min(sheet[0] / best.width, sheet[1] / best.height) < READABLE:
        best = min(options(compact=True), key=lambda way: (max(way.width, aspect * way.height), way.height))
    return Layout(_placed(best, order, left, right, size_of), best.width, best.height)


def max_options(n_nodes: int) -> int:
    """Return how many layouts of each subtree are kept: fewer in large trees, so that they do not take long."""
    return 16 if n_nodes <= 400 else 10


def reading_order(left: Ids, right: Ids, *, root: int = 0, closed: Collection[int] = ()) -> list[tuple[int, int]]:
    """List each id with its level, a parent before its children, left before right; any depth, no recursion."""
    order, waiting = [], [(root if left else ~0, 0)]
    while waiting:
        id_, level = waiting.pop()
        order.append((id_, level))
        if id_ >= 0 and id_ not in closed:
            waiting += [(right[id_], level + 1), (left[id_], level + 1)]
    return order


def _tidy_shape(left: _Option, right: _Option, card: Size) -> list[_Option]:
    """Put a node of this size over the middle between its children, side by side."""
    below, second = card[1] + SPACING.below, left.width + SPACING.across
    middle = (left.middle + second + right.middle) / 2
    return [_joined("below", card, middle, (left, 0.0, below), (right, second, below))]


def _compact_shapes(left: _Option, right: _Option, card: Size) -> list[_Option]:
    """Put a node of this size over two subtrees, in every shape."""
    (width, height), (across, below, under, aside, lean) = card, vars(SPACING).values()
    top, options = height + below, _tidy_shape(left, right, card)
    # The lower child hangs on a line that comes from its side of the card and passes the other subtree.
    middle = max(left.width + across - width / 4, left.middle + lean)
    lower = middle + width / 4 - right.middle, top + left.height + under
    options.append(_joined("right lower", card, middle, (left, 0.0, top), (right, *lower)))
    middle = min(width / 4 - across, right.middle - lean)
    lower = middle - width / 4 - left.middle, top + right.height + under
    options.append(_joined("left lower", card, middle, (left, *lower), (right, 0.0, top)))
    # The line to a child beside the node is level: nothing may stand between them.
    if right.shape != "left aside":
        middle = left.middle + lean
        start = max(middle + width / 2 + aside, left.width + across)
        options.append(_joined("right aside", card, middle, (left, 0.0, top), (right, start, 0.0)))
    if left.shape != "right aside":
        middle = right.middle - lean
        start = min(middle - width / 2 - aside, -across) - left.width
        options.append(_joined("left aside", card, middle, (left, start, 0.0), (right, 0.0, top)))
    return options


def _joined(shape: Shape, card: Size, middle: float, *children: tuple[_Option, float, float]) -> _Option:
    """Make a layout of a node and its subtrees, moved so that it begins at 0."""
    start = min(middle - card[0] / 2, *(x for _, x, _ in children))
    width = max(middle + card[0] / 2, *(x + child.width for child, x, _ in children)) - start
    height = max(y + child.height for child, _, y in children)
    moved = tuple((child, x - start, y) for child, x, y in children)
    return _Option(width, max(card[1], height), middle - start, shape, moved)


def _pareto(options: list[_Option], aspect: float, most: int) -> list[_Option]:
    """Keep those that no other beats in both width and height; of many, the smallest of each proportion.

    Narrow and flat ones are kept too: a large tree is made of parts of all proportions.
    """
    kept: list[_Option] = []
    for option in sorted(options, key=lambda option: (option.width, option.height)):
        if not kept or option.height < kept[-1].height:
            kept.append(option)
    if len(kept) <= most:
        return kept
    smallest: dict[int, _Option] = {}
    for option in kept:
        off = min(max(math.log(option.width / (aspect * option.height)), -_PROPORTIONS), _PROPORTIONS)
        bin_ = math.floor((off + _PROPORTIONS) / (2 * _PROPORTIONS) * most)
        if bin_ not in smallest or option.width * option.height < smallest[bin_].width * smallest[bin_].height:
            smallest[bin_] = option
    return list(smallest.values())


def _placed(best: _Option, order: list[tuple[int, int]], left: Ids, right: Ids, size_of: SizeOf) -> dict[int, Card]:
    corners, cards = {order[0][0]: (best, 0.0, 0.0)}, {}
    for id_, level in order:
        option, x, y = corners.pop(id_)
        width, height = size_of(id_)
        cards[id_] = Card(x + option.middle - width / 2, y, width, height, level, option.shape)
        if option.children:
            for child, (inner, dx, dy) in zip((left[id_], right[id_]), option.children, strict=True):
                corners[child] = inner, x + dx, y + dy
    return cards

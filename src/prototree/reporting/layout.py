"""Tree layout: where the cards of nodes and leaves stand. Pure arithmetic, the same in tree.js.

An id is as in `Topology`: a node, or `~leaf`. The children of a node stand side by side below it, one above the other,
or one of them beside it: whatever lets the whole tree fill a sheet of the wanted proportions best. With everything side
by side, many leaves would be wider than any page, and a chain would leave half of it empty.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

Ids = Sequence[int]
Size = tuple[float, float]
SizeOf = Callable[[int], Size]
Shape = Literal["below", "stacked", "left aside", "right aside"]
"""How the children of a node stand: both below it side by side, one above the other, or one of them beside it."""

_PROPORTIONS = 2.0  # subtrees are told apart up to e² times as wide or as high as wanted


@dataclass(frozen=True)
class Spacing:
    """Distances between cards."""

    across: float = 14.0
    below: float = 46.0  # between a node and children side by side
    under: float = 40.0  # between cards one above the other
    indent: float = 30.0  # of children one above the other
    aside: float = 56.0  # between a node and the child beside it


# tree.css has the same sizes.
NODE_SIZE: Size = (208.0, 122.0)
LEAF_SIZE: Size = (112.0, 132.0)
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
    """One way to lay out a subtree: its size, where its root's card begins, and the options within."""

    width: float
    height: float
    card: float
    shape: Shape = "below"
    left: "_Option | None" = None
    right: "_Option | None" = None


def arrange(
    left: Ids, right: Ids, size_of: SizeOf, *, root: int = 0, closed: Collection[int] = (), aspect: float = 1.7
) -> Layout:
    """Lay out the tree below `root` so that it fits best into a sheet `aspect` times as wide as high.

    What lies below the `closed` nodes is left out. `size_of` says how large the card of an id is.
    """
    order = reading_order(left, right, root=root, closed=closed)
    options: dict[int, list[_Option]] = {}
    for id_, _ in reversed(order):
        width, height = size_of(id_)
        if id_ < 0 or id_ in closed:
            options[id_] = [_Option(width, height, 0.0)]
        else:
            pairs = product(options.pop(left[id_]), options.pop(right[id_]))
            joined = [option for pair in pairs for option in _joined(*pair, (width, height))]
            options[id_] = _pareto(joined, aspect, max_options(len(left)))
    best = min(options[order[0][0]], key=lambda option: (max(option.width, aspect * option.height), option.height))
    return Layout(_placed(best, order, left, right, size_of), best.width, best.height)


def max_options(n_nodes: int) -> int:
    """Return how many layouts of each subtree are kept: fewer in large trees, so that they do not take long."""
    return 24 if n_nodes <= 400 else 16


def reading_order(left: Ids, right: Ids, *, root: int = 0, closed: Collection[int] = ()) -> list[tuple[int, int]]:
    """List each id with its level, a parent before its children, left before right; any depth, no recursion."""
    order, waiting = [], [(root if left else ~0, 0)]
    while waiting:
        id_, level = waiting.pop()
        order.append((id_, level))
        if id_ >= 0 and id_ not in closed:
            waiting += [(right[id_], level + 1), (left[id_], level + 1)]
    return order


def _joined(left: _Option, right: _Option, card: Size) -> list[_Option]:
    """Put a node of this size over two subtrees, in every shape."""
    width, height = card
    second = left.width + SPACING.across
    # Over the middle between the cards of its children.
    x = min(max((left.card + second + right.card) / 2, 0.0), max(second + right.width - width, 0.0))
    below = height + SPACING.below + max(left.height, right.height)
    stacked = height + left.height + right.height + 2 * SPACING.under
    options = [
        _Option(max(second + right.width, x + width), below, x, "below", left, right),
        _Option(max(width, SPACING.indent + max(left.width, right.width)), stacked, 0.0, "stacked", left, right),
    ]
    asides: tuple[tuple[Shape, _Option, _Option], ...] = (("right aside", right, left), ("left aside", left, right))
    for shape, beside, hanging in asides:
        start = max(width + SPACING.aside, hanging.width + SPACING.across)
        total = max(height + SPACING.below + hanging.height, beside.height)
        options.append(_Option(start + beside.width, total, 0.0, shape, left, right))
    return options


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
        cards[id_] = Card(x + option.card, y, width, height, level, option.shape)
        if option.left is None or option.right is None:
            continue
        below = y + height + (SPACING.under if option.shape == "stacked" else SPACING.below)
        if option.shape == "stacked":
            corners[left[id_]] = option.left, x + SPACING.indent, below
            corners[right[id_]] = option.right, x + SPACING.indent, below + option.left.height + SPACING.under
        elif option.shape == "below":
            corners[left[id_]] = option.left, x, below
            corners[right[id_]] = option.right, x + option.left.width + SPACING.across, below
        else:
            pair = ((left[id_], option.left), (right[id_], option.right))
            (aside, beside), (under, hanging) = pair if option.shape == "left aside" else pair[::-1]
            corners[aside] = beside, x + max(width + SPACING.aside, hanging.width + SPACING.across), y
            corners[under] = hanging, x, below
    return cards

"""Where the nodes and leaves of a tree stand on paper: pure arithmetic, the same for the page, SVG and PDF.

A place is known by its id as in `Topology`: a node, or `~leaf`. Distances are in slots (across) and levels (down).
Ends stand one slot apart in reading order and a parent over the middle of its two children, so on one level two
leaves are at least 1 slot apart, a leaf and a node 1.5, and two nodes 2: a node's card may be twice a leaf's width.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CardPlace:
    """The centre of a card across, and how many turns lie above it."""

    x: float
    level: int


@dataclass(frozen=True)
class Layout:
    """Every place in reading order: a parent before its children, what is left before what is right."""

    places: dict[int, CardPlace]
    ends: tuple[int, ...]  # leaves, and nodes whose children are not shown; one a slot

    @property
    def n_levels(self) -> int:
        return 1 + max(place.level for place in self.places.values())


def arrange(left: Sequence[int], right: Sequence[int], *, root: int = 0, closed: Collection[int] = ()) -> Layout:
    """The layout of the tree below `root`; what lies below the `closed` nodes is left out."""
    order = reading_order(left, right, root=root, closed=closed)
    x: dict[int, float] = {}
    ends = [id_ for id_, _ in order if id_ < 0 or id_ in closed]
    for slot, end in enumerate(ends):
        x[end] = float(slot)
    for id_, _ in reversed(order):
        if id_ not in x:
            x[id_] = (x[left[id_]] + x[right[id_]]) / 2
    return Layout({id_: CardPlace(x[id_], level) for id_, level in order}, tuple(ends))


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

"""A tree or a part of it as a drawing: a card for each prototype and leaf, the same as on the page."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from prototree.explain.records import Location, Match, Picture
from prototree.report.images import around_of, frame_in, reduced
from prototree.report.layout import CardPlace, Size, Spacing, arrange
from prototree.report.marks import (
    ABSENT_INK,
    BOX_INK,
    FAINT,
    INK,
    PAPER,
    PRESENT_INK,
    RULE,
    SOFT_INK,
    Block,
    Drawing,
    Label,
    Mark,
    PhotoMark,
    Stroke,
    hue_ink,
    paragraph,
    text_width,
    wrapped,
)
from prototree.report.text import Reading, count

# tree.css has the same sizes.
NODE_SIZE, LEAF_SIZE = (208.0, 122.0), (112.0, 132.0)
SPACING = Spacing()
LETTERS = 11.5  # of the smallest text on a card
_FACE = 74.0  # height of the photo on a leaf's card
_PAD = 7.0
_TURN = 27.0  # of the round picture at a line
_PHOTO_SIDE, _AROUND_SIDE, _FACE_SIDE, _TURN_SIDE = 168, 160, 160, 48  # pixels
_BOLD = 1.1  # as wide as other letters
_LINE = 1.25  # from one line of text to the next


@dataclass(frozen=True)
class Spot:
    """A rectangle to draw in."""

    x: float
    y: float
    width: float
    height: float


def subtree(
    reading: Reading,
    root: int,
    closed: Collection[int],
    goes_on: Callable[[int], str],
    *,
    small: bool = False,
    aspect: float = 1.41,
) -> Drawing:
    """What lies below `root`, down to leaves and the `closed` nodes, which say where the tree `goes_on`.

    Cards grow with the names on them: no name is cut. A `small` one is for an overview: pictures alone.
    """
    tree = reading.explanation

    def size_of(id_: int) -> Size:
        if id_ >= 0:
            return (LEAF_SIZE[0], NODE_SIZE[1]) if id_ in closed else NODE_SIZE
        return LEAF_SIZE[0], LEAF_SIZE[0] if small else _leaf_height(reading, ~id_)

    layout = arrange(tree.left, tree.right, size_of, root=root, closed=closed, aspect=aspect, spacing=SPACING)
    lines: list[Mark] = []
    turns: list[Mark] = []  # over all lines
    cards: list[Mark] = []
    for id_, place in layout.places.items():
        spot = Spot(place.x, place.y, place.width, place.height)
        if id_ < 0:
            cards += (_small_leaf if small else _leaf_card)(reading, ~id_, spot)
        elif id_ in closed:
            cards += _stub_card(reading, id_, spot, goes_on(id_))
        else:
            cards += _node_card(reading, id_, spot, small=small)
            for child, right in ((tree.left[id_], False), (tree.right[id_], True)):
                line, *turn = _edge(reading, id_, right, place, layout.places[child], child, small=small)
                lines.append(line)
                turns += turn
    return Drawing(layout.width, layout.height, (*lines, *turns, *cards))


def _edge(
    reading: Reading, node: int, right: bool, parent: CardPlace, child: CardPlace, id_: int, *, small: bool
) -> list[Mark]:
    """The line to a child, and what stands at it: a word, or of a pairwise node the picture that it leads on from."""
    strong, ink = right or reading.is_choice, hue_ink(reading.hues[id_])
    edge, bottom = parent.x + 15, parent.y + parent.height
    points: tuple[tuple[float, float], ...]
    if parent.shape == "stacked":
        points = ((edge, bottom), (edge, child.y + 44), (child.x, child.y + 44))
        mark = (child.x - 15, child.y + 44)
    elif parent.shape == ("right aside" if right else "left aside"):
        points = ((parent.x + parent.width, parent.y + 44), (child.x, child.y + 44))
        mark = (child.x - 28, child.y + 44)
    else:
        beside = parent.shape != "below"
        start = edge if beside else parent.x + parent.width * ((0.75 if right else 0.25) if reading.is_choice else 0.5)
        end = edge if beside and child.x < edge else child.middle
        turn = bottom + 0.3 * SPACING.below
        points = ((start, bottom), (start, turn), (end, turn), (end, child.y))
        mark = (end, child.y - 17)
    line = Stroke(points, ink, 4.0 if small else 1.8, dashed=not strong)
    if small and not reading.is_choice:
        return [line]
    return [line, *_turn(reading, node, right, mark, parent.shape == "stacked", ink)]


def _turn(reading: Reading, node: int, right: bool, at: tuple[float, float], stacked: bool, ink: str) -> list[Mark]:
    x, y = at
    if reading.is_choice:
        spot = Spot(x - _TURN / 2, y - _TURN / 2, _TURN, _TURN)
        picture = filling(reading.rather(node, right)[0].source.crop, spot, _TURN_SIDE)
        return [picture, Block(spot.x, spot.y, spot.width, spot.height, stroke=ink, thickness=2.0)]
    word = reading.side_word(node, right)
    if stacked:
        x, y = x + 15 + text_width(word, LETTERS) / 2, y - 53
    width = text_width(word, LETTERS) + 6
    behind = Block(x - width / 2, y - 8, width, 15.0, fill=PAPER)
    return [behind, Label(x, y + 4, word, LETTERS, PRESENT_INK if right else ABSENT_INK, bold=right)]


def _node_card(reading: Reading, node: int, spot: Spot, *, small: bool) -> list[Mark]:
    sides = reading.sides(node)
    noted = any(side.note for side in sides) and not small
    marks: list[Mark] = [] if small else [Block(spot.x, spot.y, spot.width, spot.height, PAPER, RULE, 1.2, 8.0)]
    half = (spot.width - 2 * _PAD - 10) / 2
    high = spot.height - 2 * _PAD - (18 if noted else 0)
    for i, side in enumerate(sides):
        x = spot.x + _PAD + i * (half + 10)
        marks += framed(side.source, Spot(x, spot.y + _PAD, half, high))
        if noted and side.note:
            middle = x + half / 2 if len(sides) == 2 else spot.x + spot.width / 2
            width = half + 6 if len(sides) == 2 else spot.width - 2 * _PAD
            y = spot.y + spot.height - 9
            marks += paragraph(side.note, middle, y, width, size=LETTERS, most_lines=1, bold=True)
    if len(sides) == 1:
        beside = Spot(spot.x + _PAD + half + 10, spot.y + _PAD, half, high)
        source = sides[0].source
        marks += photo_with_box(source.photo, source.size, source.where[:1], beside, _PHOTO_SIDE)
    return marks


def _stub_card(reading: Reading, node: int, spot: Spot, goes_on: str) -> list[Mark]:
    sides, middle = reading.sides(node), spot.x + spot.width / 2
    wide = (spot.width - 2 * _PAD - 4 * (len(sides) - 1)) / len(sides)
    marks: list[Mark] = [Block(spot.x, spot.y, spot.width, spot.height, FAINT, RULE, 1.2, 8.0)]
    for i, side in enumerate(sides):
        marks += framed(side.source, Spot(spot.x + _PAD + i * (wide + 4), spot.y + _PAD, wide, 70.0))
    size = count(len(reading.labels_below(node)), "class", "classes")
    return [
        *marks,
        Label(middle, spot.y + 95, f"→ {goes_on}" if goes_on else "…", LETTERS + 1, INK, bold=True),
        Label(middle, spot.y + 112, size, LETTERS, SOFT_INK),
    ]


def _leaf_words(reading: Reading, leaf: int) -> tuple[list[str], str]:
    """The lines of a leaf's name, all of them, and what its test photos say."""
    unsure, label = reading.is_unsure(leaf), reading.rules[leaf].label
    name = "no clear class" if unsure else class_name(reading, label)
    lines = wrapped(name, _BOLD * (LETTERS + 0.5), LEAF_SIZE[0] - 8, None)
    return lines, "" if unsure else reading.known(label).right_words


def _leaf_height(reading: Reading, leaf: int) -> float:
    lines, right = _leaf_words(reading, leaf)
    return _FACE + 8 + _LINE * (LETTERS + 0.5) * len(lines) + (17 if right else 4) + 5


def _leaf_card(reading: Reading, leaf: int, spot: Spot) -> list[Mark]:
    unsure, label = reading.is_unsure(leaf), reading.rules[leaf].label
    (lines, right), middle, size = _leaf_words(reading, leaf), spot.x + spot.width / 2, LETTERS + 0.5
    ink, colour = (SOFT_INK, RULE) if unsure else (INK, hue_ink(reading.hues[~leaf]))
    marks: list[Mark] = [
        Block(spot.x, spot.y, spot.width, spot.height, FAINT if unsure else PAPER, colour, 1.4),
        Block(spot.x, spot.y + spot.height - 5, spot.width, 5.0, colour),
    ]
    photos = reading.known(label).photos
    if photos and not unsure:
        marks.append(filling(photos[0], Spot(spot.x + 1, spot.y + 1, spot.width - 2, _FACE), _FACE_SIDE))
    y = spot.y + _FACE + 4 + size
    marks += [Label(middle, y + _LINE * size * i, line, size, ink, bold=not unsure) for i, line in enumerate(lines)]
    if right:
        marks.append(Label(middle, y + _LINE * size * len(lines), right, LETTERS, SOFT_INK))
    return marks


def _small_leaf(reading: Reading, leaf: int, spot: Spot) -> list[Mark]:
    unsure, photos = reading.is_unsure(leaf), reading.known(reading.rules[leaf].label).photos
    colour = RULE if unsure else hue_ink(reading.hues[~leaf])
    marks: list[Mark] = [Block(spot.x, spot.y, spot.width, spot.height, FAINT if unsure else colour)]
    if photos and not unsure:
        inner = Spot(spot.x + 6, spot.y + 6, spot.width - 12, spot.height - 12)
        marks.append(filling(photos[0], inner, _FACE_SIDE))
    return marks


def framed(match: Match, spot: Spot) -> list[Mark]:
    """A patch with its surroundings, and a frame around the patch itself."""
    picture = fitted(reduced(around_of(match), _AROUND_SIDE), spot)
    left, top, right, bottom = frame_in(match)
    place = (
        picture.x + left * picture.width,
        picture.y + top * picture.height,
        (right - left) * picture.width,
        (bottom - top) * picture.height,
    )
    return [picture, Block(*place, stroke="#000000", thickness=3.0), Block(*place, stroke=BOX_INK, thickness=1.6)]


def filling(picture: Picture, spot: Spot, longest: int) -> PhotoMark:
    """The middle of a picture, cut so that it fills the spot."""
    height, width, _ = picture.shape
    wide = min(width, max(1, round(height * spot.width / spot.height)))
    high = min(height, max(1, round(width * spot.height / spot.width)))
    top, left = (height - high) // 2, (width - wide) // 2
    middle = reduced(picture[top : top + high, left : left + wide], longest)
    return PhotoMark(spot.x, spot.y, spot.width, spot.height, middle)


def distribution(probs: tuple[float, ...], spot: Spot, colour: str) -> list[Mark]:
    """A class distribution: one thin bar a class, those below half a percent left out."""
    base = spot.y + spot.height
    step = spot.width / len(probs)
    marks: list[Mark] = [Stroke(((spot.x, base), (spot.x + spot.width, base)), RULE, 1.0)]
    for k, prob in enumerate(probs):
        if prob >= 0.005:
            width, height = max(step * 0.8, 2.0), max(1.0, spot.height * min(prob, 1.0))
            marks.append(Block(spot.x + (k + 0.5) * step - width / 2, base - height, width, height, colour))
    return marks


def photo_with_box(
    picture: Picture, size: tuple[int, int], where: tuple[Location, ...], spot: Spot, longest: int
) -> list[Mark]:
    """A photo with the boxes found in it, boxes in pixels of the original of this size."""
    photo = fitted(reduced(picture, longest), spot)
    marks: list[Mark] = [photo]
    for found in where:
        box = found.box.clip(size)
        across, down = photo.width / max(size[0], 1), photo.height / max(size[1], 1)
        place = photo.x + box.left * across, photo.y + box.top * down, box.width * across, box.height * down
        marks += [Block(*place, stroke="#000000", thickness=3.0), Block(*place, stroke=BOX_INK, thickness=1.6)]
    return marks


def fitted(picture: Picture, spot: Spot) -> PhotoMark:
    """The picture as large as the spot allows, in its middle."""
    height, width, _ = picture.shape
    scale = min(spot.width / width, spot.height / height)
    wide, high = width * scale, height * scale
    return PhotoMark(spot.x + (spot.width - wide) / 2, spot.y + (spot.height - high) / 2, wide, high, picture)


def class_name(reading: Reading, label: int | None) -> str:
    """What a class is called."""
    return reading.explanation.class_names[label] if label is not None else "unknown class"

"""A tree or a part of it as a drawing: a card for each prototype and leaf, the same as on the page."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from prototree.evaluation.tables import percent
from prototree.explain.records import Location, Picture, PrototypeExplanation
from prototree.report.encoding import CROP_SIDE, reduced
from prototree.report.layout import Layout, arrange
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
    moved,
    paragraph,
    text_width,
)
from prototree.report.words import Reading, count

# tree.css has the same sizes.
SLOT, LEVEL = 116.0, 184.0
NODE_WIDTH, NODE_HEIGHT = 208.0, 122.0
LEAF_WIDTH, LEAF_HEIGHT = 106.0, 110.0
_PICTURE, _PAD = 84.0, 8.0
_PHOTO_SIDE = 168  # pixels


@dataclass(frozen=True)
class Spot:
    """A rectangle to draw in."""

    x: float
    y: float
    width: float
    height: float


def subtree(
    reading: Reading, root: int, closed: Collection[int], goes_on: Callable[[int], str], *, small: bool = False
) -> Drawing:
    """What lies below `root`, down to leaves and the `closed` nodes, which say where the tree `goes_on`.

    A `small` one is for an overview: the patch alone, and class names as large as they can be.
    """
    tree = reading.explanation
    layout = arrange(tree.left, tree.right, root=root, closed=closed)
    lines: list[Mark] = []
    cards: list[Mark] = []
    for id_ in layout.places:
        spot = _spot(layout, id_)
        if id_ in layout.ends:
            if id_ >= 0:
                cards += _stub_card(reading, id_, spot, goes_on(id_))
            else:
                cards += (_small_leaf_card if small else _leaf_card)(reading, ~id_, spot)
            continue
        cards += _node_card(reading, id_, spot, small=small)
        for child, right in ((tree.left[id_], False), (tree.right[id_], True)):
            word, strong = reading.side_word(id_, right), right or reading.is_choice
            lines += _edge(spot, _spot(layout, child), word, strong)
    # Half a node's card may stick out beyond the outermost slots.
    overhang = max(0.0, (NODE_WIDTH - SLOT) / 2)
    width = SLOT * len(layout.ends) + 2 * overhang
    height = LEVEL * (layout.n_levels - 1) + max(NODE_HEIGHT, LEAF_HEIGHT)
    return Drawing(width, height, tuple(moved(mark, overhang, 0.0) for mark in (*lines, *cards)))


def _spot(layout: Layout, id_: int) -> Spot:
    place, is_end = layout.places[id_], id_ in layout.ends
    width, height = (LEAF_WIDTH, LEAF_HEIGHT if id_ < 0 else NODE_HEIGHT) if is_end else (NODE_WIDTH, NODE_HEIGHT)
    return Spot((place.x + 0.5) * SLOT - width / 2, place.level * LEVEL, width, height)


def _edge(parent: Spot, child: Spot, word: str, strong: bool) -> list[Mark]:
    start, end = parent.x + parent.width / 2, child.x + child.width / 2
    bottom, middle = parent.y + parent.height, parent.y + parent.height + (LEVEL - NODE_HEIGHT) * 0.42
    colour = PRESENT_INK if strong else ABSENT_INK
    line = Stroke(((start, bottom), (start, middle), (end, middle), (end, child.y)), colour, 1.6, dashed=not strong)
    width = text_width(word, 10.0) + 8
    behind = Block(end - width / 2, child.y - 23, width, 14.0, fill=PAPER)
    return [line, behind, Label(end, child.y - 12, word, 10.0, colour, bold=strong)]


def _node_card(reading: Reading, node: int, spot: Spot, *, small: bool) -> list[Mark]:
    sides = reading.sides(node)
    if small:
        return _small_patches(sides, spot)
    if len(sides) == 2:
        return _choice_card(reading, *sides, spot)
    (prototype,) = sides
    source = prototype.source
    crop = Spot(spot.x + _PAD, spot.y + _PAD, _PICTURE, _PICTURE)
    photo = Spot(crop.x + _PICTURE + 6, crop.y, spot.width - 2 * _PAD - _PICTURE - 6, _PICTURE)
    caption = f"{node} · {prototype.note}" if prototype.note else f"{node} · from {class_name(reading, source.label)}"
    return [
        Block(spot.x, spot.y, spot.width, spot.height, PAPER, RULE, 1.2, 8.0),
        fitted(reduced(source.crop, CROP_SIDE), crop),
        *photo_with_box(source.photo, source.size, source.where[:1], photo, _PHOTO_SIDE),
        *paragraph(
            caption, spot.x + spot.width / 2, crop.y + _PICTURE + 18, spot.width - 2 * _PAD, most_lines=1,
            colour=INK if prototype.note else SOFT_INK, bold=bool(prototype.note),
        ),
    ]  # fmt: skip


def _small_patches(sides: tuple[PrototypeExplanation, ...], spot: Spot) -> list[Mark]:
    marks: list[Mark] = []
    width = spot.width / len(sides)
    for i, side in enumerate(sides):
        patch = fitted(reduced(side.source.crop, 48), Spot(spot.x + i * width, spot.y, width, spot.height))
        marks += [patch, Block(patch.x, patch.y, patch.width, patch.height, stroke=RULE)]
    return marks


def _choice_card(reading: Reading, left: PrototypeExplanation, right: PrototypeExplanation, spot: Spot) -> list[Mark]:
    """Two patches, each on the side it leads to."""
    marks: list[Mark] = [Block(spot.x, spot.y, spot.width, spot.height, PAPER, RULE, 1.2, 8.0)]
    half = (spot.width - 2 * _PAD - 10) / 2
    for side, x in ((left, spot.x + _PAD), (right, spot.x + spot.width - _PAD - half)):
        name = side.note or class_name(reading, side.source.label)
        caption = f"{side.prototype} · {name}"
        ink = INK if side.note else SOFT_INK
        marks += [
            fitted(reduced(side.source.crop, CROP_SIDE), Spot(x, spot.y + _PAD, half, _PICTURE)),
            *paragraph(caption, x + half / 2, spot.y + _PAD + _PICTURE + 18, half, most_lines=1, colour=ink),
        ]
    middle = spot.x + spot.width / 2
    marks.append(Stroke(((middle, spot.y + _PAD), (middle, spot.y + spot.height - _PAD)), RULE, 1.0))
    return marks


def _stub_card(reading: Reading, node: int, spot: Spot, goes_on: str) -> list[Mark]:
    sides, middle = reading.sides(node), spot.x + spot.width / 2
    wide = 64.0 if len(sides) == 1 else 44.0
    start = middle - (wide * len(sides) + 4 * (len(sides) - 1)) / 2
    crops = [
        fitted(reduced(side.source.crop, CROP_SIDE), Spot(start + i * (wide + 4), spot.y + 6, wide, 64.0))
        for i, side in enumerate(sides)
    ]
    heading = f"{node} → {goes_on}" if goes_on else f"{node} …"
    size = count(len(reading.labels_below(node)), "class", "classes")
    return [
        Block(spot.x, spot.y, spot.width, spot.height, FAINT, RULE, 1.2, 8.0),
        *crops,
        Label(middle, spot.y + 88, heading, 11.0, INK, bold=True),
        Label(middle, spot.y + 104, f"{size} below", 10.0, SOFT_INK),
    ]


def _leaf_card(reading: Reading, leaf: int, spot: Spot) -> list[Mark]:
    unsure, rule = reading.is_unsure(leaf), reading.rules[leaf]
    probs, middle = reading.explanation.leaf_probs[leaf], spot.x + spot.width / 2
    name = "no clear class" if unsure else class_name(reading, rule.label)
    ink = SOFT_INK if unsure else INK
    bars = Spot(spot.x + _PAD, spot.y + _PAD, spot.width - 2 * _PAD, 24.0)
    return [
        Block(spot.x, spot.y, spot.width, spot.height, FAINT if unsure else PAPER, RULE, 1.2, 8.0),
        *distribution(probs, bars, ABSENT_INK if unsure else PRESENT_INK),
        *paragraph(name, middle, spot.y + 48, spot.width - 10, most_lines=3, colour=ink, bold=not unsure),
        Label(middle, spot.y + spot.height - 9, percent(rule.share), 10.0, SOFT_INK),
    ]


def _small_leaf_card(reading: Reading, leaf: int, spot: Spot) -> list[Mark]:
    unsure, middle = reading.is_unsure(leaf), spot.x + spot.width / 2
    name = "?" if unsure else class_name(reading, reading.rules[leaf].label)
    fill, ink = (FAINT, SOFT_INK) if unsure else (PAPER, INK)
    return [
        Block(spot.x, spot.y, spot.width, spot.height, fill, RULE, 1.2, 8.0),
        *paragraph(name, middle, spot.y + 30, spot.width - 8, size=19.0, most_lines=3, colour=ink),
    ]


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

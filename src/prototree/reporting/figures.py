"""The one drawing of a tree and of a decision: SVG, from which typst makes PDF (with text to select) and PNG.

Lengths are CSS pixels and text is placed by its baseline. Functions return SVG elements as text; later ones lie over
earlier ones.
"""

import datetime
import math
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from prototree.core.topology import Strategy
from prototree.errors import ShapeError
from prototree.evaluation.tables import percent
from prototree.explanation import records
from prototree.reporting import images, text
from prototree.reporting.images import reduced
from prototree.reporting.layout import LEAF_SIZE, NODE_SIZE, SPACING, Card, Size, arrange, reading_order
from prototree.reporting.text import TreeText, plain

Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]

PAPER, INK, SOFT_INK, FAINT, RULE = "#ffffff", "#1d2521", "#5d6863", "#f3f5f2", "#cdd5cf"
PRESENT_INK, ABSENT_INK, BOX_INK = "#0b6e62", "#737d77", "#ffd400"
_FONTS = "'Helvetica Neue', Arial, 'Liberation Sans', 'DejaVu Sans', 'Noto Sans', 'Noto Sans CJK SC', sans-serif"
_LETTERS, _NAME = 11.5, 12.0  # sizes of the smallest text on a card, and of a class name
_LINE = 1.25  # from one line of text to the next
_BOLD = 1.1  # as wide as other letters
_FACE = 74.0  # height of the photo on a leaf's card
_PAD = 7.0
_ICON = 27.0  # of the picture at a line
_MARGIN, _GAP = 28.0, 34.0
_STEP_CARD: Size = (236.0, 250.0)
_STEPS_PER_ROW = 5
_TOP, _LEAST_PROB = 3, 0.005  # classes beside the answer
_SHEET: Size = (1600.0, 1130.0)  # a landscape page, on which a small tree is as large as on a screen
_MAX_POINTS = 14_000.0  # longest side of a PDF page that all viewers open
_MAX_PIXELS = 8_000  # longest side of a PNG
_LMS_FROM_LAB = np.array(
    [[1, 0.3963377774, 0.2158037573], [1, -0.1055613458, -0.0638541728], [1, -0.0894841775, -1.2914855480]]
)
_RGB_FROM_LMS = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)
_EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)  # so that the same tree gives the same PDF


class Rect(NamedTuple):
    """A rectangle to draw in; as text, the attributes of an SVG element."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        """The horizontal middle."""
        return self.x + self.width / 2

    def __str__(self) -> str:
        return f'x="{self.x:.1f}" y="{self.y:.1f}" width="{self.width:.1f}" height="{self.height:.1f}"'


@dataclass(frozen=True)
class Figure:
    """A drawing as a file that stands alone: `svg`, and from it PDF and PNG."""

    title: str
    width: float
    height: float
    svg: str

    @classmethod
    def of(cls, title: str, width: float, height: float, body: str) -> "Figure":
        """Wrap elements into an SVG document on white paper."""
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'width="{width:.1f}" height="{height:.1f}" viewBox="0 0 {width:.1f} {height:.1f}" '
            f'font-family="{_FONTS}">\n<title>{escape(plain(title))}</title>\n'
            f'<rect width="100%" height="100%" fill="{PAPER}"/>\n{body}</svg>\n'
        )
        return cls(plain(title), width, height, svg)

    def pdf(self) -> bytes:
        """Render as a PDF of one page in the size of the drawing."""
        return self._compile("pdf", 0.75 * self.width * min(1.0, _MAX_POINTS / (0.75 * max(self.width, self.height))))

    def png(self, longest: int = _MAX_PIXELS) -> bytes:
        """Render as PNG with two pixels a unit, or as many as keep the longest side within `longest` pixels."""
        return self._compile("png", 0.75 * self.width, 96 * min(2.0, longest / max(self.width, self.height)))

    def _compile(self, format_: Literal["pdf", "png"], points: float, ppi: float | None = None) -> bytes:
        import typst  # 30 MB that no page needs

        source = (
            "#set document(title: sys.inputs.title)\n#set page(width: auto, height: auto, margin: 0pt)\n"
            f'#image("figure.svg", width: {points:.2f}pt)'
        )
        files = {"main.typ": source.encode(), "figure.svg": self.svg.encode()}
        compile_: Any = typst.compile  # its types leave out files in memory
        return bytes(compile_(files, format=format_, ppi=ppi, sys_inputs={"title": self.title}, timestamp=_EPOCH))


# ---- the tree ---------------------------------------------------------------------------------------------------
def tree_figure(explanation: records.TreeExplanation, node: int = 0, depth: int | None = None) -> Figure:
    """Draw the whole tree on one sheet, or `depth` levels of prototypes from `node` down: the paper's subtree figure.

    Cards grow with the names on them: no class name is cut.
    """
    n_nodes, tree = len(explanation.left), TreeText(explanation)
    if not 0 <= node <= max(n_nodes - 1, 0) or (depth is not None and depth < 1):
        raise ShapeError(f"expected a node from 0 to {n_nodes - 1} and a depth of at least 1, got {node} and {depth}")
    order = reading_order(explanation.left, explanation.right, root=node)
    closed = {id_ for id_, level in order if id_ >= 0 and level == depth}

    def size_of(id_: int) -> Size:
        return NODE_SIZE if id_ >= 0 else (LEAF_SIZE[0], _leaf_height(tree, ~id_))

    layout = arrange(explanation.left, explanation.right, size_of, root=node, closed=closed, sheet=_SHEET)
    title = f"{explanation.title}: below question {text.node_number(node)}" if node else explanation.title
    width = max(layout.width, text_width(title, _BOLD * 22)) + 48
    body = f'<g transform="translate(24 72)">\n{_tree(tree, layout.cards, closed)}</g>\n'
    return Figure.of(title, width, layout.height + 96, _text(24.0, 40.0, title, 22.0, anchor="start", bold=True) + body)


def _tree(tree: TreeText, layout: dict[int, Card], closed: Collection[int]) -> str:
    shape, lines, marks, cards = tree.explanation, "", "", ""
    for id_, card in layout.items():
        rect = Rect(card.x, card.y, card.width, card.height)
        if id_ < 0:
            cards += _leaf_card(tree, ~id_, rect)
            continue
        cards += _node_card(tree, id_, rect)
        if id_ not in closed:
            for child, goes_right in ((shape.left[id_], False), (shape.right[id_], True)):
                points, mark_at = _edge(card, layout[child], goes_right)
                colour = hue_colour(tree.hues[child])
                lines += _line(points, colour, 1.8, dashed=not (goes_right or tree.is_pairwise))
                marks += _edge_mark(tree, id_, goes_right, mark_at, colour)
    return lines + marks + cards


def _edge(parent: Card, child: Card, goes_right: bool) -> tuple[list[Point], Point]:
    """Return the points of the line to a child, from under its side of the card, and where its mark stands."""
    middle, level = child.x + child.width / 2, parent.y + 44
    if parent.shape == ("right aside" if goes_right else "left aside"):
        start, end, out = (
            (parent.x + parent.width, child.x, 28) if goes_right else (parent.x, child.x + child.width, -28)
        )
        return [(start, level), (end, level)], (end - out, level)
    start, bottom = parent.x + parent.width * (0.75 if goes_right else 0.25), parent.y + parent.height
    turn = bottom + 0.3 * SPACING.below
    return [(start, bottom), (start, turn), (middle, turn), (middle, child.y)], (middle, child.y - 17)


def _edge_mark(tree: TreeText, node: int, goes_right: bool, at: Point, colour: str) -> str:
    """Mark a line: with a word, or from a pairwise node with the picture that it leads on from."""
    x, y = at
    if tree.is_pairwise:
        rect, crop = Rect(x - _ICON / 2, y - _ICON / 2, _ICON, _ICON), tree.nearer(node, goes_right)[0].source.crop
        return _filling(crop, rect, 48) + _rect(rect, stroke=colour, thickness=2.0)
    word, ink = (text.PRESENT, PRESENT_INK) if goes_right else (text.ABSENT, ABSENT_INK)
    width = text_width(word, _LETTERS) + 6
    return _rect(Rect(x - width / 2, y - 8, width, 15.0), PAPER) + _text(x, y + 4, word, _LETTERS, ink, bold=goes_right)


def _node_card(tree: TreeText, node: int, rect: Rect) -> str:
    sides = tree.sides(node)
    half, noted = (rect.width - 2 * _PAD - 10) / 2, any(side.note for side in sides)
    height = rect.height - 2 * _PAD - (18 if noted else 0)
    spots = [Rect(rect.x + _PAD + i * (half + 10), rect.y + _PAD, half, height) for i in (0, 1)]
    card = _rect(rect, PAPER, RULE, 1.2, 8.0)
    for side, spot in zip(sides, spots, strict=False):
        middle, width = (spot.middle, half + 6) if len(sides) == 2 else (rect.middle, rect.width - 2 * _PAD)
        card += _patch(side.source, spot)
        card += _text(middle, rect.y + rect.height - 9, side.note, _LETTERS, bold=True, width=width)
    if len(sides) == 1:
        card += _photo_with_box(sides[0].source, spots[1])
    number = str(text.node_number(node))
    pill = Rect(rect.x + 3, rect.y + 3, 9 + 7 * len(number), 15.0)
    return card + _rect(pill, PAPER, RULE, 1.0, 7.5) + _text(pill.middle, pill.y + 11.2, number, 10.5, bold=True)


def _leaf_lines(tree: TreeText, leaf: int) -> tuple[list[str], str]:
    """Return the lines of a leaf's name, all of them, and how its test photos fare."""
    unsure, predicted = tree.is_unsure(leaf), tree.rules[leaf].predicted
    name = text.NO_CLASS if unsure else tree.explanation.class_names[predicted]
    lines = wrapped(name, _BOLD * _NAME, LEAF_SIZE[0] - 8)
    return lines, "" if unsure else tree.class_facts(predicted).correct_text


def _leaf_height(tree: TreeText, leaf: int) -> float:
    lines, accuracy = _leaf_lines(tree, leaf)
    return _FACE + 8 + _LINE * _NAME * len(lines) + (17 if accuracy else 4) + 5


def _leaf_card(tree: TreeText, leaf: int, rect: Rect) -> str:
    unsure, photos = tree.is_unsure(leaf), tree.class_facts(tree.rules[leaf].predicted).photos
    ink, colour = (SOFT_INK, RULE) if unsure else (INK, hue_colour(tree.hues[~leaf]))
    card = _rect(rect, FAINT if unsure else PAPER, colour, 1.4)
    card += _rect(Rect(rect.x, rect.y + rect.height - 5, rect.width, 5.0), colour)
    if photos and not unsure:
        card += _filling(photos[0], Rect(rect.x + 1, rect.y + 1, rect.width - 2, _FACE), 160)
    lines, accuracy = _leaf_lines(tree, leaf)
    y = rect.y + _FACE + 4 + _NAME
    for line in lines:
        card += _text(rect.middle, y, line, _NAME, ink, bold=not unsure)
        y += _LINE * _NAME
    return card + _text(rect.middle, y, accuracy, _LETTERS, SOFT_INK)


# ---- a decision -------------------------------------------------------------------------------------------------
def decision_figure(explanation: records.DecisionExplanation, strategy: Strategy = "greedy") -> Figure:
    """Draw the paper's local explanation: the photo, each node on its path with the photo's best patch, the class."""
    if strategy not in explanation.paths:
        raise ShapeError(f"expected one of the paths {', '.join(explanation.paths)}, got {strategy!r}")
    path = explanation.paths[strategy]
    n_cards, (width, height) = len(path.steps) + 2, _STEP_CARD  # the photo first, the class last
    rects = [
        Rect(_MARGIN + column * (width + _GAP), _MARGIN + 40 + row * (height + _GAP), width, height)
        for row, column in (divmod(i, _STEPS_PER_ROW) for i in range(n_cards))
    ]
    body = _text(_MARGIN, _MARGIN + 16, text.STRATEGY_NAMES[strategy], 18.0, anchor="start", bold=True)
    photo, label = rects[0], explanation.label
    body += _picture(explanation.photo, photo._replace(height=height - 40), 2 * images.PHOTO_SIDE)
    if label is not None:
        true_class, y = f"true class: {explanation.class_names[label]}", photo.y + height - 20
        body += _text(photo.middle, y, true_class, 12.0, bold=True, width=width, most_lines=2)
    body += _end_card(explanation, strategy, rects[-1])
    for step, rect in zip(path.steps, rects[1:-1], strict=True):
        body += _presence_card(step, rect) if step.left is None else _pairwise_card(step, rect)
    # A pairwise node is no absence, whichever side it takes.
    solid = [True, *(step.goes_right or step.left is not None for step in path.steps)]
    for (before, after), is_solid in zip(pairwise(rects), solid, strict=True):
        body += _arrow(before, after, is_solid)
    right, bottom = max(rect.x for rect in rects) + width, rects[-1].y + height
    return Figure.of(explanation.image, right + _MARGIN, bottom + _MARGIN, body)


def _presence_card(step: records.Step, rect: Rect) -> str:
    colour, word = (PRESENT_INK, text.PRESENT) if step.goes_right else (ABSENT_INK, text.ABSENT)
    x, y, foot, match = rect.x + 10, rect.y + 30, rect.y + rect.height - 9, step.right.match
    title = f"Question {text.node_number(step.node)}: {step.note or 'is the patch there?'}"
    return (
        _rect(rect, PAPER, colour if step.goes_right else RULE, 1.6, 10.0)
        + _text(x, rect.y + 20, title, 12.0, anchor="start", bold=True, width=rect.width - 20)
        + _picture(step.right.picture, Rect(x, y, 78.0, 78.0), images.CROP_SIDE)
        + _text(x + 39, y + 92, "best patch here:", 9.5, SOFT_INK)
        + _picture(match.crop, Rect(x, y + 100, 78.0, 58.0), images.CROP_SIDE)
        + _photo_with_box(match, Rect(x + 88, y, rect.width - 108, 158.0), heat=True)
        + _text(x, foot, f"similarity {step.p_right:.2f}", 12.0, SOFT_INK, "start")
        + _text(rect.x + rect.width - 10, foot, word, 12.0, colour, "end", bold=True)
    )


def _pairwise_card(step: records.Step, rect: Rect) -> str:
    """Draw the image's best patch, the prototype that it is more like, and the other one; below, where it lies."""
    is_right, is_close = step.p_right > 0.5, any(side.in_radius for side in step.sides)
    nearer, farther = step.sides[int(is_right)], step.sides[int(not is_right)]
    x, width = rect.x + 10, rect.width - 20
    title = _question_title(step, width)
    bar, side = Rect(x, rect.y + 45, width, 4.0), (width - 12) / 3
    card = _rect(rect, PAPER, RULE, 1.6, 10.0)
    card += _text(x, rect.y + 20, title, 11.5, anchor="start", bold=True, width=width, most_lines=2)
    card += _rect(bar, FAINT, radius=2.0)
    colour = PRESENT_INK if is_close else ABSENT_INK
    card += _rect(bar._replace(width=bar.width * text.strength(step)), colour, radius=2.0)
    captions = (
        ("your image", ""),
        ("more alike", _patch_text(step, nearer)),
        ("the other", _patch_text(step, farther)),
    )
    for i, (caption, name) in enumerate(captions):
        place = Rect(x + i * (side + 6), rect.y + 56, side, side)
        card += _patch(nearer.match, place) if i == 0 else _prototype(nearer if i == 1 else farther, place)
        card += _text(place.middle, place.y + side + 12, caption, 9.5, SOFT_INK)
        card += _text(place.middle, place.y + side + 24, name, 9.5, INK, width=side)
    top = rect.y + 56 + side + 30
    return card + _photo_with_box(nearer.match, Rect(x, top, width, rect.y + rect.height - 8 - top), heat=True)


def _question_title(step: records.Step, width: float) -> str:
    """Say how a node decided in two lines: long names are cut, not the distances."""
    for most in (1000, 28, 22, 17, 13, 10, 8):
        left, right = (replace(side, note=_cut(side.note, most)) for side in step.sides)
        title = f"Question {text.node_number(step.node)}: {text.step_text(replace(step, left=left, right=right))}"
        if len(wrapped(title, _BOLD * 11.5, width)) <= 2:
            break
    return title


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1].rstrip()}…"


def _patch_text(step: records.Step, side: records.PatchComparison) -> str:
    return side.note or text.step_patch(step, side)


def _prototype(side: records.PatchComparison, rect: Rect) -> str:
    """Draw a prototype with its surroundings, in a spotlight; alone where these are not known."""
    if side.context is None:
        return _picture(side.picture, rect, images.CROP_SIDE)
    return _picture(images.spotlit(side.context.picture, side.context.light), rect, images.CONTEXT_SIDE)


def _end_card(explanation: records.DecisionExplanation, strategy: Strategy, rect: Rect) -> str:
    """Draw the answer: the class with its confidence and the likeliest classes, or that the tree does not know."""
    path, width, foot = explanation.paths[strategy], rect.width - 24, rect.y + rect.height
    abstains, predicted = explanation.confidence is None, explanation.class_names[path.answer]
    name, colour = (records.UNKNOWN, INK) if abstains else (predicted, PRESENT_INK)
    card = _rect(rect, PAPER, RULE if abstains else PRESENT_INK, 2.4, 10.0)
    card += _text(rect.middle, rect.y + 30, name, 16.0, colour, bold=True, width=width, most_lines=2)
    if abstains:
        reason = explanation.abstention.reason if explanation.abstention is not None else ""
        card += _text(rect.middle, rect.y + 56, reason, 11.0, INK, width=width, most_lines=6)
        card += _text(rect.middle, rect.y + 154, "best guess:", 12.0, SOFT_INK)
        card += _text(rect.middle, rect.y + 172, predicted, 13.0, SOFT_INK, width=width, most_lines=3)
    else:
        if strategy == "greedy":
            trust = f"{text.confidence_percent(explanation.confidence)} confident"
        else:
            trust = f"{percent(max(path.class_probs))} of the images that end here"
        card += _text(rect.middle, rect.y + 72, trust, 13.0, SOFT_INK)
        if sum(prob >= _LEAST_PROB for prob in explanation.class_probs) > 1:
            card += _likeliest(explanation, Rect(rect.x + 12, rect.y + 90, width, 90.0))
    if explanation.label is not None:
        verdict, colour = ("right", PRESENT_INK) if explanation.label == path.answer else ("wrong", INK)
        card += _text(rect.middle, foot - 10, verdict, 13.0, colour, bold=True)
    return card


def _likeliest(explanation: records.DecisionExplanation, rect: Rect) -> str:
    """List the likeliest classes over all paths, each with a bar."""
    probs, drawn, y = (
        explanation.class_probs,
        _text(rect.x, rect.y + 8, "all paths averaged", 9.5, SOFT_INK, "start"),
        0.0,
    )
    for rank, label in enumerate(sorted(range(len(probs)), key=lambda k: -probs[k])[:_TOP]):
        if probs[label] < _LEAST_PROB:
            break
        y = rect.y + 24 + 23 * rank
        name = wrapped(explanation.class_names[label], 10.5, rect.width - 36, 1)[0]
        drawn += _text(rect.x, y, name, 10.5, anchor="start")
        drawn += _text(rect.x + rect.width, y, percent(probs[label]), 10.5, SOFT_INK, "end")
        drawn += _rect(Rect(rect.x, y + 4, rect.width * min(probs[label], 1.0), 4.0), PRESENT_INK, radius=2.0)
    return drawn


def _arrow(before: Rect, after: Rect, solid: bool) -> str:
    colour = PRESENT_INK if solid else ABSENT_INK
    if after.y == before.y:
        y, x = before.y + before.height / 2, after.x - 4
        line, head = [(before.x + before.width + 4, y), (x, y)], [(x - 8, y - 6), (x, y), (x - 8, y + 6)]
    else:  # on to the next row: down, back to the left, and in from above
        bend, x, y = after.y - _GAP / 2, after.middle, after.y - 3
        line = [(before.middle, before.y + before.height + 2), (before.middle, bend), (x, bend), (x, y)]
        head = [(x - 6, y - 8), (x, y), (x + 6, y - 8)]
    return _line(line, colour, 2.4, dashed=not solid) + _line(head, colour, 2.4)


# ---- pictures ---------------------------------------------------------------------------------------------------
def _patch(match: records.Match, rect: Rect) -> str:
    """Draw a patch with its surroundings, in a spotlight."""
    return _picture(images.spotlit(images.crop_around(match), images.spotlight_of(match)), rect, images.CONTEXT_SIDE)


def _photo_with_box(match: records.Match, rect: Rect, *, heat: bool = False) -> str:
    """Draw the photo of a match with the first of its boxes, which are in pixels of the original."""
    photo = reduced(match.photo, images.PHOTO_SIDE)
    if not match.locations:
        return _picture(photo, rect, images.PHOTO_SIDE)
    box, (width, height) = match.locations[0].box.clip(match.size), match.size
    edges = (box.left / width, box.top / height, box.right / width, box.bottom / height)
    shown = images.heat_overlay(photo, match.locations[0].heat) if heat else photo
    return _picture(shown, rect, images.PHOTO_SIDE, edges)


def _picture(
    picture: records.Picture, rect: Rect, longest: int, frame: tuple[float, float, float, float] | None = None
) -> str:
    """Draw a whole picture, as large as the rectangle allows, in its middle; a frame has its edges as fractions."""
    picture = reduced(picture, longest)
    scale = min(rect.width / picture.shape[1], rect.height / picture.shape[0])
    width, height = picture.shape[1] * scale, picture.shape[0] * scale
    x, y = rect.x + (rect.width - width) / 2, rect.y + (rect.height - height) / 2
    image = _image(Rect(x, y, width, height), picture)
    if frame is None:
        return image
    left, top, right, bottom = frame
    edge = Rect(x + left * width, y + top * height, (right - left) * width, (bottom - top) * height)
    return image + _rect(edge, stroke="#000000", thickness=3.0) + _rect(edge, stroke=BOX_INK, thickness=1.6)


def _filling(picture: records.Picture, rect: Rect, longest: int) -> str:
    """Draw the middle of a picture, cut so that it fills the rectangle."""
    height, width, _ = picture.shape
    wide = min(width, max(1, round(height * rect.width / rect.height)))
    high = min(height, max(1, round(width * rect.height / rect.width)))
    top, left = (height - high) // 2, (width - wide) // 2
    return _image(rect, reduced(picture[top : top + high, left : left + wide], longest))


# ---- SVG elements and text --------------------------------------------------------------------------------------
def hue_colour(hue: float) -> str:
    """Convert oklch(0.56 0.12 hue), which the page has for this hue in degrees, to RGB."""
    lab = np.array([0.56, 0.12 * math.cos(math.radians(hue)), 0.12 * math.sin(math.radians(hue))])
    linear = np.maximum(_RGB_FROM_LMS @ (_LMS_FROM_LAB @ lab) ** 3, 0.0)
    bent = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return "#" + "".join(f"{round(255 * min(float(x), 1.0)):02x}" for x in bent)


def text_width(text: str, size: float) -> float:
    """Estimate the width of a line; there is no font at hand to ask, so this is on the safe side."""
    ems = 0.0
    for character in text:
        if unicodedata.combining(character) or unicodedata.category(character) == "Cf":
            continue
        wide = unicodedata.east_asian_width(character) in "WF"
        ems += 1.05 if wide else 0.34 if character in " .,:;'|!ijlt()[]·" else 0.74 if character.isupper() else 0.57
    return ems * size


def wrapped(text: str, size: float, width: float, most_lines: int | None = None) -> list[str]:
    """Wrap text into lines, breaking words that are too long for one; an ellipsis ends what has too many lines."""
    lines: list[str] = []
    for piece in (piece for word in plain(text).split(" ") for piece in _broken(word, size, width)):
        if lines and text_width(f"{lines[-1]} {piece}", size) <= width:
            lines[-1] += f" {piece}"
        else:
            lines.append(piece)
    if most_lines is None or len(lines) <= most_lines:
        return lines
    return [*lines[: most_lines - 1], _broken(lines[most_lines - 1], size, width - size)[0].rstrip() + "…"]


def _broken(word: str, size: float, width: float) -> list[str]:
    """Break a word into pieces that fit, a letter together with the marks upon it."""
    pieces = [""]
    for character in word:
        joins = unicodedata.category(character).startswith("M") or character in "\u200d\ufe0f"
        if pieces[-1] and not joins and text_width(pieces[-1] + character, size) > width:
            pieces.append("")
        pieces[-1] += character
    return pieces


def _text(
    x: float, y: float, text: str, size: float, colour: str = INK, anchor: Anchor = "middle", bold: bool = False,
    *, width: float = math.inf, most_lines: int = 1,
) -> str:  # fmt: skip
    """Write lines of text under each other, the first with its baseline at `y`."""
    weight = ' font-weight="600"' if bold else ""
    style = f'font-size="{size:.1f}" fill="{colour}" text-anchor="{anchor}"{weight}'
    lines = wrapped(text, size * (_BOLD if bold else 1.0), width, most_lines) if text else []
    return "".join(
        f'<text x="{x:.1f}" y="{y + _LINE * size * i:.1f}" {style}>{escape(line)}</text>\n'
        for i, line in enumerate(lines)
    )


def _rect(rect: Rect, fill: str = "none", stroke: str = "none", thickness: float = 1.0, radius: float = 0.0) -> str:
    return f'<rect {rect} rx="{radius:.1f}" fill="{fill}" stroke="{stroke}" stroke-width="{thickness:.1f}"/>\n'


def _line(points: list[Point], colour: str, thickness: float, dashed: bool = False) -> str:
    dashes, path = ' stroke-dasharray="5 4"' if dashed else "", " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f'fill="none" stroke="{colour}" stroke-width="{thickness:.1f}" stroke-linejoin="round"{dashes}'
    return f'<polyline points="{path}" {style}/>\n'


def _image(rect: Rect, picture: records.Picture) -> str:
    return f'<image {rect} preserveAspectRatio="none" xlink:href="{images.jpeg_url(picture)}"/>\n'

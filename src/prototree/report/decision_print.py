"""The paper's figure of a local explanation: one photo's way through the tree, as a picture."""

from itertools import pairwise

from PIL import Image

from prototree.core.strategies import Strategy
from prototree.errors import ShapeError
from prototree.evaluation.tables import percent
from prototree.explain.records import UNKNOWN, DecisionExplanation, PathExplanation, SeenPatch, Step
from prototree.report import printing
from prototree.report.cards import Spot, distribution, fitted, photo_with_box
from prototree.report.images import CROP_SIDE, PHOTO_SIDE, heated, reduced
from prototree.report.marks import (
    ABSENT_INK,
    INK,
    PAPER,
    PRESENT_INK,
    RULE,
    SOFT_INK,
    Block,
    Drawing,
    Label,
    Mark,
    Stroke,
    paragraph,
)
from prototree.report.text import (
    ABSENT,
    NEITHER_CLOSE,
    PRESENT,
    STRATEGY_NAMES,
    compared_distances,
    likeliest,
)

_MARGIN, _GAP = 28.0, 34.0
_CARD = Spot(0.0, 0.0, 236.0, 214.0)
_STEPS_A_ROW = 5


def decision_png(explanation: DecisionExplanation, strategy: Strategy) -> Image.Image:
    """The photo, each prototype on its path with the photo's best patch, and the class at the end."""
    return printing.image(decision_drawing(explanation, strategy))


def decision_drawing(explanation: DecisionExplanation, strategy: Strategy) -> Drawing:
    """The same as a drawing, for SVG or PDF."""
    if strategy not in explanation.paths:
        raise ShapeError(f"expected one of the paths {', '.join(explanation.paths)}, got {strategy!r}")
    path = explanation.paths[strategy]
    n_cards = len(path.steps) + 2  # the photo first, the class last
    columns = min(n_cards, _STEPS_A_ROW)
    rows = -(-n_cards // columns)
    top = _MARGIN + 40
    spots = [
        Spot(
            _MARGIN + (i % columns) * (_CARD.width + _GAP), top + (i // columns) * (_CARD.height + _GAP),
            _CARD.width, _CARD.height,
        )
        for i in range(n_cards)
    ]  # fmt: skip
    width = max(spot.x + spot.width for spot in spots) + _MARGIN
    marks: list[Mark] = [
        Label(_MARGIN, _MARGIN + 16, STRATEGY_NAMES[strategy], 18.0, INK, "start", bold=True),
        *_photo_card(explanation, spots[0]),
    ]
    for step, spot in zip(path.steps, spots[1:-1], strict=True):
        marks += _step_card(step, spot) if step.left is None else _choice_card(step, spot)
    marks += _end_card(explanation, path, spots[-1])
    # A pairwise node is no absence, whichever side it takes.
    turns = [None, *(step.goes_right or step.left is not None for step in path.steps)]
    for i, (before, after) in enumerate(pairwise(spots)):
        marks += _arrow(before, after, turns[i])
    return Drawing(width, top + rows * (_CARD.height + _GAP) - _GAP + _MARGIN, tuple(marks))


def _photo_card(explanation: DecisionExplanation, spot: Spot) -> list[Mark]:
    photo = fitted(reduced(explanation.photo, 2 * PHOTO_SIDE), Spot(spot.x, spot.y, spot.width, spot.height - 40))
    truth = "" if explanation.label is None else f"true class: {explanation.class_names[explanation.label]}"
    middle = spot.x + spot.width / 2
    return [photo, *paragraph(truth, middle, spot.y + spot.height - 20, spot.width, size=12.0, bold=True)]


def _step_card(step: Step, spot: Spot) -> list[Mark]:
    colour, word = (PRESENT_INK, PRESENT) if step.goes_right else (ABSENT_INK, ABSENT)
    match = step.right.match
    photo = reduced(match.photo, PHOTO_SIDE)
    shown = heated(photo, match.where[0].heat) if match.where else photo
    left = Spot(spot.x + 10, spot.y + 30, 78.0, 78.0)
    below = Spot(spot.x + 10, spot.y + 130, 78.0, 58.0)
    right = Spot(spot.x + 98, spot.y + 30, spot.width - 108, 158.0)
    name = f"{step.node} · {step.note}" if step.note else f"prototype {step.node}"
    return [
        Block(spot.x, spot.y, spot.width, spot.height, PAPER, colour if step.goes_right else RULE, 1.6, 10.0),
        *paragraph(name, spot.x + 10, spot.y + 20, spot.width - 20, size=12.0, most_lines=1, anchor="start", bold=True),
        fitted(reduced(step.right.picture, CROP_SIDE), left),
        Label(left.x + 39, left.y + 92, "best patch here:", 9.5, SOFT_INK),
        fitted(reduced(match.crop, CROP_SIDE), below),
        *photo_with_box(shown, match.size, match.where[:1], right, PHOTO_SIDE),
        Label(spot.x + 10, spot.y + spot.height - 9, f"similarity {step.p_right:.2f}", 12.0, SOFT_INK, "start"),
        Label(spot.x + spot.width - 10, spot.y + spot.height - 9, word, 12.0, colour, "end", bold=True),
    ]


def _choice_card(step: Step, spot: Spot) -> list[Mark]:
    """The photo's best patch beside each of the two prototypes; the nearer one is framed."""
    near = any(side.in_reach for side in step.sides)
    heading = "more like which?" if near else f"more like which? ({NEITHER_CLOSE})"
    marks: list[Mark] = [
        Block(spot.x, spot.y, spot.width, spot.height, PAPER, RULE, 1.6, 10.0),
        *paragraph(
            heading, spot.x + 10, spot.y + 20, spot.width - 20, size=12.0, most_lines=1, anchor="start", bold=True
        ),
    ]
    width = (spot.width - 24) / 2
    for i, (side, distance) in enumerate(zip(step.sides, compared_distances(step), strict=True)):
        column = Spot(spot.x + 8 + i * (width + 8), spot.y + 28, width, spot.height - 36)
        marks += _rival(side, distance, column, nearer=(step.p_right > 0.5) == bool(i))
    return marks


def _rival(side: SeenPatch, distance: str, spot: Spot, *, nearer: bool) -> list[Mark]:
    match, half = side.match, (spot.width - 14) / 2
    photo = reduced(match.photo, PHOTO_SIDE)
    shown = heated(photo, match.where[0].heat) if match.where else photo
    name = f"{side.prototype} · {side.note}" if side.note else f"prototype {side.prototype}"
    said, colour = (f"nearer: {distance}", PRESENT_INK) if nearer else (distance, ABSENT_INK)
    frame = (PRESENT_INK, 2.4) if nearer else (RULE, 1.0)
    middle = spot.x + spot.width / 2
    return [
        Block(spot.x, spot.y, spot.width, spot.height, PAPER, *frame, 8.0),
        *paragraph(name, middle, spot.y + 14, spot.width - 8, size=10.0, most_lines=1, colour=SOFT_INK),
        fitted(reduced(side.picture, CROP_SIDE), Spot(spot.x + 5, spot.y + 20, half, half)),
        fitted(reduced(match.crop, CROP_SIDE), Spot(spot.x + 9 + half, spot.y + 20, half, half)),
        *photo_with_box(
            shown, match.size, match.where[:1],
            Spot(spot.x + 5, spot.y + half + 26, spot.width - 10, spot.height - half - 50), PHOTO_SIDE,
        ),
        Label(middle, spot.y + spot.height - 9, said, 12.0, colour, bold=nearer),
    ]  # fmt: skip


def _end_card(explanation: DecisionExplanation, path: PathExplanation, spot: Spot) -> list[Mark]:
    label = likeliest(path.class_probs)
    middle = spot.x + spot.width / 2
    bars = Spot(spot.x + 20, spot.y + 24, spot.width - 40, 60.0)
    name = explanation.class_names[label]
    marks: list[Mark] = [
        Block(spot.x, spot.y, spot.width, spot.height, PAPER, PRESENT_INK, 2.4, 10.0),
        *distribution(path.class_probs, bars, PRESENT_INK),
        *paragraph(name, middle, spot.y + 116, spot.width - 20, size=17.0, most_lines=3, bold=True),
        Label(middle, spot.y + spot.height - 34, _trust(explanation, path), 13.0, SOFT_INK),
    ]
    if explanation.label is not None:
        right = explanation.label == label
        verdict, colour = ("right", PRESENT_INK) if right else ("wrong", INK)
        marks.append(Label(middle, spot.y + spot.height - 14, verdict, 13.0, colour, bold=True))
    return marks


def _trust(explanation: DecisionExplanation, path: PathExplanation) -> str:
    """How far to trust the answer at the end of a path."""
    if path.strategy != "greedy":
        return f"{percent(max(path.class_probs))} of the photos that end here"
    return f"a guess: {UNKNOWN}" if explanation.confidence is None else f"{percent(explanation.confidence)} sure"


def _arrow(before: Spot, after: Spot, present: bool | None) -> list[Mark]:
    colour = PRESENT_INK if present else ABSENT_INK
    dashed = present is False
    if after.y == before.y:
        y, x = before.y + before.height / 2, after.x - 4
        line = Stroke(((before.x + before.width + 4, y), (x, y)), colour, 2.4, dashed)
        return [line, Stroke(((x - 8, y - 6), (x, y), (x - 8, y + 6)), colour, 2.4)]
    # On to the next row: down, back to the left, and in from above.
    middle, x, y = after.y - _GAP / 2, after.x + after.width / 2, after.y - 3
    start = before.x + before.width / 2
    line = Stroke(((start, before.y + before.height + 2), (start, middle), (x, middle), (x, y)), colour, 2.4, dashed)
    return [line, Stroke(((x - 6, y - 8), (x, y), (x + 6, y - 8)), colour, 2.4)]

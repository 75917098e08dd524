"""The tree in print: one large SVG, the paper's subtree figure, and a PDF of pages with an index of the classes."""

from collections.abc import Callable
from pathlib import Path

from prototree.errors import ShapeError
from prototree.explain.records import PrototypeExplanation, TreeExplanation
from prototree.files import write_file
from prototree.report import printing
from prototree.report.cards import Spot, filling, fitted, framed, subtree
from prototree.report.images import around_of, faded, reduced
from prototree.report.layout import parts, reading_order
from prototree.report.marks import (
    ABSENT_INK,
    INK,
    PRESENT_INK,
    RULE,
    SOFT_INK,
    Block,
    Drawing,
    Label,
    Mark,
    Stroke,
    moved,
    paragraph,
    scaled,
    text_width,
    wrapped,
)
from prototree.report.text import Reading, Rule, count, headline

PAGE_WIDTH, PAGE_HEIGHT, MARGIN = 1122.5, 793.7, 40.0  # A4 on its side
_HEAD = 44.0  # of a page, with its title
_ENDS_A_PAGE, _LEVELS_A_PAGE = 9, 4
_LEAST = 0.9  # that cards are scaled to: their text stays above 7 pt
_CROP = 64  # pixels of a patch in the index
_NAME_WIDTH, _NAME, _PATCH = 230.0, 12.0, 44.0  # of a row of the index

_INNER_WIDTH, _INNER_HEIGHT = PAGE_WIDTH - 2 * MARGIN, PAGE_HEIGHT - 2 * MARGIN - _HEAD - 16

Piece = tuple[int, frozenset[int]]
"""The root of a part of the tree, and the nodes where another piece goes on."""


def tree_svg(explanation: TreeExplanation) -> str:
    """The whole tree on one sheet for a wall, as SVG."""
    drawing = _sheet_of(subtree(Reading(explanation), 0, (), lambda below: ""), top=48.0)
    title = Label(24.0, 40.0, explanation.title, 22.0, INK, "start", bold=True)
    width = max(drawing.width, 48 + text_width(explanation.title, 22.0))
    return Drawing(width, drawing.height, (title, *drawing.marks)).svg(explanation.title)


def subtree_svg(explanation: TreeExplanation, node: int, depth: int) -> str:
    """The paper's subtree figure: `depth` levels of prototypes from `node` down, as SVG."""
    n_nodes = len(explanation.left)
    if not 0 <= node < n_nodes or depth < 1:
        raise ShapeError(f"expected a node from 0 to {n_nodes - 1} and a depth of at least 1, got {node} and {depth}")
    order = reading_order(explanation.left, explanation.right, root=node)
    closed = {id_ for id_, level in order if id_ >= 0 and level == depth}
    drawing = _sheet_of(subtree(Reading(explanation), node, closed, lambda below: ""))
    noun = "node" if explanation.question == "pairwise" else "prototype"
    return drawing.svg(f"{explanation.title}: below {noun} {node}")


def tree_pdf(explanation: TreeExplanation, path: Path) -> None:
    """The tree in print: an overview, the subtrees at a legible size, and an index of the classes with their rules."""
    write_file(path, printing.pdf(pages(explanation), explanation.title))


def pages(explanation: TreeExplanation) -> list[Drawing]:
    """The pages of the PDF."""
    reading = Reading(explanation)
    pieces = parts(explanation.left, explanation.right, most_ends=_ENDS_A_PAGE, most_levels=_LEVELS_A_PAGE)
    sheets = _sheets([(piece, _piece(reading, piece, lambda below: "page 000")) for piece in pieces])
    page_of = {root: number for number, sheet in enumerate(sheets, 2) for root, _ in sheet}  # 1 is the overview
    leaf_page, from_page = {}, {}
    for number, sheet in enumerate(sheets, 2):
        for root, closed in sheet:
            from_page.update(dict.fromkeys(closed, number))
            order = reading_order(explanation.left, explanation.right, root=root, closed=closed)
            leaf_page.update({~id_: number for id_, _ in order if id_ < 0})
    subtrees = [_sheet_page(reading, sheet, page_of, from_page, number) for number, sheet in enumerate(sheets, 2)]
    return [_overview(reading), *subtrees, *_index_pages(reading, leaf_page, 2 + len(sheets))]


def _piece(reading: Reading, piece: Piece, goes_on: Callable[[int], str]) -> Drawing:
    root, closed = piece
    return subtree(reading, root, closed, goes_on, aspect=_INNER_WIDTH / _INNER_HEIGHT)


def _sheets(pieces: list[tuple[Piece, Drawing]]) -> list[list[Piece]]:
    """The pieces of the tree, small ones side by side on one page."""
    sheets: list[list[Piece]] = []
    room = 0.0
    for piece, drawing in pieces:
        needed = drawing.width + MARGIN
        if not sheets or needed > room:
            sheets.append([])
            room = _INNER_WIDTH / _LEAST + MARGIN
        sheets[-1].append(piece)
        room -= needed
    return sheets


def _overview(reading: Reading) -> Drawing:
    tree = reading.explanation
    facts = [count(len(tree.prototypes), "prototype"), count(len(tree.class_names), "class", "classes")]
    facts += [headline(tree)] if tree.accuracy else []
    how = (
        "Read from the top: at each pair of prototypes follow the line with the picture that the photo is more like."
        if reading.is_choice
        else "Read from the top: solid lines lead on where the prototype is present, dashed lines where it is absent."
    )
    inner = PAGE_WIDTH - 2 * MARGIN
    head = [
        *paragraph(tree.title, MARGIN, MARGIN + 22, inner, size=24.0, most_lines=1, anchor="start", bold=True),
        *paragraph("; ".join(facts), MARGIN, MARGIN + 46, inner, size=12.0, most_lines=1, anchor="start"),
        *paragraph(how, MARGIN, MARGIN + 64, inner, size=12.0, anchor="start", colour=SOFT_INK),
    ]
    high = PAGE_HEIGHT - 2 * MARGIN - 110
    drawing = subtree(reading, 0, (), lambda below: "", aspect=inner / high)
    if min(inner / drawing.width, high / drawing.height) < _LEAST:  # its text would be too small to read
        drawing = subtree(reading, 0, (), lambda below: "", small=True, aspect=inner / high)
        note = "Pictures only; the following pages have the names."
        head += paragraph(note, MARGIN, MARGIN + 82, inner, size=12.0, anchor="start", colour=SOFT_INK)
    return _page([*head, *_placed(drawing, Spot(MARGIN, MARGIN + 96, inner, high))], 1)


def _sheet_page(
    reading: Reading, sheet: list[Piece], page_of: dict[int, int], from_page: dict[int, int], number: int
) -> Drawing:
    drawings = [_piece(reading, piece, lambda below: f"page {page_of[below]}") for piece in sheet]
    marks: list[Mark] = []
    # All at one scale, side by side, each over as much of the page as it needs. A card that is too high for the page
    # makes the page larger, never its text smaller.
    wide, high = sum(d.width for d in drawings) + MARGIN * (len(drawings) - 1), max(d.height for d in drawings)
    factor = max(min(_INNER_WIDTH / wide, _INNER_HEIGHT / high, 1.0), _LEAST)
    spare = max(0.0, (_INNER_WIDTH - factor * (wide - MARGIN * (len(drawings) - 1))) / len(drawings))
    x = MARGIN
    for (root, _), drawing in zip(sheet, drawings, strict=True):
        title = "From the root" if root == 0 else f"From page {from_page[root]}"
        room = factor * drawing.width + spare
        left = x + (room - factor * drawing.width) / 2
        marks.append(Label(left, MARGIN + 14, title, 15.0, INK, "start", bold=True))
        marks += _placed(drawing, Spot(x, MARGIN + _HEAD, room, _INNER_HEIGHT), factor)
        x += room
    page = _page(marks, number)
    width, height = max(PAGE_WIDTH, x + MARGIN), max(PAGE_HEIGHT, factor * high + 2 * MARGIN + _HEAD + 16)
    return Drawing(width, height, page.marks)


def _index_pages(reading: Reading, leaf_page: dict[int, int], first: int) -> list[Drawing]:
    names = reading.explanation.class_names
    ranked = sorted(reading.rules, key=lambda rule: (names[rule.label].casefold(), -rule.share))
    how = (
        "From the root: the photo must be more like the framed prototype than the faded one next to it."
        if reading.is_choice
        else "Framed: must be present. Faded and struck through: must be absent."
    )
    head: list[Mark] = [
        Label(MARGIN, MARGIN + 14, "Classes and the rules that lead to them", 15.0, INK, "start", bold=True),
        Label(MARGIN, MARGIN + 32, how, 11.0, SOFT_INK, "start"),
    ]
    made: list[list[Mark]] = []
    y = PAGE_HEIGHT
    for rule in (rule for rule in ranked if not reading.is_unsure(rule.leaf)):
        height = _row_height(reading, rule)
        if y + height > PAGE_HEIGHT - MARGIN - 16 or not made:
            made.append(list(head))
            y = MARGIN + _HEAD + 8
        made[-1] += _index_row(reading, rule, leaf_page.get(rule.leaf, 1), y, height)
        y += height
    return [_page(marks, first + i) for i, marks in enumerate(made)]


def _row_name(reading: Reading, rule: Rule) -> list[str]:
    return wrapped(reading.explanation.class_names[rule.label], 1.1 * _NAME, _NAME_WIDTH - 50 - 12, None)


def _row_height(reading: Reading, rule: Rule) -> float:
    return max(_PATCH, 1.25 * _NAME * len(_row_name(reading, rule)) + 6) + 10


def _index_row(reading: Reading, rule: Rule, page: int, y: float, height: float) -> list[Mark]:
    photos, left = reading.known(rule.label).photos, MARGIN + 52
    lines = enumerate(_row_name(reading, rule))
    marks: list[Mark] = [
        *([filling(photos[0], Spot(MARGIN, y, _PATCH, _PATCH), _CROP * 2)] if photos else []),
        *(Label(left, y + 15 + 1.25 * _NAME * i, line, _NAME, INK, "start", bold=True) for i, line in lines),
        Label(PAGE_WIDTH - MARGIN, y + 26, f"page {page}", 11.0, SOFT_INK, "end"),
        Stroke(((MARGIN, y + height - 5), (PAGE_WIDTH - MARGIN, y + height - 5)), RULE, 0.6),
    ]
    step = (2 * _PATCH - 12 if reading.is_choice else _PATCH) + 7
    most = int((_INNER_WIDTH - _NAME_WIDTH - 76) // step)
    # What must be present says most about a class; where not all fits, absences are left out.
    shown = reading.conditions(rule)[:most]
    for i, (node, right) in enumerate(shown):
        spot = Spot(MARGIN + _NAME_WIDTH + i * step, y, _PATCH, _PATCH)
        if reading.is_choice:
            near, far = reading.rather(node, right)
            small = Spot(spot.x + _PATCH + 2, y + 7, _PATCH - 14, _PATCH - 14)
            marks += [*_index_crop(near, spot, wanted=True), *_index_crop(far, small, wanted=False)]
        else:
            marks += _index_crop(reading.explanation.prototype_at(node, "right"), spot, wanted=right)
    if len(shown) < len(rule.turns):
        more = f"+{len(rule.turns) - len(shown)}"
        marks.append(Label(MARGIN + _NAME_WIDTH + len(shown) * step, y + 26, more, 11.0, SOFT_INK, "start"))
    return marks


def _index_crop(prototype: PrototypeExplanation, spot: Spot, *, wanted: bool) -> list[Mark]:
    crop = fitted(faded(reduced(around_of(prototype.source), _CROP)), spot)
    edges = crop.x, crop.y, crop.width, crop.height
    if wanted:
        return [*framed(prototype.source, spot), Block(*edges, stroke=PRESENT_INK, thickness=2.5)]
    ends = ((crop.x, crop.y + crop.height), (crop.x + crop.width, crop.y))
    return [crop, Block(*edges, stroke=ABSENT_INK, thickness=0.8), Stroke(ends, ABSENT_INK, 1.4)]


def _placed(drawing: Drawing, spot: Spot, factor: float | None = None) -> list[Mark]:
    """The drawing in the upper middle of a spot, as large as it fits, or by this factor."""
    factor = factor or min(spot.width / drawing.width, spot.height / drawing.height, 1.0)
    across = spot.x + (spot.width - factor * drawing.width) / 2
    return [moved(scaled(mark, factor), across, spot.y) for mark in drawing.marks]


def _page(marks: list[Mark], number: int) -> Drawing:
    foot = Label(PAGE_WIDTH - MARGIN, PAGE_HEIGHT - MARGIN / 2, str(number), 11.0, SOFT_INK, "end")
    return Drawing(PAGE_WIDTH, PAGE_HEIGHT, (*marks, foot))


def _sheet_of(drawing: Drawing, *, top: float = 0.0, margin: float = 24.0) -> Drawing:
    marks = tuple(moved(mark, margin, margin + top) for mark in drawing.marks)
    return Drawing(drawing.width + 2 * margin, drawing.height + 2 * margin + top, marks)

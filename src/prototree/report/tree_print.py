"""The tree in print: one large SVG, the paper's subtree figure, and a PDF of pages with an index of the classes."""

from pathlib import Path

from prototree.errors import ShapeError
from prototree.evaluation.tables import percent
from prototree.explain.records import PrototypeExplanation, TreeExplanation
from prototree.files import write_file
from prototree.report import printing
from prototree.report.cards import Spot, fitted, subtree
from prototree.report.encoding import faded, reduced
from prototree.report.layout import arrange, parts
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
)
from prototree.report.words import STRATEGY_NAMES, Reading, Rule, count
from prototree.tree.strategies import STRATEGIES

PAGE_WIDTH, PAGE_HEIGHT, MARGIN = 1122.5, 793.7, 40.0  # A4 on its side
_HEAD = 44.0  # of a page, with its title
_ENDS_A_PAGE, _LEVELS_A_PAGE = 10, 4
_OVERVIEW_CROP = 48  # pixels
_ROW, _ROW_CROP = 46.0, 36.0  # of the index

Piece = tuple[int, frozenset[int]]
"""The root of a part of the tree, and the nodes where another piece goes on."""


def tree_svg(explanation: TreeExplanation) -> str:
    """The whole tree on one sheet, as SVG."""
    drawing = _framed(subtree(Reading(explanation), 0, (), lambda below: ""), top=48.0)
    title = Label(24.0, 40.0, explanation.title, 22.0, INK, "start", bold=True)
    width = max(drawing.width, 48 + text_width(explanation.title, 22.0))
    return Drawing(width, drawing.height, (title, *drawing.marks)).svg(explanation.title)


def subtree_svg(explanation: TreeExplanation, node: int, depth: int) -> str:
    """The paper's subtree figure: `depth` levels of prototypes from `node` down, as SVG."""
    n_nodes = len(explanation.left)
    if not 0 <= node < n_nodes or depth < 1:
        raise ShapeError(f"expected a node from 0 to {n_nodes - 1} and a depth of at least 1, got {node} and {depth}")
    whole = arrange(explanation.left, explanation.right, root=node)
    closed = {id_ for id_, place in whole.places.items() if id_ >= 0 and place.level == depth}
    drawing = _framed(subtree(Reading(explanation), node, closed, lambda below: ""))
    noun = "node" if explanation.question == "choice" else "prototype"
    return drawing.svg(f"{explanation.title}: below {noun} {node}")


def tree_pdf(explanation: TreeExplanation, path: Path) -> None:
    """The tree in print: an overview, the subtrees at a legible size, and an index of the classes with their rules."""
    write_file(path, printing.pdf(pages(explanation), explanation.title))


def pages(explanation: TreeExplanation) -> list[Drawing]:
    """The pages of the PDF."""
    reading, sheets = Reading(explanation), _sheets(explanation)
    page_of = {root: number for number, sheet in enumerate(sheets, 2) for root, _ in sheet}  # 1 is the overview
    leaf_page = {
        ~id_: number
        for number, sheet in enumerate(sheets, 2)
        for root, closed in sheet
        for id_ in arrange(explanation.left, explanation.right, root=root, closed=closed).ends
    }
    subtrees = [_sheet_page(reading, sheet, page_of, number) for number, sheet in enumerate(sheets, 2)]
    return [_overview(reading), *subtrees, *_index_pages(reading, leaf_page, 2 + len(sheets))]


def _sheets(explanation: TreeExplanation) -> list[list[Piece]]:
    """The pieces of the tree, small ones side by side on one page."""
    left, right = explanation.left, explanation.right
    sheets: list[list[Piece]] = []
    room = 0.0
    for root, closed in parts(left, right, most_ends=_ENDS_A_PAGE, most_levels=_LEVELS_A_PAGE):
        needed = len(arrange(left, right, root=root, closed=closed).ends) + 0.8  # cards overhang their slots
        if not sheets or needed > room:
            sheets.append([])
            room = _ENDS_A_PAGE + 0.8
        sheets[-1].append((root, closed))
        room -= needed
    return sheets


def _overview(reading: Reading) -> Drawing:
    tree = reading.explanation
    facts = [count(len(tree.prototypes), "prototype"), count(len(tree.class_names), "class", "classes")]
    accuracy = [f"{STRATEGY_NAMES[s].lower()} {percent(tree.accuracy[s])}" for s in STRATEGIES if s in tree.accuracy]
    if accuracy:
        facts.append(f"correct on test photos: {', '.join(accuracy)}")
    how = (
        "Read from the top: at each pair of prototypes follow the line below the one that the photo is more like."
        if reading.is_choice
        else "Read from the top: solid lines lead on where the prototype is present, dashed lines where it is absent."
    )
    inner = PAGE_WIDTH - 2 * MARGIN
    head = [
        *paragraph(tree.title, MARGIN, MARGIN + 22, inner, size=24.0, most_lines=1, anchor="start", bold=True),
        *paragraph("; ".join(facts), MARGIN, MARGIN + 46, inner, size=12.0, most_lines=1, anchor="start"),
        *paragraph(how, MARGIN, MARGIN + 64, inner, size=12.0, anchor="start", colour=SOFT_INK),
    ]
    drawing = subtree(reading, 0, (), lambda below: "", small=True)
    return _page([*head, *_placed(drawing, Spot(MARGIN, MARGIN + 90, inner, PAGE_HEIGHT - 2 * MARGIN - 110))], 1)


def _sheet_page(reading: Reading, sheet: list[Piece], page_of: dict[int, int], number: int) -> Drawing:
    drawings = [subtree(reading, root, closed, lambda below: f"page {page_of[below]}") for root, closed in sheet]
    roots = ", ".join(str(root) for root, _ in sheet)
    noun = ("node" if reading.is_choice else "prototype") + ("" if len(sheet) == 1 else "s")
    title = "From the root" if sheet[0][0] == 0 else f"From {noun} {roots}"
    marks: list[Mark] = [Label(MARGIN, MARGIN + 14, title, 15.0, INK, "start", bold=True)]
    # All at one scale, side by side, each over as much of the page as it needs.
    inner, high = PAGE_WIDTH - 2 * MARGIN, PAGE_HEIGHT - 2 * MARGIN - _HEAD - 16
    factor = min(inner / sum(d.width for d in drawings), high / max(d.height for d in drawings), 1.0)
    spare = (inner - factor * sum(d.width for d in drawings)) / len(drawings)
    x = MARGIN
    for drawing in drawings:
        marks += _placed(drawing, Spot(x, MARGIN + _HEAD, factor * drawing.width + spare, high), factor)
        x += factor * drawing.width + spare
    return _page(marks, number)


def _index_pages(reading: Reading, leaf_page: dict[int, int], first: int) -> list[Drawing]:
    names = reading.explanation.class_names
    ranked = sorted(reading.rules, key=lambda rule: (names[rule.label].casefold(), -rule.share))
    rules = [rule for rule in ranked if not reading.is_unsure(rule.leaf)]
    rows = int((PAGE_HEIGHT - 2 * MARGIN - _HEAD - 40) // _ROW)
    made: list[Drawing] = []
    how = (
        "From the root on: the photo must be more like the framed prototype than like the faded one beside it."
        if reading.is_choice
        else "Framed: must be present. Faded and struck through: must be absent."
    )
    for start in range(0, len(rules), rows):
        marks: list[Mark] = [
            Label(MARGIN, MARGIN + 14, "Classes and the rules that lead to them", 15.0, INK, "start", bold=True),
            Label(MARGIN, MARGIN + 32, how, 11.0, SOFT_INK, "start"),
        ]
        for i, rule in enumerate(rules[start : start + rows]):
            marks += _index_row(reading, rule, leaf_page.get(rule.leaf, 1), MARGIN + _HEAD + 8 + i * _ROW)
        made.append(_page(marks, first + len(made)))
    return made


def _index_row(reading: Reading, rule: Rule, page: int, y: float) -> list[Mark]:
    name_width, size = 210.0, 12.0
    marks: list[Mark] = [
        *paragraph(
            reading.explanation.class_names[rule.label], MARGIN, y + 15, name_width - 12, size=size, most_lines=2,
            anchor="start", bold=True,
        ),
        Label(PAGE_WIDTH - MARGIN, y + 22, f"page {page}", 11.0, SOFT_INK, "end"),
        Stroke(((MARGIN, y + _ROW - 4), (PAGE_WIDTH - MARGIN, y + _ROW - 4)), RULE, 0.6),
    ]  # fmt: skip
    step = (2 * _ROW_CROP - 10 if reading.is_choice else _ROW_CROP) + 7
    most = int((PAGE_WIDTH - 2 * MARGIN - name_width - 60) // step)
    # What must be present says most about a class; where not all fits, absences are left out.
    shown = reading.conditions(rule)[:most]
    for i, (node, right) in enumerate(shown):
        spot = Spot(MARGIN + name_width + i * step, y, _ROW_CROP, _ROW_CROP)
        if reading.is_choice:
            near, far = reading.rather(node, right)
            small = Spot(spot.x + _ROW_CROP + 2, y + 6, _ROW_CROP - 12, _ROW_CROP - 12)
            marks += [*_index_crop(near, spot, wanted=True), *_index_crop(far, small, wanted=False)]
        else:
            marks += _index_crop(reading.explanation.prototype_at(node, "right"), spot, wanted=right)
    if len(shown) < len(rule.turns):
        more = f"+{len(rule.turns) - len(shown)}"
        marks.append(Label(MARGIN + name_width + len(shown) * step, y + 22, more, 11.0, SOFT_INK, "start"))
    return marks


def _index_crop(prototype: PrototypeExplanation, spot: Spot, *, wanted: bool) -> list[Mark]:
    picture = reduced(prototype.source.crop, _OVERVIEW_CROP)
    crop = fitted(picture if wanted else faded(picture), spot)
    edges = crop.x, crop.y, crop.width, crop.height
    if wanted:
        return [crop, Block(*edges, stroke=PRESENT_INK, thickness=2.5)]
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


def _framed(drawing: Drawing, *, top: float = 0.0, margin: float = 24.0) -> Drawing:
    marks = tuple(moved(mark, margin, margin + top) for mark in drawing.marks)
    return Drawing(drawing.width + 2 * margin, drawing.height + 2 * margin + top, marks)

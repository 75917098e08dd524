"""Explanations as files in a folder."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prototree.core.strategies import Strategy
from prototree.errors import MissingExtraError
from prototree.explain.records import DecisionExplanation, TreeExplanation
from prototree.files import make_folder, write_file
from prototree.progress import Observer
from prototree.report.decision_html import Decided, decision_page
from prototree.report.decision_index import IndexEntry, index_page
from prototree.report.decision_json import decision_json
from prototree.report.decision_print import decision_png
from prototree.report.images import png
from prototree.report.rules import rules_json, rules_text
from prototree.report.tree_html import tree_page
from prototree.report.tree_print import tree_pdf, tree_svg

if TYPE_CHECKING:
    from prototree.run import Run

log = logging.getLogger(__name__)


def report_run(
    run: "str | Path | Run",
    folder: str | Path,
    *,
    data: str | Path | None = None,
    nearest: int = 5,
    occlusion: bool = False,
    observer: Observer | None = None,
) -> list[Path]:
    """Writes the whole tree of a run as pages to look at and to print (§5.2); returns what was written.

    Without the training data: what the run keeps. With it, the run keeps what its pages show.
    """
    from prototree.explain.tree import explain_tree, store_pages
    from prototree.run import Run

    run, observer = Run.open(run), observer or Observer()
    images = run.data(data) if data else run.data_if_here()
    observer.stage("explaining every prototype" if images else "the training data is not here; using stored pictures")
    explanation = explain_tree(run, data=images, nearest=nearest, occlusion=occlusion, tick=observer.caching)
    if images and not run.is_packed:
        store_pages(run, images, explanation)
    return write_report(explanation, Path(folder))


def write_report(explanation: TreeExplanation, folder: Path) -> list[Path]:
    """Writes the tree as index.html, tree.svg, tree.pdf, rules.txt and rules.json; returns what was written.

    Without matplotlib there is no PDF, and a warning says so.

    Examples:
        >>> explanation = explain_tree(Run.open("runs/photos"))
        >>> sorted(path.name for path in write_report(explanation, Path("report")))
        ['index.html', 'rules.json', 'rules.txt', 'tree.pdf', 'tree.svg']
    """
    make_folder(folder)
    written = [
        _text(folder / "index.html", tree_page(explanation)),
        _text(folder / "tree.svg", tree_svg(explanation)),
        _text(folder / "rules.txt", rules_text(explanation)),
        _json(folder / "rules.json", rules_json(explanation)),
    ]
    try:
        tree_pdf(explanation, folder / "tree.pdf")
    except MissingExtraError as error:
        log.warning("no tree.pdf: %s", error)
        return written
    return [*written, folder / "tree.pdf"]


def write_decision(explanation: Decided, folder: Path, strategy: Strategy = "greedy") -> list[Path]:
    """Writes one decision as decision.html, decision.json and, for each tree, decision.png; returns what was written.

    Without matplotlib there is no picture, and a warning says so.

    Examples:
        >>> decision = explain_image(Run.open("runs/photos"), "bird.jpg")
        >>> sorted(path.name for path in write_decision(decision, Path("explained")))
        ['decision.html', 'decision.json', 'decision.png']
    """
    make_folder(folder)
    written = [
        _text(folder / "decision.html", decision_page(explanation)),
        _json(folder / "decision.json", decision_json(explanation)),
    ]
    single = isinstance(explanation, DecisionExplanation)
    decisions = (explanation,) if isinstance(explanation, DecisionExplanation) else explanation.decisions
    try:
        for number, decision in enumerate(decisions, 1):
            path = folder / ("decision.png" if single else f"decision-{number}.png")
            write_file(path, png(decision_png(decision, strategy)))
            written.append(path)
    except MissingExtraError as error:
        log.warning("no decision.png: %s", error)
    return written


def write_index(entries: Sequence[IndexEntry], folder: Path) -> Path:
    """The list of many decisions as index.html, beside their folders."""
    make_folder(folder)
    return _text(folder / "index.html", index_page(entries))


def _text(path: Path, text: str) -> Path:
    # Half a surrogate pair, as in a name from a badly spelled file, is no text; it becomes a question mark.
    write_file(path, text.encode("utf-8", errors="replace"))
    return path


def _json(path: Path, data: Any) -> Path:
    return _text(path, json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1) + "\n")

"""Explanations as files in a folder, and inside a notebook."""

import html
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from prototree.core.topology import Strategy
from prototree.explanation.records import DecisionExplanation, TreeExplanation
from prototree.io import make_folder, write_file
from prototree.progress import Observer
from prototree.reporting.comparison_page import comparison_page
from prototree.reporting.decision_page import Decision, IndexEntry, decision_json, decision_page, index_page
from prototree.reporting.figures import decision_figure, tree_figure
from prototree.reporting.text import rules_json, rules_text
from prototree.reporting.tree_page import tree_page

PAGE = "index.html"


def report(
    model: Any,
    folder: str | Path,
    *,
    data: str | Path | None = None,
    nearest: int = 5,
    occlusion: bool = False,
    observer: Observer | None = None,
) -> list[Path]:
    """Write a tree as index.html, tree.svg, tree.pdf, rules.txt and rules.json (§5.2).

    A run also stores what its pages show, for machines without the training images.

    Args:
        model: A run, its folder, a `.prototree` file, or a `TreeExplanation`.
        folder: Folder to write to.
        data: Data set to use instead of the run's own.
        nearest: How many nearest training patches to show per prototype.
        occlusion: Also compute occlusion maps of the images; slower.
        observer: Progress callbacks.

    Returns:
        The files written.

    Examples:
        >>> explanation = prototree.explain("runs/photos")
        >>> sorted(path.name for path in report(explanation, "report"))
        ['index.html', 'rules.json', 'rules.txt', 'tree.pdf', 'tree.svg']
    """
    explanation = model
    if not isinstance(model, TreeExplanation):
        from prototree.explanation.tree import explain_tree, save_assets  # torch, which drawing does not need
        from prototree.run import Run

        run, observer = Run.open(model), observer or Observer()
        photos = run.data(data) if data else run.data_or_none()
        observer.stage("explaining every prototype" if photos else "no training data here; using stored pictures")
        explanation = explain_tree(run, data=photos, nearest=nearest, occlusion=occlusion, tick=observer.caching)
        if photos and not run.is_packed:
            save_assets(run, photos, explanation)
    figure, folder = tree_figure(explanation), Path(folder)
    make_folder(folder)
    return [
        _write(folder / PAGE, tree_page(explanation)),
        _write(folder / "tree.svg", figure.svg),
        _write(folder / "rules.txt", rules_text(explanation)),
        _write(folder / "rules.json", rules_json(explanation)),
        _write(folder / "tree.pdf", figure.pdf()),
    ]


def write_decision(
    explanation: Decision, folder: str | Path, strategy: Strategy = "greedy", *, report: str | Path | None = None
) -> list[Path]:
    """Write one decision as decision.html, decision.json and, for each tree, decision.png.

    Args:
        explanation: A decision of one tree, or of an ensemble.
        folder: Folder to write to.
        strategy: The path in the picture: greedy or max_path.
        report: Folder of the tree's report, to which the page links if it exists.

    Returns:
        The files written.

    Examples:
        >>> decision = prototree.explain("runs/photos", "bird.jpg")
        >>> sorted(path.name for path in write_decision(decision, "explained"))
        ['decision.html', 'decision.json', 'decision.png']
    """
    folder = Path(folder)
    make_folder(folder)
    if isinstance(explanation, DecisionExplanation):
        pictures = {"decision.png": explanation}
    else:
        pictures = {f"decision-{number}.png": each for number, each in enumerate(explanation.decisions, 1)}
    return [
        _write(folder / "decision.html", decision_page(explanation, _link(report, folder))),
        _write(folder / "decision.json", decision_json(explanation)),
        *(_write(folder / name, decision_figure(each, strategy).png()) for name, each in pictures.items()),
    ]


def write_comparison(
    model: Any,
    against: Any,
    folder: str | Path,
    *,
    data: str | Path | None = None,
    report_url: str = "",
    observer: Observer | None = None,
) -> Path:
    """Write what differs between a run and another one, such as the run before edits, as comparison.html.

    Both are run on the test images of the run's data, or of `data`. `report_url` is where the run's report is.
    """
    from prototree.explanation.comparison import compare_runs
    from prototree.run import Run

    run, other, observer = Run.open(model), Run.open(against), observer or Observer()
    observer.stage("predicting the test images with both trees")
    comparison = compare_runs(run, other, data=run.data(data))
    make_folder(Path(folder))
    return _write(Path(folder) / "comparison.html", comparison_page(comparison, report_url))


def _link(report: str | Path | None, folder: Path) -> str:
    """Link from a folder to the page of the tree; empty where there is none."""
    if report is None or not (page := Path(report) / PAGE).exists():
        return ""
    return quote(os.fsencode(os.path.relpath(page.resolve(), folder.resolve())))


def write_index(entries: Sequence[IndexEntry], folder: str | Path) -> Path:
    """Write the list of many decisions as index.html, beside their folders."""
    make_folder(Path(folder))
    return _write(Path(folder) / PAGE, index_page(entries))


@dataclass(frozen=True)
class NotebookPage:
    """A page that a notebook shows in place."""

    page: str
    height: int = 640

    def _repr_html_(self) -> str:
        # A frame of its own keeps the page's style and script out of the notebook, and the notebook's out of the page.
        source = html.escape(self.page, quote=True)
        return (
            f'<iframe srcdoc="{source}" sandbox="allow-scripts allow-modals" width="100%" height="{self.height}" '
            'style="border:1px solid #ccc;border-radius:8px" title="Explanation"></iframe>'
        )


def show(explanation: TreeExplanation | Decision) -> NotebookPage:
    """Display a tree or a decision in a notebook: put this last in a cell.

    Args:
        explanation: What `explain` returned.

    Returns:
        A page that the notebook shows in place.

    Examples:
        >>> show(prototree.explain("runs/photos", "bird.jpg"))  # doctest: +SKIP
        <the page of the decision>
    """
    if isinstance(explanation, TreeExplanation):
        return NotebookPage(tree_page(explanation))
    return NotebookPage(decision_page(explanation), height=820)


def _write(path: Path, content: str | bytes | dict[str, Any]) -> Path:
    if isinstance(content, dict):
        content = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    # Half a surrogate pair, as in a name from a badly spelled file, is no text; it becomes a question mark.
    write_file(path, content.encode("utf-8", errors="replace") if isinstance(content, str) else content)
    return path

"""Explanations drawn: self-contained pages, SVG, PDF, PNG, text and JSON. No tensor comes here.

The records of `explain` are the plain data that all of this is drawn from. A tree is laid out once (`layout`), told
once (`words`), and drawn as marks (`cards`, `marks`) for print or by `assets/tree.js` on a page.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from prototree.report.decision_html import decision_body, decision_page
from prototree.report.decision_index import index_entry, index_page
from prototree.report.decision_json import decision_json
from prototree.report.decision_print import decision_drawing, decision_png
from prototree.report.notebook import NotebookPage, show
from prototree.report.rules import rules_json, rules_text
from prototree.report.templating import asset, script_json
from prototree.report.tree_html import tree_body, tree_data, tree_page
from prototree.report.tree_print import subtree_svg, tree_pdf, tree_svg
from prototree.report.writing import report_run, write_decision, write_index, write_report

__all__ = [
    "NotebookPage",
    "asset",
    "decision_body",
    "decision_drawing",
    "decision_json",
    "decision_page",
    "decision_png",
    "index_entry",
    "index_page",
    "report_run",
    "rules_json",
    "rules_text",
    "script_json",
    "show",
    "subtree_svg",
    "tree_body",
    "tree_data",
    "tree_page",
    "tree_pdf",
    "tree_svg",
    "write_decision",
    "write_index",
    "write_report",
]


class _Callable(ModuleType):
    """This package, which can also be called: people write `prototree.report(run, folder)`."""

    def __call__(self, run: Any, folder: str | Path, **options: Any) -> list[Path]:
        """Write the pages of a run's tree, as `prototree report` does."""
        return report_run(run, folder, **options)


sys.modules[__name__].__class__ = _Callable

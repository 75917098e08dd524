"""Explanations drawn: self-contained pages, SVG, PDF, PNG, text and JSON. No tensor comes here.

`explanations` are the plain data that all of this is drawn from. A tree is laid out once (`layout`), told once
(`words`), and drawn as marks (`cards`, `drawing`) for print or by `assets/tree.js` on a page.
"""

from prototree.report.decision_print import decision_drawing, decision_png
from prototree.report.decisions import decision_body, decision_json, decision_page
from prototree.report.files import write_decision, write_report
from prototree.report.notebook import Shown, show
from prototree.report.pages import asset, script_json, tree_body, tree_data, tree_page
from prototree.report.rules import rules_json, rules_text
from prototree.report.tree_print import subtree_svg, tree_pdf, tree_svg

__all__ = [
    "Shown",
    "asset",
    "decision_body",
    "decision_drawing",
    "decision_json",
    "decision_page",
    "decision_png",
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
    "write_report",
]

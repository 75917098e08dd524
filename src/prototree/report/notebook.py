"""Explanations that show themselves in a notebook."""

import html
from dataclasses import dataclass

from prototree.explain.records import TreeExplanation
from prototree.report.decision_html import Decided, decision_page
from prototree.report.tree_html import tree_page


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


def show(explanation: TreeExplanation | Decided) -> NotebookPage:
    """In a notebook, put this last in a cell: the tree or the decision appears below it.

    Examples:
        >>> show(explain_image(Run.open("runs/photos"), "bird.jpg"))  # doctest: +SKIP
        <the page of the decision>
    """
    if isinstance(explanation, TreeExplanation):
        return NotebookPage(tree_page(explanation))
    return NotebookPage(decision_page(explanation), height=820)

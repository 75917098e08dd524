"""Why a tree decides as it does, as plain data: one prototype, one decision, the whole tree. Draws nothing.

Imports a run and what lies below. `records` needs no torch, so that `report` can draw without it.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prototree.explain.records import DecisionExplanation


class _Callable(ModuleType):
    """This package, which can also be called: people write `prototree.explain(run, image)`."""

    def __call__(self, run: Any, image: Any, **options: Any) -> "DecisionExplanation":
        """Explain a decision, as `prototree.explain_image` does."""
        from prototree.explain.decisions import explain_image

        return explain_image(run, image, **options)


sys.modules[__name__].__class__ = _Callable

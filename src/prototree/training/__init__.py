"""Train a tree: each recipe is one file with one function, `train(context, settings, start=None)`.

`paper` is Algorithm 1; `distill` is the default. A new recipe is a new file with a function and a dataclass of
settings, entered here and in `config.RECIPE_SETTINGS` under the same name.
"""

from collections.abc import Callable
from typing import Any

from prototree.core.model import ProtoTree
from prototree.training import distill, paper
from prototree.training.loop import Context

Recipe = Callable[[Context, Any, ProtoTree | None], ProtoTree]

RECIPES: dict[str, Recipe] = {"paper": paper.train, "distill": distill.train}

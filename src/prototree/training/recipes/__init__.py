"""Ways to train a tree, one file each: a recipe owns its settings, its views and its training.

A recipe is a frozen dataclass of settings with three methods (see `recipe.Recipe`). The pipeline calls those and knows
nothing else about it. A new recipe is a new file here; it is found by itself. Recipes are read without importing torch:
they import what they train with when they train. They may import all of `training` and what lies below.
"""

import importlib
import pkgutil

from prototree.training.recipes.recipe import Recipe

for _module in sorted(
    (module.name for module in pkgutil.iter_modules(__path__)), key=lambda name: (name != "paper", name)
):
    importlib.import_module(f"{__name__}.{_module}")

RECIPES: dict[str, type[Recipe]] = {recipe.name: recipe for recipe in Recipe.__subclasses__()}

__all__ = ["RECIPES", "Recipe"]

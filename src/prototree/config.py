"""The whole configuration of a run: the common settings and those of one recipe. It stops at `run` and `pipeline`.

In `config.toml` the common settings stand first, those of the recipe in a table of its name. On the command line and in
Python all of them are named flatly; a setting that the chosen recipe does not use is refused. No torch here.
"""

import functools
import importlib.resources
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prototree.errors import ConfigError
from prototree.files import MAX_TEXT_BYTES, read_regular
from prototree.settings import Common, Settings, unknown_key
from prototree.training.recipes import RECIPES, Recipe
from prototree.training.recipes.paper import Paper

DEFAULT_PRESET = "default"
_LEARNING_RATE = ("learning_rate", "learningrate", "lr")  # as people call it elsewhere
_RATES = ("rate", "lr_prototypes")  # what they mean, in a recipe that has it
VERSION = 3


@dataclass(frozen=True)
class Config(Common):
    """All settings of a run. For some of them 0 means: derived from the data.

    Examples:
        >>> preset("default").changed({"seed": 1, "views": 4}).recipe.views
        4
    """

    recipe: Recipe = field(default_factory=Paper)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recipe.check(self)

    def changed(self, values: Mapping[str, Any]) -> "Config":
        """The same with other values, by name; `recipe` is the name of one, and starts from its defaults."""
        recipe = self.recipe
        if "recipe" in values and values["recipe"] != recipe.name:
            recipe = _recipe_named(values["recipe"])()
        common, own = _sorted_out(values, recipe)
        return replace(self, **self.parsed(common), recipe=recipe.changed(own))

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result of a run; it can only be continued with the same ones."""
        return {**super().identity(), "recipe": self.recipe.name, **self.recipe.identity()}

    def to_toml(self) -> str:
        """As a file that `read_config` reads back."""
        name, summary = self.recipe.name, self.recipe.summary
        head = f'version = {VERSION}\nrecipe = "{name}"  # {summary}\n'
        return f"{head}\n{super().to_toml()}\n[{name}]\n{self.recipe.to_toml()}"


def preset_names() -> list[str]:
    """Presets that come with the package."""
    files = importlib.resources.files("prototree") / "configs"
    return sorted(file.name.removesuffix(".toml") for file in files.iterdir() if file.name.endswith(".toml"))


def preset(name: str) -> Config:
    """A preset by name, or a TOML file by path.

    Examples:
        >>> preset("paper-cub").recipe.height
        9
    """
    if name in preset_names():
        return Config().changed(_packaged(name))
    if not Path(name).is_file():
        raise ConfigError(f"no preset {name!r}; expected {', '.join(preset_names())}, or the path of a TOML file")
    return Config().changed(_values_in(Path(name))[1])


@functools.cache
def preset_values(kind: type[Settings]) -> dict[str, dict[str, Any]]:
    """The values that each preset gives a class of settings, by the preset's name; only of presets that use it."""
    found = {}
    for name in preset_names():
        values = _packaged(name)
        recipe = _recipe_named(values.get("recipe", Paper.name))
        common, own = _sorted_out(values, recipe)
        if kind in (Common, recipe):
            found[name] = kind(**kind.parsed(common if kind is Common else own)).values()
    return found


def _packaged(name: str) -> dict[str, Any]:
    """What the file of a preset says."""
    return tomllib.loads((importlib.resources.files("prototree") / "configs" / f"{name}.toml").read_text())


def read_config(path: Path) -> Config:
    """The `config.toml` of a run."""
    version, values = _values_in(path)
    if version != VERSION:
        raise ConfigError(
            f"{path} was written by an earlier version of prototree, whose settings had other names; train it again"
        )
    return Config().changed(values)


def _values_in(path: Path) -> tuple[int, dict[str, Any]]:
    """The version of a file and what it says; one that does not name its version is of the first."""
    try:
        values = tomllib.loads(read_regular(path, MAX_TEXT_BYTES).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML ({error})") from error
    version = values.pop("version", 1)
    if not isinstance(version, int) or version > VERSION:
        raise ConfigError(f"{path} has version {version!r}, this program reads up to {VERSION}; update prototree")
    return version, values


def _recipe_named(name: Any) -> type[Recipe]:
    if name not in RECIPES:
        raise ConfigError(f"expected one of {', '.join(map(repr, RECIPES))} for recipe, got {name!r}")
    return RECIPES[name]


def _sorted_out(values: Mapping[str, Any], recipe: Recipe | type[Recipe]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Common values and those of the recipe, whether they stand flatly or in its table."""
    common: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, value in values.items():
        if key in Common.names():
            common[key] = value
        elif key in recipe.names():
            own[key] = value
        elif key == recipe.name and isinstance(value, Mapping):
            own.update(value)
        elif key != "recipe":
            raise _not_used(key, recipe)
    return common, own


def _not_used(key: str, recipe: Recipe | type[Recipe]) -> ConfigError:
    others = [name for name, other in RECIPES.items() if key in other.names() or key == name]
    if others:
        return ConfigError(
            f"{key!r} is a setting of the recipe {others[0]!r}, which the recipe {recipe.name!r} does not use; "
            f"leave it out, or choose --recipe {others[0]}"
        )
    if key in _LEARNING_RATE and (meant := next((name for name in _RATES if name in recipe.names()), None)):
        return ConfigError(f"unknown key {key!r}; did you mean {meant!r}?")
    elsewhere = (name for other in RECIPES.values() for name in other.names())
    return unknown_key(key, (*Common.names(), *recipe.names()), also=elsewhere)

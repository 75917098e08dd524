"""Settings on the command line: `--NAME VALUE` for every one of them, and their help, short and whole."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import typer

from prototree.cli.console import app, say
from prototree.config import DEFAULT_PRESET, preset_values
from prototree.errors import ConfigError
from prototree.settings import Common, Setting, Settings
from prototree.training.recipes import RECIPES

_WHOSE_DEFAULTS = (
    f"A default is that of the preset {DEFAULT_PRESET}, which `train` takes unless told otherwise, or of the recipe if "
    "that preset has another one. Presets that differ are named."
)
_FILES = "TOML files that leave it out"


def parsed(arguments: list[str]) -> dict[str, str]:
    """`--rate 0.01 --seed=8` as settings."""
    settings, words = {}, list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"expected a setting such as --seed 8, got {word!r}")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not words:
                raise ConfigError(f"expected a value after {word}")
            value = words.pop(0)
        settings[key.replace("-", "_")] = value
    return settings


def all_settings() -> Iterator[tuple[str, type[Settings], Setting]]:
    """Every setting with the name of its group and the class that has it; those of a recipe are grouped by its name."""
    yield from ((one.about.group, Common, one) for one in Common.described())
    for name, recipe in RECIPES.items():
        yield from ((f"recipe {name}: {one.about.group}", recipe, one) for one in recipe.described())


def short_help() -> str:
    """The settings that people change most, one paragraph each, since the help joins the lines of a paragraph."""
    often = [(kind, one) for _, kind, one in all_settings() if one.about.often]
    # A setting that two recipes have is told once, as that of the default recipe, which is the last.
    lines = {
        one.option: f"{one.option}: {one.about.meaning} ({one.values}; {_defaults(kind, one)})" for kind, one in often
    }
    recipes = "; ".join(f"{name}, {recipe.summary}" for name, recipe in RECIPES.items())
    head = "Settings, as --NAME VALUE; --help-all lists all of them:"
    return "\n\n".join([head, f"--recipe: {recipes}", *lines.values()])


def whole_help() -> str:
    """Every setting by group: its values, default, meaning, and when to change it."""
    lines, shown = ["Any setting can be given as --NAME VALUE. " + _WHOSE_DEFAULTS], ""
    for group, kind, one in all_settings():
        if group != shown:
            lines += ["", group]
            shown = group
        lines.append(f"  {one.option} ({one.values}; {_defaults(kind, one)})")
        lines.append(f"      {one.about.meaning}. When to change it: {one.about.touch}")
    return "\n".join(lines)


def settings_page() -> str:
    """The page of all settings, one section each, so that links and searches lead there: `make settings` writes it."""
    lines = [
        "# Settings",
        "",
        "Give any setting as `--NAME VALUE` to `train`, `finetune` and `reproduce`, as `settings={...}` in Python, or",
        "in a TOML file for `--preset`: common settings at the top, those of a recipe in a table with its name. A",
        "setting that the chosen recipe does not use is refused. This page is made from the code by `make settings`.",
        "",
        _WHOSE_DEFAULTS,
    ]
    lines += ["", "## Every run", *_sections(Common)]
    for name, recipe in RECIPES.items():
        lines += ["", f"## Recipe {name}", "", f"{recipe.summary[0].upper()}{recipe.summary[1:]}."]
        lines += _sections(recipe)
    return "\n".join([*lines, ""])


def _sections(kind: type[Settings]) -> Iterator[str]:
    for one in kind.described():
        yield from ("", f"### `{one.option}`", "", f"{one.about.meaning[0].upper()}{one.about.meaning[1:]}.", "")
        default = f"*Default:* {_defaults(kind, one, '`').removeprefix('default ')}"
        yield f"{default} ({one.values.replace(' | ', ' or ')}). *When to change it:* {one.about.touch}"


def _defaults(kind: type[Settings], one: Setting, mark: str = "") -> str:
    """The default of a setting, and what presets have that differ from it."""
    presets = {name: values[one.key] for name, values in preset_values(kind).items()}  # type: ignore[arg-type]
    default = presets.get(DEFAULT_PRESET, one.default)
    others: dict[str, list[str]] = {}
    for name, value in {**presets, _FILES: one.default}.items():
        if value != default:
            others.setdefault(_shown(value), []).append(name)
    words = [f"{mark}{value}{mark} with {' and '.join(names)}" for value, names in others.items()]
    return "; ".join([f"default {mark}{_shown(default)}{mark}", *words])


def _shown(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or "none"
    return "''" if default == "" else str(default)


def _print_whole_help(wanted: bool) -> None:
    if wanted:
        say(whole_help())
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option("--help-all", is_eager=True, callback=_print_whole_help, help="Show all settings and exit."),
]


def command_with_settings() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A command that takes any setting."""
    return partial(
        app.command,
        epilog=short_help(),
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        no_args_is_help=True,
    )()

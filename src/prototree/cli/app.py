"""The program itself: its commands in panels, output, errors as one line, and settings as options."""

import difflib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperGroup

from prototree._version import __version__
from prototree.config import DEFAULT_PRESET, RECIPE_SETTINGS, Common, Setting, Settings, preset_values
from prototree.errors import ConfigError, ProtoTreeError
from prototree.evaluation.tables import Table
from prototree.progress import is_first

START, IMPROVE, SHARE, RESEARCH = "Start", "Improve", "Share", "Research"
_ORDER = (
    "train", "report", "predict", "explain", "serve", "evaluate", "finetune", "pack", "export", "push", "data",
    "backbones", "prune", "project", "reproduce", "import-published", "clean",
)  # fmt: skip
_MEANT = {
    "test": "evaluate", "eval": "evaluate", "errors": "evaluate", "mistakes": "evaluate", "ensemble": "evaluate",
    "show": "report", "edit": "serve", "app": "serve", "tidy": "clean", "relearn": "finetune", "fit": "train",
    "ask": "predict", "models": "backbones", "networks": "backbones", "import-reference": "import-published",
}  # fmt: skip
_NO_LIMIT = 100_000  # columns
_CONTROL = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(32), *range(127, 160), *range(0xD800, 0xE000))  # also bytes of names that are not UTF-8
    if chr(code) not in "\t\n"
}


class _Commands(TyperGroup):
    """Commands in the order of use, with a hint for words that people type instead."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(
            super().list_commands(ctx), key=lambda name: (name not in _ORDER, name in _ORDER and _ORDER.index(name))
        )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            near = difflib.get_close_matches(args[0], [*self.commands, *_MEANT], n=1)
            meant = _MEANT.get(args[0]) or (_MEANT.get(near[0], near[0]) if near else "")
            hint = f"did you mean {meant!r}?" if meant else "prototree --help lists all"
            raise ConfigError(f"there is no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


class PlainCommand(TyperCommand):
    """A command whose help shows no types for arguments and flags: their names and texts say enough."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for parameter in self.get_params(ctx):
            if isinstance(parameter, TyperArgument) or getattr(parameter, "is_flag", False):
                parameter.display_type_rich = lambda ctx: None  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Neural prototype trees: image classifiers that can be read in full.\n\n"
    "Begin with: prototree train IMAGES --out RUN, then prototree report RUN.",
)
console, error_console = Console(), Console(stderr=True)

DataArgument = Annotated[
    str,
    typer.Argument(metavar="DATA", help="Image folder, CSV list, CUB or Cars folder; or 'birds'.", show_default=False),
]
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a run, or a packed tree.", show_default=False)
]
FolderArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)]
DataOption = Annotated[
    str | None,
    typer.Option("--data", metavar="DATA", help="Use this data set instead of the one the run was trained on."),
]


def main() -> None:
    """Run the program: a known error is one red line, not a traceback."""
    if logging.lastResort is not None:  # what writes warnings to the terminal
        logging.lastResort.setFormatter(_SafeFormatter())
    if not is_first():  # of several processes; errors stay each one's own
        console.quiet = True
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    try:
        sys.exit(app(standalone_mode=False))  # an exit code, or None
    except ProtoTreeError as error:
        print_error(str(error))
        sys.exit(1)
    except BrokenPipeError:  # whoever read our output has heard enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a file or folder of the user's that cannot be used, whichever it is
        where = f"{error.filename}: " if error.filename is not None else ""
        print_error(f"{where}{error.strerror or error}; check the path, its permissions and the space on its disk")
        sys.exit(1)
    except (typer.Abort, KeyboardInterrupt):
        error_console.print("stopped")
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "show"):  # click's own usage errors
            raise
        error.show()
        sys.exit(2)


def print_table(table: Table) -> None:
    """Print a table. Names come from outside, so nothing in them is markup; none is cut off."""
    shown = RichTable(title=Text(escape_control(table.title)), title_justify="left")
    for cell in table.header:
        shown.add_column(Text(escape_control(cell)), overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(escape_control(cell)) for cell in row))
    # A file or another program has no width: each row stays one line there.
    wide = console.options.update(max_width=_NO_LIMIT)
    width = None if console.is_terminal else Measurement.get(console, wide, shown).maximum
    (console if width is None else Console(file=console.file, width=width, quiet=console.quiet)).print(shown)


def escape_control(text: str) -> str:
    """Replace control characters: names of files and classes come from outside."""
    return text.translate(_CONTROL)


class _SafeFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escape_control(super().format(record))


def print_error(text: str) -> None:
    """Print one red line; nothing in it is markup."""
    error_console.print(Text.assemble(("error:", "red"), f" {escape_control(text)}"), highlight=False, soft_wrap=True)


def echo(text: str) -> None:
    """Print a plain line."""
    console.print(escape_control(text), highlight=False, markup=False, soft_wrap=True)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        echo(__version__)
        raise typer.Exit


def all_settings() -> Iterator[tuple[str, type[Settings], Setting]]:
    """List every setting with its group and its class; those of a recipe are grouped by its name."""
    yield from ((item.group, Common, item) for item in Common.fields())
    for name, recipe in RECIPE_SETTINGS.items():
        yield from ((f"recipe {name}: {item.group}", recipe, item) for item in recipe.fields())


def default_text(kind: type[Settings], item: Setting, mark: str = "") -> str:
    """Describe the default of a setting in each preset."""
    presets = {name: values[item.key] for name, values in preset_values(kind).items()}  # type: ignore[arg-type]
    default = presets.get(DEFAULT_PRESET, item.default)
    others: dict[str, list[str]] = {}
    for name, value in presets.items():
        if value != default:
            others.setdefault(_shown(value), []).append(name)
    parts = [f"{mark}{value}{mark} in {' and '.join(names)}" for value, names in others.items()]
    return "; ".join([f"default {mark}{_shown(default)}{mark}", *parts])


def _shown(default: object) -> str:
    if default is None:
        return "auto"
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or "none"
    return "none" if default == "" else str(default).lower() if isinstance(default, bool) else str(default)


def settings_help() -> str:
    """Describe every setting by group: its values, defaults, meaning, and when to change it."""
    lines, shown = ["Give any setting as --NAME VALUE."], ""
    for group, kind, item in all_settings():
        if group != shown:
            lines += ["", group]
            shown = group
        lines.append(f"  {item.option} ({item.values}; {default_text(kind, item)})")
        lines.append(f"      {item.help}. When to change it: {item.when}")
    return "\n".join(lines)


def _print_settings(wanted: bool) -> None:
    if wanted:
        echo(settings_help())
        raise typer.Exit


def parse_settings(arguments: list[str]) -> dict[str, str]:
    """Parse `--lr 0.01 --seed=8` as settings."""
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


def command_with_settings(panel: str, example: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a command that takes any setting; those that people change most are listed in its help."""
    common = {item.key: (kind, item) for _, kind, item in all_settings() if item.common}  # of two recipes, the default
    names = ", ".join(RECIPE_SETTINGS)
    recipe = typer.Option("--recipe", metavar="TEXT", rich_help_panel="Common settings", help=f"Way to train: {names}.")
    options: dict[str, Any] = {"recipe": Annotated[str | None, recipe]}
    for key, (kind, item) in common.items():
        text = f"{item.help[0].upper()}{item.help[1:]} ({default_text(kind, item)})."
        option = typer.Option(item.option, metavar="VALUE", help=text, rich_help_panel="Common settings")
        options[key] = Annotated[str | None, option]
    show = typer.Option("--help-all", is_eager=True, callback=_print_settings, help="List all settings and exit.")

    def register(function: Callable[..., None]) -> Callable[..., None]:
        def command(context: typer.Context, help_all: bool = False, **values: Any) -> None:
            given = {key: values.pop(key) for key in options}
            settings = {key: value for key, value in given.items() if value is not None}
            function(**values, settings={**settings, **parse_settings(context.args)})

        own = [item for name, item in inspect.signature(function).parameters.items() if name != "settings"]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter("context", keyword, annotation=typer.Context)]
        parameters += [item.replace(kind=keyword) for item in own]
        parameters += [inspect.Parameter(key, keyword, default=None, annotation=kind) for key, kind in options.items()]
        parameters += [inspect.Parameter("help_all", keyword, default=False, annotation=Annotated[bool, show])]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {item.name: item.annotation for item in parameters}
        command.__doc__ = f"{function.__doc__}\n\nExample: {example}"
        app.command(
            function.__name__,
            cls=PlainCommand,
            rich_help_panel=panel,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
            no_args_is_help=True,
        )(command)
        return function

    return register


def command(
    panel: str, example: str, name: str | None = None, *, needs_arguments: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a command to a panel of the help, with one example."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        function.__doc__ = f"{function.__doc__}\n\nExample: {example}"
        return app.command(name, cls=PlainCommand, rich_help_panel=panel, no_args_is_help=needs_arguments)(function)

    return register

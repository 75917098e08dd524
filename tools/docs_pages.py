"""Pages of the site that are made from the code when it is built: all settings, and all commands (an mkdocs hook)."""

from collections.abc import Iterator
from typing import Any

import typer.main
from mkdocs.structure.files import File, Files

from prototree.cli import app
from prototree.cli.app import default_text
from prototree.config import RECIPE_SETTINGS, Common, Settings


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for uri, content in (("settings.md", settings_page()), ("reference/commands.md", commands_page())):
        files.append(File.generated(config, uri, content=content))
    return files


def settings_page() -> str:
    """Describe every setting in a section of its own, so that links and searches lead there."""
    lines = [
        "# Settings",
        "",
        "Give any setting as `--NAME VALUE` to `train`, `finetune` and `reproduce`, as `settings={...}` in Python, or",
        "in a TOML file for `--preset`: common settings at the top, those of a recipe in a table with its name. A",
        "setting that the chosen recipe does not use is refused. `auto` follows from the data.",
        "",
        "## Every run",
        *_sections(Common),
    ]
    for name, recipe in RECIPE_SETTINGS.items():
        lines += ["", f"## Recipe {name}", "", f"{recipe.summary[0].upper()}{recipe.summary[1:]}.", *_sections(recipe)]
    return "\n".join([*lines, ""])


def _sections(kind: type[Settings]) -> Iterator[str]:
    for item in kind.fields():
        yield from ("", f"### `{item.option}`", "", f"{item.help[0].upper()}{item.help[1:]}.", "")
        default = f"*Default:* {default_text(kind, item, '`').removeprefix('default ')}"
        yield f"{default} ({item.values.replace(' | ', ' or ')}). *When to change it:* {item.when}"


def commands_page() -> str:
    """Describe every command with its arguments and options."""
    lines = ["# Commands", "", "`prototree COMMAND --help` prints the same.", ""]
    for name, command in _commands(typer.main.get_command(app)):
        words = [item.metavar or item.name.upper() for item in command.params if _is_argument(item)]
        needed = [
            f"{item.opts[0]} {item.metavar}" for item in command.params if item.required and not _is_argument(item)
        ]
        usage = " ".join(["prototree", name, *words, *needed, "[OPTIONS]"])
        lines += ["", f"## prototree {name}", "", command.help or "", "", "```text", usage, "```", ""]
        lines += ["| argument or option | default | meaning |", "| --- | --- | --- |"]
        lines += [_row(item) for item in command.params if not item.hidden]
    return "\n".join([*lines, ""])


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(None):
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _row(item: Any) -> str:
    name = item.metavar or item.name.upper() if _is_argument(item) else ", ".join([*item.opts, *item.secondary_opts])
    default = "required" if item.required else "none" if item.default in (None, "") else f"`{item.default}`"
    return f"| `{name}` | {default} | {(item.help or '').replace('|', chr(92) + '|')} |"


def _is_argument(item: Any) -> bool:
    return not str(item.opts[0]).startswith("-")

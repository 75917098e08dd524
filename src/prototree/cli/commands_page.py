"""The document of all commands, made from the commands themselves: `make settings` writes it."""

from collections.abc import Iterator
from typing import Any

import typer.main

from prototree.cli import app


def commands_page() -> str:
    """Every command with its arguments and options, as Markdown."""
    lines = [
        "# Commands",
        "",
        "`prototree COMMAND --help` prints the same. This page is made from the code by `make settings`. `train`,",
        "`finetune` and `reproduce` also take every [setting](../settings.md) as `--NAME VALUE`.",
    ]
    for name, command in _commands(typer.main.get_command(app)):
        lines += ["", f"## prototree {name}", "", command.help or "", "", "```text", _usage(name, command), "```", ""]
        lines += ["| argument or option | default | meaning |", "| --- | --- | --- |"]
        lines += [_row(one) for one in command.params]
    return "\n".join([*lines, ""])


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _usage(name: str, command: Any) -> str:
    words = [one.name.upper() for one in command.params if _is_argument(one)]
    needed = [f"{one.opts[0]} {one.name.upper()}" for one in command.params if one.required and not _is_argument(one)]
    return " ".join(["prototree", name, *words, *needed, "[OPTIONS]"])


def _row(one: Any) -> str:
    name = one.name.upper() if _is_argument(one) else ", ".join([*one.opts, *one.secondary_opts])
    meaning = (one.help or "").replace("|", "\\|")
    return f"| `{name}` | {_default(one)} | {meaning} |"


def _default(one: Any) -> str:
    if one.required:
        return "required"
    if one.default is None:
        return "none"
    value = getattr(one.default, "value", one.default)  # a pairwise node is an enum
    return f"`{value}`" if value != "" else "none"


def _is_argument(one: Any) -> bool:
    return not str(one.opts[0]).startswith("-")

"""Pages of the site that are made from the code when it is built: all settings, and all commands (an mkdocs hook)."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import typer.main
from mkdocs.structure.files import File, Files

from prototree.cli import app
from prototree.cli.app import default_text
from prototree.config import RECIPE_SETTINGS, Common, Setting, Settings


def on_config(config: Any) -> Any:
    """Let the page of settings fold tables away."""
    config.markdown_extensions.append("md_in_html")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for uri, content in (("reference/settings.md", settings_page()), ("reference/commands.md", commands_page())):
        files.append(File.generated(config, uri, content=content))
    return files


def settings_page() -> str:
    """Tabulate every setting with its default in each preset; those that few people change are folded, by group."""
    lines = [
        "# Settings",
        "",
        "Give any setting as `--NAME VALUE` to `train`, `finetune` and `reproduce`, as `settings={...}` in Python, or",
        "in a TOML file for `--preset`: common settings at the top, those of a recipe in a table with its name. A",
        "setting that the chosen recipe does not use is refused. `auto` follows from the data or the network.",
        "",
        "## Every run",
        *_tables(Common),
    ]
    for name, recipe in reversed(RECIPE_SETTINGS.items()):
        lines += ["", f"## Recipe {name}", "", f"{_sentence(recipe.summary)}.", *_tables(recipe, f"{name}-")]
    return "\n".join([*lines, ""])


def _tables(kind: type[Settings], prefix: str = "") -> Iterator[str]:
    fields = kind.fields()
    yield from ("", *_table(kind, (item for item in fields if item.common), prefix))
    expert = [item for item in fields if not item.common]
    yield from ("", '<details markdown="1">', f"<summary>{len(expert)} more settings, for experts</summary>", "")
    if kind is Common:  # those of a recipe have groups of one or two
        for group in dict.fromkeys(item.group for item in expert):
            yield from (f"**{_sentence(group)}**", "")
            yield from (*_table(kind, (item for item in expert if item.group == group), prefix), "")
    else:
        yield from (*_table(kind, expert, prefix), "")
    yield "</details>"


def _table(kind: type[Settings], items: Iterable[Setting], prefix: str) -> Iterator[str]:
    yield from ("| setting | default | meaning | when to change it |", "| --- | --- | --- | --- |")
    for item in items:
        name = f"`{item.option}`{{#{prefix}{item.option.removeprefix('--')}}}"
        default = default_text(kind, item, "`").removeprefix("default ")
        row = (name, default, f"{_sentence(item.help)}{_range(item)}.", item.when)
        yield f"| {' | '.join(row)} |"


def _range(item: Setting) -> str:
    """The allowed values in brackets, without a bound that nobody reaches."""
    values = re.sub(r"^(a )?(whole )?numbers? (?=from)", "", re.sub(r" to \S+e\+\d+", "", item.values))
    return f" ({values.replace(' | ', ', ')})" if item.low is not None or " | " in values else ""


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}" if text[0].isascii() else text


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
    text = item.help or ""
    if of_preset := re.search(r" \(default ([^)]*)\)", text):  # a setting: its default is that of the preset
        default, text = f"`{of_preset[1]}`", text.replace(of_preset[0], "")
    return f"| `{name}` | {default} | {text.replace('|', chr(92) + '|')} |"


def _is_argument(item: Any) -> bool:
    return not str(item.opts[0]).startswith("-")

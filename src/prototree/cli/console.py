"""The program itself: what it prints to, how it ends, and what several commands share."""

import atexit
import gc
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from prototree._version import __version__
from prototree.errors import ProtoTreeError
from prototree.evaluation.tables import Table
from prototree.progress import is_first

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Neural prototype trees: image classifiers that can be read in full.",
)
console, error_console = Console(), Console(stderr=True)
_NO_LIMIT = 100_000  # columns
_OBJECTS_BETWEEN_SEARCHES = 100_000  # for garbage; Python's own 700 is for programs that load less
_SURROGATES = range(0xD800, 0xE000)  # what a byte in a file's name that is not UTF-8 becomes
_COMMANDS = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(32), *range(127, 160), *_SURROGATES)
    if chr(code) not in "\t\n"
}

DataArgument = Annotated[str, typer.Argument(help="Image folder, CSV manifest, CUB or Cars folder; or 'birds'.")]
RunArgument = Annotated[Path, typer.Argument(help="The folder of a run, or a packed tree.")]
DataOption = Annotated[str | None, typer.Option("--data", help="Other data than the run was made with.")]


def main() -> None:
    """Entry point: a known error is one red line, not a traceback."""
    if logging.lastResort is not None:  # what writes warnings to the terminal
        logging.lastResort.setFormatter(_HarmlessFormatter())
    if not is_first():
        _be_quiet()
    # Loading torch makes a million objects that stay. To look for garbage among them on the way, and once more at the
    # end, would take a second and a half of every command.
    gc.set_threshold(_OBJECTS_BETWEEN_SEARCHES)
    atexit.register(gc.freeze)
    try:
        sys.exit(app(standalone_mode=False))  # an exit code, or None
    except ProtoTreeError as error:
        say_error(str(error))
        sys.exit(1)
    except BrokenPipeError:  # whoever read our output has heard enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a file or folder of the user's that cannot be used, whichever it is
        where = f"{error.filename}: " if error.filename is not None else ""
        say_error(f"{where}{error.strerror or error}; check the path, its permissions and the space on its disk")
        sys.exit(1)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        error_console.print("stopped")
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "show"):  # click's own usage errors
            raise
        error.show()
        sys.exit(2)


def _be_quiet() -> None:
    """Leave to the first of several processes what all of them would say; errors stay each one's own."""
    console.quiet = True
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def print_table(table: Table) -> None:
    """A table in the terminal. Names come from outside, so nothing in them is markup; none is cut off."""
    shown = RichTable(title=Text(harmless(table.title)), title_justify="left")
    for cell in table.header:
        shown.add_column(Text(harmless(cell)), overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(harmless(cell)) for cell in row))
    # A file or another program has no width: each row stays one line there.
    wide = console.options.update(max_width=_NO_LIMIT)
    width = None if console.is_terminal else Measurement.get(console, wide, shown).maximum
    (console if width is None else Console(file=console.file, width=width, quiet=console.quiet)).print(shown)


def harmless(text: str) -> str:
    """A text in which nothing is a command to the terminal; names of files and classes come from outside."""
    return text.translate(_COMMANDS)


class _HarmlessFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def say_error(text: str) -> None:
    """One red line; nothing in it is markup."""
    error_console.print(Text.assemble(("error:", "red"), f" {harmless(text)}"), highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """A plain line."""
    console.print(harmless(text), highlight=False, markup=False, soft_wrap=True)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        say(__version__)
        raise typer.Exit

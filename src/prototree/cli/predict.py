"""Commands that put a tree to use and hand it on: predict, pack, tidy."""

import os
import sys
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prototree.cli.console import RunArgument, app, error_console, print_table, say
from prototree.errors import DataError
from prototree.progress import Display

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prototree.evaluation.agreement import Agreement
    from prototree.inference.predict import Prediction


@app.command()
def predict(
    run: RunArgument,
    photos: Annotated[
        list[str],
        typer.Argument(
            help="Photos, folders, patterns, CSV lists (path, perhaps label), or - to read names from standard input."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="A file for all predictions: .csv, .json or .jsonl; printed if not given.")
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(help="How many of the likeliest classes to list; if not given, a file lists 5.", min=0),
    ] = None,
    min_confidence: Annotated[
        float, typer.Option(help='Answers less sure than this, from 0 to 1, are "I don\'t know".')
    ] = 0.0,
    batch_size: Annotated[int, typer.Option(help="Photos that go through the network at once.", min=1)] = 32,
    threads: Annotated[int, typer.Option(help="Threads that read photos; 0: one per core.", min=0)] = 0,
) -> None:
    """Predict many photos. A photo that cannot be read becomes a row with the reason."""
    from prototree.evaluation.agreement import Agreement
    from prototree.inference.answers import expect_share
    from prototree.inference.inputs import STANDARD_INPUT, listed_photos
    from prototree.inference.outputs import prediction_file
    from prototree.inference.predict import DEFAULT_TOP, open_for_predicting, predict_each
    from prototree.report.text import plain

    expect_share(min_confidence)
    tree, notes = open_for_predicting(run)
    listed = listed_photos(photos, _names_given())
    if (first := next(listed, None)) is None:
        places = ", ".join("the names on standard input" if one == STANDARD_INPUT else one for one in photos)
        raise DataError(f"found no photo in {places}; expected image files, or folders or lists of them")
    listed = chain([first], listed)
    everything = None if STANDARD_INPUT in photos else list(listed)
    shown = min(DEFAULT_TOP if top is None else top, tree.n_classes)
    with_truth = everything is not None and any(one.label is not None for one in everything)
    agreement, n_photos, n_bad = Agreement(tree.class_names), 0, 0
    with ExitStack() as stack:
        display = stack.enter_context(Display(error_console))
        add: Callable[[Prediction], None] = lambda one: say(plain(one.words(notes, with_top=top is not None)))  # noqa: E731
        if out is not None:
            add = stack.enter_context(prediction_file(out, top=shown, with_truth=with_truth, notes=notes))
        given = predict_each(
            tree, everything or listed, top=shown, min_confidence=min_confidence, batch_size=batch_size, threads=threads
        )
        for one in given:
            n_photos, n_bad = n_photos + 1, n_bad + (one.answer is None)
            add(one)
            if one.truth is not None and one.answer is not None:
                agreement.add(one.truth, one.answer.label if one.answer.known else None)
            display.counting("photos", n_photos, len(everything) if everything is not None else None)
    _say_how_it_went(agreement, n_photos, n_bad, out)


def _names_given() -> "Iterator[str]":
    """The lines of standard input. Names of files need not be text in the user's encoding."""
    yield from map(os.fsdecode, sys.stdin.buffer)


def _say_how_it_went(agreement: "Agreement", n_photos: int, n_bad: int, out: Path | None) -> None:
    if agreement.n_photos:
        print_table(agreement.table())
    for sentence in agreement.words():
        say(sentence)
    if n_bad:
        error_console.print(f"{n_bad} of {n_photos} photos could not be read", highlight=False)
    if out is not None:
        say(f"written: {out} ({n_photos} photos)")
    if n_bad == n_photos:
        raise typer.Exit(1)


@app.command()
def pack(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(help="The file to write, such as bird-tree.prototree.")],
    pages: Annotated[
        bool, typer.Option(help="Include neighbours and tests of each prototype; computing them takes a while.")
    ] = True,
) -> None:
    """One file to send to somebody: the tree, its pictures and its figures."""
    from prototree.pipeline.share import pack

    with Display(error_console) as display:
        written = pack(run, out, pages=pages, tick=display.caching)
    say(f"written: {written} ({_amount(written.stat().st_size)}); predict, explain, report and serve open it")


@app.command()
def clean(run: RunArgument) -> None:
    """Remove from a finished run what can be computed again."""
    from prototree.pipeline.share import clean

    freed = clean(run)
    for one in freed:
        say(f"removed: {one.path} ({_amount(one.n_bytes)})")
    say(f"{_amount(sum(one.n_bytes for one in freed))} freed" if freed else "nothing to remove")


def _amount(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB"

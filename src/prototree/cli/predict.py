"""Commands that use a tree and hand it on: predict, pack, export, push, import-published."""

import os
import sys
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from prototree.cli.app import RESEARCH, SHARE, START, RunArgument, command, echo, error_console, print_table
from prototree.errors import DataError
from prototree.progress import Display


@command(START, "prototree predict runs/birds holiday/ --out predictions.csv")
def predict(
    run: RunArgument,
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE...",
            help="Images, folders, patterns, CSV lists (path, perhaps label), or - for names on standard input.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a .csv, .json or .jsonl file; printed if not given.")
    ] = None,
    ensemble: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Another run of the ensemble; can be repeated.")
    ] = None,
    top: Annotated[
        int | None, typer.Option(metavar="N", help="List the N likeliest classes; a file lists 5.", min=0)
    ] = None,
    min_confidence: Annotated[
        float, typer.Option(metavar="P", help='Say "I don\'t know" below this confidence, from 0 to 1.')
    ] = 0.0,
    batch_size: Annotated[
        int, typer.Option(metavar="N", help="Images that go through the network at once.", min=1)
    ] = 32,
    threads: Annotated[int, typer.Option(metavar="N", help="Threads that read images; 0: one per core.", min=0)] = 0,
) -> None:
    """Classify images. One that cannot be read becomes a row with the reason."""
    from prototree.evaluation.tables import LabelledAccuracy
    from prototree.inference.io import STANDARD_INPUT, list_images, prediction_file
    from prototree.inference.predict import DEFAULT_TOP, check_min_confidence, iter_predictions, open_models
    from prototree.reporting.text import plain

    check_min_confidence(min_confidence)
    models = [run, *(ensemble or [])]
    trees, notes = open_models(models)
    # Names of files need not be text in the user's encoding.
    listed = list_images(images, map(os.fsdecode, sys.stdin.buffer) if STANDARD_INPUT in images else ())
    if (first := next(listed, None)) is None:
        places = ", ".join("the names on standard input" if place == STANDARD_INPUT else place for place in images)
        raise DataError(f"found no image in {places}; expected image files, or folders or lists of them")
    listed = chain([first], listed)
    everything = None if STANDARD_INPUT in images else list(listed)
    shown = min(DEFAULT_TOP if top is None else top, trees[0].n_classes)
    accuracy, n_images, n_errors = LabelledAccuracy(trees[0].class_names), 0, 0
    with ExitStack() as stack:
        display = stack.enter_context(Display(error_console))
        write = stack.enter_context(prediction_file(out, top=shown)) if out is not None else None
        options = {"top": shown, "min_confidence": min_confidence, "batch_size": batch_size, "threads": threads}
        for prediction in iter_predictions(trees, everything or listed, notes=notes, **options):  # type: ignore[arg-type]
            n_images, n_errors = n_images + 1, n_errors + bool(prediction.error)
            if write is not None:
                write(prediction.to_json())
            else:
                echo(plain(prediction.to_text(with_top=top is not None)))
            if prediction.label is not None and not prediction.error:
                accuracy.add(prediction.label, prediction.prediction)
            display.counting("images", n_images, len(everything) if everything is not None else None)
    if accuracy.n_images:
        print_table(accuracy.table())
    for sentence in accuracy.words():
        echo(sentence)
    if n_errors:
        error_console.print(f"{n_errors} of {n_images} images could not be read", highlight=False)
    if out is not None:
        echo(f"written: {out} ({n_images} images)")
    if n_errors == n_images:
        raise typer.Exit(1)


@command(SHARE, "prototree pack runs/birds bird-tree.prototree")
def pack(
    run: RunArgument,
    out: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to write; it ends in .prototree.", show_default=False)
    ],
    no_pages: Annotated[
        bool, typer.Option("--no-pages", help="Leave out neighbours and tests of each prototype; faster and smaller.")
    ] = False,
) -> None:
    """Write one file to send to somebody: the tree, its pictures and its metrics."""
    from prototree.pipeline.share import pack

    with Display(error_console) as display:
        written = pack(run, out, pages=not no_pages, tick=display.caching)
    echo(f"written: {written} ({written.stat().st_size / 1e6:,.1f} MB); predict, explain, report and serve open it")


@command(SHARE, "prototree export runs/birds birds.onnx")
def export(
    run: RunArgument,
    out: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to write; it ends in .onnx.", show_default=False)
    ],
) -> None:
    """Write the tree as one ONNX file that takes images as they are."""
    from prototree.integrations.onnx import export_onnx

    written = export_onnx(run, out)
    echo(f"written: {written} ({written.stat().st_size / 1e6:.1f} MB); examples/predict_onnx.py shows how to use it")


@command(SHARE, "prototree push runs/birds user/bird-tree --license mit")
def push(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="USER/NAME", help="Where to put it.", show_default=False)],
    license: Annotated[  # noqa: A002
        str,
        typer.Option("--license", "--licence", metavar="NAME", help="The hub's name of the licence, such as mit."),
    ] = "unknown",
    private: Annotated[bool, typer.Option("--private", help="Make it visible to you only.")] = False,
) -> None:
    """Send the tree with its pictures, metrics and a model card to the Hugging Face hub."""
    from prototree.integrations.hub import push

    echo(f"sent to {push(run, name, license=license, private=private)}; open it with prototree.load({name!r})")


@command(
    RESEARCH, "prototree import-published checkpoint/ --out runs/published --classes classes.txt", "import-published"
)
def import_published(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder with tree.pkl, or that file.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="RUN", help="Folder to write the run to.")],
    classes: Annotated[
        Path, typer.Option(metavar="FILE", help="A text file with one class name per line, or CUB's classes.txt.")
    ],
    backbone: Annotated[
        str, typer.Option(metavar="NAME", help="The network it was trained with, by timm's name.")
    ] = "resnet50",
    image_size: Annotated[int, typer.Option(metavar="N", help="Side of the square that the network saw.")] = 224,
) -> None:
    """Make a run from a tree that was trained with the authors' code."""
    from prototree.integrations.published import import_published

    tree = import_published(folder, out, classes=classes, backbone=backbone, image_size=image_size).tree()
    echo(f"{tree.topology.n_nodes} nodes, {tree.n_classes} classes: written to {out}")
    echo(f"next, find the patches of its prototypes: prototree prune {out} --data IMAGES, then project and evaluate")

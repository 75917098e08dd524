"""Commands that carry trees to other tools and back: export, import-reference, push."""

from pathlib import Path
from typing import Annotated

import typer

from prototree.cli.console import RunArgument, app, say


@app.command()
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(help="The file to write; it ends in .onnx.")],
) -> None:
    """Write the tree as one ONNX file that takes photos as they are."""
    from prototree.integrations.onnx_export import export_onnx

    written = export_onnx(run, out)
    say(f"written: {written} ({written.stat().st_size / 1e6:.1f} MB); examples/ask_onnx.py shows how to use it")


@app.command("import-reference")
def import_reference(
    folder: Annotated[Path, typer.Argument(help="The folder with tree.pkl, or that file itself.")],
    out: Annotated[Path, typer.Option(help="Where the run is written.")],
    classes: Annotated[Path, typer.Option(help="A text file with one class name per line, or CUB's classes.txt.")],
    backbone: Annotated[str, typer.Option(help="The network it was trained with, by timm's name.")] = "resnet50",
    image_size: Annotated[int, typer.Option(help="Side of the square that the network saw, in pixels.")] = 224,
) -> None:
    """Make a run from a tree that was trained with the paper's published code."""
    from prototree.integrations.reference import import_reference

    run = import_reference(folder, out, classes=classes, backbone=backbone, image_size=image_size)
    tree = run.tree()
    say(f"{tree.topology.n_nodes} nodes, {tree.n_classes} classes: written to {out}")
    say(f"next, find the patches of its prototypes: prototree prune {out} --data PHOTOS, then project and evaluate")


@app.command()
def push(
    run: RunArgument,
    name: Annotated[str, typer.Argument(help="Where to put it: user/name.")],
    licence: Annotated[
        str, typer.Option(help="The hub's short name of the licence, such as mit or cc-by-4.0.")
    ] = "unknown",
    private: Annotated[bool, typer.Option(help="Make it visible to you only.")] = False,
) -> None:
    """Send the tree with its pictures, figures and a card to the Hugging Face hub."""
    from prototree.integrations.hub_push import push

    say(f"sent to {push(run, name, licence=licence, private=private)}; open it with prototree.load({name!r})")

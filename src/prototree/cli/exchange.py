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
    from prototree.exchange.onnx_export import export_onnx

    written = export_onnx(run, out)
    say(f"written: {written} ({written.stat().st_size / 1e6:.1f} MB); examples/ask_onnx.py shows how to ask it")

"""Commands about data: look at a data set, or draw the generated one."""

from pathlib import Path
from typing import Annotated

import typer

from prototree.cli.console import DataArgument, app, say

data_app = typer.Typer(no_args_is_help=True, help="Look at a data set, or make the generated one.")
app.add_typer(data_app, name="data")


@data_app.command("check")
def check(
    path: DataArgument,
    sheet: Annotated[Path | None, typer.Option(help="Also write a contact sheet to this PNG.")] = None,
    strict: Annotated[bool, typer.Option(help="Fail on any file that cannot be used.")] = False,
    deep: Annotated[
        bool, typer.Option(help="Decode every photo: finds files that are cut off, and photos that look alike.")
    ] = False,
) -> None:
    """What a data set holds, and what is wrong with it."""
    from prototree.data import check_trainable, look_at_data
    from prototree.data.duplicates import describe_copies, describe_look_alikes, exact_copies, look_alikes
    from prototree.data.summary import contact_sheet, render, summarise

    data = look_at_data(path, strict=strict, deep=deep)
    alike = describe_look_alikes(data, look_alikes(data)) if deep else None
    say(render(summarise(data), describe_copies(data, exact_copies(data)), alike))
    check_trainable(data)
    if sheet is not None:
        contact_sheet(data, sheet)
        say(f"contact sheet: {sheet}")


@data_app.command("birds")
def birds(
    out: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    species: Annotated[int, typer.Option(help="How many species.")] = 12,
    train: Annotated[int, typer.Option(help="Training images per species.")] = 60,
    test: Annotated[int, typer.Option(help="Test images per species.")] = 20,
    size: Annotated[int, typer.Option(help="Side of a photo in pixels.")] = 128,
    seed: Annotated[int, typer.Option(help="Another seed draws other birds.")] = 0,
    shortcut: Annotated[bool, typer.Option(help="Plant a bias: one species nearly always beside berries.")] = False,
) -> None:
    """Draw the generated birds into a folder in CUB's layout."""
    from prototree.data.birds.dataset import write_birds

    write_birds(
        out,
        n_species=species,
        train_per_species=train,
        test_per_species=test,
        size=size,
        seed=seed,
        shortcut=shortcut,
    )
    say(f"{species} species, {species * (train + test)} images in {out}")

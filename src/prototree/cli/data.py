"""Commands about data: check a data set, or draw the generated one."""

from pathlib import Path
from typing import Annotated

import typer

from prototree.cli.app import DataArgument, PlainCommand, app, echo

data_app = typer.Typer(no_args_is_help=True, help="Check a data set, or draw the generated one.")
app.add_typer(data_app, name="data", rich_help_panel="Data")


@data_app.command("check", cls=PlainCommand)
def check(
    path: DataArgument,
    contact_sheet: Annotated[
        Path | None, typer.Option("--contact-sheet", metavar="FILE", help="Also write a contact sheet to this PNG.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on any file that cannot be used.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Decode every image: finds files that are cut off, and near-duplicates.")
    ] = False,
) -> None:
    """Describe a data set, and what is wrong with it."""
    from prototree.data import check_trainable, read_data
    from prototree.data.duplicates import (
        describe_duplicates,
        describe_near_duplicates,
        exact_duplicates,
        near_duplicates,
    )
    from prototree.data.summary import contact_sheet as write_contact_sheet
    from prototree.data.summary import summarize

    data = read_data(path, strict=strict, deep=deep)
    alike = describe_near_duplicates(data, near_duplicates(data)) if deep else None
    echo(summarize(data, describe_duplicates(data, exact_duplicates(data)), alike))
    check_trainable(data)
    if contact_sheet is not None:
        write_contact_sheet(data, contact_sheet)
        echo(f"contact sheet: {contact_sheet}")


@data_app.command("cub-subset", cls=PlainCommand)
def cub_subset(
    cub: Annotated[Path, typer.Argument(metavar="CUB_200_2011", help="CUB-200-2011 as published.", show_default=False)],
    out: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder that does not exist yet.", show_default=False)
    ],
    classes: Annotated[
        Path | None,
        typer.Option("--classes", metavar="FILE", help="Names of classes, one a line; default: the 50 of the results."),
    ] = None,
) -> None:
    """Write some classes of CUB-200-2011 as a data set, so that results on them can be checked."""
    from prototree.data.cub_cars import write_cub_subset
    from prototree.data.folder import read_text

    n_images = write_cub_subset(cub, out, read_text(classes).splitlines() if classes else ())
    echo(f"{n_images} images in {out}")


@data_app.command("birds", cls=PlainCommand)
def birds(
    out: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder that does not exist yet.", show_default=False)
    ],
    species: Annotated[int, typer.Option(metavar="N", help="How many species.")] = 12,
    train: Annotated[int, typer.Option(metavar="N", help="Training images per species.")] = 60,
    test: Annotated[int, typer.Option(metavar="N", help="Test images per species.")] = 20,
    size: Annotated[int, typer.Option(metavar="N", help="Side of an image in pixels.")] = 128,
    seed: Annotated[int, typer.Option(metavar="N", help="Another seed draws other birds.")] = 0,
    shortcut: Annotated[
        bool, typer.Option("--shortcut", help="Plant a bias: one species nearly always beside berries.")
    ] = False,
) -> None:
    """Draw the generated birds into a folder in CUB's layout."""
    from prototree_birds import write_birds

    counts = {"n_species": species, "train_per_species": train, "test_per_species": test}
    write_birds(out, **counts, size=size, seed=seed, shortcut=shortcut)
    echo(f"{species} species, {species * (train + test)} images in {out}")

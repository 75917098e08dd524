"""The command line: parse, call, print. Nothing here imports torch before a command needs it."""

import importlib.util
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from prototree._version import __version__
from prototree.config import KEYS, preset_names
from prototree.errors import ConfigError, MissingExtraError, ProtoTreeError

if TYPE_CHECKING:
    from prototree.progress import Display

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Neural prototype trees: image classifiers that can be read in full.",
)
data_app = typer.Typer(no_args_is_help=True, help="Look at a data set, or make the generated one.")
app.add_typer(data_app, name="data")
console, complaints = Console(), Console(stderr=True)

DataArgument = Annotated[str, typer.Argument(help="Image folder, CSV manifest, CUB or Cars folder; or 'birds'.")]
RunArgument = Annotated[Path, typer.Argument(help="The folder of a run.")]
DataOption = Annotated[str | None, typer.Option("--data", help="Other data than the run was made with.")]


class Strategy(StrEnum):
    """The strategies that follow one path."""

    max_path = "max_path"
    greedy = "greedy"


_SETTINGS = "Any setting can be given as --NAME VALUE: " + ", ".join(f"--{key.replace('_', '-')}" for key in KEYS) + "."
_command_with_settings = partial(
    app.command,
    epilog=_SETTINGS,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    no_args_is_help=True,
)


def main() -> None:
    """Entry point: a known error is one red line, not a traceback."""
    try:
        sys.exit(app(standalone_mode=False))  # an exit code, or None
    except ProtoTreeError as error:
        complaints.print(f"[red]error:[/red] {_escaped(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        complaints.print("stopped")
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "show"):  # click's own usage errors
            raise
        error.show()
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        console.print(__version__, highlight=False)
        raise typer.Exit


@_command_with_settings()
def train(
    context: typer.Context,
    data: DataArgument,
    out: Annotated[Path, typer.Option(help="Where the run is written.")],
    preset: Annotated[str, typer.Option(help=f"{', '.join(preset_names())}, or a TOML file.")] = "auto",
    stages: Annotated[str, typer.Option(help="Which stages to do.")] = "train,prune,project,evaluate",
    resume: Annotated[bool, typer.Option(help="Continue an interrupted run.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace a run that is there.")] = False,
) -> None:
    """From a folder of images to a small, readable tree."""
    settings = _settings(context.args)
    from prototree.pipeline.fit import fit

    with _training(out, "the same command and --resume") as display:
        fit(
            data,
            out,
            preset_name=preset,
            settings=settings,
            stages=[stage.strip() for stage in stages.split(",") if stage.strip()],
            resume=resume,
            overwrite=overwrite,
            observer=display,
        )


@_command_with_settings()
def relearn(
    context: typer.Context,
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="Where the new run is written.")],
    data: DataOption = None,
) -> None:
    """Let the network learn on with a mended tree, its prototypes where they were put (§7)."""
    settings = _settings(context.args)
    from prototree.mend.relearning import relearn

    with _training(out, "the same command") as display:
        relearn(run, out, data=data, settings=settings, observer=display)


@contextmanager
def _training(out: Path, continued_with: str) -> Iterator["Display"]:
    """Shows how training goes, and the figures at its end."""
    from prototree.evaluation.tables import stage_table
    from prototree.pipeline.stages import Run
    from prototree.progress import Display, as_rich
    from prototree.training.engine import Interrupted

    try:
        with Display(console, out / "tensorboard") as display:
            yield display
    except Interrupted:
        complaints.print(f"stopped; the state is saved. Continue with {continued_with} ({out})")
        raise typer.Exit(130) from None
    console.print(as_rich(stage_table(Run(out).metrics, str(out))))
    console.print(f"written to {out}", highlight=False)


@app.command()
def prune(
    run: RunArgument,
    threshold: Annotated[
        float, typer.Option(help="Leaves whose largest probability is at most this go; 0: 2/K.")
    ] = 0.0,
    data: DataOption = None,
) -> None:
    """Prune a trained tree again (§5.1)."""
    _stage(run, data, "prune", {"threshold": threshold} if threshold else {})


@app.command()
def project(
    run: RunArgument,
    any_class: Annotated[bool, typer.Option(help="Allow patches of any class (Eq. 6 instead of S1).")] = False,
    data: DataOption = None,
) -> None:
    """Project the pruned tree's prototypes again (Eq. 6)."""
    _stage(run, data, "project", {"constrain_classes": not any_class})


@app.command()
def evaluate(run: RunArgument, data: DataOption = None) -> None:
    """Evaluate all stages of a run on its test photos."""
    _stage(run, data, "evaluate", {})


@app.command()
def mistakes(
    run: RunArgument,
    photos: Annotated[int, typer.Option(help="How many wrong answers to list, the closest first.")] = 10,
) -> None:
    """Which nodes led test photos astray, and which wrong answers were close."""
    from prototree.errors import CheckpointError
    from prototree.evaluation.tables import blame_table, mistake_table
    from prototree.files import read_json
    from prototree.progress import as_rich

    path = run / "mistakes.json"
    if not path.exists():
        raise CheckpointError(f"{run} has no mistakes.json; run first: prototree evaluate {run}")
    found = read_json(path)
    console.print(as_rich(blame_table(found)))
    listed = mistake_table(found, read_json(run / "metrics.json")["classes"])
    console.print(as_rich(replace(listed, rows=listed.rows[:photos])))
    console.print(f"{len(listed.rows)} wrong answers in all", highlight=False)


@app.command()
def ensemble(
    runs: Annotated[list[Path], typer.Argument(help="The folders of two or more runs.")],
    data: DataOption = None,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers to this JSON file.")] = None,
) -> None:
    """Let the trees of several runs vote: the mean of their probabilities."""

    from prototree.evaluation.tables import vote_table
    from prototree.files import write_json
    from prototree.pipeline.fit import combine
    from prototree.progress import Display, as_rich

    with Display(console) as display:
        found = combine(runs, data=data, observer=display).to_json()
    names = [run.resolve().name for run in runs]
    short = len(set(names)) == len(names)  # a long path would be cut off in the table
    console.print(as_rich(vote_table(found, names if short else [str(run) for run in runs])))
    if out is not None:
        write_json(out, {"runs": [str(run) for run in runs], **found})


@_command_with_settings()
def reproduce(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="cub, cars or birds.")],
    out: Annotated[Path, typer.Option(help="Where runs and tables are written.")],
    heights: Annotated[str, typer.Option(help="Such as 7,8,9,10,11; by default the one of the paper's tables.")] = "",
    seeds: Annotated[int, typer.Option(help="Runs of each height; 0: only write the tables.")] = 5,
    data: Annotated[str | None, typer.Option(help="The folder of the photos.")] = None,
) -> None:
    """The paper's tables: train what is missing, and set it beside the published figures."""
    settings = _settings(context.args)
    from prototree.pipeline.reproduce import reproduce
    from prototree.progress import Display, as_rich

    with Display(console) as display:
        found = reproduce(
            name, out, heights=_whole_numbers(heights), seeds=seeds, data=data, settings=settings, observer=display
        )
    for table in found.tables:
        console.print(as_rich(table))
    console.print(f"written to {out / 'tables.md'}", highlight=False)


@app.command()
def report(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option(help="Where to write; the folder 'report' of the run if not given.")
    ] = None,
    nearest: Annotated[int, typer.Option(help="How many nearest training patches of each prototype to show.")] = 5,
    occlusion: Annotated[bool, typer.Option(help="Also hide windows all over each photo; takes longer.")] = False,
    data: DataOption = None,
) -> None:
    """The whole tree as pages to look at and to print (§5.2)."""
    from prototree.explain.decisions import data_of, explain_tree, store_pictures
    from prototree.pipeline.fit import existing_run, open_source
    from prototree.progress import Display
    from prototree.report import write_report

    folder = existing_run(run)
    with Display(console) as display:
        images = open_source(data, folder.config) if data else data_of(folder)
        display.stage("looking at every prototype" if images else "the training data is not here; using what is stored")
        explanation = explain_tree(folder, data=images, nearest=nearest, occlusion=occlusion, tick=display.caching)
        if images:
            store_pictures(folder, images)
    for path in write_report(explanation, out or run / "report"):
        console.print(f"written: {path}", highlight=False)


@app.command()
def explain(
    run: RunArgument,
    images: Annotated[list[Path], typer.Argument(help="Images, or folders of images.")],
    strategy: Annotated[Strategy, typer.Option(help="Which path is drawn; the page has both.")] = Strategy.max_path,
    out: Annotated[Path | None, typer.Option(help="Where to write; 'explained' in the run if not given.")] = None,
    attribution: Annotated[bool, typer.Option(help="Also what each similarity depends on; takes longer.")] = False,
    occlusion: Annotated[bool, typer.Option(help="Also hide windows all over the image; takes longer.")] = False,
    others: Annotated[list[Path] | None, typer.Option("--with", help="Further runs that vote; repeat it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanations as JSON, write nothing.")] = False,
    data: DataOption = None,
) -> None:
    """Why the tree decides as it does about images (§5.3)."""
    import json

    from prototree.explain.decisions import explain_decision, local_paths, open_voters
    from prototree.progress import Display
    from prototree.report import decision_json, write_decision

    paths, voters = local_paths(images), open_voters([run, *(others or [])], data)
    with Display(complaints) as display:
        for number, path in enumerate(paths):
            explanation = explain_decision(voters, path, attribution=attribution, occlusion=occlusion)
            display.caching(number + 1, len(paths))
            if as_json:
                typer.echo(json.dumps(decision_json(explanation)))
                continue
            folder = (out or run / "explained") / (f"{number:04d}-{path.stem}" if len(paths) > 1 else path.stem)
            for written in write_decision(explanation, folder, strategy.value):
                console.print(f"written: {written}", highlight=False)


@data_app.command("check")
def check(
    path: DataArgument,
    sheet: Annotated[Path | None, typer.Option(help="Also write a contact sheet to this PNG.")] = None,
    strict: Annotated[bool, typer.Option(help="Fail on any file that cannot be used.")] = False,
) -> None:
    """What a data set holds, and what is wrong with it."""
    from prototree.data import open_data
    from prototree.data.check import contact_sheet, render, summarise

    data = open_data(path, strict=strict)
    console.print(render(summarise(data)), highlight=False, markup=False, soft_wrap=True)
    if sheet is not None:
        contact_sheet(data, sheet)
        console.print(f"contact sheet: {sheet}", highlight=False)


@data_app.command("birds")
def birds(
    out: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    species: Annotated[int, typer.Option(help="How many species.")] = 12,
    train: Annotated[int, typer.Option(help="Training images of each.")] = 60,
    test: Annotated[int, typer.Option(help="Test images of each.")] = 20,
    size: Annotated[int, typer.Option(help="Pixels.")] = 128,
    seed: Annotated[int, typer.Option(help="Another seed, other birds.")] = 0,
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
    console.print(f"{species} species, {species * (train + test)} images in {out}", highlight=False)


@app.command()
def serve(
    run: RunArgument,
    host: Annotated[str, typer.Option(help="The address to listen at; the default answers this computer alone.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    data: DataOption = None,
    validation: Annotated[
        str | None, typer.Option(help="Photos that give feedback while mending; default: every second test photo.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder for the history of edits and the feature maps; default: RUN-mend.")
    ] = None,
    browser: Annotated[bool, typer.Option(help="Also open a browser.")] = False,
) -> None:
    """A web app for this computer: explore the tree, try images, mend it by hand."""
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "serve")
    from prototree.mend.session import open_session
    from prototree.progress import Display
    from prototree.web import server

    with server.listen(host, port) as listening:
        with Display(console) as display:
            display.stage("opening the run; the first time, its photos go through the network once")
            session = open_session(run, data=data, validation=validation, work=work, tick=display.caching)
            browser_app = server.open_app(session, host)
        where = server.address(listening)
        console.print(f"open [bold]{where}[/bold] in a browser; stop with Ctrl+C", highlight=False)
        if browser:
            webbrowser.open(where)
        server.serve(browser_app, listening)


def _stage(folder: Path, data: str | None, stage: str, settings: dict[str, object]) -> None:
    from prototree.evaluation.tables import stage_table
    from prototree.pipeline.fit import redo
    from prototree.progress import Display, as_rich

    with Display(console) as display:
        run = redo(folder, stage, data=data, settings=settings, observer=display)
    if stage == "evaluate":
        console.print(as_rich(stage_table(run.metrics, str(folder))))
        console.print(f"tables in {folder / 'results.md'}, plots in {folder / 'plots'}", highlight=False)


def _settings(arguments: list[str]) -> dict[str, str]:
    """`--lr-tail 0.01 --height=8` as settings."""
    settings, words = {}, list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"expected a setting such as --height 8, got {word!r}")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not words:
                raise ConfigError(f"expected a value after {word}")
            value = words.pop(0)
        settings[key.replace("-", "_")] = value
    return settings


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"expected whole numbers such as 7,8,9 for --heights, got {text!r}") from None


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")

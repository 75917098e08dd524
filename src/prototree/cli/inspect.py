"""Commands that look at runs: ask, explain, report, mistakes, ensemble, serve."""

import importlib.util
import json
import os
import webbrowser
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from prototree.cli.console import DataOption, RunArgument, app, console, error_console, print_table, say, say_error
from prototree.errors import CheckpointError, DataError, MissingExtraError
from prototree.files import write_json
from prototree.progress import Display

if TYPE_CHECKING:
    from fastapi import FastAPI


class Strategy(StrEnum):
    """The strategies that follow one path."""

    greedy = "greedy"
    max_path = "max_path"


@app.command()
def report(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option(help="Where to write; default: 'report' in the run, or next to a packed tree.")
    ] = None,
    nearest: Annotated[int, typer.Option(help="How many nearest training patches to show per prototype.")] = 5,
    occlusion: Annotated[bool, typer.Option(help="Also hide windows all over each photo; slower.")] = False,
    data: DataOption = None,
) -> None:
    """The whole tree as pages to look at and to print (§5.2)."""
    from prototree.report import report_run

    folder = out or _place(run, "report")
    with Display(console) as display:
        written = report_run(run, folder, data=data, nearest=nearest, occlusion=occlusion, observer=display)
    for path in written:
        say(f"written: {path}")


def _place(run: Path, name: str) -> Path:
    """A folder in a run, or beside a file that holds one."""
    return run.with_name(f"{run.stem}-{name}") if run.is_file() else run / name


@app.command()
def explain(
    run: RunArgument,
    images: Annotated[list[Path], typer.Argument(help="Images, or folders of images.")],
    strategy: Annotated[Strategy, typer.Option(help="Which path the picture shows.")] = Strategy.greedy,
    out: Annotated[Path | None, typer.Option(help="Where to write; default: 'explained' in the run.")] = None,
    attribution: Annotated[bool, typer.Option(help="Also show what each similarity depends on; slower.")] = False,
    occlusion: Annotated[bool, typer.Option(help="Also hide windows all over the image; slower.")] = False,
    others: Annotated[
        list[Path] | None, typer.Option("--with", help="Another run that votes; can be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanations as JSON and write no files.")] = False,
    data: DataOption = None,
) -> None:
    """Explain the tree's answers for images (§5.3)."""
    from prototree.explain.votes import FEW_IMAGES, class_of_folder, explain_decision, local_paths, open_voters
    from prototree.report import decision_json, index_entry, write_decision, write_index
    from prototree.report.text import answer_words

    paths, voters = local_paths(images), open_voters([run, *(others or [])], data)
    if len(paths) > FEW_IMAGES:
        voters = [voter.for_many() for voter in voters]
    folder, names = out or _place(run, "explained"), voters[0].tree.class_names
    refused, entries = 0, []
    with Display(error_console) as display:
        for number, path in enumerate(paths):
            try:
                label = class_of_folder(path, names)
                explanation = explain_decision(voters, path, label=label, attribution=attribution, occlusion=occlusion)
            except DataError as error:
                say_error(str(error))
                refused += 1
                continue
            finally:
                display.caching(number + 1, len(paths))
            if as_json:
                typer.echo(json.dumps(decision_json(explanation)))
                continue
            own = f"{number:04d}-{path.stem}" if len(paths) > 1 else path.stem
            say(answer_words(explanation))
            for written in write_decision(explanation, folder / own, strategy.value):
                say(f"written: {written}")
            entries.append(index_entry(explanation, f"{quote(os.fsencode(own))}/decision.html"))
    if len(entries) > 1:
        say(f"written: {write_index(entries, folder)}")
    if refused:
        if len(paths) > 1:
            say_error(f"{refused} of {len(paths)} images could not be used; the others are done")
        raise typer.Exit(1)


@app.command()
def errors(
    run: RunArgument,
    photos: Annotated[int, typer.Option(help="How many wrong answers to list, the closest first.")] = 10,
) -> None:
    """Which nodes led test photos to the wrong class, and which wrong answers were close."""
    from prototree.evaluation.schema import read_errors, read_metrics
    from prototree.evaluation.tables import blame_table, mistake_table

    if run.is_file():
        raise CheckpointError(
            f"{run} is a packed tree, which has no list of its mistakes; use the folder of the run it was packed from, "
            f"or predict photos with labels: prototree predict {run} photos.csv"
        )
    path = run / "errors.json"
    if not path.exists():
        raise CheckpointError(f"{run} has no errors.json; run first: prototree evaluate {run}")
    names = read_metrics(run).get("classes", [])
    found = read_errors(path, len(names))
    print_table(blame_table(found))
    listed = mistake_table(found, names)
    print_table(replace(listed, rows=listed.rows[:photos]))
    say(f"wrong answers in all: {len(listed.rows)}")


@app.command()
def ensemble(
    runs: Annotated[list[Path], typer.Argument(help="The folders of two or more runs.")],
    data: DataOption = None,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers to this JSON file.")] = None,
) -> None:
    """Let the trees of several runs vote: the mean of their probabilities."""

    from prototree.evaluation.tables import vote_table
    from prototree.pipeline.fit import evaluate_ensemble

    with Display(console) as display:
        found = evaluate_ensemble(runs, data=data, observer=display).to_json()
    names = [run.resolve().name for run in runs]
    short = len(set(names)) == len(names)  # a long path would be cut off in the table
    print_table(vote_table(found, names if short else [str(run) for run in runs]))
    if out is not None:
        write_json(out, {"runs": [str(run) for run in runs], **found})


@app.command()
def serve(
    run: RunArgument,
    host: Annotated[str, typer.Option(help="Address to listen on; by default only this computer can connect.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8000,
    data: DataOption = None,
    validation: Annotated[
        str | None,
        typer.Option(help="Photos for feedback while editing; default: the data's own, or every second test photo."),
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder for the history of edits and the feature maps; default: RUN-edits.")
    ] = None,
    browser: Annotated[bool, typer.Option(help="Also open a browser.")] = False,
) -> None:
    """A web app for this computer: explore the tree, try images, edit it by hand."""
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "serve")
    from prototree.app import guard, server

    with server.listen(host, port) as listening:
        with Display(console) as display:
            token = server.token_for(host)
            browser_app = _opened(run, display, host, token, data=data, validation=validation, work=work)
        where = server.address(listening) + (f"?token={token}" if token else "")
        if token:
            say(
                f"{host} is open to other computers: anyone with the link below can see and change the tree; programs "
                "send its token as Authorization: Bearer TOKEN. On another computer, write this one's IP address, or "
                f"{' or '.join(guard.own_names())}, instead of localhost."
            )
        console.print(f"open [bold]{where}[/bold] in a browser; stop with Ctrl+C", highlight=False, soft_wrap=True)
        if browser:
            webbrowser.open(where)
        server.serve(browser_app, listening)


def _opened(run: Path, display: Display, host: str, token: str | None, **chosen: Any) -> "FastAPI":
    """The app of a run; of one whose photos are not here, what can be done without them."""
    from prototree.app import server
    from prototree.editing.session import open_session
    from prototree.run import Run

    if run.is_dir() and (chosen["data"] is not None or Run.open(run).data_is_here):
        display.stage("opening the run; feature maps that training did not keep are computed once")
        return server.open_app(open_session(run, tick=display.caching, **chosen), host, token)
    display.stage("opening a tree without its photos: you can explore and try it, but not edit it (see --data)")
    return server.open_viewer(run, host, token)

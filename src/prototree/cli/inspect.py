"""Commands that look at things: report, explain, serve; backbones."""

import importlib.util
import json
import os
import webbrowser
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from prototree.cli.app import (
    START,
    DataOption,
    RunArgument,
    command,
    console,
    echo,
    error_console,
    print_error,
    print_table,
)
from prototree.errors import DataError, MissingExtraError
from prototree.progress import Display

_MAX_IMAGES = 10_000


@command(START, "prototree report runs/birds")
def report(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to write; default: 'report' in the run, or next to a packed tree."),
    ] = None,
    nearest: Annotated[int, typer.Option(metavar="N", help="Nearest training patches to show per prototype.")] = 5,
    occlusion_map: Annotated[
        bool, typer.Option("--occlusion-map", help="Also occlude windows all over each image; slower.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Also write what differs from this run, such as the one before edits."),
    ] = None,
    data: DataOption = None,
) -> None:
    """Write the whole tree as an HTML page, figures and rules; or compare two runs."""
    from prototree.reporting.export import PAGE, report, write_comparison

    folder, written = out or _folder_in(run, "report"), []
    with Display(console) as display:
        if against is not None:  # first, because it may refuse the two runs
            written.append(write_comparison(run, against, folder, data=data, report_url=PAGE, observer=display))
        written += report(run, folder, data=data, nearest=nearest, occlusion=occlusion_map, observer=display)
    for path in written:
        echo(f"written: {path}")


def _folder_in(run: Path, name: str) -> Path:
    """Name a folder in a run, or beside a packed tree."""
    return run.with_name(f"{run.stem}-{name}") if run.is_file() else run / name


@command(START, "prototree backbones --speed", needs_arguments=False)
def backbones(
    speed: Annotated[
        bool, typer.Option("--speed", help="Also measure images per second on this machine; takes about 20 seconds.")
    ] = False,
) -> None:
    """List the networks that --backbone knows by name; any timm model can be used besides."""
    from prototree.backbones.registry import AUTO, BACKBONES, HUB
    from prototree.evaluation.tables import Table

    speeds = {}
    if speed:
        from prototree.backbones.backbone import Backbone
        from prototree.backbones.inference import images_per_second

        for network in BACKBONES:
            backbone = Backbone(network.name, None, image_size=network.image_size, split=False)
            speeds[network.name] = f"{images_per_second(backbone):.1f}"
    kinds = {AUTO: "package, or hub", HUB: "hub"}
    rows = [
        (
            f"{network.name} (auto)" if network is BACKBONES[0] else network.name,
            network.model,
            network.origin.trained_on,
            f"{network.million_parameters:.1f}",
            str(network.image_size),
            *([speeds[network.name]] if speed else []),
            f"file {network.file}" if network.file else kinds[str(network.weights)],
            network.origin.licence,
            network.measured or "not measured",
        )
        for network in BACKBONES
    ]
    header = ("name", "timm model", "trained on", "million weights", "pixels", *(["images/s here"] if speed else []))
    print_table(Table("Networks", (*header, "weights from", "licence", "CUB-200: soft, single path"), tuple(rows)))


@command(START, "prototree explain runs/birds bird.jpg")
def explain(
    run: RunArgument,
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGE...", help="Images, or folders of images.", show_default=False)
    ],
    strategy: Annotated[
        Literal["greedy", "max_path"], typer.Option(metavar="NAME", help="The path to show: greedy or max_path.")
    ] = "greedy",
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write; default: 'explained' in the run.")
    ] = None,
    attribution: Annotated[
        bool, typer.Option("--attribution", help="Also show what each similarity depends on; slower.")
    ] = False,
    occlusion_map: Annotated[
        bool, typer.Option("--occlusion-map", help="Also occlude windows all over the image; slower.")
    ] = False,
    ensemble: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Another run of the ensemble; can be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanations as JSON and write no files.")] = False,
    data: DataOption = None,
) -> None:
    """Show why: the path of each image through the tree."""
    from prototree.explanation.decision import FEW_IMAGES, class_of_folder, explain_decision, open_explainers
    from prototree.inference.io import list_images
    from prototree.reporting.decision_page import decision_json, index_entry
    from prototree.reporting.export import write_decision, write_index
    from prototree.reporting.text import decision_text

    paths = list(dict.fromkeys(listed.path for listed in islice(list_images(images), _MAX_IMAGES + 1)))
    if not 1 <= len(paths) <= _MAX_IMAGES:
        raise DataError(f"expected 1 to {_MAX_IMAGES:,} images to explain, got {'more' if paths else 'none'}")
    explainers = open_explainers([run, *(ensemble or [])], data)
    if len(paths) > FEW_IMAGES:
        explainers = [explainer.for_many() for explainer in explainers]
    folder, names = out or _folder_in(run, "explained"), explainers[0].tree.class_names
    refused, entries = 0, []
    with Display(error_console) as display:
        for number, path in enumerate(paths):
            try:
                label = class_of_folder(path, names)
                explanation = explain_decision(
                    explainers, path, label=label, attribution=attribution, occlusion=occlusion_map
                )
            except DataError as error:
                print_error(str(error))
                refused += 1
                continue
            display.counting("images", number + 1, len(paths))
            if as_json:
                typer.echo(json.dumps(decision_json(explanation), ensure_ascii=False))
                continue
            echo(decision_text(explanation))
            own = path.stem if len(paths) == 1 else f"{number:04d}-{path.stem}"
            for written in write_decision(explanation, folder / own, strategy, report=_folder_in(run, "report")):
                echo(f"written: {written}")
            entries.append(index_entry(explanation, f"{quote(os.fsencode(own))}/decision.html"))
    if len(entries) > 1:
        echo(f"written: {write_index(entries, folder)}")
    if refused:
        if len(paths) > 1:
            print_error(f"{refused} of {len(paths)} images could not be used; the others are done")
        raise typer.Exit(1)


@command(START, "prototree serve runs/birds")
def serve(
    run: RunArgument,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on; by default only this computer can connect.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", help="Port to listen on; 0 picks a free one.", min=0, max=65535)
    ] = 8000,
    data: DataOption = None,
    validation: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Images to judge edits by; default: the data's own, or half of the tests."),
    ] = None,
    edits_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for the history of edits and feature maps; default: RUN-edits."),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open a browser.")] = False,
) -> None:
    """Explore, test and edit a tree in the browser."""
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "serve")
    from prototree.app import server

    with server.listen(host, port) as listening:
        token = server.token_for(host)
        with Display(console) as display:
            chosen: dict[str, Any] = {"data": data, "validation": validation, "work": edits_dir}
            browser_app = _open_app(run, display, host, token, **chosen)
        where = server.address(listening) + (f"?token={token}" if token else "")
        is_given = token == os.environ.get(server.TOKEN_VARIABLE)
        shown = where.replace(str(token), f"${server.TOKEN_VARIABLE}") if is_given else where
        if token:
            echo(
                "Every request needs the token: browsers open the link below once, programs send Authorization: "
                "Bearer TOKEN. Who has it can see the tree, and edit a run that is not packed."
            )
        if not server.is_loopback(host):
            echo(f"{host} is open to other computers; there, write this one's name or IP address instead of localhost.")
        console.print(f"open [bold]{shown}[/bold] in a browser; stop with Ctrl+C", highlight=False, soft_wrap=True)
        if not no_browser and console.is_terminal:
            webbrowser.open(where)
        server.serve(browser_app, listening)


def _open_app(run: Path, display: Display, host: str, token: str | None, **chosen: Any) -> Any:
    """Make the app of a run; of one whose images are not here, what can be done without them."""
    from prototree.app.api import create_app
    from prototree.app.service import Service
    from prototree.editing.session import edit
    from prototree.run import Run

    if run.is_dir() and (chosen["data"] is not None or Run.open(run).has_data):
        display.stage("opening the run; feature maps that training did not keep are computed once")
        service = Service(edit(run, tick=display.caching, **chosen))
    else:
        display.stage("opening a tree without its images: you can explore and test it, but not edit it (see --data)")
        service = Service(Run.open(run))
    service.tree()  # so that the first page is ready
    return create_app(service, host=host, token=token)

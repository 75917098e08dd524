"""Commands that make runs and their stages: train, finetune, evaluate, prune, project, reproduce, clean."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from prototree.cli.app import (
    IMPROVE,
    RESEARCH,
    START,
    DataArgument,
    DataOption,
    FolderArgument,
    command,
    command_with_settings,
    console,
    echo,
    error_console,
    escape_control,
    print_table,
)
from prototree.config import DEFAULT_PRESET, preset_names
from prototree.errors import ConfigError
from prototree.io import write_json
from prototree.progress import Display, is_first

_ALL_STAGES = "train,prune,project,evaluate"
_SEVERAL = "Several runs"


@command_with_settings(START, "prototree train photos/ --out runs/birds")
def train(
    data: DataArgument,
    out: Annotated[Path, typer.Option(metavar="RUN", help="Folder to write the run to.")],
    preset: Annotated[
        str, typer.Option(metavar="NAME", help=f"{', '.join(preset_names())}, or a TOML file.")
    ] = DEFAULT_PRESET,
    stages: Annotated[str, typer.Option(metavar="LIST", help="Which stages to run.")] = _ALL_STAGES,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that exists.")] = False,
    seeds: Annotated[
        int, typer.Option(metavar="N", help="Train an ensemble of N trees.", min=0, rich_help_panel=_SEVERAL)
    ] = 0,
    folds: Annotated[
        int, typer.Option(metavar="N", help="Cross-validate in N parts.", min=0, rich_help_panel=_SEVERAL)
    ] = 0,
    jobs: Annotated[
        int, typer.Option(metavar="N", help="Runs at a time; 0: by cores.", min=0, rich_help_panel=_SEVERAL)
    ] = 0,
    threads: Annotated[
        int, typer.Option(metavar="N", help="Threads per run; 0: by cores.", min=0, rich_help_panel=_SEVERAL)
    ] = 0,
    *,
    settings: dict[str, str],
) -> None:
    """Train a tree from a folder of images."""
    common: dict[str, Any] = {"preset": preset, "settings": settings, "resume": resume, "overwrite": overwrite}
    if not seeds and not folds:
        if jobs or threads:
            raise ConfigError("--jobs and --threads are about several runs; name --seeds or --folds, or leave them out")
        with _training(out, "the same command and --resume") as display:
            from prototree.pipeline.fit import fit

            chosen = [stage.strip() for stage in stages.split(",") if stage.strip()]
            fit(data, out, stages=chosen, observer=display, **common)
        return
    if stages != _ALL_STAGES or (seeds and folds):
        raise ConfigError("expected either --seeds or --folds, and no --stages with them; leave one out")
    from prototree.pipeline.sweep import cross_validate, fit_seeds

    with _interruptible(out, "continue with the same command and --resume"), Display(console) as display:
        common |= {"jobs": jobs, "threads": threads, "observer": display}
        sweep = (
            fit_seeds(data, out, seeds=seeds, **common) if seeds else cross_validate(data, out, folds=folds, **common)
        )
    print_table(sweep.table)
    echo(f"written to {out}")


@command_with_settings(IMPROVE, "prototree finetune runs/birds-edited --out runs/birds-tuned")
def finetune(
    run: FolderArgument,
    out: Annotated[Path, typer.Option(metavar="RUN", help="Folder to write the new run to.")],
    data: DataOption = None,
    *,
    settings: dict[str, str],
) -> None:
    """Train the network further with an edited tree; its prototypes stay the patches you chose."""
    with _training(out, "the same command") as display:
        from prototree.editing.finetune import finetune

        finetune(run, out, data=data, settings=settings, observer=display)


@command(IMPROVE, "prototree evaluate runs/birds --ood other-photos/")
def evaluate(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="A run; several are evaluated as an ensemble.", show_default=False),
    ],
    data: DataOption = None,
    prototypes: Annotated[
        bool, typer.Option("--prototypes", help="Also measure prototype quality: part purity, occlusion test; slower.")
    ] = False,
    ood: Annotated[
        list[str] | None,
        typer.Option(metavar="DATA", help="Test whether the tree notices images of unknown classes; can be repeated."),
    ] = None,
    errors: Annotated[int, typer.Option(metavar="N", help="List N wrong predictions, the closest first.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Of an ensemble: write the metrics as JSON.")] = None,
) -> None:
    """Measure accuracy, errors by node, prototype quality, unknown classes; several runs as an ensemble."""
    if len(runs) > 1:
        if ood or errors or prototypes:
            raise ConfigError("--ood, --errors and --prototypes are about one tree: name one run, or leave them out")
        _evaluate_ensemble(runs, data, out)
        return
    run = runs[0]
    if not ood or errors or prototypes:  # unknown classes alone need no other evaluation, nor a run that can be changed
        _rerun(run, data, "evaluate", {})
        _print_metrics(run)
        if errors:
            _print_errors(run, errors)
        if prototypes:
            _print_prototype_quality(run, data)
        echo(f"tables in {run / 'results.md'}, plots in {run / 'plots'}")
    if ood:
        _print_ood(run, ood, data)


@command(RESEARCH, "prototree prune runs/birds --threshold 0.05")
def prune(
    run: FolderArgument,
    threshold: Annotated[
        str, typer.Option(metavar="P", help="Remove leaves whose largest probability is at most this; auto: 2/K.")
    ] = "auto",
    data: DataOption = None,
) -> None:
    """Prune a trained tree again."""
    _rerun(run, data, "prune", {"prune_threshold": threshold} if threshold != "auto" else {})


@command(RESEARCH, "prototree project runs/birds --any-class")
def project(
    run: FolderArgument,
    any_class: Annotated[bool, typer.Option("--any-class", help="Allow patches of any class.")] = False,
    data: DataOption = None,
) -> None:
    """Replace the pruned tree's prototypes by training patches again."""
    _rerun(run, data, "project", {"project_within_class": not any_class})


@command_with_settings(RESEARCH, "prototree reproduce cub --data CUB_50 --out runs/paper")
def reproduce(
    name: Annotated[str, typer.Argument(metavar="cub|cars|birds", help="Which data set.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where runs and tables are written.")],
    scale: Annotated[
        str, typer.Option(metavar="NAME", help="small: two CPU cores; published: a GPU; tiny: a trial.")
    ] = "small",
    heights: Annotated[str, typer.Option(metavar="LIST", help="Heights, such as 5,6,7; default: by the scale.")] = "",
    seeds: Annotated[
        int | None,
        typer.Option(metavar="N", help="Runs per height; 0: only write tables; default: by the scale.", min=0),
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="DATA", help="The folder of the images.")] = None,
    *,
    settings: dict[str, str],
) -> None:
    """Run the paper's algorithm whole: train what is missing, decide its six claims, write its tables."""
    with _interruptible(out, "continue with the same command"), Display(console) as display:
        from prototree.pipeline.reproduce import reproduce

        options: dict[str, Any] = {"scale": scale, "heights": _whole_numbers(heights), "seeds": seeds, "data": data}
        result = reproduce(name, out, settings=settings, observer=display, **options)
    for table in result.tables:
        print_table(table)
    echo(f"written to {out / 'paper.md'}")


@command(RESEARCH, "prototree clean runs/birds")
def clean(run: FolderArgument) -> None:
    """Free disk space: remove from a finished run what can be computed again."""
    from prototree.pipeline.share import clean

    removed = clean(run)
    for item in removed:
        echo(f"removed: {item.path} ({item.n_bytes / 1e6:,.1f} MB)")
    total = sum(item.n_bytes for item in removed)
    echo(f"{total / 1e6:,.1f} MB freed" if removed else "nothing to remove")


def _evaluate_ensemble(runs: list[Path], data: str | None, out: Path | None) -> None:
    from prototree.evaluation.tables import ensemble_table
    from prototree.pipeline.fit import evaluate

    with Display(console) as display:
        metrics = evaluate(runs, data, observer=display).to_json()
    names = [run.resolve().name for run in runs]
    short = len(set(names)) == len(names)  # a long path would be cut off in the table
    print_table(ensemble_table(metrics, names if short else [str(run) for run in runs]))
    if out is not None:
        write_json(out, {"runs": [str(run) for run in runs], **metrics})


@contextmanager
def _training(out: Path, continued_with: str) -> Iterator[Display]:
    """Show how training goes, and the metrics at its end."""
    with _interruptible(out, f"continue with {continued_with}"), Display(console, out / "tensorboard") as display:
        yield display
    _print_metrics(out)
    echo(f"written to {out}; read it with: prototree report {shlex.quote(str(out))}")


@contextmanager
def _interruptible(folder: Path, remedy: str) -> Iterator[None]:
    """End at a signal with a word on what is kept and how to go on."""
    from prototree.progress import sigterm_as_sigint

    try:
        with sigterm_as_sigint():
            yield
    except KeyboardInterrupt:
        from prototree.pipeline.folders import describe_progress

        text = f"stopped; {describe_progress(folder)}; {remedy}"
        if is_first():
            error_console.print(escape_control(text), highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(130) from None


def _print_metrics(run: Path) -> None:
    from prototree.evaluation.schema import read_metrics
    from prototree.evaluation.tables import baseline_text, stage_table

    metrics = read_metrics(run)
    print_table(stage_table(metrics, str(run)))
    if text := baseline_text(metrics):
        echo(text)


def _print_errors(run: Path, count: int) -> None:
    from prototree.evaluation.schema import read_errors, read_metrics
    from prototree.evaluation.tables import image_error_table, node_error_table

    names = read_metrics(run).get("classes", [])
    errors = read_errors(run / "errors.json", len(names))
    table = image_error_table(errors, names)
    if not table.rows:
        echo("wrong predictions in all: none. That does not make every patch a good one: read the report.")
        return
    print_table(node_error_table(errors))
    print_table(replace(table, rows=table.rows[:count]))
    echo(f"wrong predictions in all: {len(table.rows)}")


def _print_ood(run: Path, ood: list[str], data: str | None) -> None:
    from prototree.evaluation.ood import evaluate_ood
    from prototree.evaluation.tables import ood_table

    with Display(console) as display:
        metrics = evaluate_ood(run, ood, data=data, observer=display)
    print_table(ood_table({name: asdict(values) for name, values in metrics.items()}))


def _print_prototype_quality(run: Path, data: str | None) -> None:
    from prototree.evaluation.part_purity import evaluate_prototypes
    from prototree.evaluation.tables import quality_table, quality_text
    from prototree.pipeline.stages import write_results
    from prototree.run import Run

    with Display(console) as display:
        quality = evaluate_prototypes(run, data=data, observer=display).to_json()
    write_results(Run.open(run))
    print_table(quality_table(quality))
    echo(quality_text(quality))


def _rerun(folder: Path, data: str | None, stage: str, settings: dict[str, object]) -> None:
    remedy = f"run it again with: prototree {stage} {shlex.quote(str(folder))}"
    with _interruptible(folder, remedy), Display(console) as display:
        from prototree.pipeline.fit import rerun

        rerun(folder, stage, data=data, settings=settings, observer=display)


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"expected whole numbers such as 7,8,9 for --heights, got {text!r}") from None

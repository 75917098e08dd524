"""Commands that make runs, and the stages of runs: train, finetune, reproduce, prune, project, evaluate."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from prototree.cli.console import (
    DataArgument,
    DataOption,
    RunArgument,
    app,
    console,
    error_console,
    harmless,
    print_table,
    say,
)
from prototree.cli.options import HelpAll, command_with_settings, parsed
from prototree.config import DEFAULT_PRESET, preset_names
from prototree.errors import ConfigError
from prototree.progress import Display, is_first
from prototree.training.signals import Interrupted, terminating_like_ctrl_c

_ALL_STAGES = "train,prune,project,evaluate"


@command_with_settings()
def train(
    context: typer.Context,
    data: DataArgument,
    out: Annotated[Path, typer.Option(help="Where the run is written.")],
    preset: Annotated[str, typer.Option(help=f"{', '.join(preset_names())}, or a TOML file.")] = DEFAULT_PRESET,
    stages: Annotated[str, typer.Option(help="Which stages to run.")] = _ALL_STAGES,
    resume: Annotated[bool, typer.Option(help="Continue an interrupted run.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace a run that exists.")] = False,
    seeds: Annotated[
        int, typer.Option(help="Train this many trees with different seeds, and let them vote.", min=0)
    ] = 0,
    folds: Annotated[int, typer.Option(help="Cross-validate in this many parts, each left out once.", min=0)] = 0,
    jobs: Annotated[int, typer.Option(help="With several runs: how many at a time; 0: by cores.", min=0)] = 0,
    threads: Annotated[int, typer.Option(help="With several runs: threads per run; 0: by cores.", min=0)] = 0,
    help_all: HelpAll = False,
) -> None:
    """From a folder of images to a small, readable tree."""
    settings = parsed(context.args)
    if seeds or folds:
        if stages != _ALL_STAGES or (seeds and folds):
            raise ConfigError("expected either --seeds or --folds, and no --stages with them; leave one out")
        _train_several(data, out, preset, settings, seeds, folds, (jobs, threads), resume=resume, overwrite=overwrite)
        return
    with _training(out, "the same command and --resume") as display:
        from prototree.pipeline.fit import fit

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


@command_with_settings()
def finetune(
    context: typer.Context,
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="Where the new run is written.")],
    data: DataOption = None,
    help_all: HelpAll = False,
) -> None:
    """Train the network further with an edited tree; its prototypes stay the patches you chose (§7)."""
    settings = parsed(context.args)
    with _training(out, "the same command") as display:
        from prototree.editing.finetuning import finetune

        finetune(run, out, data=data, settings=settings, observer=display)


@command_with_settings()
def reproduce(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="cub, cars or birds.")],
    out: Annotated[Path, typer.Option(help="Where runs and tables are written.")],
    heights: Annotated[str, typer.Option(help="Heights, such as 7,8,9,10,11; default: as in the paper's tables.")] = "",
    seeds: Annotated[int, typer.Option(help="Runs per height; 0: only write the tables.")] = 5,
    data: Annotated[str | None, typer.Option(help="The folder of the photos.")] = None,
    help_all: HelpAll = False,
) -> None:
    """The paper's tables: train what is missing, and compare it with the published figures."""
    settings = parsed(context.args)
    with _stoppable(out, "continue with the same command"), Display(console) as display:
        from prototree.pipeline.reproduce import reproduce

        found = reproduce(
            name, out, heights=_whole_numbers(heights), seeds=seeds, data=data, settings=settings, observer=display
        )
    for table in found.tables:
        print_table(table)
    say(f"written to {out / 'tables.md'}")


@app.command()
def prune(
    run: RunArgument,
    threshold: Annotated[
        float, typer.Option(help="Remove leaves whose largest probability is at most this; 0: 2/K.")
    ] = 0.0,
    data: DataOption = None,
) -> None:
    """Prune a trained tree again (§5.1)."""
    _redo(run, data, "prune", {"threshold": threshold} if threshold else {})


@app.command()
def project(
    run: RunArgument,
    any_class: Annotated[bool, typer.Option(help="Allow patches of any class (Eq. 6 instead of S1).")] = False,
    data: DataOption = None,
) -> None:
    """Project the pruned tree's prototypes again (Eq. 6)."""
    _redo(run, data, "project", {"project_within_class": not any_class})


@app.command()
def evaluate(
    run: RunArgument,
    data: DataOption = None,
    parts: Annotated[
        bool,
        typer.Option("--parts", help="Also measure whether patches mean what they show: part purity, hiding; slower."),
    ] = False,
    ood: Annotated[
        list[str] | None,
        typer.Option(help="Instead: test whether the tree notices these photos of unknown classes; can be repeated."),
    ] = None,
) -> None:
    """Evaluate all stages of a run on its test photos, or its tree on photos of unknown classes."""
    if ood:
        from prototree.evaluation.tables import ood_table
        from prototree.pipeline.ood import evaluate_ood

        with Display(console) as display:
            found = evaluate_ood(run, ood, data=data, observer=display)
        print_table(ood_table({name: asdict(one) for name, one in found.items()}))
        return
    _redo(run, data, "evaluate", {})
    _print_figures(run)
    if parts:
        _print_parts(run, data)
    say(f"tables in {run / 'results.md'}, plots in {run / 'plots'}")


def _train_several(
    data: str,
    out: Path,
    preset: str,
    settings: dict[str, str],
    seeds: int,
    folds: int,
    machine: tuple[int, int],
    *,
    resume: bool,
    overwrite: bool,
) -> None:
    from prototree.pipeline.sweep import Machine, cross_validate, fit_seeds

    common: dict[str, Any] = {"preset_name": preset, "settings": settings, "resume": resume, "overwrite": overwrite}
    with _stoppable(out, "continue with the same command and --resume"), Display(console) as display:
        common |= {"machine": Machine(*machine), "observer": display}
        found = (
            fit_seeds(data, out, seeds=seeds, **common) if seeds else cross_validate(data, out, folds=folds, **common)
        )
    print_table(found.table)
    say(f"written to {out}")


@contextmanager
def _training(out: Path, continued_with: str) -> Iterator[Display]:
    """Shows how training goes, and the figures at its end."""
    with _stoppable(out, f"continue with {continued_with}"), Display(console, out / "tensorboard") as display:
        yield display
    _print_figures(out)
    say(f"written to {out}")


@contextmanager
def _stoppable(folder: Path, remedy: str) -> Iterator[None]:
    """A signal at any moment ends the command with a word on what is kept and how to go on."""
    try:
        with terminating_like_ctrl_c():
            yield
    except (Interrupted, KeyboardInterrupt):
        from prototree.pipeline.folders import what_is_kept

        words = f"stopped; {what_is_kept(folder)}; {remedy}"
        if is_first():
            error_console.print(harmless(words), highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(130) from None


def _print_figures(run: Path) -> None:
    from prototree.evaluation.schema import read_metrics
    from prototree.evaluation.tables import baseline_text, stage_table

    metrics = read_metrics(run)
    print_table(stage_table(metrics, str(run)))
    if words := baseline_text(metrics):
        say(words)


def _print_parts(run: Path, data: str | None) -> None:
    from prototree.evaluation.part_tables import part_table, part_words
    from prototree.pipeline.parts import evaluate_parts

    with Display(console) as display:
        found = evaluate_parts(run, data=data, observer=display).to_json()
    print_table(part_table(found))
    say(part_words(found))


def _redo(folder: Path, data: str | None, stage: str, settings: dict[str, object]) -> None:
    with (
        _stoppable(folder, f"run it again with: prototree {stage} {shlex.quote(str(folder))}"),
        Display(console) as display,
    ):
        from prototree.pipeline.fit import rerun

        rerun(folder, stage, data=data, settings=settings, observer=display)


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"expected whole numbers such as 7,8,9 for --heights, got {text!r}") from None

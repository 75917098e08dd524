"""Several runs on the same data: an ensemble of seeds, or cross-validation over folds.

The feature maps that they share are computed first, with all cores. Then each run is a process of its own with a fixed
number of threads, so it comes out the same whether the runs follow each other or go side by side.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import prototree
from prototree.config import DEFAULT_PRESET, Config, load_preset
from prototree.data import ImageData
from prototree.errors import ConfigError, TrainError
from prototree.evaluation.tables import (
    MEAN,
    TREE_COST,
    Table,
    ensemble_table,
    mean_percent,
    mean_text,
    percent,
    tree_cost,
)
from prototree.io import write_file, write_json
from prototree.pipeline import folders
from prototree.pipeline.fit import DataLike, evaluate, materialise, precompute_features
from prototree.progress import Observer, sigterm_as_sigint
from prototree.run import RESULTS, Run

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Sweep:
    """Runs that belong together, and the table of their metrics."""

    folder: Path
    runs: tuple[Run, ...]
    table: Table


class SweepOptions(TypedDict, total=False):
    """Options of `fit_seeds` and `cross_validate`; those of one run are the same as in `fit`."""

    preset: str
    settings: Mapping[str, Any]
    resume: bool
    overwrite: bool
    jobs: int  # runs at a time; 0: from the number of cores
    threads: int  # per run; 0: from the number of cores
    observer: Observer


def fit_seeds(data: DataLike, out: str | Path, *, seeds: int, **options: Unpack[SweepOptions]) -> Sweep:
    """Train an ensemble: trees of the same data with different seeds, which share one feature cache.

    Args:
        data: What `fit` takes, except an opened data set: each run is a process of its own.
        out: Folder for the runs `seed-…` and the table of the ensemble.
        seeds: How many trees to train, at least 2.
        **options: `preset`, `settings`, `resume`, `overwrite` and `observer` as in `fit`; `jobs`, runs at a time; and
            `threads` of each run. 0 follows from the number of cores.

    Returns:
        The folder, the runs in order of their seeds, and the table.

    Raises:
        TrainError: One of the runs failed; the message quotes its last line.

    Examples:
        >>> [run.folder.name for run in fit_seeds("photos/", "runs/three", seeds=3).runs]  # doctest: +SKIP
        ['seed-0', 'seed-1', 'seed-2']
    """
    if seeds < 2:
        raise ConfigError(f"expected at least 2 seeds to train several trees, got {seeds}; leave it out for one")
    config, out = _config(options), Path(out)
    each = {f"seed-{seed}": {"seed": seed} for seed in range(config.seed, config.seed + seeds)}
    runs = _train_all(config, data, out, each, options)
    metrics = evaluate([run.folder for run in runs], observer=options.get("observer")).to_json()
    write_json(out / "ensemble.json", {"runs": list(each), **metrics})
    return _write_table(out, runs, ensemble_table(metrics, list(each), baselines(runs)))


def cross_validate(data: DataLike, out: str | Path, *, folds: int, **options: Unpack[SweepOptions]) -> Sweep:
    """Cross-validate: each of `folds` parts is the test set of one tree; gives mean ± standard deviation.

    Args:
        data: What `fit` takes, except an opened data set: each run is a process of its own.
        out: Folder for the runs `fold-…` and their table.
        folds: How many parts, at least 2; images of one group stay in one part.
        **options: As in `fit_seeds`.

    Returns:
        The folder, the runs in order of the folds, and the table.

    Raises:
        TrainError: One of the runs failed; the message quotes its last line.

    Examples:
        >>> cross_validate("photos/", "runs/folds", folds=5).table  # doctest: +SKIP
        Table(title='5 folds', ...)
    """
    config, out = _config(options), Path(out)
    if config.fold:
        raise ConfigError(f"expected either all folds or the one named {config.fold}, got both; leave one out")
    if folds < 2:
        raise ConfigError(f"expected at least 2 folds, got {folds}")
    each = {f"fold-{part}": {"fold": f"{part}/{folds}"} for part in range(1, folds + 1)}
    runs = _train_all(config, data, out, each, options)
    table = fold_table([run.last_metrics for run in runs], baselines(runs))
    write_json(out / "folds.json", {"runs": list(each), "table": [list(row) for row in (table.header, *table.rows)]})
    return _write_table(out, runs, table)


def _config(options: SweepOptions) -> Config:
    return load_preset(options.get("preset", DEFAULT_PRESET)).replace(options.get("settings") or {})


def baselines(runs: Sequence[Run]) -> list[float | None]:
    """List the accuracy of each run's network without a tree; None where it was not measured."""
    return [run.metrics.get("baseline_accuracy") for run in runs]


def fold_table(metrics: Sequence[Mapping[str, Any]], baseline: Sequence[float | None]) -> Table:
    """Tabulate the metrics of each fold, and their mean ± standard deviation."""
    accuracy = [[fold["accuracy"][strategy] for fold in metrics] for strategy in ("soft", "max_path", "greedy")]
    sizes = [
        [float(fold["n_prototypes"]) for fold in metrics],
        [fold["path_length"]["greedy"]["mean"] for fold in metrics],
    ]
    rows = [
        (
            str(fold + 1),
            str(values["n_images"]),
            *(percent(column[fold], 1) for column in accuracy),
            *(f"{column[fold]:.1f}" for column in sizes),
            tree_cost(baseline[fold], values["accuracy"]),
        )
        for fold, values in enumerate(metrics)
    ]
    means = [*map(mean_percent, accuracy), *map(mean_text, sizes)]
    rows.append((MEAN, str(sum(values["n_images"] for values in metrics)), *means, "–"))
    header = ("fold", "test images", "soft", "max-path", "greedy", "prototypes", "path length", TREE_COST)
    return Table(f"{len(metrics)} folds", header, tuple(rows))


def _write_table(out: Path, runs: tuple[Run, ...], table: Table) -> Sweep:
    write_file(out / RESULTS, table.to_markdown().encode())
    return Sweep(out, runs, table)


def allocate(n_runs: int, jobs: int = 0, threads: int = 0) -> tuple[int, int]:
    """Divide the cores: runs at a time, and threads per run. Threads may change rounding; jobs change only the time."""
    if jobs < 0 or threads < 0:
        raise ConfigError(f"expected jobs and threads of at least 0, got {jobs} and {threads}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = threads or max(cores // (jobs or n_runs), 1)
    return min(jobs or max(cores // threads, 1), n_runs), threads


def _train_all(
    config: Config, data: DataLike, out: Path, each: Mapping[str, Mapping[str, Any]], options: SweepOptions
) -> tuple[Run, ...]:
    """Train a run for each name; those that are finished stay as they are if the whole is resumed."""
    folders.check_outside(out, data)
    source, observer = materialise(data, out), options.get("observer") or Observer()
    resume, overwrite = options.get("resume", False), options.get("overwrite", False)
    if isinstance(source, ImageData):
        raise ConfigError("expected data that other processes can open, such as a path, a DataFrame or arrays")
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "settings.toml", config.to_toml().encode())
    common = [str(source), "--preset", str(out / "settings.toml"), *(["--resume"] * resume)]
    waiting = {
        name: [*common, *(["--overwrite"] * overwrite), *(word for key in own for word in (f"--{key}", str(own[key])))]
        for name, own in each.items()
        if not (resume and (out / name / RESULTS).exists())
    }
    jobs, threads = allocate(max(len(waiting), 1), options.get("jobs", 0), options.get("threads", 0))
    share = "one thread" if threads == 1 else f"{threads} threads"
    observer.stage(f"{len(waiting)} of {len(each)} runs to train, {jobs} at a time, {share} each")
    with sigterm_as_sigint():
        if waiting:
            precompute_features(config.replace(each[next(iter(waiting))]), source, out, observer)
        _run_all(out, waiting, jobs, threads, observer)
    return tuple(Run(out / name) for name in each)


def _start(out: Path, name: str, words: list[str], threads: int) -> "subprocess.Popen[bytes]":
    """Start a run by the command that a person would type; its output goes to a file beside it."""
    path = os.pathsep.join(filter(None, [str(Path(prototree.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    few = {key: str(threads) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    with open(out / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "prototree", "train", *words, "--out", str(out / name)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl+C reaches us alone; we tell them
            env={**os.environ, **few, "PYTHONPATH": path},
        )


def _run_all(out: Path, waiting: Mapping[str, list[str]], jobs: int, threads: int, observer: Observer) -> None:
    """Run some at a time. If one fails, no more are started; the error is raised once the running ones are done."""
    left, running, failed = list(waiting), dict[str, subprocess.Popen[bytes]](), dict[str, int]()
    try:
        while running or (left and not failed):
            while left and len(running) < jobs and not failed:
                name = left.pop(0)
                running[name] = _start(out, name, waiting[name], threads)
                observer.stage(f"{name} has started; its output is in {out / f'{name}.log'}")
            time.sleep(_POLL_SECONDS)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if code := running.pop(name).returncode:
                    failed[name] = code
                else:
                    observer.stage(f"{name} is done")
    finally:  # tell those that are left to end
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    if any(code in (130, -signal.SIGINT, -signal.SIGTERM) for code in failed.values()):
        raise KeyboardInterrupt
    for name in failed:
        log = out / f"{name}.log"
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        raise TrainError(f"{name} failed: {lines[-1].removeprefix('error: ')} (its output is in {log})")

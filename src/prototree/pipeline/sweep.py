"""Several runs on the same data: with different seeds, to vote, or with different parts left out, to cross-validate.

The maps that they share are computed first, with all cores. Then each run is a process of its own, started by the same
command that a person would type, with a fixed number of threads. So it comes out the same whether the runs follow each
other or go side by side, and whatever the program that asked for them has done before.
"""

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prototree
from prototree.config import DEFAULT_PRESET, Config, preset
from prototree.data import ImageData
from prototree.errors import ConfigError, TrainError
from prototree.evaluation.tables import Table, percent, vote_table
from prototree.files import write_file, write_json
from prototree.pipeline.fit import Given, evaluate_ensemble, opened_again, share_maps
from prototree.progress import Observer
from prototree.run import RESULTS, Run
from prototree.training.signals import Interrupted

_LOOK_SECONDS = 0.2
_FINISHED = RESULTS  # the last file that a run writes
_STOPPED = (130, -2, -15)  # how a run ends that was told to


@dataclass(frozen=True)
class Several:
    """Runs that belong together, and what they say together."""

    folder: Path
    runs: tuple[Run, ...]
    table: Table


@dataclass(frozen=True)
class Machine:
    """How many runs go at the same time, and how many threads each has; 0: from the number of cores."""

    jobs: int = 0
    threads: int = 0

    def shared_out(self, n_runs: int) -> tuple[int, int]:
        """Runs at a time, and threads per run. Threads may change the last bits; jobs change only the time."""
        if self.jobs < 0 or self.threads < 0:
            raise ConfigError(f"expected jobs and threads of at least 0, got {self.jobs} and {self.threads}")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = self.threads or max(cores // (self.jobs or n_runs), 1)
        return min(self.jobs or max(cores // threads, 1), n_runs), threads


AS_CORES_ALLOW = Machine()


def fit_seeds(
    data: Given,
    out: str | Path,
    *,
    seeds: int,
    preset_name: str = DEFAULT_PRESET,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    machine: Machine = AS_CORES_ALLOW,
    observer: Observer | None = None,
) -> Several:
    """Trains several trees of the same data with different seeds, and lets them vote; they share one cache of maps.

    Examples:
        >>> [run.folder.name for run in fit_seeds("photos/", "runs/three", seeds=3).runs]  # doctest: +SKIP
        ['seed-0', 'seed-1', 'seed-2']
    """
    if seeds < 2:
        raise ConfigError(f"expected at least 2 seeds to train several trees, got {seeds}; leave it out for one")
    config, out, observer = preset(preset_name).changed(settings or {}), Path(out), observer or Observer()
    each = {f"seed-{seed}": {"seed": seed} for seed in range(config.seed, config.seed + seeds)}
    runs = _train(config, data, out, each, machine, observer, resume=resume, overwrite=overwrite)
    votes = evaluate_ensemble([run.folder for run in runs], observer=observer).to_json()
    write_json(out / "ensemble.json", {"runs": list(each), **votes})
    return _written(out, runs, vote_table(votes, list(each)))


def cross_validate(
    data: Given,
    out: str | Path,
    *,
    folds: int,
    preset_name: str = DEFAULT_PRESET,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    machine: Machine = AS_CORES_ALLOW,
    observer: Observer | None = None,
) -> Several:
    """Cross-validation: each of `folds` parts is the test set of one tree; gives mean ± standard deviation.

    Examples:
        >>> cross_validate("photos/", "runs/folds", folds=5).table  # doctest: +SKIP
        Table(title='5 folds', ...)
    """
    config, out = preset(preset_name).changed(settings or {}), Path(out)
    if config.fold:
        raise ConfigError(f"expected either all folds or the one named {config.fold}, got both; leave one out")
    each = {f"fold-{part}": {"fold": f"{part}/{folds}"} for part in range(1, folds + 1)}
    if len(each) < 2:
        raise ConfigError(f"expected at least 2 folds, got {folds}")
    runs = _train(config, data, out, each, machine, observer or Observer(), resume=resume, overwrite=overwrite)
    table = fold_table([run.last_metrics for run in runs])
    write_json(out / "folds.json", {"runs": list(each), "table": [list(row) for row in (table.header, *table.rows)]})
    return _written(out, runs, table)


def fold_table(metrics: Sequence[Mapping[str, Any]]) -> Table:
    """The figures of each fold, and their mean ± standard deviation over folds."""
    columns = [
        *([one["accuracy"][strategy] for one in metrics] for strategy in ("soft", "max_path", "greedy")),
        [float(one["n_prototypes"]) for one in metrics],
        [one["path_length"]["greedy"]["mean"] for one in metrics],
    ]
    rows = [
        (f"{number + 1}", str(one["n_images"]), *(_cell(column[number], place) for place, column in enumerate(columns)))
        for number, one in enumerate(metrics)
    ]
    spread = (
        f"{_cell(statistics.fmean(column), place)} ± {_cell(statistics.stdev(column), place, unit=False)}"
        for place, column in enumerate(columns)
    )
    rows.append(("mean ± standard deviation", str(sum(one["n_images"] for one in metrics)), *spread))
    header = ("fold", "test photos", "soft", "max-path", "greedy", "prototypes", "questions asked")
    return Table(f"{len(metrics)} folds", header, tuple(rows))


def _cell(value: float, column: int, *, unit: bool = True) -> str:
    if column < 3:
        return percent(value, 1) if unit else f"{100 * value:.1f}"
    return f"{value:.1f}"


def _written(out: Path, runs: tuple[Run, ...], table: Table) -> Several:
    write_file(out / RESULTS, table.to_markdown().encode())
    return Several(out, runs, table)


def _train(
    config: Config,
    data: Given,
    out: Path,
    each: Mapping[str, Mapping[str, Any]],
    machine: Machine,
    observer: Observer,
    *,
    resume: bool,
    overwrite: bool,
) -> tuple[Run, ...]:
    """A run for each name, those that are finished left as they are if the whole is continued."""
    source = opened_again(data, out)
    if isinstance(source, ImageData):
        raise ConfigError("expected data that other processes can open, such as a path, a DataFrame or arrays")
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "settings.toml", config.to_toml().encode())
    words = ["--preset", str(out / "settings.toml"), *(["--resume"] if resume else []), *(["--overwrite"] * overwrite)]
    waiting = [
        _Child(name, out, [str(source), *words, *(word for key in own for word in (f"--{key}", str(own[key])))])
        for name, own in each.items()
        if not (resume and (out / name / _FINISHED).exists())
    ]
    jobs, threads = machine.shared_out(max(len(waiting), 1))
    share = "one thread" if threads == 1 else f"{threads} threads"
    observer.stage(f"{len(waiting)} of {len(each)} runs to train, {jobs} at a time, {share} each")
    try:
        _heed_termination()
        if waiting:
            share_maps(config.changed(each[waiting[0].name]), source, out, observer)
        _run_all(waiting, jobs, threads, observer)
    except KeyboardInterrupt:
        raise Interrupted from None
    return tuple(Run(out / name) for name in each)


@dataclass
class _Child:
    """A run in a process of its own; what it says is in a file beside it."""

    name: str
    out: Path
    words: list[str]
    process: subprocess.Popen[bytes] | None = None

    def start(self, threads: int) -> None:
        home = str(Path(prototree.__file__).parents[1])
        path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH", "")]))
        few = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        command = [sys.executable, "-m", "prototree", "train", *self.words, "--out", str(self.out / self.name)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl+C reaches us alone; we tell them
                env={**os.environ, **few, "PYTHONPATH": path},
            )

    @property
    def log(self) -> Path:
        return self.out / f"{self.name}.log"

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return (lines or ["no output"])[-1].removeprefix("error: ")


def _run_all(waiting: Iterable[_Child], jobs: int, threads: int, observer: Observer) -> None:
    """Some at a time. If one fails, no more are started; the error is raised once the running ones are done."""
    left, running, failed = list(waiting), list[_Child](), list[_Child]()
    try:
        while left or running:
            while left and len(running) < jobs and not failed:
                running.append(left.pop(0))
                running[-1].start(threads)
                observer.stage(f"{running[-1].name} has started; its output is in {running[-1].log}")
            if failed and not running:
                break
            time.sleep(_LOOK_SECONDS)
            for child in [one for one in running if one.process is not None and one.process.poll() is not None]:
                running.remove(child)
                if child.process is not None and child.process.returncode:
                    failed.append(child)
                else:
                    observer.stage(f"{child.name} is done")
    finally:
        _stop(running)
    if any(one.process is not None and one.process.returncode in _STOPPED for one in failed):
        raise Interrupted
    if failed:
        raise TrainError(f"{failed[0].name} failed: {failed[0].last_words()} (its output is in {failed[0].log})")


def _heed_termination() -> None:
    """A request to end works like Ctrl+C; only the main thread can receive it."""
    if threading.current_thread() is threading.main_thread():

        def end(*_: object) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGTERM, end)


def _stop(running: Sequence[_Child]) -> None:
    """Tells those that are left to save their state and end."""
    processes = [child.process for child in running if child.process is not None]
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()

"""The folder of a run: new, resumed or replaced, locked, cleaned up after a kill, finished."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prototree.config import Config
from prototree.core import checkpoint
from prototree.core.checkpoint import PROJECTED, PRUNED, TRAINED
from prototree.errors import ConfigError, ProtoTreeError
from prototree.evaluation.published import UNCONSTRAINED
from prototree.features.cache import FOLDER as FEATURES
from prototree.features.cache import USED, remove_unfinished
from prototree.io import lock_folder, make_folder, read_json, remove_leftovers, write_file
from prototree.run import ASSETS, CONFIG, ERRORS, METRICS, NOTES, RESULTS, Run
from prototree.training import distributed
from prototree.training.head import FOLDER as BASELINE
from prototree.training.loop import CHECKPOINTS, STATE, check_resume_key

RESUME_KEY = "resume_key"  # in metrics.json: what must be the same for the run to be resumed
REPLACED = "replaced"  # folder in a run: what --overwrite replaces, until the new run is finished
_TREES = {"train": TRAINED, "prune": PRUNED, "project": PROJECTED}
_RUN_FILES = (
    CONFIG, "log.csv", METRICS, NOTES, CHECKPOINTS, BASELINE, FEATURES, USED, TRAINED, PRUNED, PROJECTED, UNCONSTRAINED,
    ERRORS, RESULTS, "plots", ASSETS,
)  # fmt: skip


def check_outside(out: Path, data: Any) -> None:
    """Refuse a run inside the folder of its images, where it would look like a class."""
    if isinstance(data, str | Path) and Path(data).is_dir() and out.resolve().is_relative_to(Path(data).resolve()):
        raise ConfigError(f"expected a run outside of the images, got {out} in {data}; choose a folder beside it")


def prepare(folder: Path, config: Config, key: dict[str, Any], *, resume: bool, overwrite: bool, train: bool) -> Run:
    """Make a folder ready for a new run, or one to resume or replace. A refusal leaves everything as it is."""
    run = Run(folder)
    if distributed.is_main():
        if train and not resume:
            put_back(folder)
        used, has_begun = _used(folder), bool(_states(folder) or checkpoint.last_stage(folder))
        if used and train and overwrite:
            _set_aside(folder)
        elif has_begun and train and not resume:
            raise ConfigError(
                f"{folder} already holds a run ({', '.join(used[:3])}); continue it with --resume, replace it with "
                "--overwrite, or choose another folder"
            )
        elif used and train and not resume:  # failed before it began, as by a wrong name of a network
            (folder / METRICS).unlink(missing_ok=True)
        elif used and train:
            then = run.metrics.get(RESUME_KEY)
            if then is not None or has_begun:  # else killed before it began
                check_resume_key(folder, json.dumps(then or {}, sort_keys=True), json.dumps(key, sort_keys=True))
        clean(folder)
        write_file(folder / CONFIG, config.to_toml().encode())
    distributed.barrier()
    return run


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[None]:
    """Keep a run that is to be replaced until the new one is finished; if that cannot even begin, put it back.

    A new folder in which nothing could begin, because something was wrong with settings or data, is removed again.
    """
    was_used = bool(_used(folder))
    try:
        yield
    except BaseException as error:
        if distributed.is_main():
            put_back(folder)
            if isinstance(error, ProtoTreeError) and not was_used and set(_used(folder)) <= {CONFIG, METRICS}:
                for name in _used(folder):
                    _remove(folder / name)
                with contextlib.suppress(OSError):  # it has other files
                    folder.rmdir()
        raise
    if distributed.is_main():
        shutil.rmtree(folder / REPLACED, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Undo `--overwrite` if the new run has nothing yet that it could be resumed from."""
    if not (folder / REPLACED).exists() or _states(folder) or checkpoint.last_stage(folder):
        return
    for name in _used(folder):
        _remove(folder / name)
    for path in sorted((folder / REPLACED).iterdir()):
        os.replace(path, folder / path.name)
    (folder / REPLACED).rmdir()


def _set_aside(folder: Path) -> None:
    """Move a run out of the way of a new one; one that was never finished itself makes way for good."""
    aside = folder / REPLACED
    if aside.exists():
        for name in _used(folder):
            _remove(folder / name)
    aside.mkdir(exist_ok=True)
    for name in _used(folder):
        os.replace(folder / name, aside / name)


def _states(folder: Path) -> list[Path]:
    return sorted((folder / CHECKPOINTS).rglob(STATE))


def _used(folder: Path) -> list[str]:
    return [name for name in _RUN_FILES if (folder / name).exists()]


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder of a run, made if need be, for this program; its processes are one program."""
    if distributed.is_main():
        make_folder(folder)
    with lock_folder(folder) if distributed.is_main() else contextlib.nullcontext():
        yield


def clean(folder: Path) -> None:
    """Remove what processes that were killed have left, and finish what they had begun to write."""
    remove_leftovers(folder.rglob(".*"))
    remove_unfinished(folder / FEATURES)
    checkpoint.settle(folder)


def is_finished(run: Run, stages: Sequence[str]) -> bool:
    """Tell whether each of these stages is done and its output is there."""
    there = all((run.folder / _TREES[stage] / checkpoint.TREE).exists() for stage in stages if stage in _TREES)
    if "evaluate" in stages:
        there = there and (run.folder / RESULTS).exists()
    return there and all(stage in run.metrics.get("seconds", {}) for stage in stages)


def describe_progress(folder: str | Path) -> str:
    """Describe what an interrupted run has on disk: checkpoints of training, trees.

    >>> describe_progress("runs/photos")
    'kept in runs/photos: head (38 epochs), tree (4 epochs)'
    """
    folder = Path(folder)
    parts = [
        f"{path.parent.relative_to(folder / CHECKPOINTS)} ({header.get('epoch')} epochs)"
        for path in _states(folder)
        if "kind" in (header := _read_or_empty(path))
    ]
    parts += [stage for stage in reversed(checkpoint.STAGES) if (folder / stage / checkpoint.TREE).exists()]
    parts += [METRICS] if "stages" in _read_or_empty(folder / METRICS) else []
    parts += [f"{REPLACED} (the run that is being replaced)"] if (folder / REPLACED).exists() else []
    return f"kept in {folder}: {', '.join(parts)}" if parts else f"nothing had been finished yet in {folder}"


def _read_or_empty(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ProtoTreeError:
        return {}

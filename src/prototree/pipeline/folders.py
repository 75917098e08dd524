"""The folder of a run: free or to be continued, tidied up after a kill, finished, and what it keeps."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prototree import locks
from prototree.config import Config
from prototree.core import checkpoint
from prototree.errors import ConfigError, ProtoTreeError
from prototree.features.cache import remove_unfinished
from prototree.files import make_folder, read_json, remove_leftovers, write_file
from prototree.pipeline.stages import OWN_FILES
from prototree.run import CONFIG, METRICS, RESULTS, Run
from prototree.training import distributed
from prototree.training.identity import expect_same
from prototree.training.loop import STATE

IDENTITY = "identity"  # in metrics.json: what must be the same for the run to be continued
REPLACED = "replaced"  # folder in a run: what --overwrite replaces, until the new run is finished
_TREES = {"train": checkpoint.TRAINED, "prune": checkpoint.PRUNED, "project": checkpoint.PROJECTED}


def prepare(
    folder: Path, config: Config, identity: dict[str, Any], *, resume: bool, overwrite: bool, train: bool
) -> Run:
    """An empty folder, or one whose run is to be continued or replaced. A refusal leaves everything as it is."""
    run = Run(folder)
    if distributed.is_first():
        if train and not resume:
            put_back(folder)
        used = _used(folder)
        if used and train and overwrite:
            _set_aside(folder)
        elif used and train and not resume:
            raise ConfigError(
                f"{folder} already holds a run ({', '.join(used[:3])}); continue it with --resume, replace it with "
                "--overwrite, or choose another folder"
            )
        elif used and train:
            _expect_same_run(run, identity)
        clean(folder)
        write_file(folder / CONFIG, config.to_toml().encode())
    distributed.wait_for_all()
    return run


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[None]:
    """Keep a run that is to be replaced until the new one is finished; if that cannot even begin, put it back."""
    try:
        yield
    except BaseException:
        if distributed.is_first():
            put_back(folder)
        raise
    if distributed.is_first():
        shutil.rmtree(folder / REPLACED, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Undo `--overwrite` if the new run has nothing yet that it could be continued from."""
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
    """States that an interrupted training goes on from."""
    return [path for path in sorted(folder.rglob(STATE)) if REPLACED not in path.relative_to(folder).parts]


def _used(folder: Path) -> list[str]:
    return [name for name in OWN_FILES if (folder / name).exists()]


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder of a run, made if need be, for this program alone; its processes are one program."""
    if distributed.is_first():
        make_folder(folder)
    with locks.held(folder) if distributed.is_first() else contextlib.nullcontext():
        yield


def clean(folder: Path) -> None:
    """Removes what processes that were killed have left, and finishes what they had begun to write."""
    remove_leftovers(folder.rglob(".*"))
    remove_unfinished(folder / "cache")
    checkpoint.settle(folder)


def is_finished(run: Run, stages: Sequence[str]) -> bool:
    """Whether each of these stages has been done, and what it made is there."""
    metrics = run.metrics
    there = all((run.folder / _TREES[stage] / checkpoint.TREE).exists() for stage in stages if stage in _TREES)
    if "evaluate" in stages:
        there = there and (run.folder / RESULTS).exists()
    return there and all(stage in metrics.get("seconds", {}) for stage in stages)


def what_is_kept(folder: str | Path) -> str:
    """What a run that was stopped has on disk, in words: maps, states of training, trees.

    >>> what_is_kept("runs/photos")
    'kept in runs/photos: cache (0.12 GB of maps), head (38 epochs), last (4 epochs and 12 batches)'
    """
    folder = Path(folder)
    maps = [path for path in folder.glob("cache/*.f16") if path.with_suffix(".json").exists()]
    parts = [f"cache ({sum(path.stat().st_size for path in maps) / 1e9:.2f} GB of maps)"] if maps else []
    parts += [_state_words(folder, path) for path in _states(folder) if "kind" in _readable(path)]
    parts += [stage for stage in reversed(checkpoint.STAGES) if (folder / stage / checkpoint.TREE).exists()]
    parts += [METRICS] if "stages" in _readable(folder / METRICS) else []
    parts += [f"{REPLACED} (the run that is being replaced)"] if (folder / REPLACED).exists() else []
    return f"kept in {folder}: {', '.join(parts)}" if parts else f"nothing had been finished yet in {folder}"


def _state_words(folder: Path, path: Path) -> str:
    header = _readable(path)
    batches = f" and {header['batch']} batches" if header.get("batch") else ""
    return f"{path.parent.relative_to(folder)} ({header.get('epoch')} epochs{batches})"


def _readable(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ProtoTreeError:
        return {}


def _expect_same_run(run: Run, now: dict[str, Any]) -> None:
    """Compares with what the run was begun with; where it does not say, with the settings in its configuration."""
    then = run.metrics.get(IDENTITY)
    if then is None:
        settings = run.config.identity() if (run.folder / CONFIG).exists() else {}
        known = json.loads(json.dumps(settings))
        then = {key: known.get(key, value) for key, value in now.items()}
    expect_same(run.folder, json.dumps(then, sort_keys=True), json.dumps(now, sort_keys=True))

"""From a folder of images to a small, readable tree: train → prune → project → evaluate."""

import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prototree.config import AUTO_PRESET, Config, preset
from prototree.data import ImageData, open_data
from prototree.errors import ConfigError
from prototree.evaluation.ensembles import EnsembleMetrics, evaluate_ensemble
from prototree.files import make_folder, write_file
from prototree.pipeline.stages import OWN_FILES, STAGES, Stages
from prototree.progress import Observer
from prototree.run import CONFIG, Run
from prototree.training import distributed
from prototree.tree.ensemble import Ensemble
from prototree.tree.model import ProtoTree
from prototree.tree.pruning import default_threshold


def fit(
    data: str | Path | ImageData,
    out: str | Path,
    *,
    preset_name: str = AUTO_PRESET,
    settings: Mapping[str, Any] | None = None,
    stages: Iterable[str] = STAGES,
    resume: bool = False,
    overwrite: bool = False,
    start: ProtoTree | None = None,
    observer: Observer | None = None,
) -> Run:
    """From a folder of images to a small readable tree and its numbers. Also runs under `torchrun`.

    `start` is a tree whose prototypes stay where they are while the network learns with them.

    >>> run = prototree.fit("photos/", "runs/photos", settings={"seed": 1})
    >>> run.metrics["stages"]["projected"]["accuracy"]
    """
    return train_run(
        preset(preset_name).changed(settings or {}),
        data,
        out,
        stages=stages,
        resume=resume,
        overwrite=overwrite,
        start=start,
        observer=observer,
    )


def train_run(
    config: Config,
    data: str | Path | ImageData,
    out: str | Path,
    *,
    stages: Iterable[str] = STAGES,
    resume: bool = False,
    overwrite: bool = False,
    start: ProtoTree | None = None,
    observer: Observer | None = None,
) -> Run:
    """`fit` with a whole configuration."""
    wanted = set(stages)
    chosen = [stage for stage in STAGES if stage in wanted]
    if unknown := wanted - set(STAGES):
        raise ConfigError(f"unknown stage {sorted(unknown)[0]!r}; expected some of {', '.join(STAGES)}")
    with distributed.processes() as device:
        images = data if isinstance(data, ImageData) else open_source(data, config)
        config, images = derived(config, images), _sample(images, config)
        run = _prepare_folder(Path(out), config, resume=resume, overwrite=overwrite, train="train" in chosen)
        run.note(source=str(data if isinstance(data, str | Path) else images.root))
        work = Stages(run, images, config, device, observer or Observer(), start)
        for stage in chosen:
            began = time.monotonic()
            getattr(work, stage)()
            run.note(seconds={**run.metrics.get("seconds", {}), stage: round(time.monotonic() - began, 1)})
            distributed.wait_for_all()
    return run


def open_source(source: str | Path, config: Config) -> ImageData:
    """Opens a data set in every process; the first may have to draw or to scan it."""
    with distributed.one_after_the_other():
        return open_data(source, test_share=config.test_share, strict=config.strict)


def derived(config: Config, data: ImageData) -> Config:
    """The settings with everything filled in that follows from the data."""
    return replace(
        config,
        threshold=config.threshold or default_threshold(data.n_classes),
        resize=config.resize or config.image_size,
        recipe=config.recipe.derived(data),
    )


def redo(
    folder: str | Path,
    stage: str,
    *,
    data: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> Run:
    """One stage of a run again, with other settings or on other data with the same classes.

    >>> prototree.redo("runs/photos", "prune", settings={"threshold": 0.05})
    """
    run = Run.open(folder)
    config = run.config.changed(settings or {})
    with distributed.processes() as device:
        images = _sample(run.data(data), config)
        getattr(Stages(run, images, config, device, observer or Observer()), stage)()
    return run


def combine(
    folders: Iterable[str | Path], *, data: str | Path | None = None, observer: Observer | None = None
) -> EnsembleMetrics:
    """The trees of several runs as one ensemble, judged on the test photos of the first run's data, or of others.

    >>> prototree.combine(["runs/a", "runs/b", "runs/c"]).all_trees.accuracy["soft"]
    """
    runs = [Run.open(folder) for folder in folders]
    ensemble = Ensemble([run.tree() for run in runs])
    observer = observer or Observer()
    with distributed.processes() as device:
        images = runs[0].data(data)
        observer.stage(f"{len(runs)} trees vote on {len(images.test)} test photos")
        work = Stages(runs[0], images, runs[0].config, device, observer)
        batches = work.test_batches(ensemble.trees[0].to(device))
        for tree in ensemble.trees:
            tree.to(device)
        photos = ((one.values.to(device), one.labels.to(device)) for one in batches.epoch(0))
        return evaluate_ensemble(ensemble, photos)


def _sample(data: ImageData, config: Config) -> ImageData:
    return data.bootstrap(config.seed) if config.bootstrap else data


def _prepare_folder(folder: Path, config: Config, *, resume: bool, overwrite: bool, train: bool) -> Run:
    """An empty folder, or one whose run is to be continued or replaced."""
    run = Run(folder)
    if distributed.is_first():
        used = [name for name in OWN_FILES if (folder / name).exists()]
        if used and train and overwrite:
            for name in used:
                path = folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif used and train and not resume:
            raise ConfigError(
                f"{folder} already holds a run ({', '.join(used[:3])}); continue it with --resume, replace it with "
                "--overwrite, or choose another folder"
            )
        make_folder(folder)
        write_file(folder / CONFIG, config.to_toml().encode())
    distributed.wait_for_all()
    return run

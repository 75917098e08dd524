"""From a folder of images to a small, readable tree: train → prune → project → evaluate."""

import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prototree import files
from prototree.config import AUTO_PRESET, Config, default_height, preset
from prototree.data import ImageData, open_data
from prototree.errors import CheckpointError, ConfigError, DataError
from prototree.evaluation.ensembles import Ensemble, EnsembleMetrics, evaluate_ensemble
from prototree.pipeline.stages import OWN_FILES, STAGES, Observer, Run, Work
from prototree.training import distributed
from prototree.tree.pruning import default_threshold

__all__ = ["STAGES", "Observer", "Run", "combine", "derived", "existing_run", "fit", "redo"]


def fit(
    data: str | Path | ImageData,
    out: str | Path,
    *,
    preset_name: str = AUTO_PRESET,
    settings: Mapping[str, Any] | None = None,
    stages: Iterable[str] = STAGES,
    resume: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
) -> Run:
    """From a folder of images to a small readable tree and its numbers. Also runs under `torchrun`.

    >>> run = prototree.fit("photos/", "runs/photos", settings={"height": 8})
    >>> run.metrics["stages"]["projected"]["accuracy"]
    """
    wanted = set(stages)
    chosen = [stage for stage in STAGES if stage in wanted]
    if unknown := wanted - set(STAGES):
        raise ConfigError(f"unknown stage {sorted(unknown)[0]!r}; expected some of {', '.join(STAGES)}")
    config, observer = preset(preset_name).changed(settings or {}), observer or Observer()
    with distributed.processes() as device:
        images = data if isinstance(data, ImageData) else open_source(data, config)
        config, images = derived(config, images), _sample(images, config)
        run = _prepare_folder(Path(out), config, resume=resume, overwrite=overwrite, train="train" in chosen)
        run.note(source=str(data if isinstance(data, str | Path) else images.root))
        work = Work(run, images, config, device, observer)
        for stage in chosen:
            start = time.monotonic()
            getattr(work, stage)()
            run.note(seconds={**run.metrics.get("seconds", {}), stage: round(time.monotonic() - start, 1)})
            distributed.wait_for_all()
    return run


def open_source(source: str | Path, config: Config) -> ImageData:
    """Opens a data set in every process, one after the other: the first may have to draw or to scan it."""
    if not distributed.is_first():
        distributed.wait_for_all()
    data = open_data(source, test_share=config.test_share, strict=config.strict)
    if distributed.is_first():
        distributed.wait_for_all()
    return data


def derived(config: Config, data: ImageData) -> Config:
    """The settings with everything filled in that follows from the data."""
    resize = config.resize or config.image_size
    return config.changed(
        {
            "height": config.height or default_height(data.n_classes),
            "threshold": config.threshold or default_threshold(data.n_classes),
            "resize": resize,
        }
    )


def existing_run(folder: str | Path) -> Run:
    """The run in a folder, or an error that says that there is none."""
    run = Run(Path(folder))
    if not (run.folder / "config.toml").exists():
        raise CheckpointError(f"expected a run in {run.folder}, but there is no config.toml; train one first")
    return run


def redo(
    folder: str | Path,
    stage: str,
    *,
    data: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> Run:
    """One stage of a run again, with other settings or on other data with the same classes."""
    run = existing_run(folder)
    config = run.config.changed(settings or {})
    images = _data_of(run, data, config)
    with distributed.processes() as device:
        getattr(Work(run, _sample(images, config), config, device, observer or Observer()), stage)()
    return run


def combine(
    folders: Iterable[str | Path], *, data: str | Path | None = None, observer: Observer | None = None
) -> EnsembleMetrics:
    """The trees of several runs as one ensemble, judged on the test photos of the first run's data, or of others.

    >>> prototree.combine(["runs/a", "runs/b", "runs/c"]).all_trees.accuracy["soft"]
    """
    runs = [existing_run(folder) for folder in folders]
    ensemble = Ensemble([run.tree() for run in runs])
    images = _data_of(runs[0], data, runs[0].config)
    observer = observer or Observer()
    observer.stage(f"{len(runs)} trees vote on {len(images.test)} test photos")
    with distributed.processes() as device:
        work = Work(runs[0], images, runs[0].config, device, observer)
        batches = work.test_batches(ensemble.trees[0].to(device))
        for tree in ensemble.trees:
            tree.to(device)
        photos = ((one.values.to(device), one.labels.to(device)) for one in batches.epoch(0))
        return evaluate_ensemble(ensemble, photos)


def _data_of(run: Run, data: str | Path | None, config: Config) -> ImageData:
    """The data a run was made with, or other data with the same classes."""
    source = data or run.source
    images = open_source(source, config)
    if images.class_names != run.tree().class_names:
        raise DataError(f"expected the classes of the run in {source}, got others; choose the data it was made with")
    return images


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
        folder.mkdir(parents=True, exist_ok=True)
        files.write_file(folder / "config.toml", config.to_toml().encode())
    distributed.wait_for_all()
    return run

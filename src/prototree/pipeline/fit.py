"""From a folder of images to a small, readable tree: train → prune → project → evaluate."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prototree.config import DEFAULT_PRESET, Config, preset
from prototree.core.ensemble import Ensemble
from prototree.core.model import ProtoTree
from prototree.core.pruning import default_threshold
from prototree.data import ImageData, open_data
from prototree.data.duplicates import warn_of_copies
from prototree.data.in_memory import write_given
from prototree.data.loading import ViewDataset
from prototree.data.views import evaluation_views
from prototree.errors import ConfigError, DataError
from prototree.evaluation.ensembles import EnsembleMetrics, ensemble_metrics
from prototree.evaluation.metrics import Metrics
from prototree.evaluation.metrics import evaluate as evaluate_maps
from prototree.features.batches import CachedBatches, looking, maps_of
from prototree.features.cache import MapBatch, kept_sets
from prototree.pipeline import folders
from prototree.pipeline.stages import STAGES, Stages, identity_of
from prototree.progress import Observer
from prototree.run import Run, run_or_tree_at
from prototree.training import distributed

Given = Any
"""A path, `ImageData`, or photos and labels as `prototree.data.in_memory` takes them."""


def fit(
    data: Given,
    out: str | Path,
    *,
    preset_name: str = DEFAULT_PRESET,
    settings: Mapping[str, Any] | None = None,
    stages: Iterable[str] = STAGES,
    resume: bool = False,
    overwrite: bool = False,
    start: ProtoTree | None = None,
    observer: Observer | None = None,
) -> Run:
    """Trains, prunes, projects and evaluates a tree, as `prototree train` does. Also runs under `torchrun`.

    `data` is a folder, a CSV list, or what `prototree.data.in_memory` takes: a DataFrame (path, label, perhaps split),
    a pair of images and labels, a dataset of torch or Hugging Face, or a mapping from train and test to these. `start`
    is a tree whose prototypes stay where they are while the network learns with them.

    Examples:
        >>> run = fit("photos/", "runs/new", settings={"seed": 1})
        >>> sorted(run.last_metrics["accuracy"])
        ['greedy', 'max_path', 'soft']
        >>> fit({"train": (pixels, labels), "test": (pixels, labels)}, "runs/b")  # doctest: +SKIP
        Run(folder=PosixPath('runs/b'))
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
    data: Given,
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
        data = opened_again(data, out)
        images = data if isinstance(data, ImageData) else open_source(data, config)
        config, images = derived(config, images), _sample(images, config)
        identity, observer, train = identity_of(config, images, start), observer or Observer(), "train" in chosen
        with folders.held(Path(out)), folders.replacing(Path(out)):
            run = folders.prepare(Path(out), config, identity, resume=resume, overwrite=overwrite, train=train)
            if train and folders.is_finished(run, chosen):
                observer.stage(f"nothing to do: {run.folder} is finished ({', '.join(chosen)})")
                return run
            if train and distributed.is_first():
                warn_of_copies(images)
            source = str(data if isinstance(data, str | Path) else images.root)
            run.note(source=source, **({folders.IDENTITY: identity} if train else {}))
            work = Stages(run, images, config, device, observer, start)
            for stage in chosen:
                began = time.monotonic()
                getattr(work, stage)()
                run.note(seconds={**run.metrics.get("seconds", {}), stage: round(time.monotonic() - began, 1)})
                distributed.wait_for_all()
    return run


def opened_again(data: Given, out: str | Path) -> str | Path | ImageData:
    """The data as something that can be opened again; what came as objects is written beside the run."""
    if isinstance(data, str | Path | ImageData):
        return data
    with distributed.one_after_the_other():
        return write_given(data, Path(out).resolve().parent / "prototree-data")


def open_source(source: str | Path, config: Config) -> ImageData:
    """Opens a data set in every process; the first may have to draw or to scan it."""
    with distributed.one_after_the_other():
        return open_data(source, test_fraction=config.test_fraction, strict=config.strict, fold=config.fold)


def derived(config: Config, data: ImageData) -> Config:
    """The settings with everything filled in that follows from the data."""
    return replace(
        config,
        threshold=config.threshold or default_threshold(data.n_classes),
        resize=config.resize or config.image_size,
        recipe=config.recipe.derived(data),
    )


def share_maps(config: Config, source: str | Path, out: Path, observer: Observer) -> None:
    """Computes the maps that runs in `out` have in common, whatever their seed or the part that they leave out."""
    if config.bootstrap:  # of other photos for each seed
        return
    with distributed.processes() as device:
        images = open_source(source, config)
        if distributed.is_first():
            warn_of_copies(images)
        config = derived(config, images)
        # Of no run yet, but its maps lie where those of runs beside it will look for them.
        with TemporaryDirectory(prefix="preparing-", dir=out) as nobody:
            config.recipe.share_maps(Stages(Run(Path(nobody)), images, config, device, observer).workshop)


def rerun(
    folder: str | Path,
    stage: str,
    *,
    data: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> Run:
    """Runs one stage of a run again, with other settings or on other data with the same classes.

    Examples:
        >>> run = rerun("runs/photos", "evaluate")
        >>> sorted(run.last_metrics["accuracy"])
        ['greedy', 'max_path', 'soft']
    """
    run = Run.open(folder).expect_changeable()
    config = run.config.changed(settings or {})
    with distributed.processes() as device, folders.held(run.folder):
        if distributed.is_first():
            folders.clean(run.folder)
        images = _sample(run.data(data), config)
        getattr(Stages(run, images, config, device, observer or Observer()), stage)()
    return run


def evaluate(
    run_or_tree: Run | ProtoTree | str | Path, data: str | Path | ImageData | Iterable[MapBatch] | None = None
) -> Metrics:
    """All figures of a tree, or of a run's last one, from one pass over test photos; nothing is written.

    `data` are the test photos of other data with the same classes, or feature maps with labels and places; a run is
    otherwise tested on its own. `redo` evaluates all stages of a run and keeps what it finds.

    Examples:
        >>> evaluate("runs/photos").n_images
        9
        >>> evaluate(tree, [(maps, labels, places)]).n_images  # B×D×H×W, B, B
        2
    """
    given = run_or_tree_at(run_or_tree)
    tree = given.tree() if isinstance(given, Run) else given.eval()
    if data is None or isinstance(data, str | Path | ImageData):
        data = _test_maps(given, tree, data)
    return evaluate_maps(tree, data)


def _test_maps(given: Run | ProtoTree, tree: ProtoTree, data: str | Path | ImageData | None) -> Iterable[MapBatch]:
    """The feature maps of test photos, from what a run keeps or through the network."""
    if isinstance(given, ProtoTree) and data is None:
        raise ConfigError("a tree by itself does not say what to test it on; expected data with the same classes")
    run = given if isinstance(given, Run) else None
    if not isinstance(data, ImageData):
        data = run.data(data) if run is not None else open_data(data or "")
    if data.class_names != tree.class_names:
        raise DataError("expected the classes of the tree in the data, got others; choose data with the same classes")
    dataset = ViewDataset(data.test, evaluation_views, tree.preprocessing)
    sets = kept_sets(data, run.config.recipe.source_views(data), tree.preprocessing) if run is not None else ()
    batches = looking(tree.features, dataset, run=run.folder if run is not None else None, among=sets)
    return maps_of(batches, tree.features, tree.prototypes.device)


def evaluate_ensemble(
    folders: Iterable[str | Path], *, data: str | Path | None = None, observer: Observer | None = None
) -> EnsembleMetrics:
    """The trees of several runs as one ensemble, evaluated on the test photos of the first run's data, or of others.

    Examples:
        >>> found = evaluate_ensemble(["runs/photos", "runs/photos"])
        >>> found.n_images, len(found.alone), sorted(found.all_trees.accuracy)
        (9, 2, ['greedy', 'max_path', 'soft'])
    """
    runs = [Run.open(folder) for folder in folders]
    if len(runs) < 2:
        raise ConfigError(f"expected at least two runs in an ensemble, got {len(runs)}; name more, or evaluate the one")
    ensemble = Ensemble([run.tree() for run in runs])
    observer = observer or Observer()
    with distributed.processes() as device:
        images = runs[0].data(data)
        observer.stage(f"{len(runs)} trees vote on {len(images.test)} test photos")
        work = Stages(runs[0], images, runs[0].config, device, observer)
        for tree in ensemble.trees:
            tree.to(device)
        batches = work.test_batches(ensemble.trees[0], kept=ensemble.shares_backbone)
        photos = ((one.values.to(device), one.labels.to(device)) for one in batches.epoch(0))
        vote = ensemble.ballots_of_map if isinstance(batches, CachedBatches) else ensemble.ballots
        return ensemble_metrics(ensemble, photos, vote)


def _sample(data: ImageData, config: Config) -> ImageData:
    return data.bootstrap(config.seed) if config.bootstrap else data

"""From a folder of images to a small, readable tree: train → prune → project → evaluate."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, overload

import torch

from prototree.config import DEFAULT_PRESET, Config, DistillSettings, load_preset
from prototree.core.ensemble import Ensemble
from prototree.core.model import ProtoTree
from prototree.core.projection import MapBatch
from prototree.data import ImageData, open_data
from prototree.data.crops import evaluation_views
from prototree.data.duplicates import warn_about_duplicates
from prototree.data.in_memory import write_in_memory
from prototree.data.loader import ViewDataset
from prototree.errors import ConfigError, DataError
from prototree.evaluation.metrics import EnsembleMetrics, Votes, ensemble_metrics, evaluate_maps
from prototree.evaluation.schema import Metrics
from prototree.features.cache import EvalBatches, eval_batches
from prototree.pipeline import folders
from prototree.pipeline.stages import STAGES, RunStages, resume_key
from prototree.progress import Observer
from prototree.run import Run, run_or_tree_at
from prototree.training import distributed
from prototree.training.distill import compute_features, crops_of

DataLike = Any
"""A path, `ImageData`, or images and labels as `prototree.data.in_memory` takes them."""


def fit(
    data: DataLike,
    out: str | Path,
    *,
    preset: str | Config = DEFAULT_PRESET,
    settings: Mapping[str, Any] | None = None,
    stages: Iterable[str] = STAGES,
    resume: bool = False,
    overwrite: bool = False,
    start: ProtoTree | None = None,
    observer: Observer | None = None,
) -> Run:
    """Train, prune, project and evaluate a tree, as `prototree train` does. Also runs under `torchrun`.

    Args:
        data: A folder, a CSV list, a DataFrame (path, label, perhaps split and group), a pair of images and labels, a
            dataset of torch or Hugging Face, or a mapping from train and test to these.
        out: Folder to write the run to.
        preset: Name of a preset, path of a TOML file, or a whole configuration.
        settings: Settings by name, which replace those of the preset.
        stages: Which of train, prune, project and evaluate to run.
        resume: Continue an interrupted run.
        overwrite: Replace a run that exists, once the new one is finished.
        start: A tree whose prototypes stay at their patches while the head is trained.
        observer: Progress callbacks.

    Returns:
        The finished run.

    Raises:
        ConfigError: A setting or stage is unknown or out of range, or `out` already holds a run.
        DataError: A tree cannot be trained on the data.
        CheckpointError: The run to resume was begun with other settings or data, or is damaged.

    Examples:
        >>> run = fit("photos/", "runs/new", settings={"seed": 1})
        >>> sorted(run.last_metrics["accuracy"])
        ['greedy', 'max_path', 'soft']
        >>> fit({"train": (pixels, labels), "test": (pixels, labels)}, "runs/b")  # doctest: +SKIP
        Run(folder=PosixPath('runs/b'))
    """
    config = (preset if isinstance(preset, Config) else load_preset(preset)).replace(settings or {})
    if isinstance(stages, str):
        raise ConfigError(f"expected a list of stages, got {stages!r}; write [{stages!r}]")
    wanted = set(stages)
    chosen = [stage for stage in STAGES if stage in wanted]
    if unknown := wanted - set(STAGES):
        raise ConfigError(f"unknown stage {sorted(unknown)[0]!r}; expected some of {', '.join(STAGES)}")
    folders.check_outside(Path(out), data)
    with distributed.process_group() as device:
        data = materialise(data, out)
        images = data if isinstance(data, ImageData) else open_source(data, config)
        config, images = config.for_data(images.n_classes), _sample(images, config)
        key, observer, train = resume_key(config, images, start), observer or Observer(), "train" in chosen
        with folders.locked(Path(out)), folders.replacing(Path(out)):
            run = folders.prepare(Path(out), config, key, resume=resume, overwrite=overwrite, train=train)
            if train and folders.is_finished(run, chosen):
                observer.stage(f"nothing to do: {run.folder} is finished ({', '.join(chosen)})")
                return run
            if distributed.is_main():
                if train:
                    warn_about_duplicates(images)
                source = str(data if isinstance(data, str | Path) else images.root)
                run.update_metrics(source=source, **({folders.RESUME_KEY: key} if train else {}))
            work = RunStages(run, images, config, device, observer, start)
            for stage in chosen:
                _run_stage(work, stage)
    return run


def _run_stage(work: RunStages, stage: str) -> None:
    """Run a stage and note its time; all but gradient descent on images happens in the main process alone."""
    began = time.monotonic()
    if stage == "train" and not work.config.recipe.frozen_backbone:
        work.train()
        distributed.barrier()
    with distributed.main_process_only() as is_main:
        if is_main:
            if stage != "train" or work.config.recipe.frozen_backbone:
                getattr(work, stage)()
            seconds = {**work.run.metrics.get("seconds", {}), stage: round(time.monotonic() - began, 1)}
            work.run.update_metrics(seconds=seconds)


def materialise(data: DataLike, out: str | Path) -> str | Path | ImageData:
    """Return data that can be opened again; what came as objects is written beside the run."""
    if isinstance(data, str | Path | ImageData):
        return data
    with distributed.main_first():
        return write_in_memory(data, Path(out).resolve().parent / "prototree-data")


def open_source(source: str | Path, config: Config) -> ImageData:
    """Open a data set in every process; the first may have to draw or to scan it."""
    with distributed.main_first():
        strict = config.fail_on_bad_images
        return open_data(source, test_fraction=config.test_fraction, strict=strict, fold=config.fold)


def precompute_features(config: Config, source: str | Path, out: Path, observer: Observer) -> None:
    """Compute the feature maps that runs in `out` have in common, whatever their seed or the fold they leave out."""
    if config.bootstrap or config.pretrain_epochs or not isinstance(config.recipe, DistillSettings):
        return
    images = open_source(source, config)
    config = config.for_data(images.n_classes)
    recipe = config.recipe
    assert isinstance(recipe, DistillSettings)
    if recipe.finetune_blocks:
        return
    warn_about_duplicates(images)
    # Of no run yet, but its maps lie where those of runs beside it will look for them.
    with TemporaryDirectory(prefix="preparing-", dir=out) as nobody:
        work = RunStages(Run(Path(nobody)), images, config, _device(), observer)
        backbone = work.context.backbone()
        if backbone.weights:
            backbone.crops = crops_of(recipe)
            compute_features(work.context, recipe, backbone, backbone.crops)
            work.context.cache.full(backbone, ViewDataset(images.test, evaluation_views, backbone.preprocessing))


def rerun(
    folder: str | Path,
    stage: str,
    *,
    data: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> Run:
    """Run one stage of a run again, with other settings or on other data with the same classes.

    Args:
        folder: Folder of the run, which is changed.
        stage: One of train, prune, project and evaluate.
        data: Data set to use instead of the run's own.
        settings: Settings by name, which replace those of the run.
        observer: Progress callbacks.

    Returns:
        The run, with the stage's new results.

    Raises:
        ConfigError: The run is packed, or another program is at work in it.

    Examples:
        >>> run = rerun("runs/photos", "evaluate")
        >>> sorted(run.last_metrics["accuracy"])
        ['greedy', 'max_path', 'soft']
    """
    if stage not in STAGES:
        raise ConfigError(f"expected one of {', '.join(STAGES)} as stage, got {stage!r}")
    run = Run.open(folder).check_writable()
    config = run.config.replace(settings or {})
    with folders.locked(run.folder):
        folders.clean(run.folder)
        images = _sample(run.data(data), config)
        getattr(RunStages(run, images, config, _device(), observer or Observer()), stage)()
    return run


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


Model = Run | ProtoTree | str | Path
TestData = str | Path | ImageData


@overload
def evaluate(
    model: Model, data: TestData | Iterable[MapBatch] | None = ..., *, observer: Observer | None = ...
) -> Metrics: ...
@overload
def evaluate(
    model: list[Any] | tuple[Any, ...], data: TestData | None = ..., *, observer: Observer | None = ...
) -> EnsembleMetrics: ...
def evaluate(model: Any, data: Any = None, *, observer: Observer | None = None) -> Metrics | EnsembleMetrics:
    """Evaluate a tree, or several as an ensemble, on test images: accuracy and all other metrics.

    Nothing is written: `rerun(run, "evaluate")` evaluates all stages of a run and stores the results.

    Args:
        model: A run, its path, a tree, or a list of these.
        data: A data set with the same classes, whose test images are used; by default that of the run. For one tree
            also batches of feature maps, labels and indices.
        observer: Progress callbacks.

    Returns:
        The metrics; of a list, those of each tree alone and of the first 1, 2, … together.

    Raises:
        ConfigError: There is nothing to test on.
        DataError: The classes of the data are not those of the tree.

    Examples:
        >>> evaluate("runs/photos").n_images
        9
        >>> evaluate(tree, [(maps, labels, indices)]).n_images  # B×D×H×W, B, B
        2
        >>> ensemble = evaluate(["runs/photos", "runs/photos"])
        >>> len(ensemble.alone), sorted(ensemble.all_trees.accuracy)
        (2, ['greedy', 'max_path', 'soft'])
    """
    several = isinstance(model, list | tuple)
    models = [run_or_tree_at(item) for item in (model if several else [model])]
    trees = [(item.tree().to(_device()) if isinstance(item, Run) else item).eval() for item in models]
    ensemble = Ensemble(trees)
    if data is None or isinstance(data, TestData):
        data = _test_data(models[0], trees, data, observer or Observer())
        folders = [item.folder if isinstance(item, Run) else None for item in models]
        if several:
            return ensemble_metrics(ensemble, _votes(ensemble, data, folders))
        dataset = ViewDataset(data.test, evaluation_views, trees[0].preprocessing)
        device = trees[0].prototypes.device
        data = eval_batches(trees[0].features, dataset, run=folders[0]).encoded(trees[0].features, device)
    elif several:
        raise ConfigError("expected a data set to test an ensemble on, got feature maps")
    return evaluate_maps(trees[0], data)


def _test_data(model: Run | ProtoTree, trees: Sequence[ProtoTree], data: Any, observer: Observer) -> ImageData:
    """Open the data to test on, or that of the run."""
    if isinstance(model, ProtoTree) and data is None:
        raise ConfigError("a tree by itself does not say what to test it on; expected data with the same classes")
    opened: ImageData = data
    if not isinstance(data, ImageData):
        opened = model.data(data) if isinstance(model, Run) else open_data(data)
    if opened.class_names != trees[0].class_names:
        raise DataError("expected the classes of the tree in the data, got others; choose data with the same classes")
    text = f"{len(trees)} trees" if len(trees) > 1 else "the tree"
    observer.stage(f"evaluating {text} on {len(opened.test)} test images")
    return opened


def _votes(ensemble: Ensemble, data: ImageData, folders: Sequence[Path | None]) -> Iterator[Votes]:
    """Votes and labels of the test images: from cached features if the runs have all of them, else from the images."""
    device = ensemble.trees[0].prototypes.device

    def batches_of(index: int, folder: Path | None) -> EvalBatches:
        tree = ensemble.trees[index]
        return eval_batches(tree.features, ViewDataset(data.test, evaluation_views, tree.preprocessing), run=folder)

    each = {index: batches_of(index, folders[index]) for index in ensemble.distinct}
    unreadable = {None if batches.maps is None else frozenset(batches.maps.unreadable) for batches in each.values()}
    is_cached = None not in unreadable and len(unreadable) == 1  # so that all leave out the same images
    if not is_cached:
        each = {index: batches_of(index, None) for index in each}
    for batch in zip(*(batches.inputs() for batches in each.values()), strict=True):
        maps = {index: own.values.to(device) for index, own in zip(each, batch, strict=True)}
        if not is_cached:
            with torch.no_grad():
                maps = {index: backbone(maps[index]) for index, backbone in ensemble.distinct.items()}
        yield ensemble.votes_of_maps(maps), batch[0].labels.to(device)


def _sample(data: ImageData, config: Config) -> ImageData:
    return data.bootstrap(config.seed) if config.bootstrap else data

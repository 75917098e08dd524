"""Global explanation (§5.2): every prototype of a tree, its leaves, its classes and the metrics of its run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, overload

from prototree.core import checkpoint
from prototree.core.leaves import class_log_probs
from prototree.core.model import ProtoTree
from prototree.data import ImageData
from prototree.errors import ConfigError, DataError
from prototree.evaluation.schema import METRICS, damaged
from prototree.evaluation.tables import confusion_pairs, main_part, prototype_text, quality_text
from prototree.explanation.assets import AssetStore, pictures_of
from prototree.explanation.decision import ImageFile, Model, explain_decision, explain_image, open_explainers
from prototree.explanation.neighbours import class_pictures, explain_classes
from prototree.explanation.prototypes import explain_prototypes
from prototree.explanation.records import Picture, PrototypeExplanation, TreeExplanation
from prototree.run import ASSETS, Run
from prototree.training.sources import prototype_views


def explain_tree(
    run: Run | str | Path,
    *,
    data: ImageData | None = None,
    nearest: int = 5,
    occlusion: bool = False,
    notes: Mapping[int, str] | None = None,
    tick: Callable[[int, int], None] | None = None,
) -> TreeExplanation:
    """Explain everything about a run's tree. Without the training data: what the run's folder holds.

    Examples:
        >>> explanation = explain_tree("runs/photos")
        >>> explanation.class_names
        ('bluebird', 'cardinal', 'greenfinch')
    """
    if nearest < 0:
        raise ConfigError(f"expected a number of nearest patches of at least 0, got {nearest}")
    run = run if isinstance(run, Run) else Run.open(run)
    tree, notes = run.tree(), run.notes if notes is None else notes
    data = data if data is not None else run.data_or_none()
    if data is None:
        store, shown = AssetStore(tree, run.folder / ASSETS), pictures_of(run, tree)
        rows, pictures = range(tree.n_prototypes), store.class_pictures()
        prototypes = tuple(store.prototype(row, shown.of(row), notes.get(row, "")) for row in rows)
    elif data.class_names != tree.class_names:
        raise DataError("expected the classes of the run in the data, got others; choose the data it was made with")
    else:
        pictures = class_pictures(data)
        prototypes = explain_prototypes(
            tree,
            data,
            range(tree.n_prototypes),
            views=prototype_views(run.config.recipe, data),
            nearest=nearest,
            occlusion=occlusion,
            notes=notes,
            tick=tick,
            workers=run.config.workers,
            run=run.folder,
        )
    return _tree_explanation(run, tree, prototypes, pictures)


def _tree_explanation(
    run: Run,
    tree: ProtoTree,
    prototypes: Sequence[PrototypeExplanation],
    pictures: Sequence[tuple[Picture, ...]],
) -> TreeExplanation:
    """Join the prototypes with the leaves of the tree, its classes and the metrics of its run."""
    metrics = run_metrics(run, tree)
    return TreeExplanation(
        title=run.folder.resolve().name,
        class_names=tree.class_names,
        left=tuple(tree.topology.left.tolist()),
        right=tuple(tree.topology.right.tolist()),
        prototypes=tuple(
            replace(p, test_results=metrics.prototypes.get(p.prototype, ()), part=metrics.parts.get(p.prototype, ""))
            for p in prototypes
        ),
        leaf_probs=class_log_probs(tree.leaf_logits.detach()).exp().cpu().numpy(),
        accuracy=metrics.accuracy,
        node_kind=tree.node_function.kind,
        sharpness=tree.node_function.sharpness,
        test_results=metrics.test_results,
        made_from=made_from(run),
        classes=explain_classes(pictures, metrics.confusion),
    )


@dataclass(frozen=True)
class RunMetrics:
    """What metrics.json says of a tree, as pages show it."""

    accuracy: dict[str, float]
    test_results: str
    prototypes: dict[int, tuple[str, ...]]  # what was measured of each, in sentences
    parts: dict[int, str]  # the part on which each lies in most photos
    confusion: list[tuple[int, int, int]]  # of the last stage that was evaluated


def run_metrics(run: Run, tree: ProtoTree) -> RunMetrics:
    """Read the metrics of a run's tree. A file from elsewhere may say anything; what makes no sense is refused."""
    try:
        quality = run.prototype_quality(tree)
        prototypes = {int(p["prototype_row"]): tuple(prototype_text(p)) for p in quality.get("prototypes", ())}
        parts = {int(p["prototype_row"]): main_part(p) for p in quality.get("prototypes", ())}
        accuracy = {str(name): float(value) for name, value in run.last_metrics.get("accuracy", {}).items()}
        stages = run.metrics.get("stages", {})
        stage = next((stage for stage in checkpoint.STAGES if "confusion" in stages.get(stage, {})), None)
        confusion = confusion_pairs(run.metrics, stage) if stage is not None else []
        if not all(0 <= label < tree.n_classes for pair in confusion for label in pair[:2]):
            raise ValueError("it confuses classes that the tree does not have")
        return RunMetrics(accuracy, quality_text(quality), prototypes, parts, confusion)
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise damaged(run.folder / METRICS, error) from error


def made_from(run: Run) -> str:
    """Name the data set of a run and the day it was trained: `birds, 18 November 2026`; of a packed tree nothing."""
    if run.is_packed or "source" not in run.metrics:
        return ""
    trained = run.folder / (checkpoint.last_stage(run.folder) or "") / checkpoint.TREE
    day = date.fromtimestamp(trained.stat().st_mtime)
    return f"{Path(run.source).name or run.source}, {day.day} {day:%B %Y}"


def save_assets(run: Run, data: ImageData, explanation: TreeExplanation) -> None:
    """Store with the run what its pages show, so that they are the same on machines without the data."""
    store = AssetStore(run.tree(), run.folder / ASSETS)
    store.save_pictures(data)
    store.save_pages(explanation)


@overload
def explain(model: Model, image: None = None, **options: Any) -> TreeExplanation: ...
@overload
def explain(model: Model | Sequence[Model], image: ImageFile, **options: Any) -> Any: ...
def explain(model: Any, image: Any = None, **options: Any) -> Any:
    """Explain a decision about an image or, without an image, the whole tree.

    Args:
        model: A run, its path, or a tree; a list of these explains the decision of an ensemble. The whole tree is
            explained of a run only.
        image: Path of the image, or a PIL image.
        **options: Of an image: `label` (the index of its true class), `name`, `attribution` and `occlusion` (slower
            maps). Of a tree: `data`, `nearest` (patches per prototype), `occlusion`, `notes` and `tick`.

    Returns:
        A `DecisionExplanation` (of a list, an `EnsembleExplanation`), or a `TreeExplanation`.

    Raises:
        DataError: The image cannot be read, or the classes of the data are not those of the tree.

    Examples:
        >>> len(explain("runs/photos", "bird.jpg").paths["greedy"].steps) >= 1
        True
        >>> explain("runs/photos").title
        'photos'
    """
    if image is None:
        return explain_tree(model, **options)
    if isinstance(model, list | tuple):
        return explain_decision(open_explainers(model), image, **options)
    return explain_image(model, image, **options)

"""The whole tree as plain data (§5.2): every prototype, the leaves, and the figures of the run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from prototree.backbones.geometry import Box
from prototree.core import checkpoint
from prototree.core.leaves import class_log_probs
from prototree.core.model import ProtoTree
from prototree.data import ImageData
from prototree.errors import ConfigError, DataError
from prototree.evaluation.part_tables import part_words, prototype_words
from prototree.evaluation.schema import METRICS, damaged
from prototree.evaluation.tables import confusion_pairs
from prototree.explain.assets import PAGES, KeptPages, keep_pages
from prototree.explain.classes import class_photos, explain_classes
from prototree.explain.prototype_pictures import PrototypePictures, write_pictures
from prototree.explain.prototypes import explain_prototypes, place_of
from prototree.explain.records import Location, Match, PrototypeExplanation, Spread, TreeExplanation
from prototree.explain.stored_histograms import kept_spreads
from prototree.run import PICTURES, Run


def explain_tree(
    run: Run | str | Path,
    *,
    data: ImageData | None = None,
    nearest: int = 5,
    occlusion: bool = False,
    notes: Mapping[int, str] | None = None,
    tick: Callable[[int, int], None] | None = None,
) -> TreeExplanation:
    """Everything about a run's tree. Without the training data: what the run's folder holds.

    Examples:
        >>> explanation = explain_tree("runs/photos")
        >>> explanation.class_names
        ('bluebird', 'cardinal', 'greenfinch')
    """
    if nearest < 0:
        raise ConfigError(f"expected a number of nearest patches of at least 0, got {nearest}")
    run = run if isinstance(run, Run) else Run.open(run)
    tree = run.tree()
    notes = run.notes if notes is None else notes
    data = data if data is not None else run.data_if_here()
    if data is not None and data.class_names != tree.class_names:
        raise DataError("expected the classes of the run in the data, got others; choose the data it was made with")
    every = range(tree.n_prototypes)
    if data is None:
        prototypes = _without_data(run, tree, notes or {})
        photos = KeptPages(tree, run.folder / PAGES).class_photos()
    else:
        photos = class_photos(data)
        config = run.config
        prototypes = explain_prototypes(
            tree,
            data,
            every,
            views=config.recipe.source_views(data),
            nearest=nearest,
            occlusion=occlusion,
            notes=notes,
            tick=tick,
            workers=config.workers,
            run=run.folder,
        )
    figures = run_figures(run, tree)
    prototypes = tuple(replace(one, tests=figures.said.get(one.prototype, ())) for one in prototypes)
    return TreeExplanation(
        title=run.folder.resolve().name,
        class_names=tree.class_names,
        left=tuple(tree.topology.left.tolist()),
        right=tuple(tree.topology.right.tolist()),
        prototypes=prototypes,
        leaf_probs=class_log_probs(tree.leaf_logits.detach()).exp().cpu().numpy(),
        accuracy=figures.accuracy,
        question=tree.question.kind,
        sharpness=tree.question.sharpness,
        tests=figures.tests,
        classes=explain_classes(photos, figures.confusion),
    )


@dataclass(frozen=True)
class RunFigures:
    """What metrics.json says of a tree."""

    accuracy: dict[str, float]
    tests: str
    said: dict[int, tuple[str, ...]]  # by prototype
    confusion: list[tuple[int, int, int]]


def run_figures(run: Run, tree: ProtoTree) -> RunFigures:
    """A file that came from elsewhere may say anything; what makes no sense is refused in words."""
    try:
        parts = run.part_figures(tree)
        said = {int(own["prototype"]): tuple(prototype_words(own)) for own in parts.get("prototypes", ())}
        accuracy = {str(name): float(value) for name, value in run.last_metrics.get("accuracy", {}).items()}
        confusion = _confusion(run)
        if not all(0 <= label < tree.n_classes for pair in confusion for label in pair[:2]):
            raise ValueError("it confuses classes that the tree does not have")
        return RunFigures(accuracy, part_words(parts), said, confusion)
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise damaged(run.folder / METRICS, error) from error


def _confusion(run: Run) -> list[tuple[int, int, int]]:
    """The pairs of class and answer among the test photos of the last stage that was evaluated."""
    stages = run.metrics.get("stages", {})
    stage = next((stage for stage in checkpoint.STAGES if "confusion" in stages.get(stage, {})), None)
    return confusion_pairs(run.metrics, stage) if stage is not None else []


def store_pages(run: Run, data: ImageData, explanation: TreeExplanation) -> None:
    """Keeps with the run what its pages show, so that they are the same on machines without the data."""
    tree = run.tree()
    write_pictures(tree, data, run.folder / PICTURES)
    keep_pages(tree, explanation, run.folder / PAGES)


def pictures_of(run: Run, tree: ProtoTree | None = None, data: ImageData | None = None) -> PrototypePictures:
    """The prototypes' pictures: from the data given, or from the run's folder, or from the run's own data."""
    tree = tree if tree is not None else run.tree()
    pictures = PrototypePictures(tree, data, run.folder / PICTURES)
    if data is not None or pictures.complete:
        return pictures
    return PrototypePictures(tree, run.data_if_here(), run.folder / PICTURES)


def spreads_of(run: Run, tree: ProtoTree) -> dict[int, Spread]:
    """By node, how the training photos lie there, as the run's training or last report counted them; else nothing."""
    return kept_spreads(tree, run.folder / PAGES) or KeptPages(tree, run.folder / PAGES).spreads()


def _without_data(run: Run, tree: ProtoTree, notes: Mapping[int, str]) -> tuple[PrototypeExplanation, ...]:
    """What the run keeps about its prototypes; where it keeps nothing, what the tree itself knows."""
    pictures, kept = pictures_of(run, tree), KeptPages(tree, run.folder / PAGES)
    return tuple(
        kept.of(one, pictures.of(one), notes.get(one, "")) or _stored(tree, one, pictures, notes)
        for one in range(tree.n_prototypes)
    )


def _stored(
    tree: ProtoTree, prototype: int, pictures: PrototypePictures, notes: Mapping[int, str]
) -> PrototypeExplanation:
    """What is known of a prototype without any data: its pictures and its box, but no heat and no neighbours."""
    source, shown = tree.sources[prototype], pictures.of(prototype)
    box = Box(*(source.shown or source.box)) if source is not None else Box.whole(shown.size)
    heat = np.zeros(shown.photo.shape[:2], dtype=np.float32)
    match = Match(
        image=source.image if source is not None else "",
        label=source.label if source is not None else None,
        similarity=1.0 if source is not None else 0.0,
        size=shown.size,
        photo=shown.photo,
        crop=shown.crop,
        where=(Location("peak" if source is not None and source.shown else "cell", box, heat, None),),
    )
    return PrototypeExplanation(
        **place_of(tree, prototype),
        source=match,
        distance_moved=source.distance if source is not None else None,
        nearest=(),
        right_share=(),
        causes=(),
        note=notes.get(prototype, ""),
    )

"""Whether a run's patches mean what they show, as figures beside its others."""

from pathlib import Path

from prototree.core import checkpoint
from prototree.evaluation.parts import PartFigures
from prototree.explain.parts import PHOTOS_TESTED, measure_parts
from prototree.features.cache import kept_sets
from prototree.pipeline.results import write_results
from prototree.progress import Observer
from prototree.run import Run


def evaluate_parts(
    run: str | Path | Run,
    *,
    data: str | Path | None = None,
    photos: int = PHOTOS_TESTED,
    observer: Observer | None = None,
) -> PartFigures:
    """Part purity, consistency, stability and hiding of a run's last tree; adds them to metrics.json and results.md.

    `photos` is how many test photos per prototype are altered. Without part annotations only hiding is measured.

    Examples:
        >>> evaluate_parts("runs/cub50").purity("test")  # doctest: +SKIP
        0.64
    """
    opened, observer = Run.open(run), observer or Observer()
    tree, images = opened.tree(), opened.data(data)
    if not any(sample.parts for sample in (*images.train, *images.test)):
        observer.stage("the data does not say where parts are; only hiding is measured")
    observer.stage(f"finding {tree.n_prototypes} prototypes in the photos, and hiding them")
    config = opened.config
    sets = kept_sets(images, config.recipe.source_views(images), tree.preprocessing)
    found = measure_parts(
        tree, images, photos=photos, tick=observer.caching, workers=config.workers, run=opened.folder, among=sets
    )
    opened.note(parts={"tree": checkpoint.fingerprint(tree), **found.to_json()})
    write_results(opened)
    return found

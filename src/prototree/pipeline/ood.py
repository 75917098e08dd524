"""A run meets photos of classes that it does not know: does it notice?

found = meet_strangers("runs/birds", ["photos/insects"])
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from prototree.data import open_data
from prototree.data.dataset import Sample
from prototree.data.images import is_image
from prototree.data.loading import ViewDataset
from prototree.data.views import evaluation_views
from prototree.errors import ConfigError
from prototree.evaluation.metrics import Judged, judge
from prototree.evaluation.ood import OODMetrics, tell_apart
from prototree.features.batches import looking, maps_of
from prototree.features.cache import kept_sets
from prototree.progress import Observer
from prototree.run import Run
from prototree.training import distributed


def evaluate_ood(
    folder: str | Path,
    sources: Sequence[str | Path],
    *,
    data: str | Path | None = None,
    observer: Observer | None = None,
) -> dict[str, OODMetrics]:
    """How well a run's tree tells the photos of each source from its own test photos; also written to metrics.json.

    A source is a folder of photos, or a data set whose test photos are used.

    Examples:
        >>> found = evaluate_ood("runs/photos", ["ood/"])  # doctest: +SKIP
        >>> list(found), sorted(found["ood"].auroc)  # doctest: +SKIP
        (['ood'], ['both', 'distance', 'confidence'])
    """
    run, observer = Run.open(folder), observer or Observer()
    sets = {Path(source).name: ood_images_in(source) for source in sources}
    if len(sets) < len(sources):
        raise ConfigError(f"expected sources with names of their own, got {', '.join(map(str, sources))}")
    with distributed.processes() as device:
        tree = run.tree().to(device)
        if not tree.calibration.n_photos:
            raise ConfigError(
                f'the confidence of {run.folder} was never fitted, so the tree cannot say "I don\'t know"; train '
                "with the recipe 'distill', --hold-out at least 2, and at least 20 photos to hold out"
            )
        images, config = run.data(data), run.config
        kept = kept_sets(images, config.recipe.source_views(images), tree.preprocessing)

        def said_of(samples: Sequence[Sample], name: str) -> Judged:
            observer.stage(f"predicting {len(samples)} photos of {name}")
            dataset = ViewDataset(samples, evaluation_views, tree.preprocessing)
            batches = looking(tree.features, dataset, run=run.folder, among=kept, workers=config.workers)
            return judge([tree], maps_of(batches, tree.features, device))[0]

        own = said_of(images.test, "its own classes")
        found = {name: tell_apart(own, said_of(samples, name)) for name, samples in sets.items()}
        run.note(ood={**run.metrics.get("ood", {}), **{name: asdict(one) for name, one in found.items()}})
    return found


def ood_images_in(source: str | Path) -> tuple[Sample, ...]:
    """The photos of a folder, or the test photos of a data set."""
    folder = Path(source).expanduser()
    photos = sorted(filter(is_image, folder.iterdir())) if folder.is_dir() else []
    return tuple(Sample(photo, 0) for photo in photos) if photos else open_data(source).test

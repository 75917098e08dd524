"""Out-of-distribution detection: how well a tree tells images of classes that it does not know from its own.

The score is the rank that an image would have among the tree's own ones, by confidence and by distance, whichever is
worse. Notation used for tensor shapes: M images of the known classes, m others.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from prototree.core.confidence import COVERAGE
from prototree.data import open_data
from prototree.data.crops import evaluation_views
from prototree.data.dataset import Sample
from prototree.data.images import is_image
from prototree.data.loader import ViewDataset
from prototree.errors import ConfigError
from prototree.evaluation.metrics import ImagePredictions, predict_all
from prototree.evaluation.schema import OODMetrics
from prototree.features.cache import eval_batches
from prototree.progress import Observer
from prototree.run import Run


def evaluate_ood(
    folder: str | Path,
    sources: Sequence[str | Path],
    *,
    data: str | Path | None = None,
    observer: Observer | None = None,
) -> dict[str, OODMetrics]:
    """Evaluate out-of-distribution detection: how well a tree tells other images from its own test images.

    Args:
        folder: Folder of the run; the results are added to its metrics.json.
        sources: Folders of images of unknown classes, or data sets whose test images are used.
        data: Data set to use instead of the run's own.
        observer: Progress callbacks.

    Returns:
        The metrics of each source, by its name.

    Raises:
        ConfigError: The tree's confidence was never calibrated, or two sources have the same name.

    Examples:
        >>> metrics = evaluate_ood("runs/photos", ["ood/"])  # doctest: +SKIP
        >>> list(metrics), sorted(metrics["ood"].auroc)  # doctest: +SKIP
        (['ood'], ['both', 'confidence', 'distance'])
    """
    run, observer = Run.open(folder), observer or Observer()
    sets = {Path(source).name: ood_images(source) for source in sources}
    if len(sets) < len(sources):
        raise ConfigError(f"expected sources with names of their own, got {', '.join(map(str, sources))}")
    tree = run.tree().to("cuda" if torch.cuda.is_available() else "cpu")
    if not tree.calibration.n_images:
        raise ConfigError(
            f"the confidence of {run.folder} was never calibrated, so the tree cannot abstain; train with the recipe "
            "'distill', a --calibration-fraction above 0, and at least 20 images to hold out"
        )
    images, config = run.data(data), run.config

    def predictions(samples: Sequence[Sample], name: str) -> ImagePredictions:
        observer.stage(f"predicting {len(samples)} images of {name}")
        dataset = ViewDataset(samples, evaluation_views, tree.preprocessing)
        batches = eval_batches(tree.features, dataset, run=run.folder, workers=config.workers)
        return predict_all([tree], batches.encoded(tree.features, tree.prototypes.device))[0]

    known = predictions(images.test, "its own classes")
    metrics = {name: ood_metrics(known, predictions(samples, name)) for name, samples in sets.items()}
    run.update_metrics(ood={**run.metrics.get("ood", {}), **{name: asdict(values) for name, values in metrics.items()}})
    return metrics


def ood_images(source: str | Path) -> tuple[Sample, ...]:
    """List the images of a folder, or the test images of a data set."""
    folder = Path(source).expanduser()
    paths = sorted(filter(is_image, folder.iterdir())) if folder.is_dir() else []
    return tuple(Sample(path, 0) for path in paths) if paths else open_data(source).test


def ood_metrics(known: ImagePredictions, ood: ImagePredictions) -> OODMetrics:
    """Compare what one tree predicts for its own test images and for images of no known class."""
    inside, outside = _scores(known, known), _scores(known, ood)
    limit = inside["both"].sort().values[int((1 - COVERAGE) * len(known.index))]
    return OODMetrics(
        n_images=len(ood.index),
        auroc={score: auroc(inside[score], outside[score]) for score in inside},
        fpr_at_95_tpr=float((outside["both"] >= limit).double().mean()),
        coverage=float(ood.is_known.double().mean()),
    )


def auroc(high: Float[Tensor, " M"], low: Float[Tensor, " m"]) -> float:
    """Area under the ROC curve: the probability that one of the first is higher than one of the second; ties half."""
    order = low.sort().values
    below = torch.searchsorted(order, high.contiguous())
    not_above = torch.searchsorted(order, high.contiguous(), right=True)
    return float((below + not_above).double().mean()) / (2 * len(low))


def _scores(known: ImagePredictions, predicted: ImagePredictions) -> dict[str, Float[Tensor, " M"]]:
    def rank(values: Float[Tensor, " M"], among: Float[Tensor, " m"]) -> Float[Tensor, " M"]:
        return torch.searchsorted(among.sort().values, values.contiguous()).double() / len(among)

    confidence, distance = predicted.confidence.double(), -predicted.ood_score.double()
    both = torch.minimum(rank(confidence, known.confidence.double()), rank(distance, -known.ood_score.double()))
    return {"confidence": confidence, "distance": distance, "both": both}

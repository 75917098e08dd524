"""Metrics of a tree in one pass over the test images: accuracy, fidelity, path length, calibration (Tables 1–3, S4–6).

Notation used for tensor shapes: B batch, M images, K classes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.backbones.backbone import FeatureExtractor
from prototree.core.leaves import class_log_probs
from prototree.core.model import ProtoTree, TreePrediction
from prototree.core.topology import HARD, STRATEGIES, Strategy
from prototree.errors import DataError
from prototree.evaluation.schema import Metrics, PathLengths
from prototree.features.cache import EvalBatches, MapBatch
from prototree.training.head import Baseline

_CALIBRATION_BINS = 15
_LEAF_BINS = 20

__all__ = ["BaselineAccuracy", "Metrics", "PathLengths", "compute_metrics", "evaluate_all", "evaluate_maps"]


@dataclass(frozen=True)
class ImagePredictions:
    """What a tree predicts for each test image, in the order of the data."""

    index: Int[Tensor, " M"]
    label: Int[Tensor, " M"]
    soft: Int[Tensor, " M"]
    max_path: Int[Tensor, " M"]
    greedy: Int[Tensor, " M"]
    max_path_length: Int[Tensor, " M"]
    greedy_length: Int[Tensor, " M"]
    soft_confidence: Float[Tensor, " M"]  # of the soft prediction
    confidence: Float[Tensor, " M"]  # of the greedy one
    ood_score: Float[Tensor, " M"]
    is_known: Bool[Tensor, " M"]  # False where the tree abstains
    in_top5: Bool[Tensor, " M"]

    @classmethod
    def of(cls, predicted: TreePrediction, labels: Int[Tensor, " M"], indices: Int[Tensor, " M"]) -> "ImagePredictions":
        """Keep what the metrics need of a batch."""
        top5 = predicted.soft.topk(min(5, predicted.soft.shape[1]), dim=1).indices
        confidence, label = predicted.soft.max(dim=1)
        return cls(
            index=indices,
            label=labels,
            soft=label,
            max_path=predicted.labels("max_path"),
            greedy=predicted.labels("greedy"),
            max_path_length=predicted.max_path.length,
            greedy_length=predicted.greedy.length,
            soft_confidence=confidence,
            confidence=predicted.confidence,
            ood_score=predicted.ood_score,
            is_known=~predicted.abstained,
            in_top5=(top5 == labels.to(top5.device)[:, None]).any(dim=1),
        )

    def prediction(self, strategy: Strategy) -> Int[Tensor, " M"]:
        return {"soft": self.soft, "max_path": self.max_path, "greedy": self.greedy}[strategy]


@torch.no_grad()
def predict_all(trees: Sequence[ProtoTree], maps: Iterable[MapBatch]) -> list[ImagePredictions]:
    """Predict every image by every strategy, for trees that share their features, in one pass over the data."""
    batches: list[list[ImagePredictions]] = [[] for _ in trees]
    tables = [tree.leaf_table() for tree in trees]
    for feature_map, labels, indices in maps:
        for tree, table, own in zip(trees, tables, batches, strict=True):
            if len(labels):
                own.append(ImagePredictions.of(tree.decode(tree.forward_features(feature_map), table), labels, indices))
    if not all(batches):
        raise DataError("expected at least one image to evaluate on, got none")
    return [_in_order(own) for own in batches]


def _in_order(batches: list[ImagePredictions]) -> ImagePredictions:
    columns = {
        field.name: torch.cat([getattr(batch, field.name).cpu() for batch in batches])
        for field in fields(ImagePredictions)
    }
    order = columns["index"].argsort()
    return ImagePredictions(**{name: column[order] for name, column in columns.items()})


def evaluate_maps(tree: ProtoTree, maps: Iterable[MapBatch]) -> Metrics:
    """Compute all metrics of a tree from feature maps, in one pass over the data.

    Examples:
        >>> evaluate_maps(tree, [(maps, labels, indices)]).n_images  # B×D×H×W, B, B
        2
    """
    return compute_metrics(tree, predict_all([tree], maps)[0])


def evaluate_all(trees: Mapping[str, ProtoTree], maps: Iterable[MapBatch]) -> dict[str, Metrics]:
    """Compute the metrics of several trees that share their features, such as the stages of a run, in one pass."""
    predictions = predict_all(list(trees.values()), maps)
    return {name: compute_metrics(tree, own) for (name, tree), own in zip(trees.items(), predictions, strict=True)}


def compute_metrics(tree: ProtoTree, predicted: ImagePredictions) -> Metrics:
    """Compute the metrics from what the tree predicts."""
    label, n_classes, is_known = predicted.label, tree.n_classes, predicted.is_known
    is_right = predicted.greedy == label
    total = torch.bincount(label, minlength=n_classes).tolist()
    hits = torch.bincount(label[is_right], minlength=n_classes).tolist()
    leaf_max_probs = class_log_probs(tree.leaf_logits.detach()).exp().amax(dim=1).cpu()
    # Never more rows than images, where a matrix of ten thousand classes would have a hundred million.
    pairs, counts = torch.unique(torch.stack([label, predicted.greedy], dim=1), dim=0, return_counts=True)
    return Metrics(
        n_images=len(label),
        accuracy={s: _fraction(predicted.prediction(s) == label) for s in STRATEGIES},
        fidelity={s: _fraction(predicted.prediction(s) == predicted.soft) for s in HARD},
        path_length={s: _lengths(getattr(predicted, f"{s}_length")) for s in HARD},
        top5=_fraction(predicted.in_top5),
        ece=_calibration_error(predicted.soft_confidence, predicted.soft == label),
        confidence_ece=_calibration_error(predicted.confidence, is_right),
        mean_confidence=float(predicted.confidence.double().mean()),
        coverage=_fraction(is_known),
        selective_accuracy=_fraction(is_right[is_known]) if is_known.any() else None,
        class_accuracy=[right / count if count else None for right, count in zip(hits, total, strict=True)],
        confusion=[(true, said, n) for (true, said), n in zip(pairs.tolist(), counts.tolist(), strict=True)],
        n_prototypes=tree.n_prototypes,
        n_leaves=tree.topology.n_leaves,
        leaf_max_probs=leaf_max_probs.tolist(),
        leaf_max_hist=torch.histc(leaf_max_probs.float(), _LEAF_BINS, 0, 1).int().tolist(),
    )


def _fraction(hits: Bool[Tensor, " M"]) -> float:
    return int(hits.sum()) / len(hits)


def _lengths(lengths: Int[Tensor, " M"]) -> PathLengths:
    exact = lengths.double()
    return PathLengths(float(exact.mean()), float(exact.std(correction=0)), int(lengths.min()), int(lengths.max()))


def _calibration_error(confidence: Float[Tensor, " M"], correct: Bool[Tensor, " M"]) -> float:
    """Expected calibration error: |accuracy − mean confidence| over 15 bins of equal width, weighted by their size."""
    confidence = confidence.double()
    bins = (confidence * _CALIBRATION_BINS).long().clamp(0, _CALIBRATION_BINS - 1)
    hits = torch.zeros(_CALIBRATION_BINS, dtype=torch.float64).index_add_(0, bins, correct.double())
    trust = torch.zeros(_CALIBRATION_BINS, dtype=torch.float64).index_add_(0, bins, confidence)
    return float((hits - trust).abs().sum()) / len(confidence)


class BaselineAccuracy:
    """Accuracy of the classifier without a tree, in the same pass as the tree; nothing without a classifier."""

    def __init__(self, baseline: Baseline | None) -> None:
        self._baseline, self._n_right, self._n_images = baseline, 0, 0

    @torch.inference_mode()
    def watch(self, batches: EvalBatches, features: FeatureExtractor, device: torch.device) -> Iterator[MapBatch]:
        """Send every image once through the backbone; yields the tree's feature maps with labels and indices."""
        features.eval()
        for inputs in batches.inputs():
            if len(inputs.labels):
                labels, values = inputs.labels.to(device), inputs.values.to(device)
                backbone_map = values if batches.maps is not None else features.backbone(values)
                if self._baseline is not None:
                    self._n_right += int((self._baseline(backbone_map).argmax(dim=1) == labels).sum())
                    self._n_images += len(labels)
                yield features.from_map(backbone_map).clone(), labels, inputs.entries.to(device)

    def accuracy(self) -> float | None:
        """None where there is no classifier."""
        return self._n_right / self._n_images if self._n_images else None

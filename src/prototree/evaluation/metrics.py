"""What the paper's tables report about a tree, from one pass over the test images (Tables 1–3, S4–S6).

Notation used for tensor shapes: M images, K classes, L leaves.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.core.leaves import class_log_probs
from prototree.core.model import ProtoTree, TreePrediction
from prototree.core.strategies import HARD, STRATEGIES, Strategy
from prototree.errors import DataError
from prototree.features.cache import MapBatch
from prototree.training import distributed

_CALIBRATION_BINS = 15
_LEAF_BINS = 20
_DTYPES = {
    "soft_confidence": torch.float32,
    "confidence": torch.float32,
    "strangeness": torch.float32,
    "in_top5": torch.bool,
    "is_known": torch.bool,
}


@dataclass(frozen=True)
class Judged:
    """What the tree said of each test image, in the order of the data."""

    place: Int[Tensor, " M"]
    label: Int[Tensor, " M"]
    soft: Int[Tensor, " M"]
    max_path: Int[Tensor, " M"]
    greedy: Int[Tensor, " M"]
    max_path_length: Int[Tensor, " M"]
    greedy_length: Int[Tensor, " M"]
    soft_confidence: Float[Tensor, " M"]  # of the soft prediction
    confidence: Float[Tensor, " M"]  # of the greedy one
    ood_score: Float[Tensor, " M"]  # how far its worst question is from what is usual
    is_known: Bool[Tensor, " M"]  # whether the tree gives an answer at all
    in_top5: Bool[Tensor, " M"]
    max_path_leaf: Int[Tensor, " M"]
    greedy_leaf: Int[Tensor, " M"]

    def prediction(self, strategy: Strategy) -> Int[Tensor, " M"]:
        return {"soft": self.soft, "max_path": self.max_path, "greedy": self.greedy}[strategy]

    def length(self, strategy: Strategy) -> Int[Tensor, " M"]:
        return self.max_path_length if strategy == "max_path" else self.greedy_length


@torch.no_grad()
def judge(trees: Sequence[ProtoTree], maps: Iterable[MapBatch]) -> list[Judged]:
    """Every strategy's answer for every image, for trees that share their features, from one pass over the data.

    In several processes all get the answers of all.
    """
    rows: list[list[Judged]] = [[] for _ in trees]
    tables = [tree.leaf_table() for tree in trees]
    for feature_map, labels, places in maps:
        for tree, table, own in zip(trees, tables, rows, strict=True):
            if len(labels):
                own.append(_judge_batch(tree.decide(tree.route(feature_map), table), labels, places))
    return [_collect(own) for own in rows]


def _collect(rows: list[Judged]) -> Judged:
    columns = {}
    for field in fields(Judged):
        parts = [getattr(row, field.name).cpu() for row in rows]
        own = torch.cat(parts) if parts else torch.zeros(0, dtype=_DTYPES.get(field.name, torch.long))
        columns[field.name] = torch.cat(distributed.gather(own))
    if not len(columns["label"]):
        raise DataError("expected at least one image to evaluate on, got none")
    order = columns["place"].argsort()
    return Judged(**{name: column[order] for name, column in columns.items()})


@dataclass(frozen=True)
class PathLengths:
    """Prototypes consulted for one image (Table 3)."""

    mean: float
    std: float
    min: int
    max: int


@dataclass(frozen=True)
class Metrics:
    """The figures of one tree on one data set.

    Examples:
        >>> metrics = evaluate(tree, [(maps, labels, places)])  # B×D×H×W, B, B
        >>> sorted(metrics.accuracy), metrics.n_images
        (['greedy', 'max_path', 'soft'], 2)
    """

    n_images: int
    accuracy: dict[str, float]  # by strategy
    fidelity: dict[str, float]  # share of images on which a hard strategy agrees with soft
    path_length: dict[str, PathLengths]
    top5: float
    ece: float  # of Eq. 4's probability of the soft answer
    confidence_ece: float  # the same of the confidence, for the greedy answer: what people are shown
    mean_confidence: float
    coverage: float  # share of images that the tree does not say "I don't know" to
    selective_accuracy: float | None  # of its greedy answers to those; None if there are none
    class_accuracy: list[float | None]  # of the greedy path, which is what pages show; None without test images
    confusion: list[tuple[int, int, int]]  # true class, greedy prediction, photos; pairs that occur, in order
    n_prototypes: int
    n_leaves: int
    leaf_max_probs: list[float]  # max σ(c) of every leaf, for the supplement's histogram
    leaf_max_hist: list[int]  # of leaf_max_probs, 20 bins from 0 to 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(tree: ProtoTree, maps: Iterable[MapBatch]) -> Metrics:
    """All figures of a tree, from one pass over the data.

    Examples:
        >>> evaluate(tree, [(maps, labels, places)]).n_images  # B×D×H×W, B, B
        2
    """
    return measure(tree, judge([tree], maps)[0])


def evaluate_all(trees: Mapping[str, ProtoTree], maps: Iterable[MapBatch]) -> dict[str, Metrics]:
    """All numbers of several trees that share their features, such as the stages of a run, from one pass."""
    judged = judge(list(trees.values()), maps)
    return {name: measure(tree, one) for (name, tree), one in zip(trees.items(), judged, strict=True)}


def measure(tree: ProtoTree, judged: Judged) -> Metrics:
    """The numbers, given what the tree said."""
    label, n_classes = judged.label, tree.n_classes
    total = torch.bincount(label, minlength=n_classes).tolist()
    hits = torch.bincount(label[judged.greedy == label], minlength=n_classes).tolist()
    maxima = class_log_probs(tree.leaf_logits.detach()).exp().amax(dim=1).cpu()
    return Metrics(
        n_images=len(label),
        accuracy={s: _share(judged.prediction(s) == label) for s in STRATEGIES},
        fidelity={s: _share(judged.prediction(s) == judged.soft) for s in HARD},
        path_length={s: _lengths(judged.length(s)) for s in HARD},
        top5=_share(judged.in_top5),
        ece=_calibration_error(judged.soft_confidence, judged.soft == label),
        confidence_ece=_calibration_error(judged.confidence, judged.greedy == label),
        mean_confidence=float(judged.confidence.double().mean()),
        coverage=_share(judged.is_known),
        selective_accuracy=_share((judged.greedy == label)[judged.is_known]) if judged.is_known.any() else None,
        class_accuracy=[right / count if count else None for right, count in zip(hits, total, strict=True)],
        confusion=_confusion(label, judged.greedy),
        n_prototypes=tree.n_prototypes,
        n_leaves=tree.topology.n_leaves,
        leaf_max_probs=maxima.tolist(),
        leaf_max_hist=torch.histc(maxima.float(), _LEAF_BINS, 0, 1).int().tolist(),
    )


def _judge_batch(decisions: TreePrediction, labels: Int[Tensor, " B"], places: Int[Tensor, " B"]) -> Judged:
    soft = decisions.class_probs("soft")
    top5 = soft.topk(min(5, soft.shape[1]), dim=1).indices
    confidence, label = soft.max(dim=1)
    return Judged(
        place=places,
        label=labels,
        soft=label,
        max_path=decisions.labels("max_path"),
        greedy=decisions.labels("greedy"),
        max_path_length=decisions.max_path.length,
        greedy_length=decisions.greedy.length,
        soft_confidence=confidence,
        confidence=decisions.confidence,
        ood_score=decisions.ood_score,
        is_known=decisions.is_known,
        in_top5=(top5 == labels.to(top5.device)[:, None]).any(dim=1),
        max_path_leaf=decisions.max_path.leaf,
        greedy_leaf=decisions.greedy.leaf,
    )


def _confusion(label: Int[Tensor, " M"], answer: Int[Tensor, " M"]) -> list[tuple[int, int, int]]:
    """Never more rows than photos, where a matrix of ten thousand classes would have a hundred million."""
    pairs, counts = torch.unique(torch.stack([label, answer], dim=1), dim=0, return_counts=True)
    return [(true, said, count) for (true, said), count in zip(pairs.tolist(), counts.tolist(), strict=True)]


def _share(hits: Bool[Tensor, " M"]) -> float:
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

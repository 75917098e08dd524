"""Metrics of a tree or an ensemble in one pass over the test images (Tables 1–3, S4–6), and its wrong predictions.

Notation used for tensor shapes: B batch, M images, K classes, T trees.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.backbones.backbone import FeatureExtractor
from prototree.core.ensemble import Ensemble, TreeVote
from prototree.core.leaves import class_log_probs
from prototree.core.model import ProtoTree
from prototree.core.topology import HARD, STRATEGIES
from prototree.errors import DataError
from prototree.evaluation.schema import ImageError, Metrics, NodeErrors, PathLengths
from prototree.features.cache import EvalBatches, MapBatch
from prototree.training.finetuned import FinetunedClassifier
from prototree.training.head import Baseline

Votes = tuple[list[TreeVote], Int[Tensor, " B"]]  # of each tree for a batch of images, and their labels
_CALIBRATION_BINS = 15
_LEAF_BINS = 20


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
    def join(cls, batches: Sequence["ImagePredictions"]) -> "ImagePredictions":
        """Concatenate batches in the order of the data."""
        names = [field.name for field in fields(cls)]
        columns = {name: torch.cat([getattr(batch, name).cpu() for batch in batches]) for name in names}
        order = columns["index"].argsort()
        return cls(**{name: column[order] for name, column in columns.items()})


@torch.no_grad()
def predict_all(trees: Sequence[ProtoTree], maps: Iterable[MapBatch]) -> list[ImagePredictions]:
    """Predict every image by every strategy, for trees that share their features, in one pass over the data."""
    batches: list[list[ImagePredictions]] = [[] for _ in trees]
    tables = [tree.leaf_table() for tree in trees]
    for feature_map, labels, indices in maps:
        if not len(labels):
            continue
        for tree, table, predictions in zip(trees, tables, batches, strict=True):
            predicted = tree.decode(tree.forward_features(feature_map), table)
            confidence, soft = predicted.soft.max(dim=1)
            predictions.append(
                ImagePredictions(
                    index=indices,
                    label=labels,
                    soft=soft,
                    max_path=predicted.labels("max_path"),
                    greedy=predicted.labels("greedy"),
                    max_path_length=predicted.max_path.length,
                    greedy_length=predicted.greedy.length,
                    soft_confidence=confidence,
                    confidence=predicted.confidence,
                    ood_score=predicted.ood_score,
                    is_known=~predicted.abstained,
                    in_top5=_in_top5(predicted.soft, labels),
                )
            )
    if not all(batches):
        raise DataError("expected at least one image to evaluate on, got none")
    return [ImagePredictions.join(predictions) for predictions in batches]


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
    return {
        name: compute_metrics(tree, predicted)
        for (name, tree), predicted in zip(trees.items(), predictions, strict=True)
    }


def compute_metrics(tree: ProtoTree, predicted: ImagePredictions) -> Metrics:
    """Compute accuracy, fidelity, path length and calibration from what the tree predicts."""
    label, n_classes, is_known = predicted.label, tree.n_classes, predicted.is_known
    by_strategy = {strategy: getattr(predicted, strategy) for strategy in STRATEGIES}
    is_right = predicted.greedy == label
    total = torch.bincount(label, minlength=n_classes).tolist()
    hits = torch.bincount(label[is_right], minlength=n_classes).tolist()
    leaf_max_probs = class_log_probs(tree.leaf_logits.detach()).exp().amax(dim=1).cpu()
    # Never more rows than images, where a matrix of ten thousand classes would have a hundred million.
    pairs, counts = torch.unique(torch.stack([label, predicted.greedy], dim=1), dim=0, return_counts=True)
    return Metrics(
        n_images=len(label),
        accuracy={s: _fraction(by_strategy[s] == label) for s in STRATEGIES},
        fidelity={s: _fraction(by_strategy[s] == predicted.soft) for s in HARD},
        path_length={s: _path_lengths(getattr(predicted, f"{s}_length")) for s in HARD},
        top5=_fraction(predicted.in_top5),
        ece=_calibration_error(predicted.soft_confidence, predicted.soft == label),
        confidence_ece=_calibration_error(predicted.confidence, is_right),
        mean_confidence=float(predicted.confidence.double().mean()),
        coverage=_fraction(is_known),
        selective_accuracy=_fraction(is_right[is_known]) if is_known.any() else None,
        class_accuracy=[right / count if count else None for right, count in zip(hits, total, strict=True)],
        confusion=[(*pair, count) for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True)],
        n_prototypes=tree.n_prototypes,
        n_leaves=tree.topology.n_leaves,
        leaf_max_probs=leaf_max_probs.tolist(),
        leaf_max_hist=torch.histc(leaf_max_probs.float(), _LEAF_BINS, 0, 1).int().tolist(),
    )


def _in_top5(probs: Float[Tensor, "*T B K"], labels: Int[Tensor, " B"]) -> Bool[Tensor, "*T B"]:
    top5 = probs.topk(min(5, probs.shape[-1]), dim=-1).indices
    return (top5 == labels.to(top5.device)[:, None]).any(dim=-1)


def _fraction(hits: Bool[Tensor, " M"]) -> float:
    return int(hits.sum()) / len(hits)


def _path_lengths(lengths: Int[Tensor, " M"]) -> PathLengths:
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

    def __init__(self, baseline: Baseline | FinetunedClassifier | None) -> None:
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
                    logits = self._baseline(values if self._baseline.takes_images else backbone_map)
                    self._n_right += int((logits.argmax(dim=1) == labels).sum())
                    self._n_images += len(labels)
                yield features.from_map(backbone_map).clone(), labels, inputs.entries.to(device)

    def accuracy(self) -> float | None:
        """Return the accuracy so far; None where there is no classifier."""
        return self._n_right / self._n_images if self._n_images else None


class ErrorCollector:
    """Collects wrong predictions, and the node at which each image left the path of its true class (§1, §5.3)."""

    def __init__(self, tree: ProtoTree) -> None:
        self._tree, self._table = tree, tree.leaf_table()
        self._leaf_labels = tree.leaf_logits.detach().argmax(dim=1)
        self.errors: list[ImageError] = []

    def watch(self, maps: Iterable[MapBatch]) -> Iterator[MapBatch]:
        """Pass the maps on, so that they need to be computed only once."""
        for batch in maps:
            self.update(*batch)
            yield batch

    @torch.no_grad()
    def update(self, feature_map: Tensor, labels: Int[Tensor, " B"], indices: Int[Tensor, " B"]) -> None:
        """Collect the wrong predictions of one batch."""
        routed = self._tree.forward_features(feature_map)
        predicted = self._tree.decode(routed, self._table)
        predictions, leaves = predicted.labels("greedy"), predicted.greedy.leaf
        for i in torch.nonzero(predictions != labels)[:, 0].tolist():
            label, leaf, log_probs = int(labels[i]), int(leaves[i]), routed.log_path_probs[i]
            node, goes_right, p_right, margin = None, False, None, None
            right_leaves = torch.nonzero(self._leaf_labels == label)[:, 0]
            if len(right_leaves):
                right_leaf = int(right_leaves[log_probs[right_leaves].argmax()])
                margin = float(log_probs[leaf] - log_probs[right_leaf])
                node, goes_right = self._last_common_node(leaf, right_leaf)
                p_right = float(routed.p_right[i, node])
            error = ImageError(label, int(predictions[i]), node, goes_right, p_right, margin, int(indices[i]))
            self.errors.append(error)

    def _last_common_node(self, leaf: int, other: int) -> tuple[int, bool]:
        """Find the node at which the paths to two leaves part, and which way the first one goes."""
        paths, goes_right = self._tree.topology.paths, self._tree.topology.goes_right
        is_common = (paths[leaf] == paths[other]) & (goes_right[leaf] == goes_right[other])
        depth = int(is_common.cumprod().sum())
        return int(paths[leaf, depth]), bool(goes_right[leaf, depth])

    def by_node(self) -> list[NodeErrors]:
        """Count the errors that each node is responsible for, most first."""
        by_node: dict[int, list[ImageError]] = {}
        for error in self.errors:
            if error.node is not None:
                by_node.setdefault(error.node, []).append(error)
        counts = []
        for node, errors in by_node.items():
            margin = sum(abs((error.p_right or 0.0) - 0.5) for error in errors) / len(errors)
            counts.append(NodeErrors(node, len(errors), sum(error.goes_right for error in errors), margin))
        return sorted(counts, key=lambda count: (-count.n_errors, count.node))

    def to_json(self) -> dict[str, Any]:
        """Return the content of errors.json, where nodes are counted from 1."""
        images = [asdict(error) for error in sorted(self.errors, key=lambda error: error.index)]
        nodes = [asdict(count) for count in self.by_node()]
        for entry in (*images, *nodes):
            entry["node"] = None if entry["node"] is None else entry["node"] + 1
        kind = self._tree.node_function.kind
        return {"strategy": "greedy", "node_kind": kind, "nodes": nodes, "images": images}


@dataclass(frozen=True)
class GroupMetrics:
    """The metrics of some trees together (Table 1)."""

    n_trees: int
    accuracy: dict[str, float]  # by strategy
    top5: float  # soft
    n_prototypes: int  # in all trees: the size of the global explanation
    mean_path_prototypes: dict[str, float]  # on the paths of one image through all trees


@dataclass(frozen=True)
class EnsembleMetrics:
    """The metrics of an ensemble on one data set (§6.2)."""

    n_images: int
    alone: list[GroupMetrics]  # each tree
    ensembles: list[GroupMetrics]  # the first 1, 2, … trees together

    @property
    def all_trees(self) -> GroupMetrics:
        return self.ensembles[-1]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def ensemble_metrics(ensemble: Ensemble, batches: Iterable[Votes]) -> EnsembleMetrics:
    """Compute the metrics of each tree alone, and of the first 1, 2, … together, from their votes and the labels."""
    n_trees, n_images = len(ensemble.trees), 0
    in_top5 = torch.zeros(2 * n_trees, dtype=torch.float64)  # first the trees alone, then the ensembles
    right = {strategy: torch.zeros_like(in_top5) for strategy in STRATEGIES}
    length = {strategy: torch.zeros_like(in_top5) for strategy in HARD}
    for votes, labels in batches:
        n_images += len(labels)
        for strategy in STRATEGIES:
            alone = torch.stack([tree_vote.decisions.class_probs(strategy) for tree_vote in votes])
            together = torch.stack([tree_vote.weighted(strategy) for tree_vote in votes]).cumsum(dim=0)
            scores = torch.cat([alone, alone[:1], together[1:]])  # a sum is largest where the mean is
            right[strategy] += (scores.argmax(dim=2) == labels).sum(dim=1).cpu()
            if strategy == "soft":
                in_top5 += _in_top5(scores, labels).sum(dim=1).cpu()
            else:
                lengths = torch.stack([tree_vote.decisions.path(strategy).length.sum() for tree_vote in votes]).cpu()
                length[strategy] += torch.cat([lengths, lengths.cumsum(dim=0)])
    if not n_images:
        raise DataError("expected at least one image to evaluate on, got none")
    sizes = torch.tensor([tree.n_prototypes for tree in ensemble.trees])
    groups = [
        GroupMetrics(
            n_trees=1 if i < n_trees else i - n_trees + 1,
            accuracy={s: float(right[s][i] / n_images) for s in STRATEGIES},
            top5=float(in_top5[i] / n_images),
            n_prototypes=n_prototypes,
            mean_path_prototypes={s: float(length[s][i] / n_images) for s in HARD},
        )
        for i, n_prototypes in enumerate(torch.cat([sizes, sizes.cumsum(0)]).tolist())
    ]
    return EnsembleMetrics(n_images, groups[:n_trees], groups[n_trees:])

"""Wrong predictions: the node at which each image left the path of its true class (§1, §5.3), and labelled accuracy.

Notation used for tensor shapes: B batch, N nodes, L leaves.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from prototree.core.model import ProtoTree
from prototree.core.topology import Strategy
from prototree.evaluation.schema import ImageError, NodeErrors
from prototree.evaluation.tables import Table, accuracy_table, percent
from prototree.features.cache import MapBatch

_NAMES = 3  # unknown labels that are named


class ErrorCollector:
    """Collects every wrong prediction of a tree from the feature maps that pass through it."""

    def __init__(self, tree: ProtoTree, strategy: Strategy = "greedy") -> None:
        self._tree, self._strategy = tree, strategy
        self._leaf_labels, self._table = tree.leaf_logits.detach().argmax(dim=1), tree.leaf_table()
        self.errors: list[ImageError] = []

    def watch(self, maps: Iterable[MapBatch]) -> Iterator[MapBatch]:
        """Pass the maps on, so that they need to be computed only once."""
        for feature_map, labels, indices in maps:
            self.update(feature_map, labels, indices)
            yield feature_map, labels, indices

    @torch.no_grad()
    def update(self, feature_map: Tensor, labels: Int[Tensor, " B"], indices: Int[Tensor, " B"]) -> None:
        """Collect the wrong predictions of one batch."""
        routed = self._tree.forward_features(feature_map)
        predicted = self._tree.decode(routed, self._table)
        answers, leaves = predicted.labels(self._strategy), predicted.path(self._strategy).leaf
        for i in torch.nonzero(answers != labels)[:, 0].tolist():
            label, leaf, log_probs = int(labels[i]), int(leaves[i]), routed.log_path_probs[i]
            node, goes_right, p_right, margin = None, False, None, None
            right_leaves = torch.nonzero(self._leaf_labels == label)[:, 0]
            if len(right_leaves):
                right_leaf = int(right_leaves[log_probs[right_leaves].argmax()])
                margin = float(log_probs[leaf] - log_probs[right_leaf])
                node, goes_right = self._parting(leaf, right_leaf)
                p_right = float(routed.p_right[i, node])
            self.errors.append(ImageError(label, int(answers[i]), node, goes_right, p_right, margin, int(indices[i])))

    def _parting(self, leaf: int, other: int) -> tuple[int, bool]:
        """The node at which the paths to two leaves part, and which way the first one goes."""
        paths, turns = self._tree.topology.paths, self._tree.topology.goes_right
        together = (paths[leaf] == paths[other]) & (turns[leaf] == turns[other])
        depth = int(together.cumprod().sum())
        return int(paths[leaf, depth]), bool(turns[leaf, depth])

    def by_node(self) -> list[NodeErrors]:
        """Count the errors that each node is responsible for, most first."""
        errors: dict[int, list[ImageError]] = {}
        for error in self.errors:
            if error.node is not None:
                errors.setdefault(error.node, []).append(error)
        counts = [
            NodeErrors(
                node,
                len(own),
                sum(error.goes_right for error in own),
                sum(abs((error.p_right or 0.0) - 0.5) for error in own) / len(own),
            )
            for node, own in errors.items()
        ]
        return sorted(counts, key=lambda own: (-own.n_errors, own.node))

    def to_json(self) -> dict[str, Any]:
        """The content of errors.json, where nodes are counted from 1."""
        images = [asdict(error) for error in sorted(self.errors, key=lambda error: error.index)]
        nodes = [asdict(own) for own in self.by_node()]
        for entry in (*images, *nodes):
            entry["node"] = None if entry["node"] is None else entry["node"] + 1
        return {
            "strategy": self._strategy,
            "node_kind": self._tree.node_function.kind,
            "nodes": nodes,
            "images": images,
        }


@dataclass
class LabelledAccuracy:
    """Accuracy of predictions beside the labels of a list; a prediction of None is an abstention."""

    class_names: Sequence[str]
    pairs: Counter[tuple[str, str | None]] = field(default_factory=Counter)  # label and prediction
    unknown: Counter[str] = field(default_factory=Counter)  # labels that the tree has no class for

    def add(self, label: str, prediction: str | None) -> None:
        if label in self.class_names:
            self.pairs[label, prediction] += 1
        else:
            self.unknown[label] += 1

    @property
    def n_images(self) -> int:
        return self.pairs.total()

    def words(self) -> list[str]:
        """The accuracy in sentences."""
        n_answers = sum(count for (_, prediction), count in self.pairs.items() if prediction is not None)
        n_right = sum(count for (label, prediction), count in self.pairs.items() if label == prediction)
        words = []
        if self.n_images:
            accuracy = f" ({percent(n_right / n_answers, 1)})" if n_answers else ""
            silent = self.n_images - n_answers
            abstained = f"; no answer for {silent} {'photo' if silent == 1 else 'photos'}" if silent else ""
            words.append(f"{n_right} of {n_answers} answers are right{accuracy}{abstained}")
        if self.unknown:
            names = ", ".join(map(repr, list(self.unknown)[:_NAMES])) + (", …" if len(self.unknown) > _NAMES else "")
            words.append(f"photos not counted: {self.unknown.total()} (the tree has no class {names})")
        return words

    def table(self) -> Table:
        """Each class with its accuracy, the hardest first, and what it is taken for."""
        pairs = [(label, predicted or "no answer", count) for (label, predicted), count in self.pairs.items()]
        return accuracy_table("what each class is taken for", pairs)

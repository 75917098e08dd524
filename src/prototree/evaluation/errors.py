"""Where wrong answers come from: the node at which an image left the path of its true class (§1, §5.3).

Notation used for tensor shapes: B batch, N nodes, L leaves.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from prototree.core.model import ProtoTree
from prototree.core.strategies import Strategy
from prototree.features.cache import MapBatch
from prototree.training import distributed


@dataclass(frozen=True)
class Mistake:
    """One wrong answer. `node` is None if no leaf has the true class, so that no path could have been right."""

    place: int  # in the data
    label: int
    answer: int
    node: int | None
    goes_right: bool
    p_right: float | None  # at the node; above 0.5 speaks for right
    margin: float | None  # log-probability of the path taken minus that of the best path to the true class


@dataclass(frozen=True)
class NodeBlame:
    """How many wrong turns a node has taken."""

    node: int
    n_errors: int
    n_goes_right: int  # found the prototype where it should not have, or was nearer to the right one of two
    mean_abs_margin: float  # of the probability of going right; small: the decisions were close


class ErrorCollector:
    """Collects every wrong answer of a tree from the feature maps that pass through it."""

    def __init__(self, tree: ProtoTree, strategy: Strategy = "greedy") -> None:
        self._tree, self._strategy = tree, strategy
        self._majority, self._table = tree.leaf_logits.detach().argmax(dim=1), tree.leaf_table()
        self._paths = torch.as_tensor(tree.topology.paths.copy(), device=self._majority.device)
        self._turns = torch.as_tensor(tree.topology.goes_right.copy(), device=self._majority.device)
        self.mistakes: list[Mistake] = []

    def watch(self, maps: Iterable[MapBatch]) -> Iterator[MapBatch]:
        """Passes the maps on, so that they need to be computed only once."""
        for feature_map, labels, places in maps:
            self.look(feature_map, labels, places)
            yield feature_map, labels, places

    @torch.no_grad()
    def look(self, feature_map: Tensor, labels: Int[Tensor, " B"], places: Int[Tensor, " B"]) -> None:
        """Notes the wrong answers of one batch."""
        routed = self._tree.route(feature_map)
        decisions = self._tree.decide(routed, self._table)
        answers, leaves = decisions.labels(self._strategy), decisions.path(self._strategy).leaf
        for i in torch.nonzero(answers != labels)[:, 0].tolist():
            label, leaf, log_probs = int(labels[i]), int(leaves[i]), routed.log_path_probs[i]
            right_leaf = self._best_leaf_of(label, log_probs)
            self.mistakes.append(
                Mistake(
                    place=int(places[i]),
                    label=label,
                    answer=int(answers[i]),
                    margin=float(log_probs[leaf] - log_probs[right_leaf]) if right_leaf is not None else None,
                    **self._split(leaf, right_leaf, routed.p_right[i]),
                )
            )

    def gather(self) -> None:
        """In several processes: from now on all know the mistakes of all, in the order of the data."""
        rows = [[float("nan") if value is None else float(value) for value in astuple(m)] for m in self.mistakes]
        own = torch.tensor(rows, dtype=torch.float64).view(-1, len(fields(Mistake)))
        every = sorted(row for part in distributed.gather(own) for row in part.tolist())
        self.mistakes = [_mistake(*row) for row in every]

    def blame(self) -> list[NodeBlame]:
        """Nodes by how many mistakes they are responsible for, most first."""
        by_node: dict[int, list[Mistake]] = {}
        for mistake in self.mistakes:
            if mistake.node is not None:
                by_node.setdefault(mistake.node, []).append(mistake)
        counted = Counter({node: len(found) for node, found in by_node.items()})
        return [
            NodeBlame(
                node,
                count,
                sum(mistake.goes_right for mistake in by_node[node]),
                sum(abs((mistake.p_right or 0.0) - 0.5) for mistake in by_node[node]) / count,
            )
            for node, count in sorted(counted.items(), key=lambda item: (-item[1], item[0]))
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self._strategy,
            "question": self._tree.question.kind,
            "nodes": [asdict(blame) for blame in self.blame()],
            "images": [asdict(mistake) for mistake in self.mistakes],
        }

    def _best_leaf_of(self, label: int, log_probs: Tensor) -> int | None:
        own = torch.nonzero(self._majority == label)[:, 0]
        return int(own[log_probs[own].argmax()]) if len(own) else None

    def _split(self, leaf: int, right_leaf: int | None, p_right: Tensor) -> dict[str, Any]:
        """The node at which the two paths part, and what was found there."""
        if right_leaf is None:
            return {"node": None, "goes_right": False, "p_right": None}
        together = (self._paths[leaf] == self._paths[right_leaf]) & (self._turns[leaf] == self._turns[right_leaf])
        depth = int(together.int().cumprod(dim=0).sum())
        node = int(self._paths[leaf, depth])
        return {"node": node, "goes_right": bool(self._turns[leaf, depth]), "p_right": float(p_right[node])}


def _mistake(
    place: float, label: float, answer: float, node: float, goes_right: float, p_right: float, margin: float
) -> Mistake:
    """Back from a row of numbers, where NaN stands for None."""
    return Mistake(
        int(place),
        int(label),
        int(answer),
        None if math.isnan(node) else int(node),
        bool(goes_right),
        None if math.isnan(p_right) else p_right,
        None if math.isnan(margin) else margin,
    )

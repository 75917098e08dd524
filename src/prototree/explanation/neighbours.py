"""Nearest training images of each prototype, class pass rates and histograms, from one pass over feature maps.

Notation used for tensor shapes: B batch, D prototype depth, H W feature map, n prototypes, k images, K classes.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.core.model import ProtoTree, nearest_patches
from prototree.core.projection import side_classes
from prototree.data import ImageData
from prototree.data.images import load_image
from prototree.data.loader import Entry
from prototree.errors import DataError
from prototree.explanation.assets import reduced
from prototree.explanation.attribution import patch_distances
from prototree.explanation.records import (
    DECISION_BOUNDARIES,
    HISTOGRAM_BINS,
    HISTOGRAM_LIMITS,
    ClassExplanation,
    DecisionHistogram,
    Picture,
)
from prototree.features.cache import MapBatch

log = logging.getLogger(__name__)

_PAIRS = 64  # whose maps are computed at a time
_CLASS_SIDE = 176  # pixels of an example of a class
_CLASS_IMAGES, _ALL_CLASS_IMAGES = 4, 1200  # so that a page of many classes stays small


@dataclass(frozen=True)
class Matches:
    """The k nearest images of n prototypes, one patch each, and what fraction of each class goes their way."""

    prototypes: tuple[int, ...]
    distance: Float[Tensor, "n k"]
    index: Int[Tensor, "n k"]  # in the data; −1 where there are fewer images than k
    patch: Int[Tensor, "n k"]
    maps: Float[Tensor, "n k rows columns"]  # of similarity
    share: Float[Tensor, "n K"]
    histograms: tuple[DecisionHistogram, ...] = ()  # n: of each prototype's node


@torch.no_grad()
def find_matches(
    tree: ProtoTree,
    maps: Iterable[MapBatch],
    prototypes: Sequence[int],
    k: int,
    counted: Bool[Tensor, " images"] | None = None,
) -> Matches:
    """Find each prototype's nearest images. Memory does not grow with the data: only the best k are kept.

    Images go a prototype's way as the greedy strategy has it: within its radius, or nearer to it than to its sibling.
    `counted` says which indices of the data histograms count, where an image is in the data more than once.
    """
    siblings = [(prototype + tree.topology.n_nodes) % tree.n_prototypes for prototype in prototypes]
    compared = list(dict.fromkeys([*prototypes, *siblings]))
    columns, sibling_columns = ([compared.index(p) for p in rows] for rows in (prototypes, siblings))
    vectors, device, size = tree.prototypes.detach()[compared], tree.prototypes.device, (len(prototypes), k)
    histograms = HistogramCounts(tree, [tree.node_of(p)[0] for p in prototypes])
    is_right = torch.tensor([tree.node_of(p)[1] for p in prototypes], dtype=torch.bool, device=device)
    best = Matches(
        tuple(prototypes),
        torch.full(size, torch.inf, device=device),
        torch.full(size, -1, device=device),
        torch.zeros(size, dtype=torch.long, device=device),
        torch.zeros((*size, *tree.grid.shape), device=device),
        torch.zeros((len(prototypes), tree.n_classes), device=device),
    )
    n_seen = torch.zeros(tree.n_classes, device=device)
    for feature_map, labels, indices in maps:
        near = nearest_patches(feature_map, vectors)
        distance, sibling = near.distance[:, columns], near.distance[:, sibling_columns]
        if tree.node_function.kind == "presence":
            comes, right, left = tree.similarity(distance, prototypes) > 0.5, distance, None
        else:
            comes = torch.where(is_right, distance < sibling, distance <= sibling)  # a tie goes left
            right, left = torch.where(is_right, distance, sibling), torch.where(is_right, sibling, distance)
        rows = slice(None) if counted is None else counted[indices.cpu()].to(labels.device)
        histograms.add(right[rows], left[rows] if left is not None else None, labels[rows])
        best.share.index_add_(1, labels, comes.float().T)
        n_seen += torch.bincount(labels, minlength=tree.n_classes)
        best = _merge(tree, best, feature_map, distance.T, near.patch[:, columns].T, indices)
    return replace(best, share=best.share / n_seen.clamp_min(1), histograms=tuple(histograms.histograms()))


def _merge(
    tree: ProtoTree,
    best: Matches,
    feature_map: Float[Tensor, "B D H W"],
    distance: Float[Tensor, "n B"],
    patch: Int[Tensor, "n B"],
    indices: Int[Tensor, " B"],
) -> Matches:
    """Keep the k nearest of those kept before and those of a batch."""
    k, chosen = best.distance.shape[1], list(best.prototypes)
    prototypes, radius = tree.prototypes.detach()[chosen], tree.radius[chosen]
    # Stable, so that equal distances stay in the order of the data.
    both, order = torch.sort(torch.cat([best.distance, distance], dim=1), dim=1, stable=True)
    order = order[:, :k]
    maps = best.maps.gather(1, order.clamp_max(k - 1)[:, :, None, None].expand_as(best.maps))
    row, rank = torch.nonzero(order >= k, as_tuple=True)  # only the newcomers' maps are computed
    for rows, ranks in zip(row.split(_PAIRS), rank.split(_PAIRS), strict=True):
        dists = patch_distances(feature_map[order[rows, ranks] - k], prototypes[rows])
        maps[rows, ranks] = tree.node_function.similarity(dists, radius[rows][:, None]).view(-1, *maps.shape[2:])
    return replace(
        best,
        distance=both[:, :k],
        index=torch.cat([best.index, indices.expand_as(distance)], dim=1).gather(1, order),
        patch=torch.cat([best.patch, patch], dim=1).gather(1, order),
        maps=maps,
    )


def first_views(entries: Sequence[Entry]) -> Bool[Tensor, " images"]:
    """Mark each image's first view in the data, which shows it as it is shown when the tree predicts."""
    first = {entry.sample.path: index for index, entry in reversed(list(enumerate(entries)))}
    return torch.tensor([first[entry.sample.path] == index for index, entry in enumerate(entries)], dtype=torch.bool)


def decisive(
    tree: ProtoTree, nodes: Sequence[int], right: Float[Tensor, "B n"], left: Float[Tensor, "B n"] | None = None
) -> Float[Tensor, "B n"]:
    """Compute the statistic that each node splits by, from the distances to its prototypes.

    Presence: the distance in units of the radius; below 1 goes right. Pairwise: how much nearer the right prototype is
    than the left one, as a share of both distances; above 0 goes right, 1 is a patch that is the right prototype.
    """
    if left is None:
        return right / tree.radius[list(nodes)]
    return (left - right) / (left + right).clamp_min(torch.finfo(right.dtype).tiny)


class HistogramCounts:
    """Histograms of training images around the boundary of each node, counted batch by batch."""

    def __init__(self, tree: ProtoTree, nodes: Sequence[int]) -> None:
        self._tree, self._nodes, (left, right) = tree, list(nodes), side_classes(tree)
        self._sides = ((right & ~left)[self._nodes], (left & ~right)[self._nodes])  # a class of both is in neither
        self._counts = left.new_zeros((2, len(self._nodes), HISTOGRAM_BINS), dtype=torch.long)

    def add(self, right: Float[Tensor, "B n"], left: Float[Tensor, "B n"] | None, labels: Int[Tensor, " B"]) -> None:
        """Count images of these classes, with their distances to each node's prototypes."""
        low, high = HISTOGRAM_LIMITS[self._tree.node_function.kind]
        at = decisive(self._tree, self._nodes, right, left)
        # What lies beyond is counted in the outermost ranges.
        bins = ((at - low) / (high - low) * HISTOGRAM_BINS).floor().clamp(0, HISTOGRAM_BINS - 1).long().T
        for counts, side in zip(self._counts, self._sides, strict=True):
            counts.scatter_add_(1, bins, side[:, labels].long())

    def histograms(self) -> list[DecisionHistogram]:
        """One histogram per node."""
        kind, (right, left) = self._tree.node_function.kind, self._counts.tolist()
        limits = (*HISTOGRAM_LIMITS[kind], DECISION_BOUNDARIES[kind])
        return [DecisionHistogram(*limits, *map(tuple, counts)) for counts in zip(right, left, strict=True)]


@torch.no_grad()
def count_histograms(
    tree: ProtoTree, maps: Iterable[MapBatch], counted: Bool[Tensor, " images"]
) -> list[DecisionHistogram]:
    """Count a histogram for each node from one pass over feature maps; `counted` marks indices of the data."""
    n_nodes = tree.topology.n_nodes
    histograms = HistogramCounts(tree, range(n_nodes))
    for feature_map, labels, indices in maps:
        rows = counted[indices.cpu()].to(labels.device)
        distance = nearest_patches(feature_map[rows], tree.prototypes.detach()).distance
        left = distance[:, n_nodes:] if tree.node_function.kind == "pairwise" else None
        histograms.add(distance[:, :n_nodes], left, labels[rows])
    return histograms.histograms()


def class_pictures(data: ImageData) -> list[tuple[Picture, ...]]:
    """Pick some training images of each class, evenly spread over it. One that cannot be read is left out."""
    of_class: list[list[int]] = [[] for _ in data.class_names]
    for index, sample in enumerate(data.train):
        of_class[sample.label].append(index)
    most = max(1, min(_CLASS_IMAGES, _ALL_CLASS_IMAGES // max(len(of_class), 1)))
    pictures: list[tuple[Picture, ...]] = []
    for label, indices in enumerate(of_class):
        count, read = min(most, len(indices)), list[Picture]()
        for index in (indices[i * len(indices) // count] for i in range(count)):
            try:
                read.append(reduced(load_image(data.train[index].path, at_least=_CLASS_SIDE), _CLASS_SIDE))
            except DataError as error:
                log.warning("an image of %s is left out: %s", data.class_names[label], error)
        pictures.append(tuple(read))
    return pictures


def explain_classes(
    pictures: Sequence[tuple[Picture, ...]], confusion: Iterable[tuple[int, int, int]]
) -> tuple[ClassExplanation, ...]:
    """Join the pictures of each class with its row of the confusion matrix: label, prediction and number of images."""
    counts: list[dict[int, int]] = [{} for _ in pictures]
    for label, predicted, count in confusion:
        counts[label][predicted] = count
    classes = []
    for label, row in enumerate(counts):
        n_test, n_right = sum(row.values()), row.pop(label, 0)
        others = tuple(sorted(row.items(), key=lambda pair: -pair[1]))
        classes.append(ClassExplanation(pictures[label], n_test, n_right / n_test if n_test else None, others))
    return tuple(classes)

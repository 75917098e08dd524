"""The photos nearest to each prototype, and how often a class goes to its side, from one pass over feature maps.

Notation used for tensor shapes: B batch, D prototype depth, H W feature map, n prototypes, k photos, K classes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.core.model import ProtoTree
from prototree.core.patches import nearest_patches
from prototree.explain.attribution import patch_distances
from prototree.explain.histograms import SpreadCounts
from prototree.explain.records import Spread
from prototree.features.cache import MapBatch

_PAIRS = 64  # whose maps are computed at a time


@dataclass(frozen=True)
class Matches:
    """For n prototypes their k nearest photos, one patch each, and what share of each class goes their way."""

    prototypes: tuple[int, ...]
    distance: Float[Tensor, "n k"]
    place: Int[Tensor, "n k"]  # in the data; −1 where there are fewer photos than k
    patch: Int[Tensor, "n k"]
    maps: Float[Tensor, "n k rows columns"]  # of similarity
    share: Float[Tensor, "n K"]
    spreads: tuple[Spread, ...] = ()  # n: of each prototype's node


@torch.no_grad()
def find_matches(
    tree: ProtoTree,
    maps: Iterable[MapBatch],
    prototypes: Sequence[int],
    k: int,
    counted: Bool[Tensor, " photos"] | None = None,
) -> Matches:
    """Memory does not grow with the data: only the best k of each prototype are kept, and their similarity maps.

    Photos go a prototype's way as the greedy strategy has it: within its reach, or nearer to it than to its rival.
    `counted` says which places of the data spreads count, where a photo is in the data more than once.
    """
    rivals = [rival_of(tree, prototype) for prototype in prototypes]
    compared = list(dict.fromkeys([*prototypes, *rivals]))
    own, other = ([compared.index(p) for p in some] for some in (prototypes, rivals))
    vectors = tree.prototypes.detach()[compared]
    counts = SpreadCounts(tree, [tree.node_of(p)[0] for p in prototypes])
    is_right = torch.tensor([tree.node_of(p)[1] for p in prototypes], dtype=torch.bool, device=vectors.device)
    best = _none(tree, prototypes, k)
    seen = torch.zeros(tree.n_classes, device=vectors.device)
    for feature_map, labels, places in maps:
        near = nearest_patches(feature_map, vectors)
        distance, rival = near.distance[:, own], near.distance[:, other]
        if tree.question.kind == "presence":
            comes = tree.similarity(distance, prototypes) > 0.5
            right, left = distance, None
        else:
            comes = torch.where(is_right, distance < rival, distance <= rival)  # a tie goes left
            right, left = torch.where(is_right, distance, rival), torch.where(is_right, rival, distance)
        own_place = slice(None) if counted is None else counted[places.cpu()].to(labels.device)
        counts.add(right[own_place], left[own_place] if left is not None else None, labels[own_place])
        best.share.index_add_(1, labels, comes.float().T)
        seen += torch.bincount(labels, minlength=tree.n_classes)
        best = _merge(tree, best, feature_map, distance.T, near.patch[:, own].T, places)
    return replace(best, share=best.share / seen.clamp_min(1), spreads=tuple(counts.spreads()))


def rival_of(tree: ProtoTree, prototype: int) -> int:
    """The prototype on the other side of the same node; itself where a node has but one."""
    return (prototype + tree.topology.n_nodes) % tree.n_prototypes


def _none(tree: ProtoTree, prototypes: Sequence[int], k: int) -> Matches:
    device, count = tree.prototypes.device, len(prototypes)
    return Matches(
        tuple(prototypes),
        torch.full((count, k), torch.inf, device=device),
        torch.full((count, k), -1, device=device),
        torch.zeros((count, k), dtype=torch.long, device=device),
        torch.zeros((count, k, *tree.grid.shape), device=device),
        torch.zeros((count, tree.n_classes), device=device),
    )


def _merge(
    tree: ProtoTree,
    best: Matches,
    feature_map: Float[Tensor, "B D H W"],
    distance: Float[Tensor, "n B"],
    patch: Int[Tensor, "n B"],
    places: Int[Tensor, " B"],
) -> Matches:
    k, chosen = best.distance.shape[1], list(best.prototypes)
    prototypes, reach = tree.prototypes.detach()[chosen], tree.reach[chosen]
    # Stable, so that equal distances stay in the order of the data.
    both, order = torch.sort(torch.cat([best.distance, distance], dim=1), dim=1, stable=True)
    order = order[:, :k]
    maps = best.maps.gather(1, order.clamp_max(k - 1)[:, :, None, None].expand_as(best.maps))
    node, rank = torch.nonzero(order >= k, as_tuple=True)  # only the newcomers' maps are computed
    for own, place in zip(node.split(_PAIRS), rank.split(_PAIRS), strict=True):
        found = patch_distances(feature_map[order[own, place] - k], prototypes[own])
        maps[own, place] = tree.question.similarity(found, reach[own][:, None]).view(-1, *maps.shape[2:])
    return replace(
        best,
        distance=both[:, :k],
        place=torch.cat([best.place, places.expand_as(distance)], dim=1).gather(1, order),
        patch=torch.cat([best.patch, patch], dim=1).gather(1, order),
        maps=maps,
    )

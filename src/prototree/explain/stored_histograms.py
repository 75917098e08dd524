"""How training photos lie at each node, kept with a run from its training on: a decision shows its photo among them.

The pages of a report hold the same, found out with much else. This is there before the first report.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from prototree.core import checkpoint
from prototree.core.model import ProtoTree
from prototree.core.patches import nearest_patches
from prototree.errors import CheckpointError
from prototree.explain.histograms import SpreadCounts
from prototree.explain.records import SPREAD_LIMITS, SPREAD_LINES, SPREAD_RANGES, Spread
from prototree.features.cache import MapBatch
from prototree.files import read_json, write_json

log = logging.getLogger(__name__)

SPREADS = "spreads.json"


@torch.no_grad()
def count_spreads(tree: ProtoTree, maps: Iterable[MapBatch], counted: Bool[Tensor, " photos"]) -> list[Spread]:
    """One per node, from one pass over feature maps; `counted` says which places of the data count.

    In several processes each passes its share; all get the same.
    """
    n_nodes = tree.topology.n_nodes
    counts = SpreadCounts(tree, range(n_nodes))
    for feature_map, labels, places in maps:
        own = counted[places.cpu()].to(labels.device)
        distance = nearest_patches(feature_map[own], tree.prototypes.detach()).distance
        rivals = distance[:, n_nodes:] if tree.question.kind == "pairwise" else None
        counts.add(distance[:, :n_nodes], rivals, labels[own])
    return counts.gather().spreads()


def keep_spreads(tree: ProtoTree, spreads: Iterable[Spread], folder: Path) -> None:
    """Writes them down, with which tree they are of."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = [[list(one.right), list(one.left)] for one in spreads]
    write_json(folder / SPREADS, {"version": 1, "tree": checkpoint.fingerprint(tree), "spreads": counts})


def kept_spreads(tree: ProtoTree, folder: Path) -> dict[int, Spread]:
    """By node; nothing where none are kept, they are of another tree or damaged."""
    path = folder / SPREADS
    if not path.exists():
        return {}
    try:
        content = read_json(path)
        if content.get("tree") != checkpoint.fingerprint(tree) or content.get("version") != 1:
            return {}
        return {node: stored_spread(tree, one) for node, one in enumerate(content["spreads"])}
    except (CheckpointError, LookupError, TypeError, ValueError, OverflowError) as error:
        log.warning("what is kept in %s cannot be used: %s", path, error)
        return {}


def stored_spread(tree: ProtoTree, kept: Any) -> Spread:
    """Counts of both sides as they were stored; an error where they cannot be such."""
    right, left = (tuple(map(int, side)) for side in kept)
    if not len(right) == len(left) == SPREAD_RANGES or min(*right, *left) < 0:
        raise ValueError("its photos are counted in other ranges")
    return Spread(*SPREAD_LIMITS[tree.question.kind], SPREAD_LINES[tree.question.kind], right, left)

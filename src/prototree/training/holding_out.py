"""Photos held out of a training on cached maps, and what a tree says of them.

Notation used for tensor shapes: M photos.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prototree.data.loading import Entry
from prototree.data.views import FULL
from prototree.training import distributed
from prototree.training.batches import CachedBatches, maps_of
from prototree.training.maps import MapCache
from prototree.tree.model import ProtoTree

FEWEST_HELD = 20  # photos that sureness is fitted on, at least


def held_photos(entries: Sequence[Entry], every: int) -> frozenset[int]:
    """Every n-th photo of each class that has as many, by its number in the data."""
    of_class: dict[int, dict[int, None]] = defaultdict(dict)
    for entry in entries:
        of_class[entry.sample.label][entry.sample_index] = None
    chosen = (list(photos)[every - 1 :: every] for photos in of_class.values() if every > 1)
    return frozenset(photo for some in chosen for photo in some)


def without(cache: MapCache, photos: Collection[int]) -> MapCache:
    """The maps of all other photos."""
    return cache.only([place for place, one in enumerate(cache.entries) if one.sample_index not in photos])


@torch.no_grad()
def judged(
    tree: ProtoTree, views: CachedBatches, photos: Collection[int]
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"], Bool[Tensor, " M"]]:
    """Of these photos, shown whole: the lead of the greedy answer, how strange they are, and whether it is right."""
    rows: list[tuple[Tensor, ...]] = []
    table = tree.leaf_table()
    for z, labels, places in maps_of(views, tree.eval().features, tree.prototypes.device):
        entries = [views.entries[place] for place in places.tolist()]
        wanted = [i for i, one in enumerate(entries) if one.view == FULL and one.sample_index in photos]
        if wanted:
            decisions, own = tree.decide(tree.route(z[wanted]), table), labels[wanted]
            rows.append((places[wanted], decisions.lead, decisions.strangeness, decisions.labels("greedy") == own))
    empty = (torch.zeros(0, dtype=torch.long), torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    columns = [torch.cat([column.cpu() for column in part]) for part in zip(empty, *rows, strict=True)]
    leads, strangeness, is_right = distributed.gather_in_order(*columns)
    return leads, strangeness, is_right

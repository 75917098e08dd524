"""The box that people are shown of a patch: around the middle of the match, as in reports, not the network's cell."""

import torch
from jaxtyping import Float
from torch import Tensor

from prototree.core.localization import peak_box, peak_places
from prototree.core.model import ProtoTree
from prototree.core.nodes import LN2
from prototree.core.patches import distance_map
from prototree.data.loading import Entry
from prototree.data.views import photo_size, to_photo
from prototree.editing.edits import Region


@torch.no_grad()
def shown_box(
    tree: ProtoTree,
    entry: Entry,
    feature_map: Float[Tensor, "1 D H W"],
    vector: Float[Tensor, "D H1 W1"],
    reach: float,
    patch: tuple[int, int],
) -> Region:
    """In pixels of the photo: where in a view something is like a prototype, around its nearest patch."""
    apart = distance_map(feature_map, vector[None])[0] / (LN2 * reach)
    row, column = peak_places(apart, torch.tensor([tree.grid.number(*patch)]), tree.grid.rows_per_crop)
    box = peak_box(tree.grid, float(row), float(column))
    return to_photo(box, entry.view, photo_size(entry.sample), tree.preprocessing).edges

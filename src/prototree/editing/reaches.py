"""How far a prototype reaches that somebody has put in another place.

Training learns a reach together with the features. Here they stay, so the reach is where the answer changes: of all
places between two photos' distances the one that says most about which side of the node a photo belongs to.

Notation used for tensor shapes: M photos, K classes.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.core.model import ProtoTree
from prototree.core.nodes import LN2, PAPER, REACH_RANGE
from prototree.training.anchored import USUAL
from prototree.training.projection import side_classes

PAPER_REACH = 1.0  # in units of ln 2


def has_reaches(tree: ProtoTree) -> bool:
    """Whether reaches were learned; in the paper's trees all are the same, and stay so."""
    return tree.question != PAPER or bool((tree.reach != PAPER_REACH).any())


def fitted_reach(
    tree: ProtoTree, prototype: int, distance: Float[Tensor, " M"], labels: Int[Tensor, " M"]
) -> float | None:
    """The reach of a prototype that stands alone, with photos at these distances, in units of ln 2.

    None: nothing speaks for any. Which classes belong to which side is what the leaves of `tree` say.
    """
    left, right = (side[prototype, labels] for side in side_classes(tree))
    is_below = left | right
    reach = best_threshold(distance[is_below], right[is_below])
    if reach is None and right.any():
        reach = float(torch.quantile(distance[right], USUAL))
    return None if reach is None else min(max(reach / LN2, REACH_RANGE[0]), REACH_RANGE[1])


def best_threshold(distance: Float[Tensor, " M"], is_right: Bool[Tensor, " M"]) -> float | None:
    """The middle between two neighbouring distances that says most about the side; of equals that in the widest gap.

    None where all photos belong to one side, or all are as far.
    """
    order = distance.argsort(stable=True)
    far, right = distance[order].double(), is_right[order].double()
    gap = far.diff()
    cuts = torch.nonzero(gap > 0)[:, 0]
    total, n_right = len(far), right.sum()
    if not len(cuts) or n_right in (0, total):
        return None
    n_near = cuts + 1.0
    right_near = right.cumsum(dim=0)[cuts]
    share_near = n_near / total
    unsure = share_near * _entropy(right_near / n_near) + (1 - share_near) * _entropy(
        (n_right - right_near) / (total - n_near)
    )
    equals = torch.nonzero(unsure <= unsure.min() + 1e-9)[:, 0]
    cut = cuts[equals[gap[cuts[equals]].argmax()]]
    return float((far[cut] + far[cut + 1]) / 2)


def _entropy(p: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    return -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))

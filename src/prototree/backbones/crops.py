"""How often the network looks at a picture: at all of it, and perhaps again, closer, at its middle.

A look is named by the share of each side that it covers; the first is 1, the whole picture. The middle is enlarged to
the size of the picture, so the same network sees what it covers larger and in more cells. The maps of all looks stand
one below the other in one map of patches, and the nearest patch counts, in whichever look it is. What a look shows is
a function of the network's input alone: hiding a part of the picture hides it from all of them.

Notation used for tensor shapes: B batch, C channels, H W the map of one look, n looks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from prototree.backbones.geometry import Box, PatchGrid
from prototree.errors import ConfigError

Crops = tuple[float, ...]
FULL_ONLY: Crops = (1.0,)
LEAST_SHARE, MOST_LOOKS = 0.1, 4


def checked(crops: Crops) -> Crops:
    """The same looks, if there are such: the whole picture, then ever smaller shares of it."""
    falls = all(wider > closer for wider, closer in pairwise(crops))
    if not 1 <= len(crops) <= MOST_LOOKS or crops[0] != 1 or crops[-1] < LEAST_SHARE or not falls:
        raise ConfigError(
            f"expected one to {MOST_LOOKS} looks, the first 1 and each smaller than the one before, but at least "
            f"{LEAST_SHARE}; got {crops}"
        )
    return crops


def extent(share: float, side: int) -> Box:
    """What a look covers of a picture of this side, in its pixels."""
    length = max(1, round(share * side))
    start = (side - length) // 2
    return Box(float(start), float(start), float(start + length), float(start + length))


def patch_grid(map_size: tuple[int, int], side: int, crops: Crops, patch: tuple[int, int] = (1, 1)) -> PatchGrid:
    """Where the patches lie in an input of this side, given rows and columns of one look's map and of a patch."""
    extents = () if crops == FULL_ONLY else tuple(extent(share, side) for share in crops)
    return PatchGrid(*map_size, side, *patch, extents)


def look(images: Float[Tensor, "*B 3 side side"], share: float) -> Float[Tensor, "*B 3 side side"]:
    """What the network is shown at a look."""
    if share == 1:
        return images
    side = images.shape[-1]
    edges = slice(*(int(edge) for edge in (extent(share, side).left, extent(share, side).right)))
    middle = images[..., edges, edges].reshape(-1, 3, edges.stop - edges.start, edges.stop - edges.start)
    middle = middle.contiguous(memory_format=torch.channels_last)  # for which it is faster
    return interpolate(middle, size=(side, side), mode="bilinear", align_corners=False).reshape(images.shape)


def stacked(
    network: Callable[[Tensor], Tensor],
    images: Float[Tensor, "B 3 side side"],
    crops: Crops,
    *,
    at_once: bool = False,
) -> Float[Tensor, "B C nH W"]:
    """The maps of all looks, one below the other.

    A network that takes images in pieces, and fills the last piece up, is best asked `at_once` for all looks.
    """
    if crops == FULL_ONLY:
        return network(images)
    shown = [look(images, share) for share in crops]
    maps = network(torch.cat(shown)).chunk(len(crops)) if at_once else [network(one) for one in shown]
    return torch.cat(maps, dim=2)


@dataclass(frozen=True)
class CropTransform:
    """A transform of photos that ends in a closer look at what another one gives."""

    plain: Callable[..., Tensor]
    share: float

    def __call__(self, image: object) -> Float[Tensor, "3 size size"]:
        return look(self.plain(image), self.share)

"""Centre crops: the network sees the full image and, perhaps, its middle again, enlarged.

A crop is the fraction of each side that it covers; the first is 1. The feature maps of all crops are stacked one below
the other into one map of patches, and the nearest patch counts, in whichever crop it is.
Notation used for tensor shapes: B batch, C channels, H W the map of one crop, n crops.
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
MIN_FRACTION, MAX_CROPS = 0.1, 4


def checked_crops(crops: Crops) -> Crops:
    """Refuse anything but the full image followed by ever smaller fractions of it."""
    shrinks = all(wider > closer for wider, closer in pairwise(crops))
    if not 1 <= len(crops) <= MAX_CROPS or crops[0] != 1 or crops[-1] < MIN_FRACTION or not shrinks:
        raise ConfigError(
            f"expected one to {MAX_CROPS} crops, the first 1 and each smaller than the one before, but at least "
            f"{MIN_FRACTION}; got {crops}"
        )
    return crops


def crop_box(fraction: float, side: int) -> Box:
    """The box of a centre crop in an input of this side, in pixels."""
    length = max(1, round(fraction * side))
    start = (side - length) // 2
    return Box(float(start), float(start), float(start + length), float(start + length))


def patch_grid(map_size: tuple[int, int], side: int, crops: Crops, patch: tuple[int, int] = (1, 1)) -> PatchGrid:
    """Where the patches lie in an input of this side, given rows and columns of one crop's map and of a patch."""
    boxes = () if crops == FULL_ONLY else tuple(crop_box(fraction, side) for fraction in crops)
    return PatchGrid(*map_size, side, *patch, boxes)


def center_crop(images: Float[Tensor, "*B 3 side side"], fraction: float) -> Float[Tensor, "*B 3 side side"]:
    """The middle of each image, resized to the size of the whole."""
    if fraction == 1:
        return images
    side = images.shape[-1]
    box = crop_box(fraction, side)
    start, stop = int(box.left), int(box.right)
    middle = images[..., start:stop, start:stop].reshape(-1, 3, stop - start, stop - start)
    middle = middle.contiguous(memory_format=torch.channels_last)  # for which it is faster
    return interpolate(middle, size=(side, side), mode="bilinear", align_corners=False).reshape(images.shape)


def stacked(
    network: Callable[[Tensor], Tensor], images: Float[Tensor, "B 3 side side"], crops: Crops, *, at_once: bool = False
) -> Float[Tensor, "B C nH W"]:
    """The feature maps of all crops, one below the other.

    A network that takes images in pieces, and fills the last piece up, is best called `at_once` for all crops.
    """
    if crops == FULL_ONLY:
        return network(images)
    cropped = [center_crop(images, fraction) for fraction in crops]
    maps = network(torch.cat(cropped)).chunk(len(crops)) if at_once else [network(crop) for crop in cropped]
    return torch.cat(maps, dim=2)


@dataclass(frozen=True)
class CropTransform:
    """Another transform, followed by a centre crop."""

    plain: Callable[..., Tensor]
    fraction: float

    def __call__(self, image: object) -> Float[Tensor, "3 size size"]:
        return center_crop(self.plain(image), self.fraction)

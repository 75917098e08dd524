"""One property of an image altered, all others kept as far as that goes: hue, saturation, contrast, texture, shape.

They answer why a prototype matches: a similarity that survives grey but not bent outlines was about shape. Images are
batches of RGB from 0 to 1. None of them leaves anything to chance.

Notation used for tensor shapes: B batch, h w pixels.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import grid_sample, pad

from prototree.backbones.geometry import Preprocessing
from prototree.explanation.attribution import Features, Probes, similarities
from prototree.explanation.records import PerturbationEffect

Images = Float[Tensor, "B 3 h w"]
Alteration = Literal["hue", "saturation", "contrast", "texture", "shape"]

_LUMA = (0.299, 0.587, 0.114)
_CONTRAST = 0.4  # what is left of it
_SMOOTH_RADIUS = 1 / 40  # of the image's side
_SMOOTH_EDGE = 0.1  # differences of brightness below this are texture, above it edges
_BEND = 0.04  # of the image's side
_WAVES = 3.0  # over the image


def turn_hue(images: Images) -> Images:
    """Every colour becomes its complement of the same lightness and strength, as far as the screen can show it."""
    grey = _luma(images)
    return _within(grey, grey - images)


def remove_saturation(images: Images) -> Images:
    """Grey of the same lightness."""
    return _luma(images).expand_as(images)


def lower_contrast(images: Images) -> Images:
    """Everything nearer to the image's mean colour."""
    mean = images.mean(dim=(2, 3), keepdim=True)
    return mean + _CONTRAST * (images - mean)


def smooth_texture(images: Images) -> Images:
    """Fine detail blurred, edges and colours kept (a guided filter of the image by itself, twice)."""
    radius = max(1, round(_SMOOTH_RADIUS * images.shape[-1]))
    for _ in range(2):
        images = _guided(images, radius)
    return images


def bend_shape(images: Images) -> Images:
    """Outlines bent by waves, colours and fine texture kept."""
    height, width = images.shape[2:]
    y = (torch.arange(height, device=images.device, dtype=images.dtype) + 0.5) / height * 2 - 1
    x = (torch.arange(width, device=images.device, dtype=images.dtype) + 0.5) / width * 2 - 1
    turn = math.pi * _WAVES
    across = x[None, :] + 2 * _BEND * torch.sin(turn * y)[:, None]
    down = y[:, None] + 2 * _BEND * torch.sin(turn * x)[None, :]
    grid = torch.stack([across, down], dim=2).expand(len(images), -1, -1, -1)
    return grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


ALTERATIONS: dict[Alteration, Callable[[Images], Images]] = {
    "hue": turn_hue,
    "saturation": remove_saturation,
    "contrast": lower_contrast,
    "texture": smooth_texture,
    "shape": bend_shape,
}


def perturbation_effects(
    features: Features, probes: Probes, before: Sequence[float], preprocessing: Preprocessing
) -> list[tuple[PerturbationEffect, ...]]:
    """How each probe's similarity changes with each alteration of its image."""
    mean, std = (probes.images.new_tensor(v).view(1, 3, 1, 1) for v in (preprocessing.mean, preprocessing.std))
    pixels = (probes.images * std + mean).clamp(0, 1)
    altered = torch.cat([(alter(pixels) - mean) / std for alter in ALTERATIONS.values()])
    rows = [row for _ in ALTERATIONS for row in range(len(probes))]
    found = similarities(features, probes.with_images(altered, rows)).view(len(ALTERATIONS), -1).T.tolist()
    return [
        tuple(PerturbationEffect(name, after - start) for name, after in zip(ALTERATIONS, row, strict=True))
        for row, start in zip(found, before, strict=True)
    ]


def _luma(images: Images) -> Float[Tensor, "B 1 h w"]:
    weights = images.new_tensor(_LUMA).view(1, 3, 1, 1)
    return (weights * images).sum(dim=1, keepdim=True)


def _within(grey: Float[Tensor, "B 1 h w"], colour: Images) -> Images:
    """grey + colour, with the colour weakened where it would leave [0, 1], so that the lightness stays."""
    room = torch.where(colour > 0, (1 - grey) / colour.clamp_min(1e-6), grey / (-colour).clamp_min(1e-6))
    return grey + colour * room.amin(dim=1, keepdim=True).clamp(0, 1)


def _guided(images: Images, radius: int) -> Images:
    mean = _blur(images, radius)
    variance = (_blur(images * images, radius) - mean * mean).clamp_min(0).amax(dim=1, keepdim=True)
    keep = variance / (variance + _SMOOTH_EDGE**2)
    return _blur(keep, radius) * images + _blur((1 - keep) * mean, radius)


def _blur(images: Float[Tensor, "B C h w"], radius: int) -> Float[Tensor, "B C h w"]:
    """The mean over a square window: sums from the edge to here, less sums from the edge to the window's start."""
    edge = min(radius, images.shape[-1] - 1, images.shape[-2] - 1)
    width, padded = 2 * edge + 1, pad(images, (edge,) * 4, mode="reflect")
    down = pad(padded, (0, 0, 1, 0)).cumsum(dim=2)
    rows = (down[:, :, width:] - down[:, :, :-width]) / width
    across = pad(rows, (1, 0)).cumsum(dim=3)
    return (across[..., width:] - across[..., :-width]) / width

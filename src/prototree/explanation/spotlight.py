"""Spotlight on a patch: what to light up of a patch with its surroundings, from the heat maps of its match.

The box of a match is a square about one cell of the feature map, and may lie half on the background. What the network
looks at there is in the heat maps: the similarity of the cells, and the attribution to pixels where there is one.
"""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageFilter

from prototree.backbones.geometry import Box, Size
from prototree.explanation.records import CONTEXT_SCALE, Heatmap, Location

SIDE = 32  # of a spotlight, which is stretched over its picture
_BLUR = 2.7
_WIDE, _NEAR = 2.0, 1.4  # how far from the box attribution and similarity count, in halves of its side
_NEAR_WEIGHT = 0.4
_DARK, _BRIGHT = 0.25, 0.7  # below and above these all is dark, or all is light


def spotlight(locations: Sequence[Location], box: Box, size: Size) -> Heatmap:
    """Weight what lies around a box in a photo of this size, in the square of `Box.context_square`: 1 is fully lit."""
    region = box.context_square(CONTEXT_SCALE, size)
    left, top, right, bottom = box.clip(size).relative_to(region)
    y, x = (np.mgrid[0:SIDE, 0:SIDE] + 0.5) / SIDE
    half = max((right - left + bottom - top) / 4, 1e-3)
    distance = np.hypot(x - (left + right) / 2, y - (top + bottom) / 2) / half
    heats = {where.method: _peaked(_cut(where.heat, region, size)) for where in locations}
    similarity = heats.get("peak", heats.get("cell", np.ones_like(distance)))
    pixels = np.sqrt(heats.get("attribution", similarity))
    wide = _peaked(_blurred(pixels) * np.exp(-0.5 * (distance / _WIDE) ** 2))
    near = similarity * np.exp(-0.5 * (distance / _NEAR) ** 2)
    light = _peaked((1 - _NEAR_WEIGHT) * wide + _NEAR_WEIGHT * near)
    ramp = np.clip((light - _DARK) / (_BRIGHT - _DARK), 0.0, 1.0)
    return (ramp**2 * (3 - 2 * ramp)).astype(np.float32)


def _cut(heat: Heatmap, region: Box, size: Size) -> Heatmap:
    """Cut a region out of the heat map of a whole photo."""
    (rows, columns), (width, height) = heat.shape, size
    across, down = columns / width, rows / height
    edges = (region.left * across, region.top * down, region.right * across, region.bottom * down)
    edges = (max(edges[0], 0.0), max(edges[1], 0.0), min(edges[2], columns), min(edges[3], rows))
    if edges[2] <= edges[0] or edges[3] <= edges[1]:
        return np.ones((SIDE, SIDE), dtype=np.float32)
    picture = Image.fromarray(np.nan_to_num(heat).astype(np.float32))
    return np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=edges)).clip(0.0, 1.0)


def _blurred(heat: Heatmap) -> Heatmap:
    picture = Image.fromarray((255 * heat).astype(np.uint8)).filter(ImageFilter.GaussianBlur(_BLUR))
    return np.asarray(picture).astype(np.float32) / 255


def _peaked(heat: Heatmap) -> Heatmap:
    """Scale so that the largest value is 1; a map of nothing is even."""
    return heat / heat.max() if heat.max() > 0 else np.ones_like(heat)

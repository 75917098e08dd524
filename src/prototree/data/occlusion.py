"""Views of whole images in which one box is occluded, for the occlusion loss.

The fill differs from view to view, and is never the image's mean colour: that is what trees are tested with, so that
none can learn the test by heart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, get_args

import numpy as np
from PIL import Image

from prototree.backbones.geometry import Box
from prototree.data.crops import View
from prototree.data.dataset import Sample

Fill = Literal["blur", "noise", "margin"]
_FILLS: tuple[Fill, ...] = get_args(Fill)
_COARSE = 9  # pixels each way that a blurred image keeps


@dataclass(frozen=True, kw_only=True)
class OccludedView(View):
    """A view with a box occluded: its edges as fractions of the view's sides, and what is put there."""

    box: Box
    fill: Fill
    seed: int  # of the noise, and of the corner that a piece of the margin is taken from

    def apply_effect(self, square: Image.Image) -> Image.Image:
        """Occlude the box in the square."""
        pixels, rng = np.array(square), np.random.default_rng(self.seed)
        side = len(pixels)
        left, top, right, bottom = (round(side * edge) for edge in self.box.edges)
        if self.fill == "blur":
            coarse = square.resize((_COARSE, _COARSE), Image.Resampling.BOX)
            fill = np.asarray(coarse.resize(square.size, Image.Resampling.BILINEAR))[top:bottom, left:right]
        elif self.fill == "noise":
            mean, std = pixels.mean(axis=(0, 1)), pixels.std(axis=(0, 1))
            fill = rng.normal(mean, std, (bottom - top, right - left, 3)).round().clip(0, 255)
        else:
            y, x = (int(rng.integers(2)) * (side - length) for length in (bottom - top, right - left))
            fill = pixels[y : y + bottom - top, x : x + right - left].copy()
        pixels[top:bottom, left:right] = fill
        return Image.fromarray(pixels)


@dataclass(frozen=True)
class OccludedViews:
    """An occluded view for each box of an image; the same for the same boxes, whatever the file's name."""

    boxes: Mapping[Path, Sequence[Box]]

    def __call__(self, sample: Sample) -> tuple[OccludedView, ...]:
        views = []
        for number, box in enumerate(self.boxes.get(sample.path, ()), 1):
            rng = Random(repr(box.edges))
            fill = rng.choice(_FILLS)
            views.append(OccludedView(f"occluded {number}", box=box, fill=fill, seed=rng.getrandbits(32)))
        return tuple(views)

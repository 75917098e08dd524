"""Views of whole photos in which one place is hidden: a tree that shall need what it shows learns from them.

What is put there differs from view to view, and is never the photo's mean colour: that is what trees are tested with
(`explain.altered_photos`), so that none can learn the test by heart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, get_args

import numpy as np
from PIL import Image

from prototree.backbones.geometry import Box
from prototree.data.dataset import Sample
from prototree.data.views import View

Fill = Literal["blur", "noise", "margin"]
_FILLS: tuple[Fill, ...] = get_args(Fill)
_COARSE = 9  # pixels each way that a blurred photo keeps


@dataclass(frozen=True, kw_only=True)
class HiddenView(View):
    """A view with a place hidden: its edges as shares of the view's sides, and what is put there."""

    place: Box
    fill: Fill
    seed: int  # of the noise, and of the corner that a piece of the margin is taken from

    def altered(self, square: Image.Image) -> Image.Image:
        """The square with the place hidden."""
        pixels, random = np.array(square), np.random.default_rng(self.seed)
        side = len(pixels)
        left, top, right, bottom = (round(side * edge) for edge in self.place.edges)
        if self.fill == "blur":
            coarse = square.resize((_COARSE, _COARSE), Image.Resampling.BOX)
            put = np.asarray(coarse.resize(square.size, Image.Resampling.BILINEAR))[top:bottom, left:right]
        elif self.fill == "noise":
            colour, spread = pixels.mean(axis=(0, 1)), pixels.std(axis=(0, 1))
            put = random.normal(colour, spread, (bottom - top, right - left, 3)).round().clip(0, 255)
        else:
            y, x = (int(random.integers(2)) * (side - length) for length in (bottom - top, right - left))
            put = pixels[y : y + bottom - top, x : x + right - left].copy()
        pixels[top:bottom, left:right] = put
        return Image.fromarray(pixels)


@dataclass(frozen=True)
class HiddenViews:
    """For photos of which places are known, a view for each; the same for the same places, whatever the file's name."""

    places: Mapping[Path, Sequence[Box]]

    def __call__(self, sample: Sample) -> tuple[HiddenView, ...]:
        return tuple(
            _hidden(f"hidden {number}", place) for number, place in enumerate(self.places.get(sample.path, ()), 1)
        )


def _hidden(name: str, place: Box) -> HiddenView:
    random = Random(repr(place.edges))
    return HiddenView(name, place=place, fill=random.choice(_FILLS), seed=random.getrandbits(32))

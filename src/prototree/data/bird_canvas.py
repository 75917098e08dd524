"""A canvas that keeps, beside the colour of each pixel, what is painted there; and smooth outlines for it.

Colour and label are drawn in one stroke into the four bands of one image, several times larger than asked for.
Unpainted pixels are black with label 0, so reducing the image gives colours already weighted by their cover.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Points = NDArray[np.float64]
Colour = tuple[int, int, int]

SCENERY_LABEL = 255


@dataclass(frozen=True)
class Frame:
    """An affine map from drawing units to canvas pixels: `points @ matrix.T + origin`."""

    matrix: NDArray[np.float64]
    origin: NDArray[np.float64]

    def place(self, points: Points) -> Points:
        """Canvas pixels of points given in this frame's units."""
        return points @ self.matrix.T + self.origin

    def inner(self, at: Sequence[float], degrees: float = 0.0, stretch: Sequence[float] = (1.0, 1.0)) -> "Frame":
        """A frame whose origin is this frame's point `at`, turned and stretched there."""
        angle = np.deg2rad(degrees)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        return Frame(self.matrix @ turn * np.asarray(stretch), self.matrix @ np.asarray(at, float) + self.origin)

    @property
    def unit(self) -> float:
        """Canvas pixels per drawing unit."""
        return float(np.hypot(self.matrix[0, 1], self.matrix[1, 1]))


@cache
def smooth(*corners: tuple[float, float], closed: bool = True, steps: int = 5) -> Points:
    """A Catmull-Rom curve through the corners; naming a corner twice keeps it sharp."""
    points = np.array(corners, dtype=float)
    padded = np.concatenate([points[-1:], points, points[:2]] if closed else [points[:1], points, points[-1:]])
    before, start, end, after = padded[:-3, None], padded[1:-2, None], padded[2:-1, None], padded[3:, None]
    t = np.linspace(0, 1, steps, endpoint=False)[None, :, None]
    curve = start + 0.5 * t * (
        end - before + t * (2 * before - 5 * start + 4 * end - after + t * (3 * (start - end) + after - before))
    )
    curve = curve.reshape(-1, 2)
    curve = curve if closed else np.concatenate([curve, points[-1:]])
    curve.flags.writeable = False  # cached: a caller must not change it
    return curve


def mix(first: Colour, second: Colour, share: float) -> Colour:
    """The first colour with a share of the second."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return red, green, blue


class Canvas:
    """Paints labelled shapes, anti-aliased by reduction."""

    def __init__(self, size: int, supersampling: int) -> None:
        self.size = size
        self.supersampling = supersampling
        self._image = Image.new("RGBX", (size * supersampling, size * supersampling))
        self._draw = ImageDraw.Draw(self._image)

    def fill(self, points: Points, colour: Colour, label: int, edge: float = 0.0) -> None:
        """A filled outline; `edge` is the width in canvas pixels of a darker rim of the same label."""
        flat = points.ravel().tolist()
        self._draw.polygon(flat, fill=(*colour, label))
        if edge > 0:
            dark = mix(colour, (40, 30, 40), 0.38)
            self._draw.line(flat + flat[:2], fill=(*dark, label), width=max(1, round(edge)))

    def stroke(self, points: Points, colour: Colour, label: int, width: float) -> None:
        """A line through the points, with joints rounded."""
        self._draw.line(points.ravel().tolist(), fill=(*colour, label), width=max(1, round(width)), joint="curve")

    def dot(self, centre: Points, radius: float, colour: Colour, label: int) -> None:
        """A filled circle."""
        x, y = centre.tolist()
        self._draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(*colour, label))

    def labels(self) -> Image.Image:
        """The labels at canvas resolution."""
        return self._image.getchannel(3)

    def colours(self) -> NDArray[np.float32]:
        """Colours weighted by cover at the final size, H W 3 in 0 to 255."""
        return np.asarray(self._image.reduce(self.supersampling), dtype=np.float32)[..., :3]

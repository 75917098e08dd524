"""A canvas that keeps, beside the colour of each pixel, what is painted there; and smooth outlines for it.

Colour and label are drawn in one stroke into the four bands of one image, several times larger than asked
for and reduced at the end; so every edge is anti-aliased and every pixel's part is exact.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Points = NDArray[np.float64]
Point = tuple[float | int, float | int]  # spelled out for run-time checks, which tell them apart
Colour = tuple[int, int, int]

SCENERY_LABEL = 255


@dataclass(frozen=True)
class Frame:
    """An affine map from drawing units to canvas pixels: `points @ matrix.T + origin`."""

    matrix: NDArray[np.float64]
    origin: NDArray[np.float64]

    def place(self, points: Points) -> Points:
        """Canvas pixels of points given in this frame's units."""
        placed: Points = np.dot(points, self.matrix.T)  # for arrays this small, faster than @
        placed += self.origin
        return placed

    def inner(self, at: Point, degrees: float = 0.0, stretch: Point = (1.0, 1.0)) -> "Frame":
        """A frame whose origin is this frame's point `at`, turned and stretched there."""
        cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        (wide, tall), (x, y) = stretch, at
        turn = np.array([[cosine * wide, -sine * tall], [sine * wide, cosine * tall]])
        return Frame(self.matrix @ turn, self.matrix @ np.array([x, y], dtype=float) + self.origin)

    @cached_property
    def unit(self) -> float:
        """Canvas pixels per drawing unit."""
        return math.hypot(self.matrix[0, 1], self.matrix[1, 1])


def smooth(*corners: Point, closed: bool = True, steps: int = 4) -> Points:
    """A Catmull-Rom curve through the corners; naming a corner twice keeps it sharp."""
    points = np.array(corners, dtype=float)
    padded = np.concatenate([points[-1:], points, points[:2]] if closed else [points[:1], points, points[-1:]])
    before, start, end, after = padded[:-3, None], padded[1:-2, None], padded[2:-1, None], padded[3:, None]
    t = np.linspace(0, 1, steps, endpoint=False)[None, :, None]
    curve = start + 0.5 * t * (
        end - before + t * (2 * before - 5 * start + 4 * end - after + t * (3 * (start - end) + after - before))
    )
    curve = curve.reshape(-1, 2)
    return curve if closed else np.concatenate([curve, points[-1:]])


def mix(first: Colour, second: Colour, share: float) -> Colour:
    """The first colour with a share of the second."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return red, green, blue


@lru_cache(maxsize=1024)
def line_on(colour: Colour, strength: float) -> Colour:
    """A colour for lines drawn on another: darker, or lighter where the ground is too dark for that."""
    if sum(colour) < 240:
        return mix(colour, (236, 236, 244), 0.55 * strength)
    return mix(colour, (44, 36, 44), strength)


class Canvas:
    """Paints labelled shapes onto a square background image."""

    def __init__(self, background: Image.Image, supersampling: int) -> None:
        self.size = background.width
        self.supersampling = supersampling
        self.width = self.size * supersampling
        # Pillow fills the fourth band with the label of scenery.
        self._image = background.convert("RGBX").resize((self.width, self.width), Image.Resampling.NEAREST)
        self._draw = ImageDraw.Draw(self._image)

    def fill(self, points: Points, colour: Colour, label: int, edge: float = 0.0) -> None:
        """A filled outline; `edge` is the width in canvas pixels of a visible rim of the same label."""
        flat = points.ravel().tolist()
        self._draw.polygon(flat, fill=(*colour, label))
        if edge > 0:
            self._draw.line(flat + flat[:2], fill=(*line_on(colour, 0.4), label), width=max(1, round(edge)))

    def stroke(self, points: Points, colour: Colour, label: int, width: float) -> None:
        """A line through the points."""
        self._draw.line(points.ravel().tolist(), fill=(*colour, label), width=max(1, round(width)))

    def dot(self, centre: Points, radius: float, colour: Colour, label: int) -> None:
        """A filled circle."""
        x, y = centre.tolist()
        self._draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(*colour, label))

    def labels(self) -> NDArray[np.uint8]:
        """What is seen in the middle of each final pixel, H W."""
        return np.asarray(self._image.resize((self.size, self.size), Image.Resampling.NEAREST))[..., 3]

    def colours(self) -> NDArray[np.float32]:
        """The picture at its final size, H W 3 in 0 to 255."""
        return np.asarray(self._image.reduce(self.supersampling).convert("RGB"), dtype=np.float32)

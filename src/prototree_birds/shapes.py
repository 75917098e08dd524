"""A canvas that keeps what is painted at each pixel, smooth outlines, and the outlines of a bird's parts.

Colour and label are drawn in one stroke into the four bands of one image, several times larger than asked for and
reduced at the end; so every edge is anti-aliased and every pixel's part is exact. Outlines are in units of about a
hundredth of the bird's length (x forward, y down). Body, belly and wing share the body's frame; the head's parts have
their origin in the middle of the head; the tail lies along its own x axis. A corner named twice is sharp.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

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


FEET = (7.0, 49.0)
TOES = np.array([[(0.0, -0.5), tip] for tip in ((-5.0, 2.5), (1.0, 5.0), (5.5, 4.0), (8.0, 1.5))])
HIP = (4.0, 28.0)
NECK = (17.0, -20.0)
HEAD_FROM_NECK = (7.0, -12.0)
TAIL_BASE, TAIL_ANGLE = (-22.0, 17.0), 146.0

# Belly and wing cover the body with some to spare: only its back shows, and no hairline elsewhere.
BODY = smooth(
    (5, -31), (-10, -18), (-21, -1), (-25, 15), (-26, 27), (-18, 33), (4, 34), (20, 25), (30, 9), (32, -10),
    (30, -28),
)  # fmt: skip
BELLY = smooth(
    (35.5, -24), (36.8, -10), (34.8, 9), (23.6, 27.6), (4, 37.6), (-18, 37.6), (-34, 32), (-34, 32),
    (-18, 23), (-4, 18), (8, 10), (14, -2), (17, -14), (24, -22),
)  # fmt: skip
BELLY_RIM = smooth(
    (35.5, -20), (36.8, -10), (34.8, 9), (23.6, 27.6), (4, 37.6), (-18, 37.6), (-34, 32), closed=False
)  # fmt: skip
SKULL = smooth((-19, 4), (-17, -9), (-6, -18.5), (7, -18), (17, -9), (19, 3), (13, 14), (0, 18), (-13, 15))
SKULL_RIM = smooth((-19, 4), (-17, -9), (-6, -18.5), (7, -18), (17, -9), (19, 3), closed=False)
CAP = smooth((-19, 1), (-17, -9), (-6, -18.5), (7, -18), (16, -10), (18, -5), (18, -5), (8, -9), (-4, -8), (-13, -2))
CHEEK = smooth((-11, 5), (-2, 3), (8, 5), (8, 12), (0, 16), (-9, 13))
EYE = np.array((7.5, -2.5))
EYE_STRIPE = smooth((17, -3), (8, -7), (-4, -5), (-17, 2), (-17, 2), (-5, 4), (8, 3), (17, 1))

WING = {
    "rounded": smooth(
        (19, -4), (11, -13), (-4, -12), (-20, 0), (-35, 19), (-38, 28), (-30, 30), (-10, 28), (9, 19), (19, 7)
    ),
    "pointed": smooth(
        (19, -4), (11, -13), (-4, -12), (-24, 2), (-46, 25), (-54, 38), (-54, 38), (-38, 35), (-12, 26), (9, 17),
        (19, 7),
    ),
}  # fmt: skip
TAIL = {
    "square": smooth((0, -8), (22, -9), (42, -10.5), (42, -10.5), (43, 9.5), (43, 9.5), (22, 8), (0, 8)),
    "forked": smooth((0, -8), (20, -10), (50, -18), (50, -18), (29, 0), (29, 0), (50, 16), (50, 16), (20, 9), (0, 8)),
    "long": smooth((0, -8), (25, -7), (54, -6), (60, 0), (54, 6), (25, 7), (0, 8)),
    "fan": smooth((0, -7), (18, -14), (35, -24), (42, -12), (44, 0), (42, 12), (35, 23), (18, 13), (0, 7)),
}
TAIL_QUILLS = {
    shape: np.array([[(4, side * 3), (length - abs(side) * 2, side * spread)] for side in (-0.6, -0.2, 0.2, 0.6)])
    for shape, length, spread in (("square", 41, 7), ("forked", 27, 9), ("long", 55, 4), ("fan", 38, 17))
}
BEAK = {
    "cone": smooth((13, -6), (23, -5), (33, 2), (33, 2), (23, 8), (14, 10)),
    "needle": smooth((14, -3), (25, -1.5), (40, 0.8), (41, 2), (40, 3.2), (26, 5), (14, 6.5)),
    "hook": smooth((12, -7), (24, -7), (33, 0), (34, 9), (33, 11), (31, 9.5), (28, 6), (22, 8), (13, 9)),
    "sickle": smooth((14, -4), (28, -3), (40, 5), (47, 16), (47, 18), (45.5, 17.5), (36, 10), (26, 6), (14, 7)),
    "dagger": smooth((11, -8), (24, -6), (46, 0.6), (48, 2), (46, 3.4), (25, 8), (12, 10)),
}
GAPE = {
    "cone": smooth((14, 2), (22, 2.5), (32, 2), closed=False),
    "needle": smooth((15, 2), (26, 2), (39, 2), closed=False),
    "hook": smooth((13, 3), (24, 3), (29, 4), closed=False),
    "sickle": smooth((15, 2), (28, 2), (38, 7.5), (45, 15), closed=False),
    "dagger": smooth((13, 1.5), (25, 1), (46, 2), closed=False),
}
GLINT = np.array([(18, -2.5), (23, -1.8)])
CREST = {
    "tuft": (smooth((10, -15), (4, -24), (-8, -33), (-22, -38), (-22, -38), (-17, -26), (-17, -10)),),
    "spikes": (
        smooth((-4, -14), (-16, -22), (-31, -23), (-31, -23), (-22, -13), (-14, -6)),
        smooth((4, -14), (-6, -28), (-20, -37), (-20, -37), (-15, -22), (-8, -12)),
        smooth((12, -14), (6, -30), (-2, -42), (-2, -42), (-4, -26), (-3, -14)),
    ),
    "fan": (
        smooth((13, -14), (17, -28), (10, -39), (-3, -42), (-16, -38), (-25, -28), (-25, -17), (-14, -8), (0, -12)),
    ),
    "plume": (smooth((4, -16), (2, -28), (8, -39), (19, -43), (27, -37), (23, -29), (16, -31), (11, -26), (10, -16)),),
}
_FAN_ANGLES = np.deg2rad(range(-148, -39, 18))
CREST_QUILLS = {
    "tuft": np.stack([
        smooth((2, -18), (-6, -28), (-17, -35), closed=False), smooth((-6, -18), (-11, -25), (-18, -32), closed=False),
    ]),
    "spikes": np.stack([
        smooth((-10, -14), (-18, -18), (-27, -21), closed=False),
        smooth((-2, -18), (-9, -27), (-17, -34), closed=False),
        smooth((5, -18), (2, -29), (-2, -38), closed=False),
    ]),
    "fan": np.stack([
        np.array([(-3.0, -12.0)]) + np.array([[12.0], [26.0]]) * (np.cos(angle), np.sin(angle))
        for angle in _FAN_ANGLES
    ]),
    "plume": smooth((7, -18), (6, -28), (12, -36), (20, -37), closed=False)[None],
}  # fmt: skip

# Where light and shadow fall, as outlines that are blurred before use.
UNDERSIDE = smooth((38, 6), (30, 20), (20, 28), (4, 32), (-18, 33), (-34, 28), (-34, 42), (4, 44), (28, 36), (42, 16))
UNDER_WING = smooth((19, 6), (9, 18), (-10, 27), (-34, 29), (-34, 36), (-8, 34), (14, 25), (24, 10))
SHOULDER = smooth((12, -14), (-4, -13), (-22, 3), (-30, 14), (-20, 8), (-4, -2), (12, -6))
BREAST = smooth((34, -16), (34, 0), (28, 10), (24, 4), (26, -10))
CHIN = smooth((-16, 12), (0, 14), (14, 10), (16, 18), (2, 23), (-16, 20))
BROW = smooth((-14, -12), (-4, -18), (7, -17), (14, -9), (4, -10), (-6, -10))
TAIL_ROOT = smooth((6, -10), (20, -10), (20, 9), (6, 10))


@cache
def cut(part: str, shape: str, low: float, high: float) -> Points:
    """The slice of a belly, wing or tail that lies between two distances along the part."""
    outlines, degrees = {"belly": ({"round": BELLY}, 78.0), "wing": (WING, 138.0), "tail": (TAIL, 0.0)}[part]
    direction = np.array([np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))])
    return _keep_above(_keep_above(outlines[shape], direction, low), -direction, -high)


def _keep_above(points: Points, direction: Points, bound: float) -> Points:
    """Sutherland and Hodgman's clipping of a polygon at one line."""
    heights = points @ direction - bound
    kept = []
    for start, end, here, there in zip(points, np.roll(points, -1, 0), heights, np.roll(heights, -1), strict=True):
        if here >= 0:
            kept.append(start)
        if (here >= 0) != (there >= 0):
            kept.append(start + (end - start) * here / (here - there))
    return np.array(kept).reshape(-1, 2)


def _inside(points: Points, outline: Points) -> Points:
    """The points that a ray to the right leaves an odd number of times."""
    start, end = outline, np.roll(outline, -1, 0)
    x, y = points[:, :1], points[:, 1:]
    crosses = (start[:, 1] > y) != (end[:, 1] > y)
    rise = np.where(end[:, 1] == start[:, 1], 1.0, end[:, 1] - start[:, 1])
    at = start[:, 0] + (y - start[:, 1]) / rise * (end[:, 0] - start[:, 0])
    inside: Points = points[(crosses & (x < at)).sum(1) % 2 == 1]
    return inside


def _scales(outline: Points, spacing: float, width: float, degrees: float) -> Points:
    """Small arcs in staggered rows over an outline: a hint of feathers."""
    arc = width * np.array([(-0.5, -0.25), (-0.2, 0.18), (0.2, 0.18), (0.5, -0.25)])
    scales: Points = _staggered(outline, spacing, degrees)[:, None] + arc @ _turned(degrees)
    return scales


def _turned(degrees: float) -> Points:
    angle = np.deg2rad(degrees)
    return np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])


def _staggered(outline: Points, spacing: float, degrees: float) -> Points:
    """A staggered grid of points well inside an outline."""
    cells = [(column, row) for row in range(-20, 21) for column in range(-15, 16)]
    rows = [(column * spacing + row % 2 * spacing / 2, row * spacing * 0.8) for column, row in cells]
    middle = outline.mean(0)
    return _inside(np.array(rows) @ _turned(degrees) + middle, middle + (outline - middle) * 0.86)


BACK_FEATHERS = _scales(smooth((8, -30), (-6, -18), (-14, -8), (-4, -12), (12, -14)), 7.0, 5.0, 45.0)
BELLY_FEATHERS = _scales(smooth((33, -18), (34, 9), (4, 36), (-14, 35), (6, 25), (20, 12), (22, -12)), 9.0, 4.5, 15.0)
BELLY_MARKS = _staggered(BELLY, 8.5, 15.0)
NECK_FEATHERS = _scales(smooth((-18, 4), (13, 7), (12, 15), (0, 18), (-12, 15)), 7.5, 4.5, 20.0)
COVERTS = _scales(smooth((17, -4), (10, -12), (-4, -11), (-16, -1), (-4, 16), (9, 17), (18, 6)), 8.5, 7.0, 48.0)
FLIGHT_FEATHERS = {
    "rounded": np.stack([
        smooth((7 - 6 * i, 17.5 - 7.5 * i), (-12 - 4.5 * i, 25 - 5 * i), (-33 - 0.8 * i, 29 - 2.2 * i), closed=False)
        for i in range(4)
    ]),
    "pointed": np.stack([
        smooth((5 - 6 * i, 16 - 7 * i), (-16 - 5 * i, 25 - 5 * i), (-44 - 2.5 * i, 36 - 0.3 * i), closed=False)
        for i in range(4)
    ]),
}  # fmt: skip

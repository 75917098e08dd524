"""What surrounds a bird: a blurred background, a perch, leaves in front of it, and the planted berries."""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from prototree_birds.shapes import SCENERY_LABEL, Canvas, Colour, Frame, Points, mix, smooth

_GRID = 48  # backgrounds are out of focus, so a coarse grid holds all there is to see

_FOLIAGE = ((112, 142, 82), (146, 168, 92), (84, 116, 72), (182, 190, 116), (98, 134, 104))
_AUTUMN = ((198, 142, 72), (176, 106, 62), (222, 184, 112), (150, 118, 74), (206, 164, 124))
_LEAF = ((92, 136, 62), (122, 156, 72), (74, 116, 68), (170, 150, 62), (150, 110, 60))
_BARK = ((118, 92, 70), (96, 78, 64), (142, 116, 92), (110, 104, 98))
_STONE = ((138, 136, 130), (120, 118, 120), (150, 140, 126))
_BERRY: Colour = (222, 24, 44)

Brush = ImageDraw.ImageDraw


def paint_background(rng: np.random.Generator, size: int) -> Image.Image:
    """A soft scene to put behind the bird."""
    paint, colours, blur = _BACKGROUNDS[int(rng.integers(len(_BACKGROUNDS)))]
    top, bottom = (np.array(colour) + rng.uniform(-14, 14, 3) for colour in colours)
    bend = np.linspace(0, 1, _GRID)[:, None] ** rng.uniform(0.7, 1.5)
    ramp = np.clip(top + (bottom - top) * bend, 0, 255).astype(np.uint8)
    image = Image.fromarray(np.repeat(ramp[:, None], _GRID, axis=1))
    paint(ImageDraw.Draw(image), rng)
    soft = image.filter(ImageFilter.GaussianBlur(blur * float(rng.uniform(0.7, 1.4))))
    return soft.resize((size, size), Image.Resampling.BILINEAR)


def _discs(
    draw: Brush, rng: np.random.Generator, colours: tuple[Colour, ...], count: int, low: float, high: float
) -> None:
    """Round blurs of light between the heights `low` and `high`, given as shares of the image."""
    for x, y, radius, pick in rng.random((count, 4)).tolist():
        x, y, radius = x * _GRID, (low + (high - low) * y) * _GRID, 1.5 + 6.0 * radius**2
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colours[int(pick * len(colours))])


def _paint_foliage(draw: Brush, rng: np.random.Generator) -> None:
    _discs(draw, rng, _FOLIAGE, 28, 0.0, 1.0)
    _discs(draw, rng, ((222, 226, 168), (196, 212, 150)), 5, 0.0, 0.6)


def _paint_autumn(draw: Brush, rng: np.random.Generator) -> None:
    _discs(draw, rng, _AUTUMN, 26, 0.0, 1.0)
    _discs(draw, rng, ((246, 224, 170),), 5, 0.0, 0.7)


def _paint_clouds(draw: Brush, rng: np.random.Generator) -> None:
    for x, y, width in rng.random((4, 3)).tolist():
        for step in range(4):
            left, top = (x - 0.2 + 0.1 * step * (0.5 + width)) * _GRID, (0.8 * y - 0.03 * (step % 2)) * _GRID
            draw.ellipse((left, top, left + 11, top + 5 + 2 * (step % 2)), fill=(244, 246, 248))


def _paint_hills(draw: Brush, rng: np.random.Generator) -> None:
    for level, tone in ((0.62, (150, 138, 160)), (0.78, (116, 112, 130))):
        heights = (level + rng.uniform(-0.1, 0.1, 6)) * _GRID
        ridge = list(zip(np.linspace(0, _GRID, 6).tolist(), heights.tolist(), strict=True))
        draw.polygon([(0, _GRID), *ridge, (_GRID, _GRID)], fill=tone)


def _paint_meadow(draw: Brush, rng: np.random.Generator) -> None:
    horizon = float(rng.uniform(0.4, 0.65))
    draw.rectangle((0, horizon * _GRID, _GRID, _GRID), fill=(142, 168, 92))
    _discs(draw, rng, _FOLIAGE, 14, horizon - 0.04, 1.0)
    for x, y, pick in rng.random((10, 3)).tolist():
        x, y = x * _GRID, (horizon + (1 - horizon) * y) * _GRID
        tone = ((240, 214, 120), (226, 170, 190), (244, 240, 230))[int(3 * pick)]
        draw.ellipse((x - 1.2, y - 1.2, x + 1.2, y + 1.2), fill=tone)


def _paint_water(draw: Brush, rng: np.random.Generator) -> None:
    for x, y, width, pick in rng.random((26, 4)).tolist():
        tone = ((196, 214, 218), (128, 162, 172), (110, 146, 150))[int(3 * pick)]
        left, top = (1.3 * x - 0.3) * _GRID, (0.3 + 0.7 * y) * _GRID
        draw.ellipse((left, top, left + 6 + 16 * width, top + 2), fill=tone)


def _paint_trunks(draw: Brush, rng: np.random.Generator) -> None:
    for x, width, slant in rng.random((5, 3)).tolist():
        left, right, shift = x * _GRID, x * _GRID + 2 + 4 * width, 6 * (slant - 0.5)
        tone = mix((78, 74, 66), (128, 118, 100), slant)
        draw.polygon([(left, 0), (right, 0), (right + shift, _GRID), (left + shift, _GRID)], fill=tone)
    _discs(draw, rng, _FOLIAGE[:3], 8, 0.6, 1.0)


def _paint_nothing(draw: Brush, rng: np.random.Generator) -> None:
    """Mist: the gradient is all there is."""


# Each: what is painted, the colours at the top and at the bottom, and the blur in _GRID cells.
_BACKGROUNDS: tuple[tuple[Callable[[Brush, np.random.Generator], None], tuple[Colour, Colour], float], ...] = (
    (_paint_foliage, ((156, 180, 112), (88, 118, 76)), 1.7),
    (_paint_autumn, ((222, 190, 130), (146, 104, 72)), 1.7),
    (_paint_clouds, ((126, 176, 216), (206, 224, 232)), 1.5),
    (_paint_hills, ((236, 196, 176), (196, 172, 190)), 0.8),
    (_paint_meadow, ((186, 212, 228), (216, 226, 210)), 1.2),
    (_paint_water, ((196, 212, 214), (122, 158, 166)), 0.8),
    (_paint_trunks, ((176, 186, 158), (112, 128, 96)), 1.4),
    (_paint_nothing, ((226, 222, 210), (186, 194, 196)), 1.0),
)

_BLADE = smooth((0, 0), (0, 0), (0.25, -0.2), (0.6, -0.22), (1, 0), (1, 0), (0.6, 0.22), (0.25, 0.2))
_VEINS = np.array([[(x, 0.0), (x + 0.15, side)] for x in (0.3, 0.56) for side in (-0.13, 0.13)])


def _paint_leaf(canvas: Canvas, leaf: Frame, colour: Colour, label: int) -> None:
    """A pointed leaf from its stalk at (0, 0) to its tip at (1, 0), with veins."""
    canvas.fill(leaf.place(_BLADE), colour, label, edge=0.028 * leaf.unit)
    vein = mix(colour, (236, 240, 200), 0.4)
    canvas.stroke(leaf.place(np.array([(-0.12, 0.0), (0.93, 0.0)])), vein, label, 0.04 * leaf.unit)
    for line in leaf.place(_VEINS):
        canvas.stroke(line, vein, label, 0.02 * leaf.unit)


def paint_perch(canvas: Canvas, stand: Frame, feet: tuple[float, float], rng: np.random.Generator) -> None:
    """A branch, or a boulder, under the feet."""
    kind, tone, shade = rng.random(3).tolist()
    wobble = rng.uniform(-4, 4, 6)
    twigs = rng.random((3, 4))
    if kind < 0.8:
        _paint_branch(canvas, stand, feet, mix(_BARK[int(tone * 4)], (60, 70, 50), 0.3 * shade), wobble, twigs)
    else:
        _paint_boulder(canvas, stand, feet, mix(_STONE[int(tone * 3)], (112, 128, 84), 0.5 * shade), wobble)


def _paint_branch(
    canvas: Canvas, stand: Frame, feet: tuple[float, float], bark: Colour, wobble: Points, twigs: Points
) -> None:
    x, y = feet
    slope = wobble[0] / 40
    along = np.array([-150.0, -70.0, x, 70.0, 150.0])
    middle = y + 5.5 + slope * (along - x) + np.array([wobble[1], wobble[2], 0.0, wobble[3], wobble[4]])
    curve = smooth(*zip(along.tolist(), middle.tolist(), strict=True), closed=False)
    # Thinner towards one end, and just as thick as toes can hold in the middle.
    thick = np.stack([np.zeros(len(curve)), 5.5 + wobble[5] / 3 * np.linspace(-1, 1, len(curve))], axis=1)
    upper, lower = curve - thick, curve + thick
    for across, along_twig, length, pick in twigs.tolist():
        if across < 0.7:  # a leaf on the branch, away from the feet
            at = (x + (26 + 40 * along_twig) * (1 if across < 0.4 else -1), float(middle.mean()))
            span = 14 + 10 * length
            leaf = stand.inner(at, 20 + 120 * pick, (span, span))
            _paint_leaf(canvas, leaf, _LEAF[int(pick * 5)], SCENERY_LABEL)
    canvas.fill(stand.place(np.concatenate([upper, lower[::-1]])), bark, SCENERY_LABEL)
    light = np.concatenate([upper, (0.6 * upper + 0.4 * lower)[::-1]])
    canvas.fill(stand.place(light), mix(bark, (255, 240, 214), 0.22), SCENERY_LABEL)
    for share in (0.55, 0.8):
        grain = stand.place((1 - share) * upper + share * lower)
        canvas.stroke(grain, mix(bark, (40, 30, 30), 0.3), SCENERY_LABEL, 0.8 * stand.unit)


def _paint_boulder(canvas: Canvas, stand: Frame, feet: tuple[float, float], stone: Colour, wobble: Points) -> None:
    x, y = feet
    rise = 6 + abs(wobble)
    left, right = (x - 74, y + 30 + rise[0]), (x + 76, y + 30 + rise[1])
    rear, front = (x - 46, y + 8 + rise[2]), (x + 46, y + 8 + rise[3])
    ridge = (left, rear, (x - 18, y + 1.5), (x + 18, y + 1.5), front, right)
    foot = ((x + 90, y + 90), (x - 90, y + 90))
    canvas.fill(stand.place(smooth(*ridge, *foot)), mix(stone, (255, 246, 226), 0.2), SCENERY_LABEL, edge=stand.unit)
    shadow = (left, (x - 34, y + 13 + rise[4]), (x - 6, y + 10), (x + 24, y + 12 + rise[5]), right)
    canvas.fill(stand.place(smooth(*shadow, *foot)), mix(stone, (50, 48, 56), 0.12), SCENERY_LABEL)
    for lichen in stand.place(np.stack([x + 9 * wobble, y + 7 + np.abs(wobble[::-1])], axis=1)):
        canvas.dot(lichen, 2.2 * stand.unit, mix(stone, (196, 190, 120), 0.45), SCENERY_LABEL)


def paint_leaves(canvas: Canvas, rng: np.random.Generator) -> None:
    """Up to three leaves in front of the bird, mostly reaching in from the sides; often none."""
    count = int(rng.choice((0, 0, 0, 1, 1, 2, 3)))
    width = canvas.width
    page = Frame(np.eye(2) * width, np.zeros(2))
    for side, along, angle, length, pick in rng.random((3, 5))[:count].tolist():
        around = 2 * math.pi * along
        reach = 0.56 if side < 0.7 else 0.3
        at = (0.5 + reach * math.cos(around), 0.5 + reach * math.sin(around))
        inward = math.degrees(around) + 180 + 80 * (angle - 0.5)
        span = 0.17 + 0.1 * length
        leaf = page.inner(at, inward, (span, span))
        _paint_leaf(canvas, leaf, _LEAF[int(pick * len(_LEAF))], SCENERY_LABEL)


def paint_berries(canvas: Canvas, at: tuple[float, float], label: int, rng: np.random.Generator) -> None:
    """A hanging cluster of scarlet berries around a point given as shares of the image."""
    width = canvas.width
    cluster = Frame(np.eye(2) * width / 128, np.array(at) * width)
    stalk = cluster.inner((0.0, -13.0))
    for degrees in (-160, 15):
        leaf = stalk.inner((0.0, 0.0), degrees + float(rng.uniform(-15, 15)), (12.0, 12.0))
        _paint_leaf(canvas, leaf, _LEAF[2], label)
    berries = np.array([(-5.5, -4.5), (5.0, -5.0), (0.0, -1.0), (-6.5, 3.5), (6.0, 3.0), (-0.5, 7.0)])
    berries = berries + rng.uniform(-0.8, 0.8, berries.shape)
    for berry in berries:
        canvas.stroke(cluster.place(np.stack([(0.0, -13.0), berry])), (96, 84, 52), label, 0.9 * cluster.unit)
    for berry in berries:
        canvas.dot(cluster.place(berry), 4.6 * cluster.unit, mix(_BERRY, (60, 0, 20), 0.45), label)
        canvas.dot(cluster.place(berry), 4.0 * cluster.unit, _BERRY, label)
        canvas.dot(cluster.place(np.add(berry, (-1.3, -1.4))), 1.2 * cluster.unit, (255, 226, 220), label)

"""Draw one image of a bird part by part, with the centre, box and mask of every part.

An image depends only on the species and the seed, and its scene (pose, light, background) only on the seed. The
outlines of the parts are in `shapes`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from prototree.errors import ConfigError
from prototree_birds import scenery, shapes
from prototree_birds.shapes import Canvas, Colour, Frame, Points, line_on, mix
from prototree_birds.species import PALETTE, PART_NAMES, Look, Species

_LIGHT: Colour = (255, 250, 238)
SHORTCUT = "shortcut"
MIN_SIZE, MAX_SIZE = 32, 1024
Box = tuple[int, int, int, int]
_SHORTCUT_LABEL = len(PART_NAMES) + 1
_VISIBLE_SHARE = 0.5  # of what the bird shows of a part when no leaf is in front of it
_TO_PART = np.array([label if label <= _SHORTCUT_LABEL else 0 for label in range(256)], dtype=np.uint8)


@dataclass(frozen=True)
class BirdPart:
    """Where a part is: a pixel of it near its middle, and its box (left, top, right, bottom; ends exclusive).

    A part that the species lacks, or of which nothing can be seen, has zeros. `visible` is False as well when
    leaves cover more than half of the part.
    """

    name: str
    x: float
    y: float
    box: Box
    visible: bool


@dataclass(frozen=True)
class BirdImage:
    """A drawn bird; `part_map` holds 0, or 1 + the part's index in `PART_NAMES` (the shortcut comes last)."""

    image: Image.Image
    parts: tuple[BirdPart, ...]
    part_map: NDArray[np.uint8]
    box: Box


@dataclass(frozen=True)
class _Scene:
    """Everything about an image that is one number; textures draw from generators of their own."""

    lean: float  # of the body, in degrees
    nod: float  # of the head
    turn: float  # of the face to the viewer, 0 to 1
    stand: Frame
    flip: bool
    light: NDArray[np.float32]
    noise: np.float32


def draw(species: Species, seed: int | tuple[int, ...], *, size: int = 128, shortcut: bool = False) -> BirdImage:
    """A bird of the species, in the scene that belongs to the seed, with or without the planted berries."""
    check_size(size)
    # The berries have a generator of their own: planting them changes nothing else.
    rng, berry_rng = np.random.default_rng(seed).spawn(2)
    canvas = Canvas(scenery.paint_background(rng, size), supersampling=3 if size <= 256 else 2)
    scene = _sample_scene(rng, canvas)
    scenery.paint_perch(canvas, scene.stand, shapes.FEET, rng)
    bird = Bird(canvas, scene)
    bird.paint(species)
    areas = np.bincount(canvas.labels().ravel(), minlength=256)
    scenery.paint_leaves(canvas, rng)
    if shortcut:
        scenery.paint_berries(canvas, _berry_place(scene, berry_rng), _SHORTCUT_LABEL, berry_rng)
    part_map = np.take(_TO_PART, canvas.labels())
    is_bird = (part_map > 0) & (part_map <= len(PART_NAMES))
    pixels = _develop(canvas, bird.shading(is_bird), scene, rng)
    parts = tuple(_locate_parts(part_map, areas, shortcut))
    columns, rows = np.flatnonzero(is_bird.any(0)), np.flatnonzero(is_bird.any(1))
    box = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
    return BirdImage(Image.fromarray(pixels), parts, part_map, box)


def check_size(size: int) -> None:
    """Refuse images too small to show the parts, or larger than the drawing is meant for."""
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise ConfigError(f"size must lie in {MIN_SIZE} to {MAX_SIZE} pixels, got {size}; choose another size")


def _sample_scene(rng: np.random.Generator, canvas: Canvas) -> _Scene:
    lean, nod, turn = rng.uniform(-14, 12), rng.uniform(-16, 16), rng.uniform(0, 1) ** 2
    flip = bool(rng.random() < 0.5)
    pixels = canvas.width / 128
    scale = rng.uniform(0.70, 0.88) * pixels
    # Beak, crest and tail reach differently far; this point is in the middle of the largest bird.
    mirror = np.array([-1.0 if flip else 1.0, 1.0])
    middle = 64 * pixels + rng.uniform(-4, 4, 2) * pixels
    stand = Frame(np.diag(mirror) * scale, middle - scale * np.array([1.0, -9.5]) * mirror)
    light = rng.uniform(0.84, 1.1) * (1 + rng.uniform(-0.07, 0.07, 3))
    return _Scene(lean, nod, turn, stand, flip, light.astype(np.float32), np.float32(rng.uniform(1.0, 5.0)))


def _berry_place(scene: _Scene, rng: np.random.Generator) -> tuple[float, float]:
    """Above the back or below the beak, where no part of any species reaches."""
    behind = rng.random() < 0.5
    x, y = (0.13, 0.17) if behind else (0.88, 0.72)
    x, y = x + rng.uniform(-0.02, 0.03), y + rng.uniform(-0.03, 0.04)
    return (1 - x if scene.flip else x), y


def _develop(
    canvas: Canvas, shading: NDArray[np.float32], scene: _Scene, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """The picture lit, and given the grain of a photograph."""
    # In place: much of the time would go into temporary arrays.
    light = canvas.colours()
    light *= _for_each_channel(shading)
    by_row = light.reshape(canvas.size, -1)  # a view
    by_row *= np.tile(scene.light, canvas.size)
    grain = rng.standard_normal((canvas.size, canvas.size), dtype=np.float32)
    light += _for_each_channel(grain * scene.noise)
    return light.clip(0, 255, out=light).astype(np.uint8)


def _for_each_channel(plane: NDArray[np.float32]) -> NDArray[np.float32]:
    # A copy: broadcasting over a last axis of 3 is several times slower.
    return np.repeat(plane, 3).reshape(*plane.shape, 3)


def _locate_parts(part_map: NDArray[np.uint8], areas: NDArray[np.intp], shortcut: bool) -> Iterator[BirdPart]:
    names = (*PART_NAMES, SHORTCUT) if shortcut else PART_NAMES
    all_rows, all_columns = np.nonzero(part_map)
    labels = part_map[all_rows, all_columns]
    for label, name in enumerate(names, start=1):
        mine = np.flatnonzero(labels == label)
        if len(mine) == 0:
            yield BirdPart(name, 0.0, 0.0, (0, 0, 0, 0), visible=False)
            continue
        rows, columns = all_rows[mine], all_columns[mine]
        # The middle of a bent part can lie outside of it; its nearest pixel does not.
        nearest = np.argmin((rows - rows.sum() / len(mine)) ** 2 + (columns - columns.sum() / len(mine)) ** 2)
        box = (int(columns.min()), int(rows[0]), int(columns.max()) + 1, int(rows[-1]) + 1)
        visible = bool(len(mine) >= _VISIBLE_SHARE * areas[label])
        yield BirdPart(name, float(columns[nearest]) + 0.5, float(rows[nearest]) + 0.5, box, visible)


class Bird:
    """The frames of one bird in its pose, and a brush that labels what it paints with the part's number."""

    def __init__(self, canvas: Canvas, scene: _Scene) -> None:
        self.stand = scene.stand
        self.body = scene.stand.inner(shapes.HIP, scene.lean).inner((-shapes.HIP[0], -shapes.HIP[1]))
        self.head = self.body.inner(shapes.NECK, scene.nod).inner(shapes.HEAD_FROM_NECK)
        self.face = self.head.inner((0.0, 0.0), stretch=(1 - 0.38 * scene.turn, 1.0))
        self.tail = self.body.inner(shapes.TAIL_BASE, shapes.TAIL_ANGLE)
        self._canvas = canvas

    def paint(self, species: Species) -> None:
        """Every part, from the farthest to the nearest."""
        for part, paint_part in _PAINTERS.items():
            look = species.look(part)
            colour, accent = PALETTE[look.colour], PALETTE[look.accent or look.colour]
            if look.shape != "none":
                label, unit = PART_NAMES.index(part) + 1, self.stand.unit
                paint_part(_Brush(self._canvas, label, unit, colour, accent), self, look)

    def shading(self, bird_mask: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Soft light from above: factors around 1 on the bird, 1 elsewhere, H W; alike for every species."""
        grid = 48  # blurred anyway
        image = Image.new("L", (grid, grid), 128)
        draw = ImageDraw.Draw(image)
        scale = grid / self._canvas.width
        for frame, outline, tone in (
            (self.body, shapes.UNDERSIDE, 78),
            (self.body, shapes.UNDER_WING, 88),
            (self.body, shapes.SHOULDER, 158),
            (self.head, shapes.CHIN, 92),
            (self.head, shapes.BROW, 160),
            (self.body, shapes.BREAST, 150),
            (self.tail, shapes.TAIL_ROOT, 92),
        ):
            draw.polygon((frame.place(outline) * scale).ravel().tolist(), fill=tone)
        size = (self._canvas.size, self._canvas.size)
        soft = image.filter(ImageFilter.GaussianBlur(2)).resize(size, Image.Resampling.BILINEAR)
        # The mask knows whole pixels only; blurred a little, it does not roughen the bird's edge.
        mask = Image.fromarray(bird_mask.astype(np.uint8) * np.uint8(255)).filter(ImageFilter.BoxBlur(1))
        on_bird = Image.composite(soft, Image.new("L", size, 128), mask)
        return np.asarray(on_bird, dtype=np.float32) / np.float32(128)


@dataclass(frozen=True)
class _Brush:
    """Paints with one part's label; lengths are in drawing units."""

    canvas: Canvas
    label: int
    unit: float
    colour: Colour
    accent: Colour

    def fill(self, points: Points, colour: Colour, edge: float = 0.0) -> None:
        self.canvas.fill(points, colour, self.label, edge * self.unit)

    def strokes(self, lines: Iterable[Points], colour: Colour, width: float) -> None:
        for line in lines:
            self.canvas.stroke(line, colour, self.label, width * self.unit)

    def dot(self, centre: Points, radius: float, colour: Colour) -> None:
        self.canvas.dot(centre, radius * self.unit, colour, self.label)


def _paint_tail(brush: _Brush, bird: Bird, look: Look) -> None:
    outline = shapes.TAIL[look.shape]
    brush.fill(bird.tail.place(outline), brush.colour)
    if look.pattern == "tips":
        tip = shapes.cut("tail", look.shape, 0.68 * outline[:, 0].max(), 99.0)
        brush.fill(bird.tail.place(tip), brush.accent)
    if look.pattern == "banded":
        for start in (14.0, 26.0, 38.0, 50.0):
            if start + 5 < outline[:, 0].max():
                brush.fill(bird.tail.place(shapes.cut("tail", look.shape, start, start + 6)), brush.accent)
    brush.strokes(bird.tail.place(shapes.TAIL_QUILLS[look.shape]), line_on(brush.colour, 0.35), 0.8)
    rim = bird.tail.place(np.concatenate([outline, outline[:1]]))
    brush.strokes([rim], line_on(brush.colour, 0.4), 0.9)


def _paint_legs(brush: _Brush, bird: Bird, look: Look) -> None:
    for hip_x, foot_x in ((0.0, 1.0), (11.0, 13.0)):
        hip = bird.body.place(np.array([(hip_x, 33.0)]))
        shin = bird.stand.place(np.array([(foot_x - 1.5, 41.0), (foot_x, shapes.FEET[1] - 0.5)]))
        leg = np.concatenate([hip, shin])
        toes = bird.stand.place(shapes.TOES + np.array([foot_x, shapes.FEET[1]]))
        brush.strokes([leg], line_on(brush.colour, 0.25), 4.2)
        brush.strokes(toes, line_on(brush.colour, 0.12), 2.6)
        brush.strokes([leg], brush.colour, 3.0)


def _paint_body(brush: _Brush, bird: Bird, look: Look) -> None:
    brush.fill(bird.body.place(shapes.BODY), brush.colour, edge=0.9)
    brush.strokes(bird.body.place(shapes.BACK_FEATHERS), line_on(brush.colour, 0.22), 0.9)


def _paint_belly(brush: _Brush, bird: Bird, look: Look) -> None:
    brush.fill(bird.body.place(shapes.BELLY), brush.colour)
    if look.pattern == "band":
        brush.fill(bird.body.place(shapes.cut("belly", "round", 0.0, 9.0)), brush.accent)
    elif look.pattern == "spots":
        for spot in bird.body.place(shapes.BELLY_MARKS):
            brush.dot(spot, 2.0, brush.accent)
    elif look.pattern == "streaks":
        brush.strokes(
            bird.body.place(shapes.BELLY_MARKS[:, None] + np.array([(0.8, -3.2), (-0.8, 3.2)])), brush.accent, 1.9
        )
    else:
        brush.strokes(bird.body.place(shapes.BELLY_FEATHERS), line_on(brush.colour, 0.13), 0.9)
    brush.strokes([bird.body.place(shapes.BELLY_RIM)], line_on(brush.colour, 0.38), 0.9)


def _paint_crest(brush: _Brush, bird: Bird, look: Look) -> None:
    for feather in shapes.CREST[look.shape]:
        brush.fill(bird.head.place(feather), brush.colour, edge=0.9)
    quills = bird.head.place(shapes.CREST_QUILLS[look.shape])
    brush.strokes(quills, line_on(brush.colour, 0.3), 0.9)
    if look.shape == "fan":
        for quill in quills:
            brush.dot(quill[1], 2.3, line_on(brush.colour, 0.75))


def _paint_head(brush: _Brush, bird: Bird, look: Look) -> None:
    brush.fill(bird.head.place(shapes.SKULL), brush.colour)
    if look.pattern == "cap":
        brush.fill(bird.head.place(shapes.CAP), brush.accent)
    brush.strokes([bird.head.place(shapes.SKULL_RIM)], line_on(brush.colour, 0.38), 0.9)
    if look.pattern == "cheek":
        brush.fill(bird.face.place(shapes.CHEEK), brush.accent)
    brush.strokes(bird.head.place(shapes.NECK_FEATHERS), line_on(brush.colour, 0.18), 0.9)
    _paint_eye(brush, bird)


def _paint_wing(brush: _Brush, bird: Bird, look: Look) -> None:
    outline = shapes.WING[look.shape]
    brush.fill(bird.body.place(outline), brush.colour)
    brush.fill(bird.body.place(shapes.cut("wing", look.shape, 20.0, 99.0)), line_on(brush.colour, 0.14))
    if look.pattern == "tips":
        brush.fill(bird.body.place(shapes.cut("wing", look.shape, 27.0, 99.0)), brush.accent)
    if look.pattern == "patch":
        brush.fill(bird.body.place(shapes.cut("wing", look.shape, -99.0, 0.0)), brush.accent)
    brush.strokes(bird.body.place(shapes.FLIGHT_FEATHERS[look.shape]), line_on(brush.colour, 0.45), 0.9)
    brush.strokes(bird.body.place(shapes.COVERTS), line_on(brush.colour, 0.3), 0.9)
    if look.pattern == "bars":
        for start in (5.0, 15.0):
            brush.fill(bird.body.place(shapes.cut("wing", look.shape, start, start + 5)), brush.accent)
    rim = bird.body.place(np.concatenate([outline, outline[:1]]))
    brush.strokes([rim], line_on(brush.colour, 0.5), 0.9)


def _paint_beak(brush: _Brush, bird: Bird, look: Look) -> None:
    brush.fill(bird.face.place(shapes.BEAK[look.shape]), brush.colour, edge=0.9)
    brush.strokes([bird.face.place(shapes.GAPE[look.shape])], line_on(brush.colour, 0.6), 0.9)
    brush.strokes([bird.face.place(shapes.GLINT)], mix(brush.colour, _LIGHT, 0.45), 1.1)


def _paint_eye_ring(brush: _Brush, bird: Bird, look: Look) -> None:
    if look.shape == "stripe":
        brush.fill(bird.face.place(shapes.EYE_STRIPE), brush.colour)
    else:
        brush.dot(bird.face.place(shapes.EYE), 8.6, line_on(brush.colour, 0.3))
        brush.dot(bird.face.place(shapes.EYE), 8.0, brush.colour)
    _paint_eye(brush, bird)


def _paint_eye(brush: _Brush, bird: Bird) -> None:
    brush.dot(bird.face.place(shapes.EYE), 5.0, (92, 58, 40))
    brush.dot(bird.face.place(shapes.EYE), 4.5, (26, 20, 24))
    brush.dot(bird.face.place(np.add(shapes.EYE, (1.0, 2.0))), 1.7, (92, 62, 48))
    brush.dot(bird.face.place(np.add(shapes.EYE, (1.3, -1.6))), 1.7, (255, 255, 255))


_PAINTERS: dict[str, Callable[[_Brush, Bird, Look], None]] = {
    "tail": _paint_tail,
    "legs": _paint_legs,
    "body": _paint_body,
    "belly": _paint_belly,
    "crest": _paint_crest,
    "head": _paint_head,
    "wing": _paint_wing,
    "beak": _paint_beak,
    "eye ring": _paint_eye_ring,
}

"""One image of a bird, with the centre, box and mask of every part.

An image depends only on the species and the seed, and its scene (pose, light, background) only on the seed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from prototree.data.birds import scenery
from prototree.data.birds.canvas import Canvas, Frame
from prototree.data.birds.drawing import Bird, Pose
from prototree.data.birds.shapes import FEET
from prototree.data.birds.species import PART_NAMES, Species
from prototree.errors import ConfigError

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

    pose: Pose
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
    scenery.paint_perch(canvas, scene.stand, FEET, rng)
    bird = Bird(canvas, scene.stand, scene.pose)
    bird.paint(species)
    areas = np.bincount(canvas.labels().ravel(), minlength=256)
    scenery.paint_leaves(canvas, rng)
    if shortcut:
        scenery.paint_berries(canvas, _berry_place(scene, berry_rng), _SHORTCUT_LABEL, berry_rng)
    part_map = np.take(_TO_PART, canvas.labels())
    pixels = _develop(canvas, bird.shading(_is_bird(part_map)), scene, rng)
    parts = tuple(_locate_parts(part_map, areas, shortcut))
    return BirdImage(Image.fromarray(pixels), parts, part_map, _bird_box(part_map))


def check_size(size: int) -> None:
    """Refuse images too small to show the parts, or larger than the drawing is meant for."""
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise ConfigError(f"size must lie in {MIN_SIZE} to {MAX_SIZE} pixels, got {size}; choose another size")


def _sample_scene(rng: np.random.Generator, canvas: Canvas) -> _Scene:
    pose = Pose(lean=rng.uniform(-14, 12), nod=rng.uniform(-16, 16), turn=rng.uniform(0, 1) ** 2)
    flip = bool(rng.random() < 0.5)
    pixels = canvas.width / 128
    scale = rng.uniform(0.70, 0.88) * pixels
    # Beak, crest and tail reach differently far; this point is in the middle of the largest bird.
    mirror = np.array([-1.0 if flip else 1.0, 1.0])
    middle = 64 * pixels + rng.uniform(-4, 4, 2) * pixels
    stand = Frame(np.diag(mirror) * scale, middle - scale * np.array([1.0, -9.5]) * mirror)
    light = rng.uniform(0.84, 1.1) * (1 + rng.uniform(-0.07, 0.07, 3))
    return _Scene(pose, stand, flip, light.astype(np.float32), np.float32(rng.uniform(1.0, 5.0)))


def _berry_place(scene: _Scene, rng: np.random.Generator) -> tuple[float, float]:
    """Above the back or below the beak, where no part of any species reaches."""
    behind = rng.random() < 0.5
    x, y = (0.13, 0.17) if behind else (0.88, 0.72)
    x, y = x + rng.uniform(-0.02, 0.03), y + rng.uniform(-0.03, 0.04)
    return (1 - x if scene.flip else x), y


def _develop(
    canvas: Canvas,
    shading: NDArray[np.float32],
    scene: _Scene,
    rng: np.random.Generator,
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


def _is_bird(part_map: NDArray[np.uint8]) -> NDArray[np.bool_]:
    return (part_map > 0) & (part_map <= len(PART_NAMES))


def _bird_box(part_map: NDArray[np.uint8]) -> Box:
    bird = _is_bird(part_map)
    columns, rows = np.flatnonzero(bird.any(0)), np.flatnonzero(bird.any(1))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1

"""Birds drawn from parts: an image classification task in which it is known what there is to see.

Each image comes with the centre, box and mask of every part. An image depends only on the seed it is drawn
from, and its scene (pose, light, background) does not depend on the species.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from prototree.data import bird_scenery as scenery
from prototree.data.bird_canvas import Canvas, Frame
from prototree.data.bird_drawing import Bird, Pose
from prototree.data.bird_shapes import FEET
from prototree.data.bird_species import PART_NAMES, Species, differing_parts, make_species
from prototree.errors import ConfigError

__all__ = ["PART_NAMES", "SHORTCUT", "BirdImage", "BirdPart", "Species", "differing_parts", "draw", "make_species"]

SHORTCUT = "shortcut"
MIN_SIZE, MAX_SIZE = 32, 1024

Box = tuple[int, int, int, int]

_SHORTCUT_LABEL = len(PART_NAMES) + 1
_VISIBLE_SHARE = 0.5  # of what the bird shows of a part when no leaf is in front of it
_IS_PAINTED = [0] + [255] * 255
_IS_BIRD = [255 if 1 <= label <= len(PART_NAMES) else 0 for label in range(256)]
_TO_PART = [label if label <= _SHORTCUT_LABEL else 0 for label in range(256)]


@dataclass(frozen=True)
class BirdPart:
    """Where a part is: a pixel of it near its middle, and its (left, top, right, bottom), right and bottom outside.

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
    noise: float


def draw(species: Species, seed: int | tuple[int, ...], *, size: int = 128, shortcut: bool = False) -> BirdImage:
    """A bird of the species, in the scene that belongs to the seed, with or without the planted berries."""
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise ConfigError(f"the image size must lie in {MIN_SIZE} to {MAX_SIZE} pixels, got {size}; choose another size")
    # One generator per layer, so that no layer's choices shift those of another.
    scene_rng, back_rng, perch_rng, leaf_rng, berry_rng, noise_rng = np.random.default_rng(seed).spawn(6)
    canvas = Canvas(size, supersampling=3 if size <= 256 else 2)
    scene = _sample_scene(scene_rng, canvas)
    background = scenery.paint_background(back_rng, size)
    scenery.paint_perch(canvas, scene.stand, FEET, perch_rng)
    bird = Bird(canvas, scene.stand, scene.pose)
    bird.paint(species)
    uncovered = canvas.labels()
    scenery.paint_leaves(canvas, leaf_rng)
    if shortcut:
        scenery.paint_berries(canvas, _berry_place(scene, berry_rng), _SHORTCUT_LABEL, berry_rng)
    labels = canvas.labels()
    pixels = _develop(canvas, labels, background, bird.shading(size), scene, noise_rng)
    part_map = _part_map(labels, canvas.supersampling)
    parts = tuple(_locate_parts(part_map, _part_map(uncovered, canvas.supersampling), shortcut))
    return BirdImage(Image.fromarray(pixels), parts, part_map, _bird_box(part_map))


def _sample_scene(rng: np.random.Generator, canvas: Canvas) -> _Scene:
    pose = Pose(lean=rng.uniform(-14, 12), nod=rng.uniform(-16, 16), turn=rng.uniform(0, 1) ** 2)
    flip = bool(rng.random() < 0.5)
    pixels = canvas.size * canvas.supersampling / 128
    scale = rng.uniform(0.74, 0.96) * pixels
    # The bird's middle lies behind and above its hip; the offset keeps beak and tail in the image.
    mirror = np.array([-1.0 if flip else 1.0, 1.0])
    middle = 64 * pixels + rng.uniform(-5, 5, 2) * pixels
    stand = Frame(np.diag(mirror) * scale, middle - scale * np.array([-2.0, 1.0]) * mirror)
    light = rng.uniform(0.84, 1.1) * (1 + rng.uniform(-0.07, 0.07, 3))
    return _Scene(pose, stand, flip, light.astype(np.float32), rng.uniform(1.5, 6.0))


def _berry_place(scene: _Scene, rng: np.random.Generator) -> tuple[float, float]:
    """Above the back or below the beak, where no part of any species reaches."""
    behind = rng.random() < 0.5
    x, y = (0.13, 0.17) if behind else (0.87, 0.66)
    x, y = x + rng.uniform(-0.02, 0.03), y + rng.uniform(-0.03, 0.04)
    return (1 - x if scene.flip else x), y


def _develop(
    canvas: Canvas,
    labels: Image.Image,
    background: NDArray[np.float32],
    shading: NDArray[np.float32],
    scene: _Scene,
    rng: np.random.Generator,
) -> NDArray[np.uint8]:
    """The layers put together, lit, and given the grain of a photograph."""
    painted = _cover(labels, _IS_PAINTED, canvas.supersampling)
    on_bird = _cover(labels, _IS_BIRD, canvas.supersampling)
    light = background * (1 - painted) + canvas.colours() * (1 + (shading - 1) * on_bird)
    grain = rng.standard_normal((canvas.size, canvas.size, 3), dtype=np.float32)
    return np.clip(light * scene.light + scene.noise * grain, 0, 255).astype(np.uint8)


def _cover(labels: Image.Image, table: list[int], supersampling: int) -> NDArray[np.float32]:
    return np.asarray(labels.point(table).reduce(supersampling), dtype=np.float32)[..., None] / 255


def _part_map(labels: Image.Image, supersampling: int) -> NDArray[np.uint8]:
    middle = supersampling // 2
    return np.take(np.array(_TO_PART, dtype=np.uint8), np.asarray(labels)[middle::supersampling, middle::supersampling])


def _locate_parts(part_map: NDArray[np.uint8], uncovered: NDArray[np.uint8], shortcut: bool) -> Iterator[BirdPart]:
    names = (*PART_NAMES, SHORTCUT) if shortcut else PART_NAMES
    areas = np.bincount(uncovered.ravel(), minlength=len(names) + 1)
    for label, name in enumerate(names, start=1):
        rows, columns = np.nonzero(part_map == label)
        if len(rows) == 0:
            yield BirdPart(name, 0.0, 0.0, (0, 0, 0, 0), visible=False)
            continue
        # The middle of a bent part can lie outside of it; its nearest pixel does not.
        nearest = np.argmin((rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2)
        box = (int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1)
        visible = bool(len(rows) >= _VISIBLE_SHARE * areas[label])
        yield BirdPart(name, float(columns[nearest]) + 0.5, float(rows[nearest]) + 0.5, box, visible)


def _bird_box(part_map: NDArray[np.uint8]) -> Box:
    bird = (part_map > 0) & (part_map <= len(PART_NAMES))
    columns, rows = np.flatnonzero(bird.any(0)), np.flatnonzero(bird.any(1))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1

"""Generated birds for demos and tests: `write_birds` writes a data set in the layout of CUB-200-2011.

`species` invents species that differ in one or two parts, `drawing` paints one image of a species, and `ground_truth`
tells what a model should look at. A planted shortcut (berries beside one species, in training only) shows whether a
model looks at the bird.
"""

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from prototree.errors import ConfigError, DataError
from prototree.io import prepared_beside
from prototree_birds.drawing import SHORTCUT, BirdPart, Box, check_size, draw
from prototree_birds.species import PART_NAMES, Species, make_species

LOOKS = "parts/looks.txt"  # a line for each species and part: their numbers, shape, colour, pattern, accent or `-`

_SHORTCUT_RATE = 0.95  # what `shortcut=True` stands for
_FEW_IMAGES = 400  # drawn before further processes would have started
_IMAGES_PER_TASK = 32
_TRAIN, _TEST = 0, 1
_MAP_PALETTE = bytes.fromhex("000000e8963cc83c5af0dc506e9bd2508c64f5ebc83c64aaa05a3c8c8c96ff00c8")

_Key = tuple[int, int, int, int]
"""Which image: species, split, number within the split, and number in its file name, which counts on over splits."""


@dataclass(frozen=True)
class _Row:
    """What the annotation files say about one image."""

    species: int
    split: int
    path: str
    box: Box
    parts: tuple[BirdPart, ...]


@dataclass(frozen=True)
class _Plan:
    """What decides the pixels of a data set, and where they go."""

    folder: Path
    species: tuple[Species, ...]
    size: int
    seed: int
    shortcut_species: int
    shortcut_rate: float
    test_shortcut: float

    def class_folder(self, species: int) -> str:
        return f"{species + 1:03d}.{_file_name(self.species[species])}"

    def write_images(self, keys: Iterable[_Key]) -> list[_Row]:
        return [self._write_image(key) for key in keys]

    def _write_image(self, key: _Key) -> _Row:
        number, split, index, serial = key
        species, seed = self.species[number], (self.seed, split, number, index)
        # In training the berries stand beside one species; in testing beside all others, or none.
        planted = (number == self.shortcut_species) == (split == _TRAIN)
        rate = (self.shortcut_rate if split == _TRAIN else self.test_shortcut) if planted else 0.0
        shortcut = bool(np.random.default_rng((*seed, 1)).random() < rate)
        bird = draw(species, seed, size=self.size, shortcut=shortcut)
        path = f"{self.class_folder(number)}/{_file_name(species)}_{serial:04d}.jpg"
        bird.image.save(self.folder / "images" / path, quality=95, subsampling=0)
        part_map = Image.fromarray(bird.part_map)
        part_map.putpalette(_MAP_PALETTE)
        part_map.save((self.folder / "segmentations" / path).with_suffix(".png"), compress_level=3)
        return _Row(number, split, path, bird.box, bird.parts)


def write_birds(
    folder: Path | str,
    *,
    n_species: int = 12,
    train_per_species: int = 60,
    test_per_species: int = 20,
    size: int = 128,
    seed: int = 0,
    shortcut: bool | float = False,
    test_shortcut: float = 0.0,
    shortcut_species: int = 0,
    workers: int | None = None,
) -> Path:
    """Write a data set of birds in the layout of CUB-200-2011, and return its folder.

    `shortcut` is the share of the training images of species number `shortcut_species` (from 0) that show red
    berries (True: 0.95). Its test images show none; `test_shortcut` is the share for all other species' test
    images. The folder appears only when complete. Large sets are drawn by `workers` processes (None: one per
    core), so a script must call this under `if __name__ == "__main__":`; any number gives the same files.
    """
    folder = Path(folder)
    rate = _SHORTCUT_RATE if shortcut is True else float(shortcut)
    for name, value, low, high in (
        ("train_per_species", train_per_species, 0, np.inf),
        ("test_per_species", test_per_species, 0, np.inf),
        ("seed", seed, 0, np.inf),
        ("workers", 1 if workers is None else workers, 1, np.inf),
        ("shortcut", rate, 0, 1),
        ("test_shortcut", test_shortcut, 0, 1),
        ("shortcut_species", shortcut_species, 0, max(n_species - 1, 0)),
    ):
        if not low <= value <= high:
            raise ConfigError(f"expected {name} from {low} to {high}, got {value}; choose another number")
    if train_per_species == test_per_species == 0:
        raise ConfigError("train_per_species and test_per_species are both 0, so there is nothing to draw; raise one")
    check_size(size)
    species = make_species(n_species, seed)
    _check_free(folder)
    keys = [
        (number, split, index, index + 1 + (train_per_species if split == _TEST else 0))
        for number in range(n_species)
        for split, count in ((_TRAIN, train_per_species), (_TEST, test_per_species))
        for index in range(count)
    ]
    if workers is None:
        workers = 1 if len(keys) < _FEW_IMAGES else os.cpu_count() or 1
    with prepared_beside(folder) as temporary:
        plan = _Plan(temporary / folder.name, species, size, seed, shortcut_species, rate, test_shortcut)
        _write_annotations(plan, _write_images(plan, keys, workers))
        _check_free(folder)
        if folder.exists():
            folder.rmdir()
        plan.folder.rename(folder)
    return folder


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"expected a new or empty folder, but {folder} holds something; remove it or name another")


def _file_name(species: Species) -> str:
    return species.name.replace(" ", "_")


def _write_images(plan: _Plan, keys: list[_Key], workers: int) -> list[_Row]:
    for species in range(len(plan.species)):
        for kind in ("images", "segmentations"):
            (plan.folder / kind / plan.class_folder(species)).mkdir(parents=True)
    tasks = [keys[start : start + _IMAGES_PER_TASK] for start in range(0, len(keys), _IMAGES_PER_TASK)]
    if min(workers, len(tasks)) == 1:
        return plan.write_images(keys)
    # Spawned, not forked: a caller's threads (of torch, say) do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(tasks)), mp_context=context) as pool:
        return [row for rows in pool.map(plan.write_images, tasks) for row in rows]


def _write_annotations(plan: _Plan, rows: list[_Row]) -> None:
    def write(path: str, lines: Iterable[object], *, numbered: bool = True) -> None:
        texts = (f"{number} {line}" if numbered else str(line) for number, line in enumerate(lines, start=1))
        (plan.folder / path).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8", newline="\n")

    planted = plan.shortcut_rate > 0 or plan.test_shortcut > 0
    part_names = (*PART_NAMES, SHORTCUT) if planted else PART_NAMES
    points, boxes = [], []
    for image_id, row in enumerate(rows, start=1):
        visible = {part.name: part for part in row.parts if part.visible}
        for part_id, name in enumerate(part_names, start=1):
            part = visible.get(name)
            points.append(f"{image_id} {part_id} " + (f"{part.x} {part.y} 1" if part else "0.0 0.0 0"))
            boxes.append(f"{image_id} {part_id} {_corner_and_size(part.box if part else (0, 0, 0, 0))}")
    looks = [
        f"{number} {part} {' '.join(word or '-' for word in astuple(look))}"
        for number, bird in enumerate(plan.species, start=1)
        for part, look in enumerate(bird.looks, start=1)
    ]
    (plan.folder / "parts").mkdir()
    write("classes.txt", map(plan.class_folder, range(len(plan.species))))
    write("images.txt", (row.path for row in rows))
    write("image_class_labels.txt", (row.species + 1 for row in rows))
    write("train_test_split.txt", (int(row.split == _TRAIN) for row in rows))
    write("bounding_boxes.txt", (_corner_and_size(row.box) for row in rows))
    write("parts/parts.txt", part_names)
    for path, lines in ((LOOKS, looks), ("parts/part_locs.txt", points), ("parts/part_boxes.txt", boxes)):
        write(path, lines, numbered=False)


def _corner_and_size(box: Box) -> str:
    left, top, right, bottom = box
    return f"{left:.1f} {top:.1f} {right - left:.1f} {bottom - top:.1f}"

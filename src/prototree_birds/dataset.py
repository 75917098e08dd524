"""Write a data set of generated birds in the layout of CUB-200-2011.

`make_species` invents species that differ in one or two parts, `draw` paints one image of a species, and `write_birds`
writes them all. A planted shortcut (berries beside one species, in training only) shows whether a model looks at the
bird.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
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


@dataclass(frozen=True)
class _Key:
    """Which image: the `number`-th of a split of a species; `serial` counts on from training to testing."""

    species: int
    split: int
    number: int
    serial: int

    def seed(self, seed: int) -> tuple[int, ...]:
        return seed, self.split, self.species, self.number


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

    @property
    def part_names(self) -> tuple[str, ...]:
        planted = self.shortcut_rate > 0 or self.test_shortcut > 0
        return (*PART_NAMES, SHORTCUT) if planted else PART_NAMES

    def class_folder(self, species: int) -> str:
        return f"{species + 1:03d}.{_file_name(self.species[species])}"

    def shows_shortcut(self, key: _Key) -> bool:
        """In training the berries stand beside one species; in testing beside all others, or none."""
        is_target = key.species == self.shortcut_species
        rate = self.shortcut_rate if key.split == _TRAIN else self.test_shortcut
        planted = is_target == (key.split == _TRAIN)
        return bool(np.random.default_rng((*key.seed(self.seed), 1)).random() < (rate if planted else 0.0))


@dataclass(frozen=True)
class _Row:
    """What the annotation files say about one image."""

    key: _Key
    path: str
    box: Box
    parts: tuple[BirdPart, ...]


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
    _check_counts(train_per_species, test_per_species, seed, workers)
    _check_shortcut(rate, test_shortcut, shortcut_species, n_species)
    check_size(size)
    species = make_species(n_species, seed)
    _check_free(folder)
    keys = list(_keys(n_species, train_per_species, test_per_species))
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


def _check_counts(n_train: int, n_test: int, seed: int, workers: int | None) -> None:
    for name, value in (("train_per_species", n_train), ("test_per_species", n_test), ("seed", seed)):
        if value < 0:
            raise ConfigError(f"{name} must be 0 or more, got {value}; choose another number")
    if n_train == n_test == 0:
        raise ConfigError("train_per_species and test_per_species are both 0, so there is nothing to draw; raise one")
    if workers is not None and workers < 1:
        raise ConfigError(f"workers must be 1 or more, or None for one per core, got {workers}")


def _check_shortcut(rate: float, test_rate: float, species: int, n_species: int) -> None:
    for name, value in (("shortcut", rate), ("test_shortcut", test_rate)):
        if not 0 <= value <= 1:
            raise ConfigError(f"{name} is a share of images and must lie in 0 to 1, got {value}")
    if not 0 <= species < max(n_species, 1):
        raise ConfigError(f"shortcut_species must lie in 0 to {n_species - 1} for {n_species} species, got {species}")


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"expected a new or empty folder, but {folder} holds something; remove it or name another")


def _keys(n_species: int, n_train: int, n_test: int) -> Iterator[_Key]:
    for species in range(n_species):
        for number in range(n_train):
            yield _Key(species, _TRAIN, number, serial=number + 1)
        for number in range(n_test):
            yield _Key(species, _TEST, number, serial=n_train + number + 1)


def _write_images(plan: _Plan, keys: list[_Key], workers: int) -> list[_Row]:
    for species in range(len(plan.species)):
        for kind in ("images", "segmentations"):
            (plan.folder / kind / plan.class_folder(species)).mkdir(parents=True)
    tasks = [keys[start : start + _IMAGES_PER_TASK] for start in range(0, len(keys), _IMAGES_PER_TASK)]
    workers = min(workers, len(tasks))
    if workers == 1:
        return [_write_image(plan, key) for key in keys]
    # Spawned, not forked: a caller's threads (of torch, say) do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return [row for rows in pool.map(_write_task, [plan] * len(tasks), tasks) for row in rows]


def _write_task(plan: _Plan, keys: list[_Key]) -> list[_Row]:
    return [_write_image(plan, key) for key in keys]


def _write_image(plan: _Plan, key: _Key) -> _Row:
    species = plan.species[key.species]
    path = f"{plan.class_folder(key.species)}/{_file_name(species)}_{key.serial:04d}.jpg"
    bird = draw(species, key.seed(plan.seed), size=plan.size, shortcut=plan.shows_shortcut(key))
    bird.image.save(plan.folder / "images" / path, quality=95, subsampling=0)
    part_map = Image.fromarray(bird.part_map)
    part_map.putpalette(_MAP_PALETTE)
    part_map.save((plan.folder / "segmentations" / path).with_suffix(".png"), compress_level=3)
    return _Row(key, path, bird.box, bird.parts)


def _file_name(species: Species) -> str:
    return species.name.replace(" ", "_").replace("-", "_")


def _write_annotations(plan: _Plan, rows: list[_Row]) -> None:
    def write(path: str, lines: list[str]) -> None:
        (plan.folder / path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")

    def write_rows(path: str, line: Callable[[_Row], object]) -> None:
        write(path, [f"{image_id} {line(row)}" for image_id, row in enumerate(rows, start=1)])

    (plan.folder / "parts").mkdir()
    write("classes.txt", [f"{number + 1} {plan.class_folder(number)}" for number in range(len(plan.species))])
    write("parts/parts.txt", [f"{part_id} {name}" for part_id, name in enumerate(plan.part_names, start=1)])
    looks = [
        f"{number} {part} {' '.join(word or '-' for word in astuple(look))}"
        for number, bird in enumerate(plan.species, start=1)
        for part, look in enumerate(bird.looks, start=1)
    ]
    write(LOOKS, looks)
    write_rows("images.txt", lambda row: row.path)
    write_rows("image_class_labels.txt", lambda row: row.key.species + 1)
    write_rows("train_test_split.txt", lambda row: int(row.key.split == _TRAIN))
    write_rows("bounding_boxes.txt", lambda row: _corner_and_size(row.box))
    points, boxes = [], []
    for image_id, row in enumerate(rows, start=1):
        visible = {part.name: part for part in row.parts if part.visible}
        for part_id, name in enumerate(plan.part_names, start=1):
            part = visible.get(name)
            points.append(f"{image_id} {part_id} " + (f"{part.x} {part.y} 1" if part else "0.0 0.0 0"))
            boxes.append(f"{image_id} {part_id} {_corner_and_size(part.box if part else (0, 0, 0, 0))}")
    write("parts/part_locs.txt", points)
    write("parts/part_boxes.txt", boxes)


def _corner_and_size(box: Box) -> str:
    left, top, right, bottom = box
    return f"{left:.1f} {top:.1f} {right - left:.1f} {bottom - top:.1f}"

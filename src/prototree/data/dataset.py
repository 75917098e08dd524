"""What a data set is made of: images with a label and, where known, a box and named parts; its splits and folds."""

import math
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from prototree.backbones.geometry import Box, Size
from prototree.errors import ConfigError, DataError

Kind = Literal["folder", "manifest", "cub", "cars"]
MAX_FOLDS = 100
Item = TypeVar("Item")


@dataclass(frozen=True)
class Part:
    """A named point of the object, such as a beak; only those visible in the image are kept."""

    name: str
    x: float
    y: float


@dataclass(frozen=True)
class Sample:
    """One image file and what is known about it.

    `box`, `parts` and `size` count in pixels of the upright image (after EXIF rotation). `size` is filled in when the
    files are scanned. Images of one `group`, such as a burst or an individual, stay together in every split; empty:
    the image is its own group.
    """

    path: Path
    label: int
    box: Box | None = None
    parts: tuple[Part, ...] = ()
    size: Size | None = None
    group: str = ""


@dataclass(frozen=True)
class Unreadable:
    """A file that cannot be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class ImageData:
    """Data set: class names, images of each split, and the files left out.

    Attributes:
        root: Folder or list that it was opened from.
        kind: folder, manifest, cub or cars.
        class_names: Names of the classes; a sample's label is an index into them.
        train: Images to train on.
        test: Images to test on.
        unreadable: Files that cannot be used, with the reason.
        validation_split: Images neither trained nor tested on, by which edits are judged.
        ignored: Other files in its class folders, perhaps images in formats that are not read.

    Examples:
        >>> data = prototree.open_data("photos/")
        >>> data.class_names, len(data.train), len(data.test)
        (('bluebird', 'cardinal', 'greenfinch'), 24, 9)
    """

    root: Path
    kind: Kind
    class_names: tuple[str, ...]
    train: tuple[Sample, ...]
    test: tuple[Sample, ...]
    unreadable: tuple[Unreadable, ...] = ()
    validation_split: tuple[Sample, ...] = ()
    ignored: tuple[Path, ...] = ()

    @property
    def n_classes(self) -> int:
        return len(self.class_names)

    @property
    def folder(self) -> Path:
        """Where the names of its images begin; a manifest's root is the file itself."""
        return self.root.parent if self.kind == "manifest" else self.root

    @property
    def all_samples(self) -> tuple[Sample, ...]:
        """Training and test images, in an order that does not depend on how they are split."""
        return tuple(sorted({*self.train, *self.test}, key=lambda sample: str(sample.path)))

    @property
    def validation(self) -> tuple[Sample, ...]:
        """Images that edits are judged on: the validation split, or else the first, third, … test image of a class."""
        if self.validation_split:
            return self.validation_split
        units = _by_label(keep_together(self.test, lambda sample: sample.group), lambda unit: unit[0].label)
        chosen = {sample for of_class in units.values() for unit in of_class[::2] for sample in unit}
        return tuple(sample for sample in self.test if sample in chosen)

    @property
    def held_out_test(self) -> tuple[Sample, ...]:
        """Test images that are not used for validation."""
        chosen = set() if self.validation_split else set(self.validation)
        return tuple(sample for sample in self.test if sample not in chosen)

    def name(self, sample: Sample) -> str:
        """The name of an image in results."""
        return image_name(self.folder, sample.path)

    def bootstrap(self, seed: int) -> "ImageData":
        """Draw as many training images with replacement within each class, for bagging."""
        rng = random.Random(seed)
        classes = _by_label(self.train, lambda sample: sample.label).values()
        return replace(self, train=tuple(sample for group in classes for sample in rng.choices(group, k=len(group))))


def _by_label(items: Iterable[Item], label_of: Callable[[Item], int]) -> dict[int, list[Item]]:
    classes: dict[int, list[Item]] = {}
    for item in items:
        classes.setdefault(label_of(item), []).append(item)
    return classes


def keep_together(items: Iterable[Item], group_of: Callable[[Item], str]) -> list[list[Item]]:
    """Collect the items of each group, in order of the first; an item without a group is alone.

    Examples:
        >>> keep_together(["a1", "b1", "a2", "3"], lambda item: item[:-1])
        [['a1', 'a2'], ['b1'], ['3']]
    """
    groups: dict[str | int, list[Item]] = {}
    for number, item in enumerate(items):
        groups.setdefault(group_of(item) or number, []).append(item)
    return list(groups.values())


def parse_fold(fold: str) -> tuple[int, int]:
    """Parse `2/5` as the second (counted from 0) of five folds."""
    match = re.fullmatch(r"\s*(\d{1,4})\s*/\s*(\d{1,4})\s*", fold)
    part, parts = map(int, match.groups()) if match else (0, 0)
    if not (2 <= parts <= MAX_FOLDS and 1 <= part <= parts):
        raise ConfigError(f"expected a fold such as 2/5, of 2 to {MAX_FOLDS} parts, got {fold!r}")
    return part - 1, parts


def take_fold(data: ImageData, fold: str) -> ImageData:
    """Stratified cross-validation: one fold becomes the test set, all others the training set.

    Which fold an image is in depends on its name alone: not on the split that the data has, nor on the order of files.
    """
    part, parts = parse_fold(fold)
    samples = sorted((*data.train, *data.test), key=lambda sample: str(sample.path))
    classes = _by_label(keep_together(samples, lambda sample: sample.group), lambda unit: unit[0].label)
    order: list[list[Sample]] = []  # of all classes, so that folds differ by at most one image, or group
    for label in sorted(classes):
        random.Random(f"folds/{data.class_names[label]}").shuffle(classes[label])
        order += classes[label]
    train = tuple(sample for number, unit in enumerate(order) if number % parts != part for sample in unit)
    return replace(data, train=train, test=tuple(sample for unit in order[part::parts] for sample in unit))


def check_name(name: str, what: str) -> None:
    """Refuse a name that is not UTF-8: it could be written to no list, page or table."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        shown = name.encode(errors="backslashreplace").decode()
        raise DataError(
            f"expected {what} whose name is UTF-8, got {shown}; rename it (after unpacking a foreign archive, convmv "
            "renames all files)"
        ) from error


def image_name(folder: Path, path: Path) -> str:
    """The name of an image in results: its path relative to the data's folder, also where it lies elsewhere."""
    if path.is_relative_to(folder) and ".." not in path.parts:
        return path.relative_to(folder).as_posix()
    try:
        return Path(os.path.relpath(path, folder)).as_posix()
    except ValueError:  # on another drive
        return path.name


def class_counts(samples: Iterable[Sample], n_classes: int) -> list[int]:
    """How many images each class has."""
    counts = Counter(sample.label for sample in samples)
    return [counts[label] for label in range(n_classes)]


def repeat_factors(counts: Sequence[int]) -> list[int]:
    """How often each class's images are seen in an epoch: √(largest class / own), rounded.

    Repeat factor sampling (Gupta et al., LVIS, CVPR 2019), halfway between the data as it is and equal classes.

    Examples:
        >>> repeat_factors([50, 40, 13, 1])
        [1, 1, 2, 7]
    """
    return [max(1, round(math.sqrt(max(counts) / max(count, 1)))) for count in counts]

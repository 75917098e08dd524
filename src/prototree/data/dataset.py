"""What a data set is made of: images with a label and, where known, a box and named parts; its splits and folds."""

import math
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from prototree.backbones.geometry import Box, Size
from prototree.errors import ConfigError, DataError

Kind = Literal["folder", "manifest", "cub", "cars"]
MAX_FOLDS = 100


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
    files are scanned.
    """

    path: Path
    label: int
    box: Box | None = None
    parts: tuple[Part, ...] = ()
    size: Size | None = None


@dataclass(frozen=True)
class Unreadable:
    """A file that cannot be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class ImageData:
    """A data set: class names (a sample's label is an index into them), its splits, and the files left out.

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
    validation_split: tuple[Sample, ...] = ()  # neither trained nor tested on; edits are judged on them
    ignored: tuple[Path, ...] = ()  # other files in its class folders, perhaps images in formats that are not read

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
        chosen = {sample for group in _by_label(self.test).values() for sample in group[::2]}
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
        groups = _by_label(self.train).values()
        return replace(self, train=tuple(sample for group in groups for sample in rng.choices(group, k=len(group))))


def _by_label(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.label, []).append(sample)
    return groups


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
    groups = _by_label(sorted((*data.train, *data.test), key=lambda sample: str(sample.path)))
    order: list[Sample] = []  # of all classes, so that folds differ by at most one image
    for label in sorted(groups):
        random.Random(f"folds/{data.class_names[label]}").shuffle(groups[label])
        order += groups[label]
    train = tuple(sample for number, sample in enumerate(order) if number % parts != part)
    return replace(data, train=train, test=tuple(order[part::parts]))


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

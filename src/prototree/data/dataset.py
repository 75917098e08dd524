"""What a data set is made of: photos with a label and, where known, a box and named points."""

import os
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from prototree.backbones.geometry import Box, Size
from prototree.errors import DataError

Kind = Literal["folder", "manifest", "cub", "cars"]


@dataclass(frozen=True)
class Part:
    """A named point of the object, such as a beak; only those visible in the photo are kept."""

    name: str
    x: float
    y: float


@dataclass(frozen=True)
class Sample:
    """One photo and what is known about it.

    `box`, `parts` and `size` count in pixels of the upright photo (after the camera's rotation mark is
    obeyed). `size` is filled in when the files are scanned.
    """

    path: Path
    label: int
    box: Box | None = None
    parts: tuple[Part, ...] = ()
    size: Size | None = None


@dataclass(frozen=True)
class Problem:
    """A file that cannot be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class ImageData:
    """A data set: class names (a sample's label is a position in them), its splits, and the files left out.

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
    problems: tuple[Problem, ...] = ()
    validation: tuple[Sample, ...] = ()  # neither trained nor tested on; they give the feedback while editing
    ignored: tuple[Path, ...] = ()  # other files in its class folders, perhaps images in formats that are not read

    @property
    def n_classes(self) -> int:
        return len(self.class_names)

    @property
    def folder(self) -> Path:
        """Where the names of its photos begin; a manifest's root is the file itself."""
        return self.root.parent if self.kind == "manifest" else self.root

    @property
    def every(self) -> tuple[Sample, ...]:
        """All photos but those for validation, in an order that does not depend on how they are divided."""
        return tuple(sorted({*self.train, *self.test}, key=lambda sample: str(sample.path)))

    @property
    def feedback(self) -> tuple[Sample, ...]:
        """Photos that are looked at while editing: those for validation, or else every second test photo of a class."""
        return self.validation or self._test_halves()[0]

    @property
    def kept_back(self) -> tuple[Sample, ...]:
        """Test photos that give no feedback."""
        return self.test if self.validation else self._test_halves()[1]

    def _test_halves(self) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
        """The first, third, … test photo of each class, and the others."""
        seen: Counter[int] = Counter()
        halves: tuple[list[Sample], list[Sample]] = ([], [])
        for sample in self.test:
            halves[seen[sample.label] % 2].append(sample)
            seen[sample.label] += 1
        return tuple(halves[0]), tuple(halves[1])

    def name(self, sample: Sample) -> str:
        """How a photo is called in results."""
        return name_in(self.folder, sample.path)

    def bootstrap(self, seed: int) -> "ImageData":
        """As many training photos, drawn with replacement within each class, for bagging."""
        chance = random.Random(seed)
        by_label: dict[int, list[Sample]] = {}
        for sample in self.train:
            by_label.setdefault(sample.label, []).append(sample)
        drawn = [one for own in by_label.values() for one in chance.choices(own, k=len(own))]
        return replace(self, train=tuple(drawn))


def check_name(name: str, what: str) -> None:
    """Refuses a name that is not UTF-8: it could be written to no list, page or table."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        shown = name.encode(errors="backslashreplace").decode()
        raise DataError(
            f"expected {what} whose name is UTF-8, got {shown}; rename it (after unpacking a foreign archive, convmv "
            "renames all files)"
        ) from error


def name_in(root: Path, path: Path) -> str:
    """How a photo is called in results: its path as seen from the data's folder, also where it lies elsewhere."""
    if path.is_relative_to(root) and ".." not in path.parts:
        return path.relative_to(root).as_posix()
    try:
        return Path(os.path.relpath(path, root)).as_posix()
    except ValueError:  # on another drive
        return path.name

"""What a data set is made of: photos with a label and, where known, a box and named points."""

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from prototree.errors import DataError

Kind = Literal["folder", "manifest", "cub", "cars"]
Size = tuple[int, int]
"""Width and height, in pixels."""


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels; pixel `i` covers the stretch from `i` to `i + 1`, so edges need not be whole numbers."""

    left: float
    top: float
    right: float
    bottom: float

    def __post_init__(self) -> None:
        edges = (self.left, self.top, self.right, self.bottom)
        if not all(map(math.isfinite, edges)) or self.right < self.left or self.bottom < self.top:
            raise DataError(f"expected a box with left <= right and top <= bottom, got {edges}")

    @classmethod
    def from_corner(cls, x: float, y: float, width: float, height: float) -> "Box":
        """A box from its upper left corner and its extent, as CUB writes them."""
        return cls(x, y, x + width, y + height)

    @classmethod
    def whole(cls, size: Size) -> "Box":
        """The box that covers a photo of this size."""
        return cls(0.0, 0.0, float(size[0]), float(size[1]))

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top

    def clip(self, size: Size) -> "Box":
        """The part inside a photo of this size; of zero width or height when the two do not meet."""
        width, height = map(float, size)
        return Box(
            min(max(self.left, 0.0), width),
            min(max(self.top, 0.0), height),
            min(max(self.right, 0.0), width),
            min(max(self.bottom, 0.0), height),
        )

    def enlarge(self, share: float) -> "Box":
        """The box grown on each side by this share of its width or height."""
        across, down = share * self.width, share * self.height
        return Box(self.left - across, self.top - down, self.right + across, self.bottom + down)

    def contains(self, x: float, y: float) -> bool:
        """Whether the point lies inside or on the edge."""
        return self.left <= x <= self.right and self.top <= y <= self.bottom

    def covers(self, other: "Box") -> bool:
        """Whether all of the other box lies inside this one."""
        return self.contains(other.left, other.top) and self.contains(other.right, other.bottom)


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
    """A data set: class names (a sample's label is a position in them), its two splits, and the files left out."""

    root: Path
    kind: Kind
    class_names: tuple[str, ...]
    train: tuple[Sample, ...]
    test: tuple[Sample, ...]
    problems: tuple[Problem, ...] = ()

    @property
    def n_classes(self) -> int:
        return len(self.class_names)

    def bootstrap(self, seed: int) -> "ImageData":
        """As many training photos, drawn with replacement within each class, for bagging."""
        chance = random.Random(seed)
        by_label: dict[int, list[Sample]] = {}
        for sample in self.train:
            by_label.setdefault(sample.label, []).append(sample)
        drawn = [one for own in by_label.values() for one in chance.choices(own, k=len(own))]
        return replace(self, train=tuple(drawn))


def name_in(root: Path, path: Path) -> str:
    """How a photo is called in results: its path within the data where it lies there, else its file name."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name

"""Rectangles in pixels, how an image becomes the network's input, and where the patches of a map lie in it."""

import math
from dataclasses import dataclass
from typing import Literal

from prototree.errors import ConfigError, DataError

MAX_SIDE = 4096  # pixels of the largest square that an image is resized to

Size = tuple[int, int]
"""Width and height, in pixels."""
RGB = tuple[float, float, float]


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels; pixel `i` covers the stretch from `i` to `i + 1`, so edges need not be whole numbers."""

    left: float
    top: float
    right: float
    bottom: float

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, self.edges)) or self.right < self.left or self.bottom < self.top:
            raise DataError(f"expected a box with left <= right and top <= bottom, got {self.edges}")

    @classmethod
    def from_corner(cls, x: float, y: float, width: float, height: float) -> "Box":
        """A box from its upper left corner and its extent, as CUB writes them."""
        return cls(x, y, x + width, y + height)

    @classmethod
    def whole(cls, size: Size) -> "Box":
        """The box that covers an image of this size."""
        return cls(0.0, 0.0, float(size[0]), float(size[1]))

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top

    def clip(self, size: Size) -> "Box":
        """The part inside an image of this size; of zero width or height when the two do not meet."""
        return Box(*(min(max(edge, 0.0), float(most)) for edge, most in zip(self.edges, size * 2, strict=True)))

    def enlarge(self, fraction: float) -> "Box":
        """The box grown on each side by this fraction of its width or height."""
        across, down = fraction * self.width, fraction * self.height
        return Box(self.left - across, self.top - down, self.right + across, self.bottom + down)

    def context_square(self, times: float, size: Size) -> "Box":
        """Return a square, `times` the longer side, around this box, moved into an image, or a smaller one."""
        side = min(times * max(self.width, self.height), float(min(size)))
        edges = []
        for start, stop, whole in ((self.left, self.right, size[0]), (self.top, self.bottom, size[1])):
            length = min(max(side, stop - start), float(whole))
            first = min(max((start + stop - length) / 2, 0.0), whole - length)
            edges.append((first, first + length))
        (left, right), (top, bottom) = edges
        return Box(left, top, right, bottom)

    def relative_to(self, other: "Box") -> tuple[float, float, float, float]:
        """Return the edges as fractions of another box's width and height."""
        across, down = max(other.width, 1e-9), max(other.height, 1e-9)
        left, top = (self.left - other.left) / across, (self.top - other.top) / down
        return left, top, (self.right - other.left) / across, (self.bottom - other.top) / down

    @property
    def middle(self) -> tuple[float, float]:
        return (self.left + self.right) / 2, (self.top + self.bottom) / 2

    def square(self, side: float) -> "Box":
        """A square of this side around the same middle."""
        x, y = self.middle
        return Box(x - side / 2, y - side / 2, x + side / 2, y + side / 2)

    def contains(self, x: float, y: float) -> bool:
        """Whether the point lies inside or on the edge."""
        return self.left <= x <= self.right and self.top <= y <= self.bottom

    def contains_box(self, other: "Box") -> bool:
        """Whether all of the other box lies inside this one."""
        return self.contains(other.left, other.top) and self.contains(other.right, other.bottom)

    @property
    def edges(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom."""
        return self.left, self.top, self.right, self.bottom


@dataclass(frozen=True)
class Preprocessing:
    """Resize to a `resize` square whatever the aspect ratio, crop `size` of it, scale to [0, 1], normalise.

    The crop is central at test time and random in training; with `resize == size` (CUB) there is none. It is stored
    with every tree, since a tree is only right for its own.
    """

    size: int = 224
    resize: int = 224
    mean: RGB = (0.485, 0.456, 0.406)  # of ImageNet
    std: RGB = (0.229, 0.224, 0.225)
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.resize <= MAX_SIDE:
            raise ConfigError(
                f"expected 1 <= size <= resize <= {MAX_SIDE} pixels, got size {self.size} and resize {self.resize}; "
                "images are resized first and then cropped"
            )
        if self.interpolation not in ("bilinear", "bicubic"):
            raise ConfigError(f"expected interpolation 'bilinear' or 'bicubic', got {self.interpolation!r}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ConfigError(f"expected three means and three positive stds, got {self.mean} and {self.std}")


@dataclass(frozen=True)
class PatchGrid:
    """The patches of `height`×`width` cells in a map of `rows`×`columns` cells, over an input of `side` pixels.

    A patch is named by the row and column of its upper left cell, or by its index, counted row by row. `extents` are
    what each crop covers of the input; the map of the second crop goes on below that of the first.

    >>> PatchGrid(rows=7, columns=7, side=224).box(0, 1)
    Box(left=32.0, top=0.0, right=64.0, bottom=32.0)
    """

    rows: int  # of one crop
    columns: int
    side: int
    height: int = 1
    width: int = 1
    extents: tuple[Box, ...] = ()  # none: one crop, all of the input

    @property
    def rows_per_crop(self) -> int:
        """How many rows of patches one crop has."""
        return self.rows - self.height + 1

    @property
    def shape(self) -> tuple[int, int]:
        """How many patches there are, down and across."""
        return self.rows_per_crop * max(len(self.extents), 1), self.columns - self.width + 1

    @property
    def n_patches(self) -> int:
        return self.shape[0] * self.shape[1]

    def row_column(self, patch: int) -> tuple[int, int]:
        return divmod(patch, self.shape[1])

    def index(self, row: int, column: int) -> int:
        return row * self.shape[1] + column

    def has_patch(self, row: int, column: int) -> bool:
        return 0 <= row < self.shape[0] and 0 <= column < self.shape[1]

    def box(self, row: int | float, column: int | float) -> Box:
        """The cells of a patch, in pixels of the input; a place between patches has a box of the same size."""
        crop = int(row // self.rows_per_crop) if self.extents else 0
        extent = self.extents[crop] if self.extents else Box.whole((self.side, self.side))
        row, down, across = row - crop * self.rows_per_crop, extent.height / self.rows, extent.width / self.columns
        return Box(
            extent.left + column * across,
            extent.top + row * down,
            extent.left + (column + self.width) * across,
            extent.top + (row + self.height) * down,
        )

    def nearest(self, x: float, y: float) -> tuple[int, int]:
        """The patch of the first crop whose middle is nearest to a point of the input."""
        row = round(min(max(y * self.rows / self.side - self.height / 2, 0.0), float(self.rows - self.height)))
        column = round(min(max(x * self.columns / self.side - self.width / 2, 0.0), float(self.columns - self.width)))
        return row, column

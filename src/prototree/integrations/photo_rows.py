"""Photos in the forms that scikit-learn passes around: paths, columns of them, arrays of images, rows of pixels."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from numpy import ndarray
from PIL import Image
from torch import Tensor

from prototree.backbones.preprocessing import Preprocessing
from prototree.data import ImageData, Sample
from prototree.data.images import read_photo
from prototree.data.scan import scan_files
from prototree.data.transforms import to_input

Photos = Sequence[Path] | UInt8[ndarray, "n height width 3"]
BATCH = 32


def as_photos(x: Any) -> Photos | None:
    """Paths or 8-bit images out of what a user hands over; None where it is neither."""
    if isinstance(x, ndarray) and x.ndim == 4:
        return _as_images(x)
    values = np.asarray(x, dtype=object) if isinstance(x, list | tuple) else np.asarray(x)
    if values.ndim == 2 and values.shape[1] == 1:  # a column of a table
        values = values[:, 0]
    is_text = values.dtype.kind in "OUT" and values.ndim == 1 and len(values) > 0
    if not is_text or not all(isinstance(one, str | Path) for one in values):
        return None
    return [Path(one) for one in values]


def _as_images(x: ndarray) -> UInt8[ndarray, "n height width 3"]:
    if x.dtype != np.uint8 or x.shape[3] != 3:
        raise ValueError(
            f"expected 8-bit images of shape (n, height, width, 3), got {x.dtype} of shape {x.shape}; "
            "convert them, or hand over flattened rows of numbers"
        )
    return x


@dataclass(frozen=True)
class Rows:
    """How rows of numbers become pictures: their shape, and the numbers that are black and white."""

    shape: tuple[int, ...]
    black: float = 0.0
    white: float = 255.0

    @classmethod
    def like(cls, rows: ndarray, shape: tuple[int, ...] | None) -> "Rows":
        """From the rows to learn from: 8-bit numbers are taken as they are, others between the smallest and largest."""
        n_pixels = rows.shape[1]
        found = tuple(shape) if shape else _squarest(n_pixels)
        if math.prod(found) != n_pixels or len(found) not in (2, 3) or (len(found) == 3 and found[2] not in (1, 3)):
            raise ValueError(
                f"expected image_shape (height, width) or (height, width, 3) of {n_pixels} numbers, got {found}"
            )
        return cls(found) if rows.dtype == np.uint8 else cls(found, float(rows.min()), float(rows.max()))

    def pictures(self, rows: ndarray) -> UInt8[ndarray, "n height width 3"]:
        span = self.white - self.black or 1.0
        levels = (rows.astype(np.float64) - self.black) * (255.0 / span)
        pixels = levels.clip(0, 255).round().astype(np.uint8).reshape(len(rows), *self.shape[:2], -1)
        return np.broadcast_to(pixels, (*pixels.shape[:3], 3)).copy() if pixels.shape[3] == 1 else pixels


def _squarest(n_pixels: int) -> tuple[int, ...]:
    """A colour square where the number allows it, else a grey square, else a grey strip."""
    for channels in (3, 1):
        side = math.isqrt(n_pixels // channels)
        if side * side * channels == n_pixels:
            return side, side, channels
    return 1, n_pixels, 1


def as_data(photos: Photos, labels: Sequence[int], class_names: Sequence[str], folder: Path) -> ImageData:
    """Training data of photos alone; images in memory are written to the folder without loss.

    Its root is the folder that all photos lie in, so that a prototype's photo is found again.
    """
    if isinstance(photos, ndarray):
        paths = [folder / f"{number:06d}.png" for number in range(len(photos))]
        for path, pixels in zip(paths, photos, strict=True):
            Image.fromarray(pixels).save(path, compress_level=1)
    else:
        paths = [Path(os.path.abspath(path)) for path in photos]
        folder = Path(os.path.commonpath([path.parent for path in paths]))
    samples = tuple(Sample(path, int(label)) for path, label in zip(paths, labels, strict=True))
    return scan_files(ImageData(folder, "folder", tuple(class_names), samples, ()), strict=True)


def batches(photos: Photos, preprocessing: Preprocessing) -> Iterator[Float[Tensor, "B 3 size size"]]:
    """The photos as a tree sees them, some at a time."""
    for start in range(0, len(photos), BATCH):
        some = photos[start : start + BATCH]
        pictures = [
            Image.fromarray(one) if isinstance(one, ndarray) else read_photo(one, at_least=preprocessing.resize).image
            for one in some
        ]
        yield torch.stack([to_input(picture, preprocessing) for picture in pictures])

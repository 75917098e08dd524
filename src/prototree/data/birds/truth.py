"""What is known of a generated data set beyond labels: how each species looks, and which pixels show which part."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from prototree.data.birds.species import PART_NAMES, Look, Species
from prototree.errors import DataError

LOOKS = "parts/looks.txt"  # a line for each species and part: their numbers, shape, colour, pattern, accent or `-`


def read_species(folder: Path, class_names: tuple[str, ...]) -> tuple[Species, ...] | None:
    """The species of a data set that `write_birds` wrote, in the order of its classes; None for any other data."""
    file = folder / LOOKS
    if not file.is_file():
        return None
    try:
        rows = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
        looks = {
            (int(number), int(part)): Look(*("" if word == "-" else word for word in words))
            for number, part, *words in rows
        }
        return tuple(
            Species(name, tuple(looks[number, part] for part in range(1, len(PART_NAMES) + 1)))
            for number, name in enumerate(class_names, start=1)
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{file} does not say how every part of every species looks; write the birds again") from error


def part_pixels(folder: Path, image: str, parts: Collection[str]) -> NDArray[np.bool_]:
    """Which pixels of a photo, named by its path within the data, show one of the parts."""
    path = (folder / image.replace("images/", "segmentations/", 1)).with_suffix(".png")
    try:
        with Image.open(path) as part_map:
            labels = np.asarray(part_map)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); write the birds again") from error
    shown: NDArray[np.bool_] = np.isin(labels, [PART_NAMES.index(part) + 1 for part in parts])
    return shown

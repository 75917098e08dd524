"""Labelled images to train on: image folders, CSV manifests, CUB-200-2011 and Stanford Cars, opened by `open_data`.

    data = open_data("photos/")
    data.class_names, len(data.train), len(data.test), data.unreadable

What the network is shown is in `crops` and `transforms`, how it gets there in `loader`; those import torch, this module
does not.
"""

import logging
from collections import Counter
from pathlib import Path

from prototree.backbones.geometry import Box
from prototree.data.cub_cars import is_cars, is_cub, read_cars, read_cub
from prototree.data.dataset import ImageData, Part, Sample, Unreadable, check_name, take_fold
from prototree.data.folder import MANIFEST_SUFFIXES, describe_unsupported, read_folder, read_manifest
from prototree.data.scan import describe_unreadable, scan_files
from prototree.errors import DataError
from prototree.io import cache_folder

__all__ = ["Box", "ImageData", "Part", "Sample", "Unreadable", "open_data"]

logger = logging.getLogger(__name__)

BIRDS = "birds"
FEW_IMAGES = 10
_SHOWN = 5


def open_data(
    source: str | Path,
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    strict: bool = False,
    deep: bool = False,
    fold: str = "",
) -> ImageData:
    """Open a data set in any form and check that a tree can be trained on it.

    Args:
        source: An image folder, a CSV list, CUB-200-2011, Stanford Cars, or `birds`, the generated data set.
        test_fraction: Fraction of the images kept for testing if the data has no split of its own.
        seed: Seed of that split.
        strict: Fail on files that cannot be used, instead of leaving them out.
        deep: Decode every image, instead of reading its header only; slower.
        fold: Such as 2/5: take the second fifth of all images as the test set, whatever split the data has.

    Returns:
        Class names, training and test images, and the files left out.

    Raises:
        DataError: The data cannot be read, or a tree cannot be trained on it.

    Examples:
        >>> data = open_data("photos/")
        >>> data.kind, data.n_classes, len(data.train), len(data.test)
        ('folder', 3, 24, 9)
    """
    data = read_data(source, test_fraction=test_fraction, seed=seed, strict=strict, deep=deep)
    rest = "the rest is used" if data.train else "nothing is left"
    if data.unreadable:
        logger.warning("%s\n%s", describe_unreadable(data.root, data.unreadable), rest)
    if unsupported := describe_unsupported(data.ignored):
        logger.warning("%s: %s; %s", data.root, unsupported, rest)
    if fold:
        data = take_fold(data, fold)
    check_trainable(data)
    return data


def read_data(
    source: str | Path, *, test_fraction: float = 0.2, seed: int = 0, strict: bool = False, deep: bool = False
) -> ImageData:
    """Read a data set like `open_data`, whether or not a tree can be trained on it."""
    path = Path(source).expanduser()
    if str(source) == BIRDS and not path.exists():
        path = _generated_birds()
    check_name(str(path.resolve()), "data")
    if not path.exists():
        raise DataError(f"{path} does not exist; expected a folder of images or a CSV file that lists them")
    if path.is_dir() and is_cub(path):
        data = read_cub(path)
    elif path.is_dir() and is_cars(path):
        data = read_cars(path)
    elif path.is_dir():
        data = read_folder(path, test_fraction=test_fraction, seed=seed)
    elif path.suffix.lower() in MANIFEST_SUFFIXES:
        data = read_manifest(path, test_fraction=test_fraction, seed=seed)
    else:
        raise DataError(f"expected a folder, or a manifest that ends in .csv or .tsv, got the file {path}")
    if strict and (unsupported := describe_unsupported(data.ignored)):
        raise DataError(f"{data.root}: {unsupported}; or open the data without strict to skip them")
    return scan_files(data, strict=strict, deep=deep)


def data_exists(source: str | Path) -> bool:
    """Whether there is anything to open on this machine."""
    return str(source) == BIRDS or Path(source).expanduser().exists()


def _generated_birds() -> Path:
    """Draw the generated birds into the cache on first use."""
    from prototree_birds import write_birds

    folder = cache_folder() / "birds-3"
    if not folder.exists():
        logger.info("drawing the generated birds into %s", folder)
        write_birds(folder, workers=1)  # a pool would ask scripts for an `if __name__ == "__main__"`
    return folder


def check_trainable(data: ImageData) -> None:
    """Raise an error unless there are classes to tell apart, with images to train and to test them."""
    left_out = f" (files that could not be used: {len(data.unreadable)})" if data.unreadable else ""
    if data.n_classes < 2:
        classes = f"{data.n_classes} ({', '.join(data.class_names) or 'none'})"
        raise DataError(f"expected at least two classes in {data.root}, got {classes}; add a class to tell apart")
    if not data.train or not data.test:
        missing = "test" if data.train else "train"
        remedy = {
            "manifest": f"give some rows of the column split the word {missing}, or leave the column out to have a "
            "fraction of each class taken for testing",
            "folder": "a class needs two images to be in both",
        }.get(data.kind, f"its own lists name no images to {missing} on that can be read")
        counts = f"{len(data.train)} and {len(data.test)}{left_out}"
        raise DataError(f"expected training and test images in {data.root}, got {counts}; {remedy}")
    count = Counter(sample.label for sample in data.train)
    if empty := [name for label, name in enumerate(data.class_names) if count[label] == 0]:
        raise DataError(
            f"expected training images of every class in {data.root}, got none of "
            f"{', '.join(empty[:_SHOWN])}{left_out}; add images or remove the classes"
        )
    if few := [name for label, name in enumerate(data.class_names) if count[label] < FEW_IMAGES]:
        shown = ", ".join(few[:_SHOWN]) + (", …" if len(few) > _SHOWN else "")
        logger.warning(
            f"{len(few)} of {data.n_classes} classes have fewer than {FEW_IMAGES} training images ({shown}); "
            "expect low confidence, and add images if you can"
        )

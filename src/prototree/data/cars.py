"""Stanford Cars as published: images beside annotations in MATLAB files.

Two forms are read: the development kit (`devkit/cars_meta.mat`, `devkit/cars_train_annos.mat`,
`cars_test_annos_withlabels.mat` there or beside it, images in `cars_train/` and `cars_test/`), and the single
`cars_annos.mat` with `car_ims/`. Cars sorted into class folders are an ordinary folder.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np

from prototree.backbones.geometry import Box
from prototree.data.dataset import ImageData, Sample
from prototree.errors import DataError, MissingExtraError
from prototree.io import MAX_TEXT_BYTES, read_regular

_TEST_FILE = "cars_test_annos_withlabels.mat"


def is_cars(root: Path) -> bool:
    """Whether the folder holds one of the two published forms."""
    return (root / "devkit" / "cars_meta.mat").is_file() or (root / "cars_annos.mat").is_file()


def read_cars(root: Path) -> ImageData:
    """Read the official split and boxes, although the paper's experiments use no annotation of Cars but the class."""
    return _read_single(root) if (root / "cars_annos.mat").is_file() else _read_devkit(root)


def _read_single(root: Path) -> ImageData:
    file = root / "cars_annos.mat"
    names, rows = _values(file, "class_names"), _values(file, "annotations")
    samples = _samples(file, rows, len(names), root, "relative_im_path")
    try:
        in_test = [bool(row["test"]) for row in rows]
    except (KeyError, ValueError) as error:
        raise DataError(f"{file} does not say which images are for testing ({error!r}); is it damaged?") from error
    train, test = (
        tuple(sample for sample, tested in zip(samples, in_test, strict=True) if tested is wanted)
        for wanted in (False, True)
    )
    return ImageData(root, "cars", tuple(map(str, names)), train, test)


def _read_devkit(root: Path) -> ImageData:
    devkit = root / "devkit"
    test_file = next((file for file in (devkit / _TEST_FILE, root / _TEST_FILE) if file.is_file()), None)
    if test_file is None:
        raise DataError(
            f"{root} lacks {_TEST_FILE} (looked there and in devkit/); "
            "the file cars_test_annos.mat has no labels, so it cannot take its place"
        )
    names = _values(devkit / "cars_meta.mat", "class_names")
    train, test = (
        _samples(file, _values(file, "annotations"), len(names), root / images, "fname")
        for file, images in ((devkit / "cars_train_annos.mat", "cars_train"), (test_file, "cars_test"))
    )
    return ImageData(root, "cars", tuple(map(str, names)), train, test)


def _values(file: Path, key: str) -> list[Any]:
    """The values under a key of a MATLAB file."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise MissingExtraError("scipy", "data") from error
    if not file.is_file():
        raise DataError(f"{file} does not exist; unpack the Stanford Cars development kit there")
    try:
        content = loadmat(io.BytesIO(read_regular(file, MAX_TEXT_BYTES)), simplify_cells=True)
    except Exception as error:  # a damaged file fails in many ways inside the reader
        raise DataError(f"{file} cannot be read as a MATLAB file: {error}") from error
    if key not in content:
        raise DataError(f"{file} has no {key}; is it a file of Stanford Cars?")
    value = content[key]  # an array of one element arrives as that element
    return list(value) if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim) else [value]


def _samples(file: Path, rows: list[Any], n_classes: int, folder: Path, path_key: str) -> tuple[Sample, ...]:
    samples = []
    for number, row in enumerate(rows, start=1):
        try:
            label = int(row["class"]) - 1
            # MATLAB counts pixels from 1 and includes the last one.
            left, top, right, bottom = (float(row[f"bbox_{edge}"]) for edge in ("x1", "y1", "x2", "y2"))
            sample = Sample(folder / str(row[path_key]), label, Box(left - 1.0, top - 1.0, right, bottom))
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, DataError) as error:
            raise DataError(f"{file} annotation {number} is not usable ({error!r}); is the file damaged?") from error
        if not 0 <= label < n_classes:
            raise DataError(f"{file} annotation {number}: class {label + 1} is not in 1..{n_classes}")
        samples.append(sample)
    return tuple(samples)

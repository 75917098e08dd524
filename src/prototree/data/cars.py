"""Stanford Cars as published: photos beside annotations in MATLAB files.

Two forms are read: the development kit (`devkit/cars_meta.mat`, `devkit/cars_train_annos.mat`,
`cars_test_annos_withlabels.mat` there or beside it, photos in `cars_train/` and `cars_test/`), and the single
`cars_annos.mat` with `car_ims/`. Cars sorted into class folders are an ordinary folder.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from prototree.backbones.geometry import Box
from prototree.data.dataset import ImageData, Sample
from prototree.errors import DataError, MissingExtraError
from prototree.files import MAX_TEXT_BYTES, read_regular

_TEST_FILE = "cars_test_annos_withlabels.mat"


def is_cars(root: Path) -> bool:
    """Whether the folder holds one of the two published forms."""
    return (root / "devkit" / "cars_meta.mat").is_file() or (root / "cars_annos.mat").is_file()


def read_cars(root: Path) -> ImageData:
    """Its official split; boxes are kept although the paper's experiments use no annotation of Cars but the class."""
    return _read_single(root) if (root / "cars_annos.mat").is_file() else _read_devkit(root)


def _read_single(root: Path) -> ImageData:
    file = root / "cars_annos.mat"
    content = _load(file)
    names = _class_names(file, content)
    rows = _rows(file, content)
    samples = _samples(file, rows, names, lambda row: root / str(row["relative_im_path"]))
    try:
        in_test = [bool(row["test"]) for row in rows]
    except (KeyError, ValueError) as error:
        raise DataError(f"{file} does not say which photos are for testing ({error!r}); is it damaged?") from error
    return ImageData(
        root,
        "cars",
        names,
        tuple(sample for sample, test in zip(samples, in_test, strict=True) if not test),
        tuple(sample for sample, test in zip(samples, in_test, strict=True) if test),
    )


def _read_devkit(root: Path) -> ImageData:
    devkit = root / "devkit"
    meta, train_file = devkit / "cars_meta.mat", devkit / "cars_train_annos.mat"
    test_file = next((file for file in (devkit / _TEST_FILE, root / _TEST_FILE) if file.is_file()), None)
    if test_file is None:
        raise DataError(
            f"{root} lacks {_TEST_FILE} (looked there and in devkit/); "
            "the file cars_test_annos.mat has no labels, so it cannot take its place"
        )
    names = _class_names(meta, _load(meta))

    def read(file: Path, photos: str) -> tuple[Sample, ...]:
        return _samples(file, _rows(file, _load(file)), names, lambda row: root / photos / str(row["fname"]))

    return ImageData(root, "cars", names, read(train_file, "cars_train"), read(test_file, "cars_test"))


def _load(file: Path) -> dict[str, Any]:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise MissingExtraError("scipy", "data") from error
    if not file.is_file():
        raise DataError(f"{file} does not exist; unpack the Stanford Cars development kit there")
    try:
        content: dict[str, Any] = loadmat(io.BytesIO(read_regular(file, MAX_TEXT_BYTES)), simplify_cells=True)
    except Exception as error:  # a damaged file fails in many ways inside the reader
        raise DataError(f"{file} cannot be read as a MATLAB file: {error}") from error
    return content


def _class_names(file: Path, content: dict[str, Any]) -> tuple[str, ...]:
    if "class_names" not in content:
        raise DataError(f"{file} has no class_names; is it a file of Stanford Cars?")
    return tuple(str(name) for name in _as_list(content["class_names"]))


def _rows(file: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    if "annotations" not in content:
        raise DataError(f"{file} has no annotations; is it a file of Stanford Cars?")
    rows = _as_list(content["annotations"])
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{file} has annotations that are not usable; is the file damaged?")
    return rows


def _as_list(value: Any) -> list[Any]:
    """MATLAB arrays of one element arrive as that element."""
    return list(value) if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim) else [value]


def _samples(
    file: Path, rows: list[dict[str, Any]], names: tuple[str, ...], path: Callable[[dict[str, Any]], Path]
) -> tuple[Sample, ...]:
    samples = []
    for number, row in enumerate(rows, start=1):
        try:
            label = int(row["class"]) - 1
            # MATLAB counts pixels from 1 and includes the last one.
            left, top, right, bottom = (float(row[f"bbox_{edge}"]) for edge in ("x1", "y1", "x2", "y2"))
            sample = Sample(path(row), label, Box(left - 1.0, top - 1.0, right, bottom))
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, DataError) as error:
            raise DataError(f"{file} annotation {number} is not usable ({error!r}); is the file damaged?") from error
        if not 0 <= label < len(names):
            raise DataError(f"{file} annotation {number}: class {label + 1} is not in 1..{len(names)}")
        samples.append(sample)
    return tuple(samples)

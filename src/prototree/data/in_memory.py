"""Data as people have it in Python: a table, arrays, a dataset of torch or of Hugging Face. No torch here.

Whatever comes becomes a CSV manifest and, where there are only pixels, a folder of image files beside it, named after
a digest of the content. So a run can open its data again, later and in another process, as it opens any other.
"""

import contextlib
import csv
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from prototree.data.dataset import check_name
from prototree.data.folder import SPLIT_NAMES, TEST_NAMES, TRAIN_NAMES
from prototree.data.images import from_pillow
from prototree.errors import DataError
from prototree.io import prepared_beside, write_file

_LIST = "data.csv"

Row = tuple[Path | Image.Image, str, str, str]
"""An image, its label, its split and its group; empty: not given."""


def write_in_memory(source: Any, folder: Path) -> Path:
    """Write the images in `source` as a manifest below `folder`; the same images, the same file.

    `source` is a pandas DataFrame (path, label, perhaps split and group); a pair of images and labels, where images are
    paths, PIL images or uint8 arrays; a dataset whose items are such pairs; a Hugging Face dataset with an image
    column; or a mapping from `train` and `test` to any of these.
    """
    digest, lines = hashlib.sha256(), list[tuple[str, str, str, str]]()
    with prepared_beside(folder / "given") as temporary:
        for number, (image, label, split, group) in enumerate(_rows(source)):
            path = str(image.resolve()) if isinstance(image, Path) else f"{number:08d}.png"
            if isinstance(image, Image.Image):
                image.save(temporary / path, compress_level=1)
                digest.update(f"{image.size}".encode() + image.tobytes())
            lines.append((path, label, split, group))
            digest.update(repr(lines[-1]).encode())
        if not lines:
            raise DataError("expected images and labels to train on, got none")
        columns = list(zip(("path", "label", "split", "group"), *lines, strict=True))
        given = [column for column in columns if column[0] in ("path", "label") or any(column[1:])]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(zip(*given, strict=True))
        write_file(temporary / _LIST, text.getvalue().encode())
        target = folder / digest.hexdigest()[:32]
        if not target.exists():
            with contextlib.suppress(OSError):  # another process may have been faster
                temporary.rename(target)
        if not (target / _LIST).exists():
            raise DataError(f"the images could not be written to {target}; make room there, or choose another folder")
        return target / _LIST


def _rows(source: Any) -> Iterator[Row]:
    if isinstance(source, Mapping):
        names = {str(split).casefold() for split in source}
        if not names & set(TRAIN_NAMES) or not names & set(TEST_NAMES) or not names <= set(SPLIT_NAMES):
            raise DataError(
                f"expected the splits train and test (and perhaps val), got {', '.join(map(repr, source)) or 'none'}; "
                "name both, or give one by itself to have a fraction of each class taken for testing"
            )
        for split, part in source.items():
            yield from ((image, label, str(split), group) for image, label, _, group in _rows(part))
    elif hasattr(source, "columns") and hasattr(source, "itertuples"):  # a DataFrame
        yield from _frame_rows(source)
    elif hasattr(source, "features") and hasattr(source, "column_names"):
        yield from _hugging_face_rows(source)
    elif isinstance(source, tuple) and len(source) == 2:
        images, labels = source
        if len(images) != len(labels):
            raise DataError(f"expected a label for each image, got {len(images)} images and {len(labels)} labels")
        yield from _pairs(zip(images, labels, strict=True))
    elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        items = (source[number] for number in range(len(source)))
        yield from _pairs(items, getattr(source, "classes", ()))
    else:
        raise DataError(
            "expected a path, a DataFrame (path, label), a pair of images and labels, a dataset, or a mapping from "
            f"train and test to these, got {type(source).__name__}"
        )


def _frame_rows(frame: Any) -> Iterator[Row]:
    columns = {str(name).strip().casefold(): name for name in frame.columns}
    if missing := [name for name in ("path", "label") if name not in columns]:
        names = ", ".join(map(str, frame.columns))
        raise DataError(f"expected the columns path and label (perhaps split), {missing[0]} is missing from {names}")
    given = [name for name in ("path", "label", "split", "group") if name in columns]
    for number, values in enumerate(zip(*(frame[columns[name]] for name in given), strict=True)):
        row = {"split": "", "group": ""} | dict(zip(given, values, strict=True))
        if row["split"] != row["split"]:  # NaN: an empty cell
            raise DataError(
                f"row {number} of the table has an empty split; expected train, test or val, or no such column at all"
            )
        yield _image(str(row["path"]), number), _label(row["label"]), str(row["split"]), _group(row["group"])


def _group(value: Any) -> str:
    """Write a group as text; a missing value, which comes in several kinds, is no group."""
    is_missing = not isinstance(value, str) and str(value) in ("None", "nan", "<NA>", "NaT")
    return "" if is_missing else str(value)


def _hugging_face_rows(table: Any) -> Iterator[Row]:
    kinds = {name: type(kind).__name__ for name, kind in table.features.items()}
    image = next((name for name, kind in kinds.items() if kind == "Image"), None)
    by_name = next((name for name in ("label", "labels", "class") if name in kinds), None)
    label = next((name for name, kind in kinds.items() if kind == "ClassLabel"), by_name)
    if image is None or label is None:
        raise DataError(f"expected a column of images and one of labels in the dataset, got {kinds}")
    names = getattr(table.features[label], "names", None) or ()
    yield from _pairs(((row[image], row[label]) for row in table), names)


def _pairs(pairs: Iterable[Any], names: Sequence[Any] = ()) -> Iterator[Row]:
    for number, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) < 2:
            raise DataError(f"expected items of the dataset that are an image and a label, got {type(pair).__name__}")
        yield _image(pair[0], number), _label(pair[1], names), "", ""


def _label(label: Any, names: Sequence[Any] = ()) -> str:
    value = label.item() if hasattr(label, "item") else label
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise DataError(f"expected labels that are names or whole numbers, got {label!r}")
    if isinstance(value, int) and names:
        if not 0 <= value < len(names):
            raise DataError(f"expected labels from 0 to {len(names) - 1}, got {value}")
        value = names[value]
    check_name(str(value), "a class")
    return str(value)


def _image(image: Any, number: int) -> Path | Image.Image:
    if isinstance(image, str | Path):
        check_name(str(image), "an image")
        return Path(image).expanduser()
    if isinstance(image, Image.Image):
        return from_pillow(image).image
    pixels = np.asarray(image)  # also of a tensor
    if not isinstance(image, np.ndarray) and pixels.ndim == 3 and pixels.shape[0] in (1, 3):
        pixels = np.moveaxis(pixels, 0, -1)  # tensors have their channels first
    if pixels.dtype.kind == "f" and pixels.size and pixels.min() >= 0 and pixels.max() <= 1:
        pixels = (pixels * 255).round().astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] != 3):
        raise DataError(
            f"image {number}: expected a path, a PIL image, 8-bit pixels of height×width×3, or numbers from 0 to 1, "
            f"got {pixels.dtype} of shape {pixels.shape}; give images before they are normalised"
        )
    return Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")

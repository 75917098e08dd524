"""Data as people have it in Python: a table, arrays, a dataset of torch or of Hugging Face. No torch here.

Whatever comes becomes a CSV list of photos and, where there are only pixels, a folder of photos beside it, named after
what is in them. So a run can open its data again, later and in another process, as it opens any other.
"""

import contextlib
import csv
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from prototree.data.dataset import check_name
from prototree.data.folder import TEST_NAMES, TRAIN_NAMES, VALIDATION_NAMES
from prototree.data.images import from_pillow
from prototree.errors import DataError
from prototree.files import prepared_beside, write_file
from prototree.inference.inputs import is_frame

_LIST = "data.csv"


@dataclass(frozen=True)
class _Row:
    photo: Path | Image.Image
    label: str
    split: str  # empty: not given


def write_given(source: Any, folder: Path) -> Path:
    """A list of the photos in `source`, in a folder of its own below `folder`; the same photos, the same place.

    `source` is a pandas DataFrame (path, label, perhaps split); a pair of photos and labels, where photos are paths,
    PIL images or uint8 arrays; a dataset whose items are such pairs; a Hugging Face dataset with an image column; or a
    mapping from `train` and `test` to any of these.
    """
    digest, lines = hashlib.sha256(), list[tuple[str, str, str]]()
    with prepared_beside(folder / "given") as waiting:
        for number, row in enumerate(_rows(source)):
            path = str(row.photo.resolve()) if isinstance(row.photo, Path) else f"{number:08d}.png"
            if isinstance(row.photo, Image.Image):
                row.photo.save(waiting / path, compress_level=1)
                digest.update(f"{row.photo.size}".encode() + row.photo.tobytes())
            lines.append((path, row.label, row.split))
            digest.update(repr(lines[-1]).encode())
        if not lines:
            raise DataError("expected photos and labels to learn from, got none")
        write_file(waiting / _LIST, _table(lines))
        place = folder / digest.hexdigest()[:32]
        if not place.exists():
            with contextlib.suppress(OSError):  # another process may have been faster
                waiting.rename(place)
        if not (place / _LIST).exists():
            raise DataError(f"the photos could not be written to {place}; make room there, or choose another folder")
        return place / _LIST


def _table(lines: Sequence[tuple[str, str, str]]) -> bytes:
    text, has_split = io.StringIO(), any(split for _, _, split in lines)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("path", "label", "split")[: 2 + has_split])
    writer.writerows(line[: 2 + has_split] for line in lines)
    return text.getvalue().encode()


def _rows(source: Any) -> Iterator[_Row]:
    if isinstance(source, Mapping):
        _check_parts(source)
        for split, part in source.items():
            yield from (_Row(row.photo, row.label, str(split)) for row in _rows(part))
    elif is_frame(source):
        yield from _frame_rows(source)
    elif hasattr(source, "features") and hasattr(source, "column_names"):
        yield from _table_rows(source)
    elif isinstance(source, tuple) and len(source) == 2:
        photos, labels = source
        if len(photos) != len(labels):
            raise DataError(f"expected a label for each photo, got {len(photos)} photos and {len(labels)} labels")
        yield from _pairs(zip(photos, labels, strict=True), ())
    elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        items = (source[number] for number in range(len(source)))
        yield from _pairs((_pair(item) for item in items), getattr(source, "classes", ()))
    else:
        raise DataError(
            "expected a path, a DataFrame (path, label), a pair of photos and labels, a dataset, or a mapping from "
            f"train and test to these, got {type(source).__name__}"
        )


def _check_parts(parts: Mapping[Any, Any]) -> None:
    """In the user's own words: a list that was written for them says nothing to them."""
    words = [str(part).casefold() for part in parts]
    both = any(word in TRAIN_NAMES for word in words) and any(word in TEST_NAMES for word in words)
    if not both or any(word not in TRAIN_NAMES + TEST_NAMES + VALIDATION_NAMES for word in words):
        raise DataError(
            f"expected the parts train and test (and perhaps val), got {', '.join(map(repr, parts)) or 'none'}; name "
            "both, or give one part by itself to have a share of each class taken for testing"
        )


def _frame_rows(frame: Any) -> Iterator[_Row]:
    columns = {str(name).strip().casefold(): name for name in frame.columns}
    if missing := [name for name in ("path", "label") if name not in columns]:
        found = ", ".join(map(str, frame.columns))
        raise DataError(
            f"expected the columns path and label (and perhaps split), {missing[0]} is missing from {found}"
        )
    wanted = [frame[columns[name]] for name in ("path", "label", "split") if name in columns]
    for number, (path, label, *split) in enumerate(zip(*wanted, strict=True)):
        if split and split[0] != split[0]:  # not a number: what an empty cell becomes
            raise DataError(
                f"row {number} of the table has an empty split; expected train, test or val, or no such column at all"
            )
        yield _Row(_path(path), _label(label, ()), str(split[0]) if split else "")


def _table_rows(table: Any) -> Iterator[_Row]:
    """A table of Hugging Face's package: its image column, and its column of classes."""
    kinds = {name: type(kind).__name__ for name, kind in table.features.items()}
    image = next((name for name, kind in kinds.items() if kind == "Image"), None)
    distance_p95 = (name for name in ("label", "labels", "class") if name in kinds)
    label = next((name for name, kind in kinds.items() if kind == "ClassLabel"), next(distance_p95, None))
    if image is None or label is None:
        raise DataError(f"expected a column of images and one of labels in the dataset, got {kinds}")
    names = getattr(table.features[label], "names", None) or ()
    yield from _pairs(((row[image], row[label]) for row in table), names)


def _pair(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(f"expected items of the dataset that are a photo and a label, got {type(item).__name__}")
    return item[0], item[1]


def _pairs(pairs: Iterable[tuple[Any, Any]], names: Sequence[Any]) -> Iterator[_Row]:
    for number, (photo, label) in enumerate(pairs):
        yield _Row(_photo(photo, number), _label(label, names), "")


def _label(label: Any, names: Sequence[Any]) -> str:
    value = label.item() if hasattr(label, "item") else label
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise DataError(f"expected labels that are names or whole numbers, got {label!r}")
    if isinstance(value, int) and names:
        if not 0 <= value < len(names):
            raise DataError(f"expected labels from 0 to {len(names) - 1}, got {value}")
        value = str(names[value])
    check_name(str(value), "a class")
    return str(value)


def _path(path: Any) -> Path:
    check_name(str(path), "an image")
    return Path(str(path)).expanduser()


def _photo(photo: Any, number: int) -> Path | Image.Image:
    if isinstance(photo, str | Path):
        return _path(photo)
    if isinstance(photo, Image.Image):
        return from_pillow(photo).image
    pixels = np.asarray(photo)  # also of a tensor
    if not isinstance(photo, np.ndarray) and pixels.ndim == 3 and pixels.shape[0] in (1, 3):
        pixels = np.moveaxis(pixels, 0, -1)  # tensors have their channels first
    if pixels.dtype.kind == "f" and pixels.size and pixels.min() >= 0 and pixels.max() <= 1:
        pixels = (pixels * 255).round().astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] != 3):
        raise DataError(
            f"photo {number}: expected a path, a PIL image, 8-bit pixels of height×width×3, or numbers from 0 to 1, "
            f"got {pixels.dtype} of shape {pixels.shape}; give photos before they are normalised"
        )
    return Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")

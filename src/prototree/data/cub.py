"""Caltech-UCSD Birds-200-2011 in its own layout, or any data set written in it.

The files are tables with a space between columns: `images.txt`, `classes.txt`, `image_class_labels.txt`,
`train_test_split.txt`, `bounding_boxes.txt` and, if present, `parts/parts.txt` and `parts/part_locs.txt`.
How many classes, images and parts there are is read from them.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from prototree.backbones.geometry import Box
from prototree.data.dataset import ImageData, Part, Sample
from prototree.errors import DataError
from prototree.io import MAX_TEXT_BYTES, read_regular

Value = TypeVar("Value")

_NEEDED = ("images.txt", "classes.txt", "image_class_labels.txt", "train_test_split.txt", "bounding_boxes.txt")


def is_cub(root: Path) -> bool:
    """Whether the folder has CUB's layout, complete or not."""
    return (root / "images.txt").is_file() and (root / "images").is_dir()


def read_cub(root: Path) -> ImageData:
    """Read the official split, bounding boxes and visible parts."""
    missing = [name for name in _NEEDED if not (root / name).is_file()]
    if missing:
        raise DataError(f"{root} looks like CUB-200-2011 but lacks {', '.join(missing)}; unpack the archive again")
    paths = _table(root / "images.txt", 1, lambda cells: root / "images" / cells[0])
    classes = _table(root / "classes.txt", 1, lambda cells: cells[0])
    index = {class_id: index for index, class_id in enumerate(sorted(classes))}
    labels = _table(root / "image_class_labels.txt", 1, lambda cells: index[int(cells[0])])
    in_train = _table(root / "train_test_split.txt", 1, lambda cells: _flag(cells[0]))
    boxes = _table(root / "bounding_boxes.txt", 4, lambda cells: Box.from_corner(*map(float, cells)))
    tables: tuple[Mapping[int, object], ...] = (labels, in_train, boxes)
    for name, table in zip(_NEEDED[2:], tables, strict=True):
        if absent := sorted(paths.keys() - table.keys()):
            raise DataError(f"{root / name} has no line for image {absent[0]} ({len(absent)} images are missing)")
    parts = _read_parts(root / "parts")
    splits: tuple[list[Sample], list[Sample]] = ([], [])
    for image in sorted(paths):
        splits[in_train[image]].append(Sample(paths[image], labels[image], boxes[image], tuple(parts.get(image, ()))))
    names = readable_names([classes[class_id] for class_id in sorted(classes)])
    return ImageData(root, "cub", names, tuple(splits[True]), tuple(splits[False]))


def readable_names(names: list[str]) -> tuple[str, ...]:
    """`001.Black_footed_Albatross` as `Black footed Albatross`; unchanged where that would make two the same."""
    readable = tuple(re.sub(r"^\d+\.", "", name).replace("_", " ").strip() for name in names)
    return readable if len(set(readable)) == len(names) and all(readable) else tuple(names)


def _read_parts(folder: Path) -> dict[int, list[Part]]:
    """The visible parts of each image."""
    if not (folder / "parts.txt").is_file() or not (folder / "part_locs.txt").is_file():
        return {}
    names = _table(folder / "parts.txt", 1, lambda cells: cells[0])

    def read(cells: list[str]) -> tuple[int, Part | None]:
        image, part, x, y, visible = cells
        point = Part(names[int(part)], float(x), float(y))
        if not (math.isfinite(point.x) and math.isfinite(point.y)):
            raise ValueError
        return int(image), point if _flag(visible) else None

    parts: dict[int, list[Part]] = {}
    for _, (image, part) in _lines(folder / "part_locs.txt", 5, read):
        if part is not None:
            parts.setdefault(image, []).append(part)
    return parts


def _flag(text: str) -> bool:
    return {"0": False, "1": True}[text]


def _table(file: Path, columns: int, read: Callable[[list[str]], Value]) -> dict[int, Value]:
    """The rows of a file by the id in front of each; ids are unique."""
    table: dict[int, Value] = {}
    for line, (row_id, value) in _lines(file, columns + 1, lambda cells: (int(cells[0]), read(cells[1:]))):
        if row_id in table:
            raise DataError(f"{file} line {line}: the id {row_id} occurs a second time")
        table[row_id] = value
    return table


def _lines(file: Path, columns: int, read: Callable[[list[str]], Value]) -> list[tuple[int, Value]]:
    """Line numbers and what `read` made of each line's cells; the last cell may hold spaces."""
    rows = []
    try:
        lines = read_regular(file, MAX_TEXT_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8 text ({error}); save it as UTF-8") from error
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        cells = text.split(maxsplit=columns - 1)
        try:
            if len(cells) != columns:
                raise ValueError
            rows.append((line, read([cell.strip() for cell in cells])))
        except (ValueError, KeyError, DataError) as error:
            raise DataError(
                f"{file} line {line}: expected {columns} valid columns, got {text[:80]!r}; is the file damaged?"
            ) from error
    return rows

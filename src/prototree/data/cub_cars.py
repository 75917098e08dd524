"""The data sets of the paper as published: Caltech-UCSD Birds-200-2011 and Stanford Cars.

CUB, or any data set written in its layout, is tables with a space between columns (`images.txt`, `classes.txt`, ...);
how many classes, images and parts there are is read from them. Cars comes as a development kit
(`devkit/cars_meta.mat`, `devkit/cars_train_annos.mat`, `cars_test_annos_withlabels.mat` there or beside it, images in
`cars_train/` and `cars_test/`) or as one `cars_annos.mat` with `car_ims/`.
"""

import difflib
import importlib.resources
import io
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from prototree.backbones.geometry import Box
from prototree.data.dataset import ImageData, Part, Sample
from prototree.errors import DataError
from prototree.io import MAX_TEXT_BYTES, prepared_beside, read_regular

Value = TypeVar("Value")

_TABLES = ("images.txt", "classes.txt", "image_class_labels.txt", "train_test_split.txt", "bounding_boxes.txt")
_CARS_TEST = "cars_test_annos_withlabels.mat"
_FLAG = {"0": False, "1": True}


def is_cub(root: Path) -> bool:
    """Whether the folder has CUB's layout, complete or not."""
    return (root / "images.txt").is_file() and (root / "images").is_dir()


def read_cub(root: Path) -> ImageData:
    """Read the official split, bounding boxes and visible parts."""
    if missing := [name for name in _TABLES if not (root / name).is_file()]:
        raise DataError(f"{root} looks like CUB-200-2011 but lacks {', '.join(missing)}; unpack the archive again")
    paths = _table(root / "images.txt", 1, lambda cells: root / "images" / cells[0])
    classes = dict(sorted(_table(root / "classes.txt", 1, lambda cells: cells[0]).items()))
    index = {class_id: index for index, class_id in enumerate(classes)}
    labels = _table(root / "image_class_labels.txt", 1, lambda cells: index[int(cells[0])])
    in_train = _table(root / "train_test_split.txt", 1, lambda cells: _FLAG[cells[0]])
    boxes = _table(root / "bounding_boxes.txt", 4, lambda cells: Box.from_corner(*map(float, cells)))
    for name, keys in zip(_TABLES[2:], (labels.keys(), in_train.keys(), boxes.keys()), strict=True):
        if absent := sorted(paths.keys() - keys):
            raise DataError(f"{root / name} has no line for image {absent[0]} ({len(absent)} images are missing)")
    parts = _read_parts(root / "parts")
    splits: tuple[list[Sample], list[Sample]] = ([], [])
    for image in sorted(paths):
        splits[in_train[image]].append(Sample(paths[image], labels[image], boxes[image], tuple(parts.get(image, ()))))
    return ImageData(root, "cub", readable_names([*classes.values()]), tuple(splits[True]), tuple(splits[False]))


def write_cub_subset(root: Path, out: Path, classes: Sequence[str] = ()) -> int:
    """Write some classes of CUB as a data set of their own, numbered anew, and return how many images they have.

    `classes` are names as in `classes.txt`, with or without their numbers; none are the 50 that this project measures
    on, chosen to be confusable. Images are linked, or copied where that is not possible. The official split stays.
    """
    if not is_cub(root):
        raise DataError(
            f"expected CUB-200-2011 as it was published in {root} (images.txt and images/); unpack it there"
        )
    if out.exists():
        raise DataError(f"{out} exists already; name a folder that does not")
    names = _table(root / "classes.txt", 1, lambda cells: cells[0])
    wanted = [name.strip() for name in classes or cub_50() if name.strip()]
    known = {name: key for key, name in names.items()} | {name.partition(".")[2]: key for key, name in names.items()}
    if unknown := [name for name in wanted if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see the names there"
        raise DataError(f"{root / 'classes.txt'} has no class {unknown[0]!r}; {hint}")
    chosen = {key: number for number, key in enumerate(sorted({known[name] for name in wanted}), start=1)}
    labels = _table(root / "image_class_labels.txt", 1, lambda cells: int(cells[0]))
    images = {key: number for number, key in enumerate(sorted(k for k, v in labels.items() if v in chosen), start=1)}
    paths = _table(root / "images.txt", 1, lambda cells: cells[0])
    with prepared_beside(out) as folder:
        for key in images:
            if Path(paths[key]).is_absolute() or ".." in Path(paths[key]).parts:
                raise DataError(f"{root / 'images.txt'}: expected paths below images/, got {paths[key][:80]!r}")
            _link(root / "images" / paths[key], folder / "images" / paths[key])
        (folder / "parts").mkdir()
        rows = "".join(f"{number} {chosen[labels[key]]}\n" for key, number in images.items())
        (folder / "image_class_labels.txt").write_text(rows)
        (folder / "classes.txt").write_text("".join(f"{number} {names[key]}\n" for key, number in chosen.items()))
        for name in ("images.txt", "train_test_split.txt", "bounding_boxes.txt", "parts/part_locs.txt"):
            if (root / name).is_file():
                lines = _lines(root / name, 2, lambda cells: (int(cells[0]), cells[1]))
                found = sorted((images[key], row) for _, (key, row) in lines if key in images)
                (folder / name).write_text("".join(f"{number} {row}\n" for number, row in found))
        if (root / "parts" / "parts.txt").is_file():
            shutil.copyfile(root / "parts" / "parts.txt", folder / "parts" / "parts.txt")
        folder.rename(out)
    return len(images)


def cub_50() -> list[str]:
    """List the 50 classes of CUB that this project measures on."""
    return (importlib.resources.files("prototree") / "data" / "cub_50.txt").read_text().split()


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source.resolve())
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)


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
        return int(image), point if _FLAG[visible] else None

    parts: dict[int, list[Part]] = {}
    for _, (image, part) in _lines(folder / "part_locs.txt", 5, read):
        if part is not None:
            parts.setdefault(image, []).append(part)
    return parts


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
    try:
        lines = read_regular(file, MAX_TEXT_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8 text ({error}); save it as UTF-8") from error
    rows = []
    for line, text in enumerate(lines, start=1):
        cells = [cell.strip() for cell in text.split(maxsplit=columns - 1)]
        try:
            if cells and len(cells) != columns:
                raise ValueError
            rows += [(line, read(cells))] if cells else []
        except (ValueError, KeyError, DataError) as error:
            raise DataError(
                f"{file} line {line}: expected {columns} valid columns, got {text[:80]!r}; is the file damaged?"
            ) from error
    return rows


def is_cars(root: Path) -> bool:
    """Whether the folder holds one of the two published forms of Stanford Cars."""
    return (root / "devkit" / "cars_meta.mat").is_file() or (root / "cars_annos.mat").is_file()


def read_cars(root: Path) -> ImageData:
    """Read the official split and boxes, although the paper's experiments use no annotation of Cars but the class."""
    if (root / "cars_annos.mat").is_file():
        return _read_single(root, root / "cars_annos.mat")
    devkit = root / "devkit"
    test_file = next((file for file in (devkit / _CARS_TEST, root / _CARS_TEST) if file.is_file()), None)
    if test_file is None:
        raise DataError(
            f"{root} lacks {_CARS_TEST} (looked there and in devkit/); "
            "the file cars_test_annos.mat has no labels, so it cannot take its place"
        )
    names = _matlab(devkit / "cars_meta.mat", "class_names")
    train, test = (
        _car_samples(file, _matlab(file, "annotations"), len(names), root / images, "fname")
        for file, images in ((devkit / "cars_train_annos.mat", "cars_train"), (test_file, "cars_test"))
    )
    return ImageData(root, "cars", tuple(map(str, names)), tuple(train), tuple(test))


def _read_single(root: Path, file: Path) -> ImageData:
    names, rows = _matlab(file, "class_names"), _matlab(file, "annotations")
    samples = _car_samples(file, rows, len(names), root, "relative_im_path")
    splits: tuple[list[Sample], list[Sample]] = ([], [])
    try:
        for row, sample in zip(rows, samples, strict=True):
            splits[bool(row["test"])].append(sample)
    except (KeyError, ValueError) as error:
        raise DataError(f"{file} does not say which images are for testing ({error!r}); is it damaged?") from error
    return ImageData(root, "cars", tuple(map(str, names)), tuple(splits[False]), tuple(splits[True]))


def _matlab(file: Path, key: str) -> list[Any]:
    """The values under a key of a MATLAB file."""
    from scipy.io import loadmat  # slow to import, and for Cars alone

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


def _car_samples(file: Path, rows: list[Any], n_classes: int, folder: Path, path_key: str) -> list[Sample]:
    samples = []
    for number, row in enumerate(rows, start=1):
        try:
            label = int(row["class"]) - 1
            # MATLAB counts pixels from 1 and includes the last one.
            left, top, right, bottom = (float(row[f"bbox_{edge}"]) for edge in ("x1", "y1", "x2", "y2"))
            samples.append(Sample(folder / str(row[path_key]), label, Box(left - 1.0, top - 1.0, right, bottom)))
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, DataError) as error:
            raise DataError(f"{file} annotation {number} is not usable ({error!r}); is the file damaged?") from error
        if not 0 <= label < n_classes:
            raise DataError(f"{file} annotation {number}: class {label + 1} is not in 1..{n_classes}")
    return samples

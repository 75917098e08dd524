"""Data as folders of classes, or as a table of paths and labels.

Three forms are read: `train/<class>/` beside `test/<class>/` and perhaps `val/<class>/` (or `valid`, `validation`);
one folder of class folders; and a CSV or TSV file with a header of `path`, `label` and, if wanted, `split`. Where no
split is given, a seeded share of every class becomes the test set. Photos for validation are neither trained nor tested
on: they give the feedback while editing. Where there is no `test` they are the test set, and a warning says so.
"""

import csv
import io
import logging
import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prototree.data.dataset import ImageData, Sample, check_name
from prototree.data.ignored import describe_unread, is_visible
from prototree.data.images import is_image, suffixes
from prototree.errors import ConfigError, DataError
from prototree.files import MAX_TEXT_BYTES, read_regular

logger = logging.getLogger(__name__)

TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("test", "testing")
VALIDATION_NAMES = ("val", "valid", "validation")

MANIFEST_SUFFIXES = (".csv", ".tsv")
_SHOWN = 5  # mistakes named in one message


def natural_key(name: str) -> tuple[list[tuple[int, str]], str]:
    """Sorts as people do: `class 2` before `class 10`."""
    pieces = re.split(r"(\d+)", name.casefold())
    digits = [piece.lstrip("0") if piece.isdecimal() else None for piece in pieces]
    # The longer number is the larger one; int() refuses thousands of digits.
    return [(-1, text) if own is None else (len(own), own) for text, own in zip(pieces, digits, strict=True)], name


def split_classes(labels: Sequence[str], *, test_fraction: float, seed: int) -> list[bool]:
    """Which items go to the test set: a share of each class, at least one where a class has two or more.

    A class's split depends on its own items and the seed alone, so adding a class leaves the others as they
    are.
    """
    if not 0.0 < test_fraction < 1.0:
        raise ConfigError(f"expected a test share between 0 and 1 (0.2 is usual), got {test_fraction}")
    members: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    in_test = [False] * len(labels)
    for label, indices in members.items():
        count = len(indices)
        n_test = min(max(round(test_fraction * count), 1), count - 1)
        for index in random.Random(f"{seed}/{label}").sample(indices, n_test):
            in_test[index] = True
    return in_test


def read_folder(root: Path, *, test_fraction: float = 0.2, seed: int = 0) -> ImageData:
    """A folder of class folders, or `train` and `test` folders of them."""
    train_folder, test_folder = _find(root, TRAIN_NAMES), _find(root, TEST_NAMES)
    validation_folder = _find(root, VALIDATION_NAMES)
    if train_folder is not None and (test_folder or validation_folder) is not None:
        return _read_splits(root, train_folder, test_folder, validation_folder)
    if train_folder is not None and len(_subfolders(root)) == 1:
        return read_folder(train_folder, test_fraction=test_fraction, seed=seed)
    classes = _class_images(root)
    by_class = classes.images
    paths = [path for images in by_class.values() for path in images]
    labels = [name for name, images in by_class.items() for _ in images]
    in_test = split_classes(labels, test_fraction=test_fraction, seed=seed)
    number = {name: index for index, name in enumerate(by_class)}
    pairs = [(Sample(path, number[name]), test) for path, name, test in zip(paths, labels, in_test, strict=True)]
    return ImageData(
        root,
        "folder",
        tuple(by_class),
        tuple(sample for sample, test in pairs if not test),
        tuple(sample for sample, test in pairs if test),
        ignored=classes.ignored,
    )


def _read_splits(root: Path, train_folder: Path, test_folder: Path | None, validation_folder: Path | None) -> ImageData:
    train = _class_images(train_folder)
    others = [
        _class_images(folder) if folder is not None else _Classes({}) for folder in (test_folder, validation_folder)
    ]
    for folder, found in zip((test_folder, validation_folder), others, strict=True):
        if folder is not None:
            _check_same_classes(train_folder, train.images, folder, found.images)
    names = tuple(train.images)

    def samples(found: _Classes) -> tuple[Sample, ...]:
        return tuple(Sample(path, label) for label, name in enumerate(names) for path in found.images.get(name, ()))

    test, validation = _test_and_validation(root, *map(samples, others))
    ignored = tuple(path for found in (train, *others) for path in found.ignored)
    return ImageData(root, "folder", names, samples(train), test, validation=validation, ignored=ignored)


def _check_same_classes(
    train_folder: Path, train: dict[str, list[Path]], folder: Path, images: dict[str, list[Path]]
) -> None:
    only_train = [name for name in train if name not in images]
    only_here = [name for name in images if name not in train]
    if only_train or only_here:
        raise DataError(
            f"expected the same classes in {train_folder} and {folder}; "
            f"only in the first: {_listing(only_train)}; only in the second: {_listing(only_here)}"
        )


def _test_and_validation(
    root: Path, test: tuple[Sample, ...], validation: tuple[Sample, ...]
) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    if validation and not test:
        logger.warning(
            "%s has no test photos; its %d validation photos are the test set: do not use its figures to "
            "choose settings",
            root,
            len(validation),
        )
        return validation, ()
    return test, validation


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) or "none"
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _find(root: Path, names: Iterable[str]) -> Path | None:
    folders = {folder.name.casefold(): folder for folder in _subfolders(root)}
    return next((folders[name] for name in names if name in folders), None)


def _subfolders(root: Path) -> list[Path]:
    folders = [path for path in root.iterdir() if path.is_dir() and not path.name.startswith((".", "__MACOSX"))]
    return sorted(folders, key=lambda path: natural_key(path.name))


@dataclass(frozen=True)
class _Classes:
    """Images of each class folder, in natural order, and the files that are not used."""

    images: dict[str, list[Path]]
    ignored: tuple[Path, ...] = ()


def _class_images(root: Path) -> _Classes:
    """What the class folders hold; every class has at least one image."""
    folders = _subfolders(root)
    if not folders:
        raise DataError(
            f"{root} has no class folders; expected one folder of images for each class "
            "(or train/ and test/ folders of them, or a CSV file with the columns path and label)"
        )
    for folder in folders:
        check_name(folder.name, f"a class folder in {root}")
    files = {folder.name: _files_below(folder) for folder in folders}
    images = {name: [path for path in paths if is_image(path)] for name, paths in files.items()}
    outside = [path for path in sorted(root.iterdir()) if is_visible(path) and path.is_file()]
    ignored = [path for paths in files.values() for path in paths if not is_image(path)]
    empty = [name for name, paths in images.items() if not paths]
    unread = describe_unread(path for name in empty for path in files[name])
    remedy = unread or f"add images ({' '.join(suffixes())}) or remove the folders"
    if len(empty) == len(images):
        raise DataError(f"{root} has no images in its folders ({_listing(empty)}); {remedy}")
    if empty:
        raise DataError(f"class folders with no image in {root}: {_listing(empty)}; {remedy}")
    return _Classes(images, (*outside, *ignored))


def _files_below(folder: Path) -> list[Path]:
    found: list[Path] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [path for path in (Path(parent, name) for name in files) if is_visible(path)]
    return sorted(found, key=lambda path: natural_key(str(path)))


@dataclass(frozen=True)
class _Row:
    line: int
    path: Path
    label: str
    split: str | None


def read_manifest(file: Path, *, test_fraction: float = 0.2, seed: int = 0) -> ImageData:
    """A CSV or TSV file; relative paths start at the folder it lies in."""
    rows = _read_rows(file)
    _check_rows(file, rows)
    if rows[0].split is None:
        in_test = split_classes([row.label for row in rows], test_fraction=test_fraction, seed=seed)
        parts = ["test" if test else "train" for test in in_test]
    else:
        parts = [row.split or "" for row in rows]
    names = tuple(sorted({row.label for row in rows}, key=natural_key))
    number = {name: index for index, name in enumerate(names)}
    pairs = [(part, Sample(row.path, number[row.label])) for part, row in zip(parts, rows, strict=True)]
    train, test, validation = (
        tuple(sample for part, sample in pairs if part in known)
        for known in (TRAIN_NAMES, TEST_NAMES, VALIDATION_NAMES)
    )
    test, validation = _test_and_validation(file, test, validation)
    return ImageData(file, "manifest", names, train, test, validation=validation)


def _read_rows(file: Path) -> list[_Row]:
    try:
        text = read_regular(file, MAX_TEXT_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8 text ({error}); save it as UTF-8") from error
    first = re.split(r"[\r\n]", text, maxsplit=1)[0]
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(file, first))
    try:
        rows = list(_rows_under(file, lines))
    except csv.Error as error:
        raise DataError(f"{file} line {lines.line_num}: {error}; are its quotation marks in pairs?") from error
    if not rows:
        raise DataError(f"{file} lists no images; expected one line for each under the header")
    return rows


def _rows_under(file: Path, lines: Any) -> Iterator[_Row]:
    header = [name.strip().casefold() for name in next(lines)]
    column = {name: header.index(name) for name in ("path", "label", "split") if name in header}
    if not {"path", "label"} <= column.keys():  # a quotation mark that is never closed
        raise _no_header(file, ",".join(header))
    for cells in lines:
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            raise DataError(f"{file} line {lines.line_num}: expected {len(header)} columns, got {len(cells)}")
        value = {name: cells[position].strip() for name, position in column.items()}
        split = value["split"].casefold() if "split" in value else None
        yield _Row(lines.line_num, file.parent / value["path"], value["label"], split)


def _delimiter(file: Path, header: str) -> str:
    for delimiter in (",", "\t", ";"):
        names = [name.strip().strip('"').casefold() for name in header.split(delimiter)]
        if "path" in names and "label" in names:
            return delimiter
    raise _no_header(file, header)


def _no_header(file: Path, header: str) -> DataError:
    return DataError(f"{file} line 1: expected a header with the columns path and label, got {header[:80]!r}")


def _check_rows(file: Path, rows: Sequence[_Row]) -> None:
    """One error for all mistakes, so that they can be edited in one go."""
    first_line: dict[str, int] = {}
    mistakes = []
    for row in rows:
        key = os.path.normpath(row.path)
        if not row.label:
            mistakes.append(f"line {row.line}: the label is empty")
        if row.split is not None and row.split not in TRAIN_NAMES + TEST_NAMES + VALIDATION_NAMES:
            mistakes.append(f"line {row.line}: unknown split {row.split!r}; expected train, test or val")
        if key in first_line:
            mistakes.append(f"line {row.line}: {row.path} is already on line {first_line[key]}")
        elif not os.path.isfile(row.path):  # unlike Path's own, also for a name that is too long
            mistakes.append(f"line {row.line}: {str(row.path)[:300]} does not exist, or is no file")
        first_line.setdefault(key, row.line)
    if mistakes:
        more = f"\n… and {len(mistakes) - _SHOWN} more" if len(mistakes) > _SHOWN else ""
        raise DataError(
            f"{file} has {len(mistakes)} {'mistake' if len(mistakes) == 1 else 'mistakes'}:\n"
            + "\n".join(mistakes[:_SHOWN])
            + more
        )

"""Data as folders of classes, or as a CSV manifest of paths and labels.

Three forms are read: `train/<class>/` beside `test/<class>/` and perhaps `val/<class>/` (or `valid`, `validation`);
one folder of class folders; and a CSV or TSV file with a header of `path`, `label` and, if wanted, `split`. Where no
split is given, a seeded fraction of every class becomes the test set. Validation images are neither trained nor tested
on: edits are judged on them. Where there is no `test` they are the test set, and a warning says so.
"""

import csv
import io
import logging
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prototree.data.dataset import ImageData, Sample, check_name
from prototree.data.images import HEIC_REMEDY, HEIC_SUFFIXES, is_image, suffixes
from prototree.errors import ConfigError, DataError
from prototree.io import MAX_TEXT_BYTES, read_regular

logger = logging.getLogger(__name__)

TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("test", "testing")
VALIDATION_NAMES = ("val", "valid", "validation")
SPLIT_NAMES = TRAIN_NAMES + TEST_NAMES + VALIDATION_NAMES
MANIFEST_SUFFIXES = (".csv", ".tsv")

_SHOWN = 5  # mistakes named in one message
_SYSTEM_FILES = ("thumbs.db", "desktop.ini")
# Of images that are not read everywhere, or nowhere.
_IMAGE_SUFFIXES = (
    *(".avif", *HEIC_SUFFIXES, ".jp2", ".j2k", ".jpx", ".jxl", ".psd", ".psb", ".xcf", ".svg", ".ico", ".tga", ".pcx"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".exr", ".hdr", ".dcm"),
    *(".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".sr2", ".srw", ".raf", ".orf", ".rw2", ".pef"),  # of cameras
)


def natural_key(name: str) -> tuple[list[tuple[int, str]], str]:
    """Sort key that puts `class 2` before `class 10`."""
    pieces = re.split(r"(\d+)", name.casefold())
    # The longer number is the larger one; int() refuses thousands of digits.
    digits = [piece.lstrip("0") if piece.isdecimal() else None for piece in pieces]
    return [(-1, text) if n is None else (len(n), n) for text, n in zip(pieces, digits, strict=True)], name


def split_classes(labels: Sequence[str], *, test_fraction: float, seed: int) -> list[bool]:
    """Stratified split: which items go to the test set, at least one where a class has two or more.

    A class's split depends on its own items and the seed alone, so adding a class leaves the others as they are.
    """
    if not 0.0 < test_fraction < 1.0:
        raise ConfigError(f"expected a test fraction between 0 and 1 (0.2 is usual), got {test_fraction}")
    members: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    in_test = [False] * len(labels)
    for label, indices in members.items():
        n_test = min(max(round(test_fraction * len(indices)), 1), len(indices) - 1)
        for index in random.Random(f"{seed}/{label}").sample(indices, n_test):
            in_test[index] = True
    return in_test


def read_folder(root: Path, *, test_fraction: float = 0.2, seed: int = 0) -> ImageData:
    """Read a folder of class folders, or `train` and `test` folders of them."""
    folders = {folder.name.casefold(): folder for folder in _subfolders(root)}
    train, test, validation = (
        next((folders[name] for name in names if name in folders), None)
        for names in (TRAIN_NAMES, TEST_NAMES, VALIDATION_NAMES)
    )
    if train is not None and (test or validation) is not None:
        return _read_splits(root, train, test, validation)
    if train is not None and len(folders) == 1:
        return read_folder(train, test_fraction=test_fraction, seed=seed)
    images, ignored = _class_images(root)
    labels = [name for name, paths in images.items() for _ in paths]
    in_test = split_classes(labels, test_fraction=test_fraction, seed=seed)
    samples = [Sample(path, label) for label, paths in enumerate(images.values()) for path in paths]
    splits = [
        tuple(sample for sample, is_test in zip(samples, in_test, strict=True) if is_test is wanted)
        for wanted in (False, True)
    ]
    return ImageData(root, "folder", tuple(images), splits[0], splits[1], ignored=tuple(ignored))


def _read_splits(root: Path, train: Path, test: Path | None, validation: Path | None) -> ImageData:
    names: tuple[str, ...] = ()
    splits, ignored = list[tuple[Sample, ...]](), list[Path]()
    for folder in (train, test, validation):
        images, others = _class_images(folder) if folder is not None else ({}, [])
        names = names or tuple(images)
        if folder is not None and images.keys() != set(names):
            only_train = [name for name in names if name not in images]
            only_here = [name for name in images if name not in names]
            raise DataError(
                f"expected the same classes in {train} and {folder}; "
                f"only in the first: {_listing(only_train)}; only in the second: {_listing(only_here)}"
            )
        splits.append(tuple(Sample(path, label) for label, name in enumerate(names) for path in images.get(name, ())))
        ignored += others
    return _with_splits(root, "folder", names, splits, tuple(ignored))


def _with_splits(
    root: Path, kind: Any, names: tuple[str, ...], splits: list[tuple[Sample, ...]], ignored: tuple[Path, ...] = ()
) -> ImageData:
    """The data of three splits; validation images stand in for test images where there are none."""
    train, test, validation = splits
    if validation and not test:
        logger.warning(
            f"{root} has no test images; its {len(validation)} validation images are the test set: do not use its "
            "metrics to choose settings"
        )
        test, validation = validation, ()
    return ImageData(root, kind, names, train, test, validation_split=validation, ignored=ignored)


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) or "none"
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _subfolders(root: Path) -> list[Path]:
    folders = [path for path in root.iterdir() if path.is_dir() and not path.name.startswith((".", "__MACOSX"))]
    return sorted(folders, key=lambda path: natural_key(path.name))


def _class_images(root: Path) -> tuple[dict[str, list[Path]], list[Path]]:
    """The images of each class folder in natural order, at least one each, and the files that are not used."""
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
    if empty := [name for name, paths in images.items() if not paths]:
        unsupported = describe_unsupported(path for name in empty for path in files[name])
        remedy = unsupported or f"add images ({' '.join(suffixes())}) or remove the folders"
        raise DataError(f"class folders with no image in {root}: {_listing(empty)}; {remedy}")
    ignored = [path for path in sorted(root.iterdir()) if _is_visible(path) and path.is_file()]
    return images, ignored + [path for paths in files.values() for path in paths if not is_image(path)]


def _files_below(folder: Path) -> list[Path]:
    paths: list[Path] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [path for path in (Path(parent, name) for name in files) if _is_visible(path)]
    return sorted(paths, key=lambda path: natural_key(str(path)))


def _is_visible(path: Path) -> bool:
    """Whether a person put the file there, rather than the operating system."""
    return not path.name.startswith(".") and path.name.casefold() not in _SYSTEM_FILES


def unsupported_images(paths: Iterable[Path]) -> list[Path]:
    """Those that are images in a format that is not read here."""
    return [path for path in paths if path.suffix.lower() in _IMAGE_SUFFIXES and not is_image(path)]


def describe_unsupported(paths: Iterable[Path]) -> str:
    """How many images of which formats are not read, and what to do; empty if there are none."""
    unsupported = unsupported_images(paths)
    if not unsupported:
        return ""
    are = "1 image is" if len(unsupported) == 1 else f"{len(unsupported):,} images are"
    remedy = f"convert to JPEG (for example: magick mogrify -format jpg *{unsupported[0].suffix})"
    if any(path.suffix.lower() in HEIC_SUFFIXES for path in unsupported):
        remedy = f"{HEIC_REMEDY}, or {remedy}"
    return f"{are} in a format that is not read ({_count_suffixes(unsupported)}); {remedy}"


def describe_ignored(paths: Sequence[Path]) -> str:
    """The rest: images that lie in no class folder, and files that are no images; empty if there are none."""
    outside = sum(map(is_image, paths))
    others = [path for path in paths if path.suffix.lower() not in _IMAGE_SUFFIXES and not is_image(path)]
    text = f"{outside:,} image{'s' if outside > 1 else ''} in no class folder" if outside else ""
    return ", ".join(filter(None, [text, _count_suffixes(others)]))


def _count_suffixes(paths: Iterable[Path]) -> str:
    counts = Counter(path.suffix or "without a suffix" for path in paths)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common())


class _Row(NamedTuple):
    line: int
    path: Path
    label: str
    split: str | None


def read_manifest(file: Path, *, test_fraction: float = 0.2, seed: int = 0) -> ImageData:
    """Read a CSV or TSV file; relative paths start at the folder it lies in."""
    rows = _read_rows(file)
    _check_rows(file, rows)
    if rows[0].split is None:
        in_test = split_classes([row.label for row in rows], test_fraction=test_fraction, seed=seed)
        rows = [row._replace(split="test" if test else "train") for row, test in zip(rows, in_test, strict=True)]
    names = tuple(sorted({row.label for row in rows}, key=natural_key))
    index = {name: index for index, name in enumerate(names)}
    splits = [
        tuple(Sample(row.path, index[row.label]) for row in rows if row.split in words)
        for words in (TRAIN_NAMES, TEST_NAMES, VALIDATION_NAMES)
    ]
    return _with_splits(file, "manifest", names, splits)


def _read_rows(file: Path) -> list[_Row]:
    try:
        text = read_regular(file, MAX_TEXT_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8 text ({error}); save it as UTF-8") from error
    header = re.split(r"[\r\n]", text, maxsplit=1)[0]
    names = {delimiter: _header_names(header.replace('"', "").split(delimiter)) for delimiter in (",", "\t", ";")}
    delimiter = next((key for key, value in names.items() if {"path", "label"} <= set(value)), ",")
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        rows = list(_rows_under_header(file, lines))
    except csv.Error as error:
        raise DataError(f"{file} line {lines.line_num}: {error}; are its quotation marks in pairs?") from error
    if not rows:
        raise DataError(f"{file} lists no images; expected one line for each under the header")
    return rows


def _header_names(cells: Iterable[str]) -> list[str]:
    return [cell.strip().casefold() for cell in cells]


def _rows_under_header(file: Path, lines: Any) -> Iterator[_Row]:
    header = _header_names(next(lines, ()))
    column = {name: header.index(name) for name in ("path", "label", "split") if name in header}
    if not {"path", "label"} <= column.keys():
        found = ",".join(header)[:80]
        raise DataError(f"{file} line 1: expected a header with the columns path and label, got {found!r}")
    for cells in lines:
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            raise DataError(f"{file} line {lines.line_num}: expected {len(header)} columns, got {len(cells)}")
        value = {name: cells[position].strip() for name, position in column.items()}
        split = value["split"].casefold() if "split" in value else None
        yield _Row(lines.line_num, file.parent / value["path"], value["label"], split)


def _check_rows(file: Path, rows: Sequence[_Row]) -> None:
    """Raise one error for all mistakes, so that they can be fixed in one go."""
    first_line: dict[str, int] = {}
    mistakes = []
    for row in rows:
        key = os.path.normpath(row.path)
        if not row.label:
            mistakes.append(f"line {row.line}: the label is empty")
        if row.split is not None and row.split not in SPLIT_NAMES:
            mistakes.append(f"line {row.line}: unknown split {row.split!r}; expected train, test or val")
        if key in first_line:
            mistakes.append(f"line {row.line}: {row.path} is already on line {first_line[key]}")
        elif not os.path.isfile(row.path):  # unlike Path's own, also for a name that is too long
            mistakes.append(f"line {row.line}: {str(row.path)[:300]} does not exist, or is no file")
        first_line.setdefault(key, row.line)
    if mistakes:
        more = [f"… and {len(mistakes) - _SHOWN} more"] if len(mistakes) > _SHOWN else []
        raise DataError("\n".join([f"{file} has mistakes ({len(mistakes)}):", *mistakes[:_SHOWN], *more]))

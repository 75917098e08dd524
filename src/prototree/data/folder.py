"""Data as folders of classes, or as a CSV manifest of paths and labels.

Three forms are read: `train/<class>/` beside `test/<class>/` and perhaps `val/<class>/` (or `valid`, `validation`);
one folder of class folders; and a CSV or TSV file with a header of `path`, `label` and, if wanted, `split` and `group`.
Where no split is given, a seeded fraction of every class becomes the test set; images of one group stay together.
Validation images are neither trained nor tested on: edits are judged on them. Where there is no `test` they are the
test set, and a warning says so.
"""

import csv
import io
import logging
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prototree.data.dataset import ImageData, Kind, Sample, check_name, keep_together
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


def split_classes(
    labels: Sequence[str], groups: Sequence[str] | None = None, *, test_fraction: float, seed: int
) -> list[bool]:
    """Stratified split: which items go to the test set, at least one where a class has two or more.

    A class's split depends on its own items and the seed alone, so adding a class leaves the others as they are. Items
    of one group stay together, with the class of the first.
    """
    if not 0.0 < test_fraction < 1.0:
        raise ConfigError(f"expected a test fraction between 0 and 1 (0.2 is usual), got {test_fraction}")
    units: dict[str, list[list[int]]] = {}
    for unit in keep_together(range(len(labels)), lambda index: groups[index] if groups else ""):
        units.setdefault(labels[unit[0]], []).append(unit)
    in_test = [False] * len(labels)
    for label, members in units.items():
        rng, n_items = random.Random(f"{seed}/{label}"), sum(map(len, members))
        n_test = min(max(round(test_fraction * n_items), 1), n_items - 1)
        is_grouped = len(members) < n_items
        for unit in rng.sample(members, len(members) - 1 if is_grouped else n_test):
            for index in unit:
                in_test[index] = True
            n_test -= len(unit)
            if is_grouped and n_test <= 0:
                break
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
    splits: tuple[list[Sample], ...] = ([], [], [])
    samples = (Sample(path, label) for label, paths in enumerate(images.values()) for path in paths)
    for sample, is_test in zip(samples, in_test, strict=True):
        splits[is_test].append(sample)
    return _with_splits(root, "folder", tuple(images), splits, ignored)


def _read_splits(root: Path, train: Path, test: Path | None, validation: Path | None) -> ImageData:
    splits: tuple[list[Sample], ...] = ([], [], [])
    names, ignored = tuple[str, ...](), list[Path]()
    for folder, samples in zip((train, test, validation), splits, strict=True):
        if folder is None:
            continue
        images, others = _class_images(folder)
        names = names or tuple(images)
        if images.keys() != set(names):
            raise DataError(
                f"expected the same classes in {train} and {folder}; "
                f"only in the first: {_listing([name for name in names if name not in images])}; "
                f"only in the second: {_listing([name for name in images if name not in names])}"
            )
        samples += [Sample(path, label) for label, name in enumerate(names) for path in images[name]]
        ignored += others
    return _with_splits(root, "folder", names, splits, ignored)


def _with_splits(
    root: Path, kind: Kind, names: tuple[str, ...], splits: Iterable[Iterable[Sample]], ignored: Iterable[Path] = ()
) -> ImageData:
    """The data of three splits; validation images stand in for test images where there are none."""
    train, test, validation = map(tuple, splits)
    if validation and not test:
        logger.warning(
            f"{root} has no test images; its {len(validation)} validation images are the test set: do not use its "
            "metrics to choose settings"
        )
        test, validation = validation, ()
    return ImageData(root, kind, names, train, test, validation_split=validation, ignored=tuple(ignored))


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
    ignored = [path for path in sorted(root.iterdir()) if _is_visible(path.name) and path.is_file()]
    return images, ignored + [path for paths in files.values() for path in paths if not is_image(path)]


def _files_below(folder: Path) -> list[Path]:
    paths: list[Path] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(parent, name) for name in files if _is_visible(name)]
    return sorted(paths, key=lambda path: natural_key(str(path)))


def _is_visible(name: str) -> bool:
    """Whether a person put the file there, rather than the operating system."""
    return not name.startswith(".") and name.casefold() not in ("thumbs.db", "desktop.ini")


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
    """Count the images that lie in no class folder, and the files that are no images; empty if there are none."""
    outside = sum(map(is_image, paths))
    others = [path for path in paths if path.suffix.lower() not in _IMAGE_SUFFIXES and not is_image(path)]
    text = f"{outside:,} image{'s' if outside > 1 else ''} in no class folder" if outside else ""
    return ", ".join(filter(None, [text, _count_suffixes(others)]))


def _count_suffixes(paths: Iterable[Path]) -> str:
    counts = Counter(path.suffix or "without a suffix" for path in paths)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common())


def read_manifest(file: Path, *, test_fraction: float = 0.2, seed: int = 0) -> ImageData:
    """Read a CSV or TSV file; relative paths start at the folder it lies in."""
    rows = _read_rows(file, read_text(file))
    if "split" not in rows[0]:
        labels, groups = [row["label"] for row in rows], [row.get("group", "") for row in rows]
        in_test = split_classes(labels, groups, test_fraction=test_fraction, seed=seed)
        rows = [{**row, "split": "test" if test else "train"} for row, test in zip(rows, in_test, strict=True)]
    names = tuple(sorted({row["label"] for row in rows}, key=natural_key))
    index = {name: index for index, name in enumerate(names)}
    splits = [
        [
            Sample(file.parent / row["path"], index[row["label"]], group=row.get("group", ""))
            for row in rows
            if row["split"] in words
        ]
        for words in (TRAIN_NAMES, TEST_NAMES, VALIDATION_NAMES)
    ]
    if torn := sorted(({s.group for s in splits[0]} & {s.group for s in splits[1] + splits[2]}) - {""}):
        logger.warning(
            f"{file}: {len(torn)} groups are in training and in test ({_listing(torn)}), so that metrics may be too "
            "good; correct the column split, or leave it out to have the groups kept together"
        )
    return _with_splits(file, "manifest", names, splits)


def read_text(file: Path) -> str:
    """Read a list as UTF-8 text."""
    try:
        return read_regular(file, MAX_TEXT_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8 text ({error}); save it as UTF-8") from error


def _read_rows(file: Path, text: str) -> list[dict[str, str]]:
    """The values of the columns path, label and perhaps split and group of each line."""
    first = re.split(r"[\r\n]", text, maxsplit=1)[0].replace('"', "").casefold()
    cells = {delimiter: {cell.strip() for cell in first.split(delimiter)} for delimiter in (",", "\t", ";")}
    delimiter = next((key for key, names in cells.items() if {"path", "label"} <= names), ",")
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows: dict[int, dict[str, str]] = {}
    try:
        header = [cell.strip().casefold() for cell in next(lines, ())]
        if not {"path", "label"} <= set(header):
            names = ",".join(header)[:80]
            raise DataError(f"{file} line 1: expected a header with the columns path and label, got {names!r}")
        for values in lines:
            if any(value.strip() for value in values):
                if len(values) != len(header):
                    raise DataError(f"{file} line {lines.line_num}: expected {len(header)} columns, got {len(values)}")
                row = dict(zip(reversed(header), map(str.strip, reversed(values)), strict=True))  # the first of a name
                rows[lines.line_num] = {**row, "split": row["split"].casefold()} if "split" in row else row
    except csv.Error as error:
        raise DataError(f"{file} line {lines.line_num}: {error}; are its quotation marks in pairs?") from error
    if not rows:
        raise DataError(f"{file} lists no images; expected one line for each under the header")
    _check_rows(file, rows)
    return list(rows.values())


def _check_rows(file: Path, rows: Mapping[int, Mapping[str, str]]) -> None:
    """Raise one error for all mistakes, so that they can be fixed in one go."""
    first_line: dict[str, int] = {}
    mistakes = []
    for line, row in rows.items():
        path = file.parent / row["path"]
        earlier = first_line.setdefault(os.path.normpath(path), line)
        if not row["label"]:
            mistakes.append(f"line {line}: the label is empty")
        if row.get("split", "test") not in SPLIT_NAMES:
            mistakes.append(f"line {line}: unknown split {row['split']!r}; expected train, test or val")
        if earlier != line:
            mistakes.append(f"line {line}: {path} is already on line {earlier}")
        elif not os.path.isfile(path):  # unlike Path's own, also for a name that is too long
            mistakes.append(f"line {line}: {str(path)[:300]} does not exist, or is no file")
    if mistakes:
        more = [f"… and {len(mistakes) - _SHOWN} more"] if len(mistakes) > _SHOWN else []
        raise DataError("\n".join([f"{file} has mistakes ({len(mistakes)}):", *mistakes[:_SHOWN], *more]))

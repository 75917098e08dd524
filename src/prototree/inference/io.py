"""Inputs and outputs of predict: images as people name them, and predictions as CSV, JSON or JSON lines. No torch here.

Only lists are opened here, and a missing image is not an error: whoever reads it reports it.
"""

import csv
import glob
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prototree.data.folder import MANIFEST_SUFFIXES, natural_key, unsupported_images
from prototree.data.images import is_image
from prototree.errors import ConfigError, DataError
from prototree.io import MAX_TEXT_BYTES, open_regular, replacing

PATH_COLUMNS = ("path", "file", "filename", "image")
STANDARD_INPUT = "-"
_PATH_WORDS = f"{', '.join(PATH_COLUMNS[:-1])} or {PATH_COLUMNS[-1]}"

Row = dict[str, Any]


@dataclass(frozen=True)
class ListedImage:
    """An image by its path, and its class where a list says it."""

    path: Path
    label: str | None = None


def list_images(places: Iterable[str | Path], names: Iterable[str] = ()) -> Iterator[ListedImage]:
    """List the images that some places name, in their order; `-` stands for `names`, one per line.

    A folder is searched to the bottom. A pattern such as `images/*.jpg` is expanded here if the shell has not done so.
    """
    for place in map(str, places):
        if place == STANDARD_INPUT:
            yield from (ListedImage(Path(name)) for name in (line.rstrip("\r\n") for line in names) if name)
        elif os.path.isdir(place):
            yield from map(ListedImage, _walk(Path(place)))
        elif place.lower().endswith(MANIFEST_SUFFIXES):
            yield from _read_table(Path(place))
        elif is_pattern(place):
            yield from _expand(place)
        else:
            yield ListedImage(Path(place))


def is_pattern(place: str) -> bool:
    """Tell a glob pattern from the name of a file that exists."""
    return glob.has_magic(place) and not os.path.exists(place)


def names_one_image(place: str | Path) -> bool:
    """Tell the path of one image from a folder, a list or a pattern."""
    text = str(place)
    return not (os.path.isdir(text) or text.lower().endswith(MANIFEST_SUFFIXES) or is_pattern(text))


def is_frame(images: object) -> bool:
    """Tell a table such as a pandas DataFrame, without importing pandas."""
    return hasattr(images, "columns") and hasattr(images, "itertuples")


def list_frame(frame: Any) -> Iterator[ListedImage]:
    """List the rows of a DataFrame, which has the columns of a CSV list; relative paths start here."""
    columns = {str(name).strip().casefold(): name for name in frame.columns}
    path = next((columns[name] for name in PATH_COLUMNS if name in columns), None)
    if path is None:
        names = ", ".join(map(str, frame.columns))
        raise DataError(f"expected a table with a column {_PATH_WORDS} (and perhaps label), got the columns {names}")
    labels = frame[columns["label"]] if "label" in columns else [None] * len(frame)
    for name, label in zip(frame[path], labels, strict=True):
        yield ListedImage(Path(str(name)).expanduser(), None if label is None or label != label else str(label))


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=natural_key)
        paths = [Path(parent, name) for name in sorted(files, key=natural_key)]
        unread = set(unsupported_images(paths))  # each becomes a row that says why
        yield from (path for path in paths if is_image(path) or path in unread)


def _expand(pattern: str) -> Iterator[ListedImage]:
    matches = sorted(glob.glob(pattern, recursive=True), key=natural_key)
    if not matches:
        raise DataError(f"no file matches {pattern}; expected at least one image")
    for match in map(Path, matches):
        if match.is_dir():
            yield from map(ListedImage, _walk(match))
        elif is_image(match):
            yield ListedImage(match)


def _read_table(file: Path) -> Iterator[ListedImage]:
    """List the rows of a CSV or TSV file; relative paths start at the folder it lies in."""
    try:
        with io.TextIOWrapper(open_regular(file, MAX_TEXT_BYTES), encoding="utf-8-sig", newline="") as lines:
            delimiter, columns = _header(file, lines.readline())
            path = next(column for column in PATH_COLUMNS if column in columns)
            for row in csv.DictReader(lines, fieldnames=columns, delimiter=delimiter):
                if name := (row[path] or "").strip():
                    yield ListedImage(file.parent / name, (row.get("label") or "").strip() or None)
    except UnicodeDecodeError as error:
        raise DataError(f"{file} cannot be read as a list of images: expected UTF-8; save it as CSV UTF-8") from error
    except (OSError, csv.Error) as error:
        raise DataError(f"{file} cannot be read as a list of images: {error}") from error


def _header(file: Path, line: str) -> tuple[str, list[str]]:
    for delimiter in (",", "\t", ";"):
        names = [name.strip().casefold() for name in next(csv.reader([line], delimiter=delimiter), [])]
        if any(name in names for name in PATH_COLUMNS):
            return delimiter, names
    raise DataError(
        f"{file} line 1: expected a header with a column {_PATH_WORDS} (and perhaps label), got {line.strip()[:80]!r}"
    )


@contextmanager
def prediction_file(path: Path, *, top: int) -> Iterator[Callable[[Row], None]]:
    """Open a file for predictions, whose ending names its format; gives a function that adds a `Prediction.to_json()`.

    Until the last row is in, the rows stand in a file that ends in `.partial`: what was done is not lost, and half a
    table never passes for a whole one.
    """
    kind = path.suffix.lower()
    if kind not in (".csv", ".json", ".jsonl"):
        raise ConfigError(f"expected a file for the predictions that ends in .csv, .json or .jsonl, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    n_rows = 0
    with replacing(path, path.with_name(f"{path.name}.partial")) as file:

        def add(row: Row) -> None:
            nonlocal n_rows
            text = _csv_lines(row, top, with_header=not n_rows) if kind == ".csv" else _json_line(row)
            if kind == ".json":
                text = ("," if n_rows else "[") + "\n" + text.rstrip()
            file.write(text.encode("utf-8", errors="replace"))
            n_rows += 1

        yield add
        if kind == ".json":
            file.write(b"\n]\n" if n_rows else b"[]\n")


def _csv_lines(row: Row, top: int, *, with_header: bool) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    plain = {key: value for key, value in row.items() if key not in ("steps", "class_probs")}
    plain["steps"] = ", ".join(step["text"] for step in row["steps"])
    if with_header:
        writer.writerow([*plain, *(f"{name}_{n}" for n in range(1, top + 1) for name in ("class", "probability"))])
    cells = [cell for pair in row["class_probs"].items() for cell in pair]
    writer.writerow([*plain.values(), *cells, *[""] * (2 * top - len(cells))])
    return text.getvalue()


def _json_line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"

"""Photos as people name them: files, folders, patterns, lists in CSV files, and names that another program writes.

Only lists are opened here, and a missing file is not an error: whoever reads it will report it. No torch here.
"""

import csv
import glob
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prototree.data.folder import MANIFEST_SUFFIXES, natural_key
from prototree.data.ignored import unread_images
from prototree.data.images import is_image
from prototree.errors import DataError
from prototree.files import MAX_TEXT_BYTES, open_regular

PATH_COLUMNS = ("path", "file", "filename", "image")
STANDARD_INPUT = "-"
_PATH_WORDS = f"{', '.join(PATH_COLUMNS[:-1])} or {PATH_COLUMNS[-1]}"


@dataclass(frozen=True)
class Listed:
    """A photo by its name, and its class where a list says it."""

    path: Path
    label: str | None = None


def listed_photos(places: Iterable[str | Path], names: Iterable[str] = ()) -> Iterator[Listed]:
    """The photos that some places name, in their order; `-` stands for `names`, one per line.

    A folder is searched to the bottom. A pattern such as `photos/*.jpg` is expanded here if the shell has not done so.
    """
    for place in map(str, places):
        if place == STANDARD_INPUT:
            yield from (Listed(Path(name)) for name in (line.rstrip("\r\n") for line in names) if name)
        elif os.path.isdir(place):
            yield from map(Listed, _below(Path(place)))
        elif place.lower().endswith(MANIFEST_SUFFIXES):
            yield from _in_table(Path(place))
        elif glob.has_magic(place) and not os.path.exists(place):
            yield from _matching(place)
        else:
            yield Listed(Path(place))


def is_frame(photos: object) -> bool:
    """Whether it is a table such as a pandas DataFrame."""
    return hasattr(photos, "columns") and hasattr(photos, "itertuples")


def listed_in_frame(frame: Any) -> Iterator[Listed]:
    """The rows of a DataFrame, which has the columns of a CSV list; relative paths start here."""
    columns = {str(name).strip().casefold(): name for name in frame.columns}
    path = next((columns[name] for name in PATH_COLUMNS if name in columns), None)
    if path is None:
        found = ", ".join(map(str, frame.columns))
        raise DataError(f"expected a table with a column {_PATH_WORDS} (and perhaps label), got the columns {found}")
    labels = frame[columns["label"]] if "label" in columns else [None] * len(frame)
    for name, label in zip(frame[path], labels, strict=True):
        yield Listed(Path(str(name)).expanduser(), None if label is None or label != label else str(label))


def _below(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=natural_key)
        paths = [Path(parent, name) for name in sorted(files, key=natural_key)]
        unread = set(unread_images(paths))  # each becomes a row that says why
        yield from (path for path in paths if is_image(path) or path in unread)


def _matching(pattern: str) -> Iterator[Listed]:
    found = sorted(glob.glob(pattern, recursive=True), key=natural_key)
    if not found:
        raise DataError(f"no file matches {pattern}; expected at least one photo")
    for place in found:
        if os.path.isdir(place):
            yield from map(Listed, _below(Path(place)))
        elif is_image(Path(place)):
            yield Listed(Path(place))


def _in_table(file: Path) -> Iterator[Listed]:
    """The rows of a CSV or TSV file; relative paths start at the folder it lies in."""
    try:
        with io.TextIOWrapper(open_regular(file, MAX_TEXT_BYTES), encoding="utf-8-sig", newline="") as lines:
            first = lines.readline()
            delimiter, columns = _header(file, first)
            path, label = next(c for c in PATH_COLUMNS if c in columns), "label"
            reader = csv.DictReader(lines, fieldnames=columns, delimiter=delimiter)
            for row in reader:
                if name := (row[path] or "").strip():
                    truth = (row.get(label) or "").strip()
                    yield Listed(file.parent / name, truth or None)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} cannot be read as a list of photos: expected text in UTF-8, got another encoding; save it as "
            "CSV UTF-8"
        ) from error
    except (OSError, csv.Error) as error:
        raise DataError(f"{file} cannot be read as a list of photos: {error}") from error


def _header(file: Path, line: str) -> tuple[str, list[str]]:
    for delimiter in (",", "\t", ";"):
        names = [name.strip().casefold() for name in next(csv.reader([line], delimiter=delimiter), [])]
        if any(name in names for name in PATH_COLUMNS):
            return delimiter, names
    raise DataError(
        f"{file} line 1: expected a header with a column {_PATH_WORDS} (and perhaps label), got {line.strip()[:80]!r}"
    )

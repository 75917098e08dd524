"""Predictions as a table that grows row by row: CSV, JSON, or JSON lines."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from prototree.errors import ConfigError
from prototree.files import replacing

if TYPE_CHECKING:
    from prototree.inference.predict import Prediction

SUFFIXES = (".csv", ".json", ".jsonl")

Add = Callable[["Prediction"], None]


@contextmanager
def prediction_file(
    path: Path, *, top: int, with_truth: bool = False, notes: Mapping[int, str] | None = None
) -> Iterator[Add]:
    """A function that adds a prediction to a file; its ending says how it is written.

    Until the last one is in, the rows stand in a file that ends in `.partial`: what was done is not lost, and no half
    table passes for a whole one.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"expected a file for the predictions that ends in .csv, .json or .jsonl, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write = {".csv": _write_csv, ".json": _write_json, ".jsonl": _write_lines}[path.suffix.lower()]
    with replacing(path, path.with_name(f"{path.name}.partial")) as file, write(file, top) as add:
        yield lambda one: add(prediction_row(one, with_truth=with_truth, notes=notes))


def prediction_row(
    one: "Prediction", *, with_truth: bool = False, notes: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """A prediction as plain data."""
    answer = one.answer
    return {
        "file": one.name,
        "answer": one.said,
        "guess": answer.label if answer is not None else "",
        "confidence": round(answer.confidence, 4) if answer is not None and answer.confidence is not None else None,
        "reason": answer.reason if answer is not None else "",
        "path": answer.path_words(notes) if answer is not None else "",
        "problem": one.problem,
        **({"label": one.truth} if with_truth else {}),
        "top": [{"class": name, "probability": round(p, 4)} for name, p in one.top],
    }


@contextmanager
def _write_csv(file: IO[bytes], top: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    text, started = io.StringIO(), False
    writer = csv.writer(text, lineterminator="\n")

    def put(cells: list[Any]) -> None:
        writer.writerow(cells)
        file.write(text.getvalue().encode("utf-8", errors="replace"))
        text.seek(0)
        text.truncate()

    def add(row: dict[str, Any]) -> None:
        nonlocal started
        plain = {key: value for key, value in row.items() if key != "top"}
        if not started:
            ranks = range(1, top + 1)
            put([*plain, *(name for n in ranks for name in (f"class_{n}", f"probability_{n}"))])
            started = True
        cells = [cell for one in row["top"] for cell in one.values()]
        put([*plain.values(), *cells, *[""] * (2 * top - len(cells))])

    yield add


@contextmanager
def _write_json(file: IO[bytes], top: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    before = b"["

    def add(row: dict[str, Any]) -> None:
        nonlocal before
        file.write(before + b"\n" + _encoded(row))
        before = b","

    yield add
    file.write(b"\n]\n" if before == b"," else b"[]\n")


@contextmanager
def _write_lines(file: IO[bytes], top: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    def add(row: dict[str, Any]) -> None:
        file.write(_encoded(row) + b"\n")

    yield add


def _encoded(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8", errors="replace")

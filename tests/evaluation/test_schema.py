"""Figures that others send: what is odd in them is one clear error, and what is older is read."""

import copy
from pathlib import Path
from typing import Any

import pytest

from prototree.errors import CheckpointError
from prototree.evaluation.schema import METRICS, read_errors, read_metrics
from prototree.files import write_json

LENGTHS = {"mean": 2.0, "std": 0.0, "min": 2, "max": 2}
STAGE = {
    "n_images": 4,
    "accuracy": {"soft": 0.5, "max_path": 0.5, "greedy": 0.5},
    "path_length": {"max_path": LENGTHS, "greedy": LENGTHS},
    "n_prototypes": 3,
    "class_accuracy": [1.0, None],
    "confusion": [[0, 0, 2], [0, 1, 2]],
}
METRICS_CONTENT = {
    "version": 2,
    "data": {"kind": "folder", "train": 8, "test": 4},
    "classes": ["a", "b"],
    "stages": {"projected": STAGE},
    "classifier": 0.5,
    "parts": {"tree": "x", "prototypes": [{"prototype": 0, "purity": {}, "hiding": {}}]},
}
PLACES = [
    ("stages",),
    ("stages", "projected"),
    ("stages", "projected", "n_images"),
    ("stages", "projected", "accuracy"),
    ("stages", "projected", "accuracy", "greedy"),
    ("stages", "projected", "path_length", "greedy", "mean"),
    ("stages", "projected", "class_accuracy"),
    ("stages", "projected", "class_accuracy", 0),
    ("stages", "projected", "confusion"),
    ("stages", "projected", "confusion", 0),
    ("stages", "projected", "confusion", 0, 1),
    ("data",),
    ("data", "train"),
    ("classes",),
    ("classes", 0),
    ("classifier",),
    ("parts",),
    ("parts", "prototypes"),
    ("parts", "prototypes", 0),
    ("parts", "prototypes", 0, "hiding"),
]


def changed(content: Any, place: tuple[str | int, ...], value: Any) -> Any:
    content = copy.deepcopy(content)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return content


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == {}
    write_json(tmp_path / METRICS, METRICS_CONTENT)
    assert read_metrics(tmp_path) == METRICS_CONTENT


def test_a_whole_confusion_matrix_of_version_1_is_read(tmp_path: Path) -> None:
    older = changed(METRICS_CONTENT, ("stages", "projected", "confusion"), [[2, 2], [0, 0]])
    del older["version"]
    write_json(tmp_path / METRICS, older)
    assert read_metrics(tmp_path) == older


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
@pytest.mark.parametrize("value", [5, -1, {"x": []}, float("nan"), True, [[[]]]], ids=repr)
def test_odd_figures_are_one_clear_error(tmp_path: Path, place: tuple[str | int, ...], value: Any) -> None:
    if place[-1] in ("n_images", "train", "mean") and value == 5 and value is not True:
        pytest.skip("5 is a number of photos")
    write_json(tmp_path / METRICS, changed(METRICS_CONTENT, place, value))
    with pytest.raises(CheckpointError, match=r"metrics\.json is damaged .*; restore it"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("value", [5, None, [{}], "x", {"label": 7}], ids=repr)
@pytest.mark.parametrize("key", ["images", "nodes", "strategy"])
def test_odd_mistakes_are_one_clear_error(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "errors.json"
    good: dict[str, Any] = {"strategy": "greedy", "nodes": [], "images": []}
    write_json(path, good)
    assert read_errors(path, 2) == good
    write_json(path, {**good, key: value})
    with pytest.raises(CheckpointError, match="damaged"):
        read_errors(path, 2)

"""Metrics that others send: what is odd in them is one clear error."""

import copy
from pathlib import Path
from typing import Any

import pytest

from prototree.errors import CheckpointError
from prototree.evaluation.schema import METRICS, read_errors, read_metrics
from prototree.io import write_json

LENGTHS = {"mean": 2.0, "std": 0.0, "min": 2, "max": 2}
STAGE = {
    **dict.fromkeys(("top5", "ece", "confidence_ece", "mean_confidence", "coverage", "selective_accuracy"), 0.5),
    **dict.fromkeys(("n_images", "n_prototypes", "n_leaves"), 4),
    "accuracy": {"soft": 0.5, "max_path": 0.5, "greedy": 0.5},
    "fidelity": {"max_path": 0.5, "greedy": 0.5},
    "path_length": {"max_path": LENGTHS, "greedy": LENGTHS},
    "class_accuracy": [1.0, None],
    "confusion": [[0, 0, 2], [0, 1, 2]],
    "leaf_max_probs": [0.5],
    "leaf_max_hist": [0, 1],
}
MEANS = ("purity", "baselines", "consistency", "consistency_wide", "occlusion", "on_discriminative_part")
QUALITY: dict[str, Any] = {
    **{key: {} for key in MEANS},
    "tree": "x",
    "stability": None,
    "prototypes": [{"prototype_row": 0, "purity": {}, "occlusion": {}}],
}
METRICS_CONTENT = {
    "version": 1,
    "data": {"kind": "folder", "train": 8, "test": 4},
    "classes": ["a", "b"],
    "stages": {"projected": STAGE},
    "baseline_accuracy": 0.5,
    "prototype_quality": QUALITY,
}
STAGE_KEYS = (
    "n_images accuracy accuracy.greedy path_length.greedy.mean class_accuracy class_accuracy.0 confusion confusion.0 "
    "confusion.0.1"
)
QUALITY_KEYS = ("prototypes", "prototypes.0", "prototypes.0.occlusion")
KEYS = [
    *("stages", "stages.projected", *(f"stages.projected.{key}" for key in STAGE_KEYS.split())),
    *("data", "data.train", "classes", "classes.0", "baseline_accuracy"),
    *("prototype_quality", *(f"prototype_quality.{key}" for key in QUALITY_KEYS)),
]


def changed(content: Any, key: str, value: Any) -> Any:
    inner = content = copy.deepcopy(content)
    *outer, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    for part in outer:
        inner = inner[part]
    inner[last] = value
    return content


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == {}
    write_json(tmp_path / METRICS, METRICS_CONTENT)
    assert read_metrics(tmp_path) == METRICS_CONTENT


@pytest.mark.parametrize("key", KEYS)
def test_odd_metrics_are_one_clear_error(tmp_path: Path, key: str) -> None:
    is_number = key.rpartition(".")[2] in ("n_images", "train", "mean")
    for value in (*([] if is_number else [5]), -1, {"x": []}, float("nan"), True, [[[]]]):
        write_json(tmp_path / METRICS, changed(METRICS_CONTENT, key, value))
        with pytest.raises(CheckpointError, match="damaged"):
            read_metrics(tmp_path)


@pytest.mark.parametrize("value", [5, None, [{}], "x", {"label": 7}], ids=repr)
@pytest.mark.parametrize("key", ["images", "nodes", "strategy"])
def test_odd_errors_are_one_clear_error(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "errors.json"
    good: dict[str, Any] = {"strategy": "greedy", "node_kind": "pairwise", "nodes": [], "images": []}
    write_json(path, good)
    assert read_errors(path, 2) == good
    write_json(path, {**good, key: value})
    with pytest.raises(CheckpointError, match="damaged"):
        read_errors(path, 2)

"""The benchmarks that train: what the ablation holds out and changes, what its rows share, and how data is cut."""

import importlib
import sys
from pathlib import Path

import pytest

from prototree.config import load_preset
from prototree.data import open_data
from prototree.features.cache import files_used
from prototree_birds import write_birds
from tiny_training import TINY_DISTILL, write_squares

FOLDER = Path(__file__).parents[1] / "benchmarks"
QUICK = {key: value for key, value in TINY_DISTILL.items() if key != "recipe"} | {"head_epochs": 1, "epochs": 1}
QUICK["pretrain_epochs"] = 0

sys.path.append(str(FOLDER))
ablation, cuts = importlib.import_module("ablation"), importlib.import_module("cuts")


def test_every_row_changes_something_that_exists() -> None:
    config = load_preset("default")
    for name, changes in ablation.ROWS.items():
        for key, value in changes.items():
            if "." in key:
                module, constant = key.split(".")
                assert getattr(importlib.import_module(f"prototree.training.{module}"), constant) != value, name
            else:
                assert config.replace({key: value}) != config, name


def test_every_fifth_photo_of_each_class_is_held_out_and_no_test_photo_is_used(tmp_path: Path) -> None:
    data = open_data(write_squares(tmp_path, train=10))
    folds = [ablation.held_out(data, fold) for fold in range(5)]
    for fold in folds:
        assert {s.path for s in fold.train} | {s.path for s in fold.test} == {s.path for s in data.train}
        assert [sum(s.label == k for s in fold.test) for k in range(3)] == [2, 2, 2]
        assert len(fold.train) == 24
    assert len({s.path for fold in folds for s in fold.test}) == 30


def test_rows_share_the_cache_and_finished_runs_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"the recipe": QUICK, "no cutmix": {**QUICK, "head._CUTMIX": 0.0, "lr": 1e-3}}
    monkeypatch.setattr(ablation, "ROWS", rows)
    data = ablation.held_out(open_data(write_squares(tmp_path / "data", train=5)), 0)
    runs = [ablation.one_run(data, tmp_path / "out", name, 0, 0) for name in ablation.ROWS]
    assert [run.config.recipe.lr for run in runs] == [5e-3, 1e-3]
    used = [set(files_used(run.folder)) for run in runs]
    assert used[0] == used[1] == {path.name for path in (tmp_path / "out" / "prototree-features").glob("*.f16")}
    assert ablation.table_row("no cutmix", runs).count("|") == 8
    before = (runs[0].folder / "metrics.json").stat().st_mtime_ns
    ablation.one_run(data, tmp_path / "out", "the recipe", 0, 0)
    assert (runs[0].folder / "metrics.json").stat().st_mtime_ns == before


def test_a_cut_has_so_many_classes_and_photos_and_perhaps_no_boxes(tmp_path: Path) -> None:
    data = open_data(write_birds(tmp_path, train_per_species=5, test_per_species=2, size=32, workers=1))
    for name, has_boxes in (("4x3", True), ("4x3-", False)):
        part = cuts.cut(data, name)
        assert part.class_names == data.class_names[::3]
        assert [sum(s.label == k for s in part.train) for k in range(4)] == [3] * 4
        assert [sum(s.label == k for s in part.test) for k in range(4)] == [2] * 4
        label = {s.path: data.class_names[s.label] for s in (*data.train, *data.test)}
        assert all(part.class_names[s.label] == label[s.path] for s in (*part.train, *part.test))
        assert all((s.box is not None) is has_boxes for s in part.train)

"""The benchmarks that train: what the ablation holds out and changes, what its rows share, and how data is cut."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from prototree.config import load_preset
from prototree.data import open_data
from prototree.features.cache import files_used
from prototree_birds import write_birds
from tiny_training import write_squares

FOLDER = Path(__file__).parents[1] / "benchmarks"
QUICK = {
    "backbone": "resnet18",
    "weights": "none",
    "image_size": 32,
    "feature_level": -3,
    "prototype_dim": 8,
    "head_hidden_dim": 8,
    "batch_size": 8,
    "views": 3,
    "head_epochs": 1,
    "epochs": 1,
    "workers": 0,
}


sys.path.append(str(FOLDER))  # benchmarks use each other


def benchmark(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ablation() -> ModuleType:
    return benchmark("ablation")


def test_every_row_changes_something_that_exists(ablation: ModuleType) -> None:
    config = load_preset("default")
    for name, changes in ablation.ROWS.items():
        for key, value in changes.items():
            if "." in key:
                module, constant = key.split(".")
                assert getattr(importlib.import_module(f"prototree.training.{module}"), constant) != value, name
            else:
                assert config.replace({key: value}) != config, name


def test_every_fifth_photo_of_each_class_is_held_out_and_no_test_photo_is_used(
    ablation: ModuleType, tmp_path: Path
) -> None:
    data = open_data(write_squares(tmp_path, train=10))
    folds = [ablation.held_out(data, fold) for fold in range(5)]
    for fold in folds:
        assert {s.path for s in fold.train} | {s.path for s in fold.test} == {s.path for s in data.train}
        assert [sum(s.label == k for s in fold.test) for k in range(3)] == [2, 2, 2]
        assert len(fold.train) == 24
    assert len({s.path for fold in folds for s in fold.test}) == 30


def test_rows_share_the_cache_and_finished_runs_stay(
    ablation: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ablation, "ROWS", {"the recipe": QUICK, "no cutmix": {**QUICK, "head._CUTMIX": 0.0, "lr": 1e-3}}
    )
    data = ablation.held_out(open_data(write_squares(tmp_path / "data", train=5)), 0)
    runs = [ablation.one_run(data, tmp_path / "out", name, 0, 0) for name in ablation.ROWS]
    assert [run.config.recipe.lr for run in runs] == [5e-3, 1e-3]
    used = [set(files_used(run.folder)) for run in runs]
    assert used[0] == used[1] == {path.name for path in (tmp_path / "out" / "prototree-features").glob("*.f16")}
    row = ablation.table_row("no cutmix", runs)
    assert row.count("|") == 8
    before = (runs[0].folder / "metrics.json").stat().st_mtime_ns
    ablation.one_run(data, tmp_path / "out", "the recipe", 0, 0)
    assert (runs[0].folder / "metrics.json").stat().st_mtime_ns == before


def test_a_cut_has_so_many_classes_and_photos_and_perhaps_no_boxes(tmp_path: Path) -> None:
    data = open_data(write_birds(tmp_path, train_per_species=5, test_per_species=2, size=32, workers=1))
    for name, has_boxes in (("4x3", True), ("4x3-", False)):
        part = benchmark("cuts").cut(data, name)
        assert part.class_names == data.class_names[::3]
        assert [sum(s.label == k for s in part.train) for k in range(4)] == [3] * 4
        assert [sum(s.label == k for s in part.test) for k in range(4)] == [2] * 4
        label = {s.path: data.class_names[s.label] for s in (*data.train, *data.test)}
        assert all(part.class_names[s.label] == label[s.path] for s in (*part.train, *part.test))
        assert all((s.box is not None) is has_boxes for s in part.train)

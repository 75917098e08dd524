"""`evaluate --prototypes`: figures in the run's files and on its page, and only for the tree that they are of."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prototree.cli import app
from prototree.explanation.tree import explain_tree
from prototree.io import read_json, write_json
from prototree.pipeline.fit import fit
from prototree.pipeline.stages import write_results
from prototree.reporting.tree_page import tree_body, tree_data
from prototree.run import Run
from prototree_birds import write_birds
from tiny_training import TINY


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("parts")
    write_birds(folder / "birds", n_species=3, train_per_species=4, test_per_species=2, size=48)
    trained = fit(folder / "birds", folder / "run", settings={**TINY, "epochs": 1, "freeze_epochs": 0, "height": 2})
    said = CliRunner().invoke(app, ["evaluate", str(trained.folder), "--prototypes"])
    assert said.exit_code == 0, said.output
    assert "part purity" in said.output
    return trained


def test_figures_are_kept_with_the_others_and_told_on_the_page(run: Run) -> None:
    parts = run.metrics["prototype_quality"]
    assert set(parts["purity"]["peak"]) == {"train", "test"}
    assert len(parts["prototypes"]) == run.tree().n_prototypes
    assert parts == dict(run.prototype_quality(run.tree()))
    assert "prototype quality" in (run.folder / "results.md").read_text()
    explained = explain_tree(run, nearest=1)
    assert explained.test_results
    assert explained.test_results.split(";")[0] in tree_body(explained)
    assert any(node["test_results"] for node in tree_data(explained, lambda name, picture: name)["nodes"])


def test_figures_of_another_tree_are_not_told(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "copy")
    metrics = read_json(tmp_path / "copy" / "metrics.json")
    metrics["prototype_quality"]["tree"] = "another"
    write_json(tmp_path / "copy" / "metrics.json", metrics)
    other = Run.open(tmp_path / "copy")
    assert explain_tree(other, nearest=0).test_results == ""
    write_results(other)
    assert "prototype quality" not in (other.folder / "results.md").read_text()

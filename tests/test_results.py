"""The tables of README and documentation: filled from the recorded figures, and from nothing else."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prototree.backbones.registry import BACKBONES

FOLDER = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(FOLDER))
results = importlib.import_module("results")

RUN = {
    "soft": 0.8, "max_path": 0.8, "greedy": 0.7, "fidelity": 0.9, "baseline": 0.85, "coverage": 0.9,
    "confidence_ece": 0.03, "n_prototypes": 98, "path_length": {"mean": 6.5, "min": 4, "max": 9},
}  # fmt: skip


def recorded(**experiments: Any) -> Any:
    names = [experiment.name for experiment in results.experiments()]
    return results.Results({"commit": "abc", "experiments": dict.fromkeys(names) | experiments})


def test_tables_of_pages_are_those_of_the_recorded_figures() -> None:
    found = results.Results(results.read_json(results.RESULTS))
    filled = set()
    for page in results.PAGES:
        text = page.read_text()
        assert results.filled(text, found) == text, f"{page}: run make results, or benchmarks/results.py write"
        filled |= {name for _, name, _ in results._BLOCK.findall(text)}
    assert filled == set(results.TABLES)


def test_the_list_of_networks_has_the_recorded_accuracies() -> None:
    found = results.Results(results.read_json(results.RESULTS))
    for name, experiment in ((BACKBONES[0].name, "cub200"), ("birds", "cub200-birds")):
        mean = [found.mean(experiment, key).split(" ")[0] for key in ("soft", "greedy")]
        measured = next(network.measured for network in BACKBONES if network.name == name)
        assert measured == ("" if mean[0] == "not" else ", ".join(mean)), name


def test_every_table_says_what_was_not_run() -> None:
    nothing = recorded()
    for name, table in results.TABLES.items():
        assert results.NOT_RUN in table(nothing), name


def test_mean_and_cost_over_seeds() -> None:
    entry = {"metrics": {"runs": [RUN, {**RUN, "greedy": 0.74, "soft": 0.82}], "ensembles": []}}
    found = recorded(cub50=entry)
    assert found.mean("cub50", "greedy") == "72.0 ± 2.8"
    assert "| 50 classes, lite0 | 85.0 | 4.0 | 13.0 |" in results.tree_cost(found)
    assert "| prototree, 2 seeds | 50 |" in results.headline(found)
    assert "| mean ± std | 85.0 ± 0.0 | 81.0 ± 1.4 | 72.0 ± 2.8 |" in results.TABLES["cub50"](found)


def test_figures_of_another_state_of_the_source_count_as_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        me = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *me, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(file: str, when: int) -> str:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(str(when))
        git("add", file)
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"{when} +0000")
        git("commit", "-m", file)
        return git("rev-parse", "HEAD")

    git("init", "-q")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    commits = {"demo": commit("src/a", 1_700_000_000), "cub50": commit("src/a", 1_700_000_100)}
    commits["cub200"] = commit("docs/b", 1_700_000_200)  # the source stays as it was
    for name, of in commits.items():
        results.write_json(tmp_path / f"{name}.json", {"commit": of})
    found = results.collect(tmp_path)
    assert {name for name, entry in found["experiments"].items() if entry} == {"cub50", "cub200"}
    assert commits["cub50"].startswith(found["commit"])

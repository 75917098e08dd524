"""The paper's tables, end to end on a few generated birds."""

import csv
import json
import statistics
from pathlib import Path

import pytest

from prototree.errors import ConfigError
from prototree.pipeline.reproduce import NOT_RUN, PUBLISHED, Reproduction, reproduce
from prototree.run import Run
from prototree_birds import write_birds
from tiny_training import TINY

# As short as leaves allow that are not uniform.
SETTINGS = {key: value for key, value in TINY.items() if key != "height"} | {"prune_threshold": 0.34, "epochs": 2}


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "birds"
    write_birds(folder, n_species=3, train_per_species=6, test_per_species=3, size=48, workers=1)
    return folder


@pytest.fixture(scope="module")
def done(birds: Path, tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    out = tmp_path_factory.mktemp("out") / "birds"
    return reproduce("birds", out, heights=[2, 3], seeds=3, data=birds, settings=SETTINGS)


def rows(folder: Path, table: str) -> list[dict[str, str]]:
    with open(folder / f"{table}.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_the_tables_say_what_the_runs_say(done: Reproduction) -> None:
    runs = [Run(done.folder / f"h3-s{seed}").metrics for seed in range(3)]
    accuracy = [100 * run["stages"]["projected"]["accuracy"]["soft"] for run in runs]
    tree, three, five = rows(done.folder, "table1")
    assert tree["accuracy"] == f"{statistics.fmean(accuracy):.1f} ± {statistics.stdev(accuracy):.1f}"
    assert tree["runs"] == "3"
    votes = json.loads((done.folder / "ensemble-h3.json").read_text())["ensembles"]
    assert three["accuracy"] == f"{100 * votes[2]['accuracy']['soft']:.1f}"
    assert three["prototypes"] == str(sum(run["stages"]["projected"]["n_prototypes"] for run in runs))
    assert (five["accuracy"], five["prototypes"]) == (NOT_RUN, NOT_RUN)
    strategies = {row["strategy"]: row for row in rows(done.folder, "table3")}
    fidelity = [run["stages"]["projected"]["fidelity"]["greedy"] for run in runs]
    assert strategies["greedy"]["fidelity"].startswith(f"{statistics.fmean(fidelity):.3f}")
    distances = [distance for run in runs for distance in run["projection"]["distances"]]
    by_height = {row["h"]: row for row in rows(done.folder, "tableS6")}
    assert set(by_height) == {"2", "3"}
    assert by_height["3"]["distance to patch"].startswith(f"{statistics.fmean(distances):.4f}")
    assert rows(done.folder, "table2")[0] == {**by_height["3"]}
    free = [100 * run["stages"]["projected_any_class"]["accuracy"]["soft"] for run in runs]
    assert rows(done.folder, "tableS4")[0]["measured"].startswith(f"{statistics.fmean(free):.3f}")
    text = (done.folder / "tables.md").read_text()
    assert all(table.to_markdown() in text for table in done.tables)
    assert all(
        (done.folder / plot).read_bytes().startswith(b"\x89PNG") for plot in ("heights.png", "leaf_max_probs.png")
    )


def test_what_is_done_is_not_done_again_and_what_is_missing_is(done: Reproduction, birds: Path) -> None:
    stamps = {path: path.stat().st_mtime_ns for path in done.folder.glob("h*-s*/metrics.json")}
    (done.folder / "h2-s1" / "results.md").unlink()  # as if it had been killed before the end
    again = reproduce("birds", done.folder, heights=[2, 3], seeds=3, data=birds, settings=SETTINGS)
    changed = {path.parent.name for path, stamp in stamps.items() if path.stat().st_mtime_ns != stamp}
    assert changed == {"h2-s1"}
    assert again.tables == done.tables


def test_what_cannot_be_done(done: Reproduction, birds: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another experiment"):
        reproduce("birds", done.folder, seeds=1, data=birds, settings=SETTINGS | {"epochs": 9})
    with pytest.raises(ConfigError, match="--heights"):
        reproduce("birds", done.folder, data=birds, settings={"height": 3})
    with pytest.raises(ConfigError, match="--data"):
        reproduce("cub", tmp_path)
    with pytest.raises(ConfigError, match="cub, cars, birds"):
        reproduce("cup", tmp_path)


def test_without_runs_the_tables_hold_only_what_was_published(birds: Path, tmp_path: Path) -> None:
    tables = reproduce("cub", tmp_path / "out", seeds=0, data=birds, settings=SETTINGS).tables
    cells = [cell for table in tables for row in table.rows for cell in row]
    assert "82.2 ± 0.7" in cells
    found = {row["h"]: row for row in rows(tmp_path / "out", "tableS6") if row[""] == "published"}
    assert {int(height) for height in found} == set(PUBLISHED["cub"].stages)
    measured = [row for row in rows(tmp_path / "out", "tableS6") if row[""].startswith("measured")]
    assert all(row["initial"] == row["prototypes"] == row["distance to patch"] == NOT_RUN for row in measured)
    assert [row["accuracy"] for row in rows(tmp_path / "out", "table1")] == [NOT_RUN] * 3

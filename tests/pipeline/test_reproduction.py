"""The paper run whole, end to end on a few generated birds."""

import csv
import json
import statistics
from pathlib import Path

import pytest
import torch

from prototree.config import load_preset
from prototree.errors import ConfigError
from prototree.evaluation.published import NOT_RUN, PUBLISHED
from prototree.pipeline.cost import cost_of, measured_rate, step_operations
from prototree.pipeline.reproduce import EXPERIMENTS, Plan, Reproduction, _experiment, reproduce
from prototree.run import Run
from prototree_birds import write_birds
from tiny_training import NETWORK, TINY

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
    return reproduce("birds", out, scale="tiny", heights=[2, 3], seeds=3, data=birds, settings=SETTINGS)


def rows(folder: Path, table: str) -> list[dict[str, str]]:
    with open(folder / f"{table}.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_the_tables_say_what_the_runs_say(done: Reproduction) -> None:
    runs = [Run(done.folder / f"h3-s{seed}").metrics for seed in range(3)]
    accuracy = [100 * run["stages"]["projected"]["accuracy"]["soft"] for run in runs]
    classifier, tree, three, five = rows(done.folder, "table1")
    assert tree["accuracy"] == f"{statistics.fmean(accuracy):.1f} ± {statistics.stdev(accuracy):.1f}"
    assert tree["runs"] == "3"
    baselines = [100 * run["baseline_accuracy"] for run in runs]
    assert classifier["accuracy"].startswith(f"{statistics.fmean(baselines):.1f}")
    assert Run(done.folder / "h2-s0").metrics["baseline_accuracy"] is None, "one for each seed is enough"
    votes = json.loads((done.folder / "ensemble-h3.json").read_text())["ensembles"]
    assert three["accuracy"] == f"{100 * votes[2]['accuracy']['soft']:.1f}"
    assert three["prototypes"] == str(sum(run["stages"]["projected"]["n_prototypes"] for run in runs))
    assert (five["accuracy"], five["prototypes"]) == (NOT_RUN, NOT_RUN)
    strategies = {row["strategy"]: row for row in rows(done.folder, "table3")}
    fidelity = [run["stages"]["projected"]["fidelity"]["greedy"] for run in runs]
    assert strategies["greedy"]["fidelity"].startswith(f"{statistics.fmean(fidelity):.3f}")
    distances = [distance for run in runs for distance in run["projection"]["distances"]]
    by_height = {row["h"]: row for row in rows(done.folder, "tableS6") if row[""].startswith("measured")}
    assert set(by_height) == {"2", "3"}
    assert by_height["3"]["distance to patch"].startswith(f"{statistics.fmean(distances):.4f}")
    assert rows(done.folder, "table2")[0] == {**by_height["3"]}
    free = [100 * run["stages"]["projected_any_class"]["accuracy"]["soft"] for run in runs]
    assert rows(done.folder, "tableS4")[0]["measured"].startswith(f"{statistics.fmean(free):.3f}")


def test_the_claims_are_written_as_markdown_and_json(done: Reproduction) -> None:
    text, content = (done.folder / "paper.md").read_text(), json.loads((done.folder / "paper.json").read_text())
    assert all(table.to_markdown() in text for table in done.tables)
    assert all(
        (done.folder / plot).read_bytes().startswith(b"\x89PNG") for plot in ("heights.png", "leaf_max_probs.png")
    )
    assert content["claims"] == [claim.to_json() for claim in done.claims]
    assert done.claims[1].figures[0].measured is None, "both heights have a leaf for each class"
    assert "not run" not in {claim.verdict for claim in (done.claims[0], *done.claims[2:])}
    gain = done.claims[5].figures[0]
    ensemble = json.loads((done.folder / "ensemble-h3.json").read_text())
    alone = statistics.fmean(tree["accuracy"]["soft"] for tree in ensemble["alone"])
    assert gain.measured == pytest.approx(100 * (ensemble["ensembles"][2]["accuracy"]["soft"] - alone))
    assert content["height"] == 3
    assert content["runs"]["2"] == ["h2-s0", "h2-s1", "h2-s2"]
    assert content["published_scale"]["hours_here"] > 0
    assert "TFLOP/s" in text


def test_what_is_done_is_not_done_again_and_what_is_missing_is(done: Reproduction, birds: Path) -> None:
    stamps = {path: path.stat().st_mtime_ns for path in done.folder.glob("h*-s*/metrics.json")}
    (done.folder / "h2-s1" / "results.md").unlink()  # as if it had been killed before the end
    again = reproduce("birds", done.folder, scale="tiny", heights=[2, 3], seeds=3, data=birds, settings=SETTINGS)
    changed = {path.parent.name for path, stamp in stamps.items() if path.stat().st_mtime_ns != stamp}
    assert changed == {"h2-s1"}
    assert (again.claims, again.tables) == (done.claims, done.tables)


def test_what_cannot_be_done(done: Reproduction, birds: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another experiment"):
        reproduce("birds", done.folder, scale="tiny", seeds=1, data=birds, settings=SETTINGS | {"epochs": 9})
    with pytest.raises(ConfigError, match="another experiment"):
        reproduce("birds", done.folder, scale="small", seeds=1, data=birds, settings=SETTINGS)
    for key in ("height", "seed", "baseline"):
        with pytest.raises(ConfigError, match="--heights"):
            reproduce("birds", done.folder, data=birds, settings={key: 3})
    with pytest.raises(ConfigError, match="--data"):
        reproduce("cub", tmp_path)
    with pytest.raises(ConfigError, match="cub, cars, birds"):
        reproduce("cup", tmp_path)
    with pytest.raises(ConfigError, match="small or tiny"):
        reproduce("birds", tmp_path, scale="published")
    with pytest.raises(ConfigError, match="small, published, tiny"):
        _experiment("birds", "huge")


def test_without_runs_the_tables_hold_only_what_was_published(birds: Path, tmp_path: Path) -> None:
    result = reproduce("cub", tmp_path / "out", scale="published", seeds=0, data=birds, settings=SETTINGS)
    cells = [cell for table in result.tables for row in table.rows for cell in row]
    assert "82.2 ± 0.7" in cells
    assert {claim.verdict for claim in result.claims} == {"not run"}
    found = {row["h"]: row for row in rows(tmp_path / "out", "tableS6") if row[""] == "published"}
    assert {int(height) for height in found} == set(PUBLISHED["cub"].stages)
    measured = [row for row in rows(tmp_path / "out", "tableS6") if row[""].startswith("measured")]
    assert [row["h"] for row in measured] == ["9"]
    assert all(row["initial"] == row["prototypes"] == row["distance to patch"] == NOT_RUN for row in measured)
    assert [row["accuracy"] for row in rows(tmp_path / "out", "table1")] == [NOT_RUN] * 4
    assert "No step" in (tmp_path / "out" / "paper.md").read_text()


def test_which_runs_are_planned() -> None:
    small, published, tiny = (EXPERIMENTS["cub"][scale] for scale in ("small", "published", "tiny"))
    plan = Plan.of(small, None, 50, (), None)
    assert (plan.height, dict(plan.seeds)) == (7, {5: 1, 6: 1, 7: 3, 8: 1, 9: 1})
    assert plan.runs[:4] == [(7, 0), (7, 1), (7, 2), (5, 0)], "the height of most claims first"
    plan = Plan.of(published, 9, 200, (), None)
    assert (plan.height, dict(plan.seeds)) == (9, dict.fromkeys((7, 8, 9, 10, 11), 5))
    plan = Plan.of(EXPERIMENTS["cars"]["published"], 11, 196, (), None)
    assert (plan.height, list(plan.seeds)) == (11, [7, 8, 9, 10, 11])
    assert dict(Plan.of(tiny, None, 3, (), None).seeds) == {3: 1}
    assert Plan.of(small, None, 50, (), 0).runs == []
    assert dict(Plan.of(small, None, 50, (), 1).seeds) == dict.fromkeys((5, 6, 7, 8, 9), 1)
    plan = Plan.of(small, None, 50, (5, 6), 2)
    assert (plan.height, dict(plan.seeds)) == (6, {5: 2, 6: 2})


def test_operations_are_counted_and_hours_follow(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    config = load_preset("paper-cub").replace({"backbone": "resnet50", "weights": "none"})
    assert step_operations(config) == pytest.approx(3 * 2 * 4.09e9, rel=0.02)  # forward, and twice that backward
    lite0 = config.replace({"backbone": "tf_efficientnet_lite0"})
    assert step_operations(lite0) == pytest.approx(3 * 2 * 0.39e9, rel=0.1), "depthwise convolutions are cheap"
    assert torch.equal(before, torch.get_rng_state())
    cost = cost_of(config, 10, 2, [])
    assert cost.operations == pytest.approx(2 * 10 * (70 + 10) * step_operations(config))
    assert cost.hours_here is None
    tiny = load_preset("paper-cub").replace(
        {"backbone": NETWORK, "weights": "none", "image_size": 32, "feature_level": -3, "freeze_epochs": 1}
    )
    (tmp_path / "config.toml").write_text(tiny.to_toml())
    (tmp_path / "log.csv").write_text("epoch,images_per_second\n1,999\n2,30\n3,40\n")
    rate = measured_rate(Run(tmp_path))
    assert rate == pytest.approx(40 * step_operations(tiny)), "frozen epochs are faster"
    assert cost_of(config, 10, 2, [Run(tmp_path)]).hours_here == pytest.approx(cost.operations / rate / 3600)

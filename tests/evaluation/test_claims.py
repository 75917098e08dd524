"""The paper's claims on made-up metrics: each rule at its limits, and the paper's own figures."""

import json
from typing import Any

import pytest

from prototree.evaluation.claims import Claim, Figure, claims_table, six_claims
from prototree.evaluation.published import NOT_RUN, PUBLISHED, paper_tables

CUB = PUBLISHED["cub"]
TITLES = ("accuracy", "height", "pruning", "projection", "leaves", "ensembles")


def metrics(
    trained: float = 82.206,
    pruned: float | None = None,
    projected: float | None = None,
    *,
    baseline: float | None = None,
    n_prototypes: int = 202,
    pruned_fraction: float = 0.605,
    distances: tuple[float, ...] = (0.001, 0.002, 0.003),
    leaf_max_probs: tuple[float, ...] = (0.99, 0.005, 0.98, 0.01),
    fidelity: tuple[float, float] = (0.999, 0.987),
) -> dict[str, Any]:
    """Metrics of a run like the paper's of height 9."""
    pruned = trained if pruned is None else pruned
    stages = {"trained": trained, "pruned": pruned, "projected": pruned if projected is None else projected}
    lengths = {key: {"mean": 8.3, "std": 1.1, "min": 3, "max": 9} for key in ("max_path", "greedy")}
    return {
        "baseline_accuracy": None if baseline is None else baseline / 100,
        "pruning": {"pruned_fraction": pruned_fraction, "threshold": 0.01},
        "projection": {"distances": list(distances), "class_constraint_gap": None},
        "stages": {
            stage: {
                "accuracy": dict.fromkeys(("soft", "max_path", "greedy"), accuracy / 100),
                "fidelity": dict(zip(("max_path", "greedy"), fidelity, strict=True)),
                "path_length": lengths,
                "n_prototypes": 511 if stage == "trained" else n_prototypes,
                "leaf_max_probs": list(leaf_max_probs),
            }
            for stage, accuracy in stages.items()
        },
    }


def ensemble(singles: list[float], together: dict[int, float]) -> dict[str, Any]:
    def group(n_trees: int, accuracy: float) -> dict[str, Any]:
        return {"n_trees": n_trees, "accuracy": {"soft": accuracy / 100}, "n_prototypes": 202 * n_trees}

    return {
        "alone": [group(1, accuracy) for accuracy in singles],
        "ensembles": [group(size, accuracy) for size, accuracy in together.items()],
    }


NONE: dict[str, Any] = {"alone": [], "ensembles": []}


def claims(runs: dict[int, list[dict[str, Any]]], group: dict[str, Any] = NONE) -> dict[str, Claim]:
    return dict(zip(TITLES, six_claims(CUB, runs, group, 9, 200), strict=True))


def test_the_papers_own_figures_carry_over() -> None:
    heights = {h: float(cells[2].split()[0]) for h, cells in CUB.stages.items()}
    runs = {height: [metrics(accuracy)] for height, accuracy in heights.items()}
    runs[9] = [metrics(82.206, 82.192, 82.199, baseline=85.0)] * 5
    found = claims(runs, ensemble([82.2] * 5, {1: 82.2, 3: 86.6, 5: 87.2}))
    assert {name: claim.verdict for name, claim in found.items()} == dict.fromkeys(TITLES, "carries over")
    measured = {figure.name: figure.measured for claim in found.values() for figure in claim.figures}
    assert measured == {
        "cost of the tree, points": pytest.approx(2.801),
        "rise to the first such height, points": pytest.approx(39.234),
        "spread from there on, points": pytest.approx(1.32),
        "pruned, %": pytest.approx(60.5),
        "prototypes of a class left": pytest.approx(1.01),
        "cost, points": pytest.approx(-0.007),  # of projection, which comes after pruning
        "median distance": pytest.approx(0.002),
        "such leaves, %": pytest.approx(100),
        "fidelity of max-path": pytest.approx(0.999),
        "fidelity of greedy": pytest.approx(0.987),
        "gain of 3, points": pytest.approx(4.4),
        "gain of 5, points": pytest.approx(5.0),
    }
    for claim in found.values():  # what is said to be published agrees with what its tables say
        for figure in claim.figures:
            if figure.name not in ("cost of the tree, points", "median distance", "such leaves, %"):
                assert float(figure.published) == pytest.approx(figure.measured, abs=0.05), figure.name


def test_nothing_is_decided_that_was_not_run() -> None:
    found = claims({})
    assert {claim.verdict for claim in found.values()} == {"not run"}
    assert {claim.row[2] for claim in found.values()} == {NOT_RUN}
    assert claims({9: [metrics()]})["accuracy"].verdict == "not run", "there is no baseline"
    assert claims({9: [metrics()], 10: [metrics()]})["height"].verdict == "not run", "only heights with enough leaves"
    assert claims({9: [metrics()], 8: [metrics()], 7: [metrics(40)]})["height"].verdict == "carries over"
    three = claims({}, ensemble([80] * 3, {1: 80, 2: 83, 3: 84}))["ensembles"]
    assert (three.verdict, three.figures[1].measured) == ("carries over", None)
    assert "gain of 5, points: not run" in three.row[2]


@pytest.mark.parametrize(
    ("name", "change", "verdict"),
    [
        ("accuracy", {"baseline": 87.2}, "carries over"),
        ("accuracy", {"baseline": 87.3}, "does not"),
        ("accuracy", {"baseline": 80.0}, "carries over"),
        ("pruning", {"pruned_fraction": 0.49}, "does not"),
        ("pruning", {"n_prototypes": 301}, "does not"),
        ("pruning", {"n_prototypes": 139}, "does not"),
        ("pruning", {"pruned": 81.6}, "does not"),
        ("projection", {"pruned": 80.0, "projected": 79.6}, "carries over"),
        ("projection", {"pruned": 80.0, "projected": 79.4}, "does not"),
        ("projection", {"distances": (0.0, 0.021, 0.5)}, "does not"),
        ("projection", {"distances": (0.0, 0.019, 0.5)}, "carries over"),
        ("leaves", {"leaf_max_probs": (0.95,) * 9 + (0.5,)}, "carries over"),
        ("leaves", {"leaf_max_probs": (0.95,) * 8 + (0.5,)}, "does not"),
        ("leaves", {"fidelity": (0.98, 0.98)}, "does not"),
        ("leaves", {"fidelity": (1.0, 0.96)}, "does not"),
    ],
)
def test_each_rule_at_its_limits(name: str, change: dict[str, Any], verdict: str) -> None:
    claim = claims({9: [metrics(**change)]})[name]
    assert claim.verdict == verdict
    assert ("outside" in claim.row[2]) == (verdict == "does not")


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ({7: 77.0, 8: 82.0, 9: 82.0}, "carries over"),
        ({7: 77.5, 8: 82.0, 9: 82.0}, "does not"),  # it hardly rises
        ({7: 60.0, 8: 79.0, 9: 82.5}, "does not"),  # it goes on rising
        ({7: 60.0, 8: 82.0, 9: 82.0, 11: 78.0}, "does not"),  # it falls
        ({6: 10.0, 7: 60.0, 8: 82.0, 9: 82.0}, "carries over"),
    ],
)
def test_the_height_curve(accuracies: dict[int, float], verdict: str) -> None:
    assert claims({height: [metrics(accuracy)] for height, accuracy in accuracies.items()})["height"].verdict == verdict


def test_an_ensemble_is_compared_with_its_own_trees() -> None:
    claim = claims({}, ensemble([80, 82, 84, 60, 60], {1: 80, 3: 83.9, 5: 71}))["ensembles"]
    assert [figure.measured for figure in claim.figures] == pytest.approx([1.9, -2.2])
    assert claim.verdict == "does not"


def test_means_over_runs_and_a_table_of_text_and_json() -> None:
    runs = {9: [metrics(80, baseline=84), metrics(82, baseline=85)]}
    found = six_claims(CUB, runs, NONE, 9, 200)
    row = claims_table(found, "claims").rows[0]
    assert row[1] == "cost of the tree, points: 82.20 against 84 to 87"
    assert row[2] == "cost of the tree, points: 3.5 (81.0 ± 1.4 against 84.5 ± 0.7)"
    assert row[3:] == ("cost of the tree, points: at most 5", "carries over")
    content = json.loads(json.dumps(found[0].to_json(), allow_nan=False))
    assert content["verdict"] == "carries over"
    assert (content["figures"][0]["low"], content["figures"][0]["high"]) == (None, 5.0)
    assert Figure("a", "", 1.0, 0.5, 2.0).rule == "a: 0.5 to 2"


def test_the_papers_tables_show_runs_beside_what_was_published() -> None:
    runs = {9: [metrics(82, baseline=85.0)], 10: [metrics(81)]}
    tables = paper_tables(CUB, runs, ensemble([82], {1: 82})["ensembles"], 9)
    classifier, tree, three, five = tables["table1"].rows
    assert (classifier[1], classifier[4]) == ("85.0", "84 to 87")
    assert (tree[1], tree[4]) == ("82.0", "82.2 ± 0.7")
    assert three[1] == five[1] == NOT_RUN
    assert [row[:2] for row in tables["tableS6"].rows][:2] == [("9", "measured (1 runs)"), ("10", "measured (1 runs)")]
    assert [row[0] for row in tables["table2"].rows] == ["9", "9"]
    empty = paper_tables(PUBLISHED["cars"], {}, [], 8)
    assert empty["table2"].rows[0] == ("8", "measured (0 runs)", *[NOT_RUN] * 6)
    assert [row[1] for row in empty["table3"].rows] == [NOT_RUN] * 3

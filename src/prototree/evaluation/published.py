"""What the paper reports, and its tables with measured cells beside the published ones.

Published results are those of Tables 1–3 and S4–S6 of Nauta, van Bree, Seifert (CVPR 2021). Runs are given as the
content of their metrics.json, by height.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prototree.core.checkpoint import PROJECTED, PRUNED, TRAINED
from prototree.evaluation.tables import Table

NOT_RUN, NOT_PUBLISHED = "not run", "–"
ENSEMBLES = (3, 5)
UNCONSTRAINED = "projected_any_class"  # the stage in which prototypes are patches of any class

Runs = Mapping[int, Sequence[Mapping[str, Any]]]
"""The metrics of finished runs, by height."""


@dataclass(frozen=True)
class Published:
    """What the paper reports of one data set."""

    n_classes: int
    height: int  # of Tables 1–3
    ensembles: Mapping[int, tuple[str, str]]  # trees → accuracy and prototypes (Table 1)
    strategies: Mapping[str, tuple[str, str, str]]  # accuracy, fidelity, path length (Tables 3 and S5)
    stages: Mapping[int, tuple[str, ...]]  # height → the columns of Tables 2 and S6
    constraints: Mapping[str, str]  # stage → accuracy (Table S4)
    classifiers: str  # networks without a tree, 224 pixels (Table 1, and what is common for the network)
    max_tree_cost: float  # points that the tree may have less than a classifier, by these figures
    n_views: int  # training views of an epoch


PUBLISHED = {
    "cub": Published(
        n_classes=200,
        height=9,
        ensembles={1: ("82.2 ± 0.7", "202"), 3: ("86.6", "605"), 5: ("87.2", "1008")},
        strategies={
            "soft": ("82.20 ± 0.01", "n.a.", "n.a."),
            "max_path": ("82.19 ± 0.01", "0.999 ± 0.001", "8.3 ± 1.1 (3–9)"),
            "greedy": ("82.07 ± 0.01", "0.987 ± 0.002", "8.3 ± 1.1 (3–9)"),
        },
        stages={
            7: ("41.826 ± 2.776", "41.826 ± 2.776", "41.798 ± 2.780", "127.0 ± 0.0", "0.0", "0.0027 ± 0.0045"),
            8: ("81.046 ± 0.674", "81.042 ± 0.676", "81.032 ± 0.680", "200.4 ± 1.2", "21.4", "0.0025 ± 0.0047"),
            9: ("82.206 ± 0.723", "82.192 ± 0.723", "82.199 ± 0.726", "201.6 ± 1.9", "60.5", "0.0020 ± 0.0068"),
            10: ("82.054 ± 0.517", "82.019 ± 0.468", "82.019 ± 0.469", "203.2 ± 2.0", "80.1", "0.0018 ± 0.0072"),
            11: ("82.370 ± 0.575", "82.357 ± 0.580", "82.352 ± 0.572", "207.0 ± 2.7", "89.9", "0.0038 ± 0.0313"),
        },
        constraints={UNCONSTRAINED: "82.195 ± 0.723", PROJECTED: "82.199 ± 0.726"},
        classifiers="84 to 87",
        max_tree_cost=5.0,
        n_views=29_970,  # five of each image
    ),
    "cars": Published(
        n_classes=196,
        height=11,
        ensembles={1: ("86.6 ± 0.2", "195"), 3: ("90.3", "586"), 5: ("91.5", "977")},
        strategies={
            "soft": ("86.58 ± 0.24", "n.a.", "n.a."),
            "max_path": ("86.58 ± 0.24", "1.000 ± 0.000", "8.6 ± 1.7 (4–11)"),
            "greedy": ("86.43 ± 0.30", "0.992 ± 0.002", "8.6 ± 1.7 (4–11)"),
        },
        stages={
            7: ("53.842 ± 0.733", "53.842 ± 0.733", "53.847 ± 0.732", "127.0 ± 0.0", "0.0", "0.0006 ± 0.0018"),
            8: ("85.049 ± 0.384", "85.007 ± 0.398", "85.017 ± 0.393", "195.0 ± 0.0", "23.5", "0.0005 ± 0.0018"),
            9: ("85.601 ± 0.361", "85.586 ± 0.361", "85.586 ± 0.361", "195.2 ± 0.4", "61.8", "0.0027 ± 0.0626"),
            10: ("86.064 ± 0.187", "86.071 ± 0.191", "86.076 ± 0.186", "195.8 ± 1.2", "80.9", "0.0005 ± 0.0017"),
            11: ("86.584 ± 0.250", "86.576 ± 0.245", "86.576 ± 0.245", "195.4 ± 0.5", "90.5", "0.0005 ± 0.0016"),
        },
        constraints={},
        classifiers="93.6 to 93.8",
        max_tree_cost=7.5,
        n_views=8_144,
    ),
}


def paper_tables(
    published: Published, runs: Runs, ensembles: Sequence[Mapping[str, Any]], height: int
) -> dict[str, Table]:
    """Make the paper's tables; `ensembles` are groups of runs of the one `height` that Tables 1, 2, 3 and S4 show."""
    own = runs.get(height, [])
    return {
        "table1": _accuracy_table(published, height, own, ensembles),
        "table2": _stages_table("Table 2: what pruning and projection change", published, {height: own}),
        "table3": _strategy_table(published, height, own),
        "tableS4": _constraint_table(published, height, own),
        "tableS6": _stages_table("Table S6: all heights", published, {height: own, **runs}, *published.stages),
    }


def _accuracy_table(
    published: Published, height: int, runs: Sequence[Mapping[str, Any]], ensembles: Sequence[Mapping[str, Any]]
) -> Table:
    accuracy = mean_std([100 * run["stages"][PROJECTED]["accuracy"]["soft"] for run in runs], 1)
    prototypes = mean_std([run["stages"][PROJECTED]["n_prototypes"] for run in runs], 1)
    classifiers = [100 * value for run in runs if (value := run.get("baseline_accuracy")) is not None]
    rows = [
        (
            "fine-tuned classifier",
            mean_std(classifiers, 1),
            "n.a.",
            str(len(classifiers)),
            published.classifiers,
            "n.a.",
        ),
        (f"tree, h = {height}", accuracy, prototypes, str(len(runs)), *published.ensembles[1]),
    ]
    for size in ENSEMBLES:
        metrics = next((group for group in ensembles if group["n_trees"] == size), None)
        cells = (NOT_RUN, NOT_RUN, "0")
        if metrics:
            cells = (f"{100 * metrics['accuracy']['soft']:.1f}", str(metrics["n_prototypes"]), str(size))
        rows.append((f"ensemble of {size}", *cells, *published.ensembles[size]))
    header = ("method", "accuracy", "prototypes", "runs", *_published(published, "accuracy", "prototypes"))
    return Table("Table 1: accuracy and size", header, tuple(rows))


def _published(published: Published, *columns: str) -> tuple[str, ...]:
    return tuple(f"published {column} (h = {published.height})" for column in columns)


def _stages_table(title: str, published: Published, runs: Runs, *heights: int) -> Table:
    rows = []
    for height, own in sorted(runs.items()):
        accuracies = (
            mean_std([100 * run["stages"][stage]["accuracy"]["soft"] for run in own], 3)
            for stage in (TRAINED, PRUNED, PROJECTED)
        )
        pruned = [100 * statistics.fmean(run["pruning"]["pruned_fraction"] for run in own)] if own else []
        measured = (
            *accuracies,
            mean_std([run["stages"][PROJECTED]["n_prototypes"] for run in own], 1),
            mean_std(pruned, 1),
            _pooled([distance for run in own for distance in run["projection"]["distances"]]),
        )
        rows.append((str(height), f"measured ({len(own)} runs)", *measured))
    for height in heights or (published.height,):
        rows.append((str(height), "published", *published.stages[height]))
    header = ("h", "", "initial", "pruned", "pruned + projected", "prototypes", "% pruned", "distance to patch")
    return Table(title, header, tuple(rows))


def _strategy_table(published: Published, height: int, runs: Sequence[Mapping[str, Any]]) -> Table:
    own = [run["stages"][PROJECTED] for run in runs]
    rows = []
    for strategy in ("soft", "max_path", "greedy"):
        measured = [mean_std([100 * run["accuracy"][strategy] for run in own], 2)]
        if strategy == "soft":
            measured += ["n.a.", "n.a."]
        else:
            measured.append(mean_std([run["fidelity"][strategy] for run in own], 3))
            measured.append(_lengths([run["path_length"][strategy] for run in own]))
        rows.append((strategy.replace("_", "-"), *measured, *published.strategies[strategy]))
    columns = ("accuracy", "fidelity", "path length")
    header = ("strategy", *columns, *_published(published, *columns))
    return Table(f"Tables 3 and S5: strategies, h = {height}, {len(own)} runs", header, tuple(rows))


def _constraint_table(published: Published, height: int, runs: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for stage, what in (
        (UNCONSTRAINED, "without class constraints (Eq. 6)"),
        (PROJECTED, "with class constraints (Eq. S1)"),
    ):
        accuracies = [100 * run["stages"][stage]["accuracy"]["soft"] for run in runs if stage in run["stages"]]
        rows.append((what, mean_std(accuracies, 3), published.constraints.get(stage, NOT_PUBLISHED)))
    costs = [gap for run in runs if (gap := run["projection"]["class_constraint_gap"]) is not None]
    cost = f"{statistics.fmean(costs):.2e}" if costs else NOT_RUN
    rows.append(("mean extra distance with constraints", cost, "5.86e-05" if published.constraints else NOT_PUBLISHED))
    title = f"Table S4: projection with and without class constraints, h = {height}"
    return Table(title, ("projection", "measured", "published"), tuple(rows))


def mean_std(values: Sequence[float | int], digits: int) -> str:
    """Write mean ± sample standard deviation over the runs."""
    if not values:
        return NOT_RUN
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def _pooled(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4f} ± {statistics.pstdev(values):.4f}" if values else NOT_RUN


def _lengths(runs: Sequence[Mapping[str, Any]]) -> str:
    if not runs:
        return NOT_RUN
    mean, std = (statistics.fmean(run[key] for run in runs) for key in ("mean", "std"))
    return f"{mean:.1f} ± {std:.1f} ({min(run['min'] for run in runs)}–{max(run['max'] for run in runs)})"

"""Reproduce the paper's tables: train what is missing, and compare with the published results.

Published results are those of Tables 1–3 and S4–S6 of Nauta, van Bree, Seifert (CVPR 2021).
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prototree import io
from prototree.config import default_height, load_preset
from prototree.core.checkpoint import PROJECTED, PRUNED, TRAINED
from prototree.errors import ConfigError
from prototree.evaluation import plots
from prototree.evaluation.tables import Table
from prototree.pipeline.fit import evaluate, fit, open_source
from prototree.pipeline.stages import UNCONSTRAINED
from prototree.progress import Observer
from prototree.run import RESULTS, Run

NOT_RUN, NOT_PUBLISHED = "not run", "–"
ENSEMBLES = (3, 5)


@dataclass(frozen=True)
class Published:
    """What the paper says of one data set."""

    height: int  # of Tables 1–3
    ensembles: Mapping[int, tuple[str, str]]  # trees → accuracy and prototypes (Table 1)
    strategies: Mapping[str, tuple[str, str, str]]  # accuracy, fidelity, path length (Tables 3 and S5)
    stages: Mapping[int, tuple[str, ...]]  # height → the columns of Tables 2 and S6
    constraints: Mapping[str, str] = field(default_factory=dict)  # stage → accuracy (Table S4)


PUBLISHED = {
    "cub": Published(
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
    ),
    "cars": Published(
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
    ),
}


@dataclass(frozen=True)
class Experiment:
    """How one data set is learnt."""

    preset: str
    settings: Mapping[str, Any]
    source: str | None  # None: the user must say where the photos are


EXPERIMENTS = {
    "cub": Experiment("paper-cub", {}, None),
    "cars": Experiment("paper-cars", {}, None),
    # The paper's algorithm on the generated birds: the height has a meaning only there.
    "birds": Experiment(
        "demo",
        {
            "recipe": "paper",
            "prototype_dim": 256,
            "augment": "light",
            "cache_views": 3,
            "epochs": 30,
            "train_last_block": False,
            "lr_last_block": 2e-3,
            "weight_decay": 0.01,
            "milestones": (20, 25),
        },
        "birds",
    ),
}


@dataclass(frozen=True)
class Reproduction:
    """The tables that were written, and where."""

    folder: Path
    tables: tuple[Table, ...]


def reproduce(
    name: str,
    out: str | Path,
    *,
    heights: Sequence[int] = (),
    seeds: int = 5,
    data: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> Reproduction:
    """Reproduce the paper's tables for one data set; finished runs are skipped, interrupted ones resumed.

    Tables are written again after every run, so that you can read them during a long experiment; with `seeds=0` only
    the tables are written. Without `heights`: that of the paper's Tables 1–3, or the default for the number of classes.

    Examples:
        >>> reproduce("cub", "runs/cub", heights=[7, 8, 9], data="CUB_200_2011/").tables  # doctest: +SKIP
        (Table(title='Table 1', ...), ...)
    """
    if name not in EXPERIMENTS:
        raise ConfigError(f"expected one of {', '.join(EXPERIMENTS)} to reproduce, got {name!r}")
    folder, experiment, observer = Path(out), EXPERIMENTS[name], observer or Observer()
    source = data or experiment.source
    if source is None:
        raise ConfigError(f"the images of {name} do not come with this program; name their folder with --data")
    chosen = {**experiment.settings, **(settings or {})}
    n_classes = open_source(source, load_preset(experiment.preset).replace(chosen)).n_classes
    _check_same_experiment(folder, {"name": name, "data": str(source), "settings": _plain(chosen)})
    published = PUBLISHED.get(name, Published(default_height(n_classes), {}, {}, {}))
    heights = heights or (published.height,)
    pairs = [(height, seed) for height in heights for seed in range(seeds)]
    for number, (height, seed) in enumerate(pairs, start=1):
        run = folder / f"h{height}-s{seed}"
        text = f"run {number} of {len(pairs)}: height {height}, seed {seed}"
        if _is_finished(run):
            observer.stage(f"{text} is already done")
            continue
        observer.stage(text)
        here = {**chosen, "height": height, "seed": seed}
        fit(source, run, preset=experiment.preset, settings=here, resume=True, observer=observer)
        _write(name, folder, published, heights, n_classes)
    for height, runs in _runs(folder).items():
        _evaluate_ensembles(folder, height, [run.folder.name for run in runs], observer)
    return Reproduction(folder, _write(name, folder, published, heights, n_classes))


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Give settings as JSON reads them back; refuse unknown ones."""
    if fixed := {"height", "seed"} & set(settings):
        raise ConfigError(f"{fixed.pop()} cannot be a setting here: use --heights and --seeds")
    config = load_preset("paper-cub").replace(settings)
    values = {**config.values(), **config.recipe.values(), "recipe": config.recipe.name}
    return {key: json.loads(json.dumps(value)) for key, value in values.items() if key in settings}


def _check_same_experiment(folder: Path, experiment: dict[str, Any]) -> None:
    """Refuse a folder that holds another experiment, so that no table mixes two."""
    path = folder / "experiment.json"
    if not path.exists():
        io.make_folder(folder)
        io.write_json(path, experiment)
    elif (found := io.read_json(path)) != experiment:
        odd = next(key for key in experiment if found.get(key) != experiment[key])
        raise ConfigError(
            f"{folder} holds another experiment: {odd} is {found.get(odd)!r} there, {experiment[odd]!r} here; choose "
            "another folder"
        )


def _is_finished(folder: Path) -> bool:
    return (folder / RESULTS).exists()  # the last file that a run writes


def _runs(folder: Path) -> dict[int, list[Run]]:
    """Group the finished runs by height, in the order of their seeds."""
    found: dict[int, dict[int, Run]] = {}
    for path in folder.glob("h*-s*"):
        height, _, seed = path.name[1:].partition("-s")
        if height.isdigit() and seed.isdigit() and _is_finished(path):
            found.setdefault(int(height), {})[int(seed)] = Run(path)
    return {height: [runs[seed] for seed in sorted(runs)] for height, runs in sorted(found.items())}


def _evaluate_ensembles(folder: Path, height: int, names: list[str], observer: Observer) -> None:
    """Evaluate the ensembles of the runs of one height, unless that was done for the same runs."""
    if len(names) > 1 and _ensembles(folder, height)["runs"] != names:
        metrics = evaluate([folder / name for name in names], observer=observer).to_json()
        io.write_json(folder / f"ensemble-h{height}.json", {"runs": names, **metrics})


def _ensembles(folder: Path, height: int) -> dict[str, Any]:
    path = folder / f"ensemble-h{height}.json"
    return io.read_json(path) if path.exists() else {"runs": [], "ensembles": []}


def _write(name: str, folder: Path, published: Published, heights: Iterable[int], n_classes: int) -> tuple[Table, ...]:
    metrics = {height: [run.metrics for run in runs] for height, runs in _runs(folder).items()}
    ensembles = {height: _ensembles(folder, height)["ensembles"] for height in metrics}
    own, height = metrics.get(published.height, []), published.height
    tables = {
        "table1": _accuracy_table(published, own, ensembles.get(height, [])),
        "table2": _stages_table("Table 2: what pruning and projection change", [height], published, metrics),
        "tableS5" if name == "cars" else "table3": _strategy_table(name, published, own),
        "tableS4": _constraint_table(published, own),
        "tableS6": _stages_table(
            "Table S6: all heights", sorted({*heights, *metrics, *published.stages}), published, metrics
        ),
    }
    for file, table in tables.items():
        io.write_file(folder / f"{file}.csv", table.to_csv().encode())
    text = [f"# {name}: measured and published results", _HOW_TO_READ, *(t.to_markdown() for t in tables.values())]
    if plots.available():
        for file, figure in _figures(name, height, metrics, ensembles, n_classes).items():
            io.write_file(folder / file, plots.png(figure))
            text.append(f"![{file}]({file})\n")
    io.write_file(folder / "tables.md", "\n".join(text).encode())
    return tuple(tables.values())


_HOW_TO_READ = """
Accuracies in per cent of the test images, soft unless a strategy is named, mean ± sample standard deviation over the
runs. The standard deviation of distances is over prototypes, that of path lengths over images.
"""


def _accuracy_table(published: Published, runs: list[dict[str, Any]], ensembles: list[dict[str, Any]]) -> Table:
    accuracy = _mean_std([100 * run["stages"][PROJECTED]["accuracy"]["soft"] for run in runs], 1)
    prototypes = _mean_std([run["stages"][PROJECTED]["n_prototypes"] for run in runs], 1)
    tree = f"tree, h = {published.height}"
    rows = [(tree, accuracy, prototypes, str(len(runs)), *_known(published.ensembles.get(1), 2))]
    for size in ENSEMBLES:
        metrics = next((group for group in ensembles if group["n_trees"] == size), None)
        cells = (NOT_RUN, NOT_RUN, "0")
        if metrics:
            cells = (f"{100 * metrics['accuracy']['soft']:.1f}", str(metrics["n_prototypes"]), str(size))
        rows.append((f"ensemble of {size}", *cells, *_known(published.ensembles.get(size), 2)))
    header = ("method", "accuracy", "prototypes", "runs", "published accuracy", "published prototypes")
    return Table("Table 1: accuracy and size", header, tuple(rows))


def _stages_table(
    title: str, heights: Iterable[int], published: Published, runs: Mapping[int, list[dict[str, Any]]]
) -> Table:
    rows = []
    for height in heights:
        own = runs.get(height, [])
        accuracies = (
            _mean_std([100 * run["stages"][stage]["accuracy"]["soft"] for run in own], 3)
            for stage in (TRAINED, PRUNED, PROJECTED)
        )
        measured = (
            *accuracies,
            _mean_std([run["stages"][PROJECTED]["n_prototypes"] for run in own], 1),
            _mean_std([100 * statistics.fmean(run["pruning"]["pruned_fraction"] for run in own)] if own else [], 1),
            _pooled([distance for run in own for distance in run["projection"]["distances"]]),
        )
        rows.append((str(height), f"measured ({len(own)} runs)", *measured))
        if published.stages:
            rows.append((str(height), "published", *_known(published.stages.get(height), 6)))
    header = ("h", "", "initial", "pruned", "pruned + projected", "prototypes", "% pruned", "distance to patch")
    return Table(title, header, tuple(rows))


def _strategy_table(name: str, published: Published, runs: list[dict[str, Any]]) -> Table:
    own = [run["stages"][PROJECTED] for run in runs]
    rows = []
    for strategy in ("soft", "max_path", "greedy"):
        measured = [_mean_std([100 * run["accuracy"][strategy] for run in own], 2)]
        if strategy == "soft":
            measured += ["n.a.", "n.a."]
        else:
            measured.append(_mean_std([run["fidelity"][strategy] for run in own], 3))
            measured.append(_lengths([run["path_length"][strategy] for run in own]))
        rows.append((strategy.replace("_", "-"), *measured, *_known(published.strategies.get(strategy), 3)))
    columns = ("accuracy", "fidelity", "path length")
    header = ("strategy", *columns, *(f"published {column}" for column in columns))
    number = "Table S5" if name == "cars" else "Table 3"
    return Table(f"{number}: strategies, h = {published.height}, {len(own)} runs", header, tuple(rows))


def _constraint_table(published: Published, runs: list[dict[str, Any]]) -> Table:
    rows = []
    for stage, what in (
        (UNCONSTRAINED, "without class constraints (Eq. 6)"),
        (PROJECTED, "with class constraints (Eq. S1)"),
    ):
        accuracies = [100 * run["stages"][stage]["accuracy"]["soft"] for run in runs if stage in run["stages"]]
        rows.append((what, _mean_std(accuracies, 3), *_known((published.constraints.get(stage, NOT_PUBLISHED),), 1)))
    costs = [gap for run in runs if (gap := run["projection"]["class_constraint_gap"]) is not None]
    cost = f"{statistics.fmean(costs):.2e}" if costs else NOT_RUN
    rows.append(("mean extra distance with constraints", cost, "5.86e-05" if published.constraints else "–"))
    title = f"Table S4: projection with and without class constraints, h = {published.height}"
    return Table(title, ("projection", "measured", "published"), tuple(rows))


def _figures(
    name: str,
    height: int,
    runs: Mapping[int, list[dict[str, Any]]],
    votes: Mapping[int, list[dict[str, Any]]],
    n_classes: int,
) -> dict[str, Any]:
    accuracy = {h: [run["stages"][PROJECTED]["accuracy"]["soft"] for run in own] for h, own in runs.items()}
    last_votes = {h: found[-1]["accuracy"]["soft"] for h, found in votes.items() if found}
    enough = default_height(n_classes) - 1
    figures = {"heights.png": plots.accuracy_by_height(accuracy, last_votes, enough, f"{name}: accuracy by height")}
    if height in runs:
        maxima = runs[height][0]["stages"][TRAINED]["leaf_max_probs"]
        figures["leaf_max_probs.png"] = plots.leaf_max_probs(maxima, n_classes, f"{name}, h = {height}, first run")
    return figures


def _known(cells: Sequence[str] | None, count: int) -> tuple[str, ...]:
    return tuple(cells) if cells else (NOT_PUBLISHED,) * count


def _mean_std(values: Sequence[float | int], digits: int) -> str:
    """Mean ± sample standard deviation over the runs."""
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

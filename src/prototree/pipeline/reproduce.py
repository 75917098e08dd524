"""Reproduce the paper: train what is missing, decide its six claims, and write its tables beside the published ones."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from prototree import io
from prototree.config import Config, default_height, load_preset
from prototree.core.checkpoint import PROJECTED, TRAINED
from prototree.errors import ConfigError
from prototree.evaluation import plots
from prototree.evaluation.claims import Claim, claims_table, six_claims
from prototree.evaluation.published import PUBLISHED, Published, paper_tables
from prototree.evaluation.tables import Table
from prototree.pipeline.cost import GPU_RATE, Cost, cost_of
from prototree.pipeline.fit import evaluate, fit, open_source
from prototree.progress import Observer
from prototree.run import RESULTS, Run

Scale = Literal["small", "published", "tiny"]


@dataclass(frozen=True)
class Experiment:
    """How one data set is learned at one scale: settings, and how many runs of which heights."""

    preset: str
    settings: Mapping[str, Any]
    seeds: int  # runs of the height that all claims but one are about
    seeds_elsewhere: int  # runs of each other height; 0: of that height alone
    source: str | None = None  # None: the user must say where the images are


# Drawn with 128 pixels; they need a finer map.
_BIRDS = {"image_size": 128, "feature_level": -2, "augment": "light"}
_TINY = {"image_size": 64, "epochs": 3, "freeze_epochs": 2, "milestones": (), "cache_views": 1}
EXPERIMENTS: dict[str, dict[Scale, Experiment]] = {
    "cub": {
        "small": Experiment("paper-small", {}, 3, 1),
        "published": Experiment("paper-cub", {}, 5, 5),
        "tiny": Experiment("paper-small", _TINY, 1, 0),
    },
    "cars": {
        "small": Experiment("paper-small", {"augment": "cars", "prototype_dim": 128}, 3, 1),
        "published": Experiment("paper-cars", {}, 5, 5),
        "tiny": Experiment("paper-small", {"augment": "cars", **_TINY}, 1, 0),
    },
    "birds": {  # generated; the published figures beside theirs are those of CUB
        "small": Experiment("paper-small", _BIRDS, 3, 1, "birds"),
        "tiny": Experiment("paper-small", {**_BIRDS, **_TINY}, 1, 0, "birds"),
    },
}
_HEIGHTS = range(-1, 4)  # beside the first height with a leaf for each class


@dataclass(frozen=True)
class Plan:
    """Which runs there are to be: heights with their seeds, and the height that all claims but one are about."""

    height: int
    seeds: Mapping[int, int]

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        published_height: int | None,
        n_classes: int,
        heights: Sequence[int],
        seeds: int | None,
    ) -> "Plan":
        """Plan the heights given, with so many seeds each; without, the experiment's own."""
        height, first = published_height or default_height(n_classes), default_height(n_classes) - 1
        if heights:
            height = height if height in heights else max(heights)
            return cls(height, dict.fromkeys(heights, experiment.seeds if seeds is None else seeds))
        main = experiment.seeds if seeds is None else seeds
        others = {first + more: min(experiment.seeds_elsewhere, main) for more in _HEIGHTS if first + more > 0}
        wanted = {**others, height: main}
        return cls(height, {key: wanted[key] for key in sorted(wanted) if wanted[key] or key == height})

    @property
    def runs(self) -> list[tuple[int, int]]:
        """List height and seed of each run: those first that most claims are about."""
        order = sorted(self.seeds, key=lambda height: (height != self.height, height))
        return [(height, seed) for height in order for seed in range(self.seeds[height])]


@dataclass(frozen=True)
class Reproduction:
    """The claims and tables that were written, and where."""

    folder: Path
    claims: tuple[Claim, ...]
    tables: tuple[Table, ...]  # the claims first, then the paper's


def reproduce(
    name: str,
    out: str | Path,
    *,
    scale: Scale = "small",
    heights: Sequence[int] = (),
    seeds: int | None = None,
    data: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> Reproduction:
    """Reproduce the paper on one data set; finished runs are skipped, interrupted ones resumed.

    `scale` is small (two CPU cores), published (the paper's own values, for a GPU) or tiny (a trial whose figures mean
    nothing). Without `heights` and `seeds` they are those of the scale; with `seeds=0` only the tables are written.
    They are written again after every run, so that you can read them during a long experiment.

    Examples:
        >>> reproduce("cub", "runs/paper", data="CUB_50/").claims[0].verdict  # doctest: +SKIP
        'carries over'
    """
    experiment = _experiment(name, scale)
    folder, observer, source = Path(out), observer or Observer(), data or experiment.source
    if source is None:
        raise ConfigError(f"the images of {name} do not come with this program; name their folder with --data")
    chosen = {**experiment.settings, **(settings or {})}
    if fixed := {"height", "seed", "baseline"} & set(settings or {}):
        raise ConfigError(f"{min(fixed)} cannot be a setting here; expected --heights, --seeds and --scale")
    config = load_preset(experiment.preset).replace(chosen)
    n_classes, published = open_source(source, config).n_classes, PUBLISHED[name if name in PUBLISHED else "cub"]
    plan = Plan.of(experiment, published.height if scale == "published" else None, n_classes, heights, seeds)
    _check_same_experiment(
        folder, {"name": name, "scale": scale, "data": str(source), "settings": _plain(config, chosen)}
    )
    for number, (height, seed) in enumerate(plan.runs, start=1):
        run = folder / f"h{height}-s{seed}"
        text = f"run {number} of {len(plan.runs)}: height {height}, seed {seed}"
        if _is_finished(run):
            observer.stage(f"{text} is already done")
            continue
        observer.stage(text)
        here = {**chosen, "height": height, "seed": seed, "baseline": height == plan.height}
        fit(source, run, preset=experiment.preset, settings=here, resume=True, observer=observer)
        _write(name, folder, published, plan.height, n_classes)
    for height, runs in _runs(folder).items():
        _evaluate_ensembles(folder, height, [run.folder.name for run in runs], observer)
    return _write(name, folder, published, plan.height, n_classes)


def _experiment(name: str, scale: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise ConfigError(f"expected one of {', '.join(EXPERIMENTS)} to reproduce, got {name!r}")
    if scale not in get_args(Scale):
        raise ConfigError(f"expected one of {', '.join(get_args(Scale))} for --scale, got {scale!r}")
    scales: Mapping[str, Experiment] = EXPERIMENTS[name]  # type: ignore[assignment]
    if scale not in scales:
        raise ConfigError(f"the paper has no {name}: expected --scale {' or '.join(scales)}, got {scale!r}")
    return scales[scale]


def _plain(config: Config, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Give settings as JSON reads them back."""
    values = {**config.values(), **config.recipe.values()}
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
    return io.read_json(path) if path.exists() else {"runs": [], "alone": [], "ensembles": []}


def _write(name: str, folder: Path, published: Published, height: int, n_classes: int) -> Reproduction:
    """Write claims and tables as Markdown, JSON and CSV from the runs that are finished."""
    runs = _runs(folder)
    metrics = {h: [run.metrics for run in own] for h, own in runs.items()}
    ensembles = {h: _ensembles(folder, h) for h in metrics}
    ensemble = ensembles.get(height, {"alone": [], "ensembles": []})
    claims = six_claims(published, metrics, ensemble, height, n_classes)
    n_runs = len(metrics.get(height, []))
    tables = {
        "claims": claims_table(
            claims, f"The paper's claims on {name}: {n_classes} classes, h = {height}, {n_runs} runs"
        ),
        **paper_tables(published, metrics, ensemble["ensembles"], height),
    }
    for file, table in tables.items():
        io.write_file(folder / f"{file}.csv", table.to_csv().encode())
    cost = _published_cost(name, [run for own in runs.values() for run in own])
    text = [f"# The paper on {name}: measured and published", _HOW_TO_READ, *(t.to_markdown() for t in tables.values())]
    text.append(_cost_text(cost))
    if plots.available():
        for file, figure in _figures(name, height, metrics, ensembles, n_classes).items():
            io.write_file(folder / file, plots.png(figure))
            text.append(f"![{file}]({file})\n")
    io.write_file(folder / "paper.md", "\n".join(text).encode())
    content = {
        "height": height,
        "runs": {str(h): [run.folder.name for run in own] for h, own in runs.items()},
        "claims": [claim.to_json() for claim in claims],
        "published_scale": {**dataclasses.asdict(cost), "gpu_hours": cost.gpu_hours, "hours_here": cost.hours_here},
    }
    io.write_json(folder / "paper.json", content)
    return Reproduction(folder, claims, tuple(tables.values()))


_HOW_TO_READ = """
Accuracies in per cent of the test images, soft unless a strategy is named, mean ± sample standard deviation over the
runs. The standard deviation of distances is over prototypes, that of path lengths over images. A claim carries over if
all of its figures lie within the limits of the rule, and does not as soon as one lies outside.
"""


def _published_cost(name: str, runs: Sequence[Run]) -> Cost:
    """Estimate the whole experiment at the published scale: every height and seed, and a classifier for each seed."""
    name = name if name in PUBLISHED else "cub"
    experiment, published = EXPERIMENTS[name]["published"], PUBLISHED[name]
    n_trees = len(_HEIGHTS) * experiment.seeds
    config = load_preset(experiment.preset).replace(experiment.settings)
    return cost_of(config, published.n_views, n_trees + experiment.seeds, runs)


def _cost_text(cost: Cost) -> str:
    here = "No step with everything learning has been measured here."
    if cost.measured_rate is not None:
        here = f"Measured steps here did {cost.measured_rate / 1e9:,.0f} GFLOP/s: {cost.hours_here:,.0f} hours."
    return (
        "**Cost of the published scale**, all heights and seeds with a classifier for each seed: "
        f"{cost.operations / 1e18:.1f}·10¹⁸ floating-point operations of the network, a frozen epoch counted as a "
        f"third. {here} A GPU that sustains {GPU_RATE / 1e12:.0f} TFLOP/s in such steps, which is an assumption: "
        f"{cost.gpu_hours:,.0f} hours.\n"
    )


def _figures(
    name: str,
    height: int,
    runs: Mapping[int, list[dict[str, Any]]],
    ensembles: Mapping[int, Mapping[str, Any]],
    n_classes: int,
) -> dict[str, Any]:
    accuracy = {h: [run["stages"][PROJECTED]["accuracy"]["soft"] for run in own] for h, own in runs.items()}
    groups = {h: found["ensembles"] for h, found in ensembles.items()}
    together = {h: found[-1]["accuracy"]["soft"] for h, found in groups.items() if found}
    enough = default_height(n_classes) - 1
    figures = {"heights.png": plots.accuracy_by_height(accuracy, together, enough, f"{name}: accuracy by height")}
    if height in runs:
        maxima = runs[height][0]["stages"][TRAINED]["leaf_max_probs"]
        figures["leaf_max_probs.png"] = plots.leaf_max_probs(maxima, n_classes, f"{name}, h = {height}, first run")
    return figures

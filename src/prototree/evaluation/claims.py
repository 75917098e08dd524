"""The paper's six claims, each decided by a rule from the metrics of runs.

A claim is a few figures, each with a published value and limits. It carries over if all of its figures were measured
and lie within their limits, and does not as soon as one lies outside. A figure that has not been measured is never
guessed: until it is, the claim is not run. Runs are given as the content of their metrics.json, by height.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, Literal

from prototree.config import default_height
from prototree.core.checkpoint import PROJECTED, PRUNED, TRAINED
from prototree.evaluation.published import NOT_RUN, Published, Runs, mean_std
from prototree.evaluation.tables import Table

_PURE = 0.9  # largest probability of a leaf from which it is nearly pure; up to the pruning threshold, nearly uniform
_NOTHING = 0.5  # points that count as none
_RISE, _SPREAD = 5.0, 3.0  # points: of the first height with enough leaves, and among those from it on
_MOST, _ABOUT_ONE = 50.0, (0.7, 1.5)  # per cent of the prototypes that are pruned; prototypes of a class that are left
_NEAR = 0.02  # ten times the published distance to the nearest patch
_LEAVES, _FIDELITY = 90.0, {"max_path": 0.99, "greedy": 0.97}
_GAIN = 2.0  # points of an ensemble: about half of what is published

Verdict = Literal["carries over", "does not", "not run"]


@dataclass(frozen=True)
class Figure:
    """One figure of a claim; None where it has not been measured. An optional one need not be."""

    name: str
    published: str
    measured: float | None
    low: float = -inf
    high: float = inf
    digits: int = 1
    note: str = ""
    optional: bool = False

    @property
    def holds(self) -> bool | None:
        return None if self.measured is None else self.low <= self.measured <= self.high

    @property
    def rule(self) -> str:
        """State the limits."""
        if self.low == -inf:
            return f"{self.name}: at most {self.high:g}"
        return f"{self.name}: {f'at least {self.low:g}' if self.high == inf else f'{self.low:g} to {self.high:g}'}"

    @property
    def cell(self) -> str:
        """Write what was measured; a figure outside of its limits says so."""
        if self.measured is None:
            return f"{self.name}: {NOT_RUN}"
        outside = "" if self.holds else ", outside"
        return f"{self.name}: {self.measured:.{self.digits}f}{f' ({self.note})' if self.note else ''}{outside}"


@dataclass(frozen=True)
class Claim:
    """What the paper says, the figures that show it, and whether it carries over."""

    text: str
    figures: tuple[Figure, ...]

    @property
    def verdict(self) -> Verdict:
        if any(figure.holds is False for figure in self.figures):
            return "does not"
        return "not run" if any(f.holds is None and not f.optional for f in self.figures) else "carries over"

    @property
    def row(self) -> tuple[str, ...]:
        published = "; ".join(f"{figure.name}: {figure.published}" for figure in self.figures)
        measured = "; ".join(figure.cell for figure in self.figures)
        is_run = any(figure.measured is not None for figure in self.figures)
        rule = "; ".join(figure.rule for figure in self.figures)
        return (self.text, published, measured if is_run else NOT_RUN, rule, self.verdict)

    def to_json(self) -> dict[str, Any]:
        """Give the claim as JSON, which has no infinity: a limit that is none is null."""
        figures = [
            {key: None if value in (inf, -inf) else value for key, value in asdict(figure).items()}
            | {"rule": figure.rule}
            for figure in self.figures
        ]
        return {"claim": self.text, "verdict": self.verdict, "figures": figures}


def six_claims(
    published: Published, runs: Runs, ensemble: Mapping[str, Any], height: int, n_classes: int
) -> tuple[Claim, ...]:
    """Decide the six claims for trees of one height, and of the others for the second; `ensemble` is of that height."""
    own = runs.get(height, [])
    return (
        _accuracy(published, own),
        _height(published, runs, default_height(n_classes) - 1),
        _pruning(published, own, n_classes),
        _projection(published, own),
        _leaves(published, own),
        _ensembles(published, ensemble),
    )


def claims_table(claims: Sequence[Claim], title: str) -> Table:
    """Tabulate the claims, one to a row."""
    return Table(title, ("claim", "published", "measured", "rule", "verdict"), tuple(claim.row for claim in claims))


Metric = Callable[[Mapping[str, Any]], float]


def _mean(runs: Sequence[Mapping[str, Any]], metric: Metric) -> float | None:
    return statistics.fmean(map(metric, runs)) if runs else None


def _points(stage: str) -> Metric:
    return lambda run: 100 * float(run["stages"][stage]["accuracy"]["soft"])


def _cost(before: str, after: str) -> Metric:
    return lambda run: _points(before)(run) - _points(after)(run)


def _accuracy(published: Published, runs: Sequence[Mapping[str, Any]]) -> Claim:
    beside = [run for run in runs if run.get("baseline_accuracy") is not None]
    baselines = [100 * run["baseline_accuracy"] for run in beside]
    trees = [_points(PROJECTED)(run) for run in beside]
    cost = statistics.fmean(baselines) - statistics.fmean(trees) if beside else None
    note = f"{mean_std(trees, 1)} against {mean_std(baselines, 1)}"
    tree = published.strategies["soft"][0].split()[0]
    text = "The tree is about as accurate as the same network fine-tuned as a classifier"
    figure = f"{tree} against {published.classifiers}"
    return Claim(text, (Figure("cost of the tree, points", figure, cost, high=published.max_tree_cost, note=note),))


def _height(published: Published, runs: Runs, enough: int) -> Claim:
    """`enough` is the first height with a leaf for each class."""
    means = {height: statistics.fmean(map(_points(PROJECTED), own)) for height, own in runs.items() if own}
    below, above = ({h: means[h] for h in sorted(means) if (h < enough) == low} for low in (True, False))
    rise = means[enough] - below[max(below)] if below and enough in means else None
    spread = max(above.values()) - min(above.values()) if len(above) > 1 else None
    note = ", ".join(f"h = {height}: {mean:.1f}" for height, mean in sorted(means.items()))
    theirs = {height: float(cells[2].split()[0]) for height, cells in sorted(published.stages.items())}
    first, *others = theirs.values()  # of both data sets, the second height is the first with enough leaves
    figures = (
        Figure("rise to the first such height, points", f"{others[0] - first:.1f}", rise, low=_RISE, note=note),
        Figure("spread from there on, points", f"{max(others) - min(others):.1f}", spread, high=_SPREAD),
    )
    return Claim("Accuracy rises until there is a leaf for each class, and then stays", figures)


def _pruning(published: Published, runs: Sequence[Mapping[str, Any]], n_classes: int) -> Claim:
    initial, pruned, _, n_prototypes, removed, _ = published.stages[published.height]
    per_class = _mean(runs, lambda run: run["stages"][PRUNED]["n_prototypes"] / n_classes)
    low, high = _ABOUT_ONE
    ratio = float(n_prototypes.split()[0]) / published.n_classes
    figures = (
        Figure("pruned, %", removed, _mean(runs, lambda run: 100 * run["pruning"]["pruned_fraction"]), low=_MOST),
        Figure("prototypes of a class left", f"{ratio:.2f}", per_class, low, high, digits=2),
        Figure(
            "cost, points", _difference(initial, pruned), _mean(runs, _cost(TRAINED, PRUNED)), high=_NOTHING, digits=2
        ),
    )
    return Claim("Pruning removes most prototypes, leaves about one for each class, and costs nothing", figures)


def _projection(published: Published, runs: Sequence[Mapping[str, Any]]) -> Claim:
    _, pruned, projected, _, _, distance = published.stages[published.height]
    distances = [value for run in runs for value in run["projection"]["distances"]]
    median = statistics.median(distances) if distances else None
    note = f"mean {statistics.fmean(distances):.4f}" if distances else ""
    cost = _mean(runs, _cost(PRUNED, PROJECTED))
    figures = (
        Figure("cost, points", _difference(pruned, projected), cost, high=_NOTHING, digits=2),
        Figure("median distance", f"mean {distance.split()[0]}", median, high=_NEAR, digits=4, note=note),
    )
    return Claim("Prototypes lie so near to training patches that projection costs nothing", figures)


def _leaves(published: Published, runs: Sequence[Mapping[str, Any]]) -> Claim:
    def decided(run: Mapping[str, Any]) -> float:
        maxima, uniform = run["stages"][TRAINED]["leaf_max_probs"], run["pruning"]["threshold"]
        return 100 * statistics.fmean(value >= _PURE or value <= uniform for value in maxima)

    fidelities = (
        Figure(
            f"fidelity of {strategy.replace('_', '-')}",
            published.strategies[strategy][1].split()[0],
            _mean(runs, lambda run, key=strategy: run["stages"][PROJECTED]["fidelity"][key]),  # type: ignore[misc]
            low=low,
            digits=3,
        )
        for strategy, low in _FIDELITY.items()
    )
    figure = Figure("such leaves, %", "almost all", _mean(runs, decided), low=_LEAVES)
    return Claim("Leaves are nearly pure or nearly uniform, so that a single path decides", (figure, *fidelities))


def _ensembles(published: Published, ensemble: Mapping[str, Any]) -> Claim:
    figures = []
    for size, (accuracy, _) in published.ensembles.items():
        if size == 1:
            alone = float(accuracy.split()[0])
            continue
        groups = {group["n_trees"]: group for group in ensemble.get("ensembles", [])}
        gain = None
        if size in groups:
            singles = [tree["accuracy"]["soft"] for tree in ensemble["alone"][:size]]
            gain = 100 * (groups[size]["accuracy"]["soft"] - statistics.fmean(singles))
        text = f"{float(accuracy) - alone:.1f}"
        figures.append(Figure(f"gain of {size}, points", text, gain, low=_GAIN, optional=size > 3))
    return Claim("Ensembles of 3 and 5 trees gain several points", tuple(figures))


def _difference(before: str, after: str) -> str:
    return f"{float(before.split()[0]) - float(after.split()[0]):.3f}"

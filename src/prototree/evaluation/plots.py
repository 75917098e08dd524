"""Plots of results. They need matplotlib, which is in the extra `plot`."""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from prototree.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREY = "#0072b2", "#d55e00", "#767676"  # told apart by colour-blind people
_MAX_PIXELS = 1000  # of a side of a confusion matrix
_NAMED_CLASSES = 60  # with more, names in a confusion matrix cannot be read


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def leaf_max_probs(maxima: Sequence[float], n_classes: int, title: str) -> "Figure":
    """Plot the supplement's histogram: the largest class probability of every leaf."""
    figure, axes = _canvas(6.0, 3.6)
    axes.hist(maxima, bins=[i / 40 for i in range(41)], color=_BLUE)
    axes.axvline(1 / n_classes, color=_ORANGE, linestyle=":", label=f"uniform, 1/{n_classes}")
    axes.set(xlabel="largest class probability of a leaf", ylabel="leaves", title=title, xlim=(0, 1))
    axes.legend(frameon=False, loc="upper right")  # a place of its own choosing would depend on time
    return figure


def confusion(pairs: Iterable[tuple[int, int, int]], class_names: Sequence[str], title: str) -> "Figure":
    """Plot the confusion matrix from label, prediction and number of images; of many classes, several share a pixel."""
    side = min(max(4.5, 0.2 * len(class_names) + 2.5), 14.0)
    figure, axes = _canvas(side, side)
    n_pixels = min(len(class_names), _MAX_PIXELS)
    counts = np.zeros((n_pixels, n_pixels))
    for label, predicted, count in pairs:
        counts[label * n_pixels // len(class_names), predicted * n_pixels // len(class_names)] += count
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    extent = (-0.5, len(class_names) - 0.5, len(class_names) - 0.5, -0.5)
    picture = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, extent=extent)
    figure.colorbar(picture, ax=axes, fraction=0.04, label="share of the true class")
    if len(class_names) <= _NAMED_CLASSES:
        ticks = range(len(class_names))
        plain = [name.replace("$", r"\$") for name in class_names]  # not mathematics
        axes.set_xticks(ticks, plain, rotation=90, fontsize=7)
        axes.set_yticks(ticks, plain, fontsize=7)
    axes.set(xlabel="predicted", ylabel="true", title=title)
    return figure


def accuracy_by_height(
    trees: Mapping[int, Sequence[float]], ensembles: Mapping[int, float], enough_leaves: int, title: str
) -> "Figure":
    """Plot the figure of §6.2: accuracy of the trees of each height, and of the ensemble of all of them."""
    figure, axes = _canvas(6.0, 3.8)
    for height, values in trees.items():
        axes.plot([height] * len(values), [100 * value for value in values], "o", color=_BLUE, alpha=0.35)
    means = {height: 100 * sum(values) / len(values) for height, values in trees.items() if values}
    axes.plot(list(means), list(means.values()), color=_BLUE, marker="_", markersize=14, label="tree, mean of its runs")
    if ensembles:
        values = [100 * value for value in ensembles.values()]
        axes.plot(list(ensembles), values, color=_ORANGE, marker="s", label="ensemble of these runs")
    axes.axvline(enough_leaves, color=_GREY, linestyle=":", label="first height with a leaf for each class")
    axes.set(xlabel="height", ylabel="top-1 accuracy, %", title=title)
    axes.set_xticks(sorted(trees))
    axes.legend(frameon=False, loc="lower right")
    return figure


def png(figure: "Figure") -> bytes:
    """Encode a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _canvas(width: float, height: float) -> "tuple[Figure, Axes]":
    if not available():
        raise MissingExtraError("matplotlib", "plot")
    from matplotlib.figure import Figure  # no pyplot: no window, no global state

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes

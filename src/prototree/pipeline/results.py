"""A run's numbers for people: tables in `results.md`, and plots where matplotlib is installed."""

from collections.abc import Sequence

from prototree.evaluation import plots
from prototree.evaluation.tables import (
    blame_table,
    class_table,
    confusion_pairs,
    detail_table,
    mistake_table,
    stage_table,
    yardstick_words,
)
from prototree.files import make_folder, read_json, write_file
from prototree.run import MISTAKES, Run


def write_results(run: Run, stages: Sequence[str]) -> None:
    """Of the stages that were evaluated, the last one in detail."""
    metrics, folder = run.metrics, run.folder
    mistakes = read_json(folder / MISTAKES)
    tables = [
        stage_table(metrics, folder.name),
        detail_table(metrics),
        class_table(metrics, stages[-1]),
        blame_table(mistakes),
        mistake_table(mistakes, metrics["classes"]),
    ]
    first, *others = (table.to_markdown() for table in tables)
    words = yardstick_words(metrics)
    parts = [first, *([f"{words}\n"] if words else []), *others]
    write_file(folder / "results.md", "\n".join(parts).encode())
    if not plots.available():
        return
    make_folder(folder / "plots")
    for stage in stages:
        values, title = metrics["stages"][stage], f"{folder.name}, {stage}"
        leaves = plots.leaf_maxima(values["leaf_maxima"], len(metrics["classes"]), title)
        write_file(folder / "plots" / f"leaf_maxima_{stage}.png", plots.png(leaves))
    matrix = plots.confusion(confusion_pairs(metrics, stages[-1]), metrics["classes"], title)
    write_file(folder / "plots" / "confusion.png", plots.png(matrix))

"""A run's numbers for people: tables in `results.md`, and plots where matplotlib is installed."""

from prototree.core.checkpoint import STAGES
from prototree.evaluation import plots
from prototree.evaluation.part_tables import part_table, part_words
from prototree.evaluation.tables import (
    baseline_text,
    blame_table,
    class_table,
    confusion_pairs,
    detail_table,
    mistake_table,
    ood_table,
    stage_table,
)
from prototree.files import make_folder, read_json, write_file
from prototree.run import ERRORS, RESULTS, Run


def write_results(run: Run) -> None:
    """Of the stages that were evaluated, the last one in detail; nothing before the first evaluation."""
    metrics, folder = run.metrics, run.folder
    stages = [stage for stage in reversed(STAGES) if stage in metrics.get("stages", {})]
    if not stages or not (folder / ERRORS).exists():
        return
    mistakes = read_json(folder / ERRORS)
    tables = [
        stage_table(metrics, folder.name),
        detail_table(metrics),
        *([ood_table(metrics["ood"])] if "ood" in metrics else []),
        class_table(metrics, stages[-1]),
        blame_table(mistakes),
        mistake_table(mistakes, metrics["classes"]),
    ]
    first, *others = (table.to_markdown() for table in tables)
    parts = run.part_figures(run.tree()) if "parts" in metrics else {}
    words = [f"{said}\n" for said in (baseline_text(metrics), part_words(parts)) if said]
    beside = [part_table(parts).to_markdown()] if parts else []
    write_file(folder / RESULTS, "\n".join([first, *words, *beside, *others]).encode())
    if not plots.available():
        return
    make_folder(folder / "plots")
    for stage in stages:
        values, title = metrics["stages"][stage], f"{folder.name}, {stage}"
        leaves = plots.leaf_max_probs(values["leaf_max_probs"], len(metrics["classes"]), title)
        write_file(folder / "plots" / f"leaf_max_probs_{stage}.png", plots.png(leaves))
    matrix = plots.confusion(confusion_pairs(metrics, stages[-1]), metrics["classes"], title)
    write_file(folder / "plots" / "confusion.png", plots.png(matrix))

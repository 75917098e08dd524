"""Results as tables, for a terminal, a document or a spreadsheet."""

import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LAST_FIRST = ("projected", "pruned", "trained")
_TURNS = {True: "right", False: "left"}
_WRONG_TURNS = {  # right, left; by what the nodes ask
    "presence": ("found what is not there", "missed what is there"),
    "pairwise": ("wrongly nearer to the right patch", "wrongly nearer to the left patch"),
}


@dataclass(frozen=True)
class Table:
    """A title, a header and rows of text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_markdown(self) -> str:
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        body = "\n".join("| " + " | ".join(map(markdown, line)) + " |" for line in lines)
        return f"**{markdown(self.title)}**\n\n{body}\n"

    def to_csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.header, *self.rows])
        return text.getvalue()


def markdown(text: str) -> str:
    """Text as it is, whatever it would mean in Markdown or HTML: names of classes and files come from outside."""
    one_line = "".join(c if c.isprintable() else " " for c in text)
    escaped = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", one_line)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def confusion_pairs(metrics: Mapping[str, Any], stage: str) -> list[tuple[int, int, int]]:
    """True class, answer and number of photos, of each pair that occurs; metrics of version 1 have the whole matrix."""
    confusion = metrics["stages"][stage]["confusion"]
    if metrics.get("version", 1) > 1:
        return [(true, said, count) for true, said, count in confusion]
    return [(true, said, count) for true, row in enumerate(confusion) for said, count in enumerate(row) if count]


def percent(share: float, digits: int = 0) -> str:
    """A share as people write it, `98.3 %`. Without digits, only none is 0 % and only all is 100 %."""
    if digits == 0 and 0 < share < 0.01:
        return "<1 %"
    if digits == 0 and 0.99 < share < 1:
        return ">99 %"
    return f"{100 * share:.{digits}f} %"


def stage_name(stage: str) -> str:
    """What people are told that a stage is."""
    return {"projected_any_class": "projected onto patches of any class"}.get(stage, stage.replace("_", " "))


def stage_table(metrics: Mapping[str, Any], title: str) -> Table:
    """What a run reached, from the content of metrics.json; stages that agree in every figure share a row."""
    stages: dict[tuple[str, ...], list[str]] = {}
    for stage, values in metrics.get("stages", {}).items():
        accuracy, length = values["accuracy"], values["path_length"]["greedy"]
        figures = (
            *(percent(accuracy[strategy], 1) for strategy in ("soft", "max_path", "greedy")),
            str(values["n_prototypes"]),
            f"{length['mean']:.1f} ± {length['std']:.1f} ({length['min']}–{length['max']})",
        )
        stages.setdefault(figures, []).append(stage_name(stage))
    rows = tuple((", ".join(names), *figures) for figures, names in stages.items())
    return Table(title, ("stage", "soft", "max-path", "greedy", "prototypes", "questions asked"), rows)


def baseline_text(metrics: Mapping[str, Any]) -> str:
    """What reading the features as a tree costs, as a sentence; nothing where there was no classifier."""
    classifier, stages = metrics.get("classifier"), metrics.get("stages", {})
    if classifier is None or not stages:
        return ""
    accuracy = next(stages[stage] for stage in (*_LAST_FIRST, *stages) if stage in stages)["accuracy"]
    soft, greedy = (accuracy[strategy] for strategy in ("soft", "greedy"))
    has = f"The classifier without a tree has {percent(classifier, 1)}"
    if max(soft, greedy) > classifier:  # after few epochs, or by chance where there are few test photos
        return f"{has}; the tree has {percent(soft, 1)}, and on a single path {percent(greedy, 1)}."
    return (
        f"{has}; reading it as a tree costs {100 * (classifier - soft):.1f} points, "
        f"and following a single path {100 * (classifier - greedy):.1f}."
    )


def detail_table(metrics: Mapping[str, Any]) -> Table:
    """The same stages: how far the hard strategies follow the soft one, and how well probabilities are calibrated."""
    rows = tuple(
        (
            stage_name(stage),
            f"{values['fidelity']['max_path']:.3f}",
            f"{values['fidelity']['greedy']:.3f}",
            percent(values["top5"], 1),
            f"{values['ece']:.3f}",
            f"{values['confidence_ece']:.3f}" if "confidence_ece" in values else "–",
            percent(values["coverage"], 1) if "coverage" in values else "–",
            percent(values["selective_accuracy"], 1) if values.get("selective_accuracy") is not None else "–",
        )
        for stage, values in metrics["stages"].items()
    )
    header = (
        "stage",
        "fidelity of max-path",
        "fidelity of greedy",
        "top-5",
        "calibration error",
        "calibration error",
        "photos it answers",
        "of those right",
    )
    return Table("fidelity and calibration", header, rows)


def ood_table(found: Mapping[str, Any]) -> Table:
    """How photos of no known class are told from the test photos; from `ood` in metrics.json."""
    rows = tuple(
        (
            name,
            str(one["n_photos"]),
            *(f"{one['auroc'][score]:.3f}" for score in ("confidence", "distance", "both")),
            percent(one["accepted"], 1),
            percent(one["coverage"], 1),
        )
        for name, one in found.items()
    )
    header = (
        "photos of no known class",
        "number",
        "AUROC of confidence",
        "of distance",
        "of both",
        "accepted when 95 % of own photos are",
        "answered by this tree",
    )
    return Table("ood", header, rows)


def class_table(metrics: Mapping[str, Any], stage: str) -> Table:
    """Accuracy of each class, the hardest first, and what it is taken for most often."""
    names, values = metrics["classes"], metrics["stages"][stage]
    photos: Counter[int] = Counter()
    mixed_up: dict[int, tuple[int, int]] = {}  # the wrong answer given most often, and how often
    for true, said, count in confusion_pairs(metrics, stage):
        photos[true] += count
        if said != true and count > mixed_up.get(true, (0, 0))[1]:
            mixed_up[true] = (said, count)
    rows = []
    for label, share in enumerate(values["class_accuracy"]):
        if share is not None:
            said, most = mixed_up.get(label, (0, 0))
            words = f"{names[said]} ({most})" if most else "–"
            rows.append((share, (names[label], percent(share, 1), str(photos[label]), words)))
    rows.sort(key=lambda item: item[0])
    header = ("class", "accuracy", "test photos", "most often taken for")
    return Table(f"accuracy by class, {stage} tree, soft", header, tuple(row for _, row in rows))


def blame_table(mistakes: Mapping[str, Any]) -> Table:
    """The nodes at which wrong answers left the path of their true class; from the content of errors.json."""
    rows = tuple(
        (
            str(node["node"]),
            str(node["n_errors"]),
            str(node["n_goes_right"]),
            str(node["n_errors"] - node["n_goes_right"]),
            f"{node['mean_abs_margin']:.2f}",
        )
        for node in mistakes["nodes"]
    )
    wrong_turns = _WRONG_TURNS.get(mistakes.get("question", ""), ("went right", "went left"))
    header = ("node", "errors", *wrong_turns, "mean |probability − 0.5|")
    return Table("nodes with the most wrong turns", header, rows)


def mistake_table(mistakes: Mapping[str, Any], class_names: list[str]) -> Table:
    """The wrong answers, the closest decisions first: those that the smallest change would put right."""
    images = sorted(mistakes["images"], key=lambda one: float("inf") if one["margin"] is None else one["margin"])
    rows = tuple(
        (
            one["image"],
            class_names[one["label"]],
            class_names[one["answer"]],
            "no leaf has its class" if one["node"] is None else f"{one['node']}, {_TURNS[one['goes_right']]}",
            "–" if one["p_right"] is None else f"{one['p_right']:.3f}",
            "–" if one["margin"] is None else f"{one['margin']:.2f}",
        )
        for one in images
    )
    header = (
        "photo",
        "is",
        "taken for",
        "left its path at node",
        "p of right there",
        "lead in log-probability",
    )
    return Table(f"wrong answers ({mistakes['strategy'].replace('_', '-')})", header, rows)


def vote_table(metrics: Mapping[str, Any], names: Sequence[str]) -> Table:
    """Every tree of an ensemble alone, and the votes of the first 2, 3, … of them."""

    def row(name: str, vote: Mapping[str, Any]) -> tuple[str, ...]:
        return (
            name,
            *(percent(vote["accuracy"][s], 1) for s in ("soft", "max_path", "greedy")),
            percent(vote["top5"], 1),
            str(vote["n_prototypes"]),
            f"{vote['local_size']['max_path']:.1f}",
        )

    rows = [row(name, vote) for name, vote in zip(names, metrics["alone"], strict=True)]
    rows += [row(f"the first {vote['n_trees']} together", vote) for vote in metrics["votes"][1:]]
    header = ("trees", "soft", "max-path", "greedy", "top-5", "prototypes", "consulted for one photo")
    return Table(f"ensemble on {metrics['n_images']} test photos", header, tuple(rows))

"""Results as tables and sentences, from the content of metrics.json or errors.json or a part of it. No torch here."""

import csv
import io
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prototree.data.dataset import repeat_factors

TREE_COST, MEAN = "cost of the tree", "mean ± standard deviation"
_LAST_FIRST = ("projected", "pruned", "trained")
_MAIN = 0.5  # of the images: the part that a prototype lies on
_WRONG_TURNS = {  # right, left; by the kind of node
    "presence": ("found what is not there", "missed what is there"),
    "pairwise": ("wrongly nearer to the right patch", "wrongly nearer to the left patch"),
}
_METHODS = {"peak": "the box shown", "cell": "the nearest cell", "attribution": "attribution's box"}
_SPLITS = ("train", "test")
_STRATEGIES = ("soft", "max_path", "greedy")


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
    """Escape text for Markdown and HTML: names of classes and files come from outside."""
    line = "".join(c if c.isprintable() else " " for c in text)
    escaped = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", line)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def percent(fraction: float, digits: int = 0) -> str:
    """Write a fraction as `98.3 %`. Without digits, only none is 0 % and only all is 100 %."""
    if digits == 0 and 0 < fraction < 0.01:
        return "<1 %"
    if digits == 0 and 0.99 < fraction < 1:
        return ">99 %"
    return f"{100 * fraction:.{digits}f} %"


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def stage_name(stage: str) -> str:
    """Name a stage for people."""
    return {"projected_any_class": "projected onto patches of any class"}.get(stage, stage.replace("_", " "))


def confusion_pairs(metrics: Mapping[str, Any], stage: str) -> list[tuple[int, int, int]]:
    """List label, prediction and number of images of each pair that occurs."""
    return [(label, predicted, count) for label, predicted, count in metrics["stages"][stage]["confusion"]]


def stage_table(metrics: Mapping[str, Any], title: str) -> Table:
    """Tabulate the accuracy of each stage of a run; stages that agree in every number share a row."""
    stages: dict[tuple[str, ...], list[str]] = {}
    for stage, values in metrics.get("stages", {}).items():
        length = values["path_length"]["greedy"]
        numbers = (
            *(percent(values["accuracy"][strategy], 1) for strategy in _STRATEGIES),
            str(values["n_prototypes"]),
            f"{length['mean']:.1f} ± {length['std']:.1f} ({length['min']}–{length['max']})",
            tree_cost(metrics.get("baseline_accuracy"), values["accuracy"]),
        )
        stages.setdefault(numbers, []).append(stage_name(stage))
    rows = tuple((", ".join(names), *numbers) for numbers, names in stages.items())
    header = ("stage", "soft", "max-path", "greedy", "prototypes", "path length", TREE_COST)
    return Table(title, header, rows)


def tree_cost(baseline: float | None, accuracy: Mapping[str, float]) -> str:
    """Points lost from the baseline to all paths averaged, and from there to the single path: `1.6 + 1.4`."""
    if baseline is None:
        return "–"
    return f"{100 * (baseline - accuracy['soft']):.1f} + {100 * (accuracy['soft'] - accuracy['greedy']):.1f}"


def baseline_text(metrics: Mapping[str, Any]) -> str:
    """Compare the tree with its baseline in a sentence; nothing where there was no classifier."""
    baseline, stages = metrics.get("baseline_accuracy"), metrics.get("stages", {})
    if baseline is None or not stages:
        return ""
    accuracy = next(stages[stage] for stage in (*_LAST_FIRST, *stages) if stage in stages)["accuracy"]
    soft, greedy = accuracy["soft"], accuracy["greedy"]
    start = f"The classifier without a tree has {percent(baseline, 1)}"
    if max(soft, greedy) > baseline:  # after few epochs, or by chance where there are few test images
        return f"{start}; the tree has {percent(soft, 1)}, and on a single path {percent(greedy, 1)}."
    return (
        f"{start}; reading it as a tree costs {100 * (baseline - soft):.1f} points, "
        f"and following a single path {100 * (baseline - greedy):.1f}."
    )


def imbalance_text(metrics: Mapping[str, Any]) -> str:
    """Say how uneven the classes are and what was done about it; nothing where they are even."""
    counts = metrics.get("data", {}).get("train_per_class") or [1]
    factor = max(repeat_factors(counts))
    if factor == 1:
        return ""
    done = (
        f"images of rare classes were seen up to {factor} times in each epoch, √(largest class / own) times"
        if metrics["data"].get("oversampled")
        else "every image was seen once in each epoch"
    )
    return f"Classes have {min(counts)} to {max(counts)} training images: {done}."


def detail_table(metrics: Mapping[str, Any]) -> Table:
    """Tabulate the fidelity of the hard strategies to the soft one, and calibration, by stage."""
    rows = tuple(
        (
            stage_name(stage),
            *(_number(values["fidelity"][strategy], 3) for strategy in ("max_path", "greedy")),
            percent(values["top5"], 1),
            _number(values["ece"], 3),
            _number(values["confidence_ece"], 3),
            percent(values["coverage"], 1),
            "–" if values["selective_accuracy"] is None else percent(values["selective_accuracy"], 1),
        )
        for stage, values in metrics["stages"].items()
    )
    fidelity = ("fidelity of max-path", "fidelity of greedy")
    header = ("stage", *fidelity, "top-5", "ECE", "ECE of the confidence", "coverage", "selective accuracy")
    return Table("fidelity and calibration", header, rows)


def ood_table(sets: Mapping[str, Any]) -> Table:
    """Tabulate how images of no known class are told from the test images; from `ood` in metrics.json."""
    rows = tuple(
        (
            name,
            str(values["n_images"]),
            *(_number(values["auroc"][score], 3) for score in ("confidence", "distance", "both")),
            percent(values["fpr_at_95_tpr"], 1),
            percent(values["coverage"], 1),
        )
        for name, values in sets.items()
    )
    auroc = ("AUROC of confidence", "of distance", "of both")
    header = ("images of no known class", "number", *auroc, "FPR at 95 % TPR", "answered by this tree")
    return Table("out of distribution", header, rows)


def accuracy_table(title: str, pairs: Iterable[tuple[str, str, int]]) -> Table:
    """Tabulate the accuracy of each class, the hardest first, from labels, predictions and counts."""
    classes: dict[str, dict[str, int]] = {}
    for label, predicted, count in pairs:
        classes.setdefault(label, {})[predicted] = count
    rows = []
    for label, counts in classes.items():
        total, right = sum(counts.values()), counts.pop(label, 0)
        others = sorted(counts.items(), key=lambda item: -item[1])[:3]
        confused_with = ", ".join(f"{name} ({count})" for name, count in others) or "–"
        rows.append((right / total, (label, percent(right / total, 1), str(total), confused_with)))
    rows.sort(key=lambda row: row[0])
    return Table(title, ("class", "accuracy", "images", "taken for"), tuple(row for _, row in rows))


def class_table(metrics: Mapping[str, Any], stage: str) -> Table:
    """Tabulate the accuracy of each class on the greedy path after a stage."""
    names, pairs = metrics["classes"], confusion_pairs(metrics, stage)
    named = [(names[label], names[predicted], count) for label, predicted, count in pairs]
    return accuracy_table(f"accuracy by class, {stage} tree, greedy", named)


@dataclass
class LabelledAccuracy:
    """Accuracy of predictions beside the labels of a list; a prediction of None is an abstention."""

    class_names: Sequence[str]
    pairs: Counter[tuple[str, str | None]] = field(default_factory=Counter)  # label and prediction
    unknown: Counter[str] = field(default_factory=Counter)  # labels that the tree has no class for

    def add(self, label: str, prediction: str | None) -> None:
        if label in self.class_names:
            self.pairs[label, prediction] += 1
        else:
            self.unknown[label] += 1

    @property
    def n_images(self) -> int:
        return self.pairs.total()

    def words(self) -> list[str]:
        """Say the accuracy in sentences."""
        n_answers = sum(count for (_, prediction), count in self.pairs.items() if prediction is not None)
        n_right = sum(count for (label, prediction), count in self.pairs.items() if label == prediction)
        words = []
        if self.n_images:
            accuracy = f" ({percent(n_right / n_answers, 1)})" if n_answers else ""
            silent = self.n_images - n_answers
            abstained = f"; no answer for {silent} {'image' if silent == 1 else 'images'}" if silent else ""
            words.append(f"{n_right} of {n_answers} answers are right{accuracy}{abstained}")
        if self.unknown:
            names = [*map(repr, list(self.unknown)[:3]), *["…"] * (len(self.unknown) > 3)]
            words.append(f"images not counted: {self.unknown.total()} (the tree has no class {', '.join(names)})")
        return words

    def table(self) -> Table:
        """Tabulate the accuracy of each class, the hardest first, and what it is taken for."""
        pairs = [(label, predicted or "no answer", count) for (label, predicted), count in self.pairs.items()]
        return accuracy_table("what each class is taken for", pairs)


def node_error_table(errors: Mapping[str, Any]) -> Table:
    """Tabulate the nodes at which wrong predictions left the path of their true class; from errors.json."""
    rows = []
    for node in errors["nodes"]:
        n_errors, n_goes_right = node["n_errors"], node["n_goes_right"]
        counts = map(str, (node["node"], n_errors, n_goes_right, n_errors - n_goes_right))
        rows.append((*counts, _number(node["mean_abs_margin"])))
    header = ("node", "errors", *_WRONG_TURNS[errors["node_kind"]], "mean |p of right − 0.5|")
    return Table("nodes with the most errors", header, tuple(rows))


def image_error_table(errors: Mapping[str, Any], class_names: Sequence[str]) -> Table:
    """Tabulate wrong predictions, the closest decisions first: those that the smallest change would put right."""
    rows = []
    for image in sorted(errors["images"], key=lambda im: float("inf") if im["margin"] is None else im["margin"]):
        side = f"{image['node']}, {'right' if image['goes_right'] else 'left'}"
        left_at = "no leaf has its class" if image["node"] is None else side
        names = (class_names[image["label"]], class_names[image["prediction"]])
        rows.append((image["image"], *names, left_at, _number(image["p_right"], 3), _number(image["margin"])))
    header = ("image", "label", "prediction", "left its path at node", "p of right there", "margin")
    return Table(f"wrong predictions ({errors['strategy'].replace('_', '-')})", header, tuple(rows))


def ensemble_table(metrics: Mapping[str, Any], names: Sequence[str], baselines: Sequence[float | None] = ()) -> Table:
    """Tabulate every tree of an ensemble alone, their mean, and the first 2, 3, … of them together.

    `baselines` are the accuracies of the same networks without a tree, where the trees were tested on the same images.
    """

    def row(name: str, group: Mapping[str, Any], baseline: float | None = None) -> tuple[str, ...]:
        accuracy = (percent(group["accuracy"][strategy], 1) for strategy in _STRATEGIES)
        consulted = _number(group["mean_path_prototypes"]["max_path"], 1)
        cells = (name, *accuracy, percent(group["top5"], 1), str(group["n_prototypes"]), consulted)
        return (*cells, tree_cost(baseline, group["accuracy"]))

    alone = metrics["alone"]
    rows = [
        row(name, group, baseline)
        for name, group, baseline in zip(names, alone, baselines or [None] * len(names), strict=True)
    ]
    if len(alone) > 1:
        columns = [*([group["accuracy"][strategy] for group in alone] for strategy in _STRATEGIES)]
        columns.append([group["top5"] for group in alone])
        rows.append((MEAN, *map(mean_percent, columns), "–", "–", "–"))
    rows += [row(f"the first {group['n_trees']} together", group) for group in metrics["ensembles"][1:]]
    header = ("trees", "soft", "max-path", "greedy", "top-5", "prototypes", "on the paths of one image", TREE_COST)
    return Table(f"ensemble on {metrics['n_images']} test images", header, tuple(rows))


def mean_text(values: Sequence[float]) -> str:
    """Write mean ± standard deviation, with a decimal."""
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"


def mean_percent(values: Sequence[float]) -> str:
    """Write mean ± standard deviation of fractions in percent."""
    return f"{percent(statistics.fmean(values), 1)} ± {100 * statistics.stdev(values):.1f}"


def quality_text(quality: Mapping[str, Any]) -> str:
    """Say the prototype quality of a whole tree in one line; nothing where nothing was measured."""
    sentences = []
    if purity := quality.get("purity", {}).get("peak", {}).get("test"):
        sentences.append(f"in {_tenths(purity['mean'])} of 10 images the patch lies on the same part")
    if rates := quality.get("occlusion", {}).get("peak"):
        sentences.append(
            f"hiding it sends {_tenths(rates['flip_rate'])} of 10 images the other way "
            f"({_tenths(rates['random_flip_rate'])} of 10 if a random patch is hidden)"
        )
    return f"{'; '.join(sentences).capitalize()}." if sentences else ""


def prototype_text(quality: Mapping[str, Any]) -> list[str]:
    """Say the quality of one prototype, a sentence for each metric."""
    sentences = []
    if purity := quality.get("purity", {}).get("peak", {}).get("test"):
        part, shown = purity["part"], purity["n_images"]
        hits = f"In {round(purity['fraction'] * shown)} of the {shown} most similar test images that show the {part}"
        sentences.append(f"{hits}, this patch lies on it.")
    if same := quality.get("consistency", {}).get("peak", {}).get("test"):
        share = percent(same["fraction"])
        sentences.append(f"Of all test images that go this way, {share} have the {same['part']} in it.")
    if rates := quality.get("occlusion", {}).get("peak"):
        flips, chance = (round(rates[name] * rates["n_images"], 1) for name in ("flip_rate", "random_flip_rate"))
        sentences.append(
            f"Hiding it sends {flips:g} of {rates['n_images']} test images the other way, "
            f"hiding random patches of the same size {chance:g}."
        )
    return sentences


def main_part(quality: Mapping[str, Any]) -> str:
    """Name the part on which a prototype lies in at least half of its images; empty where there is none."""
    purity = quality.get("purity", {}).get("peak", {}).get("test")
    return str(purity["part"]) if purity and purity["fraction"] >= _MAIN else ""


def quality_table(quality: Mapping[str, Any]) -> Table:
    """Tabulate the prototype quality of a tree, a metric per row, on training and on test images."""

    def spread(values: Mapping[str, float] | None) -> str:
        if values is None:
            return "–"
        return f"{values['mean']:.2f} ± {values['std']:.2f}, over 0.5: {percent(values['part_related'])}"

    rows: list[tuple[str, ...]] = []
    for method, splits in quality["purity"].items():
        rows.append((f"part purity, {_METHODS[method]}", *(spread(splits.get(split)) for split in _SPLITS)))
    for key, name in (("random_patch", "a random patch on the object"), ("object_middle", "the object's middle")):
        if baselines := quality["baselines"]:
            values = (_number(baselines.get(split, {}).get(key)) for split in _SPLITS)
            rows.append((f"part purity of {name}", *values))
    for key, name in (("consistency", "consistency"), ("consistency_wide", "consistency, wide box")):
        for method, splits in quality[key].items():
            rows.append((f"{name}, {_METHODS[method]}", *(_number(splits.get(split)) for split in _SPLITS)))
    if quality["stability"] is not None:
        rows.append(("stability", "–", _number(quality["stability"])))
    for method, rates in quality["occlusion"].items():
        box = f"occlusion of {_METHODS[method]} (of random boxes)"
        for key, name in (("flip_rate", "flip rate"), ("loss_rate", "loss rate")):
            if rates[key] is not None:
                value, chance = percent(rates[key], 1), percent(rates[f"random_{key}"], 1)
                rows.append((f"{name}, {box}", "–", f"{value} ({chance})"))
        moved = f"{_number(rates['distance'])} → {_number(rates['distance_occluded'])}"
        rows.append((f"distance in radii, {box}", "–", f"{moved} ({_number(rates['random_distance_occluded'])})"))
    for method, boxes in quality["on_discriminative_part"].items():
        touching = f"{percent(boxes['touching'])} of {boxes['n_prototypes']} (by chance {percent(boxes['by_chance'])})"
        rows.append((f"on a part in which its two sides differ, {_METHODS[method]}", touching, "–"))
    return Table("prototype quality", ("metric", "training images", "test images"), tuple(rows))


def _tenths(fraction: float) -> str:
    """Write `7`, or `fewer than 1`, of ten."""
    return "fewer than 1" if 0 < fraction < 0.05 else f"{round(10 * fraction)}"

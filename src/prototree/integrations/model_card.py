"""The page that goes with a shared tree, written from the run: what it is, how good, how to use it, and its limits."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from prototree.core.confidence import Calibration
from prototree.core.model import ProtoTree
from prototree.errors import ConfigError
from prototree.evaluation.tables import percent

_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,40}")


def model_card(name: str, tree: ProtoTree, metrics: Mapping[str, Any], *, licence: str, picture: str | None) -> str:
    """A README for the hub. `picture` is the file beside it that shows the tree; `licence` one of the hub's names."""
    if not _LICENCE.fullmatch(licence):
        raise ConfigError(f"expected a licence by the hub's short name, such as mit or cc-by-4.0, got {licence!r}")
    return "\n".join(
        [
            *_head(licence),
            f"# {_plain(name)}",
            "",
            _what_it_is(tree),
            "",
            *([f"![The whole tree]({picture})", ""] if picture else []),
            "`rules.txt` has every path in words. The pictures of all prototypes are in `prototypes/`.",
            "",
            *_figures(tree, metrics),
            *_use(name),
            *_limits(tree, metrics),
            *_classes(tree.class_names),
            "## Licence",
            "",
            f"{licence}. The pictures of prototypes are cut from training photos, whose licences stay what they are.",
            "",
        ]
    )


def _head(licence: str) -> list[str]:
    tags = ["image-classification", "interpretability", "prototype-tree"]
    return [
        "---",
        f"license: {licence}",
        "library_name: prototree",
        "pipeline_tag: image-classification",
        "tags:",
        *(f"- {tag}" for tag in tags),
        "---",
        "",
    ]


def _what_it_is(tree: ProtoTree) -> str:
    asks = (
        "asks which of two patches of training photos an image is nearer to"
        if tree.question.kind == "pairwise"
        else "asks whether an image contains something like a patch of a training photo"
    )
    return (
        f"An image classifier that can be read in full: a prototype tree of {tree.topology.n_nodes} questions for "
        f"{tree.n_classes} classes. Each node {asks}, and every answer is one path from the root to a leaf. "
        f"The network below it is `{tree.features.backbone.name}` at {tree.preprocessing.size} pixels."
    )


def _figures(tree: ProtoTree, metrics: Mapping[str, Any]) -> list[str]:
    found = metrics.get("stages", {}).get("projected", {})
    if not found:
        return ["## Figures", "", "This tree has not been evaluated.", ""]
    accuracy, greedy = found["accuracy"], found["path_length"]["greedy"]
    rows = [
        ("accuracy of a single path", percent(accuracy["greedy"], 1), "one path is followed; its end is the answer"),
        ("accuracy of all leaves", percent(accuracy["soft"], 1), "every leaf votes with the probability of its path"),
        ("questions on a path", f"{greedy['mean']:.1f}", f"from {greedy['min']} to {greedy['max']}"),
        ("prototypes", str(found["n_prototypes"]), "patches of training photos, all of which you can look at"),
    ]
    if tree.calibration.n_photos and "confidence_ece" in found:
        meaning = "mean gap between the stated confidence and how often the answer is right"
        rows.append(("calibration error", percent(found["confidence_ece"], 1), meaning))
    return [
        "## Figures",
        "",
        f"Measured on {found['n_images']} test photos that it was not trained on.",
        "",
        "| figure | value | meaning |",
        "| --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def _use(name: str) -> list[str]:
    return [
        "## How to use it",
        "",
        "```python",
        "import prototree",
        "",
        f'tree = prototree.load("{name}")',
        'print(prototree.ask(tree, "photo.jpg"))',
        "```",
        "",
    ]


def _limits(tree: ProtoTree, metrics: Mapping[str, Any]) -> list[str]:
    count = metrics.get("data", {}).get("train")
    learnt = f"It was trained on {count} photos" if count else "It was trained on a limited set of photos"
    sure = (
        f"The confidence was fitted on {tree.calibration.n_photos} held-out photos of the same kind."
        if tree.calibration.n_photos
        else "The confidence was not fitted on held-out photos: it is not a probability of being right."
    )
    ood = (
        f"It always answers with one of its {tree.n_classes} classes, even if a photo shows none of them."
        if (tree.calibration.least, tree.calibration.farthest) == (Calibration.least, Calibration.farthest)
        else f"It knows {tree.n_classes} classes. A photo that shows none of them may still be answered with one: it "
        'says "I don\'t know" only if it is hardly sure or the photo is far from its prototypes.'
    )
    return [
        "## Limits",
        "",
        f"- {learnt}. On photos from other cameras, places or seasons it may do worse.",
        f"- {ood}",
        f"- {sure}",
        "- What looks alike to a person and what is near to the network are not always the same.",
        "",
    ]


def _classes(names: Sequence[str]) -> list[str]:
    return [f"## Classes ({len(names)})", "", ", ".join(_plain(name) for name in names), ""]


def _plain(name: str) -> str:
    """A name from outside as text that no markup is made of."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&$:-])", r"\\\1", " ".join(name.split()))

"""The model card of a tree, packed or on the hub: what it is, how good, how to use it, and its limits."""

import re
from collections.abc import Mapping
from typing import Any

from prototree.archive import SUFFIX
from prototree.core.checkpoint import STAGES
from prototree.core.confidence import Calibration
from prototree.core.model import ProtoTree
from prototree.errors import ConfigError
from prototree.evaluation.tables import markdown, percent
from prototree.run import notes_by_patch

_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,40}")
_MAX_CLASSES = 200


def model_card(
    name: str,
    tree: ProtoTree,
    metrics: Mapping[str, Any],
    *,
    license: str = "",  # noqa: A002
    picture: str | None = None,
    notes: Mapping[int, str] | None = None,
) -> str:
    """Write the model card in Markdown; with a `license` (the hub's short name) for the hub, else for a packed file.

    `picture` is the file beside it that shows the tree, and `notes` are the user's names of patches, by prototype.
    """
    if license and not _LICENSE.fullmatch(license):
        raise ConfigError(f"expected a license by the hub's short name, such as mit or cc-by-4.0, got {license!r}")
    more = f", and {tree.n_classes - _MAX_CLASSES} more in tree.json" if tree.n_classes > _MAX_CLASSES else ""
    sections = [
        f"# {_plain(name)}",
        _description(tree),
        f"![The whole tree]({picture})\n\n`rules.txt` has every path in words." if picture else "",
        f"## Named patches\n\n{_names(tree, notes)}" if notes else "",
        f"## Metrics\n\n{_metrics(tree, metrics)}",
        f"## How to use it\n\n{_usage(name, on_hub=bool(license))}",
        f"## Limits\n\n{_limits(tree, metrics)}",
        f"## Classes ({tree.n_classes})\n\n{', '.join(map(_plain, tree.class_names[:_MAX_CLASSES]))}{more}",
        f"## License\n\n{license}. The pictures of prototypes are cut from training images, whose licenses stay what "
        "they are." if license else "",
    ]  # fmt: skip
    header = (
        f"---\nlicense: {license}\nlibrary_name: prototree\npipeline_tag: image-classification\ntags:\n"
        "- image-classification\n- interpretability\n- prototype-tree\n---\n\n"
    )
    return (header if license else "") + "\n\n".join(filter(None, sections)) + "\n"


def _description(tree: ProtoTree) -> str:
    question = (
        "asks which of two patches of training images an image is nearer to"
        if tree.node_function.kind == "pairwise"
        else "asks whether an image contains something like a patch of a training image"
    )
    return (
        f"An image classifier that can be read in full: a prototype tree of {tree.topology.n_nodes} questions for "
        f"{tree.n_classes} classes. Each node {question}, and every prediction is one path from the root to a leaf. "
        f"The network below it is `{tree.features.backbone.name}` at {tree.preprocessing.size} pixels{_origin(tree)}."
    )


def _names(tree: ProtoTree, notes: Mapping[int, str]) -> str:
    """List the names that a person gave to patches; L and R are the sides of a question."""
    return "\n".join(f"- {patch}: {markdown(name)}" for patch, name in notes_by_patch(notes, tree).items())


def _metrics(tree: ProtoTree, metrics: Mapping[str, Any]) -> str:
    stages = metrics.get("stages", {})
    values: Mapping[str, Any] = next((stages[stage] for stage in STAGES if stage in stages), {})
    if not values:
        return "This tree has not been evaluated."
    accuracy, length = values["accuracy"], values["path_length"]["greedy"]
    rows = [
        ("accuracy of a single path", percent(accuracy["greedy"], 1), "one path is followed; its leaf predicts"),
        ("accuracy of all paths averaged", percent(accuracy["soft"], 1), "leaves weighted by the path probability"),
        ("questions on a path", f"{length['mean']:.1f}", f"from {length['min']} to {length['max']}"),
        ("prototypes", str(values["n_prototypes"]), "patches of training images, all of which you can look at"),
    ]
    if tree.calibration.n_images and "confidence_ece" in values:
        meaning = "mean gap between the confidence and how often the prediction is right"
        rows.append(("calibration error", percent(values["confidence_ece"], 1), meaning))
    table = "\n".join(f"| {' | '.join(row)} |" for row in [("metric", "value", "meaning"), ("---",) * 3, *rows])
    return f"Measured on {values['n_images']} test images that it was not trained on.\n\n{table}"


def _usage(name: str, *, on_hub: bool) -> str:
    if on_hub:
        code = f'tree = prototree.load("{name}")\nprint(prototree.predict(tree, "photo.jpg"))'
        return f"```python\nimport prototree\n\n{code}\n```"
    file = f"{name}{SUFFIX}"
    return (
        "```sh\npip install prototree  # from an index; in a clone of its repository: pip install .\n"
        f"prototree predict {file} photos/ --out predictions.csv\n"
        f"prototree explain {file} photo.jpg\nprototree report {file}\n```"
    )


def _limits(tree: ProtoTree, metrics: Mapping[str, Any]) -> str:
    count = metrics.get("data", {}).get("train")
    calibration = tree.calibration
    always = (calibration.min_confidence, calibration.max_ood_score) == (
        Calibration.min_confidence,
        Calibration.max_ood_score,
    )
    limits = [
        f"It was trained on {count or 'a limited set of'} images. On images from other cameras, places or seasons it "
        "may do worse.",
        f"It always predicts one of its {tree.n_classes} classes, even if an image shows none of them."
        if always
        else f"It knows {tree.n_classes} classes. An image that shows none of them may still be given one: it says "
        '"I don\'t know" only if its confidence is low or the image is far from its prototypes.',
        f"The confidence was fitted on {calibration.n_images} held-out images of the same kind."
        if calibration.n_images
        else "The confidence was not fitted on held-out images: it is not a probability of being right.",
        "What looks alike to a person and what is near to the network are not always the same.",
    ]
    return "\n".join(f"- {limit}" for limit in limits)


def _plain(name: str) -> str:
    """Escape a name from outside for Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&$:-])", r"\\\1", " ".join(name.split()))


def _origin(tree: ProtoTree) -> str:
    """Say what the network was trained on, where its weights come from, and under which licence."""
    origin = tree.features.backbone.origin
    parts = (("trained on", origin.trained_on), ("weights from", origin.source), ("licence", origin.licence))
    return "".join(f", {word} {markdown(text)}" for word, text in parts if text)

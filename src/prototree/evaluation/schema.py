"""What `metrics.json` and `errors.json` may say: checked when they are read, so that no table need doubt it.

They come with trees that others made. Keys that we do not know are left as they are; figures that an earlier version
did not have may be missing. No torch here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prototree.core.fields import (
    Check,
    Name,
    each_of,
    integer,
    list_of,
    number,
    one_of,
    part_of,
    perhaps,
    text,
    truth,
    wrong,
)
from prototree.core.strategies import HARD, STRATEGIES
from prototree.errors import CheckpointError
from prototree.files import expect_version, read_json

_MANY = 2**40


METRICS, METRICS_VERSION = "metrics.json", 2
"""1: the whole confusion matrix, where there are now only the pairs that occur."""


def read_metrics(folder: Path) -> dict[str, Any]:
    """The content of a run's metrics.json, empty where there is none.

    Figures that are none, and figures about classes that are not there, are refused.
    """
    path = folder / METRICS
    content = expect_version(read_json(path), METRICS_VERSION, path) if path.exists() else {}
    try:
        _METRICS(content, ())
        for stage, figures in content.get("stages", {}).items():
            _check_classes(figures, content, ("stages", stage))
    except CheckpointError as error:
        raise damaged(path, error) from error
    return content


def read_errors(path: Path, n_classes: int) -> dict[str, Any]:
    """The content of errors.json of a tree of so many classes."""
    found = read_json(path)
    try:
        _mistakes(n_classes)(found, ())
    except CheckpointError as error:
        raise damaged(path, error) from error
    return found


def damaged(path: Path, error: Exception) -> CheckpointError:
    """The error for a file of figures that says something else than it should."""
    return CheckpointError(
        f"{path} is damaged ({error}); restore it from a copy, or remove it and run "
        "prototree evaluate with --data PHOTOS"
    )


def _check_classes(figures: Mapping[str, Any], content: Mapping[str, Any], name: Name) -> None:
    """Figures by class and the confusion speak of the classes that are named."""
    n_classes = len(content.get("classes", ()))
    if "class_accuracy" in figures:
        list_of(_any, n_classes, n_classes)(figures["class_accuracy"], (*name, "class_accuracy"))
    confusion, label, count = figures.get("confusion", ()), integer(0, n_classes - 1), integer(0, _MANY)
    if content.get("version", 1) == 1:  # the whole matrix
        list_of(list_of(count, n_classes, n_classes), 0, n_classes)(list(confusion), (*name, "confusion"))
        return
    for place, row in enumerate(confusion):
        own = (*name, "confusion", place)
        list_of(_any, 3, 3)(row, own)
        label(row[0], own)
        label(row[1], own)
        count(row[2], own)


def _any(value: Any, name: Name) -> None:
    """Checked elsewhere, or not used."""


def _list(value: Any, name: Name) -> None:
    if not isinstance(value, list):
        raise wrong(name, "a list", value)


_SHARE = number(0.0, 1.0 + 1e-6)  # a mean of ones may round above
_COUNT = integer(0, _MANY)
_OBJECT = each_of(_any)
_LENGTHS = part_of({"mean": number(0.0), "std": number(0.0), "min": _COUNT, "max": _COUNT}, {})
_STAGE = part_of(
    {
        "n_images": _COUNT,
        "accuracy": part_of(dict.fromkeys(STRATEGIES, _SHARE), {}),
        "path_length": part_of(dict.fromkeys(HARD, _LENGTHS), {}),
        "n_prototypes": _COUNT,
    },
    {
        "fidelity": part_of(dict.fromkeys(HARD, _SHARE), {}),
        "top5": _SHARE,
        "ece": _SHARE,
        "confidence_ece": _SHARE,
        "mean_confidence": _SHARE,
        "coverage": _SHARE,
        "selective_accuracy": perhaps(_SHARE),
        "class_accuracy": list_of(perhaps(_SHARE), 0, _MANY),
        "confusion": _list,
        "n_leaves": _COUNT,
        "leaf_max_probs": list_of(_SHARE, 0, _MANY),
        "leaf_max_hist": list_of(_COUNT, 0, _MANY),
    },
)


def _by_place(check: Check) -> Check:
    """A figure for each way of finding patches and each split."""
    return each_of(each_of(check))


_PART = part_of({"part": text, "n_photos": _COUNT, "share": _SHARE}, {})
_HIDING = part_of(
    {"n_photos": _COUNT, "flip_rate": _SHARE, "random_flip_rate": _SHARE},
    {"n_in_radius": _COUNT, "lost": perhaps(_SHARE), "random_loss_rate": perhaps(_SHARE)},  # younger than the rest
)
_PARTS = part_of(
    {"tree": text},
    {
        "purity": _by_place(perhaps(part_of({"mean": _SHARE}, {}))),
        "hiding": each_of(_HIDING),
        "prototypes": list_of(
            part_of(
                {"prototype": _COUNT},
                {"purity": _by_place(_PART), "consistency": _by_place(_PART), "hiding": each_of(_HIDING)},
            ),
            0,
            _MANY,
        ),
    },
)
_METRICS = part_of(
    {},
    {
        "source": perhaps(text),
        "identity": _OBJECT,
        "seconds": each_of(number(0.0)),
        "data": part_of({"train": _COUNT}, {"kind": text, "test": _COUNT}),
        "classes": list_of(text, 0, _MANY),
        "stages": each_of(_STAGE),
        "classifier": perhaps(_SHARE),
        "pruning": _OBJECT,
        "projection": _OBJECT,
        "parts": _PARTS,
        "ood": each_of(_OBJECT),
    },
)


def _mistakes(n_classes: int) -> Check:
    label = integer(0, n_classes - 1)
    node = {"node": _COUNT, "n_errors": _COUNT, "n_goes_right": _COUNT, "mean_abs_margin": number()}
    image = {
        "image": text,
        "label": label,
        "answer": label,
        "node": perhaps(_COUNT),
        "goes_right": truth,
        "p_right": perhaps(_SHARE),
        "margin": perhaps(number()),
    }
    return part_of(
        {
            "strategy": one_of(*STRATEGIES),
            "nodes": list_of(part_of(node, {}), 0, _MANY),
            "images": list_of(part_of(image, {}), 0, _MANY),
        },
        {"question": one_of("presence", "pairwise")},  # older files do not say it
    )

"""Records of `metrics.json` and `errors.json`, and how these files are read. No torch here.

They may come with trees that others made: what makes no sense is refused when it is read; unknown keys stay.
"""

import json
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from prototree.core.topology import Strategy
from prototree.errors import CheckpointError
from prototree.io import expect_version, read_json

METRICS, METRICS_VERSION = "metrics.json", 1

Count = Annotated[int, Field(ge=0, le=2**40)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1 + 1e-6)]  # a mean of ones may round above
Split = Literal["train", "test"]
# What a box stands around: the peak of the similarity map, as pages show it, the nearest cell, or attribution.
Method = Literal["peak", "cell", "attribution"]
ByMethod = dict[Method, dict[Split, "PartFraction"]]


@dataclass(frozen=True)
class PathLengths:
    """Nodes on the path of one image (Table 3)."""

    mean: Positive
    std: Positive
    min: Count
    max: Count


@dataclass(frozen=True)
class Metrics:
    """Metrics of one tree on one data set.

    Attributes:
        n_images: Number of images.
        accuracy: By strategy.
        fidelity: Fraction of the images with the same prediction as soft, by strategy.
        path_length: Nodes on the path of one image, by strategy (Table 3).
        top5: Fraction of the images whose class is among the five most probable ones.
        ece: Expected calibration error of Eq. 4's probability of the soft prediction.
        confidence_ece: Expected calibration error of the confidence, for the greedy prediction.
        mean_confidence: Mean confidence of the greedy predictions.
        coverage: Fraction of the images that the tree does not abstain from.
        selective_accuracy: Accuracy of the greedy predictions for those; None if there are none.
        class_accuracy: Greedy accuracy of each class; None without test images.
        confusion: Label, greedy prediction and number of images, of the pairs that occur.
        n_prototypes: Number of prototypes.
        n_leaves: Number of leaves.
        leaf_max_probs: Largest class probability of each leaf.
        leaf_max_hist: Histogram of these, 20 bins from 0 to 1.

    Examples:
        >>> metrics = prototree.evaluate("runs/photos")
        >>> sorted(metrics.accuracy), metrics.n_images
        (['greedy', 'max_path', 'soft'], 9)
    """

    n_images: Count
    accuracy: Annotated[dict[Strategy, Fraction], Field(min_length=3)]
    fidelity: Annotated[dict[Strategy, Fraction], Field(min_length=2)]
    path_length: Annotated[dict[Strategy, PathLengths], Field(min_length=2)]
    top5: Fraction
    ece: Fraction
    confidence_ece: Fraction
    mean_confidence: Fraction
    coverage: Fraction
    selective_accuracy: Fraction | None
    class_accuracy: list[Fraction | None]
    confusion: list[tuple[Count, Count, Count]]
    n_prototypes: Count
    n_leaves: Count
    leaf_max_probs: list[Fraction]
    leaf_max_hist: list[Count]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class OODMetrics:
    """The metrics of one set of images of no known class."""

    n_images: Count
    auroc: dict[str, Fraction]  # by score: how often an image of the tree's own classes scores higher; 0.5 is chance
    fpr_at_95_tpr: Fraction  # fraction of the images of no known class that pass where 95 % of the own images do
    coverage: Fraction  # fraction that gets an answer with the limits stored in the tree


@dataclass(frozen=True)
class PartFraction:
    """The part that lies in the box most often, and in what fraction of the images that show it."""

    part: str
    fraction: Fraction
    n_images: Count  # that show it


@dataclass(frozen=True)
class OcclusionRates:
    """What occluding a box does to images that go to a prototype's side; random boxes have the same size."""

    n_images: Count
    flip_rate: Fraction  # fraction of the images that no longer go there
    random_flip_rate: Fraction
    distance: Number  # to the prototype, in units of its radius, mean over the images
    distance_occluded: Number
    random_distance_occluded: Number
    n_in_radius: Count = 0  # images in which a prototype of the node was within its radius: the next two are of these
    loss_rate: Fraction | None = None  # fraction of them that flip, or stay with nothing within the radius
    random_loss_rate: Fraction | None = None


@dataclass(frozen=True)
class OnDifference:
    """Whether a prototype's box touches a part in which the most alike classes of its node's two sides differ."""

    parts: tuple[str, ...]
    touches: bool
    by_chance: Fraction  # for boxes of the same size anywhere on the object


@dataclass(frozen=True)
class PrototypeQuality:
    """The quality of one prototype. What the data cannot tell is missing: None, or not in the dictionary."""

    prototype_row: Count
    purity: ByMethod = field(default_factory=dict)  # over the nearest images
    consistency: ByMethod = field(default_factory=dict)  # over those that go its way
    consistency_wide: ByMethod = field(default_factory=dict)
    stability: Fraction | None = None
    occlusion: dict[Method, OcclusionRates] = field(default_factory=dict)
    on_discriminative_part: dict[Method, OnDifference] = field(default_factory=dict)


@dataclass(frozen=True)
class Purity:
    """Part purity over the prototypes of a tree."""

    mean: Fraction
    std: Number
    part_related: Fraction  # fraction of the prototypes with a purity above 0.5


@dataclass(frozen=True)
class PurityBaseline:
    """The purity of boxes that know nothing of the prototype, in the same images."""

    random_patch: Fraction  # on the object
    object_middle: Fraction  # the box always stands in the middle of the object


@dataclass(frozen=True)
class Touching:
    """How many prototypes lie on a part in which their node's two sides differ."""

    n_prototypes: Count
    touching: Fraction
    by_chance: Fraction


@dataclass(frozen=True)
class QualityMetrics:
    """The prototype quality of a tree: means over its prototypes, and those of each."""

    prototypes: list[PrototypeQuality]
    purity: dict[Method, dict[Split, Purity]]
    baselines: dict[Split, PurityBaseline]
    consistency: dict[Method, dict[Split, Fraction]]
    consistency_wide: dict[Method, dict[Split, Fraction]]
    stability: Fraction | None
    occlusion: dict[Method, OcclusionRates]
    on_discriminative_part: dict[Method, Touching]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ImageError:
    """One wrong prediction. `node` is None if no leaf has the true class, so that no path could have been right."""

    label: Count
    prediction: Count
    node: Count | None
    goes_right: bool
    p_right: Fraction | None  # at the node; above 0.5 speaks for right
    margin: Number | None  # log-probability of the path taken minus that of the best path to the true class
    index: Count = 0  # in the data
    image: str = ""


@dataclass(frozen=True)
class NodeErrors:
    """How many wrong predictions a node is responsible for."""

    node: Count
    n_errors: Count
    n_goes_right: Count  # found the prototype where it should not have, or was nearer to the right one of two
    mean_abs_margin: Number  # of the probability of going right to 0.5; small: the decisions were close


@dataclass(frozen=True)
class _DataCounts:
    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: str = ""
    train: Count = 0
    test: Count = 0
    train_per_class: list[Count] = field(default_factory=list)
    oversampled: bool = False


@dataclass(frozen=True)
class _MetricsFile:
    source: str | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, Positive] = field(default_factory=dict)
    data: _DataCounts = field(default_factory=_DataCounts)
    classes: list[str] = field(default_factory=list)
    stages: dict[str, Metrics] = field(default_factory=dict)
    baseline_accuracy: Fraction | None = None
    pruning: dict[str, Any] = field(default_factory=dict)
    projection: dict[str, Any] = field(default_factory=dict)
    prototype_quality: QualityMetrics = None  # type: ignore[assignment]
    ood: dict[str, OODMetrics] = field(default_factory=dict)


@dataclass(frozen=True)
class _ErrorsFile:
    strategy: Strategy
    node_kind: Literal["presence", "pairwise"]
    nodes: list[NodeErrors]
    images: list[ImageError]


_adapter: Any = cache(TypeAdapter)  # building one takes a while


def read_metrics(folder: Path) -> dict[str, Any]:
    """Read a run's metrics.json; empty where there is none."""
    path = folder / METRICS
    content = expect_version(read_json(path), METRICS_VERSION, path) if path.exists() else {}
    checked = _validate(_MetricsFile, content, path)
    for stage in checked.stages.values():
        labels = [label for pair in stage.confusion for label in pair[:2]]
        if len(stage.class_accuracy) != len(checked.classes) or max(labels, default=-1) >= len(checked.classes):
            raise damaged(path, ValueError("it speaks of classes that are not named"))
    return content


def read_errors(path: Path, n_classes: int) -> dict[str, Any]:
    """Read errors.json of a tree of so many classes."""
    content = read_json(path)
    checked = _validate(_ErrorsFile, content, path)
    if not all(max(image.label, image.prediction) < n_classes for image in checked.images):
        raise damaged(path, ValueError("it speaks of classes that the tree does not have"))
    return content


def _validate(kind: type, content: dict[str, Any], path: Path) -> Any:
    try:
        text = json.dumps(content, ensure_ascii=False).encode(errors="replace")  # a file's name need not be UTF-8
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise damaged(path, ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")) from error


def damaged(path: Path, error: Exception) -> CheckpointError:
    """Make the error for a file of metrics that says something else than it should."""
    remedy = "restore it from a copy, or remove it and run prototree evaluate with --data"
    return CheckpointError(f"{path} is damaged ({error}); {remedy}")

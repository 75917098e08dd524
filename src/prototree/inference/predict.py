"""Predict the class of one image or of many, by one tree or by an ensemble, with the path through the tree.

Many images are read ahead in threads and go through the network in batches; one that cannot be read becomes a
prediction with an error, and nothing stops.

Notation used for tensor shapes: B batch, K classes.
"""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, overload

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from prototree.backbones.geometry import Preprocessing
from prototree.backbones.inference import frozen_features
from prototree.core.ensemble import Ensemble, TreeVote, average, tree_vote
from prototree.core.model import ProtoTree, TreePrediction
from prototree.core.topology import Strategy
from prototree.data.images import from_pillow, load_image
from prototree.data.transforms import eval_transform
from prototree.errors import ConfigError, DataError
from prototree.evaluation.tables import percent
from prototree.explanation.records import UNKNOWN, Abstention
from prototree.inference.io import ListedImage, is_frame, list_frame, list_images, names_one_image
from prototree.run import Run, run_or_tree_at

BATCH, DEFAULT_TOP = 32, 5

Model = Run | ProtoTree | str | Path
Models = Model | Sequence[Model]
Many = list[Any] | tuple[Any, ...] | Iterator[Any]
ImageLike = str | Path | ListedImage | Image.Image | np.ndarray | Tensor
"""A file, a PIL image, or 8-bit pixels (height width 3; tensors 3 height width), of one image or of many (with one more
dimension in front). A tensor of floating-point numbers is taken as preprocessed already."""
Vote = Callable[[list[Tensor]], list[TreeVote]]  # of a batch for each way of preparing images


@dataclass(frozen=True)
class Step:
    """One node on the path of an image."""

    node: int  # counted from 1, level by level
    nearer: str | None  # of a pairwise node: the patch that was nearer, such as 7R, the right one of node 7
    farther: str | None
    goes_right: bool
    p_right: float
    text: str  # `has “red chest”`, or `more like 7R than 7L`: patches by the user's notes where there are some


@dataclass(frozen=True)
class Prediction:
    """Prediction of a tree or an ensemble for one image.

    Attributes:
        image: Path of the image, if it has one.
        predicted_class: The best guess, also when abstaining; None only if there is an error.
        label: The true class, if a list says it.
        confidence: Calibrated probability that the prediction is right; None when abstaining.
        probability: Probability of the predicted class over all paths (Eq. 4).
        abstain_reason: Why the model abstains; empty if it does not.
        path: The nodes passed, with the decision at each; of an ensemble, through the first tree that predicts this.
        class_probs: Probabilities over all paths, the most probable classes first.
        error: Why the image could not be read; empty if it was.

    Examples:
        >>> result = prototree.predict("runs/photos", "bird.jpg")
        >>> result.prediction in ("bluebird", "cardinal", "greenfinch"), result.abstained, 0 <= result.confidence <= 1
        (True, False, True)
        >>> result.path[0].node, len(result.class_probs)
        (1, 3)
    """

    image: str | None = None
    predicted_class: str | None = None
    label: str | None = None
    confidence: float | None = None
    probability: float | None = None
    abstain_reason: str = ""
    path: tuple[Step, ...] = ()
    class_probs: Mapping[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def abstained(self) -> bool:
        """Whether the model abstains ("I don't know")."""
        return bool(self.abstain_reason)

    @property
    def prediction(self) -> str | None:
        """The predicted class; None when abstaining, or if the image could not be read."""
        return None if self.abstained else self.predicted_class

    def to_text(self, *, with_top: bool = False) -> str:
        """Write one line: the prediction, its confidence and its path, perhaps with the most probable classes."""
        start = f"{self.image}: " if self.image is not None else ""
        if self.error:
            return f"{start}not read ({self.error})"
        path = ", ".join(step.text for step in self.path) or "no question asked"
        if self.confidence is None:
            text = f"{UNKNOWN} (best guess {self.predicted_class}): {self.abstain_reason} {path}"
        else:
            text = f"{self.predicted_class} ({percent(self.confidence)} confidence): {path}"
        classes = ", ".join(f"{name} {percent(p)}" for name, p in self.class_probs.items()) if with_top else ""
        return start + text + (f"; over all paths: {classes}" if classes else "")

    def __str__(self) -> str:
        return self.to_text()

    def to_json(self) -> dict[str, Any]:
        """Give the columns of a prediction file as plain data."""
        return {
            "path": self.image,
            "prediction": self.prediction,
            "predicted_class": self.predicted_class,
            "label": self.label,
            "confidence": None if self.confidence is None else round(self.confidence, 4),
            "abstained": self.abstained,
            "abstain_reason": self.abstain_reason or None,
            "error": self.error or None,
            "steps": [{**asdict(step), "p_right": round(step.p_right, 4)} for step in self.path],
            "class_probs": {name: round(p, 4) for name, p in self.class_probs.items()},
        }


@overload
def predict(
    model: Models, images: Many, *, strategy: Strategy = ..., top: int = ..., min_confidence: float = ...
) -> list[Prediction]: ...
@overload
def predict(
    model: Models, images: Any, *, strategy: Strategy = ..., top: int = ..., min_confidence: float = ...
) -> Any: ...
def predict(
    model: Models, images: Any, *, strategy: Strategy = "greedy", top: int = DEFAULT_TOP, min_confidence: float = 0.0
) -> Prediction | list[Prediction]:
    """Predict one image or many, by one tree or by an ensemble.

    Args:
        model: A run, its path, a tree, or a list of these, which are averaged as an ensemble.
        images: A path, a PIL image or 8-bit pixels; for many, a folder, a pattern, a CSV list, a DataFrame, a batch or
            any iterable.
        strategy: greedy, the path that explanations show, max_path or soft.
        top: How many classes `class_probs` lists.
        min_confidence: Abstain below this confidence, from 0 to 1.

    Returns:
        One prediction for one image, a list for many. Among many, an image that cannot be read has an `error`.

    Raises:
        DataError: The one image cannot be read.
        ConfigError: The models do not fit together, or an option is out of range.

    Examples:
        >>> predict("runs/photos", "bird.jpg").predicted_class in ("bluebird", "cardinal", "greenfinch")
        True
        >>> results = predict("runs/photos", "holiday/")
        >>> len(results), results[0].image
        (4, 'holiday/bluebird.png')
        >>> len(predict("runs/photos", np.zeros((2, 40, 40, 3), np.uint8)))  # images × height × width × 3
        2
    """
    predictions = list(iter_predictions(model, images, strategy=strategy, top=top, min_confidence=min_confidence))
    if not _is_one_image(images):
        return predictions
    if predictions[0].error:
        raise DataError(f"{predictions[0].image or 'the image'} {predictions[0].error}")
    return predictions[0]


def iter_predictions(
    model: Models,
    images: ImageLike | Iterable[ImageLike],
    *,
    strategy: Strategy = "greedy",
    top: int = DEFAULT_TOP,
    min_confidence: float = 0.0,
    notes: Sequence[Mapping[int, str]] = (),
    batch_size: int = BATCH,
    threads: int = 0,
) -> Iterator[Prediction]:
    """Predict any number of images one by one; `threads` read them while the network runs (0: one per core).

    `notes` are the user's words for the prototypes of each tree; those of runs are known.
    """
    if batch_size < 1 or threads < 0 or top < 0:
        raise ConfigError(f"expected batch_size >= 1, threads >= 0 and top >= 0, got {batch_size}, {threads} and {top}")
    check_min_confidence(min_confidence)
    if strategy not in get_args(Strategy):
        raise ConfigError(f"expected one of {', '.join(get_args(Strategy))} as strategy, got {strategy!r}")
    trees, own_notes = open_models(model)
    ensemble = Ensemble(trees)  # refuses trees that do not fit together
    vote: Vote = ensemble.votes
    predictor = _Predictor(trees, list(notes) or own_notes, strategy, top, min_confidence)
    items = _read_ahead(_items(images, ensemble.inputs), threads or os.cpu_count() or 1, 2 * batch_size)
    for number in itertools.count():
        if not (batch := list(itertools.islice(items, batch_size))):
            return
        is_full = sum(item.pixels is not None for item in batch) == batch_size
        if number == 0 and is_full and len(trees) == 1:  # folding is worth its start; an ensemble shares its backbone
            vote = _folded(trees[0])
        yield from predictor.predict_batch(batch, vote)


def check_min_confidence(min_confidence: float) -> None:
    """Refuse a `min_confidence` outside 0 to 1, and say what a percentage would be."""
    if not 0 <= min_confidence <= 1:
        meant = f"; did you mean {min_confidence / 100:g}?" if 1 < min_confidence <= 100 else ""
        raise ConfigError(f"expected min_confidence from 0 to 1, got {min_confidence:g}{meant}")


def open_models(model: Models) -> tuple[list[ProtoTree], list[Mapping[int, str]]]:
    """Load the tree of each model, on the GPU where there is one, with the user's notes on its prototypes."""
    models: Sequence[Model] = model if isinstance(model, list | tuple) else [model]  # type: ignore[list-item]
    opened = [run_or_tree_at(item) for item in models]
    trees = [item.tree() if isinstance(item, Run) else item for item in opened]
    if torch.cuda.is_available():
        trees = [tree if tree in models else tree.to("cuda") for tree in trees]
    return [tree.eval() for tree in trees], [item.notes if isinstance(item, Run) else {} for item in opened]


def abstentions(tree: ProtoTree, predicted: TreePrediction) -> list[Abstention | None]:
    """Find out why a tree abstains from each image; None where it answers."""
    reasons: list[Abstention | None] = []
    for image, abstained in enumerate(predicted.abstained.tolist()):
        ood_score, node = float(predicted.ood_score[image]), None
        if ood_score > tree.calibration.max_ood_score:
            node = int(predicted.greedy.nodes[image, predicted.distance_ratio[image].argmax()])
        reasons.append(Abstention(node, ood_score) if abstained else None)
    return reasons


def make_step(
    tree: ProtoTree, node: int, goes_right: bool, p_right: float, notes: Mapping[int, str] | None = None
) -> Step:
    """Describe a decision of a tree at the node of this index, with the user's words for its prototypes."""
    number, n_nodes = node + 1, tree.topology.n_nodes

    def name(row: int) -> str:
        note = " ".join((notes or {}).get(row, "").split())
        return f"“{note}”" if note else tree.patch_name(row)

    if tree.node_function.kind == "presence":
        text = f"{'has' if goes_right else 'lacks'} {name(node)}"
        return Step(number, None, None, goes_right, p_right, text)
    right, left = node, node + n_nodes
    nearer, farther = (right, left) if goes_right else (left, right)
    text = f"more like {name(nearer)} than {name(farther)}"
    return Step(number, tree.patch_name(nearer), tree.patch_name(farther), goes_right, p_right, text)


@dataclass(frozen=True)
class _Item:
    """An image that was read, or why it was not."""

    image: str | None
    label: str | None
    read: Callable[[Preprocessing], Tensor]
    inputs: tuple[Preprocessing, ...]
    pixels: list[Tensor] | None = None  # for each of the inputs
    error: str = ""

    def loaded(self) -> "_Item":
        try:
            return replace(self, pixels=[self.read(preprocessing) for preprocessing in self.inputs])
        except DataError as error:  # a line begins with the name of the image anyway
            return replace(self, error=str(error).removeprefix(f"{self.image} "))


@dataclass(frozen=True)
class _Predictor:
    """Trees that predict batches of images."""

    trees: list[ProtoTree]
    notes: list[Mapping[int, str]]
    strategy: Strategy
    top: int
    min_confidence: float

    @torch.inference_mode()
    def predict_batch(self, batch: list[_Item], vote: Vote) -> list[Prediction]:
        """Predict the images of a batch that could be read; the others keep their error."""
        pixels = [item.pixels for item in batch if item.pixels is not None]
        device = self.trees[0].prototypes.device
        votes = vote([torch.stack(own).to(device) for own in zip(*pixels, strict=True)]) if pixels else []
        answers = iter(self._answers(votes) if votes else ())
        return [
            Prediction(item.image, label=item.label, error=item.error, **({} if item.pixels is None else next(answers)))
            for item in batch
        ]

    def _answers(self, votes: list[TreeVote]) -> Iterator[dict[str, Any]]:
        """Decide each image of a batch, and explain by the path of the first tree that decides so."""
        each, names = [vote.decisions for vote in votes], self.trees[0].class_names
        soft, labels = average(votes, "soft"), average(votes, self.strategy).argmax(dim=1)
        probability = soft.gather(1, labels[:, None])[:, 0]
        is_calibrated = len(each) == 1 and self.strategy != "soft"  # only single paths of one tree are
        confidence, shown = each[0].confidence if is_calibrated else probability, self.strategy
        shown = "greedy" if shown == "soft" else shown  # soft takes every path
        each_abstains = [abstentions(tree, predicted) for tree, predicted in zip(self.trees, each, strict=True)]
        likeliest = soft.topk(min(self.top, len(names)), dim=1)
        for i, label in enumerate(labels.tolist()):
            reasons = [abstention.reason for tree in each_abstains if (abstention := tree[i]) is not None]
            below = f"Less than the {percent(self.min_confidence)} confidence that was asked for."
            reason = reasons[0] if len(reasons) == len(each) else below if confidence[i] < self.min_confidence else ""
            first = next((t for t, tree in enumerate(each) if int(tree.labels(self.strategy)[i]) == label), 0)
            path = each[first].path(shown)
            columns = (path.nodes[i].tolist(), path.goes_right[i].tolist(), path.p_right[i].tolist())
            steps = (make_step(self.trees[first], *step, self.notes[first]) for step in zip(*columns, strict=True))
            classes = zip(likeliest.indices[i].tolist(), likeliest.values[i].tolist(), strict=True)
            yield {
                "predicted_class": names[label],
                "confidence": None if reason else float(confidence[i]),
                "probability": float(probability[i]),
                "abstain_reason": reason,
                "path": tuple(step for step in steps if step.node > 0),
                "class_probs": {names[k]: p for k, p in classes},
            }


def _folded(tree: ProtoTree) -> Vote:
    """Fold batch norm into the convolutions: the same votes but for rounding."""
    features = frozen_features(tree.features)
    return lambda images: [tree_vote(tree, tree.forward_features(features(*images)))]


def _is_one_image(images: Any) -> bool:
    if isinstance(images, str | Path):
        return names_one_image(images)
    if isinstance(images, np.ndarray | Tensor):
        return images.ndim == 3
    return isinstance(images, Image.Image | ListedImage)


def _items(images: Any, inputs: tuple[Preprocessing, ...]) -> Iterator[_Item]:
    is_one = isinstance(images, str | bytes | Path | ListedImage | Image.Image | np.ndarray | Tensor)
    if is_frame(images):
        images = list_frame(images)
    if isinstance(images, Mapping):
        raise DataError("expected an image or a list of images, got a mapping; give its values")
    for image in [images] if is_one or not isinstance(images, Iterable) else images:
        if isinstance(image, str | Path | ListedImage):
            for listed in [image] if isinstance(image, ListedImage) else list_images([image]):
                yield _Item(str(listed.path), listed.label, partial(_input, listed.path), inputs)
        else:
            yield from (_Item(None, None, read, inputs) for read in _readers(image, inputs))


def _input(image: str | Path | Image.Image | np.ndarray, preprocessing: Preprocessing) -> Float[Tensor, "3 h w"]:
    """Decode an image as upright RGB (a large one at a fraction of its size) and preprocess it."""
    if isinstance(image, str | Path):
        pixels = load_image(image, at_least=preprocessing.resize).image
    else:
        pixels = from_pillow(image).image if isinstance(image, Image.Image) else Image.fromarray(image)
    return eval_transform(pixels, preprocessing)


def _as_it_is(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    return pixels


def _readers(image: Any, inputs: Sequence[Preprocessing]) -> list[Callable[[Preprocessing], Tensor]]:
    """Split pixels of one image or of a batch; each part becomes a function that makes a network's input."""
    if isinstance(image, Image.Image):
        return [partial(_input, image)]
    if not isinstance(image, np.ndarray | Tensor):
        raise DataError(f"expected a path, a PIL image, a uint8 array or a tensor, got {type(image).__name__}")
    shape, size, is_tensor = tuple(image.shape), inputs[0].size, isinstance(image, Tensor)
    is_float = isinstance(image, Tensor) and image.dtype.is_floating_point  # preprocessed already
    layout = "3×height×width" if is_tensor else "height×width×3"
    is_image = len(shape) in (3, 4) and shape[-3 if is_tensor else -1] == 3
    if not is_image or not (is_float or str(image.dtype).removeprefix("torch.") == "uint8"):
        raise DataError(f"expected 8-bit pixels of {layout} or N×{layout}, got {image.dtype} of shape {shape}")
    if is_float and len(inputs) > 1:
        raise DataError(
            "expected images as 8-bit numbers: the trees prepare them differently; got preprocessed tensors"
        )
    if is_float and shape[-2:] != (size, size):
        raise DataError(
            f"expected preprocessed tensors of {size}×{size} pixels, got {shape[-2]}×{shape[-1]}; give images as 8-bit "
            "numbers to have them resized"
        )
    if isinstance(image, Tensor) and is_float:
        if not image.isfinite().all():
            raise DataError("expected finite numbers in a preprocessed tensor, got NaN or infinity")
        return [partial(_as_it_is, item.float()) for item in image.reshape(-1, *shape[-3:]).cpu()]
    pixels = image.movedim(-3, -1).cpu().numpy() if isinstance(image, Tensor) else image
    return [partial(_input, item) for item in pixels.reshape(-1, *pixels.shape[-3:])]


def _read_ahead(items: Iterator[_Item], threads: int, ahead: int) -> Iterator[_Item]:
    """Read the items in threads and yield them in order, with at most `ahead` of them waiting."""
    waiting: deque[Future[_Item]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            waiting.append(pool.submit(item.loaded))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)

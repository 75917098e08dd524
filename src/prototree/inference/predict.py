"""Many photos, many answers: read ahead in threads, asked in batches, and given back one by one in their order.

A photo that cannot be read is a prediction with a reason, and nothing stops.

Notation used for tensor shapes: B batch, N photos.
"""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from prototree.backbones.inference import frozen_features
from prototree.backbones.preprocessing import Preprocessing
from prototree.core.model import ProtoTree, TreePrediction
from prototree.core.strategies import Strategy
from prototree.data.transforms import to_input
from prototree.errors import ConfigError, DataError
from prototree.evaluation.tables import percent
from prototree.inference.answers import Answer, answers, expect_share, opened, tree_of
from prototree.inference.inputs import Listed, is_frame, listed_in_frame, listed_photos
from prototree.run import Run

BATCH, DEFAULT_TOP = 32, 5

Photo = str | Path | Listed | Image.Image | np.ndarray | Tensor
"""A file or a folder of them, a PIL image, or one or many photos as 8-bit numbers (… height width 3; tensors … 3 height
width); a tensor of floating-point numbers is taken as preprocessed already."""


@dataclass(frozen=True)
class Prediction:
    """A tree's answer for one of many photos.

    Examples:
        >>> one = prototree.predict("runs/photos", "bird.jpg")[0]
        >>> one.name, one.problem, len(one.top)
        ('bird.jpg', '', 3)
    """

    name: str  # the file, or the photo's number
    answer: Answer | None  # None where the photo could not be read
    problem: str = ""  # why
    top: tuple[tuple[str, float], ...] = ()  # the likeliest classes and their probabilities by the whole tree (Eq. 4)
    truth: str | None = None  # the class that a list says

    @property
    def said(self) -> str:
        """The label, "I don't know", or nothing if the photo could not be read."""
        return self.answer.said if self.answer is not None else ""

    def words(self, notes: Mapping[int, str] | None = None, *, with_top: bool = False) -> str:
        """One line of text, perhaps with the likeliest classes."""
        if self.answer is None:
            return f"{self.name}: not read ({self.problem})"
        classes = ", ".join(f"{label} {percent(probability)}" for label, probability in self.top) if with_top else ""
        return f"{self.name}: {self.answer.words(notes)}" + (f"; by all leaves: {classes}" if classes else "")


def open_for_predicting(run: str | Path | Run) -> tuple[ProtoTree, Mapping[int, str]]:
    """A run's last tree, on the GPU where there is one, and the user's words about its prototypes."""
    run = Run.open(run)
    return run.tree().to("cuda" if torch.cuda.is_available() else "cpu"), run.notes


def predict(
    run_or_tree: Run | ProtoTree | str | Path,
    photos: Photo | Iterable[Photo],
    *,
    strategy: Strategy = "greedy",
    top: int = DEFAULT_TOP,
    min_confidence: float = 0.0,
) -> list[Prediction]:
    """A tree's answers for many photos, as a list; `predict_each` gives them one by one.

    An answer that is less sure than `min_confidence` is "I don't know".

    Examples:
        >>> found = predict("runs/photos", "holiday/")
        >>> len(found), found[0].name
        (4, 'holiday/bluebird.png')
        >>> len(predict("runs/photos", np.zeros((2, 40, 40, 3), np.uint8)))  # photos × height × width × 3
        2
    """
    return list(predict_each(run_or_tree, photos, strategy=strategy, top=top, min_confidence=min_confidence))


def predict_each(
    run_or_tree: Run | ProtoTree | str | Path,
    photos: Photo | Iterable[Photo],
    *,
    strategy: Strategy = "greedy",
    top: int = DEFAULT_TOP,
    min_confidence: float = 0.0,
    batch_size: int = BATCH,
    threads: int = 0,
) -> Iterator[Prediction]:
    """Like `predict`, but gives the answers one by one, for any number of photos.

    `threads` read photos while the network runs; 0: one per core.

    Examples:
        >>> for one in predict_each("runs/photos", "bird.jpg"):
        ...     print(one.name, one.problem or "read")
        bird.jpg read
    """
    if batch_size < 1 or threads < 0 or top < 0:
        raise ConfigError(f"expected batch_size >= 1, threads >= 0 and top >= 0, got {batch_size}, {threads} and {top}")
    expect_share(min_confidence)
    tree = tree_of(run_or_tree).eval()
    teller = _Teller(tree, strategy, top, min_confidence)
    items = _read_ahead(_items(photos, tree.preprocessing), threads or os.cpu_count() or 1, 2 * batch_size)
    decide: Callable[[Tensor], TreePrediction] = tree.predict
    for number, batch in enumerate(_batched(items, batch_size)):
        if number == 0 and sum(one.image is not None for one in batch) == batch_size:
            decide = _quick(tree)  # worth its start where there are many
        yield from teller.tell(batch, decide)


@dataclass(frozen=True)
class _Item:
    name: str
    truth: str | None
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class _Ready:
    item: _Item
    image: Tensor | None
    problem: str


@dataclass(frozen=True)
class _Teller:
    """Asks the tree about batches, and tells its answers."""

    tree: ProtoTree
    strategy: Strategy
    top: int
    min_confidence: float

    @torch.inference_mode()
    def tell(self, batch: list[_Ready], decide: Callable[[Tensor], TreePrediction]) -> list[Prediction]:
        readable = [one.image for one in batch if one.image is not None]
        told: Iterator[tuple[Answer, tuple[tuple[str, float], ...]]] = iter(())
        if readable:
            decisions = decide(torch.stack(readable).to(self.tree.prototypes.device))
            said = answers(self.tree, decisions, self.strategy, self.min_confidence)
            told = zip(said, self._likeliest(decisions), strict=True)
        predictions = []
        for one in batch:
            if one.image is None:
                predictions.append(Prediction(one.item.name, None, one.problem, truth=one.item.truth))
            else:
                answer, likeliest = next(told)
                predictions.append(Prediction(one.item.name, answer, "", likeliest, one.item.truth))
        return predictions

    def _likeliest(self, decisions: TreePrediction) -> list[tuple[tuple[str, float], ...]]:
        found = decisions.soft.topk(min(self.top, self.tree.n_classes), dim=1)
        names = self.tree.class_names
        rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
        return [tuple((names[k], p) for k, p in zip(*row, strict=True)) for row in rows]


def _quick(tree: ProtoTree) -> Callable[[Tensor], TreePrediction]:
    """The tree's answers from its network as it runs fastest, the same but for the last digits."""
    features = frozen_features(tree.features)
    return lambda images: tree.decide(tree.route(features(images)))


def _items(photos: Photo | Iterable[Photo], preprocessing: Preprocessing) -> Iterator[_Item]:
    number = itertools.count()
    is_one = isinstance(photos, str | bytes | Path | Listed | Image.Image | np.ndarray | Tensor)
    every: Iterable[Any] = [photos] if is_one or not isinstance(photos, Iterable) else photos
    if is_frame(photos):
        every = listed_in_frame(photos)
    for photo in every:
        if isinstance(photo, Listed):
            yield _file(photo, preprocessing)
        elif isinstance(photo, str | Path):
            yield from (_file(one, preprocessing) for one in listed_photos([photo]))
        else:
            yield from (_Item(str(next(number)), None, read) for read in _readers(photo, preprocessing))


def _file(listed: Listed, preprocessing: Preprocessing) -> _Item:
    return _Item(str(listed.path), listed.label, partial(_seen, listed.path, preprocessing))


def _seen(photo: str | Path | Image.Image | np.ndarray, preprocessing: Preprocessing) -> Tensor:
    return to_input(opened(photo, preprocessing.resize), preprocessing)


def _readers(photo: Image.Image | np.ndarray | Tensor, preprocessing: Preprocessing) -> list[Callable[[], Tensor]]:
    """What makes the network's input of each photo that came as pixels."""
    if isinstance(photo, Tensor):
        shape, dtype = tuple(photo.shape), photo.dtype
        if photo.ndim not in (3, 4) or shape[-3] != 3:
            raise DataError(
                f"expected a tensor of N×3×height×width or 3×height×width, got {shape}; move red, green and blue "
                "there, or give a numpy array of N×height×width×3"
            )
        if dtype.is_floating_point:
            if shape[-2:] != (preprocessing.size, preprocessing.size):
                raise DataError(
                    f"expected preprocessed tensors of {preprocessing.size}×{preprocessing.size} pixels, got "
                    f"{shape[-2]}×{shape[-1]}; give photos as 8-bit numbers to have them resized"
                )
            return [partial(torch.Tensor.float, one) for one in photo.reshape(-1, *shape[-3:]).cpu()]
        photo = photo.movedim(-3, -1).cpu().numpy()
    if isinstance(photo, np.ndarray):
        if photo.dtype != np.uint8 or photo.ndim not in (3, 4) or photo.shape[-1] != 3:
            found = f"{photo.dtype} of shape {photo.shape}"
            raise DataError(
                f"expected photos as a uint8 array of N×height×width×3 or height×width×3, got {found}; "
                "give 8-bit numbers from 0 to 255, red, green and blue in the last dimension"
            )
        return [partial(_seen, one, preprocessing) for one in photo.reshape(-1, *photo.shape[-3:])]
    if not isinstance(photo, Image.Image):
        raise DataError(f"expected a path, a PIL image, a uint8 array or a tensor, got {type(photo).__name__}")
    return [partial(_seen, photo, preprocessing)]


def _read_ahead(items: Iterator[_Item], threads: int, ahead: int) -> Iterator[_Ready]:
    """The items in their order, each read by one of some threads, at most `ahead` of them waiting."""
    waiting: deque[Future[_Ready]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            waiting.append(pool.submit(_read, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _read(item: _Item) -> _Ready:
    try:
        return _Ready(item, item.read(), "")
    except DataError as error:
        return _Ready(item, None, str(error).removeprefix(f"{item.name} "))  # its row begins with the name


def _batched(items: Iterator[_Ready], size: int) -> Iterator[list[_Ready]]:
    while batch := list(itertools.islice(items, size)):
        yield batch

"""One photo, one answer: the front door for those who want to know what a tree says and by which path.

Decisions become answers in one place, `answers`, for one photo (`ask`) and for many (`predictions`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image

from prototree.core import checkpoint
from prototree.core.model import ProtoTree, TreePrediction
from prototree.core.strategies import Strategy
from prototree.data.images import from_pillow, read_photo
from prototree.data.transforms import to_input
from prototree.errors import ConfigError, DataError
from prototree.evaluation.tables import percent
from prototree.explain.neighbours import rival_of
from prototree.explain.records import UNKNOWN, Doubt
from prototree.run import Run

Asked = str | Path | Image.Image | UInt8[np.ndarray, "height width 3"]
"""A photo: a file, a PIL image, or an array of 8-bit red, green and blue."""


@dataclass(frozen=True)
class Turn:
    """One question on the path, and its answer."""

    node: int
    present: bool  # of a pairwise node: whether the right one of its two patches was nearer
    p_right: float
    rather: int | None = None  # of a pairwise node: the prototype that was nearer
    than: int | None = None  # and the other one

    def __str__(self) -> str:
        return self.words({})

    def words(self, notes: Mapping[int, str]) -> str:
        """`has “red chest”`, or `more like 7 than 17`: prototypes by the user's own words where there are some."""

        def name(prototype: int | None) -> str:
            note = notes.get(prototype, "") if prototype is not None else ""
            return f"“{' '.join(note.split())}”" if note else str(prototype)

        if self.rather is not None:
            return f"more like {name(self.rather)} than {name(self.than)}"
        return f"{'has' if self.present else 'lacks'} {name(self.node)}"


@dataclass(frozen=True)
class Answer:
    """A tree's answer for one photo.

    Examples:
        >>> answer = prototree.ask("runs/photos", "bird.jpg")
        >>> answer.label in ("bluebird", "cardinal", "greenfinch"), 0 <= answer.confidence <= 1, answer.known
        (True, True, True)
        >>> len(answer.path) >= 1  # the questions that were asked
        True
    """

    label: str
    confidence: float | None  # that the greedy answer is right; None where the tree gives no answer
    probability: float  # of the label, by the whole tree (Eq. 4)
    path: tuple[Turn, ...]
    reason: str = ""  # why the tree gives no answer; the label is its best guess then

    @property
    def known(self) -> bool:
        """Whether the tree gives an answer."""
        return not self.reason

    @property
    def said(self) -> str:
        """The label, or "I don't know"."""
        return self.label if self.known else UNKNOWN

    def path_words(self, notes: Mapping[int, str] | None = None) -> str:
        """The questions on the path with their answers."""
        return ", ".join(turn.words(notes or {}) for turn in self.path) or "no question asked"

    def words(self, notes: Mapping[int, str] | None = None) -> str:
        """One line of text: the answer, its confidence and its path."""
        if self.confidence is None:
            return f"{UNKNOWN} (best guess {self.label}): {self.reason} {self.path_words(notes)}"
        return f"{self.label} ({percent(self.confidence)} sure): {self.path_words(notes)}"

    def __str__(self) -> str:
        return self.words()


@torch.no_grad()
def ask(
    run_or_tree: Run | ProtoTree | str | Path,
    photo: Asked,
    *,
    strategy: Strategy = "greedy",
    min_confidence: float = 0.0,
) -> Answer:
    """Asks a tree about one photo; a run is asked with its last tree. `predict` asks about many at once.

    An answer that is less sure than `min_confidence` is "I don't know".

    Examples:
        >>> ask("runs/photos", "bird.jpg").label in ("bluebird", "cardinal", "greenfinch")
        True
    """
    expect_share(min_confidence)
    tree = tree_of(run_or_tree).eval()
    images = to_input(opened(photo, tree.preprocessing.resize), tree.preprocessing)[None]
    return answers(tree, tree.predict(images.to(tree.prototypes.device)), strategy, min_confidence)[0]


def expect_share(min_confidence: float) -> None:
    """Refuse a least confidence that is none, in words that tell what a percentage would be."""
    if not 0 <= min_confidence <= 1:
        meant = f"; did you mean {min_confidence / 100:g}?" if 1 < min_confidence <= 100 else ""
        raise ConfigError(f"expected a least confidence (min_confidence) from 0 to 1, got {min_confidence:g}{meant}")


def answers(
    tree: ProtoTree, decisions: TreePrediction, strategy: Strategy = "greedy", min_confidence: float = 0.0
) -> list[Answer]:
    """An answer for each photo of a batch."""
    labels, path = decisions.labels(strategy), decisions.path(strategy)
    soft = decisions.soft.gather(1, labels[:, None])[:, 0]
    ways = zip(path.nodes.tolist(), path.goes_right.tolist(), path.p_right.tolist(), strict=True)
    reasons = (doubt.reason if doubt is not None else "" for doubt in doubts_of(tree, decisions))
    rows = zip(labels.tolist(), decisions.confidence.tolist(), soft.tolist(), ways, reasons, strict=True)
    less = f"Less sure than the {percent(min_confidence)} that were asked for."
    return [
        Answer(
            tree.class_names[label],
            confidence if not reason and confidence >= min_confidence else None,
            probability,
            tuple(turn_at(tree, *turn) for turn in zip(*way, strict=True) if turn[0] >= 0),
            reason or (less if confidence < min_confidence else ""),
        )
        for label, confidence, probability, way, reason in rows
    ]


def doubts_of(tree: ProtoTree, decisions: TreePrediction) -> list[Doubt | None]:
    """Of each image, why the tree does not know what it shows; None where it knows."""
    found: list[Doubt | None] = []
    for image, is_known in enumerate(decisions.is_known.tolist()):
        ood_score, node = float(decisions.ood_score[image]), None
        if ood_score > tree.calibration.farthest:
            node = int(decisions.greedy.nodes[image, decisions.distance_ratio[image].argmax()])
        found.append(None if is_known else Doubt(node, ood_score))
    return found


def turn_at(tree: ProtoTree, node: int, right: bool, p_right: float) -> Turn:
    """A turn of a tree, in the words of its question."""
    if tree.question.kind == "presence":
        return Turn(node, right, p_right)
    rather, than = (node, rival_of(tree, node)) if right else (rival_of(tree, node), node)
    return Turn(node, right, p_right, rather, than)


def tree_of(run_or_tree: Run | ProtoTree | str | Path) -> ProtoTree:
    """The tree itself, of a run the last one."""
    if isinstance(run_or_tree, ProtoTree):
        return run_or_tree
    return run_or_tree.tree() if isinstance(run_or_tree, Run) else checkpoint.load(run_or_tree)


def opened(photo: Asked, at_least: int) -> Image.Image:
    """A photo as upright RGB; its shorter side may be reduced to `at_least` pixels while it is decoded."""
    if isinstance(photo, str | Path):
        return read_photo(photo, at_least=at_least).image
    if isinstance(photo, Image.Image):
        return from_pillow(photo).image
    if not isinstance(photo, np.ndarray) or photo.dtype != np.uint8 or photo.ndim != 3 or photo.shape[2] != 3:
        found = f"{photo.dtype} of shape {photo.shape}" if isinstance(photo, np.ndarray) else type(photo).__name__
        raise DataError(f"expected a path, a PIL image or a uint8 array of height×width×3, got {found}")
    return Image.fromarray(photo)

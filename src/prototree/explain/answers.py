"""One photo, one answer: the front door for those who want to know what a tree says and by which path."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image

from prototree.data.augment import to_input
from prototree.data.images import from_pillow, read_photo
from prototree.errors import DataError
from prototree.explain.matches import rival_of
from prototree.run import Run
from prototree.tree import checkpoint
from prototree.tree.model import ProtoTree
from prototree.tree.strategies import Strategy

Asked = str | Path | Image.Image | UInt8[np.ndarray, "height width 3"]
"""A photo: a file, a PIL image, or an array of 8-bit red, green and blue."""


@dataclass(frozen=True)
class Turn:
    """One question on the path, and its answer."""

    node: int
    present: bool  # of a choice: whether the right one of its two patches was nearer
    p_right: float
    rather: int | None = None  # of a choice: the prototype that was nearer
    than: int | None = None  # and the other one

    def __str__(self) -> str:
        if self.rather is not None:
            return f"rather {self.rather} than {self.than}"
        return f"{'has' if self.present else 'lacks'} {self.node}"


@dataclass(frozen=True)
class Answer:
    """What a tree says of one photo."""

    label: str
    sureness: float  # that the greedy answer is right
    is_known: bool  # whether the tree gives an answer at all; the label is its best guess where it does not
    probability: float  # of the label, by the whole tree (Eq. 4)
    path: tuple[Turn, ...]

    def __str__(self) -> str:
        turns = ", ".join(map(str, self.path))
        said = f"{self.label} ({self.sureness:.0%} sure)"
        return f"{said if self.is_known else f'I don’t know; perhaps {said}'}: {turns or 'no question asked'}"


@torch.no_grad()
def ask(run_or_tree: Run | ProtoTree | str | Path, photo: Asked, *, strategy: Strategy = "greedy") -> Answer:
    """Asks a tree about one photo; a run is asked with its last tree. Pass the tree itself to ask about many photos.

    >>> ask("runs/birds", "bird.jpg").label
    """
    tree = run_or_tree if isinstance(run_or_tree, ProtoTree) else _tree_of(run_or_tree)
    images = to_input(_opened(photo, tree.preprocessing.resize), tree.preprocessing)[None]
    decisions = tree.eval().predict(images.to(tree.prototypes.device))
    label, path = int(decisions.labels(strategy)[0]), decisions.path(strategy)
    rows = zip(path.nodes[0].tolist(), path.goes_right[0].tolist(), path.p_right[0].tolist(), strict=True)
    turns = tuple(turn_at(tree, *row) for row in rows if row[0] >= 0)
    sureness, is_known = float(decisions.sureness[0]), bool(decisions.is_known[0])
    return Answer(tree.class_names[label], sureness, is_known, float(decisions.soft[0, label]), turns)


def turn_at(tree: ProtoTree, node: int, right: bool, p_right: float) -> Turn:
    """A turn of a tree, in the words of its question."""
    if tree.question.kind == "presence":
        return Turn(node, right, p_right)
    rather, than = (node, rival_of(tree, node)) if right else (rival_of(tree, node), node)
    return Turn(node, right, p_right, rather, than)


def _tree_of(run: Run | str | Path) -> ProtoTree:
    return run.tree() if isinstance(run, Run) else checkpoint.load(run)


def _opened(photo: Asked, at_least: int) -> Image.Image:
    if isinstance(photo, str | Path):
        return read_photo(photo, at_least=at_least).image
    if isinstance(photo, Image.Image):
        return from_pillow(photo).image
    if not isinstance(photo, np.ndarray) or photo.dtype != np.uint8 or photo.ndim != 3 or photo.shape[2] != 3:
        found = f"{photo.dtype} of shape {photo.shape}" if isinstance(photo, np.ndarray) else type(photo).__name__
        raise DataError(f"expected a path, a PIL image or a uint8 array of height×width×3, got {found}")
    return Image.fromarray(photo)

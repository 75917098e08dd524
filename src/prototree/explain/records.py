"""What there is to say about a tree and its decisions, as plain data: numbers, boxes and small pictures.

`explain` makes these, `report` and the browser app draw them. No tensor, no file and no network here.
Notation used for shapes: N nodes, L leaves, K classes.
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, UInt8
from numpy import ndarray

from prototree.network.geometry import Box
from prototree.tree.strategies import Strategy

Picture = UInt8[ndarray, "_ _ 3"]  # of any height and width; two in one dataclass need not agree
Heat = Float[ndarray, "_ _"]
"""From 0 to 1, to be stretched over the whole photo; 0 where the network did not look."""

Method = Literal["cell", "attribution", "occlusion"]


@dataclass(frozen=True)
class Hiding:
    """The test of a box: what the similarity falls to when the box is hidden, and when others of its size are."""

    before: float
    box_hidden: float
    random_hidden: float  # mean over random boxes of the same size


@dataclass(frozen=True)
class Location:
    """One answer to the question where in a photo a prototype was found."""

    method: Method
    box: Box  # in pixels of the original, upright photo
    heat: Heat
    hiding: Hiding | None


@dataclass(frozen=True)
class Match:
    """A photo's best patch for a prototype."""

    image: str  # relative to the data's root, or the name of a file that was handed in
    label: int | None  # the photo's class where that is known
    similarity: float
    size: tuple[int, int]  # width and height of the original, upright photo, in which boxes are given
    photo: Picture  # the whole photo, reduced
    crop: Picture  # what lies in the cell's box
    where: tuple[Location, ...]  # the cell first


@dataclass(frozen=True)
class Cause:
    """Why a prototype matches: how the similarity changes when one property of its photo is altered."""

    name: Literal["hue", "saturation", "contrast", "texture", "shape"]
    change: float  # similarity after minus before; far below 0: the property matters


@dataclass(frozen=True)
class PrototypeExplanation:
    """All that is known about one node's prototype."""

    node: int
    source: Match
    distance_moved: float  # by projection
    nearest: tuple[Match, ...]  # in other photos than the source, one patch each, nearest first
    right_share: tuple[float, ...]  # K: how much of each class's training photos the node alone would send right
    causes: tuple[Cause, ...]
    note: str = ""  # the user's own words, such as "long beak"


@dataclass(frozen=True)
class TreeExplanation:
    """The whole tree."""

    title: str
    class_names: tuple[str, ...]
    left: tuple[int, ...]  # N: a node, or ~leaf
    right: tuple[int, ...]
    prototypes: tuple[PrototypeExplanation, ...]  # N
    leaf_probs: tuple[tuple[float, ...], ...]  # L×K
    accuracy: dict[str, float]  # by strategy on the test photos; empty if never evaluated


@dataclass(frozen=True)
class Step:
    """One node on the way of one image."""

    node: int
    goes_right: bool
    similarity: float
    match: Match  # the image's own best patch
    prototype: Picture  # the prototype's crop
    note: str = ""


@dataclass(frozen=True)
class PathExplanation:
    """One way down the tree."""

    strategy: Strategy
    steps: tuple[Step, ...]
    leaf: int
    class_probs: tuple[float, ...]  # of the leaf


@dataclass(frozen=True)
class Flip:
    """One decision that would have to change: the probability of going right, which for one patch is its similarity."""

    node: int
    p_right: float
    needed: float


@dataclass(frozen=True)
class RunnerUp:
    """The smallest change of similarities with which another class would have won."""

    label: int
    flips: tuple[Flip, ...]


@dataclass(frozen=True)
class DecisionExplanation:
    """One image and one tree."""

    image: str
    photo: Picture
    size: tuple[int, int]
    class_names: tuple[str, ...]
    label: int | None  # the true class where it is known
    soft: tuple[float, ...]  # K
    paths: dict[Strategy, PathExplanation]  # "max_path" and "greedy"
    runner_up: dict[Strategy, RunnerUp | None]  # None where no change of similarities can do it


@dataclass(frozen=True)
class VoteExplanation:
    """One image and several trees."""

    decisions: tuple[DecisionExplanation, ...]
    class_probs: tuple[float, ...]  # the mean of the trees'

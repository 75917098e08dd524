"""Explanations of a tree and its decisions as plain data: numbers, boxes and small pictures. No torch here.

Notation used for shapes: N nodes, P prototypes (one or two per node: first all right ones, then all left ones),
L leaves, K classes.
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, UInt8
from numpy import ndarray

from prototree.backbones.geometry import Box, Size
from prototree.core.topology import Strategy

Picture = UInt8[ndarray, "_ _ 3"]  # of any height and width; two in one dataclass need not agree
Heatmap = Float[ndarray, "_ _"]  # from 0 to 1, to be stretched over the whole photo; 0 where the network did not look
Method = Literal["peak", "cell", "attribution", "occlusion"]
NodeKind = Literal["presence", "pairwise"]  # as in `core.nodes`, which needs torch
Perturbation = Literal["hue", "saturation", "contrast", "texture", "shape"]
Side = Literal["right", "left"]

CONTEXT_SCALE = 3.0  # how many times as wide as a patch the picture is that shows it in its context
UNKNOWN = "I don't know"  # shown where a tree abstains
TEST_IMAGES = "test images"  # what accuracies are measured on, unless something else is said
HISTOGRAM_BINS = 64
HISTOGRAM_LIMITS: dict[NodeKind, tuple[float, float]] = {"presence": (0.0, 3.2), "pairwise": (-1.0, 1.0)}
DECISION_BOUNDARIES: dict[NodeKind, float] = {"presence": 1.0, "pairwise": 0.0}


@dataclass(frozen=True)
class OcclusionEffect:
    """What the similarity falls to when a box is occluded, and when others of its size are."""

    before: float
    box_occluded: float
    random_occluded: float  # mean over random boxes of the same size


@dataclass(frozen=True)
class Location:
    """Where one method localises a prototype in a photo."""

    method: Method
    box: Box  # in pixels of the original, upright photo
    heat: Heatmap
    occlusion: OcclusionEffect | None


@dataclass(frozen=True)
class Match:
    """A photo's best patch for a prototype."""

    image: str  # relative to the data's root, or the name of a file that was handed in
    label: int | None  # the photo's class where that is known
    similarity: float
    size: tuple[int, int]  # width and height of the original, upright photo, in which boxes are given
    photo: Picture  # the whole photo, reduced
    crop: Picture  # what lies in the first box
    locations: tuple[Location, ...]  # what is shown first
    context: Picture | None = None  # the first box and around it, `CONTEXT_SCALE` times as wide; None: cut from `photo`


@dataclass(frozen=True)
class PerturbationEffect:
    """Why a prototype matches: how the similarity changes when one property of its photo is altered."""

    name: Perturbation
    change: float  # similarity after minus before; far below 0: the property matters


@dataclass(frozen=True)
class DecisionHistogram:
    """Histogram of the training photos of both sides around the decision boundary (`line`) of a node.

    Counted in bins of equal width from `low` to `high`; the outermost hold what lies beyond. Presence: the distance
    of each photo's nearest patch in units of the radius, right below the line. Pairwise: how much nearer the right
    prototype is than the left one, as a fraction of both distances (from −1 to 1), right above the line.
    """

    low: float
    high: float
    line: float
    right: tuple[int, ...]  # photos of classes that stand on the right only
    left: tuple[int, ...]

    @property
    def width(self) -> float:
        """Return the width of a bin."""
        return (self.high - self.low) / len(self.right)


@dataclass(frozen=True)
class PrototypeExplanation:
    """Everything that is known about one prototype."""

    prototype: int  # of P
    node: int  # that asks for it
    side: Side  # where photos go that have it; a presence node has no left one
    radius: float  # nearer than this is present; of a pairwise node: as near as 95 % of its side's photos come
    source: Match
    projection_distance: float | None  # None: it is no training patch, `source` is only the nearest one
    nearest: tuple[Match, ...]  # in other photos than the source, one patch each, nearest first
    class_pass_rate: tuple[float, ...]  # K: fraction of a class's training photos that the node alone sends to its side
    perturbation_effects: tuple[PerturbationEffect, ...]
    note: str = ""  # the user's own words, such as "long beak"
    part: str = ""  # on which it lies in most photos, where parts are annotated and that was measured
    test_results: tuple[str, ...] = ()  # whether it means what it shows, a sentence each; empty if never measured
    histogram: DecisionHistogram | None = None  # of the node; None if never counted


@dataclass(frozen=True)
class ClassExplanation:
    """A class: some of its training photos, and the answers for its test photos."""

    photos: tuple[Picture, ...]
    n_test: int = 0  # test photos; 0 if never evaluated
    accuracy: float | None = None  # of the greedy path
    confused_with: tuple[tuple[int, int], ...] = ()  # another class and how many were taken for it, most first

    @property
    def correct_text(self) -> str:
        """Say how many of its test photos are classified correctly; empty if never evaluated."""
        return "" if self.accuracy is None else f"{round(self.accuracy * self.n_test)} of {self.n_test} correct"


@dataclass(frozen=True)
class TreeExplanation:
    """Global explanation: everything that pages show of a whole tree (§5.2).

    Attributes:
        title: Name of the run.
        class_names: Names of the K classes.
        left: Left child of each node: a node, or ~leaf.
        right: Right child of each node.
        prototypes: Every prototype; pairwise nodes have all right ones first, then all left ones.
        leaf_probs: Class probabilities of each leaf, L × K.
        accuracy: By strategy on the test images; empty if never evaluated.
        node_kind: presence or pairwise.
        sharpness: Slope of the decisions.
        test_results: Prototype quality in one line; empty if never measured.
        made_from: Data set and day of the training, where they are known.
        classes: Images and results of each class; empty where nothing is known.
        evaluated_on: What the accuracies were measured on.

    Examples:
        >>> explanation = prototree.explain("runs/photos")
        >>> len(explanation.class_names), len(explanation.leaf_probs[0])  # K, K
        (3, 3)
    """

    title: str
    class_names: tuple[str, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    prototypes: tuple[PrototypeExplanation, ...]
    leaf_probs: Float[ndarray, "L K"]
    accuracy: dict[str, float]
    node_kind: NodeKind = "presence"
    sharpness: float = 1.0
    test_results: str = ""
    made_from: str = ""
    classes: tuple[ClassExplanation, ...] = ()
    evaluated_on: str = TEST_IMAGES

    @property
    def n_evaluated(self) -> int:
        """How many images the accuracies were measured on; 0 if that is not known."""
        return sum(known.n_test for known in self.classes)

    def prototype_at(self, node: int, side: Side) -> PrototypeExplanation:
        """Look up a node's prototype; presence has only right ones."""
        return self.prototypes[node if side == "right" else node + len(self.left)]


@dataclass(frozen=True)
class PatchContext:
    """A patch with its surroundings, its edges in that picture, as fractions of it, and what to light up there."""

    picture: Picture
    frame: tuple[float, float, float, float]
    light: Heatmap | None = None  # of `spotlight`; None: not computed

    @classmethod
    def of(cls, photo: Picture, size: Size, box: Box) -> "PatchContext":
        """Cut the surroundings of a box in a photo of this size out of a small picture of the photo."""
        (height, width, _), (across, down) = photo.shape, size
        context = box.context_square(CONTEXT_SCALE, size)
        top, left = int(context.top / down * height), int(context.left / across * width)
        rows = slice(top, max(top + 1, round(context.bottom / down * height)))
        columns = slice(left, max(left + 1, round(context.right / across * width)))
        return cls(photo[rows, columns], box.clip(size).relative_to(context))


@dataclass(frozen=True)
class PatchComparison:
    """A prototype, and what an image has that is nearest to it."""

    prototype: int
    distance: float
    in_radius: bool  # whether it counts as present; of a pairwise node: whether it is as near as usual on its side
    match: Match  # the image's best patch
    picture: Picture  # the prototype's crop
    note: str = ""
    context: PatchContext | None = None  # of the prototype; None: there is no picture of it


@dataclass(frozen=True)
class Step:
    """One node on the path of one image, and what was compared there."""

    node: int
    goes_right: bool
    p_right: float
    right: PatchComparison
    left: PatchComparison | None = None  # only of a pairwise node
    at: float | None = None  # what decided, in the units of a `DecisionHistogram`
    histogram: DecisionHistogram | None = None  # of the training photos at this node; None if never counted

    @property
    def note(self) -> str:
        """Return the user's note about the node: that of its right prototype, which has the same number."""
        return self.right.note

    @property
    def sides(self) -> tuple[PatchComparison, ...]:
        """List what was compared, left to right."""
        return (self.right,) if self.left is None else (self.left, self.right)

    @property
    def chosen(self) -> PatchComparison:
        """Return the side taken; of a presence node, its one prototype."""
        return self.right if self.left is None or self.goes_right else self.left

    @property
    def is_minority_path(self) -> bool:
        """Tell whether the path goes where the node alone would not; never on a greedy path."""
        return self.goes_right != (self.p_right > 0.5)


@dataclass(frozen=True)
class PathExplanation:
    """One way down the tree."""

    strategy: Strategy
    steps: tuple[Step, ...]
    leaf: int
    class_probs: tuple[float, ...]  # of the leaf

    @property
    def answer(self) -> int:
        """Return the leaf's likeliest class."""
        return max(range(len(self.class_probs)), key=self.class_probs.__getitem__)


@dataclass(frozen=True)
class Nearer:
    """Which of a pairwise node's two prototypes would have to be nearer, by how much, if the other stays."""

    prototype: int
    than: int
    by: float


@dataclass(frozen=True)
class Flip:
    """One decision that would have to change: the probability of going right, which for one patch is its similarity."""

    node: int
    p_right: float
    needed: float
    nearer: Nearer | None = None  # only of a pairwise node


@dataclass(frozen=True)
class Counterfactual:
    """The smallest change of similarities with which another class would have won."""

    label: int
    flips: tuple[Flip, ...]


@dataclass(frozen=True)
class Abstention:
    """Why a tree says "I don't know"."""

    node: int | None = None  # whose patch is farther than it may be; None: the answer is not sure enough
    distance_ratio: float = 0.0  # how far, where 1 is usual

    @property
    def reason(self) -> str:
        """Say why in a sentence. It names no percentage: none was measured for images that get no answer."""
        if self.node is None:
            return "No class is far enough ahead of the others for an answer."
        return (
            f"At question {self.node + 1} the image's nearest patch is {self.distance_ratio:.1f} times as far away "
            "as usual for images that turn this way. The image may show none of the classes that this tree knows."
        )


@dataclass(frozen=True)
class DecisionExplanation:
    """Local explanation: how one tree decides about one image (§5.3).

    Attributes:
        image: Name of the image.
        photo: The image, reduced.
        size: Width and height of the original, in which boxes are given.
        class_names: Names of the K classes.
        label: Index of the true class where it is known.
        class_probs: Probability of each class over all paths.
        paths: The path by strategy: greedy, which is the explanation, and max_path.
        counterfactuals: Smallest change of similarities by which another class would win; None where there is none.
        node_kind: presence or pairwise.
        confidence: Calibrated probability that the greedy prediction is right; None when abstaining.
        abstention: Why the tree abstains; None if it does not.
        n_calibration: Number of images that the confidence was fitted on; 0: it is not calibrated.
        ensemble_probs: Class probabilities of this tree within an ensemble.

    Examples:
        >>> decision = prototree.explain("runs/photos", "bird.jpg")
        >>> len(decision.class_probs), sorted(decision.paths)  # a probability per class; one path per strategy
        (3, ['greedy', 'max_path'])
    """

    image: str
    photo: Picture
    size: tuple[int, int]
    class_names: tuple[str, ...]
    label: int | None
    class_probs: tuple[float, ...]
    paths: dict[Strategy, PathExplanation]
    counterfactuals: dict[Strategy, Counterfactual | None]
    node_kind: NodeKind = "presence"
    confidence: float | None = 1.0
    abstention: Abstention | None = None
    n_calibration: int = 0
    ensemble_probs: tuple[float, ...] = ()

    @property
    def answer(self) -> int:
        """Return the class that the greedy path ends in: the best guess where the tree abstains."""
        return self.paths["greedy"].answer

    @property
    def distinct_paths(self) -> tuple[PathExplanation, ...]:
        """List the greedy path first, and another only where it leads to another class."""
        first, *others = sorted(self.paths.values(), key=lambda path: path.strategy != "greedy")
        return (first, *(path for path in others if path.answer != first.answer))


@dataclass(frozen=True)
class EnsembleExplanation:
    """One image and several trees."""

    decisions: tuple[DecisionExplanation, ...]
    class_probs: tuple[float, ...]  # the mean of the trees'


@dataclass(frozen=True)
class ClassChange:
    """How many test images of a class each tree names correctly."""

    name: str
    n_images: int
    before: int
    after: int


@dataclass(frozen=True)
class ChangedImage:
    """A test image that the two trees name differently."""

    image: str
    label: str
    before: str
    after: str
    picture: Picture


@dataclass(frozen=True)
class ShownPatch:
    """A patch of a question, such as 7L, with its name and its picture."""

    patch: str
    note: str
    crop: Picture
    context: PatchContext | None = None  # None: there is no picture of it


@dataclass(frozen=True)
class ChangedQuestion:
    """A question that only one tree asks, or that both ask with one patch in common; its patches, left to right."""

    before: tuple[ShownPatch, ...]
    after: tuple[ShownPatch, ...]


@dataclass(frozen=True)
class Comparison:
    """Two trees side by side: `before` is the other run, `after` the run in question."""

    before: str  # their names
    after: str
    n_images: int
    classes: tuple[ClassChange, ...]
    changed: tuple[ChangedImage, ...]  # as many as are shown
    n_fixed: int  # wrong before, right now
    n_broken: int
    n_otherwise: int  # wrong before and now, but differently
    n_same_questions: int
    questions: tuple[ChangedQuestion, ...]
    lost_classes: tuple[str, ...] = ()  # that had a leaf before and have none now

    @property
    def correct(self) -> tuple[int, int]:
        """Count the images that each tree names correctly: before and after."""
        return sum(change.before for change in self.classes), sum(change.after for change in self.classes)

"""The API's questions and answers as data; the OpenAPI description is made from these."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_INDEX = 2**31 - 1
Index = Annotated[int, Field(ge=0, le=MAX_INDEX)]
Pixel = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
RegionList = Annotated[list[Pixel], Field(min_length=4, max_length=4, description="left, top, right, bottom")]
PatchList = Annotated[list[Annotated[int, Field(ge=0, le=4096)]], Field(min_length=2, max_length=2)]
Split = Literal["training", "feedback"]
Side = Literal["right", "left"]
Asked = Literal["presence", "pairwise"]


class Shape(BaseModel):
    """Unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ProblemShape(Shape):
    """Why a request was refused."""

    detail: str


class HealthShape(Shape):
    """That the server is running, and how many requests are waiting."""

    status: Literal["ok"]
    version: str
    revision: int
    waiting: int


class RunShape(Shape):
    """The run, and the photos that can be shown."""

    title: str
    classes: list[str]
    prototypes: int
    training_photos: int
    feedback_photos: int
    feedback: str
    held_back: int
    question: Asked  # of every node
    can_finetune: bool  # whether the network can be trained on with the edited tree


class PhotoShape(Shape):
    """A photo by its number; its picture is at `picture`, a small one at `thumb`."""

    split: Split
    index: int
    name: str
    label: int
    width: int
    height: int
    picture: str
    thumb: str


class GridShape(Shape):
    """Where the network's patches lie in a photo: the cell in row r, column c begins at left + c·across."""

    left: float
    top: float
    across: float
    down: float
    rows: int
    columns: int
    patch_rows: int
    patch_columns: int


class PhotoGridShape(PhotoShape):
    """A photo with its patches."""

    grid: GridShape


class PatchShape(Shape):
    """A patch of a training photo: `box` is the network's cell, `shown` is the box that pages draw.

    `crop` is a picture of what is shown, `around` one with its surroundings; `frame` has the edges of the patch in it,
    as shares of the picture.
    """

    photo: PhotoShape
    view: str
    patch: list[int]
    box: list[float]
    shown: list[float]
    crop: str
    around: str
    frame: list[float]
    similarity: float


class NodeShape(Shape):
    """A node of the current tree, by its place in it; `~leaf` is a leaf.

    With `presence` it asks whether `source` is there (right) or not; with `pairwise` which is nearer, `source` (right)
    or `other` (left).
    """

    node: int
    question: Asked
    left: int
    right: int
    note: str
    classes_left: list[str]
    classes_right: list[str]
    source: PatchShape | None
    distance: float
    other: PatchShape | None = None
    other_distance: float | None = None


class CandidatesShape(Shape):
    """The training patches nearest to a prototype that may take its place."""

    node: int
    side: Side
    revision: int
    candidates: list[PatchShape]


class ClassShareShape(Shape):
    """A class and how likely it is."""

    label: int
    name: str
    share: float


class ComparedShape(Shape):
    """A prototype, and the image's best patch for it."""

    number: int  # of the prototype
    note: str
    prototype: str
    patch: str
    box: list[float]
    distance: float
    in_reach: bool


class StepShape(Shape):
    """One question on the path. If two patches are compared, this is the right one, and `other` the left one."""

    node: int
    note: str
    similarity: float  # the probability of going right: where one patch is asked for, its similarity
    present: bool  # whether the way goes right
    prototype: str
    patch: str
    box: list[float]
    distance: float
    in_reach: bool
    words: str
    other: ComparedShape | None = None


class WayShape(Shape):
    """One path through the tree; `differs` says whether it ends in another class than the first one."""

    strategy: Literal["max_path", "greedy"]
    differs: bool = False
    steps: list[StepShape]
    answer: ClassShareShape
    needed: list[str]


class DecisionShape(Shape):
    """The tree's answer for an image."""

    id: str
    link: str
    name: str
    revision: int
    width: int
    height: int
    photo: str
    truth: str | None
    question: Literal["presence", "pairwise"] = "presence"
    answer: str  # where the greedy path ends
    confidence: float | None  # that it is right; none where the tree gives no answer
    is_known: bool = True  # whether the tree gives an answer at all; otherwise the answer is a guess
    doubt: str | None = None  # why it does not
    soft: list[ClassShareShape]
    ways: list[WayShape]


class SampleQuestion(Shape):
    """One of the photos that the server has."""

    split: Split
    index: Index


class MistakeShape(Shape):
    """A wrong answer and the node that is responsible."""

    photo: PhotoShape
    truth: str
    answer: str
    node: int | None
    goes_right: bool
    p_right: float | None  # at the node; where it asks for presence, the similarity


class BlameShape(Shape):
    """How many wrong turns a node has taken."""

    node: int
    mistakes: int
    goes_right: int


class MistakesShape(Shape):
    """Wrong answers on the photos for feedback."""

    strategy: str
    photos: int
    nodes: list[BlameShape]
    images: list[MistakeShape]


class ReplaceEdit(Shape):
    """Puts a patch of a training photo at a node: the one nearest to `region`, or the one at `patch` of a view.

    If a node compares two patches, `side` says which of them is replaced.
    """

    edit: Literal["replace"]
    node: Index
    side: Side = "right"
    photo: Index
    region: RegionList | None = None
    view: Annotated[str, Field(max_length=40)] = "full"
    patch: PatchList | None = None


class ExcludeEdit(Shape):
    """Exclusions a training photo, or a region of it, as a source of prototypes."""

    edit: Literal["exclude"]
    photo: Index
    region: RegionList | None = None


class RemoveEdit(Shape):
    """Removes a node; the subtree on the side to keep takes its place."""

    edit: Literal["remove"]
    node: Index
    keep: Literal["left", "right"]


class NoteEdit(Shape):
    """A note about a node; an empty text removes it."""

    edit: Literal["note"]
    node: Index
    text: Annotated[str, Field(max_length=200)]


class EditQuestion(Shape):
    """An edit based on a revision of the tree; if that is no longer the latest, it is refused with 409."""

    revision: Index
    edit: Annotated[ReplaceEdit | ExcludeEdit | RemoveEdit | NoteEdit, Field(discriminator="edit")]


class RevisionQuestion(Shape):
    """A change based on a revision of the tree."""

    revision: Index


class FiguresShape(Shape):
    """How good a tree is on the photos for feedback."""

    photos: int
    accuracy: dict[str, float]
    fidelity: dict[str, float]
    path_length: dict[str, float]
    prototypes: int


class ChangedShape(Shape):
    """A photo whose answer differs from before the last change."""

    photo: PhotoShape
    truth: str
    before: str
    after: str


class EditsShape(Shape):
    """The state of editing: `original` is before any edit, `before` is before the last change, and `now`."""

    revision: int
    done: list[str]
    undone: list[str]
    original: FiguresShape
    before: FiguresShape
    now: FiguresShape
    changed: list[ChangedShape]
    nodes: list[int]
    feedback: str


class SavedShape(Shape):
    """The new run, and the figures of both trees on photos that gave no feedback."""

    run: str
    photos: str
    before: dict[str, float]
    after: dict[str, float]


class FinetuneStatus(Shape):
    """Whether the network is being trained further, and the accuracies (greedy path) when it is done."""

    state: Literal["idle", "learning", "done", "opened", "failed"]  # opened: the app shows the new run now
    run: str = ""
    folder: str = ""  # from where the server was started
    seconds: int = 0
    says: str = ""
    photos: str = ""
    original: float | None = None
    edited: float | None = None
    learned: float | None = None

"""Request bodies (`*Request`) and responses (`*Response`) of the web API; the OpenAPI description is made from them.

A node has its number here, which is its index in the tree + 1. Images have their index in a split.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from prototree.editing.edits import MAX_NOTE, Side
from prototree.editing.state import EditMetrics
from prototree.evaluation.schema import NodeErrors

MAX_INDEX = 2**31 - 1
Index = Annotated[int, Field(ge=0, le=MAX_INDEX)]
NodeNumber = Annotated[int, Field(ge=1, le=MAX_INDEX)]
Pixel = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Edges = Annotated[list[Pixel], Field(min_length=4, max_length=4, description="left, top, right, bottom")]
PatchIndex = Annotated[list[Annotated[int, Field(ge=0, le=4096)]], Field(min_length=2, max_length=2)]
Split = Literal["training", "validation"]
NodeKind = Literal["presence", "pairwise"]


class StrictRequest(BaseModel):
    """Unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class SampleRequest(StrictRequest):
    """One of the images that the server has."""

    split: Split
    index: Index


class ReplaceRequest(StrictRequest):
    """Put a patch of a training image at a node: the one nearest to `region`, or the one at `patch` of a view."""

    edit: Literal["replace"]
    node: NodeNumber
    side: Side = "right"
    image: Index
    region: Edges | None = None
    view: Annotated[str, Field(max_length=40)] = "full"
    patch: PatchIndex | None = None


class ExcludeRequest(StrictRequest):
    """Exclude a training image, or a region of it, as a source of prototypes."""

    edit: Literal["exclude"]
    image: Index
    region: Edges | None = None


class RemoveRequest(StrictRequest):
    """Remove a node; the subtree on the side to keep takes its place."""

    edit: Literal["remove"]
    node: NodeNumber
    keep: Side


class NoteRequest(StrictRequest):
    """Name a node; an empty text removes the note."""

    edit: Literal["note"]
    node: NodeNumber
    text: Annotated[str, Field(max_length=MAX_NOTE)]


class RevisionRequest(StrictRequest):
    """A change based on a revision of the tree; if that is no longer the latest, it is refused with 409."""

    revision: Index


class EditRequest(RevisionRequest):
    """An edit based on a revision of the tree."""

    edit: Annotated[ReplaceRequest | ExcludeRequest | RemoveRequest | NoteRequest, Field(discriminator="edit")]


class ErrorResponse(BaseModel):
    """Why a request was refused."""

    detail: str


class RunResponse(BaseModel):
    """The run that is open, and the images that can be shown."""

    title: str
    classes: list[str]
    node_kind: NodeKind
    n_nodes: int
    n_training: int = 0
    n_validation: int = 0
    n_test: int = 0  # test images that are held out until the tree is saved
    validation: str = "none"  # what the validation images are called
    can_finetune: bool = False


class GridResponse(BaseModel):
    """Where the network's patches lie in an image: the cell in row r, column c begins at left + c·cell_width."""

    left: float
    top: float
    cell_width: float
    cell_height: float
    rows: int
    columns: int
    patch_rows: int
    patch_columns: int


class ImageResponse(BaseModel):
    """An image by its index; its picture is at `picture`, a small one at `thumb`."""

    split: Split
    index: int
    name: str
    label: int
    width: int
    height: int
    picture: str
    thumb: str
    grid: GridResponse | None = None


class PatchResponse(BaseModel):
    """A patch of a training image; `frame` has the edges of the display box in the picture `context`, as fractions."""

    image: ImageResponse
    view: str
    patch: list[int]
    box: list[float]  # of the network's patch, in pixels of the image
    display_box: list[float]
    crop: str  # a picture of the display box
    context: str  # one with its surroundings
    frame: list[float]
    similarity: float
    projection_distance: float | None = None  # of a prototype: how far it moved to become this patch


class NodeResponse(BaseModel):
    """A node with its prototypes: a presence node has the right one, a pairwise node both."""

    node: int
    kind: NodeKind
    note: str
    classes_left: list[str]
    classes_right: list[str]
    right: PatchResponse | None
    left: PatchResponse | None = None


class DecisionResponse(BaseModel):
    """How the tree decides about an image: besides these keys those that `prototree explain --json` prints."""

    model_config = ConfigDict(extra="allow")

    id: str
    link: str  # to the page
    revision: int
    pictures: dict[str, str]  # name → address
    image: str
    paths: dict[str, Any]


class PredictionErrorResponse(BaseModel):
    """A wrong prediction and the node that is responsible; None if no leaf stands for the true class."""

    image: ImageResponse
    label: str
    prediction: str
    node: int | None
    goes_right: bool
    p_right: float | None


class ErrorsResponse(BaseModel):
    """Wrong predictions on the validation images."""

    n_images: int
    nodes: list[NodeErrors]  # most errors first
    images: list[PredictionErrorResponse]


class ChangedResponse(BaseModel):
    """An image whose prediction the last change has altered."""

    image: ImageResponse
    label: str
    previous: str
    current: str


class EditsResponse(BaseModel):
    """The history of edits, and metrics before any edit, before the last change, and now."""

    revision: int
    n_nodes: int
    done: list[str]
    undone: list[str]
    initial: EditMetrics
    previous: EditMetrics
    current: EditMetrics
    changed: list[ChangedResponse]
    validation: str


class FinetuneResponse(BaseModel):
    """Progress of fine-tuning, and accuracies of the greedy path when it is done."""

    state: Literal["idle", "running", "done", "opened", "failed"]  # opened: the app shows the new run now
    run: str = ""
    folder: str = ""  # from where the server was started
    seconds: int = 0
    last_log_line: str = ""
    images: str = ""
    initial: float | None = None
    edited: float | None = None
    finetuned: float | None = None

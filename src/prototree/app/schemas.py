"""Request bodies (`*Request`) of the web API, and the responses (`*Response`) that are made in more than one place.

A node has its number here, which is its index in the tree + 1. Images have their index in a split.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from prototree.core.nodes import NodeKind
from prototree.editing.edits import MAX_NOTE, Side

Index = Annotated[int, Field(ge=0, le=2**31 - 1)]
NodeNumber = Annotated[int, Field(ge=1, le=2**31 - 1, description="the node's number")]
Key = Annotated[str, Field(max_length=40)]
Pixel = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Edges = Annotated[list[Pixel], Field(min_length=4, max_length=4, description="left, top, right, bottom")]
PatchIndex = Annotated[list[Annotated[int, Field(ge=0, le=4096)]], Field(min_length=2, max_length=2)]
Split = Literal["training", "validation", "test"]


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
    view: Key = "full"
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
    """Name a patch of a node, of a pairwise node the one on `side`; an empty text removes the note."""

    edit: Literal["note"]
    node: NodeNumber
    side: Side = "right"
    text: Annotated[str, Field(max_length=MAX_NOTE)]


class RevisionRequest(StrictRequest):
    """A change based on a revision of the tree; if that is no longer the latest, it is refused with 409."""

    revision: Index


class EditRequest(RevisionRequest):
    """An edit based on a revision of the tree."""

    edit: Annotated[ReplaceRequest | ExcludeRequest | RemoveRequest | NoteRequest, Field(discriminator="edit")]


class ImageResponse(BaseModel):
    """An image by its index; its picture is at `picture`, a small one at `thumb`.

    `grid` has the network's patches: the cell in row r, column c begins at left + c·cell_width, top + r·cell_height.
    """

    split: Split
    index: int
    name: str
    label: int
    width: int
    height: int
    picture: str
    thumb: str
    grid: dict[str, int | float] | None = None


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


class NameResponse(BaseModel):
    """What people call a patch, such as 7L; a name is suggested from measurements, and not checked."""

    side: Side
    patch: str
    note: str
    suggestion: str
    suggested_from: str


class NodeResponse(BaseModel):
    """A node with its prototypes: a presence node has the right one, a pairwise node both."""

    node: int
    kind: NodeKind
    note: str  # the names of its patches; empty if neither has one
    names: list[NameResponse]  # left to right
    classes_left: list[str]
    classes_right: list[str]
    right: PatchResponse | None
    left: PatchResponse | None = None


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


class WebP(Response):
    """A picture, which a browser may keep for an hour."""

    media_type = "image/webp"

    def __init__(self, content: bytes, status_code: int = 200) -> None:
        super().__init__(content, status_code, headers={"Cache-Control": "private, max-age=3600"})

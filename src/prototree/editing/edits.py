"""Edits of a tree as plain data (replace, exclude, remove, note), and their history with undo and redo.

An edit names a node by its index in the tree that it is applied to, after all edits before it. In files a node has its
number instead, which is its index + 1.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from prototree.errors import CheckpointError, ConflictError, EditError
from prototree.io import expect_version, read_json, write_json

_VERSION = 1
MAX_NOTE = 200
MAX_EDITS = 10_000

Region = tuple[float, float, float, float]
"""Left, top, right, bottom in pixels of the upright image."""
Side = Literal["right", "left"]
"""Which prototype of a node: a presence node has only the right one, a pairwise node has both."""


@dataclass(frozen=True)
class Replace:
    """Make a patch of a training image the prototype of a node, on one side of a pairwise node."""

    node: int
    image: str  # relative to the data's root
    view: str
    patch: tuple[int, int]  # row and column in the feature map
    side: Side = "right"


@dataclass(frozen=True)
class Exclude:
    """Exclude a training image (`region` None), or a region of it, as a source of prototypes."""

    image: str
    region: Region | None = None


@dataclass(frozen=True)
class Remove:
    """Remove a node; the subtree on the side to keep takes its place, the other subtree goes."""

    node: int
    keep: Side


@dataclass(frozen=True)
class Note:
    """Name a patch of a node in the user's own words; an empty text removes the note."""

    node: int
    text: str
    side: Side = "right"

    def __post_init__(self) -> None:
        if len(self.text) > MAX_NOTE or not self.text.isprintable():
            raise EditError(f"expected a note of one line and at most {MAX_NOTE} characters, got {len(self.text)}")


Edit = Replace | Exclude | Remove | Note
_KINDS: dict[str, type[Edit]] = {"replace": Replace, "exclude": Exclude, "remove": Remove, "note": Note}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_json(edit: Edit) -> dict[str, Any]:
    """Return the edit as a JSON object whose key `edit` names its kind."""
    content = {"edit": _NAMES[type(edit)], **asdict(edit)}
    return content if isinstance(edit, Exclude) else content | {"node": edit.node + 1}


def from_json(content: Mapping[str, Any]) -> Edit:
    """Parse what `to_json` wrote."""
    values = dict(content)
    try:
        kind = _KINDS[values.pop("edit")]
        for key in ("patch", "region"):
            if values.get(key) is not None:
                values[key] = tuple(values[key])
        if kind is not Exclude:
            values["node"] -= 1
        return kind(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise EditError(f"expected an edit such as {to_json(Note(3, 'long beak'))}, got {content} ({error})") from error


@dataclass(frozen=True)
class History:
    """Edits that are applied, edits that were undone, and a revision that every change increments."""

    origin: str  # fingerprint of the tree that the edits are applied to
    done: tuple[Edit, ...] = ()
    undone: tuple[Edit, ...] = ()  # the one undone last comes last
    revision: int = 0

    def check_revision(self, revision: int | None) -> None:
        """Refuse a change that is based on another revision."""
        if revision is not None and revision != self.revision:
            raise ConflictError(
                f"expected revision {self.revision}, got {revision}: the tree has been changed meanwhile; "
                "look at it again, then repeat the edit"
            )

    def add(self, edit: Edit) -> "History":
        if len(self.done) >= MAX_EDITS:
            raise EditError(f"expected at most {MAX_EDITS} edits; save the tree and go on from there")
        return replace(self, done=(*self.done, edit), undone=(), revision=self.revision + 1)

    def undo(self) -> "History":
        if not self.done:
            raise EditError("there is nothing to undo")
        return replace(self, done=self.done[:-1], undone=(*self.undone, self.done[-1]), revision=self.revision + 1)

    def redo(self) -> "History":
        if not self.undone:
            raise EditError("there is nothing to redo")
        return replace(self, done=(*self.done, self.undone[-1]), undone=self.undone[:-1], revision=self.revision + 1)

    def write(self, path: Path) -> None:
        """Write the history atomically."""
        lists = {key: [to_json(edit) for edit in getattr(self, key)] for key in ("done", "undone")}
        write_json(path, {"version": _VERSION, "origin": self.origin, "revision": self.revision, **lists})


def read_history(path: Path, origin: str) -> History:
    """Read the history of the tree with this fingerprint; an empty one if there is no file."""
    if not path.exists():
        return History(origin)
    content = read_json(path)
    expect_version(content, _VERSION, path)
    if content.get("origin") != origin:
        raise CheckpointError(
            f"{path} is the history of another tree; the run has been made again. Delete it, or choose another folder"
        )
    try:
        done, undone = (tuple(map(from_json, content[key])) for key in ("done", "undone"))
        return History(origin, done, undone, int(content["revision"]))
    except (KeyError, TypeError, ValueError, EditError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); restore it from a copy") from error

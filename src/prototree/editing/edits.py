"""What can be changed in a tree by hand, as plain data, and the history of it.

A node's number is its place in the tree that the edit is made on: after the edits before it, as people see it then.
Edits are always made in order from the first one, so that says which node is meant.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from prototree.errors import CheckpointError, ConflictError, EditError
from prototree.files import expect_version, read_json, write_json

_VERSION = 3
"""1: nodes had the numbers of the tree before the first edit. 2: there was no checksum."""
MAX_NOTE = 200
MAX_EDITS = 10_000

Region = tuple[float, float, float, float]
"""Left, top, right, bottom in pixels of the upright photo."""

Side = Literal["right", "left"]
"""Which of a node's prototypes: one that asks for presence has only the right one, one that compares has both."""


@dataclass(frozen=True)
class Replace:
    """The node's prototype, on one side where it has two, becomes this patch of this training photo."""

    node: int
    image: str  # relative to the data's root
    view: str
    patch: tuple[int, int]  # row and column in the feature map
    side: Side = "right"

    def __post_init__(self) -> None:
        if self.side not in get_args(Side):
            raise EditError(f"expected the side 'right' or 'left', got {self.side!r}")


@dataclass(frozen=True)
class Exclude:
    """No prototype may come from this training photo (`region` None), or from this region of it."""

    image: str
    region: Region | None = None


@dataclass(frozen=True)
class Remove:
    """The node goes and one of its two subtrees takes its place; the other one goes with it."""

    node: int
    keep: Literal["left", "right"]


@dataclass(frozen=True)
class Note:
    """The user's words about a node; empty words remove the note."""

    node: int
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > MAX_NOTE or not self.text.isprintable():
            raise EditError(f"expected a note of one line and at most {MAX_NOTE} characters, got {len(self.text)}")


Edit = Replace | Exclude | Remove | Note
KINDS: dict[str, type[Edit]] = {"replace": Replace, "exclude": Exclude, "remove": Remove, "note": Note}
_NAMES = {kind: name for name, kind in KINDS.items()}


def to_json(edit: Edit) -> dict[str, Any]:
    """As an object whose `edit` names its kind."""
    return {"edit": _NAMES[type(edit)], **asdict(edit)}


def from_json(values: Mapping[str, Any]) -> Edit:
    """What `to_json` wrote."""
    content = dict(values)
    try:
        kind = KINDS[content.pop("edit")]
        for key in ("patch", "region"):
            if content.get(key) is not None:
                content[key] = tuple(content[key])
        return kind(**content)
    except (KeyError, TypeError, AttributeError) as error:
        raise EditError(f"expected an edit such as {to_json(Note(3, 'long beak'))}, got {values} ({error})") from error


@dataclass(frozen=True)
class History:
    """Edits that are in force, edits that were undone, and how often anything has changed.

    Each change makes a new history of the next revision; a change that was meant for another revision is refused.
    """

    origin: str  # the fingerprint of the tree that the edits are made on
    done: tuple[Edit, ...] = ()
    undone: tuple[Edit, ...] = ()  # the one undone last comes last
    revision: int = 0

    def expect(self, revision: int | None) -> None:
        """Refuses a change that was decided upon looking at another state."""
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
        """Atomically: a kill leaves the old file or the new one."""
        content = {
            "version": _VERSION,
            "origin": self.origin,
            "revision": self.revision,
            "done": [to_json(edit) for edit in self.done],
            "undone": [to_json(edit) for edit in self.undone],
        }
        write_json(path, content)


def read_history(path: Path, origin: str) -> History:
    """The history of a tree; an empty one where there is no file."""
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
        history = History(origin, done, undone, int(content["revision"]))
    except (KeyError, TypeError, ValueError, EditError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); restore it from a copy") from error
    return history

import json
from pathlib import Path

import pytest

from prototree.editing.edits import Edit, Exclude, History, Note, Remove, Replace, from_json, read_history, to_json
from prototree.errors import CheckpointError, ConflictError, EditError

EDITS: list[Edit] = [
    Replace(3, "a/b.png", "full", (1, 2)),
    Replace(3, "a/b.png", "full", (1, 2), "left"),
    Exclude("a/b.png"),
    Exclude("a/b.png", (0.0, 1.5, 20.0, 30.0)),
    Remove(0, "left"),
    Note(2, "long beak ☂"),
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: type(edit).__name__)
def test_an_edit_survives_json_where_nodes_count_from_1(edit: Edit) -> None:
    content = json.loads(json.dumps(to_json(edit)))
    assert from_json(content) == edit
    assert content.get("node") == (None if isinstance(edit, Exclude) else edit.node + 1)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"edit": "burn"},
        {"edit": "note", "node": 1},
        {"edit": "note", "node": "1", "text": "x"},
        {"edit": "exclude", "image": "a", "x": 1},
    ],
)
def test_what_is_no_edit_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(EditError):
        from_json(values)


@pytest.mark.parametrize("text", ["x" * 201, "two\nlines", "bell\a"])
def test_a_note_is_one_short_line(text: str) -> None:
    with pytest.raises(EditError):
        Note(0, text)


def test_undo_and_redo_move_along_the_edits() -> None:
    history = History("tree")
    for edit in EDITS:
        history = history.add(edit)
    back = history.undo().undo()
    assert back.done == tuple(EDITS[:-2])
    assert back.redo().redo().done == tuple(EDITS)
    assert back.redo().undone == (EDITS[-1],)
    assert back.add(EDITS[0]).undone == ()
    assert back.redo().redo().revision == len(EDITS) + 4
    for step in (History.undo, History.redo):
        with pytest.raises(EditError):
            step(History("tree"))


def test_a_change_based_on_another_revision_is_refused() -> None:
    history = History("tree").add(EDITS[0])
    history.check_revision(None)
    history.check_revision(1)
    with pytest.raises(ConflictError):
        history.check_revision(0)


def test_a_history_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    history = History("tree", tuple(EDITS), (EDITS[0],), 9)
    history.write(tmp_path / "history.json")
    assert read_history(tmp_path / "history.json", "tree") == history
    assert read_history(tmp_path / "none.json", "tree") == History("tree")
    with pytest.raises(CheckpointError, match="another tree"):
        read_history(tmp_path / "history.json", "other")


@pytest.mark.parametrize(
    "content",
    [b"{", b'{"version": 2, "origin": "tree"}', b'{"version": 1, "origin": "tree", "done": [{}], "undone": []}'],
)
def test_a_damaged_history_is_an_error_not_an_empty_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "history.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        read_history(tmp_path / "history.json", "tree")

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from prototree.core import checkpoint
from prototree.editing.edits import Exclude, Note, Remove, Replace
from prototree.editing.session import EditSession, open_session
from prototree.errors import CheckpointError, ConflictError, DataError, EditError
from prototree.explain.tree import explain_tree
from prototree.explain.votes import explain_decision, open_voters
from prototree.pipeline.fit import rerun
from prototree.report import write_report
from prototree.run import Run
from tiny_editing import content_of, same_tree, tiny_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return tiny_run(tmp_path)


@pytest.fixture
def session(run: Run) -> EditSession:
    return open_session(run)


def an_edit(session: EditSession, node: int = 1) -> Replace:
    return session.workbench.candidates(session.state, node)[3].cell.replaces(node)


def test_undo_and_redo_give_back_the_very_same_trees(session: EditSession) -> None:
    trees = [session.state.tree]
    for edit in (an_edit(session), Note(1, "red"), Remove(0, "left"), Exclude("train/red/0.png")):
        trees.append(session.apply(edit).state.tree)
    for tree in trees[-2::-1]:
        assert same_tree(session.undo().state.tree, tree)
    assert session.state.notes == {}
    for tree in trees[1:]:
        assert same_tree(session.redo().state.tree, tree)
    assert session.revision == 12


def test_a_session_goes_on_where_it_was_left(session: EditSession, run: Run) -> None:
    for edit in (an_edit(session), Remove(0, "left"), Note(0, "red")):
        session.apply(edit)
    expected = session.state.tree
    session.undo()
    session.close()
    again = open_session(run)
    assert again.snapshot.history == session.snapshot.history
    assert same_tree(again.state.tree, session.state.tree)
    assert same_tree(again.redo().state.tree, expected)


def test_one_session_at_a_time_edits_a_run(session: EditSession, run: Run, tmp_path: Path) -> None:
    session.apply(Note(1, "red"))
    with pytest.raises(EditError, match="another session or server"):
        open_session(run)
    with pytest.raises(EditError, match="another session or server"):
        open_session(run.folder, work=session.work)
    assert open_session(run, work=tmp_path / "elsewhere").revision == 0  # a history of its own
    session.close()
    again = open_session(run)
    assert again.state.notes == {1: "red"}
    with pytest.raises(EditError, match="closed"):
        session.apply(Note(1, "blue"))
    del again  # a session that nobody uses holds nothing
    assert open_session(run).state.notes == {1: "red"}


def test_edits_after_a_removal_mean_the_nodes_as_they_are_then(session: EditSession, run: Run) -> None:
    session.apply(Note(2, "last of three"))
    session.apply(Remove(1, "left"))
    assert session.state.notes == {1: "last of three"}
    chosen = session.workbench.candidates(session.state, 1)[3].cell
    session.apply(chosen.replaces(1))
    tree = session.apply(Note(1, "blue")).state.tree
    assert torch.equal(tree.prototypes[0], run.tree().prototypes[0])
    source = tree.sources[1]
    assert source is not None
    assert (source.image, source.view, source.patch) == (chosen.image, chosen.view, chosen.patch)
    with pytest.raises(EditError, match="from 0 to 1, got 2"):
        session.apply(Note(2, "gone"))
    for _ in range(3):
        session.undo()
    assert session.state.notes == {2: "last of three"}
    assert torch.equal(session.state.tree.prototypes, run.tree().prototypes)
    for _ in range(2):
        session.redo()
    session.close()
    again = open_session(run)
    assert again.state.notes == {1: "last of three"}
    assert same_tree(again.redo().state.tree, tree)
    assert again.save().notes == {1: "blue"}


def test_undoing_farther_than_is_remembered_computes_again(
    session: EditSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prototree.editing.session._KEPT_STATES", 2)
    trees = [session.state.tree]
    for place in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 0)):
        trees.append(session.apply(Replace(1, "train/red/1.png", "full", place)).state.tree)
    for tree in trees[-2::-1]:
        assert same_tree(session.undo().state.tree, tree)


def test_an_edit_meant_for_another_revision_changes_nothing(session: EditSession) -> None:
    session.apply(Note(0, "first"), revision=0)
    written = (session.work / "history.json").read_bytes()
    with pytest.raises(ConflictError):
        session.apply(Note(0, "second"), revision=0)
    with pytest.raises(EditError):
        session.apply(Note(99, "nowhere"))
    assert dict(session.state.notes) == {0: "first"}
    assert session.revision == 1
    assert (session.work / "history.json").read_bytes() == written


def test_a_saved_run_is_the_edited_tree_and_can_be_used_as_a_run(session: EditSession, run: Run) -> None:
    before = content_of(run.folder)
    for edit in (an_edit(session), Note(1, "red “square” <b>"), Remove(0, "left"), Exclude("train/red/0.png")):
        session.apply(edit)
    saved = session.save()
    assert saved.folder == run.folder.with_name("run-edited-1")
    assert same_tree(saved.tree(), session.state.tree)
    assert content_of(run.folder) == before, "the original was changed"
    assert saved.notes == {0: "red “square” <b>"}
    editing = json.loads((saved.folder / "edits.json").read_text())
    assert editing["from"] == "run"
    assert len(editing["edits"]) == 4
    judged = saved.metrics["stages"]["projected"]
    assert judged["n_images"] == len(session.held_back or ()) == 6
    assert editing["judged"]["after"] == judged["accuracy"]
    rerun(saved.folder, "evaluate")
    assert saved.metrics["stages"]["projected"]["n_images"] == 12
    assert session.save().folder.name == "run-edited-2"


def test_notes_appear_in_reports_rules_and_explanations(session: EditSession) -> None:
    session.apply(Note(1, "long beak"))
    saved = session.save()
    explanation = explain_tree(saved, nearest=0)
    assert [prototype.note for prototype in explanation.prototypes] == ["", "long beak", ""]
    assert any(
        "long beak" in path.read_text()
        for path in write_report(explanation, saved.folder / "report")
        if path.suffix == ".txt"
    )
    voters = open_voters([saved.folder])
    decision = explain_decision(voters, next((session.data.root / "test").rglob("*.png")))
    steps = {step.node: step.note for path in decision.paths.values() for step in path.steps}  # type: ignore[union-attr]
    assert steps.get(1, "long beak") == "long beak"
    (saved.folder / "notes.json").write_text('{"first": "x"}')
    with pytest.raises(CheckpointError, match="node numbers"):
        open_session(saved)


def test_a_edited_run_can_be_edited_again(session: EditSession) -> None:
    session.apply(Note(0, "root"))
    session.apply(Exclude("train/red/0.png"))
    again = open_session(session.save())
    assert dict(again.state.notes) == {0: "root"}
    assert again.state.excluded == (Exclude("train/red/0.png"),)
    assert all(
        candidate.cell.image != "train/red/0.png" for candidate in again.workbench.candidates(again.state, 0, 100)
    )


def test_feedback_and_judgement_share_no_photo(session: EditSession) -> None:
    seen = {entry.sample.path for entry in session.workbench.feedback.entries}
    held_back = session.held_back
    assert held_back is not None
    unseen = {entry.sample.path for entry in held_back.entries}
    assert not seen & unseen
    assert seen | unseen == {sample.path for sample in session.data.test}
    assert {mistake["image"] for mistake in session.mistakes()["images"]} <= {
        session.workbench.name(entry.sample) for entry in session.workbench.feedback.entries
    }


def test_photos_of_ones_own_give_feedback(run: Run, tmp_path: Path) -> None:
    session = open_session(run, validation=tmp_path / "squares", work=tmp_path / "elsewhere")
    assert session.figures.n_photos == 30
    assert session.held_back is not None
    assert len(session.held_back) == 12
    session.apply(Note(0, "x"))
    assert (tmp_path / "elsewhere" / "history.json").exists()


def test_what_is_there_is_not_overwritten(session: EditSession, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(EditError, match="exists"):
        session.save(tmp_path / "taken")
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_the_work_folder_is_not_the_run(run: Run) -> None:
    with pytest.raises(EditError, match="never changed"):
        open_session(run, work=run.folder)


def test_other_data_or_another_tree_is_refused(session: EditSession, run: Run, tmp_path: Path) -> None:
    from data_files import write_classes

    other = write_classes(tmp_path / "other", {"cat": 4, "dog": 4})
    with pytest.raises(DataError, match="expected the classes"):
        open_session(run, data=other)
    session.apply(Note(0, "x"))
    tree = run.tree()
    with torch.no_grad():
        tree.prototypes += 1
    checkpoint.save(tree, run.folder / "projected")
    session.close()
    with pytest.raises(CheckpointError, match="another tree"):
        open_session(run)


KILLED = """
    import sys
    from pathlib import Path
    from prototree.editing.edits import Note
    from prototree.editing.session import open_session
    session = open_session(sys.argv[1])
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        session.apply(Note(0, f"note {number}"))
        session.save(Path(sys.argv[1]).with_name(f"saved-{number}"))
        print(number, flush=True)
"""


def test_a_kill_while_saving_leaves_old_or_new_never_half(run: Run) -> None:
    open_session(run)  # computes the maps
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(run.folder)]
    for pause in (0.0, 0.07):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
            assert process.stdout is not None
            while process.stdout.readline().strip() != "1":
                assert process.poll() is None
            time.sleep(pause)  # to be killed at another moment each time
            process.send_signal(signal.SIGKILL)
        session = open_session(run)
        saved = sorted(run.folder.parent.glob("saved-*"))
        assert saved
        for folder in saved:
            assert same_tree(Run(folder).tree(), session.state.tree)
            assert json.loads((folder / "notes.json").read_text())["0"].startswith("note ")
            for path in folder.rglob("*"):
                path.unlink() if path.is_file() else None
            (folder / "projected").rmdir()
            folder.rmdir()
        session.close()


def test_validation_photos_of_the_data_give_the_feedback(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    squares = tmp_path / "squares"
    (squares / "test").rename(squares / "val")
    shutil.copytree(squares / "val", squares / "test")
    session = open_session(run, work=tmp_path / "work")
    assert session.feedback_name == "the validation photos of the data"
    assert {entry.sample.path.parts[-3] for entry in session.workbench.feedback.entries} == {"val"}
    assert session.held_back is not None
    assert len(session.held_back) == len(session.data.test)

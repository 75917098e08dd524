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

from data_files import write_classes
from prototree.backbones.backbone import FeatureExtractor
from prototree.core import checkpoint
from prototree.core.nodes import NodeFunction
from prototree.core.projection import prototype_classes
from prototree.editing.edits import Exclude, Note, Remove, Replace, Side
from prototree.editing.session import EditSession, edit
from prototree.errors import CheckpointError, ConflictError, DataError, EditError
from prototree.explanation.decision import explain_decision, open_explainers
from prototree.explanation.tree import explain_tree
from prototree.pipeline.fit import fit, rerun
from prototree.reporting.export import report
from prototree.run import Run
from tiny_editing import content_of, same_tree, tiny_run
from tiny_training import TINY_DISTILL, write_squares


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_run(tmp_path_factory.mktemp("template"))


@pytest.fixture
def run(template: Run, tmp_path: Path) -> Run:
    """A run of its own, whose images are shared."""
    return Run(shutil.copytree(template.folder, tmp_path / "run"))


@pytest.fixture
def session(run: Run) -> EditSession:
    return edit(run)


def an_edit(session: EditSession, node: int = 1) -> Replace:
    return session.workbench.candidates(session.state, node)[3].cell.as_replacement(node)


def test_undo_and_redo_give_back_the_very_same_trees(session: EditSession) -> None:
    trees = [session.state.tree]
    for change in (an_edit(session), Note(1, "red"), Remove(0, "left"), Exclude("train/red/0.png")):
        trees.append(session.apply(change).state.tree)
    for tree in trees[-2::-1]:
        assert same_tree(session.undo().state.tree, tree)
    for tree in trees[1:]:
        assert same_tree(session.redo().state.tree, tree)


def test_a_session_goes_on_where_it_was_left(session: EditSession, run: Run) -> None:
    for change in (an_edit(session), Remove(0, "left"), Note(0, "red")):
        session.apply(change)
    expected = session.state.tree
    session.undo()
    session.close()
    again = edit(run)
    assert again.snapshot.history == session.snapshot.history
    assert same_tree(again.state.tree, session.state.tree)
    assert same_tree(again.redo().state.tree, expected)


def test_one_session_at_a_time_edits_a_run(session: EditSession, run: Run, tmp_path: Path) -> None:
    session.apply(Note(1, "red"))
    with pytest.raises(EditError, match="another session"):
        edit(run)
    with pytest.raises(EditError, match="another session"):
        edit(run.folder, work=session.work)
    assert edit(run, work=tmp_path / "elsewhere").revision == 0  # a history of its own
    session.close()
    again = edit(run)
    assert again.state.notes == {1: "red"}
    with pytest.raises(EditError, match="closed"):
        session.apply(Note(1, "blue"))
    del again  # a session that nobody uses holds nothing
    assert edit(run).state.notes == {1: "red"}


def test_edits_after_a_removal_mean_the_nodes_as_they_are_then(session: EditSession, run: Run) -> None:
    session.apply(Note(2, "last of three"))
    session.apply(Remove(1, "left"))
    assert session.state.notes == {1: "last of three"}
    chosen = session.workbench.candidates(session.state, 1)[3].cell
    session.apply(chosen.as_replacement(1))
    tree = session.apply(Note(1, "blue")).state.tree
    assert torch.equal(tree.prototypes[0], run.tree().prototypes[0])
    source = tree.sources[1]
    assert source is not None
    assert (source.image, source.crop, source.patch) == (chosen.image, chosen.view, chosen.patch)
    with pytest.raises(EditError, match="got 3"):
        session.apply(Note(2, "gone"))
    for _ in range(3):
        session.undo()
    assert session.state.notes == {2: "last of three"}
    assert torch.equal(session.state.tree.prototypes, run.tree().prototypes)
    for _ in range(2):
        session.redo()
    session.close()
    again = edit(run)
    assert again.state.notes == {1: "last of three"}
    assert same_tree(again.redo().state.tree, tree)
    assert again.save().notes == {1: "blue"}


def test_undoing_farther_than_is_remembered_computes_again(
    session: EditSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prototree.editing.session._CACHED_STATES", 2)
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
    for change in (an_edit(session), Note(1, "red “square” <b>"), Remove(0, "left"), Exclude("train/red/0.png")):
        session.apply(change)
    saved = session.save()
    assert saved.folder == run.folder.with_name("run-edited-1")
    assert same_tree(saved.tree(), session.state.tree)
    assert content_of(run.folder) == before, "the original was changed"
    assert saved.notes == {0: "red “square” <b>"}
    edits = json.loads((saved.folder / "edits.json").read_text())
    assert edits["from"] == "run"
    assert len(edits["edits"]) == 4
    judged = saved.metrics["stages"]["projected"]
    assert judged["n_images"] == len(session.test or ()) == 6
    assert edits["evaluation"]["after"] == judged["accuracy"]
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
        for path in report(explanation, saved.folder / "report")
        if path.suffix == ".txt"
    )
    voters = open_explainers([saved.folder])
    decision = explain_decision(voters, next((session.data.root / "test").rglob("*.png")))
    steps = {step.node: step.note for path in decision.paths.values() for step in path.steps}  # type: ignore[union-attr]
    assert steps.get(1, "long beak") == "long beak"
    (saved.folder / "notes.json").write_text('{"first": "x"}')
    with pytest.raises(CheckpointError, match="patches such as 7L"):
        edit(saved)


def test_an_edited_run_can_be_edited_again(session: EditSession) -> None:
    session.apply(Note(0, "root"))
    session.apply(Exclude("train/red/0.png"))
    again = edit(session.save())
    assert dict(again.state.notes) == {0: "root"}
    assert again.state.excluded == (Exclude("train/red/0.png"),)
    assert all(
        candidate.cell.image != "train/red/0.png" for candidate in again.workbench.candidates(again.state, 0, 100)
    )


def test_validation_and_test_share_no_image(session: EditSession) -> None:
    seen = {entry.sample.path for entry in session.validation.entries}
    held_back = session.test
    assert held_back is not None
    unseen = {entry.sample.path for entry in held_back.entries}
    assert not seen & unseen
    assert seen | unseen == {sample.path for sample in session.data.test}
    wrong = session.state.prediction.labels("greedy") != session.validation.labels
    assert [error.index for error in session.errors().errors] == torch.nonzero(wrong)[:, 0].tolist()


def test_what_is_there_is_not_overwritten(session: EditSession, run: Run, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(EditError, match="exists"):
        session.save(tmp_path / "taken")
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]
    with pytest.raises(EditError, match="never changed"):
        edit(run, work=run.folder)


def test_images_of_ones_own_are_for_validation(run: Run, tmp_path: Path) -> None:
    session = edit(run, validation=run.source, work=tmp_path / "elsewhere")
    assert session.metrics.n_images == 30
    assert session.test is not None
    assert len(session.test) == 12
    session.apply(Note(0, "x"))
    assert (tmp_path / "elsewhere" / "history.json").exists()


def test_other_data_or_another_tree_is_refused(session: EditSession, run: Run, tmp_path: Path) -> None:
    other = write_classes(tmp_path / "other", {"cat": 4, "dog": 4})
    with pytest.raises(DataError, match="expected the classes"):
        edit(run, data=other)
    session.apply(Note(0, "x"))
    tree = run.tree()
    with torch.no_grad():
        tree.prototypes += 1
    checkpoint.save(tree, run.folder / "projected")
    session.close()
    with pytest.raises(CheckpointError, match="another tree"):
        edit(run)


KILLED = """
    import sys
    from pathlib import Path
    from prototree.editing.edits import Note
    from prototree.editing.session import edit
    session = edit(sys.argv[1])
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        session.apply(Note(0, f"note {number}"))
        session.save(Path(sys.argv[1]).with_name(f"saved-{number}"))
        print(number, flush=True)
"""


def test_a_kill_while_saving_leaves_old_or_new_never_half(run: Run) -> None:
    edit(run)  # computes the maps
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(run.folder)]
    for pause in (0.0, 0.07):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
            assert process.stdout is not None
            while process.stdout.readline().strip() != "1":
                assert process.poll() is None
            time.sleep(pause)  # to be killed at another moment each time
            process.send_signal(signal.SIGKILL)
        session = edit(run)
        saved = sorted(run.folder.parent.glob("saved-*"))
        assert saved
        for folder in saved:
            assert same_tree(Run(folder).tree(), session.state.tree)
            assert json.loads((folder / "notes.json").read_text())["1"].startswith("note ")
            for path in folder.rglob("*"):
                path.unlink() if path.is_file() else None
            (folder / "projected").rmdir()
            folder.rmdir()
        session.close()


def test_validation_images_of_the_data_are_used(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    squares = tmp_path / "squares"
    (squares / "test").rename(squares / "val")
    shutil.copytree(squares / "val", squares / "test")
    session = edit(run, work=tmp_path / "work")
    assert session.validation_name == "the validation images of the data"
    assert {entry.sample.path.parts[-3] for entry in session.validation.entries} == {"val"}
    assert session.test is not None
    assert len(session.test) == len(session.data.test)


# ---- pairwise nodes


def test_undo_saving_and_a_history_know_the_side(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, NodeFunction("pairwise", 6.0))
    session = edit(run)
    trees, soft = [session.state.tree], [session.state.prediction.soft]
    sides: tuple[Side, ...] = ("left", "right")
    for side in sides:
        chosen = session.workbench.candidates(session.state, 1, 12, side)[3]
        state = session.apply(chosen.cell.as_replacement(1, side)).state
        trees.append(state.tree)
        soft.append(state.prediction.soft)
    assert not torch.equal(trees[0].radius, trees[1].radius)
    assert same_tree(session.save().tree(), trees[-1])
    session.close()
    session = edit(run)
    assert same_tree(session.state.tree, trees[-1])
    for n in (1, 0):
        state = session.undo().state
        assert same_tree(state.tree, trees[n])
        torch.testing.assert_close(state.prediction.soft, soft[n], rtol=0, atol=0)


# ---- a run of the default recipe, which keeps feature maps and takes prototypes from two views of an image


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("distilled")
    quick = TINY_DISTILL | {"pretrain_epochs": 0, "head_epochs": 2, "epochs": 2}
    write_squares(folder / "squares", train=6, test=4)
    for seed in range(10):  # until a prototype comes from the centre crop
        run = fit(folder / "squares", folder / f"run-{seed}", settings=quick | {"seed": seed})
        if "middle" in {source.crop for source in run.tree().sources if source is not None}:
            return run
    raise AssertionError("expected a prototype from the centre crop in one of ten runs")


def test_features_that_training_kept_are_used(distilled: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, forward = [], FeatureExtractor.forward

    def watched(self: FeatureExtractor, images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(FeatureExtractor, "forward", watched)
    session = edit(distilled, work=tmp_path / "work")
    workbench = session.workbench
    assert workbench.training.is_rounded
    assert sum(seen) <= len(session.validation), "only validation images, at most"
    opened = sum(seen)
    assert session.n_test == len(session.test or ())
    assert sum(seen) <= opened + session.n_test, "and test images when they are needed"
    exact = torch.cat([workbench._exact_map(view) for view in range(4)])
    torch.testing.assert_close(workbench.training.maps(range(4)), exact, atol=2e-3, rtol=0)


def test_a_new_prototype_is_at_distance_0_from_its_image(distilled: Run, tmp_path: Path) -> None:
    session = edit(distilled, work=tmp_path / "work")
    cell = session.workbench.candidates(session.state, 0, 3)[2].cell
    tree = session.apply(cell.as_replacement(0)).state.tree
    view = session.workbench._row[cell.image, cell.view]
    assert float(session.state.training.distance[view, 0]) == 0.0
    assert float(tree.forward_features(session.workbench._exact_map(view)).distance.detach()[0, 0]) <= 1e-6
    assert tree.sources[0] is not None
    assert tree.sources[0].display_box is not None


def test_each_prototype_is_nearest_to_the_patch_it_comes_from(distilled: Run, tmp_path: Path) -> None:
    session = edit(distilled, work=tmp_path / "work")
    state = session.state
    for row, source in enumerate(state.tree.sources):
        assert source is not None
        node, is_right = state.tree.node_of(row)
        nearest = session.workbench.candidates(state, node, 18, "right" if is_right else "left")
        cell = nearest[0].cell
        assert (cell.image, cell.view, cell.patch, cell.box) == (
            source.image,
            source.crop,
            source.patch,
            source.patch_box,
        )
        assert nearest[0].similarity == pytest.approx(1.0, abs=1e-3), "but for rounded features"
        n_classes = int(prototype_classes(state.tree)[row].sum())
        assert len({near.cell.image for near in nearest}) == len(nearest) == min(18, 6 * n_classes), "one per image"

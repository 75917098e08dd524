"""An edited tree learns on: what stays, what changes, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prototree.core import checkpoint
from prototree.core.checkpoint import PROJECTED
from prototree.core.confidence import Calibration, fit_calibration
from prototree.core.nodes import NodeFunction
from prototree.editing.edits import Exclude, Note
from prototree.editing.finetune import copy_notes, finetune, initial_tree
from prototree.editing.session import EDITS, GIVEN_IMAGES, edit, read_edits
from prototree.errors import CheckpointError, ConfigError, DataError
from prototree.features.cache import files_used
from prototree.io import write_file, write_json
from prototree.pipeline.fit import fit
from prototree.run import Run
from prototree.training import distill
from tiny_editing import content_of, tiny_run
from tiny_training import TINY, TINY_DISTILL, assert_prototypes_are_their_patches, write_squares

NOTES = {0: "a square"}
QUICK = {"pretrain_epochs": 1, "head_epochs": 1, "epochs": 1}  # where nothing needs to be learned well
SHORT = QUICK | {"calibration_fraction": 0}


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run in which the root's left prototype was put elsewhere, the root named, and a photo excluded."""
    folder = tmp_path_factory.mktemp("finetuning")
    photos = write_squares(folder / "squares", train=9, test=4)
    session = edit(fit(photos, folder / "run", settings=TINY_DISTILL | {"calibration_fraction": 0}))
    chosen = session.workbench.candidates(session.state, 0, side="left")[3]
    session.apply(chosen.cell.as_replacement(0, "left"))
    session.apply(Note(0, NOTES[0]))
    session.apply(Exclude("train/red/0.png" if chosen.cell.image != "train/red/0.png" else "train/red/1.png"))
    return session.save()


def places(run: Run) -> list[tuple[str, str, tuple[int, int]]]:
    return [(source.image, source.crop, source.patch) for source in run.tree().sources if source is not None]


def test_prototypes_stay_where_they_were_put_and_the_head_learns(edited: Run, tmp_path: Path) -> None:
    before = content_of(edited.folder)
    learned = finetune(edited.folder, tmp_path / "learned", settings={"epochs": 40})
    assert content_of(edited.folder) == before, "the edited run is never changed"
    assert places(learned) == places(edited)
    assert learned.tree().topology.left.tolist() == edited.tree().topology.left.tolist()
    assert learned.tree().node_function == edited.tree().node_function
    assert not torch.equal(learned.tree().radius, edited.tree().radius), "radii are learned, too"
    assert_prototypes_are_their_patches(learned)
    heads = [run.tree().features.head.last.weight for run in (edited, learned)]
    assert not torch.equal(*heads)
    trunks = [run.tree().features.backbone.net.conv_stem.weight for run in (edited, learned)]
    assert torch.equal(*trunks), "the backbone that was pretrained stays, and is not pretrained again"
    assert learned.notes == NOTES
    assert json.loads((learned.folder / "edits.json").read_text())["excluded"], "exclusions go with the run"
    used = files_used(edited.folder.with_name("run"))
    assert used
    assert set(files_used(learned.folder)) <= set(used), "the trunk does not run again"
    assert learned.metrics["stages"]["projected"]["accuracy"]["soft"] >= 0.75


def test_the_same_again_gives_the_same_and_another_folder_is_not_overwritten(edited: Run, tmp_path: Path) -> None:
    one = finetune(edited.folder, tmp_path / "one", settings=SHORT)
    prototypes = one.tree().prototypes
    again = finetune(edited.folder, tmp_path / "one", settings=SHORT)
    other = finetune(edited.folder, tmp_path / "other", settings=SHORT)
    assert torch.equal(again.tree().prototypes, prototypes)
    assert torch.equal(other.tree().prototypes, prototypes)
    with pytest.raises(ConfigError, match="another run"):
        finetune(edited.folder, edited.folder)


def fitted_elsewhere(edited: Run, folder: Path) -> Run:
    """The same run as if its sharpness and confidence had been fitted to the tree as it was."""
    copy = Run(shutil.copytree(edited.folder, folder))
    tree = copy.tree()
    tree.node_function, tree.calibration = replace(tree.node_function, sharpness=64.0), Calibration(1.0, -9.0, 50)
    checkpoint.save(tree, copy.folder / PROJECTED)
    write_file(copy.folder / "config.toml", edited.config.replace({"calibration_fraction": 1 / 5}).to_toml().encode())
    return copy


def test_how_sharp_and_how_sure_are_fitted_again_on_the_feedback(
    edited: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was fitted to the tree before it learned says nothing about the tree that has learned."""
    monkeypatch.setattr(distill, "MIN_HELD_OUT", 6)
    copy = fitted_elsewhere(edited, tmp_path / "copy")
    learned = finetune(copy.folder, tmp_path / "learned", settings=QUICK)
    tree, session = learned.tree(), edit(learned)
    own = learned.config.recipe.sharpness  # type: ignore[attr-defined]
    assert own <= tree.node_function.sharpness <= 3 * own
    decisions, labels = session.state.prediction, session.workbench.validation.labels
    fitted = fit_calibration(decisions.margin, decisions.ood_score, decisions.labels("greedy") == labels)
    assert tree.calibration.n_images == len(labels) == 6
    expected = pytest.approx((fitted.slope, fitted.offset), abs=0.1)  # maps on the bench are rounded
    assert (tree.calibration.slope, tree.calibration.offset) == expected


def test_leaves_learn_the_classes_that_were_meant(edited: Run, tmp_path: Path) -> None:
    """Which photos reach a leaf after an edit depends on what the network cannot tell apart yet."""
    copy = Run(shutil.copytree(edited.folder, tmp_path / "copy"))
    tree = copy.tree()
    meant = tree.leaf_logits.argmax(dim=1).tolist()
    assert json.loads((copy.folder / EDITS).read_text())["leaves"] == meant
    tree.leaf_logits.data = tree.leaf_logits.roll(1, dims=1)
    checkpoint.save(tree, copy.folder / PROJECTED)
    assert initial_tree(copy, read_edits(copy)).leaf_logits.argmax(dim=1).tolist() == meant
    assert edit(copy).state.leaf_classes.tolist() == meant
    for damaged in ([*meant, 0], [-1, *meant[1:]], [tree.n_classes, *meant[1:]]):
        write_json(copy.folder / EDITS, {"version": 1, "leaves": damaged})
        with pytest.raises(CheckpointError, match="damaged"):
            finetune(copy.folder, tmp_path / "learned")


def test_feedback_from_a_folder_of_ones_own_leaves_the_test_photos_alone(
    edited: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "MIN_HELD_OUT", 6)
    copy = fitted_elsewhere(edited, tmp_path / "copy")
    write_json(copy.folder / EDITS, {"version": 1, "from": "run", "validation": {"images": GIVEN_IMAGES}})
    learned = finetune(copy.folder, tmp_path / "learned", settings=QUICK)
    assert learned.tree().calibration == Calibration(1.0, -9.0, 50)
    assert learned.tree().node_function.sharpness == 64.0


def test_what_cannot_learn_on_says_why(edited: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keeps prototypes in place"):
        finetune(tiny_run(tmp_path / "paper").folder, tmp_path / "out")
    with pytest.raises(ConfigError, match="its prototypes move while they learn"):
        fit(edited.source, tmp_path / "start", settings=TINY, start=edited.tree())
    unprojected = tmp_path / "unprojected"
    fit(tmp_path / "paper" / "squares", unprojected, settings=TINY_DISTILL | SHORT, stages=["train"])
    with pytest.raises(DataError, match="number 0 is no patch"):
        finetune(unprojected, tmp_path / "out")
    moved = tmp_path / "squares"
    write_squares(moved, train=1, test=1)
    with pytest.raises(DataError, match="comes from train/"):
        finetune(edited.folder, tmp_path / "elsewhere", data=moved)
    nowhere = Run(tmp_path / "nowhere")
    nowhere.folder.mkdir()
    write_file(nowhere.folder / "config.toml", edited.config.to_toml().encode())
    with pytest.raises(DataError, match="--data"):
        finetune(nowhere.folder, tmp_path / "out")


def test_a_note_follows_both_patches_of_its_node(tmp_path: Path) -> None:
    """One patch may serve two nodes; a node that shares only one of its patches is another."""
    run = tiny_run(tmp_path, NodeFunction("pairwise", 6.0))
    tree = run.tree()
    right, left = tree.sources[:3], tree.sources[3:]
    tree.sources = (right[0], right[0], right[2], left[0], left[1], left[0])
    checkpoint.save(tree, run.folder / PROJECTED)
    write_json(run.folder / "notes.json", {"2R": "beak", "2L": "crest", "3L": "tail"})
    learned = Run(tmp_path / "learned")
    (learned.folder / PROJECTED).mkdir(parents=True)
    tree.sources = tuple(tree.sources[i] for i in (1, 0, 2, 4, 3, 5))  # nodes 0 and 1 have changed places
    checkpoint.save(tree, learned.folder / PROJECTED)
    copy_notes(run, learned)
    assert learned.notes == {0: "beak", 3: "crest", 5: "tail"}

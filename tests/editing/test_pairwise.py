"""Edits on a tree whose nodes compare two prototypes: each side is a prototype of its own."""

from pathlib import Path

import numpy as np
import pytest
import torch

from prototree.app.edit_words import sentence
from prototree.backbones.backbone import Backbone
from prototree.core.confidence import Calibration, fit_calibration
from prototree.core.nodes import LN2, NodeFunction
from prototree.editing.edits import Exclude, Note, Remove, Replace
from prototree.editing.session import EditSession, open_session
from prototree.editing.state import TreeState, copied
from prototree.editing.workbench import Workbench
from prototree.errors import EditError
from prototree.run import Run
from prototree.training.anchored import learn_usual
from prototree.training.projection import prototype_classes
from tiny_editing import same_tree, tiny_run
from tiny_workbench import N_FEEDBACK, N_TRAIN, K, make_bench

CHOICE = NodeFunction("pairwise", 6.0)
N = 7  # nodes; prototypes from here on are the left ones


@pytest.fixture
def workbench(tiny_backbone: Backbone) -> Workbench:
    return make_bench(tiny_backbone, question=CHOICE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_run(tmp_path_factory.mktemp("sides"), CHOICE)


@pytest.fixture
def session(run: Run, tmp_path: Path) -> EditSession:
    return open_session(run, work=tmp_path / "work")


def moved(before: TreeState, after: TreeState) -> list[int]:
    """The prototypes that are others now; sources and distances have to say the same."""
    pairs = zip(before.tree.prototypes, after.tree.prototypes, strict=True)
    found = [i for i, pair in enumerate(pairs) if not torch.equal(*pair)]
    assert [i for i in range(len(before.tree.sources)) if before.tree.sources[i] != after.tree.sources[i]] == found
    columns = torch.nonzero((before.training.distance != after.training.distance).any(dim=0))[:, 0].tolist()
    assert columns == found
    return found


@pytest.mark.parametrize(("side", "prototype"), [("right", 4), ("left", 4 + N)])
def test_a_side_is_replaced_alone_and_the_leaves_are_fitted(workbench: Workbench, side: str, prototype: int) -> None:
    state = workbench.apply(workbench.start, Replace(4, "7.png", "full", (2, 1), side))  # type: ignore[arg-type]
    assert moved(workbench.start, state) == [prototype]
    assert torch.equal(state.tree.prototypes[prototype, :, 0, 0], workbench.training.maps([7])[0, :, 2, 1])
    assert state.training.distance[7, prototype] == 0
    assert not torch.equal(state.tree.leaf_logits, workbench.tree.leaf_logits)
    decisions = state.tree.decide(state.tree.route(workbench.feedback.maps(range(N_FEEDBACK))))
    torch.testing.assert_close(state.decisions.soft, decisions.soft)
    assert workbench.figures(state).n_prototypes == 2 * N


def test_the_reach_of_a_side_is_learned_as_in_training(workbench: Workbench) -> None:
    state = workbench.apply(workbench.start, Replace(4, "7.png", "full", (2, 1), "left"))
    learned = copied(state.tree)
    learned.distance_p95.zero_()
    learn_usual(learned, [(state.training.distance, workbench.training.labels)])
    assert learned.distance_p95.all()
    torch.testing.assert_close(state.tree.distance_p95, learned.distance_p95)
    torch.testing.assert_close(state.tree.reach, learned.distance_p95 / LN2)
    assert not torch.equal(workbench.tree.reach, state.tree.reach)


def test_confidence_is_fitted_again_where_it_was_fitted(workbench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = Replace(4, "7.png", "full", (2, 1), "left")
    assert workbench.apply(workbench.start, edit).tree.calibration == workbench.tree.calibration == Calibration()
    workbench.tree.calibration = Calibration(1.0, 0.0, 50)
    assert workbench.apply(workbench.start, edit).tree.calibration == workbench.tree.calibration, (
        "nine photos are too few"
    )
    monkeypatch.setattr("prototree.editing.workbench.FEWEST_HELD", N_FEEDBACK)
    state = workbench.apply(workbench.start, edit)
    is_right = state.decisions.labels("greedy") == workbench.feedback.labels
    assert state.tree.calibration == fit_calibration(state.decisions.margin, state.decisions.ood_score, is_right)
    assert workbench.tree.calibration.n_photos == 50, "the tree before the edit stays as it was"


def test_leaves_stand_for_the_same_classes_while_patches_are_of_their_side(workbench: Workbench) -> None:
    classes, own = workbench.start.leaf_classes.tolist(), prototype_classes(workbench.tree)[4 + N]
    below = [leaf for leaf, path in enumerate(workbench.tree.topology.paths.tolist()) if 4 in path]
    kept, of_photos = [], []
    for photo in range(N_TRAIN):
        state = workbench.apply(workbench.start, Replace(4, f"{photo}.png", "full", (2, 1), "left"))
        now = state.tree.leaf_logits.argmax(dim=1).tolist()
        (kept if own[photo % K] else of_photos).append((state.leaf_classes.tolist(), now))
    assert all(meant == classes for meant, _ in kept)
    assert any(now != classes for _, now in kept), "other photos reach the leaves, and that does not matter"
    assert all(meant == [now[i] if i in below else classes[i] for i in range(8)] for meant, now in of_photos)
    removed = workbench.apply(workbench.start, Remove(4, "left"))
    assert len(removed.leaf_classes) == removed.tree.topology.n_leaves == 7


def test_a_removed_node_takes_both_its_prototypes_with_it(workbench: Workbench) -> None:
    state = workbench.apply(workbench.start, Note(3, "tail"))
    state = workbench.apply(state, Remove(1, "left"))
    kept = [0, 3, 2, 5, 6]
    both = [*kept, *(node + N for node in kept)]
    assert torch.equal(state.tree.prototypes, workbench.tree.prototypes[both])
    assert state.tree.sources == tuple(workbench.tree.sources[i] for i in both)
    assert torch.equal(state.training.distance, workbench.start.training.distance[:, both])
    assert torch.equal(state.feedback.patch, workbench.start.feedback.patch[:, both])
    assert state.notes == {1: "tail"}
    decisions = state.tree.decide(state.tree.route(workbench.feedback.maps(range(N_FEEDBACK))))
    torch.testing.assert_close(state.decisions.soft, decisions.soft)


def test_a_ban_moves_prototypes_of_both_sides_to_patches_of_their_own_classes(workbench: Workbench) -> None:
    # 0.png is the source of the root's right prototype and of number 12, the left one of node 5.
    state = workbench.apply(workbench.start, Exclude("0.png"))
    assert moved(workbench.start, state) == [0, 12]
    own = prototype_classes(workbench.tree)
    for prototype in (0, 12):
        source = state.tree.sources[prototype]
        assert source is not None
        allowed = own[prototype, workbench.training.labels]
        apart = workbench.start.training.distance[:, prototype].masked_fill(~allowed, np.inf)
        apart[0] = np.inf
        assert source.image == f"{int(apart.argmin())}.png"
    for n in range(1, N_TRAIN - 1):
        state = workbench.apply(state, Exclude(f"{n}.png"))
    with pytest.raises(EditError, match=r"no patch would be left for prototype \d \((right|left) side\)"):
        workbench.apply(state, Exclude(f"{N_TRAIN - 1}.png"))


@pytest.mark.parametrize("side", ["right", "left"])
def test_candidates_are_of_the_classes_on_their_side(workbench: Workbench, side: str) -> None:
    prototype = workbench.start.prototype(1, side)  # type: ignore[arg-type]
    found = workbench.candidates(workbench.start, 1, 100, side)  # type: ignore[arg-type]
    own = prototype_classes(workbench.tree)[prototype]
    labels = workbench.training.labels
    assert sorted(candidate.cell.image for candidate in found) == sorted(
        f"{i}.png" for i in range(N_TRAIN) if own[labels[i]]
    )
    distance = [float(workbench.start.training.distance[int(c.cell.image[:-4]), prototype]) for c in found]
    assert distance == sorted(distance)
    workbench._constrain = False
    assert len(workbench.candidates(workbench.start, 1, 100, side)) == N_TRAIN  # type: ignore[arg-type]
    assert found[2].cell.replaces(1, side).side == side  # type: ignore[arg-type]


def test_undo_gives_back_the_reach_and_the_answers(session: EditSession) -> None:
    trees, answers = [session.state.tree], [session.state.decisions.soft]
    for side in ("left", "right"):
        chosen = session.workbench.candidates(session.state, 1, 12, side)[3]
        state = session.apply(chosen.cell.replaces(1, side)).state
        trees.append(state.tree)
        answers.append(state.decisions.soft)
    assert not torch.equal(trees[0].reach, trees[1].reach)
    for tree, soft in zip(trees[-2::-1], answers[-2::-1], strict=True):
        state = session.undo().state
        assert same_tree(state.tree, tree)
        assert torch.equal(state.decisions.soft, soft)


def test_a_saved_run_and_a_history_know_the_side(session: EditSession, run: Run) -> None:
    chosen = session.workbench.candidates(session.state, 2, 12, "left")[2]
    session.apply(chosen.cell.replaces(2, "left"))
    assert same_tree(session.save().tree(), session.state.tree)
    session.close()
    assert same_tree(open_session(run, work=session.work).state.tree, session.state.tree)


def test_edits_say_which_side_they_are_about() -> None:
    edit = Replace(5, "a.png", "full", (0, 0), "left")
    assert sentence(edit, "pairwise") == "Prototype 5, left side, is now a patch of a.png"
    assert sentence(Replace(5, "a.png", "full", (0, 0)), "presence") == "Prototype 5 is now a patch of a.png"
    assert sentence(Remove(5, "left"), "pairwise") == "Removed prototype 5, keeping what was on its left side"

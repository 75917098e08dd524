"""Edits on a tree whose nodes compare two prototypes: each side is a prototype of its own."""

from pathlib import Path

import numpy as np
import pytest
import torch

from prototree.errors import MendError
from prototree.mend.bench import Bench
from prototree.mend.edits import Ban, Note, Remove, Replace
from prototree.mend.session import Session, open_session
from prototree.mend.states import TreeState, copied
from prototree.network.backbone import Backbone
from prototree.run import Run
from prototree.training.anchored import learn_usual
from prototree.training.projection import prototype_classes
from prototree.tree.questions import LN2, Question
from prototree.tree.sureness import Sureness, fit_sureness
from prototree.web.edit_words import sentence
from tiny_bench import N_FEEDBACK, N_TRAIN, K, make_bench
from tiny_mending import same_tree, tiny_run

CHOICE = Question("choice", 6.0)
N = 7  # nodes; prototypes from here on are the left ones


@pytest.fixture
def bench(tiny_backbone: Backbone) -> Bench:
    return make_bench(tiny_backbone, question=CHOICE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_run(tmp_path_factory.mktemp("sides"), CHOICE)


@pytest.fixture
def session(run: Run, tmp_path: Path) -> Session:
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
def test_a_side_is_replaced_alone_and_the_leaves_are_fitted(bench: Bench, side: str, prototype: int) -> None:
    state = bench.apply(bench.start, Replace(4, "7.png", "full", (2, 1), side))  # type: ignore[arg-type]
    assert moved(bench.start, state) == [prototype]
    assert torch.equal(state.tree.prototypes[prototype, :, 0, 0], bench.training.maps([7])[0, :, 2, 1])
    assert state.training.distance[7, prototype] == 0
    assert not torch.equal(state.tree.leaf_logits, bench.tree.leaf_logits)
    decisions = state.tree.decide(state.tree.route(bench.feedback.maps(range(N_FEEDBACK))))
    torch.testing.assert_close(state.decisions.soft, decisions.soft)
    assert bench.figures(state).n_prototypes == 2 * N


def test_the_reach_of_a_side_is_learned_as_in_training(bench: Bench) -> None:
    state = bench.apply(bench.start, Replace(4, "7.png", "full", (2, 1), "left"))
    learned = copied(state.tree)
    learned.usual.zero_()
    learn_usual(learned, [(state.training.distance, bench.training.labels)])
    assert learned.usual.all()
    torch.testing.assert_close(state.tree.usual, learned.usual)
    torch.testing.assert_close(state.tree.reach, learned.usual / LN2)
    assert not torch.equal(bench.tree.reach, state.tree.reach)


def test_sureness_is_fitted_again_where_it_was_fitted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = Replace(4, "7.png", "full", (2, 1), "left")
    assert bench.apply(bench.start, edit).tree.sureness == bench.tree.sureness == Sureness()
    bench.tree.sureness = Sureness(1.0, 0.0, 50)
    assert bench.apply(bench.start, edit).tree.sureness == bench.tree.sureness, "nine photos are too few"
    monkeypatch.setattr("prototree.mend.bench.FEWEST_HELD", N_FEEDBACK)
    state = bench.apply(bench.start, edit)
    is_right = state.decisions.labels("greedy") == bench.feedback.labels
    assert state.tree.sureness == fit_sureness(state.decisions.lead, state.decisions.strangeness, is_right)
    assert bench.tree.sureness.n_photos == 50, "the tree before the edit stays as it was"


def test_leaves_stand_for_the_same_classes_while_patches_are_of_their_side(bench: Bench) -> None:
    classes, own = bench.start.leaf_classes.tolist(), prototype_classes(bench.tree)[4 + N]
    below = [leaf for leaf, path in enumerate(bench.tree.topology.paths.tolist()) if 4 in path]
    kept, of_photos = [], []
    for photo in range(N_TRAIN):
        state = bench.apply(bench.start, Replace(4, f"{photo}.png", "full", (2, 1), "left"))
        now = state.tree.leaf_logits.argmax(dim=1).tolist()
        (kept if own[photo % K] else of_photos).append((state.leaf_classes.tolist(), now))
    assert all(meant == classes for meant, _ in kept)
    assert any(now != classes for _, now in kept), "other photos reach the leaves, and that does not matter"
    assert all(meant == [now[i] if i in below else classes[i] for i in range(8)] for meant, now in of_photos)
    removed = bench.apply(bench.start, Remove(4, "left"))
    assert len(removed.leaf_classes) == removed.tree.topology.n_leaves == 7


def test_a_removed_node_takes_both_its_prototypes_with_it(bench: Bench) -> None:
    state = bench.apply(bench.start, Note(3, "tail"))
    state = bench.apply(state, Remove(1, "left"))
    kept = [0, 3, 2, 5, 6]
    both = [*kept, *(node + N for node in kept)]
    assert torch.equal(state.tree.prototypes, bench.tree.prototypes[both])
    assert state.tree.sources == tuple(bench.tree.sources[i] for i in both)
    assert torch.equal(state.training.distance, bench.start.training.distance[:, both])
    assert torch.equal(state.feedback.patch, bench.start.feedback.patch[:, both])
    assert state.notes == {1: "tail"}
    decisions = state.tree.decide(state.tree.route(bench.feedback.maps(range(N_FEEDBACK))))
    torch.testing.assert_close(state.decisions.soft, decisions.soft)


def test_a_ban_moves_prototypes_of_both_sides_to_patches_of_their_own_classes(bench: Bench) -> None:
    # 0.png is the source of the root's right prototype and of number 12, the left one of node 5.
    state = bench.apply(bench.start, Ban("0.png"))
    assert moved(bench.start, state) == [0, 12]
    own = prototype_classes(bench.tree)
    for prototype in (0, 12):
        source = state.tree.sources[prototype]
        assert source is not None
        allowed = own[prototype, bench.training.labels]
        apart = bench.start.training.distance[:, prototype].masked_fill(~allowed, np.inf)
        apart[0] = np.inf
        assert source.image == f"{int(apart.argmin())}.png"
    for n in range(1, N_TRAIN - 1):
        state = bench.apply(state, Ban(f"{n}.png"))
    with pytest.raises(MendError, match=r"no patch would be left for prototype \d \((right|left) side\)"):
        bench.apply(state, Ban(f"{N_TRAIN - 1}.png"))


@pytest.mark.parametrize("side", ["right", "left"])
def test_candidates_are_of_the_classes_on_their_side(bench: Bench, side: str) -> None:
    prototype = bench.start.prototype(1, side)  # type: ignore[arg-type]
    found = bench.candidates(bench.start, 1, 100, side)  # type: ignore[arg-type]
    own = prototype_classes(bench.tree)[prototype]
    labels = bench.training.labels
    assert sorted(candidate.cell.image for candidate in found) == sorted(
        f"{i}.png" for i in range(N_TRAIN) if own[labels[i]]
    )
    distance = [float(bench.start.training.distance[int(c.cell.image[:-4]), prototype]) for c in found]
    assert distance == sorted(distance)
    bench._constrain = False
    assert len(bench.candidates(bench.start, 1, 100, side)) == N_TRAIN  # type: ignore[arg-type]
    assert found[2].cell.replaces(1, side).side == side  # type: ignore[arg-type]


def test_undo_gives_back_the_reach_and_the_answers(session: Session) -> None:
    trees, answers = [session.state.tree], [session.state.decisions.soft]
    for side in ("left", "right"):
        chosen = session.bench.candidates(session.state, 1, 12, side)[3]
        state = session.apply(chosen.cell.replaces(1, side)).state
        trees.append(state.tree)
        answers.append(state.decisions.soft)
    assert not torch.equal(trees[0].reach, trees[1].reach)
    for tree, soft in zip(trees[-2::-1], answers[-2::-1], strict=True):
        state = session.undo().state
        assert same_tree(state.tree, tree)
        assert torch.equal(state.decisions.soft, soft)


def test_a_saved_run_and_a_history_know_the_side(session: Session, run: Run) -> None:
    chosen = session.bench.candidates(session.state, 2, 12, "left")[2]
    session.apply(chosen.cell.replaces(2, "left"))
    assert same_tree(session.save().tree(), session.state.tree)
    session.close()
    assert same_tree(open_session(run, work=session.work).state.tree, session.state.tree)


def test_edits_say_which_side_they_are_about() -> None:
    edit = Replace(5, "a.png", "full", (0, 0), "left")
    assert sentence(edit, "choice") == "Prototype 5, left side, is now a patch of a.png"
    assert sentence(Replace(5, "a.png", "full", (0, 0)), "presence") == "Prototype 5 is now a patch of a.png"
    assert sentence(Remove(5, "left"), "choice") == "Removed prototype 5, keeping what was on its left side"

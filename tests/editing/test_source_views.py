"""A run of the default recipe takes prototypes from two views of a photo; editing has to know both."""

from pathlib import Path

import pytest

from prototree.app.gallery import Gallery
from prototree.editing.session import EditSession, open_session
from prototree.explain.tree import explain_tree
from prototree.pipeline.fit import fit
from prototree.run import Run
from prototree.training.projection import prototype_classes
from tiny_training import TINY_DISTILL, write_squares


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("views")
    quick = TINY_DISTILL | {"pretrain_epochs": 0, "head_epochs": 2, "epochs": 2}
    for seed in range(10):  # until a prototype comes from the closer view
        run = fit(write_or_keep(folder / "squares"), folder / f"run-{seed}", settings=quick | {"seed": seed})
        if "middle" in {source.view for source in run.tree().sources if source is not None}:
            return run
    raise AssertionError("expected a prototype from the closer view in one of ten runs")


def write_or_keep(folder: Path) -> Path:
    return folder if folder.exists() else write_squares(folder, train=6, test=2)


@pytest.fixture(scope="module")
def session(run: Run) -> EditSession:
    return open_session(run)


def test_the_patch_that_is_shown_is_the_prototype(session: EditSession) -> None:
    gallery, state = Gallery(session.workbench, session.data), session.state
    for prototype, source in enumerate(state.tree.sources):
        assert source is not None
        node, is_right = state.tree.node_of(prototype)
        cell = gallery.own_cell(state, prototype)
        assert cell is not None
        assert (cell.image, cell.view, cell.patch, cell.box) == (source.image, source.view, source.patch, source.box)
        nearest = session.workbench.candidates(state, node, 1, "right" if is_right else "left")[0]
        assert nearest.similarity == pytest.approx(1.0, abs=1e-3), "nearest to itself, but for rounded maps"
        assert nearest.cell == cell


def test_candidates_are_one_a_photo(session: EditSession) -> None:
    images = [candidate.cell.image for candidate in session.workbench.candidates(session.state, 0, 18)]
    n_classes = int(prototype_classes(session.state.tree)[0].sum())
    assert len(images) == len(set(images)) == 6 * n_classes


def test_explanations_look_where_prototypes_come_from(run: Run) -> None:
    tree, explained = run.tree(), explain_tree(run, nearest=3)
    for prototype in explained.prototypes:
        source = tree.sources[prototype.prototype]
        assert source is not None
        assert prototype.source.similarity == pytest.approx(1.0, abs=1e-3)
        images = [match.image for match in prototype.nearest]
        assert len(images) == len(set(images)) == 3
        assert source.image not in images

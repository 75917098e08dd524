"""The app with a tree whose nodes compare two prototypes: answers and edits name the side."""

from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

from prototree.app import pages, schemas
from prototree.app.service import Service
from prototree.core.nodes import NodeFunction
from prototree.editing.session import open_session
from prototree.errors import EditError
from tiny_editing import tiny_run


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(open_session(tiny_run(tmp_path, NodeFunction("pairwise", 6.0))))


def replace(side: schemas.Side, patch: schemas.PatchShape, revision: int = 0) -> schemas.EditQuestion:
    edit = schemas.ReplaceEdit(
        edit="replace", node=1, side=side, photo=patch.photo.index, view=patch.view, patch=patch.patch
    )
    return schemas.EditQuestion(revision=revision, edit=edit)


def test_a_node_has_both_its_patches_and_either_can_be_replaced(service: Service) -> None:
    before = service.node(1)
    assert (before.question, service.run().question) == ("pairwise", "pairwise")
    sources = service.session.state.tree.sources
    for patch, source in ((before.source, sources[1]), (before.other, sources[4])):
        assert patch is not None
        assert source is not None
        assert (patch.photo.name, tuple(patch.patch)) == (source.image, source.patch)
    found = service.candidates(1, 12, "left")
    assert found.side == "left"
    chosen = found.candidates[2]
    standing = service.edit(replace("left", chosen))
    assert standing.done == [f"Prototype 1, left side, is now a patch of {chosen.photo.name}"]
    now = service.node(1)
    assert now.source == before.source
    assert now.other is not None
    assert (now.other.photo, now.other.patch) == (chosen.photo, chosen.patch)


def test_a_patch_is_framed_in_its_surroundings(service: Service) -> None:
    patch = service.node(1).source
    assert patch is not None
    left, top, right, bottom = (float(edge) for edge in patch.around.split("/")[-4:])
    assert right - left == pytest.approx(bottom - top, abs=2)  # a square of the photo, whatever the network saw
    across, down = right - left, bottom - top
    framed = [
        edge * size + start for edge, size, start in zip(patch.frame, (across, down) * 2, (left, top) * 2, strict=True)
    ]
    assert framed == pytest.approx(patch.shown, abs=2)


def test_the_tree_says_how_photos_of_each_class_fare(service: Service) -> None:
    workbench, state = service.session.workbench, service.session.state
    _, data = service.tree()
    right = workbench.figures(state).class_accuracy
    for facts, share in zip(data["class_facts"], right, strict=True):
        assert bool(facts["right"]) == (share is not None)
        if share is not None:
            n_right, n_test = map(int, facts["right"].removesuffix(" right").split(" of "))
            assert n_right / n_test == pytest.approx(share)
            assert sum(count for _, count in facts["taken_for"]) == n_test - n_right


def test_pages_show_both_patches(service: Service) -> None:
    node = service.node(1)
    assert node.source is not None
    assert node.other is not None
    for page in (pages.edit(service, service.nodes()), pages.edit_node(service, node)):
        assert node.source.around in page
        assert node.other.around in page
        assert ">present<" not in page
    mistakes = service.mistakes()
    assert mistakes.images, "a random network is not always right"
    review = pages.review(service, mistakes)
    for mistake in mistakes.images:
        assert mistake.p_right is None or 0 <= mistake.p_right <= 1
        blamed = service.node(mistake.node) if mistake.node is not None else None
        assert blamed is None or (blamed.other is not None and blamed.other.around in review)


def test_where_a_node_asks_for_one_there_is_no_left_side(tmp_path: Path) -> None:
    service = Service(open_session(tiny_run(tmp_path)))
    node = service.node(1)
    assert (node.question, node.other, node.other_distance) == ("presence", None, None)
    chosen = service.candidates(1, 12).candidates[2]
    with pytest.raises(EditError, match="expected the side 'right', got 'left'"):
        service.candidates(1, 12, "left")
    with pytest.raises(EditError, match="expected the side 'right', got 'left'"):
        service.edit(replace("left", chosen))
    assert service.session.revision == 0, "nothing was changed"

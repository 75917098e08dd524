"""Edits on a tree of seven nodes whose maps are random numbers, against the literal equations."""

import numpy as np
import pytest
import torch

import oracle
from conftest import one_hot
from prototree.backbones.backbone import Backbone
from prototree.core.model import ProtoTree
from prototree.data.views import FULL
from prototree.editing.edits import Edit, Exclude, Note, Remove, Replace
from prototree.editing.state import TreeState
from prototree.editing.workbench import N_SWEEPS, Workbench
from prototree.errors import EditError
from tiny_workbench import N_FEEDBACK, N_TRAIN, K, make_bench


@pytest.fixture
def workbench(tiny_backbone: Backbone) -> Workbench:
    return make_bench(tiny_backbone)


def first_numbers(workbench: Workbench, state: TreeState) -> tuple[list[int], list[int]]:
    """The numbers that nodes and leaves had before any edit, by the photos of their prototypes and the ways there."""
    nodes = [workbench.tree.sources.index(source) for source in state.tree.sources]
    old = {leaf: set(way) for leaf, way in oracle.routes(workbench.tree.topology).items()}
    ways = [{(nodes[n], right) for n, right in way} for _, way in sorted(oracle.routes(state.tree.topology).items())]
    return nodes, [next(leaf for leaf, way in old.items() if here <= way) for here in ways]


def predictions(tree: ProtoTree, maps: torch.Tensor) -> torch.Tensor:
    pi = oracle.path_probs(maps.double(), tree.prototypes.detach().double(), tree.topology)
    return oracle.prediction(pi, tree.leaf_logits.double())


def refitted(tree: ProtoTree, maps: torch.Tensor, start: torch.Tensor, weight: float) -> torch.Tensor:
    """Eq. 5 over all photos, as often as the bench does it."""
    pi = oracle.path_probs(maps.double(), tree.prototypes.detach().double(), tree.topology)
    c, target = start.double(), one_hot([i % K for i in range(N_TRAIN)], K)
    for _ in range(N_SWEEPS):
        c = oracle.leaf_counts(pi, c, target) * weight
    return c


def test_a_replaced_prototype_is_the_patch_itself(workbench: Workbench) -> None:
    state = workbench.apply(workbench.start, Replace(4, "7.png", "full", (2, 1)))
    prototype = state.tree.prototypes[4, :, 0, 0]
    assert torch.equal(prototype, workbench.training.maps([7])[0, :, 2, 1])
    assert state.training.distance[7, 4] == 0
    source = state.tree.sources[4]
    assert source is not None
    assert (source.image, source.label, source.view, source.patch) == ("7.png", 1, "full", (2, 1))
    assert source.box == (32.0, 32.0, 64.0, 48.0)
    unchanged = [0, 1, 2, 3, 5, 6]
    assert torch.equal(state.tree.prototypes[unchanged], workbench.tree.prototypes[unchanged])


def test_a_replaced_prototype_of_several_cells_keeps_its_order(tiny_backbone: Backbone) -> None:
    workbench = make_bench(tiny_backbone, size=(2, 3))
    state = workbench.apply(workbench.start, Replace(0, "5.png", "full", (1, 1)))
    assert torch.equal(state.tree.prototypes[0], workbench.training.maps([5])[0, :, 1:3, 1:4])
    assert state.training.distance[5, 0] == 0
    assert workbench.locate("5.png", (128.0, 64.0, 128.0, 64.0)).patch == (2, 1)


def test_leaves_are_refitted_as_the_equations_say(workbench: Workbench) -> None:
    state = workbench.apply(workbench.start, Replace(1, "7.png", "full", (2, 1)))
    start = workbench.tree.leaf_logits.clone()
    start[:4] = 0  # the leaves below node 1 begin anew
    weight = workbench.tree.leaf_logits.sum().item() / N_TRAIN
    expected = refitted(state.tree, workbench.training.maps(range(N_TRAIN)), start, weight)
    torch.testing.assert_close(state.tree.leaf_logits.double(), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(state.tree.leaf_logits.sum(), workbench.tree.leaf_logits.sum())


@pytest.mark.parametrize(
    ("node", "keep", "kept"),
    [
        (1, "left", [0, 3, 2, 5, 6]),
        (1, "right", [0, 4, 2, 5, 6]),
        (0, "right", [2, 5, 6]),
        (6, "left", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_removed_node_leaves_the_spliced_tree(workbench: Workbench, node: int, keep: str, kept: list[int]) -> None:
    state = workbench.apply(workbench.start, Remove(node, keep))  # type: ignore[arg-type]
    nodes, leaves = first_numbers(workbench, state)
    assert nodes == kept
    assert torch.equal(state.tree.prototypes, workbench.tree.prototypes[kept])
    maps = workbench.feedback.maps(range(N_FEEDBACK))
    torch.testing.assert_close(state.decisions.soft.double(), predictions(state.tree, maps), rtol=1e-3, atol=1e-5)
    start = workbench.tree.leaf_logits[leaves].clone()
    below = [leaf for leaf, way in oracle.routes(workbench.tree.topology).items() if node in [step[0] for step in way]]
    start[[leaf in below for leaf in leaves]] = 0
    weight = workbench.tree.leaf_logits.sum().item() / N_TRAIN
    expected = refitted(state.tree, workbench.training.maps(range(N_TRAIN)), start, weight)
    torch.testing.assert_close(state.tree.leaf_logits.double(), expected, rtol=1e-3, atol=1e-4)
    # Every way through the new tree is a way through the old one without the removed question.
    old, new = oracle.routes(workbench.tree.topology), oracle.routes(state.tree.topology)
    for leaf, way in new.items():
        before = [step for step in old[leaves[leaf]] if step[0] != node]
        assert [(kept[n], right) for n, right in way] == before


def test_decisions_are_those_of_the_tree_on_the_maps(workbench: Workbench) -> None:
    state: TreeState = workbench.start
    for edit in (Replace(2, "0.png", "full", (3, 3)), Remove(1, "right"), Replace(1, "3.png", "full", (0, 2))):
        state = workbench.apply(state, edit)
    decisions = state.tree.decide(state.tree.route(workbench.feedback.maps(range(N_FEEDBACK))))
    torch.testing.assert_close(state.decisions.soft, decisions.soft)
    assert torch.equal(state.decisions.greedy.nodes, decisions.greedy.nodes)
    figures, labels = workbench.figures(state), workbench.feedback.labels
    assert figures.accuracy["max_path"] == (decisions.labels("max_path") == labels).double().mean().item()
    assert figures.fidelity["greedy"] == pytest.approx(
        (decisions.labels("greedy") == decisions.labels()).float().mean()
    )
    assert figures.path_length["greedy"] == pytest.approx(decisions.greedy.length.double().mean().item())
    assert figures.n_prototypes == 5
    changed = workbench.compare(workbench.start, state).changed
    differ = workbench.start.decisions.labels("greedy") != decisions.labels("greedy")
    assert [c.place for c in changed] == torch.nonzero(differ)[:, 0].tolist()


def test_an_edit_changes_neither_the_state_nor_the_tree_before(workbench: Workbench) -> None:
    before = {name: tensor.clone() for name, tensor in workbench.tree.state_dict().items()}
    first = workbench.apply(workbench.start, Replace(2, "0.png", "full", (3, 3)))
    prototypes, distance = first.tree.prototypes.clone(), first.training.distance.clone()
    for edit in (Replace(2, "1.png", "full", (0, 0)), Remove(0, "left"), Exclude("0.png"), Note(2, "tail")):
        workbench.apply(first, edit)
    assert all(torch.equal(tensor, before[name]) for name, tensor in workbench.tree.state_dict().items())
    assert torch.equal(first.tree.prototypes, prototypes)
    assert torch.equal(first.training.distance, distance)
    assert (first.notes, first.excluded) == ({}, ())


@pytest.mark.parametrize("constrain", [True, False])
def test_a_ban_moves_prototypes_to_the_nearest_patch_that_is_allowed(tiny_backbone: Backbone, constrain: bool) -> None:
    workbench = make_bench(tiny_backbone, two_views=True)
    workbench._constrain = constrain
    state = workbench.apply(workbench.start, Exclude("3.png", (0.0, 0.0, 30.0, 15.0)))
    assert [i for i in range(7) if not torch.equal(state.tree.prototypes[i], workbench.tree.prototypes[i])] == [3]
    source = state.tree.sources[3]
    assert source is not None
    allowed = {int(workbench.tree.leaf_logits[leaf].argmax()) for leaf in (0, 1)} if constrain else {0, 1, 2}
    best, where = np.inf, None
    for row, entry in enumerate(workbench.training.entries):
        for i, j in np.ndindex(4, 4):
            cell = workbench._cell(entry, i, j)
            if entry.view == FULL or entry.sample.label not in allowed or workbench.is_banned(state, cell):
                continue
            apart = (workbench.training.maps([row])[0, :, i, j] - workbench.tree.prototypes[3, :, 0, 0]).norm().item()
            if apart < best:
                best, where = apart, (cell.image, cell.view, (i, j))
    assert (source.image, source.view, source.patch) == where
    assert source.distance == pytest.approx(best, rel=1e-5)
    assert source.region == (20.0, 0.0, 84.0, 64.0)


def test_banned_sources_are_never_used_again(workbench: Workbench) -> None:
    state = workbench.start
    for candidate in workbench.candidates(state, 3, 5):
        state = workbench.apply(state, Exclude(candidate.cell.image, candidate.cell.box))
    state = workbench.apply(state, Exclude("11.png"))
    assert not any(workbench.is_banned(state, candidate.cell) for candidate in workbench.candidates(state, 3, 100))
    assert len(workbench.candidates(state, 3, 100)) == N_TRAIN - 1
    with pytest.raises(EditError, match="excluded"):
        workbench.apply(state, Replace(3, "11.png", "full", (0, 0)))
    for n in range(N_TRAIN - 2):
        state = workbench.apply(state, Exclude(f"{n}.png"))
    with pytest.raises(EditError, match="no patch would be left"):
        workbench.apply(state, Exclude(f"{N_TRAIN - 2}.png"))


def test_candidates_come_nearest_first_one_a_photo(tiny_backbone: Backbone) -> None:
    workbench = make_bench(tiny_backbone, two_views=True)
    found = workbench.candidates(workbench.start, 5, 100)
    assert len({candidate.cell.image for candidate in found}) == len(found) == N_TRAIN
    assert {candidate.cell.view for candidate in found} == {"box"}
    similarity = [candidate.similarity for candidate in found]
    assert similarity == sorted(similarity, reverse=True)


@pytest.mark.parametrize(
    ("region", "patch"),
    [
        ((0.0, 0.0, 10.0, 10.0), (0, 0)),
        ((33.0, 17.0, 60.0, 30.0), (1, 1)),
        ((40.0, 0.0, 130.0, 64.0), (2, 2)),
        ((-50.0, 500.0, -40.0, 600.0), (3, 0)),
    ],
)
def test_a_region_becomes_the_patch_under_its_middle(
    workbench: Workbench, region: tuple[float, float, float, float], patch: tuple[int, int]
) -> None:
    cell = workbench.locate("4.png", region)
    assert cell.patch == patch
    assert cell.replaces(2) == Replace(2, "4.png", "full", patch)


def test_notes_follow_their_node_and_go_with_it(workbench: Workbench) -> None:
    state = workbench.start
    for edit in (Note(6, "long beak"), Note(3, "tail"), Remove(1, "right")):
        state = workbench.apply(state, edit)
    assert state.notes == {4: "long beak"}
    assert workbench.apply(state, Note(4, "")).notes == {}
    with pytest.raises(EditError, match="from 0 to 4, got 6"):
        workbench.apply(state, Note(6, "gone"))


def test_leaves_of_several_edits_begin_anew_where_their_photos_are_others(workbench: Workbench) -> None:
    state = workbench.start
    for edit in (Remove(1, "right"), Replace(3, "7.png", "full", (2, 1))):  # what were nodes 1 and 5 at first
        state = workbench.apply(state, edit)
    start = workbench.tree.leaf_logits[[2, 3, 4, 5, 6, 7]].clone()
    start[:4] = 0
    weight = workbench.tree.leaf_logits.sum().item() / N_TRAIN
    expected = refitted(state.tree, workbench.training.maps(range(N_TRAIN)), start, weight)
    torch.testing.assert_close(state.tree.leaf_logits.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "edit",
    [
        Replace(7, "0.png", "full", (0, 0)),
        Replace(-1, "0.png", "full", (0, 0)),
        Replace(0, "../../etc/passwd", "full", (0, 0)),
        Replace(0, "0.png", "box", (0, 0)),
        Replace(0, "0.png", "full", (4, 0)),
        Replace(0, "0.png", "full", (0, -1)),
        Replace(0, "0.png", "full", (0, 0), "left"),
        Exclude("none.png"),
        Remove(9, "left"),
    ],
)
def test_impossible_edits_are_refused(workbench: Workbench, edit: Edit) -> None:
    with pytest.raises(EditError, match="expected"):
        workbench.apply(workbench.start, edit)


def test_the_last_node_stays(workbench: Workbench) -> None:
    state = workbench.start
    for edit in (Remove(0, "left"), Remove(0, "left")):
        state = workbench.apply(state, edit)
    assert state.tree.sources == (workbench.tree.sources[3],)
    with pytest.raises(EditError, match="single leaf"):
        workbench.apply(state, Remove(0, "left"))

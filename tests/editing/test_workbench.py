"""Edits on a tree of seven nodes whose maps are random numbers, against the literal equations."""

import numpy as np
import pytest
import torch

import oracle
from conftest import one_hot
from prototree.backbones.backbone import Backbone
from prototree.core.confidence import Calibration, fit_calibration
from prototree.core.model import ProtoTree
from prototree.core.nodes import LN2, NodeFunction
from prototree.core.projection import prototype_classes
from prototree.data.crops import FULL_IMAGE
from prototree.editing.edits import Edit, Exclude, Note, Remove, Replace
from prototree.editing.workbench import N_SWEEPS, TreeState, Workbench, copy_tree
from prototree.errors import EditError
from prototree.training.distill import fit_distance_p95
from tiny_workbench import N_TRAIN, N_VALIDATION, ROOT, K, make_bench


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


def test_a_replaced_prototype_of_several_cells_keeps_its_order(tiny_backbone: Backbone) -> None:
    workbench = make_bench(tiny_backbone, size=(2, 3))
    state = workbench.apply(workbench.start, Replace(0, "5.png", "full", (1, 1)))
    assert torch.equal(state.tree.prototypes[0], workbench.training.maps([5])[0, :, 1:3, 1:4])
    assert state.training.distance[5, 0] == 0
    assert workbench.locate("5.png", (128.0, 64.0, 128.0, 64.0)).patch == (2, 1)
    assert torch.equal(state.tree.prototypes[1:], workbench.tree.prototypes[1:])
    source = state.tree.sources[0]
    assert source is not None
    assert (source.image, source.label, source.crop, source.patch) == ("5.png", 2, "full", (1, 1))
    assert source.patch_box == (32.0, 16.0, 128.0, 48.0)


def test_leaves_of_several_edits_begin_anew_where_their_images_are_others(workbench: Workbench) -> None:
    state = workbench.start
    for edit in (Remove(1, "right"), Replace(3, "7.png", "full", (2, 1))):  # what were nodes 1 and 5 at first
        state = workbench.apply(state, edit)
    start = workbench.tree.leaf_logits[[2, 3, 4, 5, 6, 7]].clone()
    start[:4] = 0
    weight = workbench.tree.leaf_logits.sum().item() / N_TRAIN
    expected = refitted(state.tree, workbench.training.maps(range(N_TRAIN)), start, weight)
    torch.testing.assert_close(state.tree.leaf_logits.double(), expected, rtol=1e-3, atol=1e-4)


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
    ],
)
def test_a_removed_node_leaves_the_spliced_tree(workbench: Workbench, node: int, keep: str, kept: list[int]) -> None:
    state = workbench.apply(workbench.start, Remove(node, keep))  # type: ignore[arg-type]
    nodes, leaves = first_numbers(workbench, state)
    assert nodes == kept
    assert torch.equal(state.tree.prototypes, workbench.tree.prototypes[kept])
    maps = workbench.validation.maps(range(N_VALIDATION))
    torch.testing.assert_close(state.prediction.soft.double(), predictions(state.tree, maps), rtol=1e-3, atol=1e-5)
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
    decisions = state.tree.decode(state.tree.forward_features(workbench.validation.maps(range(N_VALIDATION))))
    torch.testing.assert_close(state.prediction.soft, decisions.soft)
    assert torch.equal(state.prediction.greedy.nodes, decisions.greedy.nodes)
    metrics, labels = workbench.metrics(state), workbench.validation.labels
    assert metrics.accuracy["max_path"] == (decisions.labels("max_path") == labels).double().mean().item()
    assert metrics.fidelity["greedy"] == pytest.approx(
        (decisions.labels("greedy") == decisions.labels()).float().mean()
    )
    assert metrics.path_length["greedy"] == pytest.approx(decisions.greedy.length.double().mean().item())
    assert metrics.n_prototypes == 5


def test_an_edit_changes_neither_the_state_nor_the_tree_before(workbench: Workbench) -> None:
    before = {name: tensor.clone() for name, tensor in workbench.tree.state_dict().items()}
    first = workbench.apply(workbench.start, Replace(2, "0.png", "full", (3, 3)))
    prototypes, distance = first.tree.prototypes.clone(), first.training.distance.clone()
    for edit in (Replace(2, "1.png", "full", (0, 0)), Remove(0, "left"), Exclude("0.png"), Note(2, "square")):
        workbench.apply(first, edit)
    assert all(torch.equal(tensor, before[name]) for name, tensor in workbench.tree.state_dict().items())
    assert torch.equal(first.tree.prototypes, prototypes)
    assert torch.equal(first.training.distance, distance)
    assert (first.notes, first.excluded) == ({}, ())


@pytest.mark.parametrize("constrain", [True, False])
def test_an_exclusion_moves_prototypes_to_the_nearest_allowed_patch(tiny_backbone: Backbone, constrain: bool) -> None:
    workbench = make_bench(tiny_backbone, two_views=True)
    workbench._project_within_class = constrain
    state = workbench.apply(workbench.start, Exclude("3.png", (0.0, 0.0, 30.0, 15.0)))
    assert [i for i in range(7) if not torch.equal(state.tree.prototypes[i], workbench.tree.prototypes[i])] == [3]
    source = state.tree.sources[3]
    assert source is not None
    allowed = {int(workbench.tree.leaf_logits[leaf].argmax()) for leaf in (0, 1)} if constrain else {0, 1, 2}
    best, where = np.inf, None
    for row, entry in enumerate(workbench.training.entries):
        for i, j in np.ndindex(4, 4):
            cell = workbench._cell(entry, i, j)
            if entry.view == FULL_IMAGE or entry.sample.label not in allowed or workbench.is_excluded(state, cell):
                continue
            apart = (workbench.training.maps([row])[0, :, i, j] - workbench.tree.prototypes[3, :, 0, 0]).norm().item()
            if apart < best:
                best, where = apart, (cell.image, cell.view, (i, j))
    assert (source.image, source.crop, source.patch) == where
    assert source.distance == pytest.approx(best, rel=1e-5)
    assert source.crop_region == (20.0, 0.0, 84.0, 64.0)


def test_excluded_sources_are_never_used_again(workbench: Workbench) -> None:
    state = workbench.start
    for candidate in workbench.candidates(state, 3, 5):
        state = workbench.apply(state, Exclude(candidate.cell.image, candidate.cell.box))
    state = workbench.apply(state, Exclude("11.png"))
    assert not any(workbench.is_excluded(state, candidate.cell) for candidate in workbench.candidates(state, 3, 100))
    assert len(workbench.candidates(state, 3, 100)) == N_TRAIN - 1
    with pytest.raises(EditError, match="excluded"):
        workbench.apply(state, Replace(3, "11.png", "full", (0, 0)))
    for n in range(N_TRAIN - 2):
        state = workbench.apply(state, Exclude(f"{n}.png"))
    with pytest.raises(EditError, match="no patch would be left"):
        workbench.apply(state, Exclude(f"{N_TRAIN - 2}.png"))


@pytest.mark.parametrize(
    ("region", "patch"),
    [
        ((0.0, 0.0, 10.0, 10.0), (0, 0)),
        ((40.0, 0.0, 130.0, 64.0), (2, 2)),
        ((-50.0, 500.0, -40.0, 600.0), (3, 0)),
    ],
)
def test_a_region_becomes_the_patch_under_its_middle(
    workbench: Workbench, region: tuple[float, float, float, float], patch: tuple[int, int]
) -> None:
    cell = workbench.locate("4.png", region)
    assert cell.patch == patch
    assert cell.as_replacement(2) == Replace(2, "4.png", "full", patch)


def test_notes_follow_their_node_and_go_with_it(workbench: Workbench) -> None:
    state = workbench.start
    for edit in (Note(6, "long beak"), Note(3, "square"), Remove(1, "right")):
        state = workbench.apply(state, edit)
    assert state.notes == {4: "long beak"}
    assert workbench.apply(state, Note(4, "")).notes == {}
    with pytest.raises(EditError):
        workbench.apply(state, Note(6, "gone"))


@pytest.mark.parametrize(
    "edit",
    [
        Replace(7, "0.png", "full", (0, 0)),
        Replace(0, "../../etc/passwd", "full", (0, 0)),
        Replace(0, "0.png", "box", (0, 0)),
        Replace(0, "0.png", "full", (4, 0)),
        Replace(0, "0.png", "full", (0, 0), "left"),
        Exclude("none.png"),
        Remove(9, "left"),
    ],
)
def test_impossible_edits_are_refused(workbench: Workbench, edit: Edit) -> None:
    with pytest.raises(EditError):
        workbench.apply(workbench.start, edit)


def test_the_last_node_stays(workbench: Workbench) -> None:
    state = workbench.apply(workbench.apply(workbench.start, Remove(0, "left")), Remove(0, "left"))
    with pytest.raises(EditError):
        workbench.apply(state, Remove(0, "left"))


# ---- pairwise nodes: each side is a prototype of its own

N = 7  # nodes; rows from here on are the left prototypes


@pytest.fixture
def pairwise(tiny_backbone: Backbone) -> Workbench:
    return make_bench(tiny_backbone, node_function=NodeFunction("pairwise", 6.0))


def moved(before: TreeState, after: TreeState) -> list[int]:
    """The prototypes that are others now; sources and distances have to say the same."""
    pairs = zip(before.tree.prototypes, after.tree.prototypes, strict=True)
    found = [i for i, pair in enumerate(pairs) if not torch.equal(*pair)]
    assert [i for i in range(len(before.tree.sources)) if before.tree.sources[i] != after.tree.sources[i]] == found
    columns = torch.nonzero((before.training.distance != after.training.distance).any(dim=0))[:, 0].tolist()
    assert columns == found
    return found


@pytest.mark.parametrize(("side", "prototype"), [("right", 4), ("left", 4 + N)])
def test_a_side_is_replaced_alone_and_the_leaves_are_fitted(pairwise: Workbench, side: str, prototype: int) -> None:
    state = pairwise.apply(pairwise.start, Replace(4, "7.png", "full", (2, 1), side))  # type: ignore[arg-type]
    assert moved(pairwise.start, state) == [prototype]
    assert torch.equal(state.tree.prototypes[prototype, :, 0, 0], pairwise.training.maps([7])[0, :, 2, 1])
    assert state.training.distance[7, prototype] == 0
    assert not torch.equal(state.tree.leaf_logits, pairwise.tree.leaf_logits)
    decisions = state.tree.decode(state.tree.forward_features(pairwise.validation.maps(range(N_VALIDATION))))
    torch.testing.assert_close(state.prediction.soft, decisions.soft)
    assert pairwise.metrics(state).n_prototypes == 2 * N


def test_the_radius_of_a_side_is_fitted_as_in_training(pairwise: Workbench) -> None:
    state = pairwise.apply(pairwise.start, Replace(4, "7.png", "full", (2, 1), "left"))
    learned = copy_tree(state.tree)
    learned.distance_p95.zero_()
    fit_distance_p95(learned, [(state.training.distance, pairwise.training.labels)])
    assert learned.distance_p95.all()
    torch.testing.assert_close(state.tree.distance_p95, learned.distance_p95)
    torch.testing.assert_close(state.tree.radius, learned.distance_p95)
    assert not torch.equal(pairwise.tree.radius, state.tree.radius)


def test_confidence_is_fitted_again_where_it_was_fitted(pairwise: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = Replace(4, "7.png", "full", (2, 1), "left")
    assert pairwise.apply(pairwise.start, edit).tree.calibration == pairwise.tree.calibration == Calibration()
    pairwise.tree.calibration = Calibration(1.0, 0.0, 50)
    assert pairwise.apply(pairwise.start, edit).tree.calibration == pairwise.tree.calibration, "nine photos are too few"
    monkeypatch.setattr("prototree.editing.workbench.MIN_HELD_OUT", N_VALIDATION)
    state = pairwise.apply(pairwise.start, edit)
    is_right = state.prediction.labels("greedy") == pairwise.validation.labels
    assert state.tree.calibration == fit_calibration(state.prediction.margin, state.prediction.ood_score, is_right)
    assert pairwise.tree.calibration.n_images == 50, "the tree before the edit stays as it was"


def test_leaves_stand_for_the_same_classes_while_patches_are_of_their_side(pairwise: Workbench) -> None:
    classes, own = pairwise.start.leaf_classes.tolist(), prototype_classes(pairwise.tree)[4 + N]
    below = [leaf for leaf, path in enumerate(pairwise.tree.topology.paths.tolist()) if 4 in path]
    kept, of_photos = [], []
    for photo in range(N_TRAIN):
        state = pairwise.apply(pairwise.start, Replace(4, f"{photo}.png", "full", (2, 1), "left"))
        now = state.tree.leaf_logits.argmax(dim=1).tolist()
        (kept if own[photo % K] else of_photos).append((state.leaf_classes.tolist(), now))
    assert all(meant == classes for meant, _ in kept)
    assert any(now != classes for _, now in kept), "other photos reach the leaves, and that does not matter"
    assert all(meant == [now[i] if i in below else classes[i] for i in range(8)] for meant, now in of_photos)
    removed = pairwise.apply(pairwise.start, Remove(4, "left"))
    assert len(removed.leaf_classes) == removed.tree.topology.n_leaves == 7


def test_a_removed_node_takes_both_its_prototypes_with_it(pairwise: Workbench) -> None:
    state = pairwise.apply(pairwise.start, Note(3, "square"))
    state = pairwise.apply(state, Remove(1, "left"))
    kept = [0, 3, 2, 5, 6]
    both = [*kept, *(node + N for node in kept)]
    assert torch.equal(state.tree.prototypes, pairwise.tree.prototypes[both])
    assert state.tree.sources == tuple(pairwise.tree.sources[i] for i in both)
    assert torch.equal(state.training.distance, pairwise.start.training.distance[:, both])
    assert torch.equal(state.validation.patch, pairwise.start.validation.patch[:, both])
    assert state.notes == {1: "square"}
    decisions = state.tree.decode(state.tree.forward_features(pairwise.validation.maps(range(N_VALIDATION))))
    torch.testing.assert_close(state.prediction.soft, decisions.soft)


def test_an_exclusion_moves_prototypes_of_both_sides_to_patches_of_their_own_classes(pairwise: Workbench) -> None:
    # 0.png is the source of the root's right prototype and of number 12, the left one of node 5.
    state = pairwise.apply(pairwise.start, Exclude("0.png"))
    assert moved(pairwise.start, state) == [0, 12]
    own = prototype_classes(pairwise.tree)
    for prototype in (0, 12):
        source = state.tree.sources[prototype]
        assert source is not None
        allowed = own[prototype, pairwise.training.labels]
        apart = pairwise.start.training.distance[:, prototype].masked_fill(~allowed, np.inf)
        apart[0] = np.inf
        assert source.image == f"{int(apart.argmin())}.png"
    for n in range(1, N_TRAIN - 1):
        state = pairwise.apply(state, Exclude(f"{n}.png"))
    with pytest.raises(EditError, match="no patch"):
        pairwise.apply(state, Exclude(f"{N_TRAIN - 1}.png"))


@pytest.mark.parametrize("side", ["right", "left"])
def test_candidates_are_of_the_classes_on_their_side(pairwise: Workbench, side: str) -> None:
    prototype = pairwise.start.prototype_row(1, side)  # type: ignore[arg-type]
    found = pairwise.candidates(pairwise.start, 1, 100, side)  # type: ignore[arg-type]
    own = prototype_classes(pairwise.tree)[prototype]
    labels = pairwise.training.labels
    assert sorted(candidate.cell.image for candidate in found) == sorted(
        f"{i}.png" for i in range(N_TRAIN) if own[labels[i]]
    )
    distance = [float(pairwise.start.training.distance[int(c.cell.image[:-4]), prototype]) for c in found]
    assert distance == sorted(distance)
    pairwise._project_within_class = False
    assert len(pairwise.candidates(pairwise.start, 1, 100, side)) == N_TRAIN  # type: ignore[arg-type]
    assert found[2].cell.as_replacement(1, side).side == side  # type: ignore[arg-type]


def test_trees_of_the_paper_keep_its_similarity(workbench: Workbench, tiny_backbone: Backbone) -> None:
    """Radii that were learned are fitted again after an edit; equal ones stay."""
    edit = Replace(0, "7.png", "full", (2, 1))
    state = workbench.apply(workbench.start, edit)
    assert torch.equal(state.tree.radius, torch.full((7,), LN2))
    assert torch.equal(state.tree.distance_p95, workbench.tree.distance_p95)
    presence = make_bench(tiny_backbone, node_function=NodeFunction("presence", 6.0))
    assert presence.apply(presence.start, edit).tree.distance_p95.any()
    workbench.tree.radius[3] = 2
    learned = Workbench(workbench.tree, ROOT, workbench.training, workbench.validation, lambda _: (FULL_IMAGE,))
    assert learned.apply(learned.start, edit).tree.distance_p95.any()


def test_each_side_of_a_pairwise_node_has_a_note_of_its_own(pairwise: Workbench) -> None:
    state = pairwise.start
    for edit in (Note(6, "hooked", "left"), Note(6, "long beak"), Note(3, "square", "left"), Remove(1, "right")):
        state = pairwise.apply(state, edit)
    names = {state.tree.patch_name(row): text for row, text in state.notes.items()}
    assert names == {"5L": "hooked", "5R": "long beak"}

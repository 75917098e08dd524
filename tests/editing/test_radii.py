"""A prototype that somebody has put elsewhere reaches as far as the answer changes."""

import pytest
import torch

from prototree.backbones.backbone import Backbone
from prototree.core.nodes import LN2, REACH_RANGE, NodeFunction
from prototree.editing.edits import Exclude, Replace
from prototree.editing.reaches import best_threshold, fitted_reach, has_reaches
from prototree.editing.workbench import Workbench
from tiny_workbench import make_bench

PRESENCE = NodeFunction("presence", 6.0)


@pytest.fixture
def workbench(tiny_backbone: Backbone) -> Workbench:
    return make_bench(tiny_backbone, question=PRESENCE)


def gain(distance: torch.Tensor, right: torch.Tensor, threshold: float) -> float:
    """Information about the side, from its definition."""

    def entropy(some: torch.Tensor) -> float:
        p = some.double().mean() if len(some) else torch.tensor(0.0)
        return float(-sum(q * torch.log(q) for q in (p, 1 - p) if q > 0))

    near = distance < threshold
    share = float(near.double().mean())
    return entropy(right) - share * entropy(right[near]) - (1 - share) * entropy(right[~near])


@pytest.mark.parametrize("seed", range(5))
def test_no_other_threshold_says_more_about_the_side(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    distance = (10 * torch.rand(20, generator=generator)).round() / 10  # with some that are equal
    right = torch.rand(20, generator=generator) < 0.4
    found = best_threshold(distance, right)
    assert found is not None
    best = max(gain(distance, right, float(threshold)) for threshold in torch.linspace(0, 1.1, 111))
    assert gain(distance, right, found) == pytest.approx(best)


def test_without_two_sides_or_two_distances_there_is_no_threshold() -> None:
    distance = torch.tensor([0.1, 0.2, 0.3])
    assert best_threshold(distance, torch.tensor([True, True, True])) is None
    assert best_threshold(torch.ones(3), torch.tensor([True, False, True])) is None
    assert best_threshold(distance, torch.tensor([True, False, False])) == pytest.approx(0.15)


def test_the_fitted_reach_parts_classes_that_the_old_one_did_not(workbench: Workbench) -> None:
    tree = workbench.tree
    tree.leaf_logits.data = torch.eye(3)[[0, 0, 0, 0, 1, 1, 1, 1]] * 5  # at the root, class 0 is left, class 1 right
    labels = torch.tensor([1, 1, 1, 0, 0, 0, 2])
    distance = torch.tensor([2.0, 2.1, 2.2, 2.6, 2.7, 2.9, 0.1])  # class 2 is nowhere, and does not count
    reach = fitted_reach(tree, 0, distance, labels)
    assert reach == pytest.approx(2.4 / LN2)
    told = [tree.question.similarity(distance, torch.tensor(r)) > 0.5 for r in (float(tree.reach[0]), reach)]
    assert told[0].tolist() == [False] * 6 + [True], "nothing was near enough"
    assert told[1].tolist() == [True] * 3 + [False] * 3 + [True]


def test_where_nothing_is_told_apart_most_of_the_own_side_is_within_reach(workbench: Workbench) -> None:
    tree = workbench.tree
    tree.leaf_logits.data = torch.eye(3)[[0, 0, 0, 0, 1, 1, 1, 1]] * 5
    ones = torch.ones(5)
    assert fitted_reach(tree, 0, ones, torch.tensor([1, 1, 0, 0, 0])) == pytest.approx(1 / LN2)
    assert fitted_reach(tree, 0, 1e9 * ones, torch.tensor([1, 1, 0, 0, 0])) == REACH_RANGE[1]
    assert fitted_reach(tree, 0, ones, torch.tensor([0, 0, 0, 0, 0])) is None, "the old one stays"


def test_replacing_and_banning_fit_the_reach_of_what_moved(workbench: Workbench) -> None:
    for edit in (Replace(0, "7.png", "full", (2, 1)), Exclude("0.png")):
        state = workbench.apply(workbench.start, edit)
        assert torch.nonzero(state.tree.reach != workbench.tree.reach)[:, 0].tolist() == [0]
        expected = fitted_reach(workbench.tree, 0, state.training.distance[:, 0], workbench.training.labels)
        assert state.tree.reach[0] == pytest.approx(expected)
        assert torch.equal(workbench.tree.reach, torch.ones(7))


def test_trees_of_the_paper_keep_its_similarity(tiny_backbone: Backbone) -> None:
    workbench = make_bench(tiny_backbone)
    assert not has_reaches(workbench.tree)
    state = workbench.apply(workbench.start, Replace(0, "7.png", "full", (2, 1)))
    assert torch.equal(state.tree.reach, torch.ones(7))
    workbench.tree.reach[3] = 2
    assert has_reaches(workbench.tree)

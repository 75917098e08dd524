"""Confidence: what the margin is, and that fitted percentages are true."""

import pytest
import torch

from conftest import random_maps
from prototree.core import confidence as module
from prototree.core.confidence import (
    MAX_MARGIN,
    MAX_OFFSET,
    MAX_SLOPE,
    Calibration,
    distance_ratio,
    fit_calibration,
    margin,
)
from prototree.core.model import ProtoTree
from prototree.core.nodes import NodeFunction


def test_the_margin_is_over_the_best_leaf_of_another_class() -> None:
    log_probs = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]).log()
    found = margin(log_probs, torch.tensor([0, 1]), torch.tensor([7, 8, 7]))
    torch.testing.assert_close(found, torch.tensor([0.5 / 0.3, 0.3 / 0.5]).log())
    assert margin(log_probs, torch.tensor([0, 2]), torch.tensor([7, 7, 7])).tolist() == [MAX_MARGIN, MAX_MARGIN]


def test_fitted_percentages_are_true() -> None:
    generator = torch.Generator().manual_seed(0)
    margins = 3 * torch.randn(20_000, generator=generator) + 1
    truth = torch.sigmoid(0.7 * margins - 0.4)
    is_right = torch.rand(20_000, generator=generator) < truth
    fitted = fit_calibration(margins, torch.ones(20_000), is_right)
    assert (fitted.slope, fitted.offset) == pytest.approx((0.7, -0.4), abs=0.06)
    assert fitted.n_images == 20_000
    for low in (0.1, 0.3, 0.5, 0.7):
        some = (fitted.of(margins) > low) & (fitted.of(margins) < low + 0.2)
        assert fitted.of(margins)[some].mean().item() == pytest.approx(is_right[some].float().mean().item(), abs=0.03)


@pytest.mark.parametrize("is_right", [torch.ones(30, dtype=torch.bool), torch.zeros(30, dtype=torch.bool)])
def test_answers_that_are_all_right_or_all_wrong_do_not_break_it(is_right: torch.Tensor) -> None:
    fitted = fit_calibration(torch.linspace(0, 5, 30), torch.ones(30), is_right)
    assert (fitted.of(torch.tensor([2.0])) > 0.9).item() == bool(is_right[0])
    assert (fitted.of(torch.tensor([2.0])) < 0.1).item() == (not bool(is_right[0]))


@pytest.mark.parametrize("n_images", [20, 24, 300])
def test_few_right_answers_promise_no_more_than_they_support(n_images: int) -> None:
    fitted = fit_calibration(torch.linspace(2, 50, n_images), torch.ones(n_images), torch.ones(n_images).bool())
    limit = (n_images + 1) / (n_images + 2)  # Platt 1999; also Laplace's rule of succession
    assert fitted.of(torch.tensor([2.0, 50.0])).tolist() == pytest.approx([limit, limit], abs=1e-3)


@pytest.mark.parametrize("slope", [0.0, 1e308, -1e308, MAX_SLOPE])
@pytest.mark.parametrize("offset", [1e308, -1e308, -MAX_OFFSET])
def test_no_calibration_gives_a_confidence_that_is_no_number(slope: float, offset: float) -> None:
    for dtype in (torch.float32, torch.float64):
        found = Calibration(slope, offset).of(torch.tensor([-MAX_MARGIN, -1.0, 0.0, 1e-6, MAX_MARGIN], dtype=dtype))
        assert ((found >= 0) & (found <= 1)).all()


def test_a_fit_stays_within_what_can_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SLOPE", 0.1)
    monkeypatch.setattr(module, "MAX_OFFSET", 0.2)
    fitted = fit_calibration(torch.linspace(0, 5, 30), torch.ones(30), torch.arange(30) >= 15)
    assert (fitted.slope, fitted.offset) == (0.1, -0.2)


def test_decisions_carry_the_confidence_of_the_greedy_answer(tiny_tree: ProtoTree) -> None:
    tiny_tree.calibration = Calibration(0.5, -1.0, 10)
    routed = tiny_tree.forward_features(random_maps(0, 5, 8, 4, 4, dtype=torch.float32))
    decisions = tiny_tree.decode(routed)
    labels = tiny_tree.leaf_logits.argmax(dim=1)
    expected = torch.sigmoid(0.5 * margin(routed.log_path_probs, decisions.greedy.leaf, labels) - 1)
    assert torch.equal(decisions.confidence, expected)


@pytest.mark.parametrize("seed", range(5))
def test_the_limits_let_95_of_100_images_pass_and_use_both_confidence_and_ood_score(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    margins, ood_score = torch.randn(400, generator=generator), torch.rand(400, generator=generator)
    is_right = torch.rand(400, generator=generator) < torch.sigmoid(2 * margins - 0.5)
    fitted = fit_calibration(margins, ood_score, is_right)
    sure, near = fitted.of(margins) >= fitted.min_confidence, ood_score <= fitted.max_ood_score
    assert 0.95 <= (sure & near).float().mean() < 0.96
    assert not sure.all()
    assert not near.all()
    assert torch.equal(fitted.accepts(fitted.of(margins), ood_score), sure & near)


def test_an_answer_that_is_rather_right_than_wrong_is_given() -> None:
    margins = torch.linspace(3, 9, 100)
    fitted = fit_calibration(margins, torch.ones(100), torch.ones(100, dtype=torch.bool))
    assert fitted.of(margins[:1]).item() > 0.5
    assert fitted.min_confidence <= 0.5
    assert fitted.accepts(fitted.of(margins), torch.ones(100)).all()


def test_what_was_never_fitted_always_answers() -> None:
    assert Calibration().accepts(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 999.0])).all()


@pytest.mark.parametrize("kind", ["presence", "pairwise"])
def test_the_ood_score_is_the_worst_step_of_the_greedy_path(tiny_tree: ProtoTree, kind: str) -> None:
    tree = tiny_tree
    if kind == "pairwise":
        tree = ProtoTree(tree.topology, tree.features, tree.class_names, node_function=NodeFunction("pairwise", 3.0))
    tree.requires_grad_(False)
    n_nodes = tree.topology.n_nodes
    tree.distance_p95.copy_(torch.linspace(0.5, 1.5, 2 * n_nodes))
    routed = tree.forward_features(random_maps(0, 6, 8, 4, 4, dtype=torch.float32))
    decisions = tree.decode(routed)
    for image in range(6):
        found = []
        path = decisions.greedy
        for node, right in zip(path.nodes[image].tolist(), path.goes_right[image].tolist(), strict=True):
            if node >= 0:
                column = node + n_nodes if kind == "pairwise" and not right else node
                limit = tree.distance_p95[node if right else node + n_nodes]
                found.append(float(routed.distance[image, column] / limit))
        assert decisions.ood_score[image].item() == pytest.approx(max(found))
    tree.calibration = Calibration(max_ood_score=float(decisions.ood_score.median()))
    assert torch.equal(tree.decode(routed).abstained, decisions.ood_score > decisions.ood_score.median())
    tree.distance_p95.zero_()
    assert not tree.decode(routed).distance_ratio.any(), "nothing is strange where nobody knows what is usual"
    nothing = torch.zeros(2, 0, dtype=torch.long)
    assert distance_ratio(torch.zeros(2, 0), nothing, nothing.bool(), torch.zeros(0)).shape == (2, 0)

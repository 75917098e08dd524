"""Sureness: what the lead is, and that fitted percentages are true."""

import pytest
import torch

from conftest import random_maps
from prototree.tree.model import ProtoTree
from prototree.tree.sureness import MAX_LEAD, Sureness, fit_sureness, lead


def test_the_lead_is_over_the_best_leaf_of_another_class() -> None:
    log_probs = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]).log()
    found = lead(log_probs, torch.tensor([0, 1]), torch.tensor([7, 8, 7]))
    torch.testing.assert_close(found, torch.tensor([0.5 / 0.3, 0.3 / 0.5]).log())
    assert lead(log_probs, torch.tensor([0, 2]), torch.tensor([7, 7, 7])).tolist() == [MAX_LEAD, MAX_LEAD]


def test_fitted_percentages_are_true() -> None:
    generator = torch.Generator().manual_seed(0)
    leads = 3 * torch.randn(20_000, generator=generator) + 1
    truth = torch.sigmoid(0.7 * leads - 0.4)
    is_right = torch.rand(20_000, generator=generator) < truth
    fitted = fit_sureness(leads, is_right)
    assert (fitted.slope, fitted.offset) == pytest.approx((0.7, -0.4), abs=0.06)
    assert fitted.n_photos == 20_000
    for low in (0.1, 0.3, 0.5, 0.7):
        some = (fitted.of(leads) > low) & (fitted.of(leads) < low + 0.2)
        assert fitted.of(leads)[some].mean().item() == pytest.approx(is_right[some].float().mean().item(), abs=0.03)


@pytest.mark.parametrize("is_right", [torch.ones(30, dtype=torch.bool), torch.zeros(30, dtype=torch.bool)])
def test_answers_that_are_all_right_or_all_wrong_do_not_break_it(is_right: torch.Tensor) -> None:
    fitted = fit_sureness(torch.linspace(0, 5, 30), is_right)
    assert (fitted.of(torch.tensor([2.0])) > 0.9).item() == bool(is_right[0])
    assert (fitted.of(torch.tensor([2.0])) < 0.1).item() == (not bool(is_right[0]))


def test_decisions_carry_the_sureness_of_the_greedy_answer(tiny_tree: ProtoTree) -> None:
    tiny_tree.sureness = Sureness(0.5, -1.0, 10)
    routed = tiny_tree.route(random_maps(0, 5, 8, 4, 4, dtype=torch.float32))
    decisions = tiny_tree.decide(routed)
    labels = tiny_tree.leaf_logits.argmax(dim=1)
    expected = torch.sigmoid(0.5 * lead(routed.log_path_probs, decisions.greedy.leaf, labels) - 1)
    assert torch.equal(decisions.sureness, expected)

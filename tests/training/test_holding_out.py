"""What photos that a tree has not seen teach it: how sharp questions must be for its percentages to be true."""

import copy
from dataclasses import replace

import pytest
import torch

from prototree.training.holding_out import SHARPER_STEPS, Held, fit_held, fit_sharpness
from prototree.tree.model import ProtoTree
from prototree.tree.questions import Question, QuestionKind
from prototree.tree.topology import Topology

TRUE = {"choice": 8.0, "presence": 3.6}


def held_by(tree: ProtoTree, sharpness: float, count: int = 4000) -> Held:
    """Photos whose labels follow Eq. 4 with this sharpness: then its probabilities are true."""
    generator = torch.Generator().manual_seed(0)
    distance = 1.5 * torch.rand(count, tree.n_prototypes, generator=generator)
    held = Held(distance, torch.zeros(count, dtype=torch.long))
    probs = tree.decide(held.routed(tree, replace(tree.question, sharpness=sharpness))).soft
    return replace(held, labels=torch.multinomial(probs, 1, generator=generator)[:, 0])


@pytest.fixture(params=["choice", "presence"])
def tree(request: pytest.FixtureRequest, tiny_tree: ProtoTree) -> ProtoTree:
    kind: QuestionKind = request.param
    question = Question(kind, 0.5 * TRUE[kind])
    found = ProtoTree(Topology.full(3), tiny_tree.features, 5, question=question)
    found.leaf_logits.data.copy_(12 * torch.eye(8)[:, :5])
    return found.eval()


def test_the_sharpness_that_makes_probabilities_true_is_found(tree: ProtoTree) -> None:
    true = TRUE[tree.question.kind]
    held = held_by(tree, true)
    fitted = fit_sharpness(tree, held)
    assert 0.8 * true <= fitted <= true, "the least that the photos cannot tell from the best"
    sharper = copy.copy(tree)
    sharper.question = replace(tree.question, sharpness=fitted)
    error = {}
    for one in (tree, sharper):
        probs = one.decide(held.routed(one)).soft
        confidence, said = probs.max(dim=1)
        error[one] = float((confidence.mean() - (said == held.labels).float().mean()).abs())
    assert error[sharper] < 0.04 < error[tree], "it was less sure than right"


def test_few_photos_change_little_and_none_make_questions_softer(tree: ProtoTree) -> None:
    true, own = TRUE[tree.question.kind], tree.question.sharpness
    few, many = (fit_sharpness(tree, held_by(tree, true, count)) for count in (40, 4000))
    assert own <= few <= many
    assert fit_sharpness(tree, held_by(tree, own)) == own
    assert fit_sharpness(tree, held_by(tree, max(own / 2, 1.0))) == own
    assert fit_sharpness(tree, held_by(tree, 64.0)) <= own * (1 + SHARPER_STEPS / 10)


def test_sureness_is_fitted_at_the_sharpness_of_the_tree(tree: ProtoTree) -> None:
    held = held_by(tree, TRUE[tree.question.kind])
    decisions = tree.decide(held.routed(tree))
    sureness = fit_held(tree, held)
    is_right = (decisions.labels("greedy") == held.labels).float()
    assert sureness.n_photos == 4000
    assert float(sureness.of(decisions.lead).mean()) == pytest.approx(float(is_right.mean()), abs=0.01)

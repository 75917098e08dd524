"""Contract 3 (the leaf update conserves mass) and the leaf part of contract 4."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from conftest import one_hot, random_maps
from prototree.core import leaves


def random_paths(seed: int, n_images: int, n_leaves: int, sharpness: float = 2.0) -> torch.Tensor:
    return (sharpness * random_maps(seed, n_images, n_leaves)).log_softmax(dim=1)


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 6), st.integers(2, 5))
@settings(deadline=None)
def test_prediction_likelihood_and_counts_agree_with_the_oracle(seed: int, b: int, n_leaves: int, k: int) -> None:
    log_pi, c = random_paths(seed, b, n_leaves), 4 * random_maps(seed + 1, n_leaves, k)
    labels = [(seed + i) % k for i in range(b)]
    target, log_sigma = one_hot(labels, k), leaves.class_log_probs(c)
    y_hat = oracle.prediction(log_pi.exp(), c)
    torch.testing.assert_close(leaves.predict(log_pi, log_sigma.exp()), y_hat)
    torch.testing.assert_close(leaves.log_predict(log_pi, log_sigma), y_hat.log())
    expected = oracle.leaf_counts(log_pi.exp(), c, target)
    for given_target in (torch.tensor(labels), target):
        likelihood = leaves.log_likelihood(log_pi, log_sigma, given_target)
        torch.testing.assert_close(likelihood, y_hat.log()[range(b), labels])
        torch.testing.assert_close(leaves.leaf_counts(log_pi, log_sigma, given_target), expected)


def test_soft_labels_agree_with_the_oracle() -> None:
    log_pi, c, target = random_paths(0, 3, 4), 3 * random_maps(1, 4, 5), random_maps(2, 3, 5)
    target = target / target.sum(dim=1, keepdim=True)
    log_sigma = leaves.class_log_probs(c)
    torch.testing.assert_close(
        leaves.leaf_counts(log_pi, log_sigma, target), oracle.leaf_counts(log_pi.exp(), c, target)
    )
    expected = (target * oracle.prediction(log_pi.exp(), c).log()).sum(dim=1)
    torch.testing.assert_close(leaves.log_likelihood(log_pi, log_sigma, target), expected)


@pytest.mark.parametrize("soft", [False, True])
def test_gradcheck(soft: bool) -> None:
    scores, c = random_maps(0, 3, 4).requires_grad_(), random_maps(1, 4, 5).requires_grad_()
    target = random_maps(2, 3, 5) if soft else torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(
        lambda s, c: leaves.log_likelihood(s.log_softmax(1), leaves.class_log_probs(c), target), (scores, c)
    )


@given(st.integers(0, 1000), st.sampled_from([1.0, 30.0, 300.0]), st.sampled_from([2.0, 80.0, 250.0]), st.booleans())
@settings(deadline=None)
def test_a_batch_adds_exactly_its_targets_and_nothing_overflows(
    seed: int, logits: float, sharpness: float, soft: bool
) -> None:
    # With logits and path log-probabilities in the hundreds, every product of probabilities is 0 in float32.
    log_pi = random_paths(seed, 6, 16, sharpness).float()
    c = logits * random_maps(seed + 1, 16, 7, dtype=torch.float32).round(decimals=1)
    target = random_maps(seed + 2, 6, 7, dtype=torch.float32) if soft else torch.arange(6) % 7
    log_sigma = leaves.class_log_probs(c)
    counts = leaves.leaf_counts(log_pi, log_sigma, target)
    expected = target.sum(dim=0) if soft else torch.bincount(target, minlength=7).float()
    assert torch.isfinite(counts).all()
    assert (counts >= 0).all()
    torch.testing.assert_close(counts.sum(dim=0), expected, atol=1e-5, rtol=1e-5)
    likelihood = leaves.log_likelihood(log_pi.requires_grad_(), log_sigma, target)
    (gradient,) = torch.autograd.grad(likelihood.sum(), log_pi)
    assert torch.isfinite(likelihood).all()
    assert torch.isfinite(gradient).all()


def test_log_prediction_is_right_where_the_product_vanishes() -> None:
    log_pi, c = random_paths(0, 5, 8, 400.0), 300 * random_maps(1, 8, 6)
    truth = leaves.log_predict(log_pi, leaves.class_log_probs(c))  # float64 reaches e⁻⁷⁰⁰
    assert truth.min() < -150  # float32 alone would end near −87
    found = leaves.log_predict(log_pi.float(), leaves.class_log_probs(c.float()))
    torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("n_images", "batch_size"), [(40, 8), (43, 8), (5, 64), (17, 1)])
def test_after_every_epoch_the_counts_sum_to_the_number_of_images(n_images: int, batch_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    c = torch.zeros(16, 7)
    labels = torch.arange(n_images) % 7
    for _ in range(4):
        epoch_start, batches = c.clone(), torch.randperm(n_images, generator=generator).split(batch_size)
        for batch in batches:
            log_pi = torch.randn(len(batch), 16, generator=generator).mul(3).log_softmax(dim=1)
            counts = leaves.leaf_counts(log_pi, leaves.class_log_probs(c), labels[batch])
            c = leaves.leaf_update(c, epoch_start, counts, len(batches))
            assert (c >= 0).all()
        torch.testing.assert_close(c.sum(dim=0), torch.bincount(labels, minlength=7).float(), rtol=1e-4, atol=1e-4)


def test_update_of_one_step_by_hand() -> None:
    c, start, counts = torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 6.0]]), torch.tensor([[0.5, 0.0]])
    # 1 − 2/2 + 0.5 and 4 − 6/2 + 0
    torch.testing.assert_close(leaves.leaf_update(c, start, counts, 2), torch.tensor([[0.5, 1.0]]))
    # what rounding makes negative is 0, before the batch's counts are added
    found = leaves.leaf_update(c - 1e-3, start, counts, 2)
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.999]]), atol=1e-6, rtol=0)


def test_how_many_images_a_confident_leaf_needs() -> None:
    # The bound the documentation states: K = 200; 1, 5 and 10 images of one class in a leaf.
    confidence = [leaves.class_log_probs(torch.eye(1, 200) * n).exp().max().item() for n in (1, 5, 10)]
    assert confidence == pytest.approx([0.0135, 0.43, 0.99], abs=0.005)

"""The leaves' class distributions: the prediction (Eq. 4), its likelihood, and learning without gradients (Eq. 5).

Notation used for tensor shapes: B batch, L leaves, K classes.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import log_softmax

Labels = Int[Tensor, " B"]
SoftLabels = Float[Tensor, "B K"]


def class_log_probs(leaf_logits: Float[Tensor, "L K"]) -> Float[Tensor, "L K"]:
    """log σ(c) of every leaf."""
    return log_softmax(leaf_logits, dim=1)


def predict(log_path_probs: Float[Tensor, "B L"], leaf_probs: Float[Tensor, "L K"]) -> Float[Tensor, "B K"]:
    """Eq. 4: class probabilities, every leaf weighted by its path probability."""
    return log_path_probs.exp() @ leaf_probs


def log_predict(log_path_probs: Float[Tensor, "B L"], leaf_log_probs: Float[Tensor, "L K"]) -> Float[Tensor, "B K"]:
    """Eq. 4 as logarithms that stay finite for the least likely class."""
    weights, scaled, shift, base = _scaled(log_path_probs, leaf_log_probs)
    product = weights @ scaled
    image, label = torch.nonzero(product < _underflow(product), as_tuple=True)
    log_product = product.clamp_min(_underflow(product)).log() + shift + base
    if len(image):
        exact = _log_joint(log_path_probs, leaf_log_probs, image, label).logsumexp(dim=1)
        log_product = log_product.index_put((image, label), exact)
    return log_product


def log_predict_classes(
    log_path_probs: Float[Tensor, "B L"], leaf_of_class: Int[Tensor, " K"], count: float
) -> Float[Tensor, "B K"]:
    """The same where every class has one leaf, which has counted `count` images of it and none of others.

    Such a leaf gives its own class e^c and each other one 1, divided by e^c + K − 1: no work with the whole matrix.
    """
    n_others = len(leaf_of_class) - 1
    log_total = count + math.log1p(n_others * math.exp(-count))
    log_gain = math.log(-math.expm1(-count)) - log_total + count
    own = log_path_probs[:, leaf_of_class] + log_gain
    return torch.logaddexp(own, own.new_tensor(-log_total))


def log_likelihood(
    log_path_probs: Float[Tensor, "B L"], leaf_log_probs: Float[Tensor, "L K"], target: Labels | SoftLabels
) -> Float[Tensor, " B"]:
    """Σ_k y_k log ŷ_k for each image; the loss is minus its mean. Hard labels need no K-wide work."""
    if target.is_floating_point():
        return (target * log_predict(log_path_probs, leaf_log_probs)).sum(dim=1)
    return (log_path_probs + leaf_log_probs.T[target]).logsumexp(dim=1)


def leaf_counts(
    log_path_probs: Float[Tensor, "B L"], leaf_log_probs: Float[Tensor, "L K"], target: Labels | SoftLabels
) -> Float[Tensor, "L K"]:
    """Eq. 5 summed over a batch: each image shares its target out over the leaves, so the total is Σ targets.

    For a hard label, σ(c) ⊙ y ⊙ π ⊘ ŷ is nothing but a softmax over the leaves of log π + log σ(c) at the label.
    """
    if target.is_floating_point():
        return _soft_leaf_counts(log_path_probs, leaf_log_probs, target)
    touched = touched_counts(log_path_probs, leaf_log_probs.T, target)
    counts = torch.zeros_like(leaf_log_probs.T)  # K L: adding to rows is faster than to columns
    return touched.add_to(counts).T


@dataclass(frozen=True)
class Touched:
    """Counts of a batch with hard labels: all that is not 0, class by class."""

    classes: Int[Tensor, " n"]
    counts: Float[Tensor, "n L"]

    def add_to(self, total: Float[Tensor, "K L"]) -> Float[Tensor, "K L"]:
        """In place."""
        return total.index_add_(0, self.classes, self.counts)


def touched_counts(
    log_path_probs: Float[Tensor, "B L"], log_probs_by_class: Float[Tensor, "K L"], target: Labels
) -> Touched:
    """Eq. 5 for hard labels, in the batch's own classes alone: work and memory do not depend on K."""
    responsibility = (log_path_probs + log_probs_by_class[target]).softmax(dim=1)  # B L
    classes, place = target.unique(return_inverse=True)
    counts = responsibility.new_zeros(len(classes), responsibility.shape[1])
    return Touched(classes, counts.index_add_(0, place, responsibility))


def leaf_update(
    leaf_logits: Float[Tensor, "L K"],
    epoch_start: Float[Tensor, "L K"],
    counts: Float[Tensor, "L K"],
    n_batches: int,
) -> Float[Tensor, "L K"]:
    """Algorithm 1, lines 9–10: the last epoch's counts leave at the pace at which this epoch's arrive."""
    # What is left of the last epoch is never negative but for rounding.
    return torch.sub(leaf_logits, epoch_start, alpha=1 / n_batches).clamp_min_(0).add_(counts)


def _soft_leaf_counts(
    log_path_probs: Float[Tensor, "B L"], leaf_log_probs: Float[Tensor, "L K"], target: SoftLabels
) -> Float[Tensor, "L K"]:
    weights, scaled, _, _ = _scaled(log_path_probs, leaf_log_probs)
    product = weights @ scaled
    lost = (product < _underflow(product)) & (target > 0)
    share = torch.where(lost, 0, target / product.clamp_min(_underflow(product)))
    counts = scaled * (weights.T @ share)
    image, label = torch.nonzero(lost, as_tuple=True)
    if len(image):
        exact = _log_joint(log_path_probs, leaf_log_probs, image, label).softmax(dim=1)
        counts.T.index_add_(0, label, exact * target[image, label][:, None])
    return counts


def _scaled(
    log_path_probs: Float[Tensor, "B L"], leaf_log_probs: Float[Tensor, "L K"]
) -> tuple[Float[Tensor, "B L"], Float[Tensor, "L K"], Float[Tensor, "B 1"], Float[Tensor, "1 K"]]:
    """π and σ(c) divided by each image's likeliest leaf and each class's best leaf, so that products rarely vanish."""
    shift = log_path_probs.detach().amax(dim=1, keepdim=True)
    base = leaf_log_probs.detach().amax(dim=0, keepdim=True)
    return (log_path_probs - shift).exp(), (leaf_log_probs - base).exp(), shift, base


def _underflow(product: Tensor) -> float:
    """Below this a sum of products has lost digits; such entries are computed in log space instead."""
    return torch.finfo(product.dtype).tiny / torch.finfo(product.dtype).eps


def _log_joint(
    log_path_probs: Float[Tensor, "B L"],
    leaf_log_probs: Float[Tensor, "L K"],
    image: Int[Tensor, " pairs"],
    label: Int[Tensor, " pairs"],
) -> Float[Tensor, "pairs L"]:
    return log_path_probs[image] + leaf_log_probs.T[label]

"""The leaves' class distributions: the prediction (Eq. 4), its likelihood, and learning without gradients (Eq. 5).

Notation used for tensor shapes: B batch, L leaves, K classes.
"""

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
        exact = (log_path_probs[image] + leaf_log_probs.T[label]).logsumexp(dim=1)
        log_product = log_product.index_put((image, label), exact)
    return log_product


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
    """Eq. 5 summed over a batch: Σ σ(c) ⊙ y ⊙ π ⊘ ŷ; each image shares its target out over the leaves."""
    if not target.is_floating_point():
        responsibility = (log_path_probs + leaf_log_probs.T[target]).softmax(dim=1)  # B L
        return torch.zeros_like(leaf_log_probs.T).index_add_(0, target, responsibility).T
    weights, scaled, _, _ = _scaled(log_path_probs, leaf_log_probs)
    product = weights @ scaled
    lost = (product < _underflow(product)) & (target > 0)
    fraction = torch.where(lost, 0, target / product.clamp_min(_underflow(product)))
    counts = scaled * (weights.T @ fraction)
    image, label = torch.nonzero(lost, as_tuple=True)
    if len(image):
        exact = (log_path_probs[image] + leaf_log_probs.T[label]).softmax(dim=1)
        counts.T.index_add_(0, label, exact * target[image, label][:, None])
    return counts


def leaf_update(
    leaf_logits: Float[Tensor, "L K"], epoch_start: Float[Tensor, "L K"], counts: Float[Tensor, "L K"], n_batches: int
) -> Float[Tensor, "L K"]:
    """Algorithm 1, lines 9–10: the last epoch's counts leave at the pace at which this epoch's arrive."""
    # What is left of the last epoch is never negative but for rounding.
    return torch.sub(leaf_logits, epoch_start, alpha=1 / n_batches).clamp_min_(0).add_(counts)


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

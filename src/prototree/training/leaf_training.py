"""How the leaves learn, as one seam: the paper's way, and the two it compares with (§4)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from prototree.core import leaves
from prototree.core.model import ProtoTree, TreeOutput
from prototree.training import distributed

Target = leaves.Labels | leaves.SoftLabels
Visit = Callable[[TreeOutput, Target], None]
Sweep = Callable[[Visit], None]
"""Runs all training images through the tree without learning and calls back with each batch."""


class LeafTrainer(nn.Module):
    """Learns the leaves while the rest is learned by gradients. What it holds is saved with the training state."""

    def prepare(self, tree: ProtoTree) -> None:
        """Called once, before the optimiser is made."""

    def start_epoch(self, tree: ProtoTree, sweep: Sweep) -> None:
        """Called before the first batch of an epoch."""

    def after_batch(self, tree: ProtoTree, routed: TreeOutput | None, target: Target, n_batches: int) -> None:
        """Called after the optimiser's step with what the tree said before it; None for an empty share of a batch."""


class Interleaved(LeafTrainer):
    """Algorithm 1: the derivative-free update with every mini-batch."""

    epoch_start: Tensor

    def prepare(self, tree: ProtoTree) -> None:
        self.register_buffer("epoch_start", tree.leaf_logits.detach().clone())

    def start_epoch(self, tree: ProtoTree, sweep: Sweep) -> None:
        self.epoch_start.copy_(tree.leaf_logits.detach())

    @torch.no_grad()
    def after_batch(self, tree: ProtoTree, routed: TreeOutput | None, target: Target, n_batches: int) -> None:
        counts = count_whole_batch(tree, routed, target)
        tree.leaf_logits.copy_(leaves.leaf_update(tree.leaf_logits, self.epoch_start, counts, n_batches))


class TwoPass(LeafTrainer):
    """Kontschieder et al.: Eq. 5 over the whole set first, then an epoch for the rest."""

    def start_epoch(self, tree: ProtoTree, sweep: Sweep) -> None:
        refit_leaves(tree, sweep)


class Gradient(LeafTrainer):
    """Leaves learned by gradients with everything else, which the paper found inferior."""

    def prepare(self, tree: ProtoTree) -> None:
        tree.leaf_logits.requires_grad_(True)


LEAF_TRAINERS: dict[str, type[LeafTrainer]] = {"interleaved": Interleaved, "two_pass": TwoPass, "gradient": Gradient}


def count_batch(tree: ProtoTree, routed: TreeOutput | None, target: Target) -> Tensor:
    """Eq. 5 for one batch with the leaves as they are; zeros for an empty one."""
    if routed is None:
        return torch.zeros_like(tree.leaf_logits)
    log_path_probs = routed.log_path_probs.detach()
    return leaves.leaf_counts(log_path_probs, leaves.class_log_probs(tree.leaf_logits.detach()), target).contiguous()


def count_whole_batch(tree: ProtoTree, routed: TreeOutput | None, target: Target) -> Tensor:
    """The same of the batch that all processes share.

    With hard labels they exchange what the batch touched, L numbers for each of its classes, where that is less than
    the whole matrix.
    """
    if distributed.shard().world_size == 1 or target.is_floating_point():
        return distributed.sum_over(count_batch(tree, routed, target))
    by_class = leaves.class_log_probs(tree.leaf_logits.detach()).T
    log_path_probs = by_class.new_zeros(0, by_class.shape[1]) if routed is None else routed.log_path_probs.detach()
    own, total = leaves.touched_counts(log_path_probs, by_class, target), torch.zeros_like(by_class)
    if sum(distributed.lengths(len(own.classes))) >= len(by_class):
        return distributed.sum_over(own.add_to(total).T.contiguous())
    for classes, counts in zip(distributed.gather(own.classes), distributed.gather(own.counts), strict=True):
        leaves.Touched(classes, counts).add_to(total)
    return total.T


@torch.no_grad()
def refit_leaves(tree: ProtoTree, sweep: Sweep, n_sweeps: int = 1) -> None:
    """Eq. 5 over the whole set, as often as asked; a batch with hard labels touches the rows of its classes alone."""
    for _ in range(n_sweeps):
        by_class = leaves.class_log_probs(tree.leaf_logits.detach()).T.contiguous()
        total = torch.zeros_like(by_class)

        def visit(routed: TreeOutput, target: Target, by_class: Tensor = by_class, total: Tensor = total) -> None:
            if target.is_floating_point():
                total.add_(leaves.leaf_counts(routed.log_path_probs, by_class.T, target).T)
            else:
                leaves.touched_counts(routed.log_path_probs, by_class, target).add_to(total)

        sweep(visit)
        tree.leaf_logits.copy_(distributed.sum_over(total).T)

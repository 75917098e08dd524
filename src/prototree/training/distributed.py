"""More than one process: what `torchrun` starts, seen from the inside. With one process everything here is a no-op.

Each process holds a share of every batch. Sums over the shares (gradients, leaf counts, batch-norm statistics) make the
processes compute what one alone would have computed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from prototree.data.loading import Shard
from prototree.errors import TrainError


@contextmanager
def processes() -> Iterator[torch.device]:
    """Joins the group that `torchrun` describes in the environment, if any, and says which device is ours."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        yield device
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def shard() -> Shard:
    """Which process this is, of how many."""
    return Shard(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Shard()


def is_first() -> bool:
    """Whether this process is the one that writes files and talks."""
    return shard().rank == 0


def sum_over(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def gather(tensor: Tensor) -> list[Tensor]:
    """The tensor of every process, in order of rank; first dimensions may differ."""
    if not dist.is_initialized():
        return [tensor]
    lengths = [torch.zeros(1, dtype=torch.long, device=tensor.device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(tensor)], device=tensor.device))
    longest = max(int(length) for length in lengths)
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [part[: int(length)] for part, length in zip(parts, lengths, strict=True)]


def wait_for_all() -> None:
    """Goes on when every process has come here."""
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """What is done within is done by the first process first, and by the others when it is done."""
    if not is_first():
        wait_for_all()
    yield
    if is_first():
        wait_for_all()


def any_process(flag: bool) -> bool:
    """Whether the flag is set in at least one process."""
    return bool(sum_over(torch.tensor([int(flag)], device=_device())).item()) if dist.is_initialized() else flag


def synchronise_batch_norm(module: nn.Module) -> nn.Module:
    """Batch norm whose statistics are those of the whole batch, not of this process's share."""
    if not dist.is_initialized():
        return module
    if _device().type == "cuda":
        from timm.layers import convert_sync_batchnorm

        return convert_sync_batchnorm(module)  # type: ignore[no-any-return]
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
            _synchronise_on_cpu(layer)
    return module


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _synchronise_on_cpu(layer: Any) -> None:
    """torch's own SyncBatchNorm knows GPUs only."""
    own_forward = layer.forward

    def forward(x: Tensor) -> Tensor:
        if not (layer.training and dist.is_initialized()):
            return own_forward(x)  # type: ignore[no-any-return]
        return _after_norm(layer, _synchronised_norm(layer, x))

    layer.forward = forward


def _synchronised_norm(layer: Any, x: Tensor) -> Tensor:
    from torch.distributed.nn.functional import all_reduce

    if layer.momentum is None:
        raise TrainError("expected batch norm with a momentum, got a cumulative average, which cannot be synchronised")
    axes = [axis for axis in range(x.dim()) if axis != 1]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    ones = x.new_full((1,), x.numel() / x.shape[1])
    total = all_reduce(torch.cat([ones, x.sum(axes)]))
    count, mean = total[0], total[1:] / total[0]
    # Two rounds rather than E[x²] − E[x]², which cancels.
    variance = all_reduce((x - mean.view(shape)).square().sum(axes)) / count
    with torch.no_grad():
        layer.num_batches_tracked.add_(1)
        layer.running_mean.lerp_(mean, layer.momentum)
        layer.running_var.lerp_(variance * count / (count - 1), layer.momentum)
    normal: Tensor = (x - mean.view(shape)) * torch.rsqrt(variance + layer.eps).view(shape)
    return normal * layer.weight.view(shape) + layer.bias.view(shape) if layer.affine else normal


def _after_norm(layer: Any, x: Tensor) -> Tensor:
    """timm's batch norm may hold the activation that follows."""
    for name in ("drop", "act"):
        if isinstance(getattr(layer, name, None), nn.Module):
            x = getattr(layer, name)(x)
    return x

"""More than one process: what `torchrun` starts, seen from the inside. With one process everything here is a no-op.

Each process holds a share of every batch. Sums over the shares (gradients, leaf counts, batch-norm statistics) make the
processes compute what one alone would have computed; so does chance that every process draws for the whole batch
(`chance`).
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
    local_rank = _number("LOCAL_RANK", 0)
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    count = _number("WORLD_SIZE", 1)
    if count == 1 or dist.is_initialized():
        yield device
        return
    _check_place(count)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        yield device
    except RuntimeError as error:
        if not _is_of_connection(error):
            raise
        raise TrainError(
            f"process {_number('RANK', 0) + 1} of {count} cannot reach the others: one of them has probably ended, and "
            "its last words say why; then start all of them again, with --resume to continue this training"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _is_of_connection(error: RuntimeError) -> bool:
    """Whether processes could not exchange something; gloo says so in a plain error that names its own file."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _check_place(count: int) -> None:
    """Raises an error unless the environment says which of the processes this is, and where they meet."""
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise TrainError(
            f"the environment names several processes (WORLD_SIZE) but not {missing[0]}; start them with torchrun, or "
            "unset WORLD_SIZE"
        )
    _number("MASTER_PORT", 0)
    if (rank := _number("RANK", 0)) >= count:
        raise TrainError(
            f"expected a RANK below WORLD_SIZE in the environment, got {rank} and {count}; start the processes with "
            "torchrun, or unset both"
        )


def _number(name: str, otherwise: int) -> int:
    value = os.environ.get(name, str(otherwise))
    if not value.isdecimal():
        raise TrainError(f"expected a whole number in the environment variable {name}, got {value!r}; unset it")
    return int(value)


def shard() -> Shard:
    """Which process this is, of how many."""
    return Shard(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Shard()


def is_first() -> bool:
    """Whether this process is the one that writes files and talks."""
    return shard().rank == 0


def sum_over(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if dist.is_initialized():
        there = tensor.to(_device())  # which is not where every tensor is
        dist.all_reduce(there)
        if there is not tensor:
            tensor.copy_(there)
    return tensor


def gather(tensor: Tensor) -> list[Tensor]:
    """The tensor of every process, in order of rank; first dimensions may differ."""
    if not dist.is_initialized():
        return [tensor]
    counts = lengths(len(tensor))
    padded = torch.zeros(max(counts), *tensor.shape[1:], dtype=tensor.dtype, device=_device())
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return [part[:count].to(tensor.device) for part, count in zip(parts, counts, strict=True)]


def lengths(own: int) -> list[int]:
    """A number of every process, in order of rank."""
    if not dist.is_initialized():
        return [own]
    found = [torch.zeros(1, dtype=torch.long, device=_device()) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([own], device=_device()))
    return [int(one) for one in found]


def gather_in_order(places: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
    """The rows of every process, in the order of their places: as one process alone would have found them."""
    order = torch.cat(gather(places)).argsort()
    return tuple(torch.cat(gather(column))[order] for column in columns)


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


class _Total(torch.autograd.Function):
    """A sum over all processes that gradients flow back through: each process's part gets the sum of all gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        return sum_over(own.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return sum_over(gradients[0].contiguous().clone())


def _total(own: Tensor) -> Tensor:
    total: Tensor = _Total.apply(own)  # type: ignore[no-untyped-call]
    return total


def _synchronise_on_cpu(layer: Any) -> None:
    """torch's own SyncBatchNorm knows GPUs only."""
    own_forward = layer.forward

    def forward(x: Tensor) -> Tensor:
        if not (layer.training and dist.is_initialized()):
            return own_forward(x)  # type: ignore[no-any-return]
        return _after_norm(layer, _synchronised_norm(layer, x))

    layer.forward = forward


def _synchronised_norm(layer: Any, x: Tensor) -> Tensor:
    if layer.momentum is None:
        raise TrainError("expected batch norm with a momentum, got a cumulative average, which cannot be synchronised")
    axes = [axis for axis in range(x.dim()) if axis != 1]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    ones = x.new_full((1,), x.numel() / x.shape[1])
    total = _total(torch.cat([ones, x.sum(axes)]))
    count, mean = total[0], total[1:] / total[0].clamp_min(1)
    # Two rounds rather than E[x²] − E[x]², which cancels.
    variance = _total((x - mean.view(shape)).square().sum(axes)) / count.clamp_min(1)
    with torch.no_grad():
        layer.num_batches_tracked.add_(1)
        if count:  # else no process could read any photo of the batch
            layer.running_mean.lerp_(mean, layer.momentum)
            layer.running_var.lerp_(variance * count / (count - 1).clamp_min(1), layer.momentum)
    normal: Tensor = (x - mean.view(shape)) * torch.rsqrt(variance + layer.eps).view(shape)
    return normal * layer.weight.view(shape) + layer.bias.view(shape) if layer.affine else normal


def _after_norm(layer: Any, x: Tensor) -> Tensor:
    """timm's batch norm may hold the activation that follows."""
    for name in ("drop", "act"):
        if isinstance(getattr(layer, name, None), nn.Module):
            x = getattr(layer, name)(x)
    return x

"""Distributed data parallel training under `torchrun`; with one process everything here is a no-op.

Gradients are averaged over processes as DDP does, and leaf counts are summed. What is not gradient descent (feature
extraction, projection, evaluation, files) happens in the main process alone.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from prototree.data.loader import Shard
from prototree.errors import TrainError

_alone = False  # within `main_process_only`
_TIMEOUT = timedelta(hours=12)  # not torch's ten minutes: others wait while the main process extracts features


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the process group that `torchrun` describes in the environment, if any; yield this process's device."""
    local_rank = _number("LOCAL_RANK", 0)
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    count = _number("WORLD_SIZE", 1)
    if count == 1 or dist.is_initialized():
        yield device
        return
    _check_environment(count)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
        yield device
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):  # gloo's plain error names its file
            raise
        raise TrainError(
            f"process {_number('RANK', 0) + 1} of {count} cannot reach the others: one of them has probably ended, and "
            "its last words say why; then start all of them again, with --resume to continue this training"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _check_environment(count: int) -> None:
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise TrainError(f"expected {missing[0]} beside WORLD_SIZE; start processes with torchrun, or unset WORLD_SIZE")
    _number("MASTER_PORT", 0)
    if (rank := _number("RANK", 0)) >= count:
        raise TrainError(f"expected a RANK below WORLD_SIZE, got {rank} and {count}; use torchrun, or unset both")


def _number(name: str, otherwise: int) -> int:
    value = os.environ.get(name, str(otherwise))
    if not value.isdecimal():
        raise TrainError(f"expected a whole number in the environment variable {name}, got {value!r}; unset it")
    return int(value)


@contextmanager
def main_process_only() -> Iterator[bool]:
    """Run a block in the main process alone, while others wait; yield whether this is the main process."""
    global _alone
    is_main_process, _alone = is_main(), True
    try:
        yield is_main_process
    finally:
        _alone = False
        barrier()


def _is_active() -> bool:
    return dist.is_initialized() and not _alone


def shard() -> Shard:
    """Return the rank of this process and the number of processes."""
    return Shard(dist.get_rank(), dist.get_world_size()) if _is_active() else Shard()


def is_main() -> bool:
    """Whether this is the process that writes files and prints."""
    return shard().rank == 0


def barrier() -> None:
    """Wait until every process has come here."""
    if _is_active():
        dist.barrier()


@contextmanager
def main_first() -> Iterator[None]:
    """Run a block in the main process first, and in the others when it is done."""
    if not is_main():
        barrier()
    yield
    if is_main():
        barrier()


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place."""
    if _is_active():
        there = tensor.to(_device())
        dist.all_reduce(there)
        if there is not tensor:
            tensor.copy_(there)
    return tensor


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over processes, in one exchange; a process without images of a batch counts as zero."""
    if not _is_active():
        return
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in learning:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([parameter.grad.flatten() for parameter in learning if parameter.grad is not None])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for parameter, mean in zip(learning, flat.split([parameter.numel() for parameter in learning]), strict=True):
        parameter.grad = mean.view_as(parameter)


def convert_sync_bn(module: nn.Module) -> nn.Module:
    """Synchronise batch norm on GPUs, where torch can; on CPUs each process uses its own share's statistics."""
    if not _is_active() or _device().type != "cuda":
        return module
    from timm.layers import convert_sync_batchnorm

    return convert_sync_batchnorm(module)  # type: ignore[no-any-return]


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

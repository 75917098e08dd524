"""Run by `test_distributed` alone and with others: the leaf update of a few batches, and how much was exchanged."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist

from prototree.core.model import TreeOutput
from prototree.training import distributed
from prototree.training.leaf_training import Interleaved

N_LEAVES, N_CLASSES, N_BATCHES = 48, 40, 4


def main(_: Path, out: Path) -> None:
    torch.set_num_threads(1)
    sent = counted("all_reduce", "all_gather")
    with distributed.processes():
        chance = torch.Generator().manual_seed(0)
        logits = torch.rand(N_LEAVES, N_CLASSES, generator=chance, dtype=torch.float64)
        tree: Any = SimpleNamespace(leaf_logits=torch.nn.Parameter(logits, requires_grad=False))
        trainer = Interleaved()
        trainer.prepare(tree)
        traffic = []
        for n_images in (6, 1, 200):  # few classes; nothing for one of two processes; all classes
            labels = torch.randint(N_CLASSES, (n_images,), generator=chance)
            paths = torch.rand(n_images, N_LEAVES, generator=chance, dtype=torch.float64).log_softmax(dim=1)
            own = distributed.shard().stretch(n_images)
            sent.clear()
            routed = TreeOutput(paths[own], paths[own], paths[own], paths[own]) if len(labels[own]) else None
            trainer.after_batch(tree, routed, labels[own], N_BATCHES)
            traffic.append(sum(sent))
        if distributed.is_first():
            safetensors.torch.save_file({"leaf_logits": tree.leaf_logits.data.contiguous()}, out / "tree.safetensors")
            (out / "found.json").write_text(json.dumps({"traffic": traffic}))


def counted(*names: str) -> list[int]:
    """The numbers that this process gives to the others from now on."""
    sent: list[int] = []

    def spied(name: str) -> Any:
        own = getattr(dist, name)

        def spy(*tensors: Any) -> Any:
            sent.append(tensors[-1].numel())
            return own(*tensors)

        return spy

    for name in names:
        setattr(dist, name, spied(name))
    return sent


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Run by `test_distributed`: a scenario as one process, as two, and so on, all copies of one that imports everything.

To the scenario it is as under torchrun: the same environment, and a store that belongs to the launcher.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from prototree.data.loader import Batch, Loader
from prototree.errors import TrainError
from prototree.pipeline.fit import fit
from prototree.training import distributed
from tiny_training import TINY, TINY_DISTILL

# Without batch norm: on CPUs its statistics are those of a process's own share. 7 of 24 images: a last batch of 3.
PAPER = {"backbone": "test_convnext", "feature_level": -1, "batch_size": 7, "pretrain_epochs": 1, "epochs": 2}


LEAVES = {"interleaved": {}, "two_pass": {"batch_size": 23}, "gradient": {"pretrain_epochs": 0}}


def train_paper(images: Path, out: Path) -> dict[str, Any]:
    """In float64, so that what differs is wrong and not rounding. A batch of 1 of 24 images is one process's alone."""
    torch.set_default_dtype(torch.float64)
    read = Loader.epoch

    def in_double(self: Loader, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        return (batch._replace(images=batch.images.double()) for batch in read(self, epoch, start=start))

    Loader.epoch = in_double  # type: ignore[method-assign]
    leaf_update = os.environ["LEAVES"]
    settings = TINY | PAPER | LEAVES[leaf_update] | {"leaf_update": leaf_update}
    fit(images, out / "run", settings=settings, stages=["train"])
    return {}


def train_distill(images: Path, out: Path) -> dict[str, Any]:
    """All stages of the default recipe, which is the main process's own work."""
    short = {"pretrain_epochs": 1, "head_epochs": 2, "epochs": 2}
    run = fit(images, out / "run", settings=TINY_DISTILL | short)
    return {"metrics": {key: value for key, value in run.metrics.items() if key not in ("seconds", "sha256", "source")}}


def lose_partner(_: Path, out: Path) -> dict[str, Any]:
    """One of two processes ends in the middle, without a word."""
    try:
        with distributed.process_group():
            if not distributed.is_main():
                os._exit(0)
            distributed.all_reduce_sum(torch.ones(1))
    except TrainError as error:
        return {"error": str(error)}
    return {}


def main(scenario: str, images: Path, out: Path, counts: list[int]) -> None:
    for count in counts:
        (out / str(count)).mkdir()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        children = [_start(scenario, images, out / str(count), rank, count, store.port) for rank in range(count)]
        while children:
            ended, status = os.wait()
            children.remove(ended)
            if status:
                for child in children:  # which would wait for it for days
                    os.kill(child, signal.SIGKILL)
                sys.exit(f"one of {count} processes ended with {os.waitstatus_to_exitcode(status)}")


def _start(scenario: str, images: Path, out: Path, rank: int, count: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    code = 1
    try:
        result = globals()[scenario](images, out)
        assert not dist.is_initialized()
        (out / f"{rank}.json").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), [int(count) for count in sys.argv[4].split(",")])

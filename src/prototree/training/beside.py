"""Work in a process of its own beside what this one does: two trainings on two cores, each with one thread.

A step of training on small maps is many small pieces of work; two threads that share each of them mostly wait for each
other, and two processes with one thread each are nearly twice as fast. What comes out is a file that the work writes.
If no such process can be had, whoever needs the file does the work when it is needed, with one thread too: the same
bits come out. More threads would need another way: those of OpenMP do not survive the fork of their process.
"""

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator

import torch

from prototree.training import distributed
from prototree.training.signals import Interrupted

_PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent dies


@contextlib.contextmanager
def beside(work: Callable[[], object] | None, device: torch.device) -> Iterator[Callable[[], None]]:
    """One thread for what is done within, and one for `work`; what is yielded waits until that has ended.

    None: nothing is left to be done beside. The number of threads is what it would be otherwise.
    """
    if not is_possible(device):
        yield lambda: None
        return
    n_threads = torch.get_num_threads()
    process = multiprocessing.get_context("fork").Process(target=_quietly, args=(work, os.getpid()))
    torch.set_num_threads(1)
    try:
        if work is not None:
            process.start()
        yield process.join if work is not None else lambda: None
    finally:
        torch.set_num_threads(n_threads)
        if work is not None and process.is_alive():
            process.terminate()  # a training saves its state and ends
            process.join()


def is_possible(device: torch.device) -> bool:
    """The same for the same machine and settings, so that the bits are."""
    alone = distributed.shard().world_size == 1 and device.type == "cpu"
    return alone and torch.get_num_threads() == 2 and sys.platform == "linux"


def _quietly(work: Callable[[], object], parent: int) -> None:
    """The work, which dies with its parent and says nothing: what goes wrong will be met again by the parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    with contextlib.suppress(Exception, Interrupted, KeyboardInterrupt):
        work()

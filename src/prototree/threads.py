"""What a computation asks of the system: how its threads wait, and which memory it keeps. No torch here.

**Waiting**, decided before torch is imported. torch shares out its work by OpenMP. While one thread waits for another
it spins, by default for milliseconds: on a machine that has something else to do, it takes the very core that the other
would need. Threads that sleep at once cost something on a quiet machine and are about twice as fast on a busy one
(`docs/reliability.md` has the figures).

**Memory.** glibc hands large pieces of memory back as soon as they are free, and asks for them again, page by page, for
the next step: up to a fifth of a training step. So some of what was freed is kept.
"""

import ctypes
import os
import sys

WAITING = {"OMP_WAIT_POLICY": "passive"}  # read once, when torch loads its OpenMP; every kind of OpenMP knows it
CHOSEN_BY_USERS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

KEPT = 256 * 2**20  # bytes of freed memory that stay with the process, at most
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEEPING_CHOSEN_BY_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


def choose_waiting() -> bool:
    """Lets waiting threads sleep, unless the user has chosen or torch is here already; says whether it did."""
    if "torch" in sys.modules or any(name in os.environ for name in CHOSEN_BY_USERS):
        return False
    os.environ.update(WAITING)
    return True


def keep_memory() -> bool:
    """Keeps freed memory for what comes next, unless the user has chosen or the system has no glibc; says whether."""
    if sys.platform != "linux" or any(name in os.environ for name in KEEPING_CHOSEN_BY_USERS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none that does anything
    return mallopt is not None and all(mallopt(which, KEPT) for which in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD))

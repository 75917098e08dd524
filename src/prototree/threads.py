"""How the threads of a computation wait for each other, decided before torch is imported. No torch here.

torch shares out its work by OpenMP. While one thread waits for another it spins, by default for milliseconds: on a
machine that has something else to do, it takes the very core that the other would need. Threads that sleep at once cost
something on a quiet machine and are about twice as fast on a busy one (`docs/reliability.md` has the figures).
"""

import os
import sys

WAITING = {"OMP_WAIT_POLICY": "passive"}  # read once, when torch loads its OpenMP; every kind of OpenMP knows it
CHOSEN_BY_USERS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def choose_waiting() -> bool:
    """Lets waiting threads sleep, unless the user has chosen or torch is here already; says whether it did."""
    if "torch" in sys.modules or any(name in os.environ for name in CHOSEN_BY_USERS):
        return False
    os.environ.update(WAITING)
    return True

"""How fast the frozen network runs for each way in which threads may wait for each other, on this machine as it is.

    python benchmarks/bench_threads.py --rounds 3 --beside 2

`--beside N` keeps N cores busy meanwhile. The ways take turns, so that a change on the machine meets all of them.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack

from prototree.threads import CHOSEN_BY_USERS, WAITING

WAYS = {
    "threads spin (GNU's default)": {"GOMP_SPINCOUNT": "300000"},
    "prototree's choice": WAITING,
    "GOMP_SPINCOUNT=0": {"GOMP_SPINCOUNT": "0"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
BATCH, SIZE = 16, 288


def measure(seconds: float) -> None:
    """In a process of its own: images a second."""
    import torch

    from prototree.backbones.backbone import Backbone
    from prototree.backbones.bn_fusion import folded

    net = folded(Backbone("auto", None, image_size=SIZE, split=False))
    images = torch.rand(BATCH, 3, SIZE, SIZE).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        net.trunk(images)
        start, count = time.monotonic(), 0
        while time.monotonic() - start < seconds:
            net.trunk(images)
            count += BATCH
    print(count / (time.monotonic() - start))


def ask(way: dict[str, str], seconds: float) -> float:
    environment = {key: value for key, value in os.environ.items() if key not in (*CHOSEN_BY_USERS, "OMP_NUM_THREADS")}
    command = [sys.executable, __file__, "--measure", str(seconds)]
    done = subprocess.run(command, env=environment | way, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--beside", type=int, default=0)
    parser.add_argument("--measure", type=float)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure)
        return
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    with ExitStack() as stack:
        for _ in range(given.beside):
            other = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(other.kill)
        for _ in range(given.rounds):
            for name, way in WAYS.items():
                found[name].append(ask(way, given.seconds))
                print(f"  {name}: {found[name][-1]:.1f}", file=sys.stderr, flush=True)
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, {given.beside} busy jobs beside, load {load:.1f} at the end; images a second")
    for name, rates in found.items():
        print(f"{name:34} {statistics.median(rates):5.1f}   ({', '.join(f'{rate:.1f}' for rate in rates)})")


if __name__ == "__main__":
    main()

"""The floor: how many views a second a frozen network can look at on this machine, whoever runs it.

Rounds take turns and medians are compared, as ratios to what the package itself does with `engine = torch`. The last
rows have decoding and resizing in them: the package's own pass over photos beside the network alone.

    python benchmarks/bench_inference.py [SECONDS A ROUND]

torch.compile is asked for with COMPILE=1, since it needs a C++ compiler and minutes. Engines that are not installed
are left out. Nothing here calls OpenVINO's converter, which would send statistics.
"""

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

from prototree.data.loading import ViewDataset
from prototree.data.samples import Sample
from prototree.data.views import source_views
from prototree.network import engine
from prototree.network.backbone import Backbone
from prototree.network.engine import ONNXRUNTIME, TORCH, frozen
from prototree.network.folding import folded
from prototree.training.filling import from_photos

NETWORKS = (("auto", 288), ("resnet50", 224))
BATCHES = (1, 2, 4, 8, 32)
ROUNDS, N_PHOTOS = 5, 64
Run = Callable[[Tensor], object]


def rates(runs: dict[str, tuple[Run, int]], size: int, seconds: float) -> dict[str, float]:
    """Views a second of each, the median of rounds taken in turns."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS + 1):
        for name, (run, batch) in runs.items():
            images, start, n_views = torch.rand(batch, 3, size, size), time.perf_counter(), 0
            while not n_views or time.perf_counter() - start < seconds:
                run(images)
                n_views += batch
            if turn:  # the first round warms up
                found[name].append(n_views / (time.perf_counter() - start))
    return {name: statistics.median(taken) for name, taken in found.items()}


def contenders(backbone: Backbone) -> dict[str, tuple[Run, int]]:
    """Everybody who can run the network here, with the size of a batch."""
    small = folded(backbone)
    runs: dict[str, tuple[Run, int]] = {
        "the package, engine torch": (frozen(backbone), 32),
        "torch as it comes, batch 32": (backbone.eval().trunk, 32),
    }
    for batch in BATCHES:
        runs[f"torch, folded, channels last, batch {batch}"] = (
            lambda images: small.trunk(images.contiguous(memory_format=torch.channels_last)),
            batch,
        )
    if importlib.util.find_spec(ONNXRUNTIME) is not None:
        converted = frozen(backbone, ONNXRUNTIME)
        if converted.engine == ONNXRUNTIME:
            runs["the package, engine onnxruntime"] = (converted, 32)
            runs |= {f"onnxruntime, batch {batch}": (converted.run, batch) for batch in BATCHES}
            runs |= _openvino(backbone)
    if os.environ.get("COMPILE"):
        torch._inductor.config.freezing = True
        runs["torch.compile with freezing, batch 4"] = (torch.compile(small.trunk), 4)
    return runs


def _openvino(backbone: Backbone) -> dict[str, tuple[Run, int]]:
    if importlib.util.find_spec("openvino") is None:
        return {}
    import openvino

    core = openvino.Core()
    model = core.compile_model(core.read_model(engine._file(backbone)), "CPU", {"PERFORMANCE_HINT": "LATENCY"})
    return {f"OpenVINO, batch {batch}": (lambda images: model(images.numpy()), batch) for batch in (1, 4)}


def photos(folder: Path) -> list[Sample]:
    """Pictures of the size and detail of CUB's."""
    chance, samples = np.random.default_rng(0), []
    for number in range(N_PHOTOS):
        rough = Image.fromarray(chance.integers(0, 255, (94, 125, 3), dtype=np.uint8))
        rough.resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)
        samples.append(Sample(folder / f"{number}.jpg", 0, size=(500, 375)))
    return samples


def with_decoding(backbone: Backbone, name: str) -> tuple[float, float]:
    """Views a second of the package's pass over photos, and of the network alone on as many views."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = ViewDataset(photos(Path(folder)), source_views, backbone.preprocessing)
        trunk = frozen(backbone, name)
        taken: tuple[list[float], list[float]] = ([], [])
        images = torch.rand(32, 3, backbone.preprocessing.size, backbone.preprocessing.size)

        def whole_pass() -> None:
            for _ in from_photos([dataset], trunk, variants=1, workers=2, device=torch.device("cpu")):
                pass

        def alone() -> None:
            for _ in range(len(dataset) // len(images)):
                trunk(images)

        for _ in range(3):
            for action, own in zip((whole_pass, alone), taken, strict=True):
                start = time.perf_counter()
                action()
                own.append(len(dataset) / (time.perf_counter() - start))
    return statistics.median(taken[0]), statistics.median(taken[1])


def two_processes(seconds: float) -> list[float]:
    """Views a second of one process with two threads, and of two processes with one thread each, together."""
    script = (
        "import sys, time, torch; from prototree.network.backbone import Backbone; "
        "from prototree.network.engine import frozen; "
        "run = frozen(Backbone('auto', None, image_size=288, split=False)); "
        "images = torch.rand(8, 3, 288, 288); run(images); start, n = time.perf_counter(), 0\n"
        f"while time.perf_counter() - start < {3 * seconds}: run(images); n += 8\n"
        "print(n / (time.perf_counter() - start))"
    )
    found = []
    for processes, threads in ((1, 2), (2, 1)):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-c", script]
        started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(processes)]
        found.append(sum(float(one.communicate()[0]) for one in started))
    return found


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    for name, size in NETWORKS:
        torch.manual_seed(0)
        backbone = Backbone(name, None, image_size=size, split=False).eval()
        with torch.inference_mode():
            found = rates(contenders(backbone), size, seconds)
        own = found["the package, engine torch"]
        table = Table("who runs it", "views a second", "ratio", title=f"{backbone.name}, {size} px")
        for who, rate in found.items():
            table.add_row(who, f"{rate:.1f}", f"{rate / own:.2f}×")
        if name == "auto":
            for which in (TORCH, *([ONNXRUNTIME] if "the package, engine onnxruntime" in found else [])):
                whole, alone = with_decoding(backbone, which)
                table.add_row(f"{which}: photos decoded, 2 views each", f"{whole:.1f}", f"{whole / alone:.2f}× alone")
            one, two = two_processes(seconds)
            table.add_row("1 process, 2 threads", f"{one:.1f}", "")
            table.add_row("2 processes, 1 thread each", f"{two:.1f}", f"{two / one:.2f}× 1 process")
        Console().print(table)


if __name__ == "__main__":
    main()

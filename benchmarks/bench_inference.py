"""The floor: how many views a second a frozen network can look at on this machine, whoever runs it.

Rounds take turns and medians are compared, as ratios to what the package itself does with `engine = torch`: by the
clock, and by processor time, which means more where other programs run. The last rows have decoding and resizing in
them: the package's own pass over photos beside the network alone.

    python benchmarks/bench_inference.py [SECONDS A ROUND]

torch.compile needs a C++ compiler and a minute; without a compiler it is left out, and so are engines that are not
installed. Nothing here calls OpenVINO's converter, which would send statistics. 8-bit numbers change the maps: their
error is given beside their speed, as a share of the spread of the maps.
"""

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

from prototree.backbones import inference
from prototree.backbones.backbone import Backbone
from prototree.backbones.inference import ONNXRUNTIME, TORCH, folded, frozen, thread_map
from prototree.data.crops import random_views, source_views
from prototree.data.dataset import Sample
from prototree.data.loader import ViewDataset
from prototree.data.transforms import augmentation
from prototree.features.extract import extract

NETWORKS = (("auto", 288), ("resnet50", 224))
BATCHES = (1, 4, 32)
ROUNDS, N_PHOTOS, N_CALIBRATION = 3, 96, 16
Run = Callable[[Tensor], object]


def rates(runs: dict[str, tuple[Run, int]], size: int, seconds: float) -> dict[str, tuple[float, float]]:
    """Views a second and a processor second of each, medians of rounds taken in turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for turn in range(ROUNDS + 1):
        for name, (run, batch) in runs.items():
            images, n_views = torch.rand(batch, 3, size, size), 0
            start, busy = time.perf_counter(), time.process_time()
            while not n_views or (turn and time.perf_counter() - start < seconds):
                run(images)
                n_views += batch
            if turn:  # the first round warms up
                taken = time.perf_counter() - start, time.process_time() - busy
                found[name].append((n_views / taken[0], n_views / max(taken[1], 1e-9)))
    by_name = ((name, list(zip(*taken, strict=True))) for name, taken in found.items())
    return {name: (statistics.median(clock), statistics.median(busy)) for name, (clock, busy) in by_name}


def contenders(backbone: Backbone, folder: Path) -> dict[str, tuple[Run, int]]:
    """Everybody who can run the network here, with the size of a batch."""
    small = folded(backbone)
    runs: dict[str, tuple[Run, int]] = {
        "the package, engine torch": (frozen(backbone), 32),
        "torch as it comes, batch 32": (backbone.eval().split_features, 32),
    }
    for batch in BATCHES:
        runs[f"torch, folded, channels last, batch {batch}"] = (
            lambda images: small.split_features(images.contiguous(memory_format=torch.channels_last)),
            batch,
        )
    if shutil.which("g++"):
        torch._inductor.config.freezing = True
        runs["torch.compile with freezing, batch 4"] = (torch.compile(small.split_features), 4)
    if importlib.util.find_spec(ONNXRUNTIME) is not None:
        converted = frozen(backbone, ONNXRUNTIME)
        if converted.engine == ONNXRUNTIME:
            runs["the package, engine onnxruntime"] = (converted, 32)
            runs |= {f"onnxruntime, batch {batch}": (converted.run, batch) for batch in BATCHES}
            runs |= _int8(backbone, folder)
            runs |= _openvino(backbone)
    return runs


def _int8(backbone: Backbone, folder: Path) -> dict[str, tuple[Run, int]]:
    """onnxruntime with 8-bit weights and activations, calibrated on smooth noise; says how far its maps are off."""
    import onnxruntime
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    images = [smooth_noise(backbone.preprocessing.size, seed) for seed in range(N_CALIBRATION + 4)]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = iter(images[:N_CALIBRATION])

        def get_next(self) -> dict[str, np.ndarray] | None:
            image = next(self._left, None)
            return None if image is None else {"images": image}

    path = folder / "int8.onnx"
    kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": True}
    quantize_static(inference._onnx_file(backbone), path, Reader(), quant_format=QuantFormat.QDQ, **kinds)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    exact = frozen(backbone)
    pairs = [(exact(torch.from_numpy(one)).numpy(), session.run(None, {"images": one})[0]) for one in images[-4:]]
    error = statistics.mean(float(np.sqrt(np.square(a - b).mean()) / a.std()) for a, b in pairs)
    name = f"onnxruntime, 8-bit (maps off by {error:.0%} of their spread), batch 4"
    return {name: (lambda batch: session.run(None, {"images": batch.numpy()}), 4)}


def smooth_noise(size: int, seed: int) -> np.ndarray:
    """A picture as the network sees it: broad patches of colour."""
    rough = torch.rand(1, 3, size // 16, size // 16, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(rough, size=(size, size), mode="bicubic")
    return ((smooth - 0.5) * 4).numpy()


def _openvino(backbone: Backbone) -> dict[str, tuple[Run, int]]:
    if importlib.util.find_spec("openvino") is None:
        return {}
    import openvino

    core = openvino.Core()
    model = core.compile_model(core.read_model(inference._onnx_file(backbone)), "CPU", {"PERFORMANCE_HINT": "LATENCY"})
    return {f"OpenVINO, batch {batch}": (lambda images: model(images.numpy()), batch) for batch in (1, 4)}


def photos(folder: Path) -> list[Sample]:
    """Pictures of the size and detail of CUB's."""
    chance, samples = np.random.default_rng(0), []
    for number in range(N_PHOTOS):
        rough = Image.fromarray(chance.integers(0, 255, (94, 125, 3), dtype=np.uint8))
        rough.resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)
        samples.append(Sample(folder / f"{number}.jpg", 0, size=(500, 375)))
    return samples


def with_decoding(backbone: Backbone, name: str) -> tuple[float, float, int]:
    """Views a second of the package's pass over photos, of the network alone on as many, and views of each photo.

    The views are those of the default recipe: two plain ones, a closer look at both, and four with changed colours.
    """
    with tempfile.TemporaryDirectory() as folder:
        samples, preprocessing = photos(Path(folder)), backbone.preprocessing
        plain = ViewDataset(samples, source_views, preprocessing)
        colours = augmentation("colour", preprocessing)
        varied = ViewDataset(samples, partial(random_views, count=4, seed=0), preprocessing, transform=colours)
        datasets = [plain, plain.center_crop(0.7), varied]
        n_views, trunk = sum(map(len, datasets)), frozen(backbone, name, threads=1)  # as when maps are computed
        taken: tuple[list[float], list[float]] = ([], [])
        images = torch.rand(32, 3, preprocessing.size, preprocessing.size)

        def whole_pass() -> None:
            for _ in extract(datasets, trunk, variants=1, workers=2, device=torch.device("cpu")):
                pass

        def alone() -> None:
            for _ in thread_map(lambda _: trunk(images), range(n_views // len(images))):
                pass

        for _ in range(ROUNDS):
            for action, own in zip((whole_pass, alone), taken, strict=True):
                start = time.perf_counter()
                action()
                own.append(n_views / (time.perf_counter() - start))
    return statistics.median(taken[0]), statistics.median(taken[1]), n_views // len(samples)


def two_processes(seconds: float) -> list[float]:
    """Views a second of one process with two threads, and of two processes with one thread each, together."""
    script = (
        "import sys, time, torch; from prototree.backbones.backbone import Backbone; "
        "from prototree.backbones.inference import frozen; "
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
        weights = "auto" if name == "auto" else None  # an 8-bit network with random weights says nothing of its error
        backbone = Backbone(name, weights, image_size=size, split=False).eval()
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            found = rates(contenders(backbone, Path(folder)), size, seconds)
        own = found["the package, engine torch"]
        titles = ("who runs it", "views a second", "ratio", "views a processor second", "ratio")
        table = Table(*titles, title=f"{backbone.name}, {size} px, {torch.get_num_threads()} threads")
        for who, (clock, busy) in found.items():
            table.add_row(who, f"{clock:.1f}", f"{clock / own[0]:.2f}×", f"{busy:.1f}", f"{busy / own[1]:.2f}×")
        if name == "auto":
            for which in (TORCH, *([ONNXRUNTIME] if "the package, engine onnxruntime" in found else [])):
                whole, alone, each = with_decoding(backbone, which)
                title = f"{which}: photos decoded, {each} views each"
                table.add_row(title, f"{whole:.1f}", f"{whole / alone:.2f}× alone", "", "")
            one, two = two_processes(seconds)
            table.add_row("1 process, 2 threads", f"{one:.1f}", "", "", "")
            table.add_row("2 processes, 1 thread each", f"{two:.1f}", f"{two / one:.2f}× 1 process", "", "")
        Console(width=140).print(table)


if __name__ == "__main__":
    main()

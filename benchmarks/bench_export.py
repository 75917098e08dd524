"""Speed of an exported tree in onnxruntime beside torch's, from photos to answers.

    python benchmarks/bench_export.py [--run RUN] [--rounds 5]

Without a run: a tree of 64 choices on the packaged EfficientNet-Lite0 at 224 px. Both get the same decoded photos of
500×375 pixels on one thread and do all that follows: resizing, the network, the tree. torch runs the folded network.
Times are the process's own, so that other work on the machine does not count; the least of all rounds.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.inference import folded
from prototree.core.model import ProtoTree
from prototree.core.nodes import NodeFunction
from prototree.core.topology import Topology
from prototree.data.transforms import eval_transform
from prototree.integrations.onnx import OUTPUTS, export_onnx
from prototree.run import Run

BATCHES = (1, 16)


def some_tree() -> ProtoTree:
    torch.manual_seed(0)
    features = FeatureExtractor(Backbone(), 256, head_hidden_dim=512)
    return ProtoTree(Topology.full(6), features, 50, node_function=NodeFunction("pairwise", 6.0)).eval()


def seconds(rounds: int, *works: Callable[[], object]) -> list[float]:
    """The least of each, measured in turn."""
    best = [float("inf")] * len(works)
    for _ in range(rounds):
        for place, work in enumerate(works):
            start = time.process_time()
            work()
            best[place] = min(best[place], time.process_time() - start)
    return best


def one_thread(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tree = Run.open(arguments.run).tree() if arguments.run else some_tree()
    with tempfile.TemporaryDirectory() as folder:
        session = one_thread(export_onnx(tree, Path(folder) / "tree.onnx"))
    quick = copy.deepcopy(tree)
    quick.features.backbone = folded(tree.features.backbone.merge_last_block())
    table = Table("batch", "torch, photos/s", "onnxruntime, photos/s", "ratio", title="photos of 500×375, one thread")
    for size in BATCHES:
        pixels = np.random.default_rng(0).integers(0, 256, (size, 375, 500, 3), dtype=np.uint8)

        def in_torch(pixels: np.ndarray = pixels) -> object:
            images = [eval_transform(Image.fromarray(one), quick.preprocessing) for one in pixels]
            return quick.predict(torch.stack(images).contiguous(memory_format=torch.channels_last))

        def in_onnx(pixels: np.ndarray = pixels) -> object:
            return session.run(list(OUTPUTS), {"images": pixels})

        one, other = seconds(arguments.rounds, in_torch, in_onnx)
        table.add_row(str(size), f"{size / one:.1f}", f"{size / other:.1f}", f"{one / other:.2f}×")
    Console().print(table)


if __name__ == "__main__":
    main()

"""Photos per second of `iter_predictions` against the floor: decoding, and batched passes of the folded backbone.

The floor is written out with Pillow: open (reduced where the file allows it), convert, resize, normalise, stack 32, run
the folded backbone once for each look of the tree. It knows no head, no tree, no rotation marks and no broken files.
Both use one thread for the network; `iter_predictions` reads on one thread beside it. Rounds take turns; medians are
compared: of processor time, which says what the package adds, and of time on the clock, which is what people wait for.

    python benchmarks/bench_predict.py [RUN FOLDER]

Without a run and photos: an untrained tree of EfficientNet-Lite0, and generated photos of the size of CUB's.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.inference import folded
from prototree.core.checkpoint import load
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.inference.io import list_images
from prototree.inference.predict import iter_predictions

N_PHOTOS, N_ROUNDS, BATCH = 96, 4, 32


def untrained_tree() -> ProtoTree:
    """Of the size of one that knows fifty classes; it looks twice, as trees of the default recipe do."""
    torch.manual_seed(0)
    features = FeatureExtractor(Backbone("auto", None, image_size=288), 256)
    return ProtoTree(Topology.full(6), features, 50).eval().set_crops((1.0, 0.7))


def generated(folder: Path) -> Path:
    """Photos without meaning."""
    random = np.random.default_rng(0)
    for index in range(N_PHOTOS):
        rough = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        rough.resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{index}.jpg", quality=90)
    return folder


@torch.inference_mode()
def floor(tree: ProtoTree, paths: list[Path]) -> None:
    """Decoding and the folded backbone alone."""
    backbone, given = folded(tree.features.backbone.merge_last_block()), tree.preprocessing
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (given.mean, given.std))
    how = Image.Resampling.BICUBIC if given.interpolation == "bicubic" else Image.Resampling.BILINEAR

    def read(path: Path) -> Tensor:
        with Image.open(path) as image:
            image.draft("RGB", (given.resize, given.resize))
            pixels = np.array(image.convert("RGB").resize((given.resize, given.resize), how))
        return (torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - mean) / std

    for start in range(0, len(paths), BATCH):
        batch = torch.stack([read(path) for path in paths[start : start + BATCH]])
        backbone(batch.contiguous(memory_format=torch.channels_last))


def ours(tree: ProtoTree, paths: list[Path]) -> None:
    """Answers, confidence, paths and the likeliest classes."""
    assert not any(one.error for one in iter_predictions(tree, paths, batch_size=BATCH, threads=1))


def seconds(work: Callable[[], None]) -> tuple[float, float]:
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - processor


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tree = load(sys.argv[1]) if len(sys.argv) > 2 else untrained_tree()
        paths = [one.path for one in list_images([sys.argv[2] if len(sys.argv) > 2 else generated(Path(folder))])]
        paths = paths[:N_PHOTOS]
        rounds = [
            (seconds(lambda: floor(tree, paths)), seconds(lambda: ours(tree, paths))) for _ in range(N_ROUNDS + 1)
        ]
    for place, what in enumerate(("time on the clock", "processor time")):
        theirs, own = (statistics.median(one[who][place] for one in rounds[1:]) for who in (0, 1))
        print(
            f"{what:18} floor {len(paths) / theirs:6.1f}/s  predict {len(paths) / own:6.1f}/s  "
            f"ratio {theirs / own:.2f} (aim: at least 0.95)"
        )


if __name__ == "__main__":
    main()

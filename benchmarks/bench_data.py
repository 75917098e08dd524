"""Photos per second through `ViewDataset` against the same steps written out with Pillow and torchvision.

Both read the same files on one thread, in turns, and the median of each is compared. The aim is 0.9 or better: what
the package adds (checks, rotation marks, repeatable chance) should cost next to nothing.

    python benchmarks/bench_data.py [folder in CUB's layout]
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

import prototree.backbones.weights  # noqa: F401 # isort: skip (before torchvision)
from torchvision.transforms import v2

from prototree.backbones.geometry import Preprocessing
from prototree.data import Sample, open_data
from prototree.data.crops import evaluation_views
from prototree.data.loader import ViewDataset
from prototree.data.transforms import augmentation

N_PHOTOS = 200
N_ROUNDS = 9
CUB_50 = Path(__file__).parents[2] / "shared" / "data" / "CUB_50"


def bare_pipeline(preprocessing: Preprocessing) -> Callable[[Path], Tensor]:
    """The paper's augmentation of CUB, as one would write it down."""
    jitter = (0.6, 1.4)
    steps = v2.Compose(
        [
            v2.Resize((preprocessing.resize, preprocessing.resize)),
            v2.RandomOrder(
                [
                    v2.RandomPerspective(distortion_scale=0.2, p=0.5),
                    v2.ColorJitter(jitter, jitter, jitter, (-0.02, 0.02)),
                    v2.RandomHorizontalFlip(),
                    v2.RandomAffine(degrees=10, translate=(0.05, 0.05), shear=(-2, 2)),
                ]
            ),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(preprocessing.mean, preprocessing.std),
        ]
    )

    def read(path: Path) -> Tensor:
        with Image.open(path) as image:
            tensor: Tensor = steps(image.convert("RGB"))
        return tensor

    return read


def photos(folder: Path) -> list[Sample]:
    """The first training photos of a data set, or generated ones of about CUB's size where there is none."""
    if len(sys.argv) > 1 or CUB_50.is_dir():
        data = open_data(sys.argv[1] if len(sys.argv) > 1 else CUB_50)
        return list(data.train[:N_PHOTOS])
    random = np.random.default_rng(0)
    samples = []
    for index in range(N_PHOTOS):
        rough = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        path = folder / f"{index}.jpg"
        rough.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)
        samples.append(Sample(path, 0, size=(500, 375)))
    return samples


def rate(read: Callable[[int], object], count: int) -> float:
    start = time.process_time()
    for index in range(count):
        read(index)
    return count / (time.process_time() - start)


def main() -> None:
    torch.set_num_threads(1)
    preprocessing = Preprocessing()
    with tempfile.TemporaryDirectory() as folder:
        samples = photos(Path(folder))
        dataset = ViewDataset(samples, evaluation_views, preprocessing, transform=augmentation("cub", preprocessing))
        bare = bare_pipeline(preprocessing)
        ours, theirs = [], []
        for _ in range(N_ROUNDS + 1):
            ours.append(rate(lambda index: dataset[index], len(samples)))
            theirs.append(rate(lambda index: bare(samples[index].path), len(samples)))
    ours_median, theirs_median = (statistics.median(rates[1:]) for rates in (ours, theirs))  # the first warms up
    print(f"prototree.data   {ours_median:6.1f} photos per second of one core")
    print(f"bare torchvision {theirs_median:6.1f} photos per second of one core")
    print(f"ratio            {ours_median / theirs_median:6.2f} (aim: at least 0.90)")


if __name__ == "__main__":
    main()

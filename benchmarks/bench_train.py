"""Cost of a training step beside the bare backbone's, and of a cached epoch beside an uncached one.

    python benchmarks/bench_train.py [CUB-like folder]

The step: ResNet50, 224 px, batch 16, h = 9, everything trained. The bare step is forward, a loss on pooled features,
backward and Adam. Both are taken in turns in one run. The cache: a few hundred photos with frozen EfficientNet-Lite0.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.data import open_data
from prototree.data.birds.dataset import write_birds
from prototree.data.loading import Entry, ViewDataset
from prototree.data.transforms import augmentation
from prototree.data.views import training_views
from prototree.features.batches import CachedBatches, PhotoBatches
from prototree.features.cache import Inputs, cache_borders
from prototree.training.loop import Loop, Options
from prototree.training.objectives import Schedule, TreeObjective

BATCH, CLASSES, STEPS = 16, 200, 9
N_PHOTOS = 200


class SameBatch:
    """One batch of random images, as often as asked."""

    entries: tuple[Entry, ...] = ()

    def __init__(self, n_batches: int) -> None:
        self.n_batches = n_batches
        self._inputs = Inputs(torch.rand(BATCH, 3, 224, 224), torch.arange(BATCH) % CLASSES, torch.arange(BATCH))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Inputs]:
        return (self._inputs for _ in range(self.n_batches))

    def encode(self, features: FeatureExtractor, values: Tensor) -> Tensor:
        return features(values)  # type: ignore[no-any-return]


def tree_step() -> Callable[[], object]:
    batches = SameBatch(1)
    tree = ProtoTree(Topology.full(9), FeatureExtractor(Backbone("resnet50", None), 256), CLASSES)
    objective = TreeObjective(tree, batches, Schedule(1, freeze_epochs=0))
    objective.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    loop = Loop(objective, batches, 10_000, Options(channels_last=True))
    inputs = next(batches.epoch(0))
    objective.start_epoch(0, is_continued=False)
    return lambda: loop._step(objective, inputs)


def bare_step() -> Callable[[], object]:
    backbone, linear = Backbone("resnet50", None), nn.Linear(2048, CLASSES)
    model = nn.ModuleList([backbone, linear])
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.Adam(model.parameters())
    inputs = next(SameBatch(1).epoch(0))
    images = inputs.values.contiguous(memory_format=torch.channels_last)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        cross_entropy(linear(backbone(images).mean(dim=(2, 3))), inputs.labels).backward()
        optimiser.step()

    return step


def in_turns(*actions: Callable[[], object]) -> list[float]:
    times: list[list[float]] = [[] for _ in actions]
    for repeat in range(STEPS + 1):
        for action, taken in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            if repeat:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def epoch_seconds(folder: Path) -> tuple[float, float, int]:
    """One epoch of the tail without and with the cache, on the same views."""
    data = open_data(folder)
    backbone = Backbone(image_size=224)
    views = partial(training_views, kind=data.kind)
    transform = augmentation("cub", backbone.preprocessing)
    photos = ViewDataset(data.train[:N_PHOTOS], views, backbone.preprocessing, transform=transform)
    seconds = []
    with tempfile.TemporaryDirectory() as temporary:
        cache = cache_borders(backbone, photos, Path(temporary), workers=2)
        for batches in (PhotoBatches(photos, 64, shuffle=True, workers=2), CachedBatches(cache, 64, shuffle=True)):
            tree = ProtoTree(Topology.full(7), FeatureExtractor(backbone, 256), data.class_names)
            objective = TreeObjective(tree, batches, Schedule(1))
            objective.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            start = time.perf_counter()
            Loop(objective, batches, 1, Options(channels_last=True)).run()
            seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1], len(photos)


def main(folder: Path | None) -> None:
    torch.manual_seed(0)
    table = Table("what", "measured", "at most")
    tree, bare = in_turns(tree_step(), bare_step())
    table.add_row(f"train step, h = 9 / bare ResNet50 step ({bare:.1f} s)", f"{tree / bare:.3f}×", "1.03×")
    with tempfile.TemporaryDirectory() as temporary:
        if folder is None:
            folder = write_birds(Path(temporary) / "birds", train_per_species=20, test_per_species=2, workers=1)
        uncached, cached, n_views = epoch_seconds(folder)
    title = f"cached / uncached frozen epoch, {n_views} views ({uncached:.0f} s)"
    table.add_row(title, f"1/{uncached / cached:.0f}", "1/20")
    Console().print(table)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)

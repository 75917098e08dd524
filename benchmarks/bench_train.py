"""Cost of a training step beside the bare backbone's, and of a cached epoch beside an uncached one.

    python benchmarks/bench_train.py [CUB-like folder]

The step: ResNet50, 224 px, batch 16, h = 9, everything trained. The bare step is forward, a loss on pooled features,
backward and Adam. Both are taken in turns in one run. The cache: a few hundred photos with frozen EfficientNet-Lite0.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.config import Config, PaperSettings
from prototree.core.leaves import class_log_probs, predict
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.data import ImageData, open_data
from prototree.training.loop import Context, Loop
from prototree.training.paper import param_groups, train, update_leaves
from prototree_birds import write_birds

BATCH, CLASSES, STEPS = 16, 200, 9
N_PHOTOS = 200


def tree_step(data: ImageData, folder: Path) -> Callable[[], object]:
    """One pass through the inner loop of `training.paper.train`, everything trained."""
    settings = PaperSettings(height=9, freeze_epochs=0)
    tree = ProtoTree(Topology.full(9), FeatureExtractor(Backbone("resnet50", None), 256), CLASSES)
    tree.leaf_logits.requires_grad_(False)
    tree.features.backbone.freeze(False)
    groups, epoch_start = param_groups(tree, settings, 0), tree.leaf_logits.detach().clone()
    loop = Loop(Context(folder, data, Config(recipe=settings)), "tree", tree.train(), groups, 10_000)
    images, labels = same_batch()

    def step() -> None:
        loop.set_lr(groups)
        out = tree.forward_features(tree.features(images))
        losses = -tree.log_likelihood(out, labels)
        y_hat = predict(out.log_path_probs.detach(), class_log_probs(tree.leaf_logits.detach()).exp())
        loop.step(losses, (y_hat.argmax(dim=1) == labels).float())
        update_leaves(tree, epoch_start, out, labels, 1)

    return step


def same_batch() -> tuple[Tensor, Tensor]:
    images = torch.rand(BATCH, 3, 224, 224).contiguous(memory_format=torch.channels_last)
    return images, torch.arange(BATCH) % CLASSES


def bare_step() -> Callable[[], object]:
    backbone, linear = Backbone("resnet50", None), nn.Linear(2048, CLASSES)
    model = nn.ModuleList([backbone, linear])
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.Adam(model.parameters())
    images, labels = same_batch()

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        cross_entropy(linear(backbone(images).mean(dim=(2, 3))), labels).backward()
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


def epoch_seconds(data: ImageData, folder: Path) -> tuple[float, float]:
    """One epoch of the tail without and with cached maps of the frozen part, on the same views."""
    settings = PaperSettings(height=7, epochs=1, freeze_epochs=1)
    config = Config(augment="cub", recipe=settings)
    seconds = []
    for name, cache_views in (("first", 1), ("uncached", 0), ("cached", 1)):  # the first run computes the cache
        (folder / name).mkdir(exist_ok=True)
        start = time.perf_counter()
        train(Context(folder / name, data, config), dataclasses.replace(settings, cache_views=cache_views))
        seconds.append(time.perf_counter() - start)
    return seconds[1], seconds[2]


def main(source: Path | None) -> None:
    torch.manual_seed(0)
    table = Table("what", "measured", "at most")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = source or write_birds(folder / "birds", train_per_species=20, test_per_species=2, workers=1)
        data = open_data(source)
        data = dataclasses.replace(data, train=data.train[:N_PHOTOS])
        tree, bare = in_turns(tree_step(data, folder / "step"), bare_step())
        uncached, cached = epoch_seconds(data, folder)
    table.add_row(f"train step, h = 9 / bare ResNet50 step ({bare:.1f} s)", f"{tree / bare:.3f}×", "1.03×")
    title = f"cached / uncached frozen epoch, {N_PHOTOS} photos ({uncached:.0f} s)"
    table.add_row(title, f"1/{uncached / cached:.0f}", "1/20")
    Console().print(table)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)

"""Cost of a step of the paper's recipe beside the bare network's, and of a cached epoch beside an uncached one.

    python benchmarks/bench_train.py [NETWORK] [PIXELS]

By default the network and image size of the preset paper-small. The bare step is forward, a loss on pooled features and
backward, in the memory format channels_last and with learning batch norm. All steps are taken in turns in one run and
measured in processor time, so their ratios hold on a busy machine too. The cache: a few hundred generated birds and a
frozen network.
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
from prototree.config import Config, PaperSettings, load_preset
from prototree.core.leaves import class_log_probs, predict
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.data import ImageData, open_data
from prototree.data.loader import make_loader
from prototree.training.loop import Context, Loop
from prototree.training.paper import augmented_images, param_groups, train, update_leaves
from prototree_birds import write_birds

BATCH, CLASSES, HEIGHT, STEPS = 16, 50, 7, 5
N_IMAGES = 200

Step = Callable[[], object]


def network_of(name: str, pixels: int) -> Backbone:
    backbone = Backbone(name, None, image_size=pixels)
    backbone.freeze(False)
    return backbone


def same_batch(pixels: int) -> tuple[Tensor, Tensor]:
    images = torch.rand(BATCH, 3, pixels, pixels).contiguous(memory_format=torch.channels_last)
    return images, torch.arange(BATCH) % CLASSES


def bare_step(backbone: Backbone, *, memory_format: torch.memory_format, freeze_norm: bool = False) -> Step:
    """Forward, loss and backward of the network alone."""
    model = nn.ModuleList([backbone, nn.Linear(backbone.n_channels, CLASSES)]).train()
    model.to(memory_format=memory_format)  # type: ignore[call-overload]
    images, labels = same_batch(backbone.preprocessing.size)
    images = images.contiguous(memory_format=memory_format)
    if freeze_norm:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        cross_entropy(model[1](backbone(images).mean(dim=(2, 3))), labels).backward()

    return step


def tree_step(backbone: Backbone, data: ImageData, folder: Path) -> Step:
    """One pass through the inner loop of `training.paper.train`, everything trained."""
    settings = PaperSettings(height=HEIGHT, freeze_epochs=0)
    tree = ProtoTree(Topology.full(HEIGHT), FeatureExtractor(backbone, 256), CLASSES)
    tree.leaf_logits.requires_grad_(False)
    groups, epoch_start = param_groups(tree, settings, 0), tree.leaf_logits.detach().clone()
    loop = Loop(Context(folder, data, Config(recipe=settings)), "tree", tree.train(), groups, 10_000)
    images, labels = same_batch(backbone.preprocessing.size)

    def step() -> None:
        loop.set_lr(groups)
        out = tree.forward_features(tree.features(images))
        losses = -tree.log_likelihood(out, labels)
        y_hat = predict(out.log_path_probs.detach(), class_log_probs(tree.leaf_logits.detach()).exp())
        loop.step(losses, (y_hat.argmax(dim=1) == labels).float())
        update_leaves(tree, epoch_start, out, labels, 1)

    return step


def read_step(backbone: Backbone, data: ImageData, folder: Path) -> Step:
    """Read and augment a batch, in this process."""
    context = Context(folder, data, Config(augment="cub"))
    loader = make_loader(augmented_images(context, backbone), BATCH, shuffle=True)
    return lambda: next(loader.epoch(0))


def in_turns(steps: dict[str, Step]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(STEPS + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if repeat:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def epoch_seconds(data: ImageData, folder: Path) -> tuple[float, float]:
    """One frozen epoch of the last block without and with cached maps of the rest, on the same views."""
    settings = PaperSettings(height=HEIGHT, epochs=1, freeze_epochs=1)
    config = Config(augment="cub", workers=0, recipe=settings)  # whose time counts too
    seconds = []
    for name, cache_views in (("first", 1), ("uncached", 0), ("cached", 1)):  # the first run computes the cache
        (folder / name).mkdir(exist_ok=True)
        start = time.process_time()
        train(Context(folder / name, data, config), dataclasses.replace(settings, cache_views=cache_views))
        seconds.append(time.process_time() - start)
    return seconds[1], seconds[2]


def main(name: str, pixels: int) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = open_data(write_birds(folder / "birds", train_per_species=20, test_per_species=2, workers=1))
        data = dataclasses.replace(data, train=data.train[:N_IMAGES])
        last = torch.channels_last
        seconds = in_turns({
            "network, forward + backward": bare_step(network_of(name, pixels), memory_format=last),
            "the same, batch norm frozen": bare_step(network_of(name, pixels), memory_format=last, freeze_norm=True),
            "the same, contiguous memory": bare_step(network_of(name, pixels), memory_format=torch.contiguous_format),
            f"step of the recipe, h = {HEIGHT}": tree_step(network_of(name, pixels), data, folder / "step"),
            "reading and augmenting, one process": read_step(network_of(name, pixels), data, folder / "read"),
        })  # fmt: skip
        uncached, cached = epoch_seconds(data, folder)
    (first, *_), bare = seconds, next(iter(seconds.values()))
    table = Table(
        "what", "images a second", f"/ {first}", title=f"{name}, {pixels} px, {torch.get_num_threads()} threads"
    )
    for step, taken in seconds.items():
        table.add_row(step, f"{BATCH / taken:.1f}", f"{taken / bare:.3f}×")
    table.add_row(f"frozen epoch of {N_IMAGES} images, cached / not", "", f"1/{uncached / cached:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "lite0",
        int(sys.argv[2]) if len(sys.argv) > 2 else load_preset("paper-small").image_size or 0,
    )

"""What an experiment costs: operations of a training step, and hours on a machine that does so many in a second."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from prototree.backbones.backbone import Backbone
from prototree.config import DEFAULT_IMAGE_SIZE, Config, PaperSettings
from prototree.run import Run

GPU_RATE = 10e12  # operations a second that a GPU is assumed to sustain in such steps
FROZEN_PART = 1 / 3  # of the work of a step is done while the network is frozen: no backward pass


@dataclass(frozen=True)
class Cost:
    """Operations of an experiment, and how many this machine did in a second of measured steps (None: no steps)."""

    operations: float
    measured_rate: float | None

    @property
    def gpu_hours(self) -> float:
        return self.operations / GPU_RATE / 3600

    @property
    def hours_here(self) -> float | None:
        return self.operations / self.measured_rate / 3600 if self.measured_rate else None


def cost_of(config: Config, n_views: int, n_runs: int, finished: Iterable[Run]) -> Cost:
    """Estimate the cost of so many trainings of a configuration, with the rate of what has been trained already."""
    recipe = config.recipe
    assert isinstance(recipe, PaperSettings)
    frozen = min(recipe.freeze_epochs, recipe.epochs)
    image_steps = n_runs * n_views * (recipe.epochs - frozen + FROZEN_PART * frozen)
    rates = [rate for run in finished if (rate := measured_rate(run)) is not None]
    return Cost(image_steps * step_operations(config), max(rates, default=None))


def measured_rate(run: Run) -> float | None:
    """Operations a second in the epochs in which everything learned; None where there were none."""
    config, path = run.config, run.folder / "log.csv"
    if not isinstance(config.recipe, PaperSettings) or not path.exists():
        return None
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["epoch"]) > config.recipe.freeze_epochs]
    rates = [float(row["images_per_second"]) for row in rows]
    return max(rates) * step_operations(config) if rates else None


def step_operations(config: Config) -> float:
    """Count the operations of the network's forward and backward pass for one image."""
    size = config.image_size or DEFAULT_IMAGE_SIZE
    return _count(config.backbone, config.backbone_options, config.feature_level, size)


@cache
def _count(name: str, options: str, feature_level: int, size: int) -> float:
    with torch.random.fork_rng(devices=[]):  # random weights, which nobody sees
        backbone = Backbone(name, None, image_size=size, feature_level=feature_level, options=options, split=False)
    backbone = backbone.to("meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        backbone(torch.empty(2, 3, size, size, device="meta"))
    # The backward pass is two such products for each; torch counts those of depthwise convolutions too high.
    return 3 * float(counter.get_total_flops()) / 2

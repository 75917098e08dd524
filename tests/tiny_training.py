"""A training problem small enough for tests: photos of coloured squares, and batches that need no network."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from prototree.backbones.backbone import FeatureExtractor
from prototree.backbones.geometry import Box
from prototree.data import open_data
from prototree.data.loading import BatchOrder, Entry, Shard, ViewDataset
from prototree.data.views import View
from prototree.features.cache import Inputs
from prototree.run import Run

COLOURS = {"red": (200, 40, 40), "green": (40, 180, 60), "blue": (50, 60, 200)}

# The smallest network with maps of 4×4 patches for 32 pixels, so that little of a run's time is the network's.
NETWORK = "test_efficientnet"

# A schedule for which a whole run takes seconds.
TINY = {
    "recipe": "paper",
    "train_last_block": True,
    "head_hidden_dim": 0,
    "cache_views": 0,
    "backbone": NETWORK,
    "weights": "none",
    "image_size": 32,
    "feature_level": -3,
    "prototype_dim": 8,
    "height": 3,
    "batch_size": 8,
    "epochs": 3,
    "freeze_epochs": 1,
    "lr_backbone": 1e-3,
    "augment": "light",
    "workers": 0,
}


# The same for the recipe distill.
TINY_DISTILL = {
    "backbone": NETWORK,
    "weights": "none",
    "image_size": 32,
    "feature_level": -3,
    "prototype_dim": 16,
    "head_hidden_dim": 16,
    "batch_size": 8,
    "views": 3,
    "pretrain_epochs": 4,
    "head_epochs": 20,  # a network without pretrained weights learns slowly to know classes by single patches
    "epochs": 15,
    "workers": 0,
}


def write_squares(root: Path, train: int = 8, test: int = 3) -> Path:
    """Three classes of photos: a square of the class's colour somewhere on grey noise."""
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("test", test)):
        for name, colour in COLOURS.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(90, 160, (40, 40, 3), dtype=np.uint8)
                top, left = random.integers(0, 24, 2)
                pixels[top : top + 16, left : left + 16] = colour
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root


class MapBatches:
    """Ready backbone maps in memory, one prototypical patch per class hidden in noise."""

    def __init__(
        self, n_channels: int, n_items: int = 30, n_classes: int = 3, batch_size: int = 8, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(n_items) % n_classes
        patches = 3 * torch.randn(n_classes, n_channels, generator=generator)
        self.maps = torch.randn(n_items, n_channels, 3, 3, generator=generator)
        for item, label in enumerate(self.labels.tolist()):
            self.maps[item, :, item % 3, item // 3 % 3] = patches[label]
        self._order = BatchOrder(n_items, batch_size, shuffle_seed=seed, shard=Shard())
        self.entries: Sequence[Entry] = ()
        self.served = 0

    @property
    def n_batches(self) -> int:
        return len(self._order)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Inputs]:
        for positions in self._order.positions(epoch, start):
            self.served += 1
            index = torch.tensor([place for _, place in positions])
            yield Inputs(self.maps[index], self.labels[index], index)

    def encode(self, features: FeatureExtractor, values: Tensor) -> Tensor:
        return features.from_map(values)


def assert_prototypes_are_their_patches(run: Run) -> None:
    tree, data = run.tree().eval(), open_data(run.metrics["source"])
    for node, source in enumerate(tree.sources):
        assert source is not None
        sample = next(s for s in data.train if s.path == data.root / source.image)
        view = View(source.view, source.region and Box(*source.region), source.flip)
        (image, *_) = ViewDataset([sample], lambda _, view=view: [view], tree.preprocessing)[0]
        patch = tree.features(image[None])[0, :, *source.patch]
        assert (patch - tree.prototypes[node, :, 0, 0]).norm() < 1e-5

"""A training problem small enough for tests: images of coloured squares, and batches that need no network."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.geometry import Box
from prototree.config import Config, PaperSettings
from prototree.core.model import ProtoTree, TreeOutput
from prototree.data import ImageData, open_data
from prototree.data.crops import FULL_IMAGE, View
from prototree.data.dataset import Sample
from prototree.data.loader import BatchOrder, Entry, Shard, ViewDataset
from prototree.features.cache import FeatureMaps, Inputs
from prototree.progress import Observer
from prototree.run import Run
from prototree.training.loop import Context

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
    "recipe": "distill",
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
    """Stands in for `paper.Batches`: backbone maps in memory, in float64, one patch per class hidden in noise."""

    def __init__(self, n_items: int = 30, batch_size: int = 8, leaf_logits: Tensor | None = None) -> None:
        self.labels = torch.arange(n_items) % 3
        self._order, self._leaf_logits = BatchOrder(n_items, batch_size, shuffle_seed=0, shard=Shard()), leaf_logits
        self.n_batches = len(self._order)

    def __call__(self, context: Context, images: ViewDataset, cfg: PaperSettings, tree: ProtoTree) -> "MapBatches":
        """Take the place of the class, and note the tree as it starts."""
        generator, n_channels = torch.Generator().manual_seed(0), tree.features.backbone.n_channels
        patches = 3 * torch.randn(3, n_channels, generator=generator)
        self.maps = torch.randn(len(self.labels), n_channels, 3, 3, generator=generator).double()
        for item, label in enumerate(self.labels.tolist()):
            self.maps[item, :, item % 3, item // 3 % 3] = patches[label].double()
        tree.double()
        if self._leaf_logits is not None:
            tree.leaf_logits.data.copy_(self._leaf_logits)
        self.tree, self.start = tree, {name: tensor.clone() for name, tensor in tree.state_dict().items()}
        return self

    def epoch(self, epoch: int) -> Iterator[Inputs]:
        for positions in self._order.positions(epoch, 0):
            index = torch.tensor([index for _, index in positions])
            yield Inputs(self.maps[index], self.labels[index], index)

    def encode(self, network: FeatureExtractor, batch: Inputs) -> Tensor:
        return network.from_map(batch.values)

    def forward(self, tree: ProtoTree, epoch: int) -> Iterator[tuple[TreeOutput, Inputs]]:
        for batch in self.epoch(epoch):
            yield tree.forward_features(self.encode(tree.features, batch)), batch


def tiny_context(folder: Path, data: ImageData, observer: Observer | None = None, **settings: object) -> Context:
    """What a recipe trains with, on tiny settings of the paper's recipe or, where they say so, of another."""
    folder.mkdir(parents=True, exist_ok=True)
    config = Config().replace(settings if "recipe" in settings else TINY | settings).for_data(data.n_classes)
    return Context(folder, data, config, observer=observer or Observer())


def feature_maps(maps: Tensor, labels: Sequence[int], unreadable: frozenset[int] = frozenset()) -> FeatureMaps:
    """Feature maps of full images in memory."""
    entries = tuple(Entry(i, Sample(Path(f"{i}.png"), label), FULL_IMAGE) for i, label in enumerate(labels))
    return FeatureMaps((maps.numpy()[None],), entries, unreadable)


class Crash(Observer):
    """Stops training at the n-th event of a kind, as a power cut would."""

    def __init__(self, kind: str, number: int) -> None:
        self._left = number

        def count(*_: object) -> None:
            self._left -= 1
            if self._left < 0:
                raise PowerCutError

        setattr(self, kind, count)


class PowerCutError(Exception):
    pass


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert list(first) == list(other)
    assert [name for name in first if not torch.equal(first[name], other[name])] == []


def save_weights(path: Path, seed: int = 0) -> str:
    """A file of weights for the tiny network, as pretrained ones would be."""
    torch.manual_seed(seed)
    state = Backbone(NETWORK, None, image_size=32).net.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return str(path)


def assert_prototypes_are_their_patches(run: Run) -> None:
    tree, data = run.tree().eval(), open_data(run.metrics["source"])
    for node, source in enumerate(tree.sources):
        assert source is not None
        sample = next(s for s in data.train if s.path == data.root / source.image)
        view = View(source.crop, source.crop_region and Box(*source.crop_region), source.flip)
        (image, *_) = ViewDataset([sample], lambda _, view=view: [view], tree.preprocessing)[0]
        patch = tree.features(image[None])[0, :, *source.patch]
        assert (patch - tree.prototypes[node, :, 0, 0]).norm() < 1e-5

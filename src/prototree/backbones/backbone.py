"""f(x; ω): any timm network as a feature map, and the 1×1 convolution to the prototypes' depth (§6.1, Table S1).

The paper trains the *last block* (`layer4.2` in ResNet50) from the start while the rest is frozen. What passes between
the two is one tensor, the *split features*, so that the frozen part needs to run only once per image.
Notation used for tensor shapes: B batch, C channels of the network's map, D prototype dimension, H W feature map.
"""

import copy
import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from prototree.backbones.crops import FULL_ONLY, Crops, stacked
from prototree.backbones.geometry import MAX_SIDE, Preprocessing
from prototree.backbones.registry import AUTO, HUB, Network, format_options, resolve
from prototree.backbones.weights import load_weights, packaged_lite0
from prototree.errors import ConfigError, ImageSizeError, ShapeError, WeightsError, how_to_install

import timm  # isort: skip (after weights, which prepares torchvision)
from timm.models import PretrainedCfg  # isort: skip

log = logging.getLogger(__name__)

_PACKAGED = "tf_efficientnet_lite0"  # whose weights come as a package
_TRIAL_SIDE = 512  # a network that takes any size shows its structure on an image of at most this side

LARGER_IMAGES = "PROTOTREE_MAX_IMAGE_SIZE"  # environment variable that allows larger images than `max_image_size`
_MAX_ENLARGEMENT = 4  # of the side that a network was trained with: sixteen times the pixels, and at least the time
_USUAL_SIDE = 224

MapLayout = Literal["map", "channels_last", "tokens"]
"""How the last block gives its output: B×C×H×W; B×H×W×C, as Swin; or B×tokens×C, as ViT."""


class Backbone(nn.Module):
    """A timm network up to one of its feature maps.

    `name` is a timm model or a name of the registry, and `options` are what timm builds it with. `weights` is a file,
    "hub" for timm's own pretrained weights, "auto" for the hub or else the packaged EfficientNet-Lite0, or None for a
    random start. `feature_level` −1 is the map of the last block, −2 the finer one before it, and 0 the output of
    timm's `forward_features`, which in EfficientNets and MobileNets has one convolution more. The last map of a vision
    transformer is its patch tokens after the last norm. With `split`, the last block, or so many of them, can be
    trained while the rest is frozen. After training, a network may see centre crops besides the full image (`crops`);
    `map_size` is that of one crop.
    """

    def __init__(
        self,
        name: str = AUTO,
        weights: str | Path | None = AUTO,
        *,
        image_size: int = 224,
        feature_level: int = -1,
        options: Mapping[str, Any] | str = "",
        split: bool | int = True,
    ) -> None:
        super().__init__()
        network = resolve(name, weights, options)
        self.name, self.options, self.origin = network.model, dict(network.options), network.origin
        self.feature_level = feature_level
        self.frozen = False
        self.crops: Crops = FULL_ONLY
        self._last_block_names: list[str] = []
        self._layout: MapLayout = "map"
        self.net, self.preprocessing = _build(network, image_size)
        self.eval()  # the trial runs below must not move batch-norm statistics
        full = self.net.state_dict().keys()
        side = image_size if _pretrained_config(self.name).fixed_input_size else min(image_size, _TRIAL_SIDE)
        image = torch.rand(1, 3, side, side, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        image = image.to(next(self.net.parameters()).device)
        calls = self._strip(image)
        self.weights = self._load(network, [key for key in self.net.state_dict() if key in full])
        with torch.no_grad():
            shape = self(image).shape
            self.n_channels, self.map_size = shape[1], (shape[2], shape[3])
            if split:
                self._find_last_blocks(image, calls, int(split))
            if side < image_size:  # from shapes alone: a large image would take seconds and gigabytes
                shape = copy.deepcopy(self).to("meta")(torch.empty(1, 3, image_size, image_size, device="meta")).shape
                self.map_size = (shape[2], shape[3])
        self.train()

    def forward(self, images: Float[Tensor, "B 3 h w"]) -> Float[Tensor, "B C nH W"]:
        return stacked(self.forward_single, images, self.crops)

    def forward_single(self, images: Float[Tensor, "B 3 h w"]) -> Float[Tensor, "B C H W"]:
        """The feature map of the full image alone."""
        if self._index is None:
            return self.net.forward_features(images)  # type: ignore[operator, no-any-return]
        options = {"intermediates_only": True, "output_fmt": "NCHW", "stop_early": True, "norm": self._has_norm}
        return self.net.forward_intermediates(images, indices=[self._index], **options)[-1]  # type: ignore[operator, no-any-return]

    def split_features(self, images: Float[Tensor, "B 3 h w"]) -> Tensor:
        """The input of the last block; the feature map of a network that is not split."""
        if not self._last_block_names:
            return self.forward_single(images)
        inputs: list[Tensor] = []
        hook = self.last_modules[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        try:
            self.forward_single(images)
        finally:
            hook.remove()
        return inputs[0]

    def last_block(self, features: Tensor) -> Float[Tensor, "B C H W"]:
        """From the split features to the feature map; after `split_features` this is `forward_single`."""
        for module in self.last_modules:
            features = module(features)
        if self._layout == "channels_last":
            return features.permute(0, 3, 1, 2)
        if self._layout == "tokens":
            prefix = int(getattr(self.net, "num_prefix_tokens", 0))
            return features[:, prefix:].transpose(1, 2).reshape(len(features), -1, *self.map_size)
        return features

    def merge_last_block(self) -> "Backbone":
        """Undo the split: the whole network is frozen or trained together."""
        self._last_block_names, self._layout = [], "map"
        return self

    def freeze(self, frozen: bool) -> None:
        """Freeze or free all but the last block. While frozen, batch-norm statistics do not move either."""
        self.frozen = frozen
        for parameter in self.backbone_parameters():
            parameter.requires_grad_(not frozen)
        self.train(self.training)

    def train(self, mode: bool = True) -> "Backbone":
        super().train(mode)
        if self.frozen:
            self.net.eval()
            for module in self.last_modules:
                module.train(mode)
        return self

    def last_block_parameters(self) -> Iterator[nn.Parameter]:
        for module in self.last_modules:
            yield from module.parameters()

    def backbone_parameters(self) -> Iterator[nn.Parameter]:
        """All parameters but those of the last block."""
        last = {id(parameter) for parameter in self.last_block_parameters()}
        return (parameter for parameter in self.net.parameters() if id(parameter) not in last)

    def backbone_state(self) -> dict[str, Tensor]:
        """The weights and statistics that decide what the split features are."""
        last = tuple(f"{name}." for name in self._last_block_names)
        return {name: tensor for name, tensor in self.net.state_dict().items() if not name.startswith(last)}

    @property
    def last_modules(self) -> list[nn.Module]:
        return [self.net.get_submodule(name) for name in self._last_block_names]

    def _strip(self, image: Tensor) -> list[str]:
        """Remove what the chosen map does not need, so that no parameter is idle; returns the modules run."""
        self._index: int | None = None
        self._has_norm = False
        if self.feature_level and hasattr(self.net, "forward_intermediates"):
            with torch.no_grad():
                n_levels = len(self.net.forward_intermediates(image, intermediates_only=True))  # type: ignore[operator]
            if not -n_levels <= self.feature_level < 0:
                raise ConfigError(f"{self.name} has feature levels 0 to −{n_levels}, got {self.feature_level}")
            self._has_norm = self.feature_level == -1 and hasattr(self.net, "num_prefix_tokens")
            chosen, prune_norm = [n_levels + self.feature_level], not self._has_norm
            self._index = self.net.prune_intermediate_layers(chosen, prune_norm, True)[0]  # type: ignore[operator]
        elif self.feature_level < -1:
            raise ConfigError(f"{self.name} offers only its last feature map, level −1; got {self.feature_level}")
        calls: list[str] = []
        hooks = [m.register_forward_hook(lambda *_, n=n: calls.append(n)) for n, m in self.net.named_modules()]
        with torch.no_grad():
            shape = self(image).shape
        if len(shape) != 4:
            raise ConfigError(f"{self.name} has no map at feature level 0, but a tensor of shape {shape}; take −1")
        for hook in hooks:
            hook.remove()
        for name, _ in list(self.net.named_children()):
            if not any(call.split(".")[0] == name for call in calls):
                setattr(self.net, name, nn.Identity())
        return calls

    def _load(self, network: Network, needed: list[str]) -> str | None:
        weights = _best_weights(self.name) if network.weights == AUTO else network.weights
        if weights is None:
            return None
        try:
            full, _ = _build(network, self.preprocessing.size, pretrained=weights == HUB)
        except Exception as error:  # the hub client raises many kinds, all of which mean the same to the user
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise WeightsError(
                f"the pretrained weights of {self.name} could not be fetched ({reason}); give a local file with "
                "--weights, or take --backbone auto, whose weights also come as a package, for machines without a "
                f"network; {how_to_install('weights')}"
            ) from error
        if weights != HUB:
            load_weights(full, Path(weights), needed)
        self.net.load_state_dict({key: full.state_dict()[key] for key in needed}, strict=False)
        return str(weights)

    def _find_last_blocks(self, image: Tensor, calls: list[str], n_blocks: int) -> None:
        """Split off the last blocks and what follows them, if running them after the rest gives the same map."""
        expected = self(image)
        self._last_block_names = _last_blocks(self.net, calls, n_blocks)
        layouts: tuple[MapLayout, ...] = ("map", "channels_last", "tokens")
        for self._layout in layouts:
            try:
                if torch.equal(self.last_block(self.split_features(image)), expected):
                    return
            except (RuntimeError, TypeError, IndexError):
                continue
        self.merge_last_block()
        log.warning("the last block of %s cannot be trained alone; either all of it is trained, or nothing", self.name)


def max_image_size(name: str) -> int:
    """Pixels of the largest side that a network is given, in training and from a saved tree.

    It is four times the side that the network was trained with, or what the environment variable
    `PROTOTREE_MAX_IMAGE_SIZE` allows, if that is more.
    """
    config = _pretrained_config(name)
    trained: tuple[int, ...] = (*config.input_size[1:], *(config.test_input_size or ())[1:])
    allowed = os.environ.get(LARGER_IMAGES) or "0"
    if not (allowed.isdecimal() and len(allowed) < 6 and int(allowed) <= MAX_SIDE):
        raise ConfigError(f"expected pixels from 0 to {MAX_SIDE} in {LARGER_IMAGES}, got {allowed[:60]!r}; unset it")
    return max(_MAX_ENLARGEMENT * max(_USUAL_SIDE, *trained), int(allowed))


def check_image_size(name: str, side: int) -> None:
    """Refuses images so large that a network takes minutes for each, unless the user has allowed them."""
    if side > (largest := max_image_size(name)):
        raise ImageSizeError(
            f"expected images of at most {largest} pixels for {name}, {_MAX_ENLARGEMENT} times what it was made for, "
            f"got {side}; choose smaller ones, or, if you trust where this size comes from, set {LARGER_IMAGES}={side}"
        )


class FeatureExtractor(nn.Module):
    """f(x; ω) of the paper: the backbone, a 1×1 convolution without bias to depth D, and a sigmoid.

    With `head_hidden_dim` the head is two 1×1 layers on standardised channels.
    """

    def __init__(self, backbone: Backbone, prototype_dim: int = 256, head_hidden_dim: int = 0) -> None:
        super().__init__()
        if prototype_dim < 1 or head_hidden_dim < 0:
            raise ShapeError(f"expected prototype_dim >= 1 and hidden >= 0, got {prototype_dim}, {head_hidden_dim}")
        self.backbone = backbone
        self.prototype_dim, self.head_hidden_dim = prototype_dim, head_hidden_dim
        self.head: nn.Module
        if head_hidden_dim:
            self.head = WideHead(backbone.n_channels, head_hidden_dim, prototype_dim)
        else:
            self.head = nn.Conv2d(backbone.n_channels, prototype_dim, kernel_size=1, bias=False)
            nn.init.xavier_normal_(self.head.weight)

    def forward(self, images: Float[Tensor, "B 3 h w"]) -> Float[Tensor, "B D H W"]:
        return self.from_map(self.backbone(images))

    def from_split(self, features: Tensor) -> Float[Tensor, "B D H W"]:
        """Encode the split features of the backbone."""
        return self.from_map(self.backbone.last_block(features))

    def from_map(self, backbone_map: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D H W"]:
        """Encode the backbone's feature map."""
        return torch.sigmoid(self.head(backbone_map))


class WideHead(nn.Module):
    """Standardised channels → 1×1 convolution, batch norm, ReLU → 1×1 convolution."""

    mean: Tensor
    std: Tensor

    def __init__(self, n_channels: int, width: int, depth: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(n_channels, 1, 1))
        self.register_buffer("std", torch.ones(n_channels, 1, 1))
        self.first = nn.Conv2d(n_channels, width, kernel_size=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.last = nn.Conv2d(width, depth, kernel_size=1)

    def forward(self, backbone_map: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D H W"]:
        if not self.norm.training:
            return _product(relu(_product(backbone_map, *self._folded())), self.last.weight, self.last.bias)
        z = self.forward_train(backbone_map.flatten(2).transpose(1, 2)).transpose(1, 2)
        return z.view(*z.shape[:2], *backbone_map.shape[2:])

    def forward_train(
        self, rows: Float[Tensor, "B patches C"], dropout_masks: tuple[Tensor, Tensor] | None = None
    ) -> Float[Tensor, "B patches D"]:
        """Encode some patches of each map, with batch norm on their own statistics.

        Each map's channels are multiplied with the masks, before the first convolution and before the last.
        """
        before, between = dropout_masks or (rows.new_ones(len(rows), 1),) * 2
        gain = before[:, None] / self.std.flatten()
        x = torch.addcmul(-gain * self.mean.flatten(), rows, gain)  # standardised and multiplied in one step
        hidden = linear(x.flatten(0, 1), self.first.weight.flatten(1))[:, :, None, None]
        hidden = relu(self.norm(hidden)).view(*rows.shape[:2], hidden.shape[1]) * between[:, None]
        return linear(hidden, self.last.weight.flatten(1), self.last.bias)

    def _folded(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of one layer that standardises, convolves and applies frozen batch norm."""
        norm: Any = self.norm
        gain = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        weight = self.first.weight * gain[:, None, None, None] / self.std
        return weight, norm.bias - gain * norm.running_mean - weight.flatten(1) @ self.mean.flatten()


def _product(x: Float[Tensor, "B C H W"], weight: Tensor, bias: Tensor | None = None) -> Float[Tensor, "B D H W"]:
    """A 1×1 convolution as one matrix product of all patches: it is faster so, and far faster for few."""
    return linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)


def _pretrained_config(name: str) -> Any:
    """What timm knows about a network's training; its defaults for one without published weights."""
    return timm.get_pretrained_cfg(name.removesuffix("_v1")) or PretrainedCfg(interpolation="bilinear")


def _build(network: Network, image_size: int, *, pretrained: bool = False) -> tuple[nn.Module, Preprocessing]:
    name, base = network.model, network.model.removesuffix("_v1")
    if not timm.is_model(base):
        alike = difflib.get_close_matches(base, timm.list_models(), n=3)
        near = list(dict.fromkeys([*alike, *timm.list_models(f"*{base.split('_')[0]}*")]))[:5]
        hint = f"did you mean one of {', '.join(near)}?" if near else "timm.list_models() lists all"
        raise ConfigError(f"neither the registry nor timm has a network {name!r}; {hint}")
    check_image_size(name, image_size)
    config, options = _pretrained_config(base), dict(network.options)
    sized = {"img_size": image_size} if config.fixed_input_size else {}
    try:
        net = timm.create_model(base, pretrained=pretrained, num_classes=0, **sized, **options)
    except (TypeError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        given = f"the options {format_options(options)}" if options else f"images of {image_size} pixels"
        raise ConfigError(f"timm cannot build {name} with {given} ({reason}); choose others") from error
    if name != base:
        _stride_first(net, name)
    interpolation = network.interpolation or ("bicubic" if config.interpolation == "bicubic" else "bilinear")
    mean, std = network.mean or tuple(config.mean), network.std or tuple(config.std)
    return net, Preprocessing(image_size, image_size, mean, std, interpolation)


def _stride_first(net: nn.Module, name: str) -> None:
    """The first form of ResNet (Caffe, Keras): a stage's stride sits in its first 1×1 convolution, not in the 3×3."""
    blocks: list[Any] = [block for block in net.modules() if isinstance(getattr(block, "conv3", None), nn.Conv2d)]
    if not blocks:
        raise ConfigError(f"{name!r}: only ResNets of bottleneck blocks have a _v1 form")
    for block in blocks:
        if block.conv2.stride == (2, 2):
            block.conv1.stride, block.conv2.stride = (2, 2), (1, 1)


def _best_weights(name: str) -> str | Path | None:
    """The hub if it has this model and answers, else the packaged file, else nothing."""
    if name == _PACKAGED and (packaged := packaged_lite0()):
        return packaged
    if not _pretrained_config(name).has_weights or name.endswith("_v1"):
        log.warning("%s has no published weights; it starts from random ones", name)
        return None
    return HUB


def _last_blocks(net: nn.Module, calls: list[str], n_blocks: int) -> list[str]:
    """Names of the last blocks with weights, and of the modules that run between and after them, in order."""
    units = _units(net, "", {part for call in calls for part in accumulate(call.split("."), "{}.{}".format)})
    heavy = [i for i, name in enumerate(units) if any(p.dim() > 1 for p in net.get_submodule(name).parameters())]
    return units[heavy[-min(n_blocks, len(heavy))] :] if heavy else []


def _units(net: nn.Module, name: str, ran: set[str]) -> list[str]:
    """Names of the modules that a network runs one after the other, from outside: blocks, not their layers."""
    module = net.get_submodule(name)
    has_blocks = isinstance(getattr(module, "blocks", None), nn.Module)
    if name and not has_blocks and not isinstance(module, nn.Sequential | nn.ModuleList):
        return [name]
    children = (f"{name}.{child}".lstrip(".") for child, _ in module.named_children())
    return [unit for child in children if child in ran for unit in _units(net, child, ran)]

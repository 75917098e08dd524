"""Batch norm folded into the convolution before it: the same function of the image, faster, for frozen networks."""

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from prototree.backbones.backbone import Backbone

log = logging.getLogger(__name__)

TOLERANCE = 1e-3  # of the largest value; folding changes the last digits only


@torch.no_grad()
def folded(backbone: Backbone) -> Backbone:
    """A copy in evaluation mode for running the trunk, or a plain copy where folding changes its output."""
    size, device = backbone.preprocessing.size, next(backbone.parameters()).device
    image = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    original = copy.deepcopy(backbone).eval()
    candidate = copy.deepcopy(backbone).eval()
    candidate.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for convolution, norm_name in _pairs(candidate, image):
        norm = candidate.net.get_submodule(norm_name)
        assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
        _fold(convolution, norm)
        _replace(candidate.net, norm_name, _what_is_left(norm))
    expected, found = original.trunk(image), candidate.trunk(image)
    if not (found - expected).abs().max() <= TOLERANCE * expected.abs().max():
        log.info("%s cannot be folded; it runs unchanged", backbone.name)
        return original
    return candidate


def _pairs(backbone: Backbone, image: Tensor) -> list[tuple[nn.Conv2d, str]]:
    """Each convolution whose output goes to a batch norm and nowhere else, with the name of that batch norm."""
    made_by: dict[int, nn.Conv2d] = {}
    users: dict[int, list[str]] = {}
    alive: list[Any] = []  # an id is a name only as long as nothing that was seen is freed

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        alive.extend((*inputs, output))
        for tensor in inputs:
            users.setdefault(id(tensor), []).append(name)
        if isinstance(module, nn.Conv2d):
            made_by[id(output)] = module

    hooks = [
        module.register_forward_hook(lambda m, i, o, name=name: note(name, m, i, o))
        for name, module in backbone.net.named_modules()
        if not list(module.children()) or isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    backbone.once(image)
    for hook in hooks:
        hook.remove()
    single = [(made_by[tensor], names[0]) for tensor, names in users.items() if tensor in made_by and len(names) == 1]
    return [pair for pair in single if isinstance(backbone.net.get_submodule(pair[1]), nn.modules.batchnorm._BatchNorm)]


def _fold(convolution: nn.Conv2d, norm: nn.modules.batchnorm._BatchNorm) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    weight, bias = fuse_conv_bn_weights(
        convolution.weight, convolution.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    convolution.weight, convolution.bias = weight, bias


def _what_is_left(norm: nn.Module) -> nn.Module:
    """timm's batch norm may hold the activation that follows."""
    act = getattr(norm, "act", None)
    return act if isinstance(act, nn.Module) else nn.Identity()


def _replace(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, module)

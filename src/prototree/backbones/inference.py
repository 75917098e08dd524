"""The frozen network as a function from images to maps, run by torch or, where it pays, by onnxruntime.

A network that does not learn is folded and run in small pieces: the activations of a whole batch would not fit where
the memory allocator keeps what it has, and would be asked of the system anew for every layer. Every piece has the same
size, so that the bits of a map do not depend on which images come along.

onnxruntime wants the network in its own form. Converting takes seconds, so that it is done once for each set of
weights, into the folder for caches, and only where enough photos are coming to pay for it.
"""

import copy
import hashlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from prototree.backbones import onnx
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.bn_fusion import TOLERANCE, folded
from prototree.backbones.crops import stacked
from prototree.errors import ConfigError, MissingExtraError, ProtoTreeError
from prototree.files import cache_folder, write_file

log = logging.getLogger(__name__)

AUTO, TORCH, ONNXRUNTIME = "auto", "torch", "onnxruntime"
ENOUGH = 500  # photos, each with several views, that pay for converting a network
_VERSION = 2
_PIXELS = 2 * 288**2  # of a piece: its largest activations stay below the 32 MiB that glibc hands out again
_LARGEST_PIECE = 16
_IN_VAIN: set[Path] = set()  # what this process could not convert, by its file: trying takes seconds every time


@dataclass(frozen=True)
class Frozen:
    """A network that does not learn, as a function: `frozen(images)` is what its trunk makes of them."""

    engine: str  # which one runs it
    piece: int  # images that go through together
    run: Callable[[Tensor], Tensor]

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        if not self.piece:
            return self.run(images)
        short = -len(images) % self.piece
        filled = pad(images, (0, 0) * (images.ndim - 1) + (0, short)) if short else images
        return torch.cat([self.run(piece) for piece in filled.split(self.piece)])[: len(images)]


@dataclass(frozen=True)
class FrozenFeatures:
    """A feature extractor that does not learn, its backbone run by an engine."""

    features: FeatureExtractor
    trunk: Frozen

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        maps = stacked(self.trunk, images, self.features.backbone.crops, at_once=True)
        return self.features.from_map(maps).contiguous()


def engine_for(wanted: str, device: torch.device, n_photos: int) -> str:
    """Which engine is to look at so many photos; the same for the same settings, data and installed packages."""
    installed = importlib.util.find_spec(ONNXRUNTIME) is not None
    if wanted == ONNXRUNTIME:
        if not installed:
            raise MissingExtraError(ONNXRUNTIME, "export")
        if device.type != "cpu":
            raise ConfigError(f"expected the CPU for the engine onnxruntime, got {device}; choose auto or torch")
        return ONNXRUNTIME
    pays = installed and onnx.is_possible() and device.type == "cpu" and n_photos >= ENOUGH
    return ONNXRUNTIME if wanted == AUTO and pays else TORCH


def frozen(backbone: Backbone, engine: str = TORCH, threads: int = 0) -> Frozen:
    """The trunk of a backbone, run by an engine; by torch where it cannot be converted.

    `threads` are those of onnxruntime for each call; 0: as many as torch has.
    """
    if engine == ONNXRUNTIME and (path := _file(backbone)) not in _IN_VAIN:
        try:
            return _converted(backbone, path, threads)
        except Exception as error:  # exporters and other engines raise many kinds, which all mean the same
            _IN_VAIN.add(path)
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            log.warning("%s cannot be run by onnxruntime (%s); using torch instead", backbone.name, reason)
    trunk = folded(backbone)
    is_cpu = next(backbone.parameters()).device.type == "cpu"
    piece = piece_size(backbone.preprocessing.size) if is_cpu else 0  # a GPU wants all of them
    return Frozen(TORCH, piece, lambda images: trunk.trunk(images.contiguous(memory_format=torch.channels_last)))


def frozen_features(features: FeatureExtractor, threads: int = 0) -> FrozenFeatures:
    """A feature extractor for many images, whoever runs it: onnxruntime where it was converted before, else torch."""
    whole = copy.copy(features.eval().backbone).unsplit()  # as it is converted for training
    on_cpu = next(features.parameters()).device.type == "cpu"
    ready = on_cpu and importlib.util.find_spec(ONNXRUNTIME) is not None and _file(whole).exists()
    return FrozenFeatures(features, frozen(whole, ONNXRUNTIME if ready else TORCH, threads))


def piece_size(side: int) -> int:
    """How many images of this side go through a network together on a CPU."""
    return min(max(_PIXELS // side**2, 1), _LARGEST_PIECE)


class _Trunk(nn.Module):
    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone.trunk(images)


def _converted(backbone: Backbone, path: Path, threads: int) -> Frozen:
    """The trunk in onnxruntime, from the folder for caches; what is missing or damaged there is converted again."""
    found = _opened(path, backbone, threads) if path.exists() else None
    if found is None:
        log.info("converting %s for onnxruntime, once for these weights", backbone.name)
        size = backbone.preprocessing.size
        images = torch.zeros(piece_size(size), 3, size, size)
        content = onnx.to_onnx(_Trunk(folded(backbone)), images, ["maps"], as_many=True).SerializeToString()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
        found = _opened(path, backbone, threads)
    if found is None:
        path.unlink(missing_ok=True)
        raise ProtoTreeError("its feature maps differ from torch's")
    return found


def _opened(path: Path, backbone: Backbone, threads: int) -> Frozen | None:
    """A converted trunk, if it can be read and computes what torch does."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 3
    # Threads that wait by spinning take the cores that others need; see `threads`.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # whatever its parser met
        log.warning("%s is damaged and will be made again (%s)", path, type(error).__name__)
        return None

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"images": images.contiguous().numpy()})[0])

    found = Frozen(ONNXRUNTIME, piece_size(backbone.preprocessing.size), run)
    return found if _is_same(found, backbone) else None


@torch.no_grad()
def _is_same(network: Frozen, backbone: Backbone) -> bool:
    size, was_training = backbone.preprocessing.size, backbone.training
    image = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    expected = backbone.eval().trunk(image)
    backbone.train(was_training)
    found = network(image)
    return found.shape == expected.shape and bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


def _file(backbone: Backbone) -> Path:
    """Where a converted trunk lies: named after all that decides what it computes."""
    digest = hashlib.sha256(
        f"{_VERSION} {backbone.name} {backbone.feature_level} {backbone.preprocessing.size}".encode()
    )
    for name, tensor in backbone.trunk_state().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return cache_folder() / "networks" / f"{digest.hexdigest()[:32]}.onnx"

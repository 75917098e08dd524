"""The frozen network as a function from images to feature maps, run by torch or, where it pays, by onnxruntime.

Batch norm is folded into the convolutions, and a batch runs in small pieces, whose activations fit where the memory
allocator keeps what it has. Every piece has the same size, so that the bits of a map do not depend on which images come
along. Converting for onnxruntime takes seconds; it is done once for each set of weights, into the cache directory.
"""

import copy
import hashlib
import importlib.util
import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.crops import stacked
from prototree.backbones.registry import format_options
from prototree.errors import ConfigError, MissingExtraError, ProtoTreeError
from prototree.io import cache_folder, write_file
from prototree.progress import check_stopped

log = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")

AUTO, TORCH, ONNXRUNTIME = "auto", "torch", "onnxruntime"
MIN_IMAGES_FOR_ONNX = 500  # each with several crops, that pay for converting a network
OPSET = 18  # the first in which Resize smooths as Pillow does
NEEDED = ("onnx", "onnxscript")  # packages that write ONNX
_VERSION = 2
_TOLERANCE = 1e-3  # of the largest value; folding changes rounding only
_PIXELS = 2 * 288**2  # of a piece: its largest activations stay below the 32 MiB that glibc hands out again
_LARGEST_PIECE = 16
_EXPORT_LOGGERS = ("torch.onnx", "onnxscript", "torch.export", "onnx_ir")
_AHEAD = 3  # items begun for each thread, while the first waits to be fetched
_failed_conversions: set[Path] = set()  # do not retry in this process


@dataclass(frozen=True)
class Frozen:
    """A frozen network as a function: `frozen(images)` are its (split) features."""

    engine: str  # that runs it
    piece: int  # images that go through together; 0: all
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
    """A frozen feature extractor, its backbone run by an engine."""

    features: FeatureExtractor
    backbone: Frozen

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        maps = stacked(self.backbone, images, self.features.backbone.crops, at_once=True)
        return self.features.from_map(maps).contiguous()


def engine_for(wanted: str, device: torch.device, n_images: int) -> str:
    """The engine for so many images; the same for the same settings, data and installed packages."""
    if wanted == ONNXRUNTIME:
        if not _is_installed(ONNXRUNTIME):
            raise MissingExtraError(ONNXRUNTIME, "export")
        if device.type != "cpu":
            raise ConfigError(f"expected the CPU for the engine onnxruntime, got {device}; choose auto or torch")
        return ONNXRUNTIME
    pays = device.type == "cpu" and n_images >= MIN_IMAGES_FOR_ONNX and _is_installed(ONNXRUNTIME, *NEEDED)
    return ONNXRUNTIME if wanted == AUTO and pays else TORCH


def _is_installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


def frozen(backbone: Backbone, engine: str = TORCH, threads: int = 0) -> Frozen:
    """A backbone (without its last block, if it is split), run by an engine; by torch where it cannot be converted."""
    if engine == ONNXRUNTIME and (path := _onnx_file(backbone)) not in _failed_conversions:
        try:
            return _converted(backbone, path, threads)
        except Exception as error:  # exporters and other engines raise many kinds, which all mean the same
            _failed_conversions.add(path)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            log.warning("%s cannot be run by onnxruntime (%s); using torch instead", backbone.name, reason)
    network = folded(backbone)
    is_cpu = next(backbone.parameters()).device.type == "cpu"
    piece = piece_size(backbone.preprocessing.size) if is_cpu else 0  # a GPU wants all of them
    return Frozen(TORCH, piece, lambda x: network.split_features(x.contiguous(memory_format=torch.channels_last)))


def frozen_features(features: FeatureExtractor, threads: int = 0) -> FrozenFeatures:
    """A feature extractor for many images: by onnxruntime where it was converted before, else by torch."""
    whole = copy.copy(features.eval().backbone).merge_last_block()  # as it is converted for training
    on_cpu = next(features.parameters()).device.type == "cpu"
    ready = on_cpu and _is_installed(ONNXRUNTIME) and _onnx_file(whole).exists()
    return FrozenFeatures(features, frozen(whole, ONNXRUNTIME if ready else TORCH, threads))


def piece_size(side: int) -> int:
    """How many images of this side go through a network together on a CPU."""
    return min(max(_PIXELS // side**2, 1), _LARGEST_PIECE)


@torch.inference_mode()
def images_per_second(backbone: Backbone, seconds: float = 1.5) -> float:
    """Measure how many images the frozen network takes per second, run by torch."""
    network = frozen(backbone.eval())
    images = torch.rand(network.piece or _LARGEST_PIECE, 3, *(backbone.preprocessing.size,) * 2)
    images, done, since = images.to(next(backbone.parameters()).device), 0, 0.0
    network(images)
    while (passed := time.monotonic() - since if since else 0.0) < seconds:
        since = since or time.monotonic()
        network(images)
        done += len(images)
    return done / passed


# ---- batch norm folded into the convolution before it ----------------------------------------------------------------


@torch.no_grad()
def folded(backbone: Backbone) -> Backbone:
    """A copy in evaluation mode with batch norm folded into convolutions, or a plain copy where that changes it."""
    original, candidate = copy.deepcopy(backbone).eval(), copy.deepcopy(backbone).eval()
    candidate.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    image = _trial_image(backbone)
    for convolution, name in _foldable(candidate, image):
        norm: Any = candidate.net.get_submodule(name)
        statistics = norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        convolution.weight, convolution.bias = fuse_conv_bn_weights(convolution.weight, convolution.bias, *statistics)
        act = getattr(norm, "act", None)  # timm's batch norm may hold the activation that follows
        parent, _, child = name.rpartition(".")
        setattr(candidate.net.get_submodule(parent), child, act if isinstance(act, nn.Module) else nn.Identity())
    if not _agree(candidate.split_features(image), original.split_features(image)):
        log.info("%s cannot be folded; it runs unchanged", backbone.name)
        return original
    return candidate


def _foldable(backbone: Backbone, image: Tensor) -> list[tuple[nn.Conv2d, str]]:
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
        if not list(module.children()) or isinstance(module, _BatchNorm)
    ]
    backbone.forward_single(image)
    for hook in hooks:
        hook.remove()
    pairs = [(made_by[tensor], names[0]) for tensor, names in users.items() if tensor in made_by and len(names) == 1]
    return [pair for pair in pairs if isinstance(backbone.net.get_submodule(pair[1]), _BatchNorm)]


def _trial_image(backbone: Backbone) -> Tensor:
    size = backbone.preprocessing.size
    image = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    return image.to(next(backbone.parameters()).device)


def _agree(features: Tensor, expected: Tensor) -> bool:
    limit = _TOLERANCE * expected.abs().max()
    return features.shape == expected.shape and bool((features - expected).abs().max() <= limit)


# ---- onnxruntime -----------------------------------------------------------------------------------------------------


class _SplitFeatures(nn.Module):
    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone.split_features(images)


def _converted(backbone: Backbone, path: Path, threads: int) -> Frozen:
    """The network in onnxruntime, from the cache directory; what is missing, damaged or wrong is converted again."""
    session = _session(path, backbone, threads) if path.exists() else None
    if session is None:
        log.info("converting %s for onnxruntime, once for these weights", backbone.name)
        size = backbone.preprocessing.size
        images = torch.zeros(piece_size(size), 3, size, size)
        model = to_onnx(_SplitFeatures(folded(backbone)), images, ["maps"], fixed_batch=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, model.SerializeToString())
        session = _session(path, backbone, threads)
    if session is None:
        path.unlink(missing_ok=True)
        raise ProtoTreeError("its feature maps differ from torch's")
    return session


@torch.no_grad()
def _session(path: Path, backbone: Backbone, threads: int) -> Frozen | None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 3
    # Threads that wait by spinning take the cores that others need.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # whatever its parser met
        log.warning("%s is damaged and will be made again (%s)", path, type(error).__name__)
        return None

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"images": images.contiguous().numpy()})[0])

    converted, image = Frozen(ONNXRUNTIME, piece_size(backbone.preprocessing.size), run), _trial_image(backbone)
    was_training = backbone.training
    expected = backbone.eval().split_features(image)
    backbone.train(was_training)
    return converted if _agree(converted(image), expected) else None


def _onnx_file(backbone: Backbone) -> Path:
    """Where a converted network lies: named after all that decides what it computes."""
    options = format_options(backbone.options)
    network = f"{_VERSION} {backbone.name} {options} {backbone.feature_level} {backbone.preprocessing.size}"
    digest = hashlib.sha256(network.encode())
    add_tensors(digest, backbone.backbone_state())
    return cache_folder() / "networks" / f"{digest.hexdigest()[:32]}.onnx"


def add_tensors(digest: "hashlib._Hash", tensors: Mapping[str, Tensor]) -> None:
    """Add names and values of tensors to a digest."""
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())


@torch.no_grad()
def to_onnx(module: nn.Module, images: Tensor, outputs: Sequence[str], *, fixed_batch: bool = False) -> Any:
    """Export a module that takes `images` as an ONNX graph, for any batch size or, in half the time, for this one."""
    with _quiet():
        batch = None if fixed_batch else ({0: torch.export.Dim("batch", min=1)},)
        program = torch.export.export(module, (images,), dynamic_shapes=batch)
        names: dict[str, Any] = {"input_names": ["images"], "output_names": list(outputs)}
        options: dict[str, Any] = {"opset_version": OPSET, "dynamo": True, "external_data": False, "verbose": False}
        exported: Any = torch.onnx.export(program, (images,), **names, **options)
    model = exported.model_proto
    for output in () if fixed_batch else model.graph.output:
        output.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's remarks about itself."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in _EXPORT_LOGGERS}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def thread_map(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Map in order, on as many threads as torch has, one torch thread for each item.

    So results do not depend on the number of threads, and threads do not wait for each other over small tensors.
    """
    n_threads, waiting = torch.get_num_threads(), deque[Future[Result]]()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(n_threads) as pool:
            try:
                for item in items:
                    check_stopped()
                    waiting.append(pool.submit(work, item))
                    if len(waiting) > _AHEAD * n_threads:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()
    finally:
        torch.set_num_threads(n_threads)

"""Trees trained with the code that was published with the paper, read without running anything of their files.

Such a tree is one pickled object, `tree.pkl`: the network under `_net`, the 1×1 convolution under `_add_on`, all
prototypes in one tensor, and linked nodes from `_root` down. `docs/method.md` says where that code and ours differ.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.preprocessing import Preprocessing
from prototree.config import Config
from prototree.core import checkpoint
from prototree.core.checkpoint import TRAINED
from prototree.core.model import ProtoTree
from prototree.core.topology import MAX_HEIGHT, Topology
from prototree.data.cub import readable_names
from prototree.errors import CheckpointError, ConfigError, DataError, WeightsError
from prototree.files import write_file
from prototree.integrations.safe_pickle import MAX_BYTES, Stub, read_stubs, tensor_of
from prototree.run import CONFIG, Run

FILE = "tree.pkl"
_MAX_LEVELS, _MAX_NAME_LENGTH, _MAX_TENSORS = 100, 1000, 5000  # far beyond what a network has
_SMALLEST = 1e-300  # stands for a class that a leaf excludes: its logarithm is finite, its probability is 0


def import_reference(
    folder: str | Path, out: str | Path, *, classes: str | Path, backbone: str = "resnet50", image_size: int = 224
) -> Run:
    """Makes a run from a tree that the published code has trained; `classes` is a text file with one name per line.

    Examples:
        >>> run = import_reference("checkpoints/projected", "runs/cub", classes="classes.txt")  # doctest: +SKIP
        >>> run.tree().n_classes  # doctest: +SKIP
        200
    """
    out = Path(out)
    if (out / CONFIG).exists():
        raise ConfigError(f"{out} already holds a run; choose another folder")
    tree = read_reference(folder, classes=classes, backbone=backbone, image_size=image_size)
    height, width = tree.prototypes.shape[2:]
    settings = {
        "recipe": "paper",
        "backbone": backbone,
        "weights": "none",
        "image_size": image_size,
        "resize": image_size,
        "prototype_dim": tree.features.prototype_dim,
        "height": max(tree.topology.height, 1),
        "prototype_height": height,
        "prototype_width": width,
    }
    config = Config().changed(settings)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint.save(tree, out / TRAINED)
    write_file(out / CONFIG, config.to_toml().encode())
    return Run.open(out)


def read_reference(
    folder: str | Path,
    *,
    classes: str | Path,
    backbone: str = "resnet50",
    image_size: int = 224,
    dtype: torch.dtype = torch.float32,
) -> ProtoTree:
    """The tree alone, in evaluation mode; in `torch.float64` its probabilities are the original's to ten digits."""
    path = Path(folder) / FILE if Path(folder).is_dir() else Path(folder)
    root = read_stubs(path)
    try:
        names = _class_names(Path(classes))
        return _tree(root, names, backbone, image_size, dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is no tree of the published code: {error}") from error


def _tree(root: Any, names: list[str], backbone: str, image_size: int, dtype: torch.dtype) -> ProtoTree:
    children, nodes, leaves = _walk(_module(root, "_root"))
    rows = _rows(root, nodes)
    topology, node_order, leaf_order = Topology.from_children(*children, root=0 if nodes else ~0)
    logits = torch.stack([_leaf_logits(leaves[old], root) for old in leaf_order.tolist()])
    if logits.shape[1] != len(names):
        raise DataError(
            f"expected {logits.shape[1]} class names in the file of classes, one in each line, got {len(names)}"
        )
    prototypes = tensor_of(_parameter(_module(root, "prototype_layer"), "prototype_vectors"))
    head = tensor_of(_parameter(_module(root, "_add_on", "0"), "weight"))
    if prototypes.dim() != 4 or head.dim() != 4 or prototypes.shape[1] != head.shape[0]:
        raise CheckpointError(f"prototypes {tuple(prototypes.shape)} do not fit the layer {tuple(head.shape)}")
    features = FeatureExtractor(_network(_module(root, "_net"), backbone, image_size), head.shape[0])
    if features.head.weight.shape != head.shape:
        raise ConfigError(f"{backbone} gives {features.backbone.n_channels} channels, the tree has {head.shape[1]}")
    tree = ProtoTree(topology, features, names, (prototypes.shape[2], prototypes.shape[3])).to(dtype)
    chosen = [rows[old] for old in node_order.tolist()]
    if chosen and max(chosen) >= len(prototypes):
        raise CheckpointError(f"a node refers to prototype {max(chosen)}, but there are {len(prototypes)}")
    tree.load_state_dict({"prototypes": prototypes[chosen], "leaf_logits": logits}, strict=False)
    features.head.load_state_dict({"weight": head})
    tree.preprocessing = Preprocessing(image_size, image_size)  # as the published code shows photos
    return tree.eval()


def _walk(root: Stub) -> tuple[tuple[list[int], list[int]], list[Stub], list[Stub]]:
    """Left and right children by number, and the stubs of nodes and leaves in the order of their numbers."""
    left: list[int] = []
    right: list[int] = []
    nodes: list[Stub] = []
    leaves: list[Stub] = []
    seen: set[int] = set()
    waiting: list[tuple[Stub, list[int] | None, int]] = [(root, None, 0)]
    while waiting:
        stub, side, parent = waiting.pop()
        if id(stub) in seen or len(nodes) >= 2**MAX_HEIGHT:
            raise CheckpointError("its nodes form no tree, or one that is far too large")
        seen.add(id(stub))
        is_leaf = "_dist_params" in _dict(stub, "_parameters")
        if side is not None:
            side[parent] = ~len(leaves) if is_leaf else len(nodes)
        if is_leaf:
            leaves.append(stub)
            continue
        waiting += [(_module(stub, "r"), right, len(nodes)), (_module(stub, "l"), left, len(nodes))]
        nodes.append(stub)
        left.append(0)
        right.append(0)
    return (left, right), nodes, leaves


def _rows(root: Stub, nodes: list[Stub]) -> list[int]:
    """Which prototype each node asks for."""
    places = _attribute(root, "_out_map")
    if not isinstance(places, Mapping):
        raise CheckpointError("it does not say which prototype belongs to which node (_out_map)")
    by_node = {id(node): place for node, place in places.items()}
    rows = [by_node.get(id(node)) for node in nodes]
    if not all(type(row) is int and row >= 0 for row in rows):
        raise CheckpointError("it does not say which prototype belongs to which node (_out_map)")
    return [int(row) for row in rows if row is not None]


def _leaf_logits(leaf: Stub, root: Stub) -> Float[Tensor, " K"]:
    """Numbers whose softmax is the leaf's distribution; with Kontschieder's normalisation it is a share, no softmax."""
    values = tensor_of(_parameter(leaf, "_dist_params"))
    if values.dim() != 1 or not torch.isfinite(values).all():
        raise CheckpointError(f"expected finite numbers for each class in a leaf, found {tuple(values.shape)}")
    if not _attribute(root, "_kontschieder_normalization", default=False):
        return values
    if values.min() < 0 or values.sum() <= 0:
        raise CheckpointError("expected shares that are not negative in a leaf that is normalised by their sum")
    return (values.double() / values.double().sum()).clamp_min(_SMALLEST).log()


def _network(net: Stub, name: str, image_size: int) -> Backbone:
    """The backbone with the weights found, whatever names they have, as `network.weights` knows them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.safetensors"
        file.write_bytes(safetensors.torch.save(_state(net)))
        try:
            return Backbone(name, file, image_size=image_size)
        except WeightsError as error:  # the file that was just made means nothing to its reader
            raise WeightsError(str(error).replace(str(file), f"the network in {FILE}")) from error


def _state(module: Stub) -> dict[str, Tensor]:
    """Parameters and buffers by name, as `state_dict` would give them."""
    state: dict[str, Tensor] = {}
    n_bytes = 0
    waiting = [("", module)]
    seen: set[int] = set()
    while waiting:
        prefix, stub = waiting.pop()
        if id(stub) in seen or prefix.count(".") > _MAX_LEVELS:
            raise CheckpointError("its network contains itself, or has far too many levels")
        seen.add(id(stub))
        for name, value in [*_dict(stub, "_parameters").items(), *_dict(stub, "_buffers").items()]:
            if value is not None:
                tensor = state[f"{prefix}{_checked_name(name)}"] = tensor_of(value)
                n_bytes += tensor.nbytes
            if len(state) > _MAX_TENSORS or n_bytes > MAX_BYTES:  # many names may stand for the same numbers
                raise CheckpointError("its network has far too many tensors")
        modules = [(_checked_name(name), one) for name, one in _dict(stub, "_modules").items()]
        waiting += [(f"{prefix}{name}.", one) for name, one in modules if isinstance(one, Stub)]
    return state


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name.isprintable() or len(name) > _MAX_NAME_LENGTH:
        raise CheckpointError(f"its network calls a part {ascii(name)[:60]}; expected a name as modules have")
    return name


def _module(stub: Any, *names: str) -> Stub:
    for name in names:
        stub = _dict(stub, "_modules").get(name)
        if not isinstance(stub, Stub):
            raise CheckpointError(f"its part {name!r} is missing")
    return stub  # type: ignore[no-any-return]


def _parameter(stub: Stub, name: str) -> Any:
    found = _dict(stub, "_parameters").get(name)
    if found is None:
        raise CheckpointError(f"its numbers {name!r} are missing")
    return found


def _dict(stub: Any, name: str) -> Mapping[str, Any]:
    found = _attribute(stub, name, default={})
    if not isinstance(found, Mapping):
        raise CheckpointError(f"its {name} are damaged")
    return found


_NOTHING = object()


def _attribute(stub: Any, name: str, default: Any = _NOTHING) -> Any:
    if not isinstance(stub, Stub) or not isinstance(stub.state, Mapping):
        raise CheckpointError("it holds something else")
    if name not in stub.state and default is _NOTHING:
        raise CheckpointError(f"its {name} is missing")
    return stub.state.get(name, default)


def _class_names(file: Path) -> list[str]:
    """A name in each line; lines of CUB's `classes.txt` become the names that its photos have here."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as a list of class names: {error}") from error
    cells = [line.split(maxsplit=1) for line in lines]
    if all(len(row) == 2 and row[0].isdecimal() for row in cells):
        return list(readable_names([name for _, name in cells]))
    return lines

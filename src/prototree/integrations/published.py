"""Import trees trained with the code that was published with the paper, without running anything of their files.

Such a tree is one pickled object, `tree.pkl`: the network under `_net`, the 1×1 convolution under `_add_on`, all
prototypes in one tensor, and linked nodes from `_root` down. `docs/research/method.md` says where that code and
ours differ.

Python's own unpickler calls whatever a file names. Here every name becomes a stand-in that remembers its arguments and
state, and only stand-ins for stored tensors are read as such, within what the file really holds. Nor does a small file
take long or much: nothing is hashed but names, whole numbers and stand-ins, and nothing is read beyond the file's end.
"""

import io
import math
import pickle
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.geometry import Preprocessing
from prototree.config import Config
from prototree.core import checkpoint
from prototree.core.checkpoint import TRAINED
from prototree.core.model import ProtoTree
from prototree.core.topology import MAX_HEIGHT, Topology
from prototree.data.cub_cars import readable_names
from prototree.errors import CheckpointError, ConfigError, DataError, WeightsError
from prototree.io import write_file
from prototree.run import CONFIG, Run

FILE = "tree.pkl"
MAX_BYTES = 4 * 2**30
_TENSORS = {"torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"}
_PARAMETERS = {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
_STORAGE = "torch.storage._load_from_bytes"
_DTYPES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.LongStorage": torch.int64,
}
# Far beyond what a saved tree has.
_MAX_NAMES, _MAX_NAME_LENGTH, _MAX_ARGS, _MAX_DIMS, _MAX_LEVELS, _MAX_TENSORS = 1000, 1000, 100, 8, 100, 5000
_SMALLEST = 1e-300  # stands for a class that a leaf excludes: its logarithm is finite, its probability is 0
# What the unpickler raises on files that are cut short, damaged, or made to break it.
_DAMAGE = (pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, ImportError, LookupError, MemoryError,
           RecursionError, RuntimeError, TypeError, ValueError, struct.error)  # fmt: skip


def import_published(
    folder: str | Path, out: str | Path, *, classes: str | Path, backbone: str = "resnet50", image_size: int = 224
) -> Run:
    """Make a run from a tree that the published code has trained; `classes` is a text file with one name per line.

    Examples:
        >>> run = import_published("checkpoints/projected", "runs/cub", classes="classes.txt")  # doctest: +SKIP
        >>> run.tree().n_classes  # doctest: +SKIP
        200
    """
    out = Path(out)
    if (out / CONFIG).exists():
        raise ConfigError(f"{out} already holds a run; choose another folder")
    tree = read_published(folder, classes=classes, backbone=backbone, image_size=image_size)
    config = Config().replace(
        {"recipe": "paper", "backbone": backbone, "weights": "none", "image_size": image_size, "resize": image_size}
        | {"prototype_dim": tree.features.prototype_dim, "prototype_size": max(tree.prototypes.shape[2:])}
        | {"height": max(tree.topology.height, 1)}
    )
    out.mkdir(parents=True, exist_ok=True)
    checkpoint.save(tree, out / TRAINED)
    write_file(out / CONFIG, config.to_toml().encode())
    return Run.open(out)


def read_published(
    folder: str | Path,
    *,
    classes: str | Path,
    backbone: str = "resnet50",
    image_size: int = 224,
    dtype: torch.dtype = torch.float32,
) -> ProtoTree:
    """Read the tree alone, in evaluation mode; in `torch.float64` it agrees with the original to ten digits."""
    path = Path(folder) / FILE if Path(folder).is_dir() else Path(folder)
    root = read_pickle(path)
    names = _class_names(Path(classes))
    try:
        return _build_tree(root, names, backbone, image_size, dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is no tree of the published code: {error}") from error


def _build_tree(root: Any, names: list[str], backbone: str, image_size: int, dtype: torch.dtype) -> ProtoTree:
    children, nodes, leaves = _walk(_field(root, "_modules", "_root"))
    topology, node_order, leaf_order = Topology.from_children(*children, root=0 if nodes else ~0)
    logits = torch.stack([_leaf_logits(leaves[index], root) for index in leaf_order.tolist()])
    if logits.shape[1] != len(names):
        raise DataError(f"expected {logits.shape[1]} class names, one in each line of the file, got {len(names)}")
    prototypes = read_tensor(_field(root, "_modules", "prototype_layer", "_parameters", "prototype_vectors"))
    head = read_tensor(_field(root, "_modules", "_add_on", "_modules", "0", "_parameters", "weight"))
    if prototypes.dim() != 4 or head.dim() != 4 or prototypes.shape[1] != head.shape[0]:
        raise CheckpointError(f"prototypes {tuple(prototypes.shape)} do not fit the layer {tuple(head.shape)}")
    features = FeatureExtractor(_network(_field(root, "_modules", "_net"), backbone, image_size), head.shape[0])
    if features.head.weight.shape != head.shape:
        raise ConfigError(f"{backbone} gives {features.backbone.n_channels} channels, the tree has {head.shape[1]}")
    tree = ProtoTree(topology, features, names, (prototypes.shape[2], prototypes.shape[3])).to(dtype)
    row_of = {id(node): row for node, row in _mapping(root, "_out_map").items()}
    rows = [row_of.get(id(nodes[index])) for index in node_order.tolist()]
    if not all(type(row) is int and 0 <= row < len(prototypes) for row in rows):
        raise CheckpointError(
            f"expected one of {len(prototypes)} prototypes for each node (_out_map), found {rows[:9]}"
        )
    tree.load_state_dict({"prototypes": prototypes[rows], "leaf_logits": logits}, strict=False)
    features.head.load_state_dict({"weight": head})
    tree.preprocessing = Preprocessing(image_size, image_size)  # as the published code shows images
    return tree.eval()


def _walk(root: Any) -> tuple[tuple[list[int], list[int]], list[Any], list[Any]]:
    """Number the nodes: left and right children, and the stand-ins of nodes and leaves in that order."""
    left, right, nodes, leaves, seen = list[int](), list[int](), list[Any](), list[Any](), set[int]()
    waiting: list[tuple[Any, list[int], int]] = [(root, [0], 0)]
    while waiting:
        stub, side, parent = waiting.pop()
        if id(stub) in seen or len(nodes) >= 2**MAX_HEIGHT:
            raise CheckpointError("its nodes form no tree, or one that is far too large")
        seen.add(id(stub))
        is_leaf = "_dist_params" in _mapping(stub, "_parameters")
        side[parent] = ~len(leaves) if is_leaf else len(nodes)
        if is_leaf:
            leaves.append(stub)
            continue
        waiting += [(_field(stub, "_modules", name), s, len(nodes)) for name, s in (("r", right), ("l", left))]
        nodes.append(stub)
        left.append(0)
        right.append(0)
    return (left, right), nodes, leaves


def _leaf_logits(leaf: Any, root: Any) -> Float[Tensor, " K"]:
    """Give logits whose softmax is the leaf's distribution; Kontschieder's normalisation divides by the sum."""
    values = read_tensor(_field(leaf, "_parameters", "_dist_params"))
    if values.dim() != 1 or not torch.isfinite(values).all():
        raise CheckpointError(f"expected finite numbers for each class in a leaf, found {tuple(values.shape)}")
    if not root.state.get("_kontschieder_normalization"):
        return values
    if values.min() < 0 or values.sum() <= 0:
        raise CheckpointError("expected numbers that are not negative in a leaf that is normalised by their sum")
    return (values.double() / values.double().sum()).clamp_min(_SMALLEST).log()


def _network(module: Any, name: str, image_size: int) -> Backbone:
    """Build the backbone from its parameters and buffers, named as in a `state_dict`."""
    state, n_bytes, waiting, seen = dict[str, Tensor](), 0, [("", module)], set[int]()
    while waiting:
        prefix, stub = waiting.pop()
        if id(stub) in seen or prefix.count(".") > _MAX_LEVELS:
            raise CheckpointError("its network contains itself, or has too many levels")
        seen.add(id(stub))
        parts = {**_mapping(stub, "_parameters"), **_mapping(stub, "_buffers"), **_mapping(stub, "_modules")}
        for key, value in parts.items():
            if not isinstance(key, str) or not key.isprintable() or len(key) > _MAX_NAME_LENGTH:
                raise CheckpointError(f"its network calls a part {ascii(key)[:60]}; expected a name as modules have")
            if isinstance(value, Stub) and isinstance(value.state, Mapping):
                waiting.append((f"{prefix}{key}.", value))
            elif value is not None:
                state[f"{prefix}{key}"] = read_tensor(value)
                n_bytes += state[f"{prefix}{key}"].nbytes
            if len(state) > _MAX_TENSORS or n_bytes > MAX_BYTES:  # many names may stand for the same numbers
                raise CheckpointError("its network has far too many tensors")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.safetensors"
        file.write_bytes(safetensors.torch.save(state))
        try:
            return Backbone(name, file, image_size=image_size)
        except WeightsError as error:  # the file that was just made means nothing to its reader
            raise WeightsError(str(error).replace(str(file), f"the network in {FILE}")) from error


def _field(stub: Any, *names: str) -> Any:
    """Follow attributes of a stand-in and keys of dictionaries."""
    for name in names:
        fields = stub.state if isinstance(stub, Stub) else stub
        if not isinstance(fields, Mapping) or name not in fields:
            raise CheckpointError(f"its {'.'.join(names)} is missing")
        stub = fields[name]
    return stub


def _mapping(stub: Any, name: str) -> Mapping[Any, Any]:
    fields = _field(stub, name)
    if not isinstance(fields, Mapping):
        raise CheckpointError(f"its {name} are damaged")
    return fields


def _class_names(file: Path) -> list[str]:
    """Read a name from each line; lines of CUB's `classes.txt` become the names that its images have here."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as a list of class names: {error}") from error
    cells = [line.split(maxsplit=1) for line in lines]
    if all(len(row) == 2 and row[0].isdecimal() for row in cells):
        return list(readable_names([name for _, name in cells]))
    return lines


class Stub:
    """A stand-in for what a pickle would have made of a class or a function."""

    name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **options: Any) -> "Stub":
        if len(args) > _MAX_ARGS:  # they are copied at every call, however short the call is in the file
            raise pickle.UnpicklingError(f"a call with {len(args)} arguments")
        stub = super().__new__(cls)
        stub.args, stub.state = args, None
        return stub

    def __init__(self, *args: Any, **options: Any) -> None:
        """Takes anything."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class StubDict(dict[Any, Any]):
    """A stand-in for an ordered dictionary, whatever it was made with; it has no state but its items."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        """Takes anything."""


_Load = Callable[[Any], None]
_load: dict[int, _Load] = pickle._Unpickler.dispatch


def _with_checked_keys(opcode: bytes, keys: slice) -> _Load:
    """Refuse keys whose hash takes longer than reading them, such as a tuple of tuples of tuples."""

    def load(reader: Any) -> None:
        for key in reader.stack[keys]:
            if not isinstance(key, Stub | str | None) and not (isinstance(key, int) and key.bit_length() <= 64):
                raise pickle.UnpicklingError(f"expected names and whole numbers as keys, found a {type(key).__name__}")
        _load[opcode[0]](reader)

    return load


# The unpickler written in Python: the one in C takes memory for any number that a file claims (its memo is an array).
class _StubUnpickler(pickle._Unpickler):
    dispatch = _load | {
        pickle.SETITEM[0]: _with_checked_keys(pickle.SETITEM, slice(-2, -1)),
        pickle.SETITEMS[0]: _with_checked_keys(pickle.SETITEMS, slice(0, None, 2)),
        pickle.DICT[0]: _with_checked_keys(pickle.DICT, slice(0, None, 2)),
        pickle.ADDITEMS[0]: _with_checked_keys(pickle.ADDITEMS, slice(None)),
        pickle.FROZENSET[0]: _with_checked_keys(pickle.FROZENSET, slice(None)),
        pickle.BYTEARRAY8[0]: _load[pickle.BINBYTES8[0]],  # which reads before it takes memory
    }

    def __init__(self, file: io.BytesIO, *, keep_ids: bool = False) -> None:
        super().__init__(file)
        self._stubs: dict[tuple[str, str], type] = {}
        self._keep_ids = keep_ids

    def find_class(self, module: str, name: str) -> type:
        key = (str(module), str(name))
        if len(self._stubs) >= _MAX_NAMES or len(module) + len(name) > _MAX_NAME_LENGTH:
            raise pickle.UnpicklingError("more or longer names of classes than a saved tree has")
        if key not in self._stubs:
            kind: type = StubDict if key == ("collections", "OrderedDict") else Stub
            self._stubs[key] = type(kind.__name__, (kind,), {"name": f"{key[0]}.{key[1]}"})
        return self._stubs[key]

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError("the file refers to Python's registry of extensions")

    def persistent_load(self, pid: Any) -> Any:
        if not self._keep_ids:
            raise pickle.UnpicklingError("the file refers to something outside of it")
        return pid


def read_pickle(path: Path) -> Any:
    """Read a pickle with stand-ins in place of all that is not plain data."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_BYTES >> 30} GiB; expected a pickled tree")
        return _StubUnpickler(io.BytesIO(path.read_bytes())).load()  # in memory no more is read than is there
    except OSError as error:
        raise CheckpointError(f"expected a pickled tree, but {path} cannot be read ({error.strerror})") from error
    except _DAMAGE as error:
        raise CheckpointError(f"{path} cannot be read as a pickle ({str(error)[:200]}); download it again") from error


def read_tensor(stub: Any) -> Tensor:
    """Read the tensor or parameter that a stand-in stands for."""
    if isinstance(stub, Stub) and stub.name in _PARAMETERS and stub.args:
        stub = stub.args[0]
    if not isinstance(stub, Stub) or stub.name not in _TENSORS or len(stub.args) < 4:
        raise CheckpointError(f"expected a stored tensor, found {getattr(stub, 'name', type(stub).__name__)}")
    values = _read_storage(stub.args[0])
    size, stride, (offset,) = (_whole_numbers(numbers) for numbers in (stub.args[2], stub.args[3], [stub.args[1]]))
    end = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=False)) + 1
    count = math.prod(size)
    # Strides of 0 could make one number look like millions.
    if len(size) != len(stride) or len(size) > _MAX_DIMS or count > len(values) or (count and end > len(values)):
        raise CheckpointError(f"a stored tensor is damaged: {size} numbers claimed, {len(values)} are there")
    return values.as_strided(size, stride, offset).clone()


def _read_storage(stub: Any) -> Tensor:
    """Read a stored block of numbers: five pickles that describe it, their count, and the numbers as they are.

    Torch's own loader would unpickle the bytes without any care, or hash whatever they hold.
    """
    if not isinstance(stub, Stub) or stub.name != _STORAGE or len(stub.args) != 1 or type(stub.args[0]) is not bytes:
        raise CheckpointError("expected the bytes of a stored tensor, found something else")
    file = io.BytesIO(stub.args[0])
    try:
        _, _, machine, about, _ = (_StubUnpickler(file, keep_ids=True).load() for _ in range(5))
        (count,) = struct.unpack("<q", file.read(8))
        dtype = _DTYPES.get(about[1].name) if machine["little_endian"] else None
    except _DAMAGE as error:
        raise CheckpointError(f"the numbers of a stored tensor cannot be read ({str(error)[:200]})") from error
    numbers = bytearray(file.read())
    if dtype is None or count < 0 or len(numbers) != count * dtype.itemsize:
        raise CheckpointError(f"a stored tensor is damaged: {count} of {about[1].name}, {len(numbers)} bytes are there")
    return torch.frombuffer(numbers, dtype=dtype) if count else torch.empty(0, dtype=dtype)


def _whole_numbers(values: Any) -> list[int]:
    if isinstance(values, Stub) and values.name == "torch.Size" and len(values.args) == 1:
        values = values.args[0]
    if not isinstance(values, tuple | list) or not all(type(value) is int and 0 <= value < 2**40 for value in values):
        raise CheckpointError("a stored tensor is damaged: expected its size in whole numbers")
    return list(values)

"""A pickle read as plain data: every class and function in it becomes a stub, and nothing of the file is ever run.

Python's own unpickler calls whatever a file names. This one knows no name: what a file would have built stays a `Stub`
that remembers its name, arguments and state. Only afterwards, and only by `tensor_of`, are stubs that stand for stored
tensors read as such, within what the file really holds.

Nor does a small file take long or much: no value is hashed but names, whole numbers and stubs (the hash of a tuple of
tuples can take for ever, or all of the stack), and nothing is read or repeated beyond the length of the file.
"""

import io
import math
import pickle
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prototree.errors import CheckpointError

MAX_BYTES = 4 * 2**30
_TENSORS = {"torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"}
_PARAMETERS = {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
_STORAGE = "torch.storage._load_from_bytes"
_DTYPES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
}
# Far beyond what a saved tree has.
_MAX_DEPTH, _MAX_NAMES, _MAX_NAME_LENGTH, _MAX_ARGS, _MAX_DIMS = 1000, 1000, 1000, 100, 8
# What the unpickler raises on files that are cut short, damaged, or made to break it.
_DAMAGE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)


class Stub:
    """What a pickle would have made of a class or a function."""

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
    """Stands for an ordered dictionary, whatever it was made with."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        """Has no state but its items."""


class _Bounded:
    """A file of which no more can be asked for than it has: Python takes the memory before it reads."""

    def __init__(self, file: io.BufferedIOBase, size: int) -> None:
        self.readline = file.readline
        self._file, self._size = file, size

    def read(self, count: int) -> bytes:
        if count > self._size:
            raise pickle.UnpicklingError(f"{count} bytes claimed, the file has {self._size}")
        return self._file.read(count)


def _check_keys(keys: Iterable[Any]) -> None:
    """Refuses keys whose hash takes longer than reading them."""
    for key in keys:
        if isinstance(key, Stub | str | None) or (isinstance(key, int) and key.bit_length() <= 64):
            continue
        raise pickle.UnpicklingError(f"expected names and whole numbers as keys, found a {type(key).__name__}")


_Load = Callable[[Any], None]
_load: dict[int, _Load] = pickle._Unpickler.dispatch


def _with_checked_keys(opcode: bytes, keys: slice) -> _Load:
    def load(reader: Any) -> None:
        _check_keys(reader.stack[keys])
        _load[opcode[0]](reader)

    return load


def _load_mark(reader: Any) -> None:
    if len(reader.metastack) >= _MAX_DEPTH:
        raise pickle.UnpicklingError(f"more than {_MAX_DEPTH} levels")
    _load[pickle.MARK[0]](reader)


def _load_build(reader: Any) -> None:
    if not isinstance(reader.stack[-2], Stub | StubDict):  # a class would be changed for all who use it
        raise pickle.UnpicklingError(f"a state for a {type(reader.stack[-2]).__name__}")
    _load[pickle.BUILD[0]](reader)


# The unpickler written in Python: the one in C takes memory for any number that a file claims (its memo is an array).
class _StubUnpickler(pickle._Unpickler):
    dispatch = _load | {
        pickle.SETITEM[0]: _with_checked_keys(pickle.SETITEM, slice(-2, -1)),
        pickle.SETITEMS[0]: _with_checked_keys(pickle.SETITEMS, slice(0, None, 2)),
        pickle.DICT[0]: _with_checked_keys(pickle.DICT, slice(0, None, 2)),
        pickle.ADDITEMS[0]: _with_checked_keys(pickle.ADDITEMS, slice(None)),
        pickle.FROZENSET[0]: _with_checked_keys(pickle.FROZENSET, slice(None)),
        pickle.MARK[0]: _load_mark,
        pickle.BUILD[0]: _load_build,
        pickle.BYTEARRAY8[0]: _load[pickle.BINBYTES8[0]],  # which reads before it takes memory
    }

    def __init__(self, file: io.BufferedIOBase, size: int) -> None:
        super().__init__(_Bounded(file, size))
        self._stubs: dict[tuple[str, str], type] = {}

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
        raise pickle.UnpicklingError("the file refers to something outside of it")


class _StorageUnpickler(_StubUnpickler):
    """Reads the pickles before a stored block, one of which says what the block is as an id."""

    def persistent_load(self, pid: Any) -> Any:
        return pid


def read_stubs(path: Path) -> Any:
    """The content of a pickle, with stubs in place of all that is not plain data."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_BYTES >> 30} GiB; expected a pickled tree")
        with open(path, "rb") as file:
            return _StubUnpickler(file, size).load()
    except OSError as error:
        raise CheckpointError(f"expected a pickled tree, but {path} cannot be read ({error.strerror})") from error
    except _DAMAGE as error:
        raise CheckpointError(f"{path} cannot be read as a pickle ({_say(error)}); download it again") from error


def tensor_of(stub: Any) -> Tensor:
    """The tensor or parameter that a stub stands for."""
    if isinstance(stub, Stub) and stub.name in _PARAMETERS and stub.args:
        stub = stub.args[0]
    if not isinstance(stub, Stub) or stub.name not in _TENSORS or len(stub.args) < 4:
        found = stub.name if isinstance(stub, Stub) else type(stub).__name__
        raise CheckpointError(f"expected a stored tensor, found {found}")
    storage, offset = stub.args[:2]
    size, stride, [offset] = _whole_numbers(stub.args[2]), _whole_numbers(stub.args[3]), _whole_numbers([offset])
    values = _storage_of(storage)
    if len(size) != len(stride) or len(size) > _MAX_DIMS:
        raise CheckpointError("a stored tensor is damaged: its size and strides do not fit together")
    reach = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
    # Strides of 0 could make one number look like millions.
    count: int = math.prod(size)
    if count > len(values) or (count and reach > len(values)):
        raise CheckpointError(f"a stored tensor is damaged: {size} numbers claimed, {len(values)} are there")
    return values.as_strided(size, stride, offset).clone()


def _storage_of(stub: Any) -> Float[Tensor, " n"] | Int[Tensor, " n"]:
    """The numbers in a stored block: five pickles that describe it, their count, and the numbers as they are.

    Torch's own loader would unpickle the bytes without any care, or hash whatever they hold.
    """
    if (
        not isinstance(stub, Stub)
        or stub.name != _STORAGE
        or len(stub.args) != 1
        or not isinstance(stub.args[0], bytes)
    ):
        raise CheckpointError("expected the bytes of a stored tensor, found something else")
    content = stub.args[0]
    file = io.BytesIO(content)
    try:
        _, _, machine, described, _ = (_StorageUnpickler(file, len(content)).load() for _ in range(5))
        (count,) = struct.unpack("<q", file.read(8))
        kind, is_little_endian = described[1].name, machine["little_endian"]
    except _DAMAGE as error:
        raise CheckpointError(f"the numbers of a stored tensor cannot be read ({_say(error)})") from error
    dtype = _DTYPES.get(kind)
    if dtype is None or not is_little_endian:
        raise CheckpointError(f"expected little-endian {', '.join(_DTYPES)} in a stored tensor, found {kind}")
    numbers = bytearray(file.read())
    if count < 0 or len(numbers) != count * dtype.itemsize:
        raise CheckpointError(f"a stored tensor is damaged: {count} numbers claimed, {len(numbers)} bytes are there")
    return torch.frombuffer(numbers, dtype=dtype) if count else torch.empty(0, dtype=dtype)


def _whole_numbers(values: Any) -> list[int]:
    if isinstance(values, Stub) and values.name == "torch.Size" and len(values.args) == 1:
        values = values.args[0]
    if not isinstance(values, tuple | list) or not all(type(one) is int and 0 <= one < 2**40 for one in values):
        raise CheckpointError("a stored tensor is damaged: expected its size in whole numbers")
    return [int(one) for one in values]


def _say(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__

"""A pickle read as plain data: every class and function in it becomes a stub, and nothing of the file is ever run.

Python's own unpickler calls whatever a file names. This one knows no name: what a file would have built stays a `Stub`
that remembers its name, arguments and state. Only afterwards, and only by `tensor_of`, are stubs that stand for stored
tensors read as such, within what the file really holds.
"""

import io
import math
import pickle
import struct
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prototree.errors import CheckpointError

MAX_BYTES = 4 * 2**30
_TENSORS = {"torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"}
_PARAMETERS = {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
_STORAGE = "torch.storage._load_from_bytes"
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


# The unpickler written in Python: the one in C takes memory for any number that a file claims (its memo is an array).
class _StubUnpickler(pickle._Unpickler):
    def __init__(self, file: io.BufferedIOBase) -> None:
        super().__init__(file)
        self._stubs: dict[tuple[str, str], type] = {("collections", "OrderedDict"): StubDict}

    def find_class(self, module: str, name: str) -> type:
        key = (str(module), str(name))
        if key not in self._stubs:
            self._stubs[key] = type("Stub", (Stub,), {"name": f"{key[0]}.{key[1]}"})
        return self._stubs[key]

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError("the file refers to Python's registry of extensions")

    def persistent_load(self, pid: Any) -> None:
        raise pickle.UnpicklingError("the file refers to something outside of it")


def read_stubs(path: Path) -> Any:
    """The content of a pickle, with stubs in place of all that is not plain data."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_BYTES >> 30} GiB; expected a pickled tree")
        with open(path, "rb") as file:
            return _StubUnpickler(file).load()
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
    size, stride = _whole_numbers(stub.args[2]), _whole_numbers(stub.args[3])
    values = _storage_of(storage)
    if len(size) != len(stride) or not isinstance(offset, int) or offset < 0:
        raise CheckpointError("a stored tensor is damaged: its size and strides do not fit together")
    reach = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
    # Strides of 0 could make one number look like millions.
    count: int = math.prod(size)
    if count > len(values) or (count and reach > len(values)):
        raise CheckpointError(f"a stored tensor is damaged: {size} numbers claimed, {len(values)} are there")
    return values.as_strided(size, stride, offset).clone()


def _storage_of(stub: Any) -> Tensor:
    """The numbers in a stored block; torch's own loader would unpickle its bytes without any care."""
    if (
        not isinstance(stub, Stub)
        or stub.name != _STORAGE
        or len(stub.args) != 1
        or not isinstance(stub.args[0], bytes)
    ):
        raise CheckpointError("expected the bytes of a stored tensor, found something else")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's about its own storages
            found = torch.load(io.BytesIO(stub.args[0]), map_location="cpu", weights_only=True)
            values = torch.tensor([], dtype=found.dtype).set_(found)
    except _DAMAGE as error:
        raise CheckpointError(f"the numbers of a stored tensor cannot be read ({_say(error)})") from error
    if values.dim() != 1 or not (values.is_floating_point() or values.dtype == torch.int64):
        raise CheckpointError(f"expected floating-point or whole numbers in a stored tensor, found {values.dtype}")
    return values


def _whole_numbers(values: Any) -> list[int]:
    if isinstance(values, Stub) and values.name == "torch.Size" and len(values.args) == 1:
        values = values.args[0]
    if not isinstance(values, tuple | list) or not all(type(one) is int and 0 <= one < 2**40 for one in values):
        raise CheckpointError("a stored tensor is damaged: expected its size in whole numbers")
    return [int(one) for one in values]


def _say(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__

"""What `tree.json` and the weights beside it may say. All of it is checked before anything is built from it.

One table names every field with its kind and range; a field that is missing, unknown, of another type or out of range
is an error that says where. Sizes are bounded here, so that no file makes the program take more time or memory than its
own length accounts for: what the file describes is first built in outline, on torch's `meta` device, where a tensor is
only a shape, and compared with the tensors that are there.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor

from prototree.errors import CheckpointError
from prototree.network.preprocessing import MAX_SIDE
from prototree.tree.model import ProtoTree
from prototree.tree.questions import REACH_RANGE, SHARPNESS_RANGE
from prototree.tree.topology import MAX_HEIGHT, Topology

MAX_CLASSES = 2**20
MAX_WIDTH = 65_536  # of prototypes and of hidden layers
_MAX_PATHS = 2**27  # leaves × height: what the tree's table of paths takes
_SHOWN = 60

Name = tuple[str | int, ...]
"""Keys and positions, from the whole inwards."""

Check = Callable[[Any, Name], None]
"""Raises a `CheckpointError` if the value, called by this name, is not what it should be."""


def check_header(header: Mapping[str, Any]) -> None:
    """Every field of a tree's description by itself, then what they say together."""
    _record(_FIELDS)(header, ())
    n_nodes = len(header["topology"]["left"])
    n_prototypes = n_nodes * (2 if header["question"]["kind"] == "choice" else 1)
    sources = header["prototypes"]["sources"]
    if len(header["topology"]["right"]) != n_nodes:
        raise _wrong(("topology", "right"), f"{n_nodes} children, as many as on the left", header["topology"]["right"])
    if len(sources) != n_prototypes:
        raise CheckpointError(f"prototypes.sources: expected one for each of {n_prototypes}, got {len(sources)}")
    label = _integer(0, len(header["classes"]) - 1)
    for number, source in enumerate(sources):
        if source is not None:
            label(source["label"], ("prototypes", "sources", number, "label"))
    low, high = SHARPNESS_RANGE[header["question"]["kind"]]
    _number(low, high)(header["question"]["sharpness"], ("question", "sharpness"))
    _integer(1, header["preprocessing"]["resize"])(header["preprocessing"]["size"], ("preprocessing", "size"))


def check_height(topology: Topology) -> None:
    """Refuses a tree so lopsided that its table of paths would take more memory than all the rest."""
    depth = [1] * topology.n_nodes
    for node, children in enumerate(zip(topology.left.tolist(), topology.right.tolist(), strict=True)):
        for child in children:
            if child >= 0:
                depth[child] = depth[node] + 1  # nodes are numbered level by level: parents come first
    if topology.n_leaves * max(depth, default=0) > _MAX_PATHS:
        raise CheckpointError(
            f"topology: expected a balanced tree, got {topology.n_leaves} leaves at {max(depth)} levels"
        )


def check_fit(outline: ProtoTree, sources: Iterable[Mapping[str, Any] | None], tensors: Mapping[str, Tensor]) -> None:
    """Whether the tensors are those of the tree in outline, and its sources patches of its map."""
    expected = outline.state_dict()
    for name in (*expected, *tensors):
        if name not in tensors or name not in expected:
            what = "missing" if name in expected else "of no part of the tree"
            raise CheckpointError(f"the weights do not fit: {name} is {what}")
    for name, wanted in expected.items():
        tensor = tensors[name]
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            raise CheckpointError(f"the weights do not fit: expected {name} of {_kind(wanted)}, got {_kind(tensor)}")
    rows, columns = outline.grid.shape
    for number, source in enumerate(sources):
        if source is not None and not outline.grid.holds(*source["patch"]):
            raise _wrong(("prototypes", "sources", number, "patch"), f"a place of {rows} × {columns}", source["patch"])


def check_values(tensors: Mapping[str, Tensor]) -> None:
    """Refuses numbers that are none: a tree with NaN in it would still answer."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise CheckpointError(f"the weights hold numbers that are not finite (in {name})")
    low, high = REACH_RANGE
    reach = tensors["reach"]
    if not ((reach >= low) & (reach <= high)).all():
        raise CheckpointError(f"expected reaches from {low:g} to {high:g}, got {reach.min():g} to {reach.max():g}")
    if (tensors["usual"] < 0).any():
        raise CheckpointError(f"expected usual distances of at least 0, got {tensors['usual'].min():g}")


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _wrong(name: Name, expected: str, got: Any) -> CheckpointError:
    shown = repr(got)
    return CheckpointError(
        f"{_said(name)}: expected {expected}, got {shown[:_SHOWN]}{'…' if len(shown) > _SHOWN else ''}"
    )


def _said(name: Name) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in name).lstrip(".")


def _integer(low: int, high: int) -> Check:
    def check(value: Any, name: Name) -> None:
        if type(value) is not int or not low <= value <= high:
            raise _wrong(name, f"a whole number from {low} to {high}", value)

    return check


def _number(low: float = -math.inf, high: float = math.inf) -> Check:
    def check(value: Any, name: Name) -> None:
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise _wrong(name, f"a number from {low:g} to {high:g}", value)

    return check


def _text(value: Any, name: Name) -> None:
    if not isinstance(value, str):
        raise _wrong(name, "a text", value)


def _truth(value: Any, name: Name) -> None:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)


def _one_of(*values: Any) -> Check:
    def check(value: Any, name: Name) -> None:
        if not isinstance(value, str) or value not in values:
            raise _wrong(name, " or ".join(map(repr, values)), value)

    return check


def _list(each: Check, shortest: int, longest: int) -> Check:
    def check(value: Any, name: Name) -> None:
        if not isinstance(value, list) or not shortest <= len(value) <= longest:
            count = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
            raise _wrong(name, f"a list of {count}", value)
        for number, one in enumerate(value):
            each(one, (*name, number))

    return check


def _record(fields: Mapping[str, Check]) -> Check:
    def check(value: Any, name: Name) -> None:
        if not isinstance(value, Mapping):
            raise _wrong(name, "an object", value)
        if odd := value.keys() ^ fields.keys():
            key = min(odd, key=str)
            raise CheckpointError(f"{_said((*name, str(key)))} is {'not known' if key in value else 'missing'}")
        for key, one in fields.items():
            one(value[key], (*name, key))

    return check


def _perhaps(check_value: Check) -> Check:
    return lambda value, name: None if value is None else check_value(value, name)


def _box(value: Any, name: Name) -> None:
    _list(_number(), 4, 4)(value, name)
    if value[0] > value[2] or value[1] > value[3]:
        raise _wrong(name, "left <= right and top <= bottom", value)


def _photo(value: Any, name: Name) -> None:
    _text(value, name)
    if not value or PurePosixPath(value).is_absolute() or "\0" in value:
        raise _wrong(name, "a path within the data", value)


_SOURCE = _record(
    {
        "image": _photo,
        "label": _integer(0, MAX_CLASSES),
        "view": _text,
        "patch": _list(_integer(0, MAX_SIDE), 2, 2),
        "box": _box,
        "distance": _number(0.0),
        "region": _perhaps(_box),
        "flip": _truth,
        "shown": _perhaps(_box),
    }
)
_CHILDREN = _list(_integer(-(2**MAX_HEIGHT), 2**MAX_HEIGHT), 0, 2**MAX_HEIGHT - 1)
_RGB = _list(_number(-1e6, 1e6), 3, 3)
_FIELDS: dict[str, Check] = {
    "kind": _one_of("prototree"),
    "version": _integer(1, 1000),
    "classes": _list(_text, 2, MAX_CLASSES),
    "topology": _record({"left": _CHILDREN, "right": _CHILDREN}),
    "prototypes": _record(
        {
            "depth": _integer(1, MAX_WIDTH),
            "size": _list(_integer(1, MAX_SIDE), 2, 2),
            "sources": _list(_perhaps(_SOURCE), 0, 2 ** (MAX_HEIGHT + 1)),
        }
    ),
    "question": _record({"kind": _one_of(*SHARPNESS_RANGE), "sharpness": _number()}),
    "sureness": _record(
        {
            "slope": _number(),
            "offset": _number(),
            "n_photos": _integer(0, 2**40),
            "least": _number(0.0, 1.0),
            "farthest": _number(0.0),
        }
    ),
    "backbone": _record({"name": _text, "level": _integer(-64, -1), "head_width": _integer(0, MAX_WIDTH)}),
    "preprocessing": _record(
        {
            "size": _integer(1, MAX_SIDE),
            "resize": _integer(1, MAX_SIDE),
            "mean": _RGB,
            "std": _list(_number(1e-9, 1e6), 3, 3),
            "interpolation": _one_of("bilinear", "bicubic"),
        }
    ),
}

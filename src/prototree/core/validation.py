"""What `tree.json` and the weights beside it may say. All of it is checked before anything is built from it.

One table names every field with its kind and range; a field that is missing, unknown, of another type or out of range
is an error that says where. Sizes are bounded here, so that no file makes the program take more time or memory than its
own length accounts for: what the file describes is first built in outline, on torch's `meta` device, where a tensor is
only a shape, and compared with the tensors that are there.
"""

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor

from prototree.backbones.crops import LEAST_SHARE, MOST_LOOKS
from prototree.backbones.preprocessing import MAX_SIDE
from prototree.core.confidence import MAX_OFFSET, MAX_SLOPE
from prototree.core.fields import Check, Name, integer, list_of, number, one_of, perhaps, record, text, truth, wrong
from prototree.core.model import ProtoTree
from prototree.core.nodes import REACH_RANGE, SHARPNESS_RANGE
from prototree.core.topology import MAX_HEIGHT, Topology
from prototree.errors import CheckpointError

MAX_CLASSES = 2**20
MAX_WIDTH = 65_536  # of prototypes and of hidden layers
_MAX_PATHS = 2**27  # leaves × height: what the tree's table of paths takes


def check_header(header: Mapping[str, Any]) -> None:
    """Every field of a tree's description by itself, then what they say together."""
    record(_FIELDS)(header, ())
    n_nodes = len(header["topology"]["left"])
    n_prototypes = n_nodes * (2 if header["question"]["kind"] == "pairwise" else 1)
    sources = header["prototypes"]["sources"]
    if len(header["topology"]["right"]) != n_nodes:
        raise wrong(("topology", "right"), f"{n_nodes} children, as many as on the left", header["topology"]["right"])
    if len(sources) != n_prototypes:
        raise CheckpointError(f"prototypes.sources: expected one for each of {n_prototypes}, got {len(sources)}")
    label = integer(0, len(header["classes"]) - 1)
    for place, source in enumerate(sources):
        if source is not None:
            label(source["label"], ("prototypes", "sources", place, "label"))
    low, high = SHARPNESS_RANGE[header["question"]["kind"]]
    number(low, high)(header["question"]["sharpness"], ("question", "sharpness"))
    integer(1, header["preprocessing"]["resize"])(header["preprocessing"]["size"], ("preprocessing", "size"))


def check_calibration(value: Any, name: Name = ()) -> None:
    """Check a calibration by itself."""
    _FIELDS["calibration"](value, name)


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
    for place, source in enumerate(sources):
        if source is not None and not outline.grid.holds(*source["patch"]):
            raise wrong(("prototypes", "sources", place, "patch"), f"a place of {rows} × {columns}", source["patch"])


def check_values(tensors: Mapping[str, Tensor]) -> None:
    """Refuses numbers that are none: a tree with NaN in it would still answer."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise CheckpointError(f"the weights hold numbers that are not finite (in {name})")
    low, high = REACH_RANGE
    reach = tensors["reach"]
    if not ((reach >= low) & (reach <= high)).all():
        raise CheckpointError(f"expected reaches from {low:g} to {high:g}, got {reach.min():g} to {reach.max():g}")
    if (tensors["distance_p95"] < 0).any():
        raise CheckpointError(f"expected usual distances of at least 0, got {tensors['usual'].min():g}")


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _box(value: Any, name: Name) -> None:
    list_of(number(), 4, 4)(value, name)
    if value[0] > value[2] or value[1] > value[3]:
        raise wrong(name, "left <= right and top <= bottom", value)


def _photo(value: Any, name: Name) -> None:
    text(value, name)
    if not value or PurePosixPath(value).is_absolute() or "\0" in value:
        raise wrong(name, "a path within the data", value)


_SOURCE = record(
    {
        "image": _photo,
        "label": integer(0, MAX_CLASSES),
        "view": text,
        "patch": list_of(integer(0, MAX_SIDE), 2, 2),
        "box": _box,
        "distance": number(0.0),
        "region": perhaps(_box),
        "flip": truth,
        "shown": perhaps(_box),
    }
)
_CHILDREN = list_of(integer(-(2**MAX_HEIGHT), 2**MAX_HEIGHT), 0, 2**MAX_HEIGHT - 1)
_RGB = list_of(number(-1e6, 1e6), 3, 3)
_FIELDS: dict[str, Check] = {
    "kind": one_of("prototree"),
    "version": integer(1, 1000),
    "classes": list_of(text, 2, MAX_CLASSES),
    "topology": record({"left": _CHILDREN, "right": _CHILDREN}),
    "prototypes": record(
        {
            "prototype_dim": integer(1, MAX_WIDTH),
            "size": list_of(integer(1, MAX_SIDE), 2, 2),
            "sources": list_of(perhaps(_SOURCE), 0, 2 ** (MAX_HEIGHT + 1)),
        }
    ),
    "question": record({"kind": one_of(*SHARPNESS_RANGE), "sharpness": number()}),
    "calibration": record(
        {
            "slope": number(-MAX_SLOPE, MAX_SLOPE),
            "offset": number(-MAX_OFFSET, MAX_OFFSET),
            "n_photos": integer(0, 2**40),
            "least": number(0.0, 1.0),
            "farthest": number(0.0),
        }
    ),
    "backbone": record(
        {
            "name": text,
            "feature_level": integer(-64, -1),
            "crops": list_of(number(LEAST_SHARE, 1.0), 1, MOST_LOOKS),
            "head_hidden_dim": integer(0, MAX_WIDTH),
        }
    ),
    "preprocessing": record(
        {
            "size": integer(1, MAX_SIDE),
            "resize": integer(1, MAX_SIDE),
            "mean": _RGB,
            "std": list_of(number(1e-9, 1e6), 3, 3),
            "interpolation": one_of("bilinear", "bicubic"),
        }
    ),
}

"""Trees on disk: `weights.safetensors` and a readable `tree.json`. No pickle, and no code from the files.

A folder is replaced atomically. Before anything is built from it, `tree.json` is checked against the schema below, and
the tensors against the tree on torch's `meta` device, so that no file takes more time or memory than its own length.
"""

import copy
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import safetensors
import safetensors.torch
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator
from torch import Tensor

from prototree import archive
from prototree.backbones.backbone import Backbone, FeatureExtractor, check_image_size
from prototree.backbones.crops import FULL_ONLY, MAX_CROPS, MIN_FRACTION
from prototree.backbones.geometry import MAX_SIDE, Preprocessing
from prototree.backbones.registry import MAX_TEXT, Origin, check_options, format_options
from prototree.core.confidence import MAX_OFFSET, MAX_SLOPE, Calibration
from prototree.core.model import ProtoTree, PrototypeSource
from prototree.core.nodes import RADIUS_RANGE, SHARPNESS_RANGE, NodeFunction, NodeKind
from prototree.core.topology import MAX_HEIGHT, Topology
from prototree.errors import CheckpointError, ImageSizeError, ProtoTreeError
from prototree.io import expect_version, make_folder, read_json, read_regular, sync_folder, write_file, write_json

VERSION = 1
MAX_WEIGHTS_BYTES = 8 * 2**30
WEIGHTS, TREE = "weights.safetensors", "tree.json"
TRAINED, PRUNED, PROJECTED = "trained", "pruned", "projected"
STAGES = (PROJECTED, PRUNED, TRAINED)
"""Folders in which a run keeps its tree after each stage, the last stage first."""

MAX_CLASSES = 2**20
MAX_WIDTH = 65_536  # of prototypes and of hidden layers
_MAX_PATHS = 2**27  # leaves × height: what the tree's table of paths takes

Tensors = dict[str, Tensor]
Schema = TypeVar("Schema", bound=BaseModel)


# ---- the schema of tree.json -----------------------------------------------------------------------------------------


class Record(BaseModel):
    """An object of a JSON file: exactly these keys, of exactly these types, and finite numbers."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def validated(schema: type[Schema], content: Any) -> Schema:
    """Check a part of a JSON file against its schema; the first thing that is wrong is a `CheckpointError`."""
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        got = "" if first["type"] == "missing" else f", got {repr(first['input'])[:60]}"
        raise CheckpointError(f"{where}: {first['msg']}{got}") from None


def _ordered(box: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    if box[0] > box[2] or box[1] > box[3]:
        raise ValueError("expected left <= right and top <= bottom")
    return box


def _relative(path: str) -> str:
    if not path or PurePosixPath(path).is_absolute() or "\0" in path:
        raise ValueError("expected a path within the data")
    return path


_Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
_Index = Annotated[int, Field(ge=0, le=MAX_SIDE)]
_Box = Annotated[tuple[float, float, float, float], Strict(False), AfterValidator(_ordered)]
_Mean = Annotated[float, Field(ge=-1e6, le=1e6)]
_Std = Annotated[float, Field(ge=1e-9, le=1e6)]
_Child = Annotated[int, Field(ge=-(2**MAX_HEIGHT), le=2**MAX_HEIGHT)]
_Children = Annotated[list[_Child], Field(max_length=2**MAX_HEIGHT - 1)]


class SourceRecord(Record):
    image: Annotated[str, AfterValidator(_relative)]
    label: int = Field(ge=0, lt=MAX_CLASSES)
    crop: str
    patch: Annotated[tuple[_Index, _Index], Strict(False)]
    patch_box: _Box
    distance: float = Field(ge=0)
    crop_region: _Box | None
    flip: bool
    display_box: _Box | None


class TopologyRecord(Record):
    left: _Children
    right: _Children


class PrototypesRecord(Record):
    prototype_dim: int = Field(ge=1, le=MAX_WIDTH)
    size: Annotated[tuple[_Side, _Side], Strict(False)]
    sources: Annotated[list[SourceRecord | None], Field(max_length=2 ** (MAX_HEIGHT + 1))]


class NodeFunctionRecord(Record):
    kind: NodeKind
    sharpness: float


class CalibrationRecord(Record):
    slope: float = Field(ge=-MAX_SLOPE, le=MAX_SLOPE)
    offset: float = Field(ge=-MAX_OFFSET, le=MAX_OFFSET)
    n_images: int = Field(ge=0, le=2**40)
    min_confidence: float = Field(ge=0, le=1)
    max_ood_score: float = Field(ge=0)


class OriginRecord(Record):
    trained_on: str = Field(max_length=MAX_TEXT)
    source: str = Field(max_length=MAX_TEXT)
    licence: str = Field(max_length=MAX_TEXT)


class BackboneRecord(Record):
    name: str
    options: dict[str, bool | int | float | str]
    origin: OriginRecord
    feature_level: int = Field(ge=-64, le=0)
    crops: Annotated[list[Annotated[float, Field(ge=MIN_FRACTION, le=1)]], Field(min_length=1, max_length=MAX_CROPS)]
    head_hidden_dim: int = Field(ge=0, le=MAX_WIDTH)


class PreprocessingRecord(Record):
    size: _Side
    resize: _Side
    mean: Annotated[tuple[_Mean, _Mean, _Mean], Strict(False)]
    std: Annotated[tuple[_Std, _Std, _Std], Strict(False)]
    interpolation: Literal["bilinear", "bicubic"]


class TreeRecord(Record):
    kind: Literal["prototree"]
    version: Literal[1]
    classes: Annotated[list[str], Field(min_length=2, max_length=MAX_CLASSES)]
    topology: TopologyRecord
    prototypes: PrototypesRecord
    node_function: NodeFunctionRecord
    calibration: CalibrationRecord
    backbone: BackboneRecord
    preprocessing: PreprocessingRecord

    @model_validator(mode="after")
    def _fits_together(self) -> "TreeRecord":
        n_nodes, sources, function = len(self.topology.left), self.prototypes.sources, self.node_function
        n_prototypes = n_nodes * (2 if function.kind == "pairwise" else 1)
        low, high = SHARPNESS_RANGE[function.kind]
        if len(self.topology.right) != n_nodes:
            raise ValueError(f"topology.right: expected {n_nodes} children, as many as on the left")
        if len(sources) != n_prototypes:
            raise ValueError(f"prototypes.sources: expected one for each of {n_prototypes}, got {len(sources)}")
        if any(source is not None and source.label >= len(self.classes) for source in sources):
            raise ValueError(f"prototypes.sources: expected labels below {len(self.classes)}")
        if not low <= function.sharpness <= high:
            raise ValueError(f"node_function.sharpness: expected {low:g} to {high:g} for {function.kind}")
        if self.preprocessing.size > self.preprocessing.resize:
            raise ValueError("preprocessing.size: expected at most preprocessing.resize")
        return self


# ---- save and load ---------------------------------------------------------------------------------------------------


def save(tree: ProtoTree, folder: Path | str) -> None:
    """Save a tree as `tree.json` and `weights.safetensors`, so that `load` gives it back bit for bit.

    Args:
        tree: The tree.
        folder: Folder to write to; a tree in it is replaced atomically.

    Raises:
        CheckpointError: The tree cannot be loaded again, or the folder cannot be written; what was there is unchanged.

    Examples:
        >>> save(tree, "my-tree")
        >>> load("my-tree").class_names
        ('cat', 'dog', 'owl')
    """
    backbone = tree.features.backbone
    header = {
        "kind": "prototree",
        "version": VERSION,
        "classes": list(tree.class_names),
        "topology": {"left": tree.topology.left.tolist(), "right": tree.topology.right.tolist()},
        "prototypes": {
            "prototype_dim": tree.features.prototype_dim,
            "size": list(tree.prototypes.shape[2:]),
            "sources": [source and dataclasses.asdict(source) for source in tree.sources],
        },
        "node_function": dataclasses.asdict(tree.node_function),
        "calibration": dataclasses.asdict(tree.calibration),
        "backbone": {
            "name": backbone.name,
            "options": backbone.options,
            "origin": dataclasses.asdict(backbone.origin),
            "feature_level": backbone.feature_level,
            "crops": list(backbone.crops),
            "head_hidden_dim": tree.features.head_hidden_dim,
        },
        "preprocessing": dataclasses.asdict(tree.preprocessing),
    }
    header = json.loads(json.dumps(header))  # as it will be read
    tensors = tree.state_dict()
    try:
        validated(TreeRecord, header)
        _check_values(tensors)
    except CheckpointError as error:
        raise CheckpointError(f"this tree cannot be saved to {folder}: {error}; what was there is unchanged") from error
    write_state(Path(folder), TREE, header, tensors)


def load(folder: Path | str) -> ProtoTree:
    """Load a tree written by `save`, `fit` or `pack`, in evaluation mode.

    Args:
        folder: Folder of a tree or of a run (its last stage), a `.prototree` file, or `user/name` on the model hub if
            there is no folder `user` here.

    Returns:
        The tree, on the CPU.

    Raises:
        CheckpointError: There is no tree, or it is damaged or of another format version.

    Examples:
        >>> tree = load("runs/photos")  # or "bird-tree.prototree", or "user/name"
        >>> tree.class_names
        ('bluebird', 'cardinal', 'greenfinch')
    """
    folder = archive.located(folder)
    folder = folder / (last_stage(folder) or "")
    return rebuild(*read_state(folder, TREE), str(folder))


def rebuild(header: dict[str, Any], tensors: Tensors, name: str) -> ProtoTree:
    """The tree that a description and its tensors make, once both have been checked; `name` is for messages."""
    if header.get("kind") != "prototree":
        raise CheckpointError(f"{name} does not describe a prototype tree; got kind {header.get('kind')!r}")
    try:
        record = validated(TreeRecord, {key: header[key] for key in header if not key.startswith("weights_")})
        with torch.device("meta"):
            outline = _build(record, _backbone_outline)
        _check_tensors(outline, tensors)
        _check_values(tensors)
        tree = _build(record, _backbone_copy)
        tree.load_state_dict(tensors)
    except ImageSizeError as error:
        raise CheckpointError(f"{name} cannot be opened: {error}") from error
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, ProtoTreeError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(
            f"{name} is damaged: {TREE} and {WEIGHTS} do not make a tree ({reason}); restore the folder from a copy"
        ) from error
    return tree.eval()


def last_stage(folder: Path) -> str | None:
    """The last stage that a run has a tree of; None for a folder that is no run."""
    return next((stage for stage in STAGES if (folder / stage / TREE).exists()), None)


def fingerprint(tree: ProtoTree) -> str:
    """A digest that names a tree: its shape, crops, prototypes and leaves."""
    digest = hashlib.sha256(repr((tree.topology.left.tolist(), tree.topology.right.tolist())).encode())
    if tree.features.backbone.crops != FULL_ONLY:
        digest.update(repr(tree.features.backbone.crops).encode())
    for tensor in (tree.prototypes, tree.leaf_logits):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def _build(record: TreeRecord, backbone_of: Callable[[str, int, int, str], Backbone]) -> ProtoTree:
    topology = Topology(*(np.array(side, dtype=np.int64) for side in (record.topology.left, record.topology.right)))
    check_height(topology)
    preprocessing, prototypes = Preprocessing(**record.preprocessing.model_dump()), record.prototypes
    network = record.backbone
    options = format_options(check_options(network.options))
    backbone = backbone_of(network.name, preprocessing.size, network.feature_level, options)
    backbone.origin = Origin(**network.origin.model_dump())
    check_image_size(backbone.name, preprocessing.resize)
    features = FeatureExtractor(backbone, prototypes.prototype_dim, network.head_hidden_dim)
    node_function = NodeFunction(**record.node_function.model_dump())
    tree = ProtoTree(topology, features, record.classes, prototypes.size, node_function=node_function)
    tree.preprocessing = preprocessing
    tree.calibration = Calibration(**record.calibration.model_dump())
    tree.sources = tuple(PrototypeSource(**source.model_dump()) if source else None for source in prototypes.sources)
    return tree.set_crops(tuple(network.crops))


@lru_cache(maxsize=8)  # the trees of a run have the same
def _backbone_outline(name: str, image_size: int, level: int, options: str) -> Backbone:
    return Backbone(name, None, image_size=image_size, feature_level=level, options=options, split=False)


@lru_cache(maxsize=1)
def _backbone_template(name: str, image_size: int, level: int, options: str) -> Backbone:
    return Backbone(name, None, image_size=image_size, feature_level=level, options=options)


def _backbone_copy(name: str, image_size: int, level: int, options: str) -> Backbone:
    """A copy, which takes a tenth of the time: building a network means trying it out."""
    return copy.deepcopy(_backbone_template(name, image_size, level, options))


def check_height(topology: Topology) -> None:
    """Refuse a tree so lopsided that its table of paths would take more memory than all the rest."""
    depth = [1] * topology.n_nodes
    for node, children in enumerate(zip(topology.left.tolist(), topology.right.tolist(), strict=True)):
        for child in children:
            if child >= 0:
                depth[child] = depth[node] + 1  # nodes are numbered level by level: parents come first
    if topology.n_leaves * max(depth, default=0) > _MAX_PATHS:
        raise CheckpointError(f"topology: expected a balanced tree, got {max(depth)} levels")


def _check_tensors(outline: ProtoTree, tensors: Mapping[str, Tensor]) -> None:
    """Whether the tensors are those of the tree in outline, and its sources patches of its map."""
    expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in outline.state_dict().items()}
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    for name in (*expected, *found):
        if (before := expected.get(name)) != (now := found.get(name)):
            raise CheckpointError(f"the weights do not fit: expected {name} as {before}, got {now}")
    for index, source in enumerate(outline.sources):
        if source is not None and not outline.grid.has_patch(*source.patch):
            shape = outline.grid.shape
            raise CheckpointError(f"prototypes.sources.{index}.patch: expected one of {shape}, got {source.patch}")


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    """Refuse numbers that are none: a tree with NaN in it would still predict."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise CheckpointError(f"the weights hold numbers that are not finite (in {name})")
    for name, (low, high) in (("radius", RADIUS_RANGE), ("distance_p95", (0, math.inf))):
        if not ((tensors[name] >= low) & (tensors[name] <= high)).all():
            raise CheckpointError(f"expected a {name} from {low:g} to {high:g}")


# ---- a JSON header and the tensors that belong to it, replaced together ----------------------------------------------


def write_state(folder: Path, name: str, header: dict[str, Any], tensors: Tensors) -> None:
    """Write a JSON header `name` and its tensors; replacing the header, which has their hash, is what counts."""
    make_folder(folder)
    waiting = folder / f"{WEIGHTS}.new"
    _finish_rename(folder, name)
    content = safetensors.torch.save({key: tensor.detach().contiguous().cpu() for key, tensor in tensors.items()})
    if len(content) > MAX_WEIGHTS_BYTES:
        raise CheckpointError(f"{folder / WEIGHTS} would have {len(content) >> 20} MiB, more than can be read again")
    weights = {"weights_bytes": len(content), "weights_sha256": hashlib.sha256(content).hexdigest()}
    try:
        write_file(waiting, content)
        write_json(folder / name, {**header, **weights})
    except CheckpointError:
        waiting.unlink(missing_ok=True)
        raise
    os.replace(waiting, folder / WEIGHTS)
    sync_folder(folder)


def settle(folder: Path) -> None:
    """Finish what a killed process had begun to write, in a folder and below: the header has the last word."""
    for waiting in sorted(folder.rglob(f"{WEIGHTS}.new")):
        for header in sorted(waiting.parent.glob("*.json")):
            _finish_rename(waiting.parent, header.name)
        waiting.unlink(missing_ok=True)


def _finish_rename(folder: Path, name: str) -> None:
    """After a kill just before the last step, the weights that the header names are those that wait."""
    waiting = folder / f"{WEIGHTS}.new"
    if waiting.exists() and (folder / name).exists():
        expected = read_json(folder / name).get("weights_sha256")
        if hashlib.sha256(read_regular(waiting, MAX_WEIGHTS_BYTES)).hexdigest() == expected:
            os.replace(waiting, folder / WEIGHTS)


def read_state(folder: Path, name: str) -> tuple[dict[str, Any], Tensors]:
    """Read what `write_state` wrote last."""
    header = read_json(folder / name)
    if "version" not in header:
        raise CheckpointError(f"{folder / name} is damaged: it does not name its format version; restore a copy")
    expect_version(header, VERSION, str(folder / name))
    limit = header.get("weights_bytes", MAX_WEIGHTS_BYTES)
    if type(limit) is not int or not 0 <= limit <= MAX_WEIGHTS_BYTES:
        raise CheckpointError(f"{folder / name} is damaged: expected a size of its weights, got {limit!r}")
    for candidate in (folder / WEIGHTS, folder / f"{WEIGHTS}.new"):
        try:
            content = read_regular(candidate, limit)
        except OSError:
            continue
        if hashlib.sha256(content).hexdigest() != header.get("weights_sha256"):
            continue
        try:
            return header, safetensors.torch.load(content)
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{candidate} is damaged ({error}); restore it from a copy") from error
    raise CheckpointError(
        f"{folder / WEIGHTS} is missing or not the file that {name} was saved with; restore the folder from a copy"
    )

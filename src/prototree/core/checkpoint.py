"""Trees on disk: `weights.safetensors` and a readable `tree.json`. No pickle, and no code from the files.

A folder is replaced atomically: a kill at any moment leaves the old content or the new, never a mixture.
"""

import copy
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from prototree.backbones.backbone import Backbone, FeatureExtractor, check_image_size
from prototree.backbones.crops import FULL_ONLY
from prototree.backbones.preprocessing import Preprocessing
from prototree.core import archive, hub
from prototree.core.confidence import Calibration
from prototree.core.model import ProtoTree, PrototypeSource
from prototree.core.nodes import NodeFunction
from prototree.core.topology import Topology
from prototree.core.validation import check_fit, check_header, check_height, check_values
from prototree.errors import CheckpointError, ImageSizeError, ProtoTreeError
from prototree.files import (
    expect_version,
    make_folder,
    read_json,
    read_regular,
    sync_folder,
    write_file,
    write_json,
)

VERSION = 4
"""3: every network looked once. Earlier ones had no checksum and are not read."""

MAX_WEIGHTS_BYTES = 8 * 2**30
WEIGHTS, TREE = "weights.safetensors", "tree.json"
TRAINED, PRUNED, PROJECTED = "trained", "pruned", "projected"
STAGES = (PROJECTED, PRUNED, TRAINED)
"""Folders in which a run keeps its tree after each stage, the last stage first."""

Tensors = dict[str, Tensor]

_SEALS = ("weights_sha256", "weights_bytes")


def save(tree: ProtoTree, folder: Path | str) -> None:
    """Writes a tree so that `load` gives it back bit for bit, even on a machine without the training data.

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
        "question": dataclasses.asdict(tree.question),
        "calibration": dataclasses.asdict(tree.calibration),
        "backbone": {
            "name": backbone.name,
            "feature_level": backbone.feature_level,
            "crops": list(backbone.crops),
            "head_hidden_dim": tree.features.head_hidden_dim,
        },
        "preprocessing": tree.preprocessing.to_json(),
    }
    tensors = tree.state_dict()
    header = json.loads(json.dumps(header))  # as it will be read
    try:
        check_header(header)
        check_values(tensors)
    except CheckpointError as error:
        raise CheckpointError(f"this tree cannot be saved to {folder}: {error}; what was there is unchanged") from error
    write_state(Path(folder), TREE, header, tensors)


def load(folder: Path | str) -> ProtoTree:
    """Reads a tree written by `save` or `pack`, in evaluation mode; for a run's folder, the tree after its last stage.

    `user/name` is a tree on the model hub, if there is no folder `user` here.

    Examples:
        >>> tree = load("runs/photos")  # or "bird-tree.prototree", or "user/name"
        >>> tree.class_names
        ('bluebird', 'cardinal', 'greenfinch')
    """
    folder = located(folder)
    folder = folder / (last_stage(folder) or "")
    return rebuild(*read_state(folder, TREE), str(folder))


def rebuild(header: dict[str, Any], tensors: Tensors, name: str) -> ProtoTree:
    """The tree that a description and its tensors make, once both have been checked; `name` is for messages."""
    if header.get("kind") != "prototree":
        raise CheckpointError(f"{name} does not describe a prototype tree; got kind {header.get('kind')!r}")
    try:
        header = _as_now(header)
        check_header(header)
        outline = _outline(header)
        check_fit(outline, header["prototypes"]["sources"], tensors)
        check_values(tensors)
        tree = _build(header)
        tree.load_state_dict(tensors)
    except ImageSizeError as error:
        raise CheckpointError(f"{name} cannot be opened: {error}") from error
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, ProtoTreeError) as error:
        reason = " ".join(str(error).split())[:300]
        kind = "" if isinstance(error, ProtoTreeError) else f"{type(error).__name__}: "
        raise CheckpointError(
            f"{name} is damaged: {TREE} and {WEIGHTS} do not make a tree ({kind}{reason}); "
            "restore the folder from a copy"
        ) from error
    return tree.eval()


def located(place: Path | str) -> Path:
    """The folder of what is a folder, a file that `pack` made, or `user/name` on the model hub."""
    return hub.fetch(place) if hub.is_hub_name(place) else archive.folder_of(Path(place))


def fingerprint(tree: ProtoTree) -> str:
    """What names a tree: the questions it asks, in which order, and its answers."""
    digest = hashlib.sha256(repr((tree.topology.left.tolist(), tree.topology.right.tolist())).encode())
    if tree.features.backbone.crops != FULL_ONLY:
        digest.update(repr(tree.features.backbone.crops).encode())
    for tensor in (tree.prototypes, tree.leaf_logits):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def last_stage(folder: Path) -> str | None:
    """The last stage that a run has a tree of; None for a folder that is no run."""
    return next((stage for stage in STAGES if (folder / stage / TREE).exists()), None)


def write_state(folder: Path, name: str, header: dict[str, Any], tensors: Tensors) -> None:
    """A JSON file `name` and the tensors that belong to it, replaced together."""
    make_folder(folder)
    # The new weights wait beside the old ones; replacing the header, which knows their hash, is the moment that counts.
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
    """Finishes what a killed process had begun to write, in a folder and below: the header had the last word."""
    for waiting in sorted(folder.rglob(f"{WEIGHTS}.new")):
        for header in sorted(waiting.parent.glob("*.json")):
            _finish_rename(waiting.parent, header.name)
        waiting.unlink(missing_ok=True)


def _finish_rename(folder: Path, name: str) -> None:
    """After a kill just before the last step, the weights that the header knows are those that wait."""
    waiting = folder / f"{WEIGHTS}.new"
    if waiting.exists() and (folder / name).exists():
        known = read_json(folder / name).get("weights_sha256")
        if hashlib.sha256(read_regular(waiting, MAX_WEIGHTS_BYTES)).hexdigest() == known:
            os.replace(waiting, folder / WEIGHTS)


def read_state(folder: Path, name: str) -> tuple[dict[str, Any], Tensors]:
    """What `write_state` wrote last."""
    header = read_json(folder / name)
    check_version(header, str(folder / name))
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


def check_version(header: dict[str, Any], name: str) -> None:
    """Refuse a description of a format version that is not read here."""
    if "version" not in header:
        raise CheckpointError(f"{name} is damaged: it does not name its format version; restore it from a copy")
    expect_version(header, VERSION, name)


def _as_now(header: dict[str, Any]) -> dict[str, Any]:
    """A description by itself, with what version 3 did not say."""
    own = {key: value for key, value in header.items() if key not in _SEALS}
    own["backbone"] = {"crops": list(FULL_ONLY), **own["backbone"]}
    return own


def _outline(header: dict[str, Any]) -> ProtoTree:
    """The tree with shapes in place of numbers, which takes no memory whatever its sizes."""
    with torch.device("meta"):
        return _build(header, _backbone_outline)


@lru_cache(maxsize=8)  # the trees of a run have the same
def _backbone_outline(name: str, image_size: int, level: int) -> Backbone:
    return Backbone(name, None, image_size=image_size, feature_level=level, split=False)


@lru_cache(maxsize=1)
def _backbone_template(name: str, image_size: int, level: int) -> Backbone:
    return Backbone(name, None, image_size=image_size, feature_level=level)


def _backbone(name: str, image_size: int, level: int) -> Backbone:
    """A copy, which takes a tenth of the time: building a network means trying it out."""
    return copy.deepcopy(_backbone_template(name, image_size, level))


def _build(header: dict[str, Any], backbone_of: Callable[[str, int, int], Backbone] = _backbone) -> ProtoTree:
    topology = Topology(*(np.array(header["topology"][side], dtype=np.int64) for side in ("left", "right")))
    check_height(topology)
    preprocessing = Preprocessing.from_json(header["preprocessing"])
    backbone = backbone_of(header["backbone"]["name"], preprocessing.size, header["backbone"]["feature_level"])
    check_image_size(backbone.name, preprocessing.resize)
    height, width = header["prototypes"]["size"]
    features = FeatureExtractor(backbone, header["prototypes"]["prototype_dim"], header["backbone"]["head_hidden_dim"])
    question = NodeFunction(**header["question"])
    names = [str(name) for name in header["classes"]]
    tree = ProtoTree(topology, features, names, (height, width), question=question)
    tree.preprocessing = preprocessing
    tree.calibration = Calibration(**header["calibration"])
    tree.sources = tuple(source and _source(source) for source in header["prototypes"]["sources"])
    return tree.look(tuple(float(share) for share in header["backbone"]["crops"]))


def _source(values: dict[str, Any]) -> PrototypeSource:
    tuples = {name: tuple(values[name]) for name in ("patch", "box", "region", "shown") if values[name] is not None}
    return PrototypeSource(**{**values, **tuples})

"""Trees on disk: `weights.safetensors` and a readable `tree.json`. No pickle, and no code from the files.

A folder is replaced atomically: a kill at any moment leaves the old content or the new, never a mixture.
"""

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from prototree.errors import CheckpointError, ProtoTreeError, ShapeError
from prototree.files import read_json, sync_folder, write_file, write_json
from prototree.network.backbone import Backbone, FeatureExtractor
from prototree.network.preprocessing import Preprocessing
from prototree.tree import archive, hub
from prototree.tree.model import ProtoTree, PrototypeSource
from prototree.tree.questions import PAPER, REACH_RANGE, Question
from prototree.tree.sureness import Sureness
from prototree.tree.topology import Topology

VERSION = 3
WEIGHTS, TREE = "weights.safetensors", "tree.json"
TRAINED, PRUNED, PROJECTED = "trained", "pruned", "projected"
STAGES = (PROJECTED, PRUNED, TRAINED)
"""Folders in which a run keeps its tree after each stage, the last stage first."""

Tensors = dict[str, Tensor]


def save(tree: ProtoTree, folder: Path | str) -> None:
    """Writes a tree so that `load` gives it back bit for bit, on a machine without the training data too."""
    backbone = tree.features.backbone
    header = {
        "kind": "prototree",
        "version": VERSION,
        "classes": list(tree.class_names),
        "topology": {"left": tree.topology.left.tolist(), "right": tree.topology.right.tolist()},
        "prototypes": {
            "depth": tree.features.depth,
            "size": list(tree.prototypes.shape[2:]),
            "sources": [source and dataclasses.asdict(source) for source in tree.sources],
        },
        "question": dataclasses.asdict(tree.question),
        "sureness": dataclasses.asdict(tree.sureness),
        "backbone": {"name": backbone.name, "level": backbone.level, "head_width": tree.features.head_width},
        "preprocessing": tree.preprocessing.to_json(),
    }
    write_state(Path(folder), TREE, header, tree.state_dict())


def load(folder: Path | str) -> ProtoTree:
    """Reads a tree written by `save` or `pack`, in evaluation mode; of a run's folder, the tree after its last stage.

    `user/name` is a tree on the model hub, where no folder `user` is here.

    >>> tree = load("runs/birds")
    >>> tree = load("bird-tree.prototree")
    """
    folder = located(folder)
    folder = folder / (last_stage(folder) or "")
    header, tensors = read_state(folder, TREE)
    if header.get("kind") != "prototree":
        raise CheckpointError(f"{folder / TREE} does not describe a prototype tree; got kind {header.get('kind')!r}")
    try:
        tree = _build(header)
        if header["version"] == 1:  # the paper's similarity was the only one
            tensors["reach"] = torch.ones(tree.n_prototypes)
        if header["version"] < 3:  # nobody asked what is usual
            tensors["usual"] = torch.zeros(2 * tree.topology.n_nodes)
        tree.load_state_dict(tensors)
        _check_reach(tree)
    except (KeyError, TypeError, ValueError, RuntimeError, ProtoTreeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{folder} is damaged: {TREE} and {WEIGHTS} do not make a tree ({type(error).__name__}: {reason}); "
            "restore the folder from a copy"
        ) from error
    return tree.eval()


def located(place: Path | str) -> Path:
    """The folder of what is a folder, a file that `pack` made, or `user/name` on the model hub."""
    return hub.fetch(place) if hub.is_hub_name(place) else archive.folder_of(Path(place))


def fingerprint(tree: ProtoTree) -> str:
    """What names a tree: the questions it asks, in which order, and its answers."""
    digest = hashlib.sha256(repr((tree.topology.left.tolist(), tree.topology.right.tolist())).encode())
    for tensor in (tree.prototypes, tree.leaf_logits):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def last_stage(folder: Path) -> str | None:
    """The last stage that a run has a tree of; None for a folder that is no run."""
    return next((stage for stage in STAGES if (folder / stage / TREE).exists()), None)


def write_state(folder: Path, name: str, header: dict[str, Any], tensors: Tensors) -> None:
    """A JSON file `name` and the tensors that belong to it, replaced together."""
    folder.mkdir(parents=True, exist_ok=True)
    # The new weights wait beside the old ones; replacing the header, which knows their hash, is the moment that counts.
    waiting = folder / f"{WEIGHTS}.new"
    content = safetensors.torch.save({key: tensor.detach().contiguous().cpu() for key, tensor in tensors.items()})
    header = {**header, "weights_sha256": hashlib.sha256(content).hexdigest()}
    write_file(waiting, content)
    write_json(folder / name, header)
    os.replace(waiting, folder / WEIGHTS)
    sync_folder(folder)


def settle(folder: Path) -> None:
    """Finishes what a killed process had begun to write, in a folder and below: the header had the last word."""
    for waiting in sorted(folder.rglob(f"{WEIGHTS}.new")):
        digest = hashlib.sha256(waiting.read_bytes()).hexdigest()
        headers = [read_json(path) for path in sorted(waiting.parent.glob("*.json"))]
        if any(header.get("weights_sha256") == digest for header in headers):
            os.replace(waiting, waiting.with_name(WEIGHTS))
        else:
            waiting.unlink()


def read_state(folder: Path, name: str) -> tuple[dict[str, Any], Tensors]:
    """What `write_state` wrote last."""
    header = read_json(folder / name)
    if not isinstance(header.get("version"), int) or header["version"] > VERSION:
        raise CheckpointError(
            f"{folder / name} has format version {header.get('version')!r}, this program reads up to {VERSION}; "
            "update prototree"
        )
    for candidate in (folder / WEIGHTS, folder / f"{WEIGHTS}.new"):
        try:
            content = candidate.read_bytes()
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


def _build(header: dict[str, Any]) -> ProtoTree:
    topology = Topology(*(np.array(header["topology"][side], dtype=np.int64) for side in ("left", "right")))
    preprocessing = Preprocessing.from_json(header["preprocessing"])
    backbone = Backbone(
        header["backbone"]["name"], None, image_size=preprocessing.size, level=header["backbone"]["level"]
    )
    height, width = header["prototypes"]["size"]
    features = FeatureExtractor(backbone, header["prototypes"]["depth"], header["backbone"]["head_width"])
    question = Question(**header["question"]) if "question" in header else PAPER
    names = [str(name) for name in header["classes"]]
    tree = ProtoTree(topology, features, names, (height, width), question=question)
    tree.preprocessing = preprocessing
    tree.sureness = Sureness(**header.get("sureness", {}))
    tree.sources = tuple(source and _source(source) for source in header["prototypes"]["sources"])
    return tree


def _check_reach(tree: ProtoTree) -> None:
    low, high = REACH_RANGE
    if not ((tree.reach >= low) & (tree.reach <= high)).all():
        raise ShapeError(f"expected reaches from {low:g} to {high:g}, got {tree.reach.min():g} to {tree.reach.max():g}")


def _source(values: dict[str, Any]) -> PrototypeSource:
    tuples = {name: tuple(values[name]) for name in ("patch", "box", "region", "shown") if values.get(name)}
    return PrototypeSource(**{**values, **tuples})

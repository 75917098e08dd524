"""Contract 6, first part: save → load is bitwise equal; and everything that can be wrong with a folder."""

import copy
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from prototree import io
from prototree.core import checkpoint
from prototree.core.model import ProtoTree, PrototypeSource
from prototree.core.topology import Topology
from prototree.errors import CheckpointError

REGION = (0.0, 1.0, 50.5, 60.0)
SOURCE = PrototypeSource("birds/ä b.jpg", 3, "box", (1, 2), (0.5, 1.0, 30.25, 41.0), 0.125, REGION, True)


@pytest.fixture
def saved(tiny_tree: ProtoTree, tmp_path: Path) -> Path:
    tiny_tree.sources = (SOURCE,) + (None,) * 6
    checkpoint.save(tiny_tree, tmp_path / "tree")
    return tmp_path / "tree"


def test_a_tree_comes_back_bit_for_bit(tiny_tree: ProtoTree, saved: Path) -> None:
    loaded = checkpoint.load(saved)
    expected, found = tiny_tree.state_dict(), loaded.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (loaded.class_names, loaded.sources) == (tiny_tree.class_names, (SOURCE,) + (None,) * 6)
    assert loaded.preprocessing == tiny_tree.preprocessing
    assert not loaded.training
    images = torch.rand(2, 3, 64, 64)
    assert torch.equal(loaded.predict(images).soft, tiny_tree.predict(images).soft)


def test_a_tree_that_is_read_twice_is_two_trees(saved: Path) -> None:
    one, other = checkpoint.load(saved), checkpoint.load(saved)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.add_(1)
    one.features.backbone.crops = (1.0, 0.5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    assert other.features.backbone.crops == (1.0,)
    again = checkpoint.load(saved).state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.items())


def test_pruned_trees_names_and_preprocessing_come_back(tiny_tree: ProtoTree, tmp_path: Path) -> None:
    tiny_tree.class_names = ("<script>", "Ärger\n", "日本", '"', "🐦")
    for kept in (np.arange(8) % 3 == 0, np.arange(8) == 2):
        smaller = tiny_tree.with_topology(*tiny_tree.topology.keep_leaves(kept))
        smaller.preprocessing = dataclasses.replace(tiny_tree.preprocessing, resize=80)
        checkpoint.save(smaller, tmp_path)
        loaded = checkpoint.load(tmp_path)
        assert loaded.topology.left.tolist() == smaller.topology.left.tolist()
        assert loaded.preprocessing.resize == 80
        assert loaded.class_names == tiny_tree.class_names
        assert torch.equal(loaded.prototypes, smaller.prototypes)


@pytest.mark.parametrize("killed_at", range(6))
def test_a_kill_while_saving_leaves_the_old_tree_or_the_new(
    tiny_tree: ProtoTree, saved: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    """The process dies before the n-th change to the folder: nothing of what follows happens."""
    old = tiny_tree.leaf_logits.detach().clone()
    tiny_tree.leaf_logits.data += 1
    steps = 0

    class KilledError(BaseException):
        pass

    def until_killed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps > killed_at:
                raise KilledError
            return real(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("replace", "fsync"):
            patch.setattr(os, name, until_killed(getattr(os, name)))
        with pytest.raises(KilledError):
            checkpoint.save(tiny_tree, saved)
    found = checkpoint.load(saved).leaf_logits
    assert torch.equal(found, old) or torch.equal(found, old + 1)
    checkpoint.save(tiny_tree, saved)
    assert torch.equal(checkpoint.load(saved).leaf_logits, old + 1)


def test_a_kill_before_the_last_step_and_then_a_full_disk_lose_nothing(
    tiny_tree: ProtoTree, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the kill the only copy of the weights waits under another name, where the next save once wrote first."""
    os.replace(saved / "weights.safetensors", saved / "weights.safetensors.new")
    before = checkpoint.load(saved).leaf_logits
    tiny_tree.leaf_logits.data += 1
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_json", refuse)
        with pytest.raises(CheckpointError):
            checkpoint.save(tiny_tree, saved)
    assert torch.equal(checkpoint.load(saved).leaf_logits, before)


def refuse(*_: Any) -> None:
    raise CheckpointError("no space")


def changed(header: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """With other values by dotted name; None takes the field out."""
    header = copy.deepcopy(header)
    for name, value in changes.items():
        *outer, last = name.split(".")
        inner = header
        for key in outer:
            inner = inner[int(key)] if isinstance(inner, list) else inner[key]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    return header


def edit(changes: dict[str, Any], *, reseal: bool = True) -> Callable[[Path], None]:
    """By someone who knows how to write a checksum, or who does not."""

    def apply(folder: Path) -> None:
        header = changed(json.loads((folder / "tree.json").read_text()), changes)
        (folder / "tree.json").write_text(json.dumps(io.with_checksum(header) if reseal else header))

    return apply


def weights(**changes: torch.Tensor) -> Callable[[Path], None]:
    """Other tensors, with all checksums right."""

    def apply(folder: Path) -> None:
        header, tensors = checkpoint.read_state(folder, "tree.json")
        checkpoint.write_state(
            folder, "tree.json", {k: v for k, v in header.items() if k != "sha256"}, tensors | changes
        )

    return apply


def truncate(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100]) and None


@pytest.mark.parametrize(
    ("damage", "token"),
    [
        (lambda folder: (folder / "tree.json").unlink(), "tree.json"),
        (lambda folder: (folder / "weights.safetensors").unlink(), "weights.safetensors"),
        (truncate("tree.json"), "tree.json"),
        (truncate("weights.safetensors"), "weights.safetensors"),
        (lambda folder: (folder / "tree.json").write_text("[]"), "tree.json"),
        (lambda folder: (folder / "tree.json").write_text("[" * 100_000), "tree.json"),
        (edit({"version": 4}), "version 4"),  # of before, and of a program to come
        (edit({"version": "1"}), "version '1'"),
        (edit({"classes": ["a", "b", "c", "d", "E"]}, reseal=False), "checksum"),
        (edit({"sha256": None}, reseal=False), "checksum"),
        (edit({"kind": "cake"}), "cake"),
        (edit({"topology": {"left": [0], "right": [-1]}}), "damaged"),
        (edit({"topology": {"left": [-1], "right": [-2]}}), "damaged"),
        (edit({"backbone.name": "hf-hub:someone/something"}), "nor timm has a network"),
        (edit({"classes": ["only one"]}), "classes"),
        (edit({"classes": ["a", "b", "c", "d", 5]}), "classes.4"),
        (edit({"preprocessing": {}}), "preprocessing.size"),
        (edit({"preprocessing.std": [0.2, 0.2, float("nan")]}), "preprocessing.std.2"),
        (edit({"preprocessing.size": 128}), "preprocessing.size"),
        (edit({"prototypes.size": [9, 9]}), "feature map"),
        (edit({"prototypes.sources": []}), "prototypes.sources"),
        (edit({"prototypes.sources.0.label": 5}), "labels below 5"),
        (edit({"prototypes.sources.0.patch": [4, 0]}), "sources.0.patch"),
        (edit({"prototypes.sources.0.patch": [1.5, 0]}), "sources.0.patch.0"),
        (edit({"prototypes.sources.0.patch_box": [9, 0, 1, 5]}), "left <= right"),
        (edit({"prototypes.sources.0.flip": 1}), "sources.0.flip"),
        (edit({"prototypes.sources.0.image": "/etc/passwd"}), "sources.0.image"),
        (edit({"node_function.sharpness": 0.5}), "node_function.sharpness"),
        (edit({"calibration": None}), "calibration"),
        (edit({"calibration.slope": 1e308}), "calibration.slope"),
        (edit({"calibration.offset": -1e308}), "calibration.offset"),
        (edit({"colour": "green"}), "colour"),
        (edit({"prototypes.prototype_dim": 3_000_000}), "prototypes.prototype_dim"),
        (edit({"prototypes.prototype_dim": 65_536}), "expected prototypes as"),
        (edit({"backbone.name": "vit_giant_patch14_224", "backbone.feature_level": -1}), "do not fit"),
        (weights(leaf_logits=torch.full((8, 5), torch.nan)), "leaf_logits"),
        (weights(leaf_logits=torch.zeros(8, 5, dtype=torch.float64)), "leaf_logits"),
        (weights(radius=torch.zeros(7)), "radius"),
        (weights(another=torch.zeros(7)), "another"),
    ],
)
def test_a_damaged_folder_is_one_clear_error(saved: Path, damage: Callable[[Path], None], token: str) -> None:
    damage(saved)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(saved)
    assert token in str(caught.value)


def test_what_could_not_be_loaded_is_not_saved(tiny_tree: ProtoTree, saved: Path) -> None:
    tiny_tree.leaf_logits.data[0, 0] = torch.nan
    with pytest.raises(CheckpointError):
        checkpoint.save(tiny_tree, saved)
    assert torch.isfinite(checkpoint.load(saved).leaf_logits).all()


@pytest.mark.parametrize("field", ["size", "resize"])
def test_images_far_larger_than_the_network_was_made_for_need_leave(
    saved: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit({f"preprocessing.{name}": 1536 for name in {field, "resize"}})(saved)
    with pytest.raises(CheckpointError, match="PROTOTREE_MAX_IMAGE_SIZE"):
        checkpoint.load(saved)
    monkeypatch.setenv("PROTOTREE_MAX_IMAGE_SIZE", "1536")
    assert getattr(checkpoint.load(saved).preprocessing, field) == 1536
    monkeypatch.delenv("PROTOTREE_MAX_IMAGE_SIZE")
    with pytest.raises(CheckpointError, match="PROTOTREE_MAX_IMAGE_SIZE"):
        checkpoint.load(saved)


def test_a_large_picture_costs_nothing_to_open(
    tiny_tree: ProtoTree, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROTOTREE_MAX_IMAGE_SIZE", "4096")
    edit({"preprocessing.size": 4096, "preprocessing.resize": 4096})(saved)
    sides = []
    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda _, inputs: sides.append(inputs[0].shape[-1]) if inputs[0].device.type == "cpu" else None
    )
    try:
        loaded = checkpoint.load(saved)
    finally:
        hook.remove()
    assert loaded.features.backbone.map_size == (256, 256)
    assert 64 < max(sides) <= 512


@pytest.mark.parametrize("name", ["tree.json", "weights.safetensors"])
def test_pipes_and_files_of_many_gigabytes_are_refused_at_once(saved: Path, name: str) -> None:
    (saved / name).unlink()
    os.mkfifo(saved / name)
    with pytest.raises(CheckpointError):
        checkpoint.load(saved)
    (saved / name).unlink()
    with open(saved / name, "wb") as file:
        file.truncate(20 << 30)  # takes no space: all of it is a hole
    with pytest.raises(CheckpointError):
        checkpoint.load(saved)


def test_a_tree_that_is_one_long_branch_is_refused() -> None:
    n = 2**14
    left, right = np.arange(1, n + 1), -np.arange(1, n + 1)
    left[-1], right[-1] = ~(n - 1), ~n
    with pytest.raises(CheckpointError):
        checkpoint.check_height(Topology(left, right))


def test_a_folder_that_cannot_be_written(tiny_tree: ProtoTree, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    before = sorted(p.name for p in saved.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError):
            checkpoint.save(tiny_tree, saved)
    assert sorted(p.name for p in saved.iterdir()) == before
    checkpoint.load(saved)

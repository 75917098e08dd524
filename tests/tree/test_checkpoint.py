"""Contract 6, first part: save → load is bitwise equal; and everything that can be wrong with a folder."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prototree.errors import CheckpointError
from prototree.tree import checkpoint
from prototree.tree.model import ProtoTree, PrototypeSource

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


def test_there_is_no_path_of_this_machine_in_the_description(saved: Path) -> None:
    text = (saved / "tree.json").read_text()
    assert str(Path.home()) not in text
    assert str(saved) not in text


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


def edit(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        header = json.loads((folder / "tree.json").read_text())
        (folder / "tree.json").write_text(json.dumps({**header, **changes}))

    return apply


def truncate(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100]) and None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "tree.json").unlink(), "tree.json cannot be read"),
        (lambda folder: (folder / "weights.safetensors").unlink(), "weights.safetensors is missing"),
        (truncate("tree.json"), "tree.json is damaged"),
        (truncate("weights.safetensors"), "not the file that tree.json was saved with"),
        (lambda folder: (folder / "tree.json").write_text("[]"), "expected a JSON object, got list"),
        (lambda folder: (folder / "tree.json").write_text("[" * 100_000), "tree.json is damaged"),
        (edit(version=99), "format version 99, this program reads up to 3; update prototree"),
        (edit(version="1"), "format version '1'"),
        (edit(kind="cake"), "does not describe a prototype tree"),
        (edit(topology={"left": [0], "right": [-1]}), "is damaged"),
        (edit(topology={"left": [-1], "right": [-2]}), "is damaged"),
        (
            edit(backbone={"name": "hf-hub:someone/something", "level": -1, "head_width": 0}),
            "is damaged.*timm has no model",
        ),
        (edit(classes=["only one"]), "is damaged"),
        (edit(preprocessing={}), "is damaged"),
        (edit(prototypes={"depth": 8, "size": [9, 9], "sources": []}), "is damaged"),
    ],
)
def test_a_damaged_folder_is_one_clear_error(saved: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(saved)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(saved)


def test_a_folder_that_cannot_be_written(tiny_tree: ProtoTree, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    before = sorted(p.name for p in saved.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"could not be written \(No space left on device\)"):
            checkpoint.save(tiny_tree, saved)
    assert sorted(p.name for p in saved.iterdir()) == before
    checkpoint.load(saved)

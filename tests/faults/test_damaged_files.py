"""Saved trees and runs damaged in seeded ways: each file is refused, left out or unharmed, never shown as another."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prototree import io
from prototree.core import checkpoint
from prototree.core.model import ProtoTree, PrototypeSource
from prototree.errors import CheckpointError
from prototree.evaluation.schema import read_errors
from prototree.explanation.assets import AssetStore, PrototypePictures, SourcePictures
from prototree.pipeline.fit import rerun
from prototree.pipeline.share import pack
from prototree.run import Run
from tiny_editing import tiny_run

NAMES = ("tree.json", "weights.safetensors")
ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**30, 1.5, float("nan"), float("inf"), "", "x" * 1000, [], {}, [[]], "../../etc/passwd",
    3_000_000,
)  # fmt: skip
LEFT_OUT = "left out"


def flip_bit(chance: random.Random, file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def cut_off(chance: random.Random, file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: chance.randrange(len(content))])


def lose_a_stretch(chance: random.Random, file: Path) -> None:
    """As a disk does that lost a block: zeros, or noise, in place of what was there."""
    content = bytearray(file.read_bytes())
    start = chance.randrange(len(content))
    stop = min(start + chance.choice((1, 16, 512, 4096)), len(content))
    content[start:stop] = bytes(stop - start) if chance.random() < 0.5 else chance.randbytes(stop - start)
    file.write_bytes(content)


def repeat_a_stretch(chance: random.Random, file: Path) -> None:
    content = file.read_bytes()
    start, stop = sorted(chance.randrange(len(content)) for _ in range(2))
    file.write_bytes(content[:stop] + content[start:])


def change_a_character(chance: random.Random, file: Path) -> None:
    """Stays readable: a digit for a digit, a letter for a letter."""
    content = bytearray(file.read_bytes())
    for _ in range(1000):
        offset = chance.randrange(len(content))
        for kind in (b"0123456789", b"abcdefghijklmnopqrstuvwxyz"):
            if content[offset] in kind:
                content[offset] = chance.choice(kind.replace(content[offset : offset + 1], b""))
                file.write_bytes(content)
                return


def swap_with_another(chance: random.Random, file: Path) -> None:
    """The file of the same name of another tree."""
    file.write_bytes((file.parent.parent / "other" / file.name).read_bytes())


def change_a_value(chance: random.Random, file: Path) -> None:
    """By hand, in an editor, without writing a checksum."""
    tree = file.parent / "tree.json"
    tree.write_text(json.dumps(with_odd_value(chance, json.loads(tree.read_text()))))


BYTE_DAMAGES = (flip_bit, cut_off, lose_a_stretch, repeat_a_stretch, change_a_character)
DAMAGES = (*BYTE_DAMAGES, swap_with_another, change_a_value)


def keys_in(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix, *(keys for key, child in inner for keys in keys_in(child, (*prefix, key)))]


def with_odd_value(chance: random.Random, content: Any) -> Any:
    """With one value taken out, or replaced by one of another kind."""
    *outer, last = chance.choice(keys_in(content)[1:])
    inner = content
    for key in outer:
        inner = inner[key]
    if chance.random() < 0.2:
        del inner[last]
    else:
        inner[last] = chance.choice([value for value in ODD_VALUES if value is not inner[last]])
    return content


@pytest.fixture
def folder(tiny_tree: ProtoTree, tmp_path: Path) -> Path:
    source = PrototypeSource(
        "a/b.jpg", 3, "box", (1, 2), (0.5, 1.0, 30.25, 41.0), 1.25e-05, (0.0, 1.0, 50.5, 60.0), True
    )
    tiny_tree.sources = (source,) * 7
    checkpoint.save(tiny_tree, tmp_path / "tree")
    other = tiny_tree.with_topology(*tiny_tree.topology.keep_leaves(torch.arange(8).numpy() % 3 == 0))
    checkpoint.save(other, tmp_path / "other")
    return tmp_path / "tree"


def is_same(tree: ProtoTree, other: ProtoTree) -> bool:
    weights, other_weights = tree.state_dict(), other.state_dict()
    return (
        all(torch.equal(weights[name], other_weights[name]) for name in weights)
        and tree.topology.left.tolist() == other.topology.left.tolist()
        and tree.topology.right.tolist() == other.topology.right.tolist()
        and all(
            getattr(tree, name) == getattr(other, name)
            for name in ("class_names", "sources", "node_function", "calibration", "preprocessing")
        )
    )


@pytest.mark.parametrize("count", [42, pytest.param(1500, marks=pytest.mark.slow)])
def test_no_damaged_folder_loads_as_another_tree(folder: Path, tiny_tree: ProtoTree, count: int) -> None:
    original = {name: (folder / name).read_bytes() for name in NAMES}
    for seed in range(count):
        chance = random.Random(seed)
        damage, name = DAMAGES[seed % len(DAMAGES)], chance.choice((*NAMES, NAMES[0]))
        damage(chance, folder / name)
        try:
            loaded, message = checkpoint.load(folder), ""
        except CheckpointError as error:
            loaded, message = tiny_tree, str(error)
        assert is_same(loaded, tiny_tree), f"seed {seed}: {damage.__name__} in {name}"
        assert "\n" not in message
        for file, content in original.items():
            (folder / file).write_bytes(content)


@pytest.mark.parametrize("count", [15, pytest.param(600, marks=pytest.mark.slow)])
def test_odd_values_under_a_right_checksum_are_one_clear_error_or_a_tree(folder: Path, count: int) -> None:
    """Whoever can write a checksum can describe another tree, but not make the program crash or take all memory."""
    header = json.loads((folder / "tree.json").read_text())
    refused = 0
    for seed in range(count):
        forged = with_odd_value(random.Random(seed), json.loads(json.dumps(header)))
        (folder / "tree.json").write_text(json.dumps(io.with_checksum(forged)))
        try:
            checkpoint.load(folder)
        except CheckpointError:
            refused += 1
    assert refused > count / 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run without its data: all that it shows is in its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        made = tiny_run(tmp_path_factory.mktemp("made"))
        rerun(made.folder, "evaluate")
        io.write_json(made.folder / "notes.json", {"1": "red", "2": "a corner"})
        folder = tmp_path_factory.mktemp("run") / "run"
        shutil.copytree(Run.open(pack(made, folder.with_name("x.prototree"))).folder, folder)
        shutil.copy(made.folder / "errors.json", folder)
        return Run(folder)


def facts(run: Run) -> dict[str, Any]:
    """Everything that tables and pages take from the folder."""
    tree = run.tree()
    store, pictures = AssetStore(tree, run.folder / "assets"), PrototypePictures(tree, stored=run.folder / "assets")
    readers: dict[str, Callable[[], Any]] = {
        "metrics": lambda: run.metrics,
        "notes": lambda: run.notes,
        "errors": lambda: read_errors(run.folder / "errors.json", tree.n_classes),
        "histograms": lambda: store.histograms() or LEFT_OUT,
        "class photos": lambda: plain(store.class_pictures()),
    }
    for row in range(tree.n_prototypes):
        source = pictures.of(row)
        readers[f"picture {row}"] = partial(plain, vars(source) if source.found else LEFT_OUT)
        readers[f"page {row}"] = partial(page, store, row, source)
    return {name: read_or_leave_out(read) for name, read in readers.items()}


def page(store: AssetStore, row: int, source: SourcePictures) -> Any:
    page = store.prototype(row, source, "")
    shown = [page.nearest, page.class_pass_rate, page.perturbation_effects, page.histogram, page.source.locations]
    return plain(shown) if page.nearest else LEFT_OUT


def read_or_leave_out(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except CheckpointError:
        return LEFT_OUT


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return plain(list(vars(value).values())) if hasattr(value, "__dataclass_fields__") else value


def is_fair(name: str, shown: Any, expected: Any) -> bool:
    if name == "class photos":  # of each class by itself
        return all(photos in ([], wanted) for photos, wanted in zip(shown, expected, strict=True))
    return bool(shown in (LEFT_OUT, expected))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [15, pytest.param(900, marks=pytest.mark.slow)])
def test_no_damaged_file_is_shown_as_if_nothing_were(run: Run, tmp_path: Path, count: int) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    expected, outcomes = facts(Run(folder)), Counter[bool]()
    assert LEFT_OUT not in map(str, expected.values())
    names = [
        path.relative_to(folder)
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".json", ".webp") and path.name not in ("tree.json", "packed.json")
    ]
    for seed in range(count):
        name, damage = names[seed % len(names)], BYTE_DAMAGES[seed % len(BYTE_DAMAGES)]
        before = (folder / name).read_bytes()
        damage(random.Random(seed), folder / name)
        shown = facts(Run(folder))
        wrong = [fact for fact in expected if not is_fair(fact, shown[fact], expected[fact])]
        assert wrong == [], f"seed {seed}: {damage.__name__} in {name}"
        outcomes[shown != expected] += 1
        (folder / name).write_bytes(before)
    assert outcomes[True] > count / 2

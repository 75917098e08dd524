"""Saved trees that were damaged in a thousand seeded ways: each is refused with one clear error, or loads unharmed."""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prototree import io
from prototree.core import checkpoint
from prototree.core.model import ProtoTree, PrototypeSource
from prototree.errors import CheckpointError

FEW, MANY = 150, 1500
NAMES = ("tree.json", "weights.safetensors")
ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**30, 1.5, float("nan"), float("inf"), "", "x" * 1000, [], {}, [[]], "../../etc/passwd",
    3_000_000,
)  # fmt: skip

Damage = Callable[[random.Random, Path], None]


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
        place = chance.randrange(len(content))
        for kind in (b"0123456789", b"abcdefghijklmnopqrstuvwxyz"):
            if content[place] in kind:
                content[place] = chance.choice(kind.replace(content[place : place + 1], b""))
                file.write_bytes(content)
                return


def swap_with_another(chance: random.Random, file: Path) -> None:
    """The file of the same name of another tree."""
    file.write_bytes((file.parent.parent / "other" / file.name).read_bytes())


def change_a_value(chance: random.Random, file: Path) -> None:
    """By hand, in an editor, without writing a checksum."""
    tree = file.parent / "tree.json"
    tree.write_text(json.dumps(with_odd_value(chance, json.loads(tree.read_text()))))


DAMAGES: tuple[Damage, ...] = (
    flip_bit, flip_bit, flip_bit, cut_off, lose_a_stretch, repeat_a_stretch, change_a_character, swap_with_another,
    change_a_value,
)  # fmt: skip


def places_in(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(place for key, one in inner for place in places_in(one, (*here, key)))]


def with_odd_value(chance: random.Random, content: Any) -> Any:
    """With one value taken out, or replaced by one of another kind."""
    *outer, last = chance.choice(places_in(content)[1:])
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


def is_same(one: ProtoTree, other: ProtoTree) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    what = ("class_names", "sources", "node_function", "calibration", "preprocessing")
    return (
        all(torch.equal(mine[name], theirs[name]) for name in mine)
        and one.topology.left.tolist() == other.topology.left.tolist()
        and one.topology.right.tolist() == other.topology.right.tolist()
        and all(getattr(one, name) == getattr(other, name) for name in what)
    )


def outcome(folder: Path, expected: ProtoTree) -> str:
    try:
        loaded = checkpoint.load(folder)
    except CheckpointError as error:
        return "refused" if "\n" not in str(error) else "refused in many lines"
    return "unharmed" if is_same(loaded, expected) else "different"


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_no_damaged_folder_loads_as_another_tree(
    folder: Path, tiny_tree: ProtoTree, count: int, record_property: Callable[[str, object], None]
) -> None:
    original = {name: (folder / name).read_bytes() for name in NAMES}
    found: Counter[str] = Counter()
    for seed in range(count):
        chance = random.Random(seed)
        damage, name = DAMAGES[seed % len(DAMAGES)], chance.choice((*NAMES, NAMES[0]))
        damage(chance, folder / name)
        found[what := outcome(folder, tiny_tree)] += 1
        assert what in ("refused", "unharmed"), f"seed {seed}: {damage.__name__} in {name}"
        for own, content in original.items():
            (folder / own).write_bytes(content)
    record_property(
        "counted",
        f"{count} damaged folders: {found['refused']} refused, {found['unharmed']} unharmed, 0 loaded as another tree",
    )


@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_odd_values_under_a_right_checksum_are_one_clear_error_or_a_tree(
    folder: Path, count: int, record_property: Callable[[str, object], None]
) -> None:
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
    record_property(
        "counted", f"{count} forged descriptions: {refused} refused, {count - refused} trees, no other error"
    )

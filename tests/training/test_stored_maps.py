import json
import os
from pathlib import Path

import pytest
import torch

from conftest import random_maps
from prototree.core.model import ProtoTree
from prototree.core.patches import nearest_patches
from prototree.data import open_data
from prototree.data.dataset import Sample
from prototree.data.loading import Entry, ViewDataset
from prototree.data.views import FULL, evaluation_views
from prototree.errors import DataError
from prototree.features.cache import (
    MapCache,
    StoredMaps,
    cache_all_borders,
    cache_borders,
    cache_features,
    kept_borders,
)
from prototree.features.registry import OWN_CACHE, maps_used, shared_folder
from tiny_training import write_squares


def test_maps_are_those_of_the_network_and_computed_once(tiny_tree: ProtoTree, tmp_path: Path) -> None:
    data = open_data(write_squares(tmp_path / "squares", train=2, test=1))
    dataset = ViewDataset(data.train, evaluation_views, tiny_tree.preprocessing)
    ticks: list[tuple[int, int]] = []
    stored = cache_features(tiny_tree, dataset, tmp_path / "maps", lambda *tick: ticks.append(tick))
    assert ticks[-1] == (6, 6)
    with torch.no_grad():
        expected = tiny_tree.features(torch.stack([dataset[i].image for i in range(6)]))
    torch.testing.assert_close(stored.maps(range(6)), expected, rtol=1e-4, atol=1e-5)
    assert stored.labels.tolist() == [sample.label for sample in data.train]
    again = cache_features(tiny_tree, dataset, tmp_path / "maps", lambda *tick: pytest.fail("computed again"))
    assert torch.equal(again.maps(range(6)), stored.maps(range(6)))


def read_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make a folder one that nothing can be written to; permissions do not bind who may do everything."""
    may, opened = os.access, os.open

    def guarded(path: Path, flags: int, *more: int) -> int:
        if Path(path).parent == folder and flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and may(path, mode))
    monkeypatch.setattr(os, "open", guarded)


def test_a_complete_cache_is_used_where_nothing_may_be_written(
    tiny_tree: ProtoTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = open_data(write_squares(tmp_path / "squares", train=2, test=1))
    dataset = ViewDataset(data.test, evaluation_views, tiny_tree.preprocessing)
    expected = cache_features(tiny_tree, dataset, tmp_path / "maps").maps(range(3))
    read_only(monkeypatch, tmp_path / "maps")
    again = cache_features(tiny_tree, dataset, tmp_path / "maps", lambda *tick: pytest.fail("computed again"))
    assert torch.equal(again.maps(range(3)), expected)


def test_maps_beside_a_run_are_used_where_nothing_may_be_written(
    tiny_tree: ProtoTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = open_data(write_squares(tmp_path / "squares", train=2, test=1))
    train, test = (ViewDataset(part, evaluation_views, tiny_tree.preprocessing) for part in (data.train, data.test))
    backbone, run = tiny_tree.features.backbone.unsplit(), tmp_path / "run"
    expected = cache_borders(backbone, train, shared_folder(run))
    read_only(monkeypatch, tmp_path / "prototree-maps")
    assert shared_folder(run) == run / OWN_CACHE
    missing: list[int] = []
    found = cache_all_borders(backbone, [train, test], shared_folder(run), run=run, begin=missing.append)
    assert missing == [len(test)], "what is missing is computed, the rest is not"
    assert found[0].names == expected.names
    assert len(list((run / OWN_CACHE).glob("*.f16"))) == 1
    assert maps_used(run) == expected.names
    assert kept_borders(backbone, train, run) is not None


@pytest.mark.parametrize(
    "said", ["{}", "[]", "", '{"version": 99, "unreadable": []}', '{"version": 1, "unreadable": [3]}']
)
def test_a_damaged_description_is_made_again(tiny_tree: ProtoTree, tmp_path: Path, said: str) -> None:
    data = open_data(write_squares(tmp_path / "squares", train=2, test=1))
    dataset = ViewDataset(data.test, evaluation_views, tiny_tree.preprocessing)
    expected = cache_features(tiny_tree, dataset, tmp_path / "maps").maps(range(3))
    (description,) = (tmp_path / "maps").glob("*.json")
    right = description.read_text()
    description.write_text(said)
    assert torch.equal(cache_features(tiny_tree, dataset, tmp_path / "maps").maps(range(3)), expected)
    assert description.read_text() == right


def test_a_truncated_file_is_computed_again(tiny_tree: ProtoTree, tmp_path: Path) -> None:
    data = open_data(write_squares(tmp_path / "squares", train=2, test=1))
    dataset = ViewDataset(data.test, evaluation_views, tiny_tree.preprocessing)
    expected = cache_features(tiny_tree, dataset, tmp_path / "maps").maps(range(3))
    (file,) = (tmp_path / "maps").glob("*.f32")
    file.write_bytes(b"half")
    assert torch.equal(cache_features(tiny_tree, dataset, tmp_path / "maps").maps(range(3)), expected)


@pytest.mark.parametrize("damage", ["flipped", "zeros", "unreadable"])
def test_damaged_maps_are_computed_again(tiny_tree: ProtoTree, tmp_path: Path, damage: str) -> None:
    data = open_data(write_squares(tmp_path / "squares", train=2, test=1))
    dataset = ViewDataset(data.test, evaluation_views, tiny_tree.preprocessing)
    expected = cache_features(tiny_tree, dataset, tmp_path / "maps").maps(range(3))
    (file,), (description,) = (tmp_path / "maps").glob("*.f32"), (tmp_path / "maps").glob("*.json")
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[-1] ^= 0x40
        file.write_bytes(content)
    elif damage == "zeros":  # of a disk that was cut off while it wrote
        file.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    else:
        described = json.loads(description.read_text())
        description.write_text(json.dumps(described | {"unreadable": [1]}))
    assert torch.equal(cache_features(tiny_tree, dataset, tmp_path / "maps").maps(range(3)), expected)


def test_photos_that_cannot_be_read_are_left_out(tiny_tree: ProtoTree, tmp_path: Path) -> None:
    data = open_data(write_squares(tmp_path / "squares", train=2, test=1))
    dataset = ViewDataset(data.test, evaluation_views, tiny_tree.preprocessing)
    data.test[1].path.write_bytes(b"no image")
    stored = cache_features(tiny_tree, dataset, tmp_path / "maps")
    assert [entry.sample_index for entry in stored.entries] == [0, 2]
    for sample in data.test:
        sample.path.unlink()
    with pytest.raises(DataError, match="readable photo"):
        cache_features(tiny_tree, dataset, tmp_path / "maps")


def test_forbidden_patches_are_not_found() -> None:
    maps, prototypes = random_maps(0, 5, 3, 2, 4, dtype=torch.float32), random_maps(1, 2, 3, 1, 1, dtype=torch.float32)
    entries = tuple(Entry(i, Sample(Path(f"{i}.png"), 0), FULL) for i in range(5))
    stored = StoredMaps(MapCache((maps.numpy()[None],), entries, frozenset()))
    free = stored.nearest(prototypes)
    assert torch.equal(free.distance, nearest_patches(maps, prototypes).distance)
    mask = torch.zeros(8, dtype=torch.bool)
    mask[free.patch[2, 0]] = True
    found = stored.nearest(prototypes, {2: mask, 3: torch.ones(8, dtype=torch.bool)})
    others = [i for i in range(8) if not mask[i]]
    for n in range(2):
        apart = [(maps[2].flatten(1)[:, i] - prototypes[n, :, 0, 0]).norm().item() for i in others]
        assert found.distance[2, n].item() == pytest.approx(min(apart), rel=1e-5)
        assert int(found.patch[2, n]) == others[apart.index(min(apart))]
    assert torch.isinf(found.distance[3]).all()
    assert torch.equal(found.distance[:2], free.distance[:2])

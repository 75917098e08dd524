"""A network that looks twice: what each look shows, where its patches lie, and that the nearest of all looks counts."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool2d

from prototree import files
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.crops import FULL_ONLY, Crops, checked, extent, look, stacked
from prototree.backbones.geometry import Box, PatchGrid
from prototree.backbones.inference import frozen_features
from prototree.backbones.preprocessing import Preprocessing
from prototree.core import checkpoint
from prototree.core.localization import peak_places
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.data import ImageData, open_data
from prototree.data.loading import ViewDataset
from prototree.data.views import FULL, evaluation_views
from prototree.errors import CheckpointError, ConfigError, ShapeError
from prototree.explain.attribution import Probes, attribute, hidden
from prototree.explain.localization import InputFrame
from prototree.features.batches import looking, maps_of
from prototree.features.cache import MapCache, cache_borders, cache_features, kept_borders
from prototree.features.registry import shared_folder
from tiny_training import write_squares

TWICE: Crops = (1.0, 0.7)


@pytest.fixture
def data(tmp_path: Path) -> ImageData:
    return open_data(write_squares(tmp_path / "squares", train=2, test=1))


def cells(images: torch.Tensor) -> torch.Tensor:
    """A network whose map is the mean colour of each of 4×4 cells."""
    return avg_pool2d(images, images.shape[-1] // 4)


def test_a_look_shows_the_middle_enlarged() -> None:
    image = torch.zeros(1, 3, 20, 20)
    image[:, :, 5:15, 5:15] = 1
    assert extent(0.5, 20) == Box(5.0, 5.0, 15.0, 15.0)
    assert torch.equal(look(image, 0.5), torch.ones(1, 3, 20, 20))
    assert look(image, 1.0) is image
    assert torch.equal(look(image[0], 0.5), look(image, 0.5)[0]), "one picture as well as a batch"
    ramp = torch.arange(20.0).expand(1, 3, 20, 20)
    middle = look(ramp, 0.5)[0, 0, 0]
    assert middle[10:] - middle[:10] == pytest.approx(5 * np.ones(10), abs=0.51), "half as steep"


@pytest.mark.parametrize("crops", [(), (0.7,), (1.0, 1.0), (1.0, 0.5, 0.7), (1.0, 0.05), (1.0, 0.9, 0.8, 0.7, 0.6)])
def test_only_ever_closer_looks_are_looks(crops: Crops) -> None:
    with pytest.raises(ConfigError, match="each smaller than the one before"):
        checked(crops)


@pytest.mark.parametrize("place", [0, 5, 15, 16, 19, 26, 31])
def test_a_patch_lies_where_its_look_showed_it(place: int) -> None:
    grid = PatchGrid(4, 4, 80, extents=tuple(extent(share, 80) for share in (1.0, 0.5)))
    assert (grid.shape, grid.n_patches) == ((8, 4), 32)
    row, column = grid.place(place)
    box = grid.box(row, column)
    image = torch.zeros(1, 3, 80, 80)
    left, top, right, bottom = (int(edge) for edge in box.edges)
    image[:, :, top:bottom, left:right] = 1
    seen = stacked(cells, image, (1.0, 0.5))[0, 0].flatten()
    assert seen[place] > 0.9
    assert grid.holds(row, column)
    assert grid.number(row, column) == place
    same_look = seen[:16] if place < 16 else seen[16:]
    assert (same_look > 0.3).sum() == 1


def test_what_is_hidden_is_hidden_from_all_looks() -> None:
    images = torch.rand(1, 3, 80, 80, generator=torch.Generator().manual_seed(0))
    before = stacked(cells, images, (1.0, 0.5))
    corner = stacked(cells, hidden(images, [Box(0.0, 0.0, 20.0, 20.0)]), (1.0, 0.5))
    assert not torch.equal(corner[:, :, :4], before[:, :, :4])
    assert torch.equal(corner[:, :, 4:], before[:, :, 4:]), "the second look does not reach there"
    middle = stacked(cells, hidden(images, [Box(40.0, 40.0, 60.0, 60.0)]), (1.0, 0.5))
    changed = (middle != before).any(dim=1)[0]
    assert changed[:4].nonzero().tolist() == [[2, 2]], "a cell of the first look"
    assert changed[6:, 2:].all(), "a quarter of the second"
    assert not changed[4].any()


def test_the_nearest_patch_of_all_looks_decides(tiny_tree: ProtoTree) -> None:
    images = torch.rand(5, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        apart = [tiny_tree.route(tiny_tree.features(look(images, share))) for share in TWICE]
        routed = tiny_tree.look(TWICE)(images)
    first, closer = (one.distance for one in apart)
    torch.testing.assert_close(routed.distance, torch.minimum(first, closer))
    assert (closer < first).any()
    assert (closer > first).any()
    is_closer = routed.patch >= tiny_tree.grid.n_patches // 2
    assert torch.equal(is_closer, closer < first)
    torch.testing.assert_close(frozen_features(tiny_tree.features)(images), tiny_tree.features(images))


def test_trunk_and_tail_look_once(tiny_backbone: Backbone) -> None:
    images, backbone = torch.rand(1, 3, 64, 64), copy.copy(tiny_backbone.eval())
    expected, rows = backbone(images), backbone.map_size[0]
    backbone.crops = TWICE
    assert backbone(images).shape[2] == 2 * rows
    assert torch.equal(backbone(images)[:, :, :rows], expected)
    assert torch.equal(backbone.tail(backbone.trunk(images)), expected)


def test_larger_prototypes_would_reach_from_one_look_into_another(tiny_backbone: Backbone) -> None:
    tree = ProtoTree(Topology.full(1), FeatureExtractor(tiny_backbone, 4), 2, (2, 1))
    with pytest.raises(ShapeError, match=r"prototypes of one cell in a tree that looks 2 times.*got 2×1"):
        tree.look(TWICE)
    assert tree.look(FULL_ONLY).grid.extents == ()


def test_a_peak_does_not_reach_into_another_look() -> None:
    apart = torch.full((2, 8, 4), 50.0)
    apart[:, 3, 1] = apart[:, 4, 1] = 0.0  # last row of the first look, first row of the second
    row, column = peak_places(apart, torch.tensor([13, 17]), rows_per_crop=4)
    assert row.tolist() == pytest.approx([3.0, 4.0])
    assert column.tolist() == pytest.approx([1.0, 1.0])


def test_heat_is_the_highest_of_all_looks() -> None:
    preprocessing, grid = Preprocessing(size=80, resize=80), np.zeros((8, 4))
    extents = (extent(1.0, 80), extent(0.5, 80))
    grid[0, 0], grid[7, 3] = 0.5, 1.0  # the upper left corner of all, the lower right corner of the middle
    heat = InputFrame(FULL, (80, 80), preprocessing).heat(grid, (80, 80), extents=extents)
    assert heat[5, 5] == pytest.approx(0.5, abs=0.1)
    assert np.unravel_index(heat.argmax(), heat.shape) == pytest.approx((55, 55), abs=3)
    assert heat[75, 75] == 0.0


def test_a_tree_that_looks_twice_comes_back_and_older_ones_look_once(tiny_tree: ProtoTree, tmp_path: Path) -> None:
    checkpoint.save(tiny_tree, tmp_path / "once")
    once = checkpoint.fingerprint(tiny_tree)
    checkpoint.save(tiny_tree.look(TWICE), tmp_path / "twice")
    loaded = checkpoint.load(tmp_path / "twice")
    assert loaded.features.backbone.crops == TWICE
    assert loaded.grid == tiny_tree.grid
    assert checkpoint.fingerprint(loaded) != once
    images = torch.rand(2, 3, 64, 64)
    assert torch.equal(loaded.predict(images).soft, tiny_tree.predict(images).soft)

    header = json.loads((tmp_path / "once" / "tree.json").read_text())
    del header["backbone"]["crops"], header[files.CHECKSUM]
    files.write_json(tmp_path / "once" / "tree.json", {**header, "version": 3})
    assert checkpoint.load(tmp_path / "once").features.backbone.crops == FULL_ONLY


@pytest.mark.parametrize("crops", [[], [0.7], [1.0, 0.0], [1.0, 0.7, 0.8], [1.0, float("nan")], [1, "0.7"], 0.7])
def test_looks_that_are_none_are_refused(tiny_tree: ProtoTree, tmp_path: Path, crops: object) -> None:
    checkpoint.save(tiny_tree, tmp_path)
    header = json.loads((tmp_path / "tree.json").read_text())
    header["backbone"]["crops"] = crops
    del header[files.CHECKSUM]
    (tmp_path / "tree.json").write_text(json.dumps(files.sealed(header)))
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.load(tmp_path)


def test_kept_maps_hold_all_looks(tiny_tree: ProtoTree, data: ImageData, tmp_path: Path) -> None:
    features, run = tiny_tree.look(TWICE).features, tmp_path / "run"
    backbone = features.backbone
    dataset = ViewDataset(data.train, evaluation_views, tiny_tree.preprocessing)
    run.mkdir()
    whole = backbone.unsplit()
    cache_borders(whole, dataset, shared_folder(run))
    assert kept_borders(backbone, dataset, run) is None, "one of two looks"
    cache_borders(whole, dataset.looking(0.7), shared_folder(run))
    kept = kept_borders(backbone, dataset, run)
    assert kept is not None
    assert len(kept.names) == 2
    with torch.no_grad():
        expected = tiny_tree.features(torch.stack([dataset[i].image for i in range(len(dataset))]))
        batches = looking(features, dataset, run=run)
        found = torch.cat([maps for maps, _, _ in maps_of(batches, features)])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
    for place, known in (("computed", None), ("from kept", kept)):
        maps = cache_features(tiny_tree, dataset, tmp_path / place, None, known)
        torch.testing.assert_close(maps.maps(range(len(dataset))), expected, rtol=0, atol=2e-3)


def test_maps_of_looks_stay_together(tiny_tree: ProtoTree, data: ImageData, tmp_path: Path) -> None:
    dataset = ViewDataset(data.train, evaluation_views, tiny_tree.preprocessing)
    backbone = tiny_tree.features.backbone.unsplit()
    data.train[2].path.write_bytes(b"no image")
    both = MapCache.stack_crops([cache_borders(backbone, dataset.looking(share), tmp_path) for share in TWICE])
    every = both.read(range(6), 0)
    assert every.entries.tolist() == [0, 1, 3, 4, 5]
    rows = backbone.map_size[0]
    assert torch.equal(both.only([4, 2, 0]).read(range(3), 0).values, every.values[[3, 0]])
    joined = both.only([5]).join(both.only([1, 0]))
    assert torch.equal(joined.read(range(3), 0).values, every.values[[4, 1, 0]])
    assert torch.equal(both.same(dataset.entries[3:]).read([0], 0).values, every.values[[2]])
    with torch.no_grad():
        second = backbone.eval().once(look(dataset[0].image[None], 0.7))
    torch.testing.assert_close(every.values[:1, :, rows:], second, rtol=2e-3, atol=2e-3)


def test_attribution_runs_only_the_look_that_shows_the_patch(
    tiny_tree: ProtoTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tiny_tree.look(TWICE).eval()
    n_patches = tree.features.backbone.map_size[0] * tree.features.backbone.map_size[1]
    patch = torch.tensor([n_patches, 0, 2 * n_patches - 1])
    size = tree.preprocessing.size
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))
    probes = Probes.of(tree, images, [0, 1, 2], patch)
    expected = attribute(lambda images: tree.features(images), probes, torch.Generator().manual_seed(1))
    seen: list[int] = []
    once = tree.features.backbone.once

    def counted(images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return once(images)

    monkeypatch.setattr(tree.features.backbone, "once", counted)
    found = attribute(tree.features, probes, torch.Generator().manual_seed(1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert sum(seen) == 3 * len(probes), "three steps on the way to each picture, at one look each"

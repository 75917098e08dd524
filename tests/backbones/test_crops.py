"""Centre crops: what each shows, where its patches lie, and that the nearest patch of all crops counts."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool2d

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.crops import FULL_ONLY, Crops, center_crop, checked_crops, crop_box, stacked
from prototree.backbones.geometry import Box, PatchGrid, Preprocessing
from prototree.backbones.inference import frozen_features
from prototree.core import checkpoint
from prototree.core.localization import peak_places
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.data.crops import FULL_IMAGE
from prototree.errors import ConfigError, ShapeError
from prototree.explanation.attribution import Probes, attribute, hidden
from prototree.explanation.localization import InputFrame

TWICE: Crops = (1.0, 0.7)


def cells(images: torch.Tensor) -> torch.Tensor:
    """A network whose map is the mean colour of each of 4×4 cells."""
    return avg_pool2d(images, images.shape[-1] // 4)


def test_a_centre_crop_is_the_middle_enlarged() -> None:
    image = torch.zeros(1, 3, 20, 20)
    image[:, :, 5:15, 5:15] = 1
    assert crop_box(0.5, 20) == Box(5.0, 5.0, 15.0, 15.0)
    assert torch.equal(center_crop(image, 0.5), torch.ones(1, 3, 20, 20))
    assert center_crop(image, 1.0) is image
    assert torch.equal(center_crop(image[0], 0.5), center_crop(image, 0.5)[0]), "one picture as well as a batch"
    ramp = torch.arange(20.0).expand(1, 3, 20, 20)
    middle = center_crop(ramp, 0.5)[0, 0, 0]
    assert middle[10:] - middle[:10] == pytest.approx(5 * np.ones(10), abs=0.51), "half as steep"


@pytest.mark.parametrize("crops", [(), (0.7,), (1.0, 1.0), (1.0, 0.5, 0.7), (1.0, 0.05), (1.0, 0.9, 0.8, 0.7, 0.6)])
def test_only_ever_smaller_crops_are_allowed(crops: Crops) -> None:
    with pytest.raises(ConfigError):
        checked_crops(crops)


@pytest.mark.parametrize("place", [0, 5, 15, 16, 19, 26, 31])
def test_a_patch_lies_where_its_crop_showed_it(place: int) -> None:
    grid = PatchGrid(4, 4, 80, extents=tuple(crop_box(fraction, 80) for fraction in (1.0, 0.5)))
    assert (grid.shape, grid.n_patches) == ((8, 4), 32)
    row, column = grid.row_column(place)
    box = grid.box(row, column)
    image = torch.zeros(1, 3, 80, 80)
    left, top, right, bottom = (int(edge) for edge in box.edges)
    image[:, :, top:bottom, left:right] = 1
    seen = stacked(cells, image, (1.0, 0.5))[0, 0].flatten()
    assert seen[place] > 0.9
    assert grid.has_patch(row, column)
    assert grid.index(row, column) == place
    same_crop = seen[:16] if place < 16 else seen[16:]
    assert (same_crop > 0.3).sum() == 1


def test_what_is_occluded_is_occluded_in_all_crops() -> None:
    images = torch.rand(1, 3, 80, 80, generator=torch.Generator().manual_seed(0))
    before = stacked(cells, images, (1.0, 0.5))
    corner = stacked(cells, hidden(images, [Box(0.0, 0.0, 20.0, 20.0)]), (1.0, 0.5))
    assert not torch.equal(corner[:, :, :4], before[:, :, :4])
    assert torch.equal(corner[:, :, 4:], before[:, :, 4:]), "the second crop ends before it"
    middle = stacked(cells, hidden(images, [Box(40.0, 40.0, 60.0, 60.0)]), (1.0, 0.5))
    changed = (middle != before).any(dim=1)[0]
    assert changed[:4].nonzero().tolist() == [[2, 2]], "a cell of the first crop"
    assert changed[6:, 2:].all(), "a quarter of the second"
    assert not changed[4].any()


def test_the_nearest_patch_of_all_crops_decides(tiny_tree: ProtoTree) -> None:
    images = torch.rand(5, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        apart = [tiny_tree.forward_features(tiny_tree.features(center_crop(images, fraction))) for fraction in TWICE]
        routed = tiny_tree.set_crops(TWICE)(images)
    first, closer = (one.distance for one in apart)
    torch.testing.assert_close(routed.distance, torch.minimum(first, closer))
    assert (closer < first).any()
    assert (closer > first).any()
    is_closer = routed.patch >= tiny_tree.grid.n_patches // 2
    assert torch.equal(is_closer, closer < first)
    torch.testing.assert_close(frozen_features(tiny_tree.features)(images), tiny_tree.features(images))


def test_split_features_are_of_the_full_image_alone(tiny_backbone: Backbone) -> None:
    images, backbone = torch.rand(1, 3, 64, 64), copy.copy(tiny_backbone.eval())
    expected, rows = backbone(images), backbone.map_size[0]
    backbone.crops = TWICE
    assert backbone(images).shape[2] == 2 * rows
    assert torch.equal(backbone(images)[:, :, :rows], expected)
    assert torch.equal(backbone.last_block(backbone.split_features(images)), expected)


def test_larger_prototypes_would_span_two_crops(tiny_backbone: Backbone) -> None:
    tree = ProtoTree(Topology.full(1), FeatureExtractor(tiny_backbone, 4), 2, (2, 1))
    with pytest.raises(ShapeError):
        tree.set_crops(TWICE)
    assert tree.set_crops(FULL_ONLY).grid.extents == ()


def test_a_peak_does_not_span_two_crops() -> None:
    apart = torch.full((2, 8, 4), 50.0)
    apart[:, 3, 1] = apart[:, 4, 1] = 0.0  # last row of the first crop, first row of the second
    row, column = peak_places(apart, torch.tensor([13, 17]), rows_per_crop=4)
    assert row.tolist() == pytest.approx([3.0, 4.0])
    assert column.tolist() == pytest.approx([1.0, 1.0])


def test_heat_is_the_highest_of_all_crops() -> None:
    preprocessing, grid = Preprocessing(size=80, resize=80), np.zeros((8, 4))
    extents = (crop_box(1.0, 80), crop_box(0.5, 80))
    grid[0, 0], grid[7, 3] = 0.5, 1.0  # the upper left corner of all, the lower right corner of the middle
    heat = InputFrame(FULL_IMAGE, (80, 80), preprocessing).heat(grid, (80, 80), extents=extents)
    assert heat[5, 5] == pytest.approx(0.5, abs=0.1)
    assert np.unravel_index(heat.argmax(), heat.shape) == pytest.approx((55, 55), abs=3)
    assert heat[75, 75] == 0.0


def test_a_tree_with_two_crops_comes_back(tiny_tree: ProtoTree, tmp_path: Path) -> None:
    once = checkpoint.fingerprint(tiny_tree)
    checkpoint.save(tiny_tree.set_crops(TWICE), tmp_path / "twice")
    loaded = checkpoint.load(tmp_path / "twice")
    assert loaded.features.backbone.crops == TWICE
    assert loaded.grid == tiny_tree.grid
    assert checkpoint.fingerprint(loaded) != once
    images = torch.rand(2, 3, 64, 64)
    assert torch.equal(loaded.predict(images).soft, tiny_tree.predict(images).soft)


def test_attribution_runs_only_the_crop_that_shows_the_patch(
    tiny_tree: ProtoTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tiny_tree.set_crops(TWICE).eval()
    n_patches = tree.features.backbone.map_size[0] * tree.features.backbone.map_size[1]
    patch = torch.tensor([n_patches, 0, 2 * n_patches - 1])
    size = tree.preprocessing.size
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))
    probes = Probes.of(tree, images, [0, 1, 2], patch)
    expected = attribute(lambda images: tree.features(images), probes, torch.Generator().manual_seed(1))
    seen: list[int] = []
    once = tree.features.backbone.forward_single

    def counted(images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return once(images)

    monkeypatch.setattr(tree.features.backbone, "forward_single", counted)
    found = attribute(tree.features, probes, torch.Generator().manual_seed(1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert sum(seen) == 3 * len(images), "three steps on the way to each picture, at one crop each"

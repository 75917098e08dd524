"""What a similarity depends on, with networks of which that is known."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from prototree.backbones.geometry import Preprocessing
from prototree.core.nodes import LN2, PAPER
from prototree.data import Box
from prototree.explanation.attribution import (
    Probes,
    attribute,
    hidden,
    hide_boxes,
    occlude,
    patch_distances,
    random_boxes,
    similarities,
)
from prototree.explanation.localization import smallest_box

INPUT = Preprocessing(size=32, resize=32)


def looks_at_its_cell(images: Tensor) -> Tensor:
    """A 4×4 map whose cells are the mean colours of their 8×8 pixels."""
    return avg_pool2d(images, 8)


def looks_elsewhere(images: Tensor) -> Tensor:
    """The same, but each cell sees the pixels two cells to its left."""
    return looks_at_its_cell(images).roll(2, dims=3)


def probe(network: object = looks_at_its_cell, row: int = 1, column: int = 3) -> Probes:
    """A grey image with one bright square in row 1, column 3, and the prototype that a network finds there."""
    image = torch.full((1, 3, 32, 32), 0.2)
    image[..., 8:16, 24:32] = torch.tensor([2.0, -1.0, 1.0]).view(3, 1, 1)
    place = column if network is looks_at_its_cell else (column + 2) % 4
    prototype = network(image)[:, :, row : row + 1, place : place + 1]  # type: ignore[operator]
    return Probes(image, prototype, torch.tensor([row * 4 + place]), torch.full((1,), LN2), PAPER)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("network", [looks_at_its_cell, looks_elsewhere])
def test_attribution_is_where_the_network_looks_and_not_where_the_cell_is(network: object) -> None:
    grid = attribute(network, probe(network), generator())[0].numpy()  # type: ignore[arg-type]
    assert grid.shape == (8, 8)
    box = smallest_box(grid, INPUT)
    assert Box(24.0, 8.0, 32.0, 16.0).contains_box(box)
    assert grid[2:4, 6:8].sum() > 0.99 * grid.sum()


def test_attribution_adds_up_to_the_log_similarity_gained_over_the_mean_colour() -> None:
    probes = probe()
    grey = probes.images.mean(dim=(2, 3), keepdim=True).expand_as(probes.images)
    there = -patch_distances(looks_at_its_cell(probes.images), probes.prototypes)[0, probes.patch[0]]
    nothing = -patch_distances(looks_at_its_cell(grey), probes.prototypes)[0, probes.patch[0]]
    assert float(attribute(looks_at_its_cell, probes, generator()).sum()) == pytest.approx(
        float(there - nothing), rel=0.02
    )


def test_occlusion_finds_the_place_for_several_prototypes_at_once() -> None:
    probes = probe()
    other = torch.full_like(probes.prototypes, 0.2)  # found in 15 of 16 cells: hiding no window takes it away
    both = dataclasses.replace(
        probes.with_images(probes.images.expand(2, -1, -1, -1), [0, 0]),
        prototypes=torch.cat([probes.prototypes, other]),
    )
    fall = occlude(looks_at_its_cell, both, similarities(looks_at_its_cell, both).tolist())
    assert Box(20.0, 4.0, 32.0, 20.0).contains_box(smallest_box(fall[0].numpy(), INPUT))
    assert float(fall[1].abs().max()) < 1e-6


def test_hiding_the_right_box_costs_more_than_random_ones() -> None:
    probes = probe()
    boxes = [[Box(24.0, 8.0, 32.0, 16.0), Box(0.0, 0.0, 8.0, 8.0)]]
    right, wrong = hide_boxes(looks_at_its_cell, probes, boxes, [1.0], generator())[0]
    assert right.before == 1.0
    assert right.box_occluded < 0.2
    assert right.random_occluded > 0.5
    assert wrong.box_occluded == pytest.approx(1.0)


def test_nothing_to_hide() -> None:
    assert hide_boxes(looks_at_its_cell, probe(), [[]], [1.0], generator()) == [[]]


def test_hidden_pixels_get_the_mean_colour_and_others_stay() -> None:
    images = torch.rand(2, 3, 8, 8)
    after = hidden(images, [Box(2.0, 1.0, 4.4, 3.0), Box(0.0, 0.0, 8.0, 8.0)])
    mean = images.mean(dim=(2, 3))
    assert torch.allclose(after[0, :, 1:3, 2:4], mean[0].view(3, 1, 1).expand(3, 2, 2))
    kept = torch.ones(8, 8, dtype=torch.bool)
    kept[1:3, 2:4] = False  # the pixel from 4 to 5 has its centre outside
    assert torch.equal(after[0][:, kept], images[0][:, kept])
    assert torch.allclose(after[1], mean[1].view(3, 1, 1).expand(3, 8, 8))


def test_random_boxes_keep_their_size_and_stay_inside() -> None:
    for box in random_boxes(Box(1.0, 2.0, 6.0, 12.0), 32, 50, generator()):
        assert (box.width, box.height) == pytest.approx((5.0, 10.0))
        assert Box(-1e-6, -1e-6, 32.0 + 1e-6, 32.0 + 1e-6).contains_box(box)
    whole = Box(0.0, 0.0, 32.0, 32.0)
    assert random_boxes(whole, 32, 1, generator()) == [whole]

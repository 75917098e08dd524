"""What a similarity depends on, with networks of which that is known."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from prototree.backbones.geometry import Preprocessing
from prototree.core.nodes import LN2, PAPER
from prototree.data import Box
from prototree.explanation.attribution import (
    PERTURBATIONS,
    Probes,
    _blur,
    attribute,
    bend_shape,
    hidden,
    lower_contrast,
    occlude,
    patch_distances,
    random_boxes,
    remove_saturation,
    similarities,
    smooth_texture,
    turn_hue,
)
from prototree.explanation.localization import Finding, occlude_findings, smallest_box

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
    boxes, grid = (Box(24.0, 8.0, 32.0, 16.0), Box(0.0, 0.0, 8.0, 8.0)), np.zeros((1, 1))
    findings = [[Finding("cell", box, grid) for box in boxes]]
    right, wrong = (f.occlusion for f in occlude_findings(looks_at_its_cell, probe(), findings, [1.0], generator())[0])
    assert right.before == 1.0
    assert right.box_occluded < 0.2
    assert right.random_occluded > 0.5
    assert wrong.box_occluded == pytest.approx(1.0)
    assert occlude_findings(looks_at_its_cell, probe(), [[]], [1.0], generator()) == [[]]


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
    rng = generator()
    for box in [box for _ in range(20) for box in random_boxes(Box(1.0, 2.0, 6.0, 12.0), 32, rng)]:
        assert (box.width, box.height) == pytest.approx((5.0, 10.0))
        assert Box(-1e-6, -1e-6, 32.0 + 1e-6, 32.0 + 1e-6).contains_box(box)
    whole = Box(0.0, 0.0, 32.0, 32.0)
    assert set(random_boxes(whole, 32, rng)) == {whole}


LUMA = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)


def images(seed: int = 0) -> Tensor:
    coarse = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(64, 64), mode="bilinear")


def lightness(x: Tensor) -> Tensor:
    return (LUMA * x).sum(dim=1)


@pytest.mark.parametrize("name", list(PERTURBATIONS))
def test_every_alteration_alters_and_stays_in_range(name: str) -> None:
    before = images()
    after = PERTURBATIONS[name](before)  # type: ignore[index]
    assert after.shape == before.shape
    assert after.min() >= -1e-5
    assert after.max() <= 1 + 1e-5
    assert torch.equal(after, PERTURBATIONS[name](before))  # type: ignore[index]
    textured = before + 0.1 * torch.rand(before.shape, generator=torch.Generator().manual_seed(1)) - 0.05
    assert (PERTURBATIONS[name](textured.clamp(0, 1)) - textured).abs().mean() > 0.005  # type: ignore[index]


def test_hue_keeps_lightness_and_turns_colours_round() -> None:
    before = images()
    after = turn_hue(before)
    assert torch.allclose(lightness(after), lightness(before), atol=1e-5)
    colour, turned = before - lightness(before)[:, None], after - lightness(after)[:, None]
    cosine = torch.cosine_similarity(colour, turned, dim=1)
    assert cosine[colour.norm(dim=1) > 0.05].max() < -0.999
    muted = 0.4 + 0.2 * images()  # room on the screen on both sides: nothing is weakened
    assert torch.allclose(turn_hue(turn_hue(muted)), muted, atol=1e-5)


def test_grey_keeps_lightness_and_contrast_the_mean_colour() -> None:
    grey, flat = remove_saturation(images()), lower_contrast(images())
    assert torch.allclose(lightness(grey), lightness(images()), atol=1e-5)
    assert torch.allclose(grey[:, 0], grey[:, 2])
    assert torch.allclose(turn_hue(grey), grey, atol=1e-6)
    assert torch.allclose(flat.mean(dim=(2, 3)), images().mean(dim=(2, 3)), atol=1e-5)
    assert torch.allclose(flat.std(), 0.4 * images().std(), rtol=0.3)


def test_texture_goes_and_edges_stay() -> None:
    image = torch.zeros(1, 3, 64, 64)
    image[..., 32:] = 0.8
    noise = 0.06 * torch.from_numpy(np.random.default_rng(0).standard_normal((1, 3, 64, 64)).astype(np.float32))
    noisy = (image + 0.1 + noise).clamp(0, 1)
    after = smooth_texture(noisy)
    assert after[..., 4:28].std() < 0.4 * noisy[..., 4:28].std()
    step = (after[..., 33:35].mean() - after[..., 29:31].mean()) / 0.8
    assert step > 0.85


@pytest.mark.parametrize("radius", [1, 3, 40])
def test_a_blur_is_the_mean_over_a_window_that_is_mirrored_at_the_edges(radius: int) -> None:
    image = images()
    edge = min(radius, image.shape[-1] - 1)
    expected = avg_pool2d(pad(image, (edge,) * 4, mode="reflect"), 2 * edge + 1, stride=1)
    torch.testing.assert_close(_blur(image, radius), expected, atol=1e-5, rtol=0)


def test_shape_moves_outlines_and_keeps_colours() -> None:
    image = torch.zeros(1, 3, 64, 64)
    image[..., 20:44, 20:44] = torch.tensor([0.9, 0.2, 0.1]).view(3, 1, 1)
    after = bend_shape(image)
    moved = (after - image).abs().amax(dim=1)[0] > 0.3
    assert 0.02 < moved.float().mean() < 0.3
    assert not avg_pool2d(moved[None, None].float(), 9)[0, 0, 3, 3]  # the middle of the square is as it was
    assert after.mean().item() == pytest.approx(image.mean().item(), rel=0.15)

"""Each alteration changes its property and leaves the others."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from prototree.explanation.perturbations import (
    ALTERATIONS,
    _blur,
    bend_shape,
    lower_contrast,
    remove_saturation,
    smooth_texture,
    turn_hue,
)

LUMA = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)


def images(seed: int = 0) -> Tensor:
    coarse = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(64, 64), mode="bilinear")


def lightness(x: Tensor) -> Tensor:
    return (LUMA * x).sum(dim=1)


@pytest.mark.parametrize("name", list(ALTERATIONS))
def test_every_alteration_alters_and_stays_in_range(name: str) -> None:
    before = images()
    after = ALTERATIONS[name](before)  # type: ignore[index]
    assert after.shape == before.shape
    assert after.min() >= -1e-5
    assert after.max() <= 1 + 1e-5
    assert torch.equal(after, ALTERATIONS[name](before))  # type: ignore[index]
    textured = before + 0.1 * torch.rand(before.shape, generator=torch.Generator().manual_seed(1)) - 0.05
    assert (ALTERATIONS[name](textured.clamp(0, 1)) - textured).abs().mean() > 0.005  # type: ignore[index]


def test_hue_keeps_lightness_and_turns_colours_round() -> None:
    before = images()
    after = turn_hue(before)
    assert torch.allclose(lightness(after), lightness(before), atol=1e-5)
    colour, turned = before - lightness(before)[:, None], after - lightness(after)[:, None]
    cosine = torch.cosine_similarity(colour, turned, dim=1)
    assert cosine[colour.norm(dim=1) > 0.05].max() < -0.999
    muted = 0.4 + 0.2 * images()  # room on the screen on both sides: nothing is weakened
    assert torch.allclose(turn_hue(turn_hue(muted)), muted, atol=1e-5)


def test_grey_keeps_lightness() -> None:
    after = remove_saturation(images())
    assert torch.allclose(lightness(after), lightness(images()), atol=1e-5)
    assert torch.allclose(after[:, 0], after[:, 2])
    grey = torch.full((1, 3, 8, 8), 0.3)
    assert torch.allclose(turn_hue(grey), grey, atol=1e-6)


def test_contrast_keeps_the_mean_colour() -> None:
    after = lower_contrast(images())
    assert torch.allclose(after.mean(dim=(2, 3)), images().mean(dim=(2, 3)), atol=1e-5)
    assert torch.allclose(after.std(), 0.4 * images().std(), rtol=0.3)


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

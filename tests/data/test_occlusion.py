"""Views with a box occluded."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from prototree.backbones.crops import center_crop
from prototree.backbones.geometry import Box, Preprocessing
from prototree.data.crops import FULL_IMAGE, View, evaluation_views, resize_square
from prototree.data.dataset import Sample
from prototree.data.loader import ViewDataset
from prototree.data.occlusion import Fill, OccludedView, OccludedViews

BOX = Box(0.25, 0.5, 0.5, 0.75)


@pytest.fixture
def square() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def hidden(fill: Fill, seed: int = 0) -> OccludedView:
    return OccludedView("hidden 1", box=BOX, fill=fill, seed=seed)


@pytest.mark.parametrize("fill", ["blur", "noise", "margin"])
def test_the_place_is_hidden_and_nothing_else(square: Image.Image, fill: Fill) -> None:
    before, after = np.asarray(square).astype(int), np.asarray(hidden(fill).apply_effect(square)).astype(int)
    differs = (before != after).any(axis=2)
    assert differs[20:30, 10:20].mean() > 0.9
    differs[20:30, 10:20] = False
    assert not differs.any()
    here = after[20:30, 10:20].reshape(-1, 3)
    assert np.abs(here - before.mean(axis=(0, 1))).max() > 2, "the mean colour is for testing"
    assert np.array_equal(after, np.asarray(hidden(fill).apply_effect(square)))


def test_a_margin_is_a_piece_of_a_corner_and_noise_has_a_seed(square: Image.Image) -> None:
    pixels = np.asarray(square)
    corners = [pixels[y : y + 10, x : x + 10] for y in (0, 30) for x in (0, 30)]
    found = {
        next(n for n, one in enumerate(corners) if np.array_equal(one, np.asarray(put)[20:30, 10:20]))
        for put in (hidden("margin", seed).apply_effect(square) for seed in range(20))
    }
    assert found == {0, 1, 2, 3}
    noise = [np.asarray(hidden("noise", seed).apply_effect(square)) for seed in (1, 2)]
    assert not np.array_equal(*noise)


def test_an_ordinary_view_is_only_squashed(square: Image.Image) -> None:
    assert FULL_IMAGE.apply_effect(square) is square
    preprocessing = Preprocessing(size=40, resize=40)
    plain, covered = (view.render(resize_square(square, preprocessing)) for view in (FULL_IMAGE, hidden("noise")))
    assert np.array_equal(np.asarray(plain), np.asarray(square))
    assert np.array_equal(np.asarray(covered), np.asarray(hidden("noise").apply_effect(square)))


def test_photos_whose_places_are_known_have_a_view_for_each(tmp_path: Path) -> None:
    views = OccludedViews({tmp_path / "a.png": [BOX, Box(0.0, 0.0, 0.1, 0.1)]})
    first, second = views(Sample(tmp_path / "a.png", 0))
    assert (first.box, second.box) == (BOX, Box(0.0, 0.0, 0.1, 0.1))
    assert first != View(first.name)
    assert views(Sample(tmp_path / "b.png", 0)) == ()
    elsewhere = OccludedViews({Path("other/c.png"): [BOX]})(Sample(Path("other/c.png"), 0))
    assert elsewhere == (first,), "the same photo in another file has the same views"


def test_all_looks_see_the_place_hidden(tmp_path: Path, square: Image.Image) -> None:
    square.save(tmp_path / "a.png")
    sample, preprocessing = Sample(tmp_path / "a.png", 0, size=(40, 40)), Preprocessing(size=32, resize=40)
    views = ViewDataset([sample], OccludedViews({sample.path: [BOX]}), preprocessing)
    plain = ViewDataset([sample], evaluation_views, preprocessing)[0].image
    whole, closer = views[0].image, views.center_crop(0.5)[0].image
    differs = (whole != plain).any(dim=0)
    assert differs[16:26, 6:16].float().mean() > 0.9  # 4 pixels are cut off at each side
    assert int(differs.sum()) == int(differs[16:26, 6:16].sum())
    assert torch.equal(closer, center_crop(whole, 0.5))

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data_files import four_colours, smooth_photo
from prototree.backbones.crops import center_crop
from prototree.backbones.geometry import Preprocessing
from prototree.data import Box, Part, Sample
from prototree.data.crops import (
    FULL_IMAGE,
    Fill,
    OccludedView,
    OccludedViews,
    View,
    evaluation_views,
    from_image,
    parts_in_view,
    projection_views,
    random_views,
    resize_square,
    source_views,
    to_image,
    training_views,
)
from prototree.data.loader import ViewDataset


def shown(
    image: Image.Image, view: View, preprocessing: Preprocessing, size: tuple[int, int] | None = None
) -> Image.Image:
    return view.render(resize_square(image, preprocessing, view.region, size=size))


SAMPLE = Sample(Path("a.jpg"), 0, Box(100.0, 50.0, 200.0, 150.0), size=(400, 300))


def test_four_corners_and_the_full_photo() -> None:
    assert training_views(SAMPLE, "cub") == (
        View("upper left", Box(0.0, 0.0, 210.0, 160.0)),
        View("upper right", Box(90.0, 0.0, 400.0, 160.0)),
        View("lower left", Box(0.0, 40.0, 210.0, 300.0)),
        View("lower right", Box(90.0, 40.0, 400.0, 300.0)),
        FULL_IMAGE,
    )


def test_projection_sees_the_box() -> None:
    assert projection_views(SAMPLE, "cub") == (View("box", SAMPLE.box),)
    assert projection_views(SAMPLE, "cub", margin=0.1) == (View("box", Box(90.0, 40.0, 210.0, 160.0)),)


@pytest.mark.parametrize("kind", ["folder", "manifest", "cars"])
def test_other_data_has_the_full_photo_only(kind: str) -> None:
    assert training_views(SAMPLE, kind) == projection_views(SAMPLE, kind) == evaluation_views(SAMPLE) == (FULL_IMAGE,)


INPUT_BOX = Box(56.0, 112.0, 112.0, 224.0)


@pytest.mark.parametrize(
    ("view", "preprocessing", "expected"),
    [
        # 448 x 672 photo, squashed to 224: 2 pixels across and 3 down for each of the input's
        (FULL_IMAGE, Preprocessing(), Box(112.0, 336.0, 224.0, 672.0)),
        (View("flip", flip=True), Preprocessing(), Box(224.0, 336.0, 336.0, 672.0)),
        # a region of 112 x 224 from (100, 50): half a pixel across, one down
        (View("crop", Box(100.0, 50.0, 212.0, 274.0)), Preprocessing(), Box(128.0, 162.0, 156.0, 274.0)),
        (View("both", Box(100.0, 50.0, 212.0, 274.0), True), Preprocessing(), Box(156.0, 162.0, 184.0, 274.0)),
        # squashed to 256 and cut 16 from each side: a region of 256 x 512 from (10, 20)
        (View("crop", Box(10.0, 20.0, 266.0, 532.0)), Preprocessing(resize=256), Box(82.0, 276.0, 138.0, 500.0)),
        (View("both", Box(10.0, 20.0, 266.0, 532.0), True), Preprocessing(resize=256), Box(138.0, 276.0, 194.0, 500.0)),
        # an odd rest: 257 - 224 = 33, cut 16 from the left
        (View("crop", Box(0.0, 0.0, 257.0, 257.0)), Preprocessing(resize=257), Box(72.0, 128.0, 128.0, 240.0)),
    ],
)
def test_way_back_by_hand(view: View, preprocessing: Preprocessing, expected: Box) -> None:
    assert to_image(INPUT_BOX, view, (448, 672), preprocessing) == expected


@given(
    point=st.tuples(st.floats(0, 224), st.floats(0, 224)),
    corner=st.tuples(st.floats(0, 100), st.floats(0, 100)),
    extent=st.tuples(st.floats(5, 300), st.floats(5, 300)),
    flip=st.booleans(),
    resize=st.integers(224, 300),
)
def test_there_and_back(
    point: tuple[float, float], corner: tuple[float, float], extent: tuple[float, float], flip: bool, resize: int
) -> None:
    view, preprocessing = View("any", Box.from_corner(*corner, *extent), flip), Preprocessing(resize=resize)
    photo = to_image(Box(*point, *point), view, (400, 400), preprocessing)
    again = from_image((photo.left, photo.top), view, (400, 400), preprocessing)
    assert again == pytest.approx(point, abs=1e-6)


def test_the_square_shows_the_region() -> None:
    image = four_colours((64, 32))
    preprocessing = Preprocessing(size=8, resize=8)
    right_half = shown(image, View("right", Box(32.0, 0.0, 64.0, 32.0)), preprocessing)
    assert np.unique(np.asarray(right_half)[:2, 1:].reshape(-1, 3), axis=0).tolist() == [[0, 255, 0]]
    mirrored = shown(image, View("left, mirrored", flip=True), preprocessing)
    assert mirrored.getpixel((0, 0)) == (0, 255, 0)
    assert resize_square(right_half, preprocessing) is right_half, "what is square already stays as it is"


def test_a_point_lands_where_it_is_seen() -> None:
    """Marks one pixel of a photo and looks for it in the network's input."""
    image = smooth_photo((200, 100)).point(lambda value: value // 8)
    image.paste((255, 255, 255), (120, 40, 122, 42))
    preprocessing = Preprocessing(size=160, resize=200)
    for flip in (False, True):
        view = View("crop", Box(60.0, 0.0, 160.0, 100.0), flip)
        offset = 20
        seen = np.asarray(shown(image, view, preprocessing).convert("L"))[offset:-offset, offset:-offset]
        row, column = np.unravel_index(seen.argmax(), seen.shape)
        x, y = from_image((121.0, 41.0), view, (200, 100), preprocessing)
        assert abs(column + 0.5 - x) <= 2
        assert abs(row + 0.5 - y) <= 2


def test_parts_outside_the_view_are_left_out() -> None:
    sample = dataclasses.replace(SAMPLE, parts=(Part("beak", 150.0, 100.0), Part("tail", 250.0, 100.0)))
    (view,) = projection_views(sample, "cub")
    assert parts_in_view(sample, view, Preprocessing()) == (Part("beak", 112.0, 112.0),)


def test_source_views_are_the_image_and_its_subject() -> None:
    assert source_views(SAMPLE) == (FULL_IMAGE, View("box", Box(90.0, 40.0, 210.0, 160.0)))
    plain, middle = source_views(dataclasses.replace(SAMPLE, box=None))
    assert plain == FULL_IMAGE
    assert middle.name == "middle"
    assert dataclasses.astuple(middle.region) == pytest.approx((60, 45, 340, 255))


@pytest.mark.parametrize("box", [SAMPLE.box, None])
def test_random_views_keep_the_subject_inside_the_photo(box: Box | None) -> None:
    sample = dataclasses.replace(SAMPLE, box=box)
    views = random_views(sample, 21, seed=0)
    assert views[0] == View("mirrored", flip=True)
    assert len({view.name for view in views}) == len(views) == 21
    subject = source_views(sample)[1].region
    assert subject is not None
    for view in views[1:]:
        assert view.region is not None
        assert view.region.contains_box(subject)
        assert Box(0.0, 0.0, 400.0, 300.0).contains_box(view.region)
    assert {view.flip for view in views} == {True, False}
    close = [view.region.width for view in views[2::2]]
    assert max(close) <= subject.width * 1.8 + 1e-9


def test_random_views_are_the_same_for_the_same_seed_alone() -> None:
    assert random_views(SAMPLE, 4, seed=0) == random_views(SAMPLE, 5, seed=0)[:4]
    assert random_views(SAMPLE, 4, seed=0) != random_views(SAMPLE, 4, seed=1)
    assert random_views(SAMPLE, 0, seed=0) == ()


OCCLUDED = Box(0.25, 0.5, 0.5, 0.75)


@pytest.fixture
def square() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def occluded(fill: Fill, seed: int = 0) -> OccludedView:
    return OccludedView("hidden 1", box=OCCLUDED, fill=fill, seed=seed)


@pytest.mark.parametrize("fill", ["blur", "noise", "margin"])
def test_the_place_is_hidden_and_nothing_else(square: Image.Image, fill: Fill) -> None:
    before, after = np.asarray(square).astype(int), np.asarray(occluded(fill).render(square)).astype(int)
    differs = (before != after).any(axis=2)
    assert differs[20:30, 10:20].mean() > 0.9
    differs[20:30, 10:20] = False
    assert not differs.any()
    here = after[20:30, 10:20].reshape(-1, 3)
    assert np.abs(here - before.mean(axis=(0, 1))).max() > 2, "the mean colour is for testing"
    assert np.array_equal(after, np.asarray(occluded(fill).render(square)))


def test_a_margin_is_a_piece_of_a_corner_and_noise_has_a_seed(square: Image.Image) -> None:
    pixels = np.asarray(square)
    corners = [pixels[y : y + 10, x : x + 10] for y in (0, 30) for x in (0, 30)]
    found = {
        next(n for n, one in enumerate(corners) if np.array_equal(one, np.asarray(put)[20:30, 10:20]))
        for put in (occluded("margin", seed).render(square) for seed in range(20))
    }
    assert found == {0, 1, 2, 3}
    noise = [np.asarray(occluded("noise", seed).render(square)) for seed in (1, 2)]
    assert not np.array_equal(*noise)


def test_photos_whose_places_are_known_have_a_view_for_each(tmp_path: Path) -> None:
    views = OccludedViews({tmp_path / "a.png": [OCCLUDED, Box(0.0, 0.0, 0.1, 0.1)]})
    first, second = views(Sample(tmp_path / "a.png", 0))
    assert (first.box, second.box) == (OCCLUDED, Box(0.0, 0.0, 0.1, 0.1))
    assert first != View(first.name)
    assert views(Sample(tmp_path / "b.png", 0)) == ()
    elsewhere = OccludedViews({Path("other/c.png"): [OCCLUDED]})(Sample(Path("other/c.png"), 0))
    assert elsewhere == (first,), "the same photo in another file has the same views"


def test_all_looks_see_the_place_occluded(tmp_path: Path, square: Image.Image) -> None:
    square.save(tmp_path / "a.png")
    sample, preprocessing = Sample(tmp_path / "a.png", 0, size=(40, 40)), Preprocessing(size=32, resize=40)
    views = ViewDataset([sample], OccludedViews({sample.path: [OCCLUDED]}), preprocessing)
    plain = ViewDataset([sample], evaluation_views, preprocessing)[0].image
    whole, closer = views[0].image, views.center_crop(0.5)[0].image
    differs = (whole != plain).any(dim=0)
    assert differs[16:26, 6:16].float().mean() > 0.9  # 4 pixels are cut off at each side
    assert int(differs.sum()) == int(differs[16:26, 6:16].sum())
    assert torch.equal(closer, center_crop(whole, 0.5))

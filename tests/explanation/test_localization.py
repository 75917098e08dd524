"""Boxes and heat maps in the photo's own pixels, against places worked out by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import interpolate

from prototree.backbones.geometry import Preprocessing
from prototree.data import Box
from prototree.data.crops import FULL_IMAGE, View
from prototree.explanation.localization import InputFrame, smallest_box

INPUT = Preprocessing(size=64, resize=64)
CROP = Box(100.0, 50.0, 164.0, 178.0)


def one_hot(rows: int, columns: int, row: int, column: int) -> np.ndarray:
    grid = np.zeros((rows, columns))
    grid[row, column] = 1.0
    return grid


def hottest(heat: np.ndarray, size: tuple[int, int]) -> tuple[float, float]:
    """The centre of the hottest place in the photo, x and y."""
    row, column = np.unravel_index(heat.argmax(), heat.shape)
    return (column + 0.5) * size[0] / heat.shape[1], (row + 0.5) * size[1] / heat.shape[0]


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        # The cell in row 1, column 2 of a 4×4 map is the box (32, 16, 48, 32) of a 64-pixel input.
        (InputFrame(FULL_IMAGE, (64, 64), INPUT), Box(32.0, 16.0, 48.0, 32.0)),
        (InputFrame(FULL_IMAGE, (128, 320), INPUT), Box(64.0, 80.0, 96.0, 160.0)),  # 2 pixels across, 5 down
        (InputFrame(View("flip", flip=True), (128, 320), INPUT), Box(32.0, 80.0, 64.0, 160.0)),
        # a crop of 64×128 from (100, 50): 1 pixel across, 2 down
        (InputFrame(View("crop", CROP), (300, 200), INPUT), Box(132.0, 82.0, 148.0, 114.0)),
        (InputFrame(View("both", CROP, True), (300, 200), INPUT), Box(116.0, 82.0, 132.0, 114.0)),
        # squashed to 80, the central 64 of it: 8 pixels from each side; 160×240 photo: 2 across, 3 down
        (InputFrame(FULL_IMAGE, (160, 240), Preprocessing(size=64, resize=80)), Box(80.0, 72.0, 112.0, 120.0)),
    ],
)
def test_heat_and_box_of_a_cell_are_at_the_same_place_in_the_photo(frame: InputFrame, expected: Box) -> None:
    assert frame.box(Box(32.0, 16.0, 48.0, 32.0)) == expected
    width, height = frame.size
    heat = frame.heat(one_hot(4, 4, 1, 2), (height, width))
    x, y = hottest(heat, frame.size)
    assert x == pytest.approx((expected.left + expected.right) / 2, abs=1.0)
    assert y == pytest.approx((expected.top + expected.bottom) / 2, abs=2.0)
    assert heat.min() == 0.0
    assert heat.max() == 1.0


def test_heat_is_zero_where_the_network_did_not_look() -> None:
    frame = InputFrame(View("crop", CROP), (300, 200), INPUT)
    heat = frame.heat(np.random.default_rng(0).random((4, 4)), (200, 300))
    outside = np.ones_like(heat, dtype=bool)
    outside[50:178, 100:164] = False
    assert (heat[outside] == 0).all()
    assert heat[50:178, 100:164].mean() > 0.2


def test_stretching_is_bicubic_interpolation() -> None:
    grid = np.random.default_rng(1).random((5, 7))
    expected = interpolate(torch.from_numpy(grid)[None, None], size=(40, 70), mode="bicubic", align_corners=False)
    expected = ((expected - grid.min()) / (expected.max() - grid.min())).clamp(0, 1)[0, 0]
    heat = InputFrame(FULL_IMAGE, (140, 80), INPUT).heat(grid, (40, 70))
    assert np.abs(heat - expected.numpy()).max() < 1e-6


@pytest.mark.parametrize(("patch", "row", "column"), [((2, 2), 1, 4), ((3, 1), 2, 2), ((1, 2), 5, 2)])
def test_larger_prototypes_are_hottest_at_the_centre_of_their_patch(
    patch: tuple[int, int], row: int, column: int
) -> None:
    # An 8×8 map over 64 pixels; the map of patches is smaller by the patch's extent less one.
    grid = one_hot(9 - patch[0], 9 - patch[1], row, column)
    heat = InputFrame(FULL_IMAGE, (64, 64), INPUT).heat(grid, (64, 64), patch)
    x, y = hottest(heat, (64, 64))
    assert (x, y) == pytest.approx((8 * (column + patch[1] / 2), 8 * (row + patch[0] / 2)), abs=1.0)


def test_a_flat_map_is_cold() -> None:
    heat = InputFrame(FULL_IMAGE, (30, 20), INPUT).heat(np.full((4, 4), 0.7), (20, 30))
    assert np.array_equal(heat, np.zeros((20, 30)))


def test_smallest_box_by_hand() -> None:
    grid = np.zeros((4, 8))
    grid[1, 2], grid[1, 3], grid[3, 7] = 3.0, 3.0, 5.0
    # Two neighbours hold 6 of 11; the lone cell only 5.
    assert smallest_box(grid, INPUT) == Box(16.0, 16.0, 32.0, 32.0)
    assert smallest_box(-grid, INPUT) == Box(0.0, 0.0, 64.0, 64.0)  # nothing positive: no place is better


@given(st.integers(0, 10_000))
def test_smallest_box_by_brute_force(seed: int) -> None:
    random = np.random.default_rng(seed)
    grid = random.random((4, 5)) * (random.random((4, 5)) < 0.4) - 0.1
    mass = grid.clip(min=0)
    if mass.sum() == 0:
        return
    areas = [
        (bottom - top) * (right - left)
        for top in range(4)
        for bottom in range(top + 1, 5)
        for left in range(5)
        for right in range(left + 1, 6)
        if mass[top:bottom, left:right].sum() >= 0.5 * mass.sum() - 1e-12
    ]
    box = smallest_box(grid, Preprocessing(size=20, resize=20))
    assert box.width * box.height / (5 * 4) == pytest.approx(min(areas))

"""The middle of a match between the cells of a map."""

import pytest
import torch

from prototree.backbones.geometry import Box, PatchGrid
from prototree.core.localization import FALL, peak_box, peak_places, peak_squares


def test_a_lone_peak_stands_on_its_patch() -> None:
    apart = torch.full((1, 5, 7), 50.0)
    apart[0, 1, 4] = 0.0
    row, column = peak_places(apart, torch.tensor([1 * 7 + 4]))
    assert (float(row), float(column)) == pytest.approx((1.0, 4.0))


def test_two_equal_neighbours_have_the_peak_between_them() -> None:
    apart = torch.full((2, 6, 6), 50.0)
    apart[0, 2, 2] = apart[0, 2, 3] = 0.4
    apart[1, 2, 2], apart[1, 3, 2] = 0.0, FALL * torch.log(torch.tensor(3.0))  # counts a third as much
    row, column = peak_places(apart, torch.tensor([14, 14]))
    assert row.tolist() == pytest.approx([2.0, 2.25])
    assert column.tolist() == pytest.approx([2.5, 2.0])


@pytest.mark.parametrize(("side", "radius"), [(3, 1), (7, 1), (9, 2), (18, 4)])
def test_what_is_far_from_the_nearest_patch_does_not_count(side: int, radius: int) -> None:
    apart = torch.full((1, side, side), 50.0)
    apart[0, 0, 0] = 0.0
    apart[0, radius + 1, 0] = apart[0, -1, -1] = 0.0  # as near, but elsewhere
    row, column = peak_places(apart, torch.tensor([0]))
    assert (float(row), float(column)) == pytest.approx((0.0, 0.0))
    apart[0, radius, 0] = 0.0
    assert float(peak_places(apart, torch.tensor([0]))[0]) == pytest.approx(radius / 2)


def test_adding_to_all_distances_moves_nothing() -> None:
    apart = torch.rand(3, 5, 5, generator=torch.Generator().manual_seed(0))
    patch = apart.flatten(1).argmin(dim=1)
    for before, after in zip(peak_places(apart, patch), peak_places(apart + 7, patch), strict=True):
        assert torch.allclose(before, after, atol=1e-4)
        assert ((before >= 0) & (before <= 4)).all()


def test_the_box_shown_is_a_seventh_of_the_side_and_stays_in_the_input() -> None:
    grid = PatchGrid(rows=14, columns=14, side=224)
    assert peak_box(grid, 5.5, 6.0).edges == pytest.approx((104 - 16, 96 - 16, 104 + 16, 96 + 16))
    assert peak_box(grid, 0.0, 0.0).edges == pytest.approx((0, 0, 24, 24))
    wide = PatchGrid(rows=7, columns=7, side=224, height=3, width=1)
    assert peak_box(wide, 2.0, 3.0) == Box(64.0, 64.0, 160.0, 160.0), "never smaller than the patch"


@pytest.mark.parametrize(
    "grid",
    [
        PatchGrid(rows=9, columns=9, side=288),
        PatchGrid(rows=4, columns=3, side=60),
        PatchGrid(rows=7, columns=7, side=224, height=3, width=2),
        PatchGrid(rows=9, columns=9, side=288, extents=(Box(0.0, 0.0, 288.0, 288.0), Box(43.0, 43.0, 245.0, 245.0))),
    ],
)
def test_many_squares_at_once_are_those_one_by_one(grid: PatchGrid) -> None:
    numbers = torch.Generator().manual_seed(0)
    rows, columns = (torch.rand(50, generator=numbers, dtype=torch.double) * (count - 1) for count in grid.shape)
    squares = peak_squares(grid, rows, columns)
    for square, row, column in zip(squares.tolist(), rows.tolist(), columns.tolist(), strict=True):
        assert square == pytest.approx(peak_box(grid, row, column).edges)

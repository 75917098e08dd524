import math

import pytest

from prototree.data.samples import Box
from prototree.errors import DataError


def test_from_corner_has_the_given_extent() -> None:
    box = Box.from_corner(10.0, 5.0, 20.0, 8.0)
    assert box == Box(10.0, 5.0, 30.0, 13.0)
    assert (box.width, box.height) == (20.0, 8.0)


@pytest.mark.parametrize(
    ("box", "clipped"),
    [
        (Box(-3.0, -2.0, 50.0, 40.0), Box(0.0, 0.0, 40.0, 30.0)),
        (Box(1.5, 2.5, 3.0, 4.0), Box(1.5, 2.5, 3.0, 4.0)),
        (Box(50.0, 5.0, 60.0, 9.0), Box(40.0, 5.0, 40.0, 9.0)),
    ],
)
def test_clip_keeps_the_part_inside(box: Box, clipped: Box) -> None:
    assert box.clip((40, 30)) == clipped


def test_enlarge_grows_each_side_by_the_share() -> None:
    assert Box(10.0, 10.0, 30.0, 20.0).enlarge(0.1) == Box(8.0, 9.0, 32.0, 21.0)


def test_contains_and_covers() -> None:
    box = Box(0.0, 0.0, 10.0, 10.0)
    assert box.contains(10.0, 0.0)
    assert not box.contains(10.1, 5.0)
    assert box.covers(Box(1.0, 1.0, 10.0, 9.0))
    assert not box.covers(Box(1.0, 1.0, 11.0, 9.0))


@pytest.mark.parametrize("edges", [(5.0, 0.0, 4.0, 1.0), (0.0, 2.0, 1.0, 1.0), (0.0, 0.0, math.nan, 1.0)])
def test_impossible_boxes_are_refused(edges: tuple[float, float, float, float]) -> None:
    with pytest.raises(DataError, match="left <= right"):
        Box(*edges)

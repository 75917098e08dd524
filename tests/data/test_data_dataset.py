import math
from collections import Counter
from pathlib import Path

import pytest

from prototree.backbones.geometry import Box
from prototree.data.dataset import ImageData, Sample, name_in
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


def test_a_bootstrap_sample_draws_with_replacement_within_classes() -> None:
    train = tuple(Sample(Path(f"{label}/{i}.jpg"), label) for label in range(3) for i in range(20))
    data = ImageData(Path(), "folder", ("a", "b", "c"), train, train[:1])
    drawn = data.bootstrap(1)
    assert Counter(sample.label for sample in drawn.train) == Counter(sample.label for sample in train)
    assert set(drawn.train) < set(train), "some photos are missing, none is new"
    assert drawn.test == data.test
    assert data.bootstrap(1) == drawn
    assert data.bootstrap(2) != drawn


def test_photos_are_named_within_their_data() -> None:
    assert name_in(Path("/data"), Path("/data/a/b.jpg")) == "a/b.jpg"
    assert name_in(Path("/data"), Path("/elsewhere/c.jpg")) == "../elsewhere/c.jpg"
    assert name_in(Path("/data"), Path("/data/../elsewhere/c.jpg")) == "../elsewhere/c.jpg"

"""The spotlight falls on what the network looks at, not on the middle of the box."""

import numpy as np

from prototree.backbones.geometry import Box
from prototree.explanation.records import Heatmap, Location
from prototree.explanation.spotlight import SIDE, spotlight

BOX, SIZE = Box(80.0, 80.0, 120.0, 120.0), (200, 200)


def location(method: str, heat: Heatmap) -> Location:
    return Location(method, BOX, heat, None)  # type: ignore[arg-type]


def blob(x: float, y: float) -> Heatmap:
    """A hot spot in a photo of 200 × 200 pixels."""
    rows, columns = np.mgrid[0:50, 0:50] * 4.0 + 2
    return np.exp(-((columns - x) ** 2 + (rows - y) ** 2) / (2 * 12.0**2)).astype(np.float32)


def centre(light: Heatmap) -> tuple[float, float]:
    rows, columns = np.mgrid[0:SIDE, 0:SIDE] + 0.5
    return float((light * columns).sum() / light.sum() / SIDE), float((light * rows).sum() / light.sum() / SIDE)


def test_it_follows_the_attribution() -> None:
    peak = location("peak", blob(100, 100))
    plain, right = spotlight([peak], BOX, SIZE), spotlight([peak, location("attribution", blob(125, 110))], BOX, SIZE)
    assert abs(centre(plain)[0] - 0.5) < 0.02
    assert centre(right)[0] > centre(plain)[0] + 0.05
    for light in (plain, right):
        assert light.shape == (SIDE, SIDE)
        assert 0 <= light.min() < 0.05
        assert 0.95 < light.max() <= 1


def test_without_heat_it_lies_on_the_box() -> None:
    light = spotlight([location("cell", np.zeros((4, 4), dtype=np.float32))], BOX, SIZE)
    assert abs(centre(light)[0] - 0.5) < 0.02
    assert light[SIDE // 2, SIDE // 2] > 0.9
    assert light[0, 0] < 0.1


def test_at_the_edge_of_a_photo_it_stays_inside() -> None:
    corner = Box(0.0, 0.0, 30.0, 30.0)
    light = spotlight([Location("peak", corner, blob(10, 10), None)], corner, SIZE)
    assert centre(light)[0] < 0.5
    assert centre(light)[1] < 0.5

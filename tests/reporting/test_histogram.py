"""The histogram of training photos around the boundary of a node."""

from xml.etree import ElementTree

import pytest

import sample_explanations as sample
from prototree.explanation.records import DecisionHistogram, NodeKind
from prototree.reporting.histogram import histogram_svg, histogram_text


@pytest.mark.parametrize("kind", ["presence", "pairwise"])
@pytest.mark.parametrize("at", [None, -99.0, 0.3, 1.2, 99.0])
def test_everything_stays_within_the_drawing(kind: NodeKind, at: float | None) -> None:
    svg = ElementTree.fromstring(histogram_svg(sample.histogram(3, kind), kind, at))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for text in svg.iter("text"):
        assert 0 <= float(text.attrib["x"]) <= width
        assert 0 <= float(text.attrib["y"]) <= height
    assert ("your image" in "".join(svg.itertext())) is (at is not None)
    assert svg.attrib["aria-label"]


def test_the_text_counts_what_is_on_its_side() -> None:
    text = histogram_text(DecisionHistogram(0.0, 2.0, 1.0, (3, 0, 1, 0), (0, 2, 2, 4)), "presence")
    assert (text.count("75 %"), "4 training" in text, "8 training" in text) == (2, True, True)
    text = histogram_text(DecisionHistogram(-1.0, 1.0, 0.0, (0, 0, 1, 3), (0, 0, 0, 0)), "pairwise")
    assert (text.count("100 %"), "4 training" in text) == (1, True)


def test_one_far_photo_does_not_squeeze_the_rest() -> None:
    counts = [0] * 64
    counts[40:44] = [100] * 4  # from 0.25 to 0.375
    near = histogram_svg(DecisionHistogram(-1.0, 1.0, 0.0, tuple(counts), (0,) * 64), "pairwise")
    counts[63] = 1
    far = histogram_svg(DecisionHistogram(-1.0, 1.0, 0.0, tuple(counts), (0,) * 64), "pairwise")
    numbers = [
        [text.text for text in ElementTree.fromstring(svg).iter("text") if text.get("class") == "number"]
        for svg in (near, far)
    ]
    assert numbers == [["−0.4", "−0.2", "0", "0.2", "0.4"]] * 2
    assert far != near  # the photo is in the outermost bar


def test_nothing_counted_is_no_error() -> None:
    empty = DecisionHistogram(-1.0, 1.0, 0.0, (0,) * 4, (0,) * 4)
    assert histogram_text(empty, "pairwise") == ""
    assert histogram_svg(empty, "pairwise").startswith("<svg")

"""The small drawing of how training photos lie about the line that decides."""

from xml.etree import ElementTree

import pytest

import sample_explanations as sample
from prototree.explain.records import NodeKind, Spread
from prototree.report.histogram import spread_svg, spread_words


@pytest.mark.parametrize("question", ["presence", "pairwise"])
@pytest.mark.parametrize("at", [None, -99.0, 0.3, 1.2, 99.0])
def test_everything_stays_within_the_drawing(question: NodeKind, at: float | None) -> None:
    svg = ElementTree.fromstring(spread_svg(sample.spread(3, question), question, at))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for text in svg.iter("text"):
        assert 0 <= float(text.attrib["x"]) <= width
        assert 0 <= float(text.attrib["y"]) <= height
    assert ("this photo" in "".join(svg.itertext())) is (at is not None)
    assert svg.attrib["role"] == "img"
    assert "On their side of the line" in svg.attrib["aria-label"]


def test_the_words_count_what_is_on_its_side() -> None:
    spread = Spread(0.0, 2.0, 1.0, (3, 0, 1, 0), (0, 2, 2, 4))
    assert spread_words(spread, "presence") == (
        "On their side of the line: 75 % of the 4 training photos of the “present” classes and 75 % of the 8 training "
        "photos of the “absent” classes."
    )
    choice = Spread(-1.0, 1.0, 0.0, (0, 0, 1, 3), (0, 0, 0, 0))
    assert spread_words(choice, "pairwise") == (
        "On their side of the line: 100 % of the 4 training photos of the “right” classes."
    )


def test_numbers_stand_at_the_axis_and_one_far_photo_does_not_squeeze_the_rest() -> None:
    counts = [0] * 64
    counts[40:44] = [100] * 4  # from 0.25 to 0.375
    near = spread_svg(Spread(-1.0, 1.0, 0.0, tuple(counts), (0,) * 64), "pairwise")
    counts[63] = 1
    far = spread_svg(Spread(-1.0, 1.0, 0.0, tuple(counts), (0,) * 64), "pairwise")
    numbers = [
        [text.text for text in ElementTree.fromstring(svg).iter("text") if text.get("class") == "number"]
        for svg in (near, far)
    ]
    assert numbers == [["−0.4", "−0.2", "0", "0.2", "0.4"]] * 2
    assert far != near  # the photo is in the outermost bar


def test_nothing_counted_is_no_error() -> None:
    empty = Spread(-1.0, 1.0, 0.0, (0,) * 4, (0,) * 4)
    assert spread_words(empty, "pairwise") == ""
    assert spread_svg(empty, "pairwise").startswith("<svg")

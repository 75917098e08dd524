"""Part purity, consistency and the rest on photos whose parts are put where they are by hand."""

import pytest

from prototree.data import Box, Part
from prototree.evaluation.part_tables import part_table, part_words, prototype_words
from prototree.evaluation.parts import (
    Baseline,
    HidingShare,
    OnDifference,
    PartFigures,
    PartShare,
    PrototypeParts,
    parts_inside,
    purest,
    without_side,
)

BOX = Box(10.0, 10.0, 20.0, 20.0)


@pytest.mark.parametrize(
    ("name", "merged"), [("left wing", "wing"), ("right eye", "eye"), ("beak", "beak"), ("left", "left")]
)
def test_left_and_right_parts_have_one_name(name: str, merged: str) -> None:
    assert without_side(name) == merged


def test_a_pair_is_inside_if_one_of_it_is() -> None:
    parts = [Part("left wing", 12.0, 12.0), Part("right wing", 90.0, 12.0), Part("beak", 20.0, 20.1)]
    assert parts_inside(parts, BOX) == {"wing": True, "beak": False}
    assert parts_inside(parts[::-1], BOX) == {"wing": True, "beak": False}, "whichever comes first"


def test_purity_counts_only_photos_that_show_the_part() -> None:
    photos = [{"beak": True, "tail": False}, {"beak": False, "tail": True}, {"tail": True}, {"beak": True}]
    # beak: 2 of 3, tail: 2 of 3; both have two hits, so the first one stays
    assert purest(photos) == PartShare("beak", 2 / 3, 3)
    assert purest([*photos, {"tail": True}]) == PartShare("tail", 3 / 4, 4)


def test_of_equal_shares_the_part_with_more_hits_wins() -> None:
    assert purest([{"leg": True, "eye": True}, {"eye": True}]) == PartShare("eye", 1.0, 2)


def test_no_parts_no_purity() -> None:
    assert purest([{}, {}]) is None
    assert purest([]) is None


def figures() -> PartFigures:
    def own(number: int, purity: float, same: float, away: float, n_photos: int) -> PrototypeParts:
        return PrototypeParts(
            number,
            purity={"peak": {"test": PartShare("beak", purity, 10)}},
            consistency={"peak": {"test": PartShare("beak", same, 30)}},
            same_part_wide={"peak": {"test": PartShare("beak", 0.9, 30)}},
            stability=same,
            hiding={
                "peak": HidingShare(n_photos, away, 0.1, 0.5, 1.5, 0.6, n_photos - 1, (away if number else None), 0.1)
            },
            on_difference={"cell": OnDifference(("beak",), touches=number == 0, by_chance=0.25)},
        )

    return PartFigures(
        (own(0, 0.9, 0.8, 1.0, 1), own(1, 0.5, 0.79, 0.2, 3), PrototypeParts(2)), {"test": Baseline(0.2, 0.4)}
    )


def test_the_figures_of_a_tree_are_those_of_its_prototypes() -> None:
    found = figures()
    assert found.purity("test") == pytest.approx(0.7)
    assert found.purity("train") is None
    assert found.consistency("test") == 0.5, "0.8 is consistent, 0.79 is not"
    assert found.consistency("test", wide=True) == 1.0
    assert found.consistency("test", "cell") is None
    assert found.stability == pytest.approx(0.795)
    hiding = found.hiding("peak")
    assert hiding is not None
    assert hiding.n_photos == 4
    assert hiding.flip_rate == pytest.approx((1.0 + 3 * 0.2) / 4), "every photo counts the same"
    assert (hiding.n_in_radius, hiding.lost) == (2, 0.2), "only photos that had something within reach count"
    assert found.hiding("attribution") is None


def test_what_is_written_down() -> None:
    told = figures().to_json()
    assert told["purity"] == {"peak": {"test": {"mean": 0.7, "std": pytest.approx(0.2), "part_related": 0.5}}}
    assert told["baselines"] == {"test": {"random_patch": 0.2, "object_middle": 0.4}}
    assert told["on_difference"] == {"cell": {"n_prototypes": 2, "touching": 0.5, "by_chance": 0.25}}
    assert [one["prototype"] for one in told["prototypes"]] == [0, 1, 2]


def test_a_tree_in_one_line() -> None:
    words = part_words(figures().to_json())
    assert words == (
        "In 7 of 10 photos the patch lies on the same part; hiding it sends 4 of 10 photos the other way "
        "(1 of 10 if a random patch is hidden)."
    )
    assert part_words({}) == ""
    assert part_words(PartFigures((PrototypeParts(0),)).to_json()) == ""


def test_a_prototype_in_sentences() -> None:
    first, second, third = prototype_words(figures().to_json()["prototypes"][1])
    assert first == "In 5 of the 10 most similar test photos that show the beak, this patch lies on it."
    assert second == "Of all test photos that go this way, 79 % have the beak in it."
    assert third == "Hiding it sends 0.6 of 3 test photos the other way, hiding random patches of the same size 0.3."
    assert prototype_words(figures().to_json()["prototypes"][2]) == []


def test_the_table_has_every_figure_and_says_what_is_missing() -> None:
    rows = {row[0]: row[1:] for row in part_table(figures().to_json()).rows}
    assert rows["part purity, the box shown"] == ("–", "0.70 ± 0.20, over 0.5: 50 %")
    assert rows["part purity of the object's middle"] == ("–", "0.40")
    assert rows["hiding the box shown: turned away (random boxes)"] == ("–", "40.0 % (10.0 %)")
    assert rows["hiding the box shown: turned away, or nothing within reach (random boxes)"] == ("–", "20.0 % (10.0 %)")
    assert rows["hiding the box shown: distance in reaches (random boxes)"] == ("–", "0.50 → 1.50 (0.60)")
    assert rows["on a part in which its two sides differ, the nearest cell"] == ("50 % of 2 (by chance 25 %)", "–")

"""Tables as text that other programs read back."""

import csv
import io

import pytest

from prototree.evaluation.tables import (
    Table,
    baseline_text,
    blame_table,
    class_table,
    mistake_table,
    percent,
    stage_table,
)

AWKWARD = 'Say "hi", | <b>'


def test_markdown_and_csv_keep_every_cell() -> None:
    table = Table("title", ("a", "b"), ((AWKWARD, "1"), ("", "ä")))
    assert list(csv.reader(io.StringIO(table.to_csv()))) == [["a", "b"], [AWKWARD, "1"], ["", "ä"]]
    lines = table.to_markdown().splitlines()
    assert lines[2:4] == ["| a | b |", "| --- | --- |"]
    assert lines[4].count("|") - lines[4].count("\\|") == 3, "a bar in a name is not a new column"


@pytest.mark.parametrize(
    ("share", "digits", "words"),
    [
        (0.0, 0, "0 %"),
        (0.004, 0, "<1 %"),
        (0.5, 0, "50 %"),
        (0.997, 0, ">99 %"),
        (1.0, 0, "100 %"),
        (0.9834, 1, "98.3 %"),
        (0.004, 1, "0.4 %"),
        (0.9996, 1, "100.0 %"),
    ],
)
def test_shares_as_people_write_them(share: float, digits: int, words: str) -> None:
    assert percent(share, digits) == words


@pytest.mark.parametrize(
    ("version", "confusion"),
    [(1, [[4, 0, 0], [1, 1, 2], [0, 0, 0]]), (2, [[0, 0, 4], [1, 0, 1], [1, 1, 1], [1, 2, 2]])],
)
def test_the_hardest_class_comes_first_with_what_it_is_taken_for(version: int, confusion: list[list[int]]) -> None:
    stage = {"class_accuracy": [1.0, 0.25, None], "confusion": confusion}
    metrics = {"version": version, "classes": ["crow", "wren", "tit"], "stages": {"pruned": stage}}
    table = class_table(metrics, "pruned")
    assert table.rows == (("wren", "25.0 %", "4", "tit (2)"), ("crow", "100.0 %", "4", "–"))


def test_names_mean_nothing_in_markdown() -> None:
    names = (
        "[x](http://evil.example)",
        "<img src=x onerror=alert(1)>",
        "a|b",
        "*bold*",
        "two\nlines",
        "`code` $x$ a_b_c",
    )
    text = Table("t", ("class",), tuple((name,) for name in names)).to_markdown()
    assert "<img" not in text
    assert "](" not in text.replace("\\](", "")
    assert r"a\|b" in text
    assert r"\*bold\*" in text
    assert "| two lines |" in text
    assert len(text.splitlines()) == 4 + len(names)


def test_mistakes_with_the_closest_first() -> None:
    images = [
        {"image": "a.jpg", "label": 0, "answer": 1, "node": 3, "goes_right": True, "p_right": 0.7, "margin": 2.0},
        {
            "image": "b.jpg",
            "label": 1,
            "answer": 0,
            "node": None,
            "goes_right": False,
            "p_right": None,
            "margin": None,
        },
        {"image": "c.jpg", "label": 1, "answer": 0, "node": 0, "goes_right": False, "p_right": 0.4, "margin": 0.1},
    ]
    table = mistake_table({"strategy": "max_path", "images": images}, ["crow", "wren"])
    assert [row[0] for row in table.rows] == ["c.jpg", "a.jpg", "b.jpg"]
    assert table.rows[0] == ("c.jpg", "wren", "crow", "0, left", "0.400", "0.10")
    assert table.rows[2][3:] == ("no leaf has its class", "–", "–")
    node = {"node": 3, "n_errors": 5, "n_goes_right": 2, "mean_abs_margin": 0.125}
    assert blame_table({"nodes": [node]}).rows == (("3", "5", "2", "3", "0.12"),)


def test_wrong_turns_are_named_after_what_nodes_ask() -> None:
    asked = {kind: blame_table({"nodes": [], "question": kind}).header[2:4] for kind in ("presence", "pairwise")}
    assert asked["presence"] == ("found what is not there", "missed what is there")
    assert asked["pairwise"] == ("wrongly nearer to the right patch", "wrongly nearer to the left patch")
    assert blame_table({"nodes": []}).header[2:4] == ("went right", "went left")  # of older runs, which do not say


def stage_figures(soft: float, greedy: float) -> dict[str, object]:
    length = {"mean": 4.0, "std": 0.5, "min": 3, "max": 5}
    accuracy = {"soft": soft, "max_path": soft, "greedy": greedy}
    return {"accuracy": accuracy, "path_length": {"max_path": length, "greedy": length}, "n_prototypes": 8}


def test_stages_that_agree_share_a_row() -> None:
    stages = {
        "trained": stage_figures(0.9, 0.8),
        "pruned": stage_figures(0.9, 0.8),
        "projected": stage_figures(0.9, 0.7),
    }
    rows = stage_table({"stages": stages}, "run").rows
    assert [row[0] for row in rows] == ["trained, pruned", "projected"]
    assert rows[1][1:4] == ("90.0 %", "90.0 %", "70.0 %")


def test_what_a_tree_costs_is_said_where_there_was_a_classifier() -> None:
    stages = {"projected": stage_figures(0.842, 0.826), "projected_any_class": stage_figures(0.1, 0.1)}
    words = baseline_text({"classifier": 0.866, "stages": stages})
    assert words.startswith("The classifier without a tree has 86.6 %; reading it as a tree costs 2.4 points")
    assert "following a single path 4.0." in words
    assert baseline_text({"classifier": None, "stages": stages}) == ""
    assert baseline_text({"stages": stages}) == ""


def test_a_tree_that_is_better_than_the_classifier_costs_nothing() -> None:
    words = baseline_text({"classifier": 0.2, "stages": {"projected": stage_figures(0.842, 0.826)}})
    assert words == "The classifier without a tree has 20.0 %; the tree has 84.2 %, and on a single path 82.6 %."

"""Tables as text that other programs read back."""

import csv
import io

import pytest

from prototree.evaluation.tables import (
    LabelledAccuracy,
    Table,
    baseline_text,
    class_table,
    image_error_table,
    imbalance_text,
    node_error_table,
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


def test_percentages_as_people_write_them() -> None:
    assert [percent(value) for value in (0.0, 0.004, 0.5, 0.997, 1.0)] == ["0 %", "<1 %", "50 %", ">99 %", "100 %"]
    assert [percent(value, 1) for value in (0.9834, 0.004, 0.9996)] == ["98.3 %", "0.4 %", "100.0 %"]


def test_the_hardest_class_comes_first_with_what_it_is_taken_for() -> None:
    stage = {"class_accuracy": [1.0, 0.25, None], "confusion": [[0, 0, 4], [1, 0, 1], [1, 1, 1], [1, 2, 2]]}
    table = class_table({"classes": ["crow", "wren", "tit"], "stages": {"pruned": stage}}, "pruned")
    assert table.rows == (("wren", "25.0 %", "4", "tit (2), crow (1)"), ("crow", "100.0 %", "4", "–"))


def test_names_mean_nothing_in_markdown() -> None:
    names = ("[x](http://evil.example)", "<img src=x onerror=alert(1)>", "a|b", "*bold*", "two\nlines", "`code` $x$")
    text = Table("t", ("class",), tuple((name,) for name in names)).to_markdown()
    assert "<img" not in text
    assert "](" not in text.replace("\\](", "")
    assert r"a\|b" in text
    assert r"\*bold\*" in text
    assert "| two lines |" in text
    assert len(text.splitlines()) == 4 + len(names)


def test_errors_with_the_closest_first() -> None:
    rows = [
        ("a.jpg", 0, 1, 4, True, 0.7, 2.0),
        ("b.jpg", 1, 0, None, False, None, None),
        ("c.jpg", 1, 0, 1, False, 0.4, 0.1),
    ]
    names = ("image", "label", "prediction", "node", "goes_right", "p_right", "margin")
    images = [dict(zip(names, row, strict=True)) for row in rows]
    table = image_error_table({"strategy": "max_path", "images": images}, ["crow", "wren"])
    assert [row[0] for row in table.rows] == ["c.jpg", "a.jpg", "b.jpg"]
    assert table.rows[0] == ("c.jpg", "wren", "crow", "1, left", "0.400", "0.10")
    assert table.rows[2][4:] == ("–", "–")
    node = {"node": 3, "n_errors": 5, "n_goes_right": 2, "mean_abs_margin": 0.125}
    headers = set()
    for kind in ("presence", "pairwise"):
        nodes = node_error_table({"nodes": [node], "node_kind": kind})
        assert nodes.rows == (("3", "5", "2", "3", "0.12"),)
        headers.add(nodes.header)
    assert len(headers) == 2


def stage_figures(soft: float, greedy: float) -> dict[str, object]:
    length = {"mean": 4.0, "std": 0.5, "min": 3, "max": 5}
    accuracy = {"soft": soft, "max_path": soft, "greedy": greedy}
    return {"accuracy": accuracy, "path_length": {"max_path": length, "greedy": length}, "n_prototypes": 8}


def test_stages_that_agree_share_a_row() -> None:
    stages = {**dict.fromkeys(("trained", "pruned"), stage_figures(0.9, 0.8)), "projected": stage_figures(0.9, 0.7)}
    rows = stage_table({"stages": stages}, "run").rows
    assert [row[0] for row in rows] == ["trained, pruned", "projected"]
    assert rows[1][1:4] == ("90.0 %", "90.0 %", "70.0 %")


def test_the_cost_of_the_tree_stands_in_every_row() -> None:
    metrics = {"stages": {"projected": stage_figures(0.846, 0.836)}, "baseline_accuracy": 0.867}
    assert stage_table(metrics, "run").rows[0][-1] == "2.1 + 1.0"
    assert stage_table({**metrics, "baseline_accuracy": None}, "run").rows[0][-1] == "–"


@pytest.mark.parametrize(("oversampled", "token"), [(True, "up to 7 times"), (False, "seen once")])
def test_uneven_classes_are_told_with_what_was_done(oversampled: bool, token: str) -> None:
    text = imbalance_text({"data": {"train_per_class": [50, 12, 1], "oversampled": oversampled}})
    assert "1 to 50 training images" in text
    assert token in text
    assert imbalance_text({"data": {"train_per_class": [30, 29], "oversampled": oversampled}}) == ""
    assert imbalance_text({}) == ""


def test_what_a_tree_costs_is_said_where_there_was_a_classifier() -> None:
    stages = {"projected": stage_figures(0.842, 0.826), "projected_any_class": stage_figures(0.1, 0.1)}
    words = baseline_text({"baseline_accuracy": 0.866, "stages": stages})
    assert "86.6 %" in words
    assert "costs 2.4 points" in words
    assert baseline_text({"baseline_accuracy": None, "stages": stages}) == baseline_text({"stages": stages}) == ""
    assert "costs" not in baseline_text({"baseline_accuracy": 0.2, "stages": stages}), "a better tree costs nothing"


def test_predictions_beside_the_labels_of_a_list() -> None:
    counts = LabelledAccuracy(("crow", "wren"))
    pairs = [("crow", "crow"), ("wren", "crow"), ("wren", "wren"), ("wren", None), ("owl", "crow")]
    for label, prediction in pairs:
        counts.add(label, prediction)
    assert counts.n_images == 4
    accuracy, unknown = counts.words()
    assert "2 of 3" in accuracy
    assert "'owl'" in unknown
    assert [row[:3] for row in counts.table().rows] == [("wren", "33.3 %", "3"), ("crow", "100.0 %", "1")]

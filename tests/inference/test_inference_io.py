"""Inputs as people name them, and files of predictions that other programs read back."""

import csv
import json
import os
from pathlib import Path

import pytest

from prototree.errors import ConfigError, DataError
from prototree.inference.io import ListedImage, list_images, prediction_file
from prototree.inference.predict import Prediction, Step


def test_images_come_in_the_order_that_people_count(tmp_path: Path) -> None:
    for name in ("b/10.jpg", "b/2.jpg", "a/1.png", "a/notes.txt", "a/._x.jpg", ".hidden/x.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    in_order = [tmp_path / name for name in ("a/1.png", "b/2.jpg", "b/10.jpg")]
    assert [listed.path for listed in list_images([tmp_path])] == in_order
    assert [listed.path for listed in list_images([f"{tmp_path}/b/*.jpg"])] == in_order[1:]
    names = [listed.path for listed in list_images(["-", "x.jpg"], ["p.jpg\n", "\n", "q r.jpg\r\n"])]
    assert names == [Path("p.jpg"), Path("q r.jpg"), Path("x.jpg")]
    (tmp_path / "list.csv").write_text('\ufefflabel;File\n"crow; black";b/2.jpg\n;a/1.png\n')
    assert list(list_images([tmp_path / "list.csv"])) == [
        ListedImage(tmp_path / "b/2.jpg", "crow; black"),
        ListedImage(tmp_path / "a/1.png", None),
    ]


def test_lists_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("name,class\nx,y\n")
    (tmp_path / "utf16.csv").write_text("path,label\ngrün.jpg,wren\n", encoding="utf-16")
    os.mkfifo(tmp_path / "pipe.csv")
    for name, token in (("other", "header"), ("utf16", "UTF-8"), ("pipe", "pipe")):
        with pytest.raises(DataError, match=token):
            list(list_images([tmp_path / f"{name}.csv"]))
    with pytest.raises(DataError, match="no file matches"):
        list(list_images([tmp_path / "*.jpg"]))


STEP = Step(7, "7R", "7L", True, 0.75, "more like “red, square” than 7L")
PREDICTIONS = [
    Prediction("a.jpg", "wren", "wren", 0.9, 0.8, path=(STEP,), class_probs={"wren": 0.8, "crow": 0.1}),
    Prediction("b.jpg", "wren", "crow", None, 0.4, "Too far.", (STEP,), {"wren": 0.4, "crow": 0.3}),
    Prediction("gone.jpg", error="not there"),
]


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl"])
def test_tables_hold_every_row(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "new" / f"predictions.{kind}"
    with prediction_file(path, top=2) as add:
        for prediction in PREDICTIONS:
            add(prediction.to_json())
        assert not path.exists(), "half a table must not pass for a whole one"
    text = path.read_text()
    if kind == "csv":
        rows = list(csv.DictReader(text.splitlines()))
        assert [row["class_1"] for row in rows] == ["wren", "wren", ""]
        assert rows[0]["steps"] == STEP.text
        assert [row["abstained"] for row in rows] == ["False", "True", "False"]
    else:
        rows = json.loads(text) if kind == "json" else list(map(json.loads, text.splitlines()))
        assert rows[0]["class_probs"] == {"wren": 0.8, "crow": 0.1}
        assert rows[0]["steps"][0]["goes_right"] is True
        assert [row["abstained"] for row in rows] == [False, True, False]
    assert [row["path"] for row in rows] == ["a.jpg", "b.jpg", "gone.jpg"]
    assert [row["prediction"] or None for row in rows] == ["wren", None, None]
    assert [row["predicted_class"] or None for row in rows] == ["wren", "wren", None]
    assert [row["label"] or None for row in rows] == ["wren", "crow", None]
    assert rows[1]["confidence"] in (None, "")
    assert rows[2]["error"] == "not there"
    assert not path.with_name(f"{path.name}.partial").exists()


def test_what_was_predicted_before_an_interruption_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    writing = prediction_file(path, top=0)
    writing.__enter__()(PREDICTIONS[2].to_json())
    assert not writing.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not path.exists()
    assert json.loads((tmp_path / "p.jsonl.partial").read_text())["path"] == "gone.jpg"
    with pytest.raises(ConfigError, match="csv"), prediction_file(tmp_path / "x", top=0):
        pass

"""Many photos at once, in every form that people have them, broken ones among them."""

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

import prototree
from prototree.cli import app
from prototree.core.nodes import NodeFunction
from prototree.data.transforms import to_input
from prototree.errors import ConfigError, DataError
from prototree.evaluation.tables import percent
from prototree.files import write_json
from prototree.inference.answers import UNKNOWN
from prototree.inference.inputs import Listed, listed_photos
from prototree.inference.outputs import prediction_file
from prototree.inference.predict import Prediction, predict_each
from prototree.run import Run
from tiny_editing import tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_run(tmp_path_factory.mktemp("predictions"), NodeFunction("pairwise", 4.0))


def photos_of(run: Run) -> list[Path]:
    return [one.path for one in listed_photos([Path(run.source) / "test"])]


def test_many_photos_are_answered_as_one_by_one(run: Run) -> None:
    tree, paths = run.tree(), photos_of(run)
    one_by_one = [prototree.ask(tree, path) for path in paths]
    many = list(predict_each(tree, paths, batch_size=5, threads=2))  # the network is folded: other last digits
    assert [one.name for one in many] == list(map(str, paths))
    for single, one in zip(one_by_one, many, strict=True):
        assert one.answer is not None
        assert (one.answer.label, [turn.node for turn in one.answer.path]) == (
            single.label,
            [turn.node for turn in single.path],
        )
        assert one.answer.confidence == pytest.approx(single.confidence, abs=1e-4)
        assert dict(one.top)[single.label] == pytest.approx(single.probability, abs=1e-4)
        assert [p for _, p in one.top] == sorted((p for _, p in one.top), reverse=True)


def test_every_form_of_photo_gives_the_same_answer(run: Run) -> None:
    tree, paths = run.tree(), photos_of(run)[:3]
    images = [Image.open(path).convert("RGB") for path in paths]
    pixels = np.stack([np.asarray(image) for image in images])
    as_tensor = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2)
    ready = torch.stack([to_input(image, tree.preprocessing) for image in images])
    expected = [one.answer for one in prototree.predict(run, paths)]
    forms = (images, pixels, list(pixels), as_tensor, ready, (image for image in images), [pixels[:2], paths[2]])
    for form in forms:
        assert [one.answer for one in prototree.predict(tree, form)] == expected
    assert [one.answer for one in prototree.predict(run.folder, str(paths[0]))] == expected[:1]
    assert [one.name for one in prototree.predict(tree, [images[0], paths[1], images[2]])] == ["0", str(paths[1]), "1"]


def test_a_broken_photo_is_a_row_with_a_reason(run: Run, tmp_path: Path) -> None:
    good = photos_of(run)[0]
    (tmp_path / "empty.jpg").write_bytes(b"")
    found = prototree.predict(run, [tmp_path / "empty.jpg", good, tmp_path / "gone.jpg"])
    assert [one.answer is None for one in found] == [True, False, True]
    assert found[0].problem.startswith("is empty"), "its name is said already"
    assert found[2].problem.startswith("cannot be opened")
    assert [one.said for one in found][::2] == ["", ""]


def test_a_photo_in_a_format_that_is_not_read_is_a_row_with_the_reason(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.psd").write_bytes(b"8BPS")
    (tmp_path / "notes.txt").write_text("no photo")
    (one,) = prototree.predict(run, tmp_path)
    assert one.name.endswith("a.psd")
    assert one.problem


def test_what_is_not_sure_enough_is_not_known(run: Run) -> None:
    tree, paths = run.tree(), photos_of(run)
    confidence = sorted(one.answer.confidence for one in prototree.predict(tree, paths) if one.answer)
    middle = confidence[len(confidence) // 2]
    found = prototree.predict(tree, paths, min_confidence=middle)
    assert {one.said == UNKNOWN for one in found} == {True, False}
    for before, one in zip(prototree.predict(tree, paths), found, strict=True):
        assert before.answer is not None
        assert one.answer is not None
        assert (one.said == UNKNOWN) == (before.answer.confidence < middle)
        assert one.answer.confidence == (None if one.said == UNKNOWN else before.answer.confidence)
        assert bool(one.answer.reason) == (one.said == UNKNOWN)
    assert UNKNOWN in str(next(one.answer for one in found if one.said == UNKNOWN))
    with pytest.raises(ConfigError, match="from 0 to 1"):
        prototree.ask(tree, paths[0], min_confidence=1.5)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("photos", "message"),
    [
        (np.zeros((2, 8, 8, 3)), "float64 of shape .*; give 8-bit numbers from 0 to 255"),
        (torch.zeros(2, 3, 8, 8), "expected preprocessed tensors of 32×32 pixels, got 8×8"),
        (torch.zeros(2, 8, 8, dtype=torch.uint8), "expected a tensor of N×3×.*; move red, green and blue there"),
        (None, "expected a path, a PIL image, a uint8 array or a tensor, got NoneType"),
        (b"bytes", "expected a path, a PIL image, a uint8 array or a tensor, got bytes"),
        ([object()], "expected a path, a PIL image, a uint8 array or a tensor, got object"),
        ("no/*.jpg", "no file matches"),
    ],
)
def test_what_is_no_photo_is_refused(run: Run, photos: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prototree.predict(run.tree(), photos)  # type: ignore[arg-type]


def test_photos_are_listed_as_people_name_them(tmp_path: Path) -> None:
    names = ("b/2.jpg", "b/10.jpg", "a/1.png", "a/.hidden.jpg", "a/notes.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    in_order = [tmp_path / name for name in ("a/1.png", "b/2.jpg", "b/10.jpg")]
    assert [one.path for one in listed_photos([tmp_path])] == in_order
    assert [one.path for one in listed_photos([f"{tmp_path}/b/*.jpg"])] == in_order[1:]
    assert [one.path for one in listed_photos(["-", "x.jpg"], ["p.jpg\n", "\n", "q r.jpg\r\n"])] == [
        Path("p.jpg"),
        Path("q r.jpg"),
        Path("x.jpg"),
    ]
    (tmp_path / "list.csv").write_text('\ufefflabel;File\n"crow; black";b/2.jpg\n;a/1.png\n')
    assert list(listed_photos([tmp_path / "list.csv"])) == [
        Listed(tmp_path / "b/2.jpg", "crow; black"),
        Listed(tmp_path / "a/1.png", None),
    ]
    (tmp_path / "other.csv").write_text("name,class\nx,y\n")
    with pytest.raises(DataError, match="line 1: expected a header with a column path"):
        list(listed_photos([tmp_path / "other.csv"]))
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(DataError, match="it is a pipe or a device"):
        list(listed_photos([tmp_path / "pipe.csv"]))


def test_a_list_in_another_encoding_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,label\ngrün.jpg,wren\n", encoding="utf-16")
    with pytest.raises(DataError, match="expected text in UTF-8, got another encoding; save it as CSV UTF-8"):
        list(listed_photos([tmp_path / "list.csv"]))


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl"])
def test_tables_hold_every_row(run: Run, tmp_path: Path, kind: str) -> None:
    found = [*prototree.predict(run, photos_of(run)[:2], top=2), Prediction("gone.jpg", None, "not there")]
    path = tmp_path / "new" / f"predictions.{kind}"
    with prediction_file(path, top=2, notes={0: "red,\nsquare"}) as add:
        for one in found:
            add(one)
        assert not path.exists(), "half a table must not pass for a whole one"
    text = path.read_text()
    if kind == "csv":
        rows = list(csv.DictReader(text.splitlines()))
        assert rows[0]["class_1"] == found[0].top[0][0]
        assert rows[2]["class_1"] == ""
    else:
        rows = json.loads(text) if kind == "json" else list(map(json.loads, text.splitlines()))
        assert rows[0]["top"][0]["class"] == found[0].top[0][0]
    assert [row["file"] for row in rows] == [one.name for one in found]
    assert [row["answer"] for row in rows] == [one.said for one in found]
    assert [row["guess"] for row in rows] == [*(one.answer.label for one in found if one.answer), ""]
    assert rows[2]["problem"] == "not there"
    assert "“red, square”" in rows[0]["path"]
    assert not path.with_name(f"{path.name}.partial").exists()


def test_what_was_predicted_before_an_interruption_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"

    def interrupted() -> None:
        with prediction_file(path, top=0) as add:
            add(Prediction("a.jpg", None, "broken"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not path.exists()
    assert json.loads((tmp_path / "p.jsonl.partial").read_text())["file"] == "a.jpg"
    with (
        pytest.raises(ConfigError, match=r"that ends in \.csv, \.json or \.jsonl, got"),
        prediction_file(tmp_path / "x", top=0),
    ):
        pass


def test_the_command_predicts_judges_and_goes_on(run: Run, tmp_path: Path) -> None:
    write_json(run.folder / "notes.json", {"0": "a mark"})
    (tmp_path / "broken.jpg").write_bytes(b"no photo")
    rows = [(str(path), path.parent.name) for path in photos_of(run)] + [
        ("broken.jpg", "red"),
        (str(photos_of(run)[0]), "x"),
    ]
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(f"{path},{label}\n" for path, label in rows))

    def command(*words: str, given: str = "") -> Result:
        return CliRunner().invoke(app, ["predict", str(run.folder), *words], input=given)

    done = command(str(tmp_path / "list.csv"), "--out", str(tmp_path / "p.csv"), "--top", "2")
    assert done.exit_code == 0, done.stderr
    table = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert len(table) == len(rows)
    right = sum(row["answer"] == row["label"] for row in table)
    assert f"{right} of {len(photos_of(run))} answers are right" in done.stdout
    assert "photos not counted: 1 (the tree has no class 'x')" in done.stdout
    assert "taken for" in done.stdout
    assert "1 of 14 photos could not be read" in done.stderr
    assert any("“a mark”" in row["path"] for row in table)
    read = command("-", given=f"{photos_of(run)[0]}\ngone.jpg\n")
    assert read.exit_code == 0, read.stderr
    assert len(read.stdout.splitlines()) == 2
    assert "not read" in read.stdout
    assert command(str(tmp_path / "broken.jpg")).exit_code == 1
    nothing = command("-", "--out", str(tmp_path / "none.csv"), given="\n")
    assert isinstance(nothing.exception, DataError)
    assert "found no photo in the names on standard input" in str(nothing.exception)
    assert not list(tmp_path.glob("none.csv*"))


def test_names_on_standard_input_need_not_be_text(run: Run, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff \xe9.png"
    shutil.copyfile(photos_of(run)[0], name)
    done = CliRunner().invoke(app, ["predict", str(run.folder), "-"], input=name + b"\n")
    assert done.exit_code == 0, done.exception
    assert "% sure" in done.stdout


def test_printed_answers_have_the_likeliest_classes_where_they_are_asked_for(run: Run) -> None:
    one, *_ = prototree.predict(run, photos_of(run)[:1], top=2)
    printed = [
        CliRunner().invoke(app, ["predict", str(run.folder), one.name, *words]).stdout for words in ([], ["--top", "2"])
    ]
    assert "by all leaves" not in printed[0]
    assert printed[1].strip().endswith(f"by all leaves: {', '.join(f'{name} {percent(p)}' for name, p in one.top)}")


def test_a_table_of_photos_is_a_list_of_them(run: Run) -> None:
    pandas = pytest.importorskip("pandas")
    paths = list(map(str, photos_of(run)[:3]))
    table = pandas.DataFrame({"File": paths, "label": ["red", None, "x"]})
    assert [(one.name, one.truth) for one in prototree.predict(run, table)] == list(
        zip(paths, ["red", None, "x"], strict=True)
    )
    with pytest.raises(DataError, match="expected a table with a column path, file, filename or image"):
        prototree.predict(run, table[["label"]])

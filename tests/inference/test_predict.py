"""One image or many, one tree or several, in every form that people have them, broken images among them."""

import csv
import dataclasses
import os
import shutil
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

import prototree
from prototree.cli import app
from prototree.core import checkpoint
from prototree.core.confidence import Calibration
from prototree.core.ensemble import Ensemble
from prototree.core.nodes import NodeFunction
from prototree.data.transforms import eval_transform
from prototree.errors import ConfigError, DataError
from prototree.inference.io import list_images
from prototree.inference.predict import iter_predictions, make_step
from prototree.io import write_json
from prototree.run import Run
from tiny_editing import tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_run(tmp_path_factory.mktemp("predictions"), NodeFunction("pairwise", 4.0))


def images_of(run: Run) -> list[Path]:
    return [listed.path for listed in list_images([Path(run.source) / "test"])]


def test_one_image_is_predicted_whatever_form_it_has(run: Run, tmp_path: Path) -> None:
    path, tree = images_of(run)[0], run.tree()
    checkpoint.save(tree, tmp_path / "tree")
    pixels = np.asarray(Image.open(path).convert("RGB"))
    by_path = [prototree.predict(model, path) for model in (run, run.folder, str(run.folder), tree, tmp_path / "tree")]
    in_memory = [prototree.predict(tree, form) for form in (Image.open(path), pixels.copy())]
    first = by_path[0]
    assert all(one == first for one in by_path)
    assert first.image == str(path)
    for one in in_memory:
        assert one.image is None
        assert (one.path, one.class_probs, one.confidence) == (first.path, first.class_probs, first.confidence)
    decisions = tree.predict(eval_transform(Image.open(path), tree.preprocessing)[None])
    assert first.prediction == first.predicted_class == tree.class_names[int(decisions.labels("greedy")[0])]
    assert not first.abstained
    assert [step.node - 1 for step in first.path] == [node for node in decisions.greedy.nodes[0].tolist() if node >= 0]
    for step in first.path:
        sides = (f"{step.node}R", f"{step.node}L")
        assert (step.nearer, step.farther) == (sides if step.goes_right else sides[::-1])
        assert step.text in str(first)
    assert first.probability == pytest.approx(first.class_probs[first.predicted_class], abs=1e-6)


def test_every_strategy_predicts_and_no_other(run: Run) -> None:
    tree, path = run.tree(), images_of(run)[0]
    for models in (tree, [tree, tree]):
        found = {way: prototree.predict(models, path, strategy=way) for way in ("greedy", "max_path", "soft")}
        assert all(one.path for one in found.values())
        assert found["soft"].confidence == found["soft"].probability
        jaxtyping.config.update("jaxtyping_disable", True)  # as users run it
        try:
            for wrong in ("x", "Greedy", None):
                with pytest.raises(ConfigError, match="soft, max_path, greedy"):
                    prototree.predict(models, path, strategy=wrong)  # type: ignore[arg-type]
        finally:
            jaxtyping.config.update("jaxtyping_disable", False)


def test_steps_name_what_they_compare_by_notes_or_numbers(run: Run) -> None:
    tree = run.tree()
    step = make_step(tree, 2, False, 0.1, {2 + tree.topology.n_nodes: "red\nchest"})
    assert (step.node, step.nearer, step.farther) == (3, "3L", "3R")
    assert step.text == "more like “red chest” than 3R"
    presence = prototree.ProtoTree(tree.topology, tree.features, tree.class_names)
    assert [make_step(presence, 0, right, 0.5).text for right in (True, False)] == ["has 1", "lacks 1"]


def test_many_images_in_any_form_are_predicted_as_one_by_one(run: Run) -> None:
    tree, paths = run.tree(), images_of(run)
    many = list(iter_predictions(tree, paths, batch_size=5, threads=2))  # the network is folded: other rounding
    assert [one.image for one in many] == list(map(str, paths))
    for path, one in zip(paths, many, strict=True):
        single = prototree.predict(tree, path)
        assert one.predicted_class == single.predicted_class
        assert [step.node for step in one.path] == [step.node for step in single.path]
        assert one.confidence == pytest.approx(single.confidence, abs=1e-4)
        assert one.class_probs == pytest.approx(dict(single.class_probs), abs=1e-4)
        assert list(one.class_probs.values()) == sorted(one.class_probs.values(), reverse=True)
    paths = paths[:3]
    images = [Image.open(path).convert("RGB") for path in paths]
    pixels = np.stack([np.asarray(image) for image in images])
    as_tensor = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2)
    ready = torch.stack([eval_transform(image, tree.preprocessing) for image in images])
    expected = [one.path for one in prototree.predict(run, paths)]
    forms = (images, pixels, list(pixels), as_tensor, ready, (image for image in images), [pixels[:2], paths[2]])
    for form in forms:
        assert [one.path for one in prototree.predict(tree, form)] == expected
    mixed = prototree.predict(tree, [images[0], paths[1], images[2]])
    assert [one.image for one in mixed] == [None, str(paths[1]), None]


def test_several_models_are_averaged_as_an_ensemble(run: Run) -> None:
    other = run.tree()
    other.leaf_logits.data = other.leaf_logits.data.roll(1, dims=0)
    other.calibration = Calibration(0.0, -3.0)
    paths = images_of(run)
    found = prototree.predict([run.folder, other], paths, top=3)
    ensemble = Ensemble([run.tree(), other])
    images = torch.stack([eval_transform(Image.open(path), other.preprocessing) for path in paths])
    soft, greedy = (ensemble.class_probs(images, strategy) for strategy in ("soft", "greedy"))
    for i, one in enumerate(found):
        assert one.predicted_class == other.class_names[int(greedy[i].argmax())]
        expected = dict(zip(other.class_names, soft[i].tolist(), strict=True))
        assert one.class_probs == pytest.approx(expected, abs=1e-5)
        assert one.confidence == one.probability
    with pytest.raises(ConfigError):
        prototree.predict([], paths[0])
    with pytest.raises(ConfigError):
        prototree.evaluate([])


def test_trees_that_want_other_input_predict_together(run: Run, tmp_path: Path) -> None:
    other, paths = run.tree(), images_of(run)
    size = other.preprocessing.size
    other.preprocessing = dataclasses.replace(other.preprocessing, resize=2 * size)  # sees the middle alone
    ensemble = Ensemble([run.tree(), other])
    batches = [
        torch.stack([eval_transform(Image.open(path).convert("RGB"), preprocessing) for path in paths])
        for preprocessing in ensemble.inputs
    ]
    assert not torch.equal(*batches)
    expected = ensemble.class_probs(batches)
    (tmp_path / "empty.jpg").write_bytes(b"")
    found = prototree.predict([run.folder, other], [tmp_path / "empty.jpg", *paths], top=3)
    assert found[0].error
    for one, probs in zip(found[1:], expected, strict=True):
        assert one.class_probs == pytest.approx(dict(zip(other.class_names, probs.tolist(), strict=True)), abs=1e-5)
    with pytest.raises(DataError):
        prototree.predict([run.folder, other], torch.zeros(1, 3, size, size))
    labels = torch.tensor([one.label for one in run.data().test])
    accuracy = prototree.evaluate([run.folder, other]).all_trees.accuracy["soft"]
    assert accuracy == pytest.approx(float((expected.argmax(dim=1) == labels).float().mean()))


def test_an_unreadable_image_is_an_error_of_its_own(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").write_bytes(b"")
    found = prototree.predict(run, [tmp_path / "empty.jpg", images_of(run)[0], tmp_path / "gone.jpg"])
    assert [bool(one.error) for one in found] == [True, False, True]
    assert found[0].error.startswith("is empty"), "its name is said already"
    assert [one.prediction for one in found][::2] == [None, None]
    with pytest.raises(DataError, match=r"gone\.jpg"):
        prototree.predict(run, tmp_path / "gone.jpg")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.psd").write_bytes(b"8BPS")
    (tmp_path / "folder" / "notes.txt").write_text("no image")
    (prediction,) = prototree.predict(run, tmp_path / "folder")
    assert prediction.image.endswith("a.psd")
    assert prediction.error


def test_a_model_abstains_below_the_confidence_asked_for(run: Run) -> None:
    tree, paths = run.tree(), images_of(run)
    before = prototree.predict(tree, paths)
    middle = sorted(one.confidence for one in before)[len(before) // 2]
    after = prototree.predict(tree, paths, min_confidence=middle)
    assert {one.abstained for one in after} == {True, False}
    for one, without_limit in zip(after, before, strict=True):
        assert one.abstained == (without_limit.confidence < middle) == bool(one.abstain_reason)
        assert one.confidence == (None if one.abstained else without_limit.confidence)
        assert one.prediction == (None if one.abstained else one.predicted_class)
    assert "I don't know" in str(next(one for one in after if one.abstained))
    for percentage in (70.0, 1.5, -1.0):
        with pytest.raises(ConfigError, match="0 to 1"):
            prototree.predict(tree, paths, min_confidence=percentage)


def test_what_is_unusually_far_is_abstained_from_without_a_percentage(run: Run) -> None:
    tree, path = run.tree(), images_of(run)[0]
    tree.distance_p95.fill_(1.0)
    decisions = tree.predict(eval_transform(Image.open(path), tree.preprocessing)[None])
    tree.calibration = Calibration(min_confidence=0.0, max_ood_score=float(decisions.ood_score) - 1e-3)
    one = prototree.predict(tree, path)
    assert one.abstained
    assert one.confidence is None
    assert "%" not in str(one)
    node = int(decisions.greedy.nodes[0, decisions.distance_ratio[0].argmax()])
    assert f"question {node + 1} " in one.abstain_reason


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("images", "token"),
    [
        (np.zeros((2, 8, 8, 3)), "float64"),
        (np.zeros((8, 8, 3)), "float64"),
        (torch.zeros(2, 3, 8, 8), "32×32"),
        (torch.zeros(2, 8, 8, dtype=torch.uint8), "3×height×width"),
        (None, "NoneType"),
        (3, "int"),
        (b"bytes", "bytes"),
        ({"a": 1}, "mapping"),
        (torch.full((3, 32, 32), float("nan")), "NaN"),
        ([object()], "object"),
        ("no/*.jpg", "no file matches"),
    ],
)
def test_what_is_no_image_is_refused(run: Run, images: object, token: str) -> None:
    with pytest.raises(DataError, match=token):
        prototree.predict(run.tree(), images)


def test_the_command_predicts_judges_and_goes_on(run: Run, tmp_path: Path) -> None:
    write_json(run.folder / "notes.json", {"1R": "a mark", "1L": "none"})
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    rows = [(str(path), path.parent.name) for path in images_of(run)]
    rows += [("broken.jpg", "red"), (str(images_of(run)[0]), "x")]
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(f"{path},{label}\n" for path, label in rows))

    def command(*words: str, given: str | bytes = "") -> Result:
        return CliRunner().invoke(app, ["predict", str(run.folder), *words], input=given)

    done = command(str(tmp_path / "list.csv"), "--out", str(tmp_path / "p.csv"), "--top", "2")
    assert done.exit_code == 0, done.stderr
    table = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert len(table) == len(rows)
    right = sum(row["prediction"] == row["label"] for row in table)
    assert f"{right} of {len(images_of(run))}" in done.stdout
    assert "'x'" in done.stdout
    assert "1 of 14" in done.stderr
    assert any("“a mark”" in row["steps"] for row in table)
    assert "“a mark”" in command(str(images_of(run)[0]), "--ensemble", str(run.folder)).stdout  # of a tree of several
    read = command("-", given=f"{images_of(run)[0]}\ngone.jpg\n")
    assert read.exit_code == 0, read.stderr
    assert len(read.stdout.splitlines()) == 2
    assert "not read" in read.stdout
    assert command(str(tmp_path / "broken.jpg")).exit_code == 1
    nothing = command("-", "--out", str(tmp_path / "none.csv"), given="\n")
    assert isinstance(nothing.exception, DataError)
    assert not list(tmp_path.glob("none.csv*"))
    with_top = command(str(images_of(run)[0]), "--top", "2").stdout
    assert "over all paths" in with_top
    assert "over all paths" not in read.stdout
    name = os.fsencode(tmp_path) + b"/\xff \xe9.png"  # need not be text
    shutil.copyfile(images_of(run)[0], name)
    assert "% confidence" in command("-", given=name + b"\n").stdout


def test_a_table_of_images_is_a_list_of_them(run: Run) -> None:
    pandas = pytest.importorskip("pandas")
    paths = list(map(str, images_of(run)[:3]))
    table = pandas.DataFrame({"File": paths, "label": ["red", None, "x"]})
    found = [(one.image, one.label) for one in prototree.predict(run, table)]
    assert found == list(zip(paths, ["red", None, "x"], strict=True))
    with pytest.raises(DataError, match="column"):
        prototree.predict(run, table[["label"]])

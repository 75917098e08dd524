import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import prototree
from prototree.cli import app
from prototree.core import checkpoint
from prototree.errors import ConfigError, DataError
from prototree.run import Run
from tiny_editing import tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_run(tmp_path_factory.mktemp("answers"))


def test_a_photo_is_answered_whatever_form_it_has(run: Run) -> None:
    path = Path(run.source) / "test" / "red" / "0.png"
    pixels = np.asarray(Image.open(path).convert("RGB"))
    tree = run.tree()
    answers = [
        prototree.ask(run, path),
        prototree.ask(run.folder, str(path)),
        prototree.ask(tree, Image.open(path)),
        prototree.ask(tree, pixels.copy()),
    ]
    assert len(set(answers)) == 1
    answer = answers[0]
    assert answer.label in tree.class_names
    assert 0 < answer.probability <= 1
    assert 0 < answer.confidence < 1
    assert answer.path[0].node == 0
    last = answer.path[-1]
    child = (tree.topology.right if last.present else tree.topology.left)[last.node]
    assert child < 0, "the path ends in a leaf"
    assert str(answer).startswith(f"{answer.label} (")


@pytest.mark.usefixtures("as_users_run_it")
def test_what_is_no_photo_is_refused(run: Run) -> None:
    tree = run.tree()
    with pytest.raises(DataError, match="expected a path, a PIL image or a uint8 array of height×width×3, got float64"):
        prototree.ask(tree, np.zeros((8, 8, 3)))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="got int"):
        prototree.ask(tree, 3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="cannot be opened"):
        prototree.ask(tree, "nowhere.jpg")


@pytest.mark.usefixtures("as_users_run_it")
def test_a_run_a_path_and_a_tree_are_explained_alike(run: Run, tmp_path: Path) -> None:
    photo = next(Path(run.source).rglob("*.png"))
    checkpoint.save(run.tree(), tmp_path / "tree")
    given = (run, run.folder, str(run.folder), run.tree(), tmp_path / "tree")
    found = [prototree.explain_image(one, photo) for one in given]
    assert len({(one.soft, one.confidence) for one in found}) == 1
    assert prototree.explain(run.folder, photo).soft == found[0].soft  # type: ignore[operator]
    with pytest.raises(ConfigError, match="got int"):
        prototree.explain_image(3, photo)  # type: ignore[arg-type]


def test_a_run_is_reported_by_a_call(run: Run, tmp_path: Path) -> None:
    written = prototree.report(run.folder, tmp_path / "pages", nearest=1)  # type: ignore[operator]
    assert tmp_path / "pages" / "index.html" in written
    assert all(path.exists() for path in written)


@pytest.mark.parametrize(
    ("min_confidence", "said"), [(70.0, "0.7"), (100.0, "did you mean 1?"), (1.5, "0.015"), (-1.0, "0 to 1")]
)
def test_a_percentage_is_no_share(run: Run, min_confidence: float, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        prototree.ask(run, "nowhere.jpg", min_confidence=min_confidence)
    done = CliRunner().invoke(app, ["predict", str(run.folder), "nowhere.jpg", f"--min-confidence={min_confidence}"])
    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)

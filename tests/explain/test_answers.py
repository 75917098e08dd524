from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import prototree
from prototree.errors import DataError
from prototree.run import Run
from tiny_mending import tiny_run


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
    assert 0 < answer.sureness < 1
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

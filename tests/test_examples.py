"""The examples run, on tiny data and with settings that take seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

from doc_workspace import QUICK, write_photos
from tiny_training import TINY, write_squares

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *words: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *words], capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_examples_are_short() -> None:
    assert all(len(path.read_text().splitlines()) <= 60 for path in EXAMPLES.glob("*.py"))


def test_training_and_asking(tmp_path: Path) -> None:
    settings = TINY | {"prune_threshold": 0.34}
    words = [f"{key}={value}" for key, value in settings.items()]
    output = run("train_and_predict.py", str(write_squares(tmp_path / "photos")), str(tmp_path / "run"), *words)
    assert output.splitlines()[-1] in ("→ red", "→ green", "→ blue")


def test_a_table_of_photos(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="needs pandas")
    write_photos(tmp_path)
    words = [f"{key}={value}" for key, value in QUICK.items()]
    table = tmp_path / "photos.csv"
    lines = table.read_text().replace("\nphotos/", f"\n{tmp_path}/photos/")  # seen from any folder
    for number, name in enumerate(("bluebird", "cardinal", "greenfinch")):
        lines = lines.replace(f",{name}", f",00{number}")
    table.write_text(lines)
    output = run("from_dataframe.py", str(table), str(tmp_path / "run"), *words)
    assert "of 33 photos are answered wrongly" in output
    assert "33 of 33" not in output, "names that look like numbers are names"
    assert "001 " in output


def test_an_estimator_of_scikit_learn(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs the extra 'sklearn'")
    write_photos(tmp_path)
    words = [f"{key}={value}" for key, value in QUICK.items()]
    output = run("with_scikit_learn.py", str(tmp_path / "photos"), *words)
    assert "bluebird" in output
    assert "questions asked per photo:" in output


@pytest.mark.slow
def test_the_notebook_runs_and_shows_a_tree_and_a_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    write_photos(tmp_path)
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "stored without output"
    given = f'photos, preset, settings, out = "photos", "default", {QUICK}, "run"'
    notebook.cells[1].source = f"import prototree\n{given}"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nbclient.NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "text/html" in output.get("data", {})
    ]
    assert len(shown) == 2
    assert all("iframe" in page and "bluebird" in page for page in shown)

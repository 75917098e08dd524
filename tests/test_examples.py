"""The examples run, on tiny data and with settings that take seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

from doc_workspace import QUICK, write_photos
from tiny_training import TINY, write_squares

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *words: object, settings: dict[str, object]) -> str:
    command = [sys.executable, EXAMPLES / name, *words, *(f"{key}={value}" for key, value in settings.items())]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_training_and_asking(tmp_path: Path) -> None:
    photos, settings = write_squares(tmp_path / "photos"), {**TINY, "prune_threshold": 0.34}
    output = run("train_and_predict.py", photos, tmp_path / "run", settings=settings)
    assert output.splitlines()[-1] in ("→ red", "→ green", "→ blue")


@pytest.mark.slow
def test_a_table_of_photos(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="needs pandas")
    write_photos(tmp_path)
    table = tmp_path / "photos.csv"
    lines = table.read_text().replace("\nphotos/", f"\n{tmp_path}/photos/")  # seen from any folder
    for number, name in enumerate(("bluebird", "cardinal", "greenfinch")):
        lines = lines.replace(f",{name}", f",00{number}")
    table.write_text(lines)
    output = run("from_dataframe.py", table, tmp_path / "run", settings=QUICK)
    assert "of 33 photos" in output
    assert "33 of 33" not in output, "names that look like numbers are names"
    assert "001 " in output


@pytest.mark.slow
def test_an_estimator_of_scikit_learn(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs the extra 'sklearn'")
    write_photos(tmp_path)
    assert "bluebird" in run("with_scikit_learn.py", tmp_path / "photos", settings=QUICK)


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
    outputs = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [data["text/html"] for data in outputs if "text/html" in data]
    assert len(shown) == 2
    assert all("iframe" in page and "bluebird" in page for page in shown)

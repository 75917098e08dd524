"""Places that cannot be written to or read from, on the command line: each is one line, no traceback."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_files import write_classes
from killed_runs import Commands, commands
from prototree.run import Run
from tiny_editing import tiny_run


@pytest.fixture(scope="module")
def do(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with commands(tmp_path_factory.mktemp("commands")) as running:
        yield running


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return tiny_run(tmp_path_factory.mktemp("places"))


@pytest.mark.parametrize("command", ["train", "report", "explain", "sheet", "finetune"])
def test_an_out_that_is_no_folder_is_one_line(do: Commands, run: Run, tmp_path: Path, command: str) -> None:
    photos = write_classes(tmp_path / "photos", {"a": 3, "b": 3})
    (tmp_path / "file").write_text("not a folder")
    out = tmp_path / "file" / "out"
    words: dict[str, list[str | Path]] = {
        "train": ["train", photos, "--out", out, "--weights", "none"],
        "report": ["report", run.folder, "--out", out],
        "explain": ["explain", run.folder, photos / "a" / "0.jpg", "--out", out],
        "sheet": ["data", "check", photos, "--contact-sheet", out / "sheet.png"],
        "finetune": ["finetune", run.folder, "--out", out],
    }
    done = do.run(*words[command])
    assert done.code == 1, done.err
    assert "Traceback" not in done.err
    assert "error: " in done.err
    assert (tmp_path / "file").read_text() == "not a folder"


def test_explaining_a_folder_goes_on_after_a_bad_photo(do: Commands, run: Run, tmp_path: Path) -> None:
    photos = write_classes(tmp_path / "photos", {"a": 3})
    (photos / "a" / "1.jpg").write_bytes((photos / "a" / "1.jpg").read_bytes()[:300])
    os.mkfifo(photos / "a" / "pipe.jpg")
    done = do.run("explain", run.folder, photos, "--out", tmp_path / "out")
    assert done.code == 1
    assert "1.jpg is not an image we can read" in done.err
    assert "it is a pipe" in done.err
    assert "2 of 4 images could not be used; the others are done" in done.err
    assert len(list((tmp_path / "out").glob("*/decision.html"))) == 2

"""The command line as a person meets it: one red line instead of a traceback."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_files import smooth_photo, write_classes
from killed_runs import Commands
from prototree._version import __version__
from prototree.cli.app import console, echo, print_error, print_table, settings_help
from prototree.config import RECIPE_SETTINGS, Common, load_preset
from prototree.evaluation.tables import Table
from prototree.run import Run
from tiny_editing import tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_run(tmp_path_factory.mktemp("places"))


def test_help_names_every_command_and_needs_no_torch() -> None:
    code = "import sys, prototree.cli; sys.argv = ['prototree', '--help']\n"
    code += "try: prototree.cli.main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = ("train", "prune", "project", "evaluate", "report", "explain", "data", "predict", "pack", "clean")
    assert all(name in done.stdout for name in names)


def test_help_of_train_lists_common_settings_and_the_whole_of_it_every_one(do: Commands) -> None:
    short, whole = do.run("train", "--help").out, settings_help()
    assert "--seed" in short
    assert "--lr-backbone" not in short
    used = load_preset("default")
    for kind in (Common, *RECIPE_SETTINGS.values()):
        for item in kind.fields():
            assert f"{item.option} ({item.values}" in whole
            assert item.help in whole
    for kind, settings in ((Common, used), (type(used.recipe), used.recipe)):  # defaults are those of the preset
        for item in kind.fields():
            value = getattr(settings, item.key)
            text = "auto" if value is None else str(value).lower() if isinstance(value, bool) else str(value) or "none"
            assert re.search(rf"^  {item.option} \(.*; default {re.escape(text)}[;)]", whole, re.MULTILINE), item.key


def test_options_of_several_runs_need_several(do: Commands, tmp_path: Path) -> None:
    failed = do.run("train", "photos", "--out", tmp_path / "run", "--jobs", "2")
    assert "--seeds or --folds" in failed.err
    failed = do.run("predict", tmp_path / "nowhere", "x.jpg")
    assert "nowhere does not exist" in failed.err


def test_names_give_the_terminal_no_orders(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, do: Commands, tmp_path: Path
) -> None:
    name = "ü \x1b]0;title\x07\x1b[31m\r\x9bowl\tnight"
    echo(name)
    print_error(name)
    print_table(Table(name, (name,), ((name,),)))
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert "ü" in text and "owl" in text  # noqa: PT018
        assert not set(text) & set("\x1b\x07\r\x9b")
    monkeypatch.setattr(console, "quiet", True)  # as in all processes but the first
    print_table(Table("title", ("a",), (("1",),)))
    assert capsys.readouterr().out == ""
    done = do.run("data", "check", write_classes(tmp_path / "photos", {"crow": 3, "\x1b[31mwren": 3}))
    assert done.code == 0, done.err
    assert "[31mwren" in done.err, "in a warning"
    assert "\x1b" not in done.err + done.out


def test_names_that_are_not_utf8(do: Commands, tmp_path: Path) -> None:
    photos = write_classes(tmp_path / "photos", {"crow": 12, "wren": 12})
    for number in range(12):  # otherwise those of the other class
        smooth_photo(seed=100 + number).save(photos / "wren" / f"{number}.jpg")
    os.rename(photos / "crow" / "3.jpg", os.fsencode(photos / "crow") + b"/caf\xe9.jpg")
    shutil.copy(os.fsencode(photos / "crow") + b"/caf\xe9.jpg", photos / "wren" / "x.jpg")
    done = do.run("data", "check", photos, "--deep")
    assert done.code == 0, done.err
    assert "caf\N{REPLACEMENT CHARACTER}.jpg" in done.out, "the image is in two classes"
    os.rename(photos / "wren", os.fsencode(photos) + b"/caf\xe9")
    for words in (("data", "check", photos), ("train", photos, "--out", tmp_path / "run")):
        done = do.run(*words)
        assert done.code == 1
        assert "UTF-8" in done.err
        assert len(done.err.splitlines()) == 1


def test_check_names_a_bad_photo_once_and_strict_makes_it_an_error(do: Commands, tmp_path: Path) -> None:
    photos = write_classes(tmp_path / "photos", {"crow": 12, "wren": 12})
    (photos / "crow" / "3.jpg").write_bytes(b"")
    relaxed = do.run("data", "check", photos)
    assert relaxed.code == 0
    assert "3.jpg" in relaxed.out
    assert do.run("data", "check", photos, "--strict").code == 1
    for number in range(1, 12):
        (photos / "wren" / f"{number}.jpg").unlink()
    (photos / "wren" / "0.jpg").write_bytes(b"")
    done = do.run("data", "check", photos)
    assert done.code == 1, "no tree can be trained with one class"
    assert (done.out + done.err).count("0.jpg") == 1


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_several_processes_the_first_alone_speaks(tmp_path: Path, rank: str) -> None:
    photos = write_classes(tmp_path / "photos", {"crow": 3, "wren": 3})
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "RANK": rank}
    command = [sys.executable, "-m", "prototree", "data", "check"]
    told, failed = (
        subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=3600, env=environment)
        for path in (photos, "nowhere")
    )
    assert told.returncode == 0, told.stderr
    assert [bool(told.stdout), "fewer than 10" in told.stderr] == [rank == "0"] * 2
    assert failed.stderr.startswith("error: nowhere"), "an error may be this process's own"


TRAIN = ["train", "nowhere", "--out", "x"]


@pytest.mark.parametrize(
    ("words", "token"),
    [
        (["test"], "'evaluate'"),
        (["edit"], "'serve'"),
        (["tarin"], "'train'"),
        (TRAIN, "nowhere"),
        ([*TRAIN, "--hieght", "3"], "'height'"),
        ([*TRAIN, "--lr-backbone"], "--lr-backbone"),
        ([*TRAIN, "height"], "'height'"),
        ([*TRAIN, "--preset", "cup"], "paper-cars"),
        ([*TRAIN, "--stages", "dance"], "'dance'"),
        (["evaluate", "nowhere"], "config.toml"),
        (["evaluate", "nowhere", "elsewhere", "--ood", "x"], "--ood"),
        (["data", "check", "nowhere"], "nowhere"),
        (["report", "nowhere"], "config.toml"),
        (["explain", "nowhere", "no.jpg"], ""),
        (["data", "birds", "x", "--species", "1"], ""),
    ],
)
def test_mistakes_are_one_line(do: Commands, words: list[str], token: str, tmp_path: Path) -> None:
    done = do.run(*words, folder=tmp_path)
    assert done.code == 1
    assert done.err.startswith("error: ")
    assert token in done.err
    assert len(done.err.splitlines()) == 1
    assert done.out == ""
    assert not list(tmp_path.iterdir())


def test_version_and_usage_errors(do: Commands) -> None:
    assert do.run("--version").out.strip() == __version__
    done = do.run("train", "photos")
    assert done.code == 2
    assert "--out" in done.err
    assert "Traceback" not in done.err


def test_birds_can_be_drawn_and_checked(do: Commands, tmp_path: Path) -> None:
    drawn = [do.run("data", "birds", tmp_path / "b", "--species", "3", "--train", "12", "--test", "2") for _ in "12"]
    assert [done.code for done in drawn] == [0, 1], "not over what is there"
    checked = do.run("data", "check", tmp_path / "b", "--contact-sheet", tmp_path / "sheet.png")
    assert "36 training, 6 test" in checked.out
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")


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
    assert all(token in done.err for token in ("1.jpg", "pipe.jpg", "2 of 4"))
    assert len(list((tmp_path / "out").glob("*/decision.html"))) == 2

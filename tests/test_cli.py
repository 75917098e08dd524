"""The command line as a person meets it: one red line instead of a traceback."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_files import smooth_photo, write_classes
from killed_runs import Commands, commands
from prototree._version import __version__
from prototree.cli.app import console, echo, print_error, print_table, settings_help
from prototree.config import RECIPE_SETTINGS, Common, load_preset
from prototree.evaluation.tables import Table


def prototree(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "prototree", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=3600, env=environment)


@pytest.fixture(scope="module")
def do(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """The same in copies of one process that has imported everything: seconds less for each command."""
    with commands(tmp_path_factory.mktemp("commands")) as running:
        yield running


def test_help_names_every_command_and_needs_no_torch() -> None:
    done = prototree("--help")
    assert done.returncode == 0
    assert all(
        name in done.stdout
        for name in ("train", "prune", "project", "evaluate", "report", "explain", "data", "predict", "pack", "clean")
    )
    code = "import sys, prototree.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_of_train_lists_common_settings_and_the_whole_of_it_every_one() -> None:
    short, whole = prototree("train", "--help").stdout, settings_help()
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
    assert "default 288; 128 in demo; 224 in paper-cars" in whole


@pytest.mark.parametrize(
    ("word", "meant"), [("test", "evaluate"), ("show", "report"), ("edit", "serve"), ("tarin", "train")]
)
def test_a_command_that_is_not_there_names_the_one_that_is_meant(word: str, meant: str) -> None:
    done = prototree(word)
    assert done.returncode == 1
    assert repr(meant) in done.stderr


def test_names_give_the_terminal_no_orders(capsys: pytest.CaptureFixture[str]) -> None:
    name = "ü \x1b]0;title\x07\x1b[31m\r\x9bowl\tnight"
    echo(name)
    print_error(name)
    print_table(Table(name, (name,), ((name,),)))
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert "owl" in text
        assert "ü" in text
        assert not set(text) & set("\x1b\x07\r\x9b")


def test_warnings_give_the_terminal_no_orders(do: Commands, tmp_path: Path) -> None:
    photos = write_classes(tmp_path / "photos", {"crow": 3, "\x1b[31mwren": 3})
    done = do.run("data", "check", photos)
    assert done.code == 0, done.err
    assert "2 of 2 classes have fewer than 10 training images" in done.err
    assert "[31mwren" in done.err
    assert "\x1b" not in done.err + done.out


def test_a_class_folder_whose_name_is_not_utf8_is_one_line(do: Commands, tmp_path: Path) -> None:
    photos = write_classes(tmp_path / "photos", {"crow": 3, "wren": 3})
    os.rename(photos / "wren", os.fsencode(photos) + b"/caf\xe9")
    for words in (("data", "check", photos), ("train", photos, "--out", tmp_path / "run")):
        done = do.run(*words)
        assert done.code == 1
        assert "UTF-8" in done.err
        assert len(done.err.splitlines()) == 1


def test_names_that_are_not_utf8_can_be_printed(do: Commands, tmp_path: Path) -> None:
    photos = write_classes(tmp_path / "photos", {"crow": 12, "wren": 12})
    for number in range(12):  # otherwise those of the other class
        smooth_photo(seed=100 + number).save(photos / "wren" / f"{number}.jpg")
    os.rename(photos / "crow" / "3.jpg", os.fsencode(photos / "crow") + b"/caf\xe9.jpg")
    shutil.copy(os.fsencode(photos / "crow") + b"/caf\xe9.jpg", photos / "wren" / "x.jpg")
    done = do.run("data", "check", photos, "--deep")
    assert done.code == 0, done.err
    assert "1 image is in more than one class" in done.out
    assert "caf\N{REPLACEMENT CHARACTER}.jpg" in done.out
    assert "look alike none" in done.out


def test_check_names_a_bad_photo_once_even_where_no_tree_can_be_trained(do: Commands, tmp_path: Path) -> None:
    photos = write_classes(tmp_path / "photos", {"crow": 12, "wren": 1})
    (photos / "wren" / "0.jpg").write_bytes(b"")
    done = do.run("data", "check", photos)
    assert done.code == 1
    assert (done.out + done.err).count("0.jpg") == 1
    assert "left out   1 file\n" in done.out
    assert done.err.startswith("error: 1 classes of")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_several_processes_the_first_alone_speaks(tmp_path: Path, rank: str) -> None:
    photos = write_classes(tmp_path / "photos", {"crow": 3, "wren": 3})
    told = prototree("data", "check", str(photos), WORLD_SIZE="2", RANK=rank)
    assert told.returncode == 0, told.stderr
    assert [bool(told.stdout), "fewer than 10" in told.stderr] == [rank == "0"] * 2
    failed = prototree("data", "check", "nowhere", WORLD_SIZE="2", RANK=rank)
    assert failed.stderr.startswith("error: nowhere"), "an error may be this process's own"


def test_tables_of_a_quiet_process_are_not_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "quiet", True)
    print_table(Table("title", ("a",), (("1",),)))
    assert capsys.readouterr().out == ""


def test_version() -> None:
    assert prototree("--version").stdout.strip() == __version__


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "nowhere", "--out", "x"], "error: nowhere does not exist; expected a folder of images"),
        (["train", "nowhere", "--out", "x", "--hieght", "3"], "error: unknown key 'hieght'; did you mean 'height'?"),
        (["train", "nowhere", "--out", "x", "--lr-backbone"], "error: expected a value after --lr-backbone"),
        (["train", "nowhere", "--out", "x", "height"], "error: expected a setting such as --seed 8, got 'height'"),
        (
            ["train", "nowhere", "--out", "x", "--preset", "cup"],
            "error: no preset 'cup'; expected default, demo, paper-cars",
        ),
        (["train", "nowhere", "--out", "x", "--stages", "dance"], "error: unknown stage 'dance'"),
        (["evaluate", "nowhere"], "error: expected a run in nowhere, but there is no config.toml"),
        (["data", "check", "nowhere"], "error: nowhere does not exist"),
        (["report", "nowhere"], "error: expected a run in nowhere, but there is no config.toml"),
        (["explain", "nowhere", "no.jpg"], "error: "),
        (["data", "birds", "x", "--species", "1"], "error: "),
    ],
)
def test_mistakes_are_one_line(do: Commands, words: list[str], message: str, tmp_path: Path) -> None:
    done = do.run(*words, folder=tmp_path)
    assert done.code == 1
    assert done.err.startswith(message)
    assert len(done.err.splitlines()) == 1
    assert done.out == ""
    assert not list(tmp_path.iterdir())


def test_a_missing_option_is_a_usage_error(do: Commands) -> None:
    done = do.run("train", "photos")
    assert done.code == 2
    assert "--out" in done.err
    assert "Traceback" not in done.err


def test_birds_can_be_drawn_and_checked(do: Commands, tmp_path: Path) -> None:
    done = do.run("data", "birds", tmp_path / "b", "--species", "3", "--train", "12", "--test", "2")
    assert done.code == 0, done.err
    assert "3 species, 42 images" in done.out
    checked = do.run("data", "check", tmp_path / "b", "--contact-sheet", tmp_path / "sheet.png")
    assert "36 training, 6 test" in checked.out
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
    again = do.run("data", "birds", tmp_path / "b")
    assert again.code == 1
    assert "Traceback" not in again.err


def test_strict_makes_a_broken_photo_an_error(do: Commands, tmp_path: Path) -> None:
    photos = write_classes(tmp_path / "photos", {"crow": 12, "wren": 12})
    (photos / "crow" / "3.jpg").write_bytes(b"")
    relaxed = do.run("data", "check", photos)
    assert relaxed.code == 0
    assert "3.jpg" in relaxed.out
    assert do.run("data", "check", photos, "--strict").code == 1

"""Files in class folders that are not used: images in other formats are named, the rest is only counted."""

from pathlib import Path

import pytest

from data_files import smooth_photo, write_classes
from prototree.data import look_at_data, open_data
from prototree.data.folder import read_folder
from prototree.data.ignored import describe_others, describe_unread
from prototree.data.summary import render, summarise
from prototree.errors import DataError


@pytest.fixture
def without_heic(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where pillow-heif is not installed."""
    monkeypatch.setattr("prototree.data.images.suffixes", lambda: (".jpg", ".png"))


def photos(tmp_path: Path, *others: str) -> Path:
    root = write_classes(tmp_path / "photos", {"auk": 12, "crow": 12})
    for name in others:
        (root / name).write_bytes(b"x")
    return root


def test_images_that_are_not_read_are_counted_and_named(tmp_path: Path, without_heic: None) -> None:
    root = photos(tmp_path, "auk/a.HEIC", "auk/b.HEIC", "crow/c.cr2", "crow/notes.txt")
    text = render(summarise(look_at_data(root)))
    assert "left out   3 files\n" in text
    assert "2 .HEIC, 1 .cr2" in text
    assert "pillow-heif" in text
    assert "convert" in text
    assert "not used   1 .txt" in text


def test_files_of_the_system_and_texts_are_no_lost_images(tmp_path: Path) -> None:
    root = photos(tmp_path, "auk/.DS_Store", "auk/Thumbs.db", "auk/._0.jpg", "auk/labels.json", "crow/LICENSE")
    data = look_at_data(root)
    assert describe_unread(data.ignored) == ""
    assert describe_others(data.ignored) == "1 .json, 1 without a suffix"
    assert "left out   nothing" in render(summarise(data))


def test_no_line_where_there_is_nothing_to_say(tmp_path: Path) -> None:
    data = look_at_data(photos(tmp_path))
    assert data.ignored == ()
    assert "not used" not in render(summarise(data))


def test_images_beside_the_class_folders_are_counted(tmp_path: Path) -> None:
    root = photos(tmp_path)
    smooth_photo().save(root / "loose.jpg")
    assert describe_others(look_at_data(root).ignored) == "1 image in no class folder"


def test_one_line_before_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_data(photos(tmp_path, "auk/a.nef", "crow/notes.txt"))
    (line,) = [message for message in caplog.messages if "1 .nef" in message]
    assert "\n" not in line
    assert ".txt" not in line


def test_strict_makes_them_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1 \.nef"):
        open_data(photos(tmp_path, "auk/a.nef"), strict=True)
    open_data(photos(tmp_path / "other", "auk/notes.txt"), strict=True)


def test_every_split_counts(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write_classes(tmp_path / split, {"a": 2, "b": 2})
        (tmp_path / split / "a" / "x.psd").touch()
    assert len(read_folder(tmp_path).ignored) == 3


def test_a_class_of_images_that_are_not_read(tmp_path: Path, without_heic: None) -> None:
    root = photos(tmp_path)
    (root / "wren").mkdir()
    (root / "wren" / "a.HEIC").touch()
    with pytest.raises(DataError, match=r"wren.*1 \.HEIC.*pillow-heif"):
        read_folder(root)


def test_a_jpeg_that_a_browser_saved_is_read(tmp_path: Path) -> None:
    root = photos(tmp_path)
    (root / "auk" / "0.jpg").rename(root / "auk" / "0.jfif")
    assert len(look_at_data(root).train + look_at_data(root).test) == 24

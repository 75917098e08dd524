"""Names of files, folders and classes that are not UTF-8."""

import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from data_files import write_classes
from prototree.data import open_data
from prototree.data.duplicates import exact_copies
from prototree.data.in_memory import write_given
from prototree.errors import DataError


def photos(tmp_path: Path) -> Path:
    return write_classes(tmp_path / "photos", {"auk": 12, "crow": 12})


def test_a_class_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    root = photos(tmp_path)
    os.rename(root / "auk", os.fsencode(root) + b"/caf\xe9")
    with pytest.raises(DataError, match=r"UTF-8.*rename") as caught:
        open_data(root)
    str(caught.value).encode()


def test_data_whose_name_is_not_utf8(tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.rename(photos(tmp_path), odd)
    with pytest.raises(DataError, match="UTF-8"):
        open_data(odd)


def test_classes_and_paths_in_memory_that_are_not_utf8(tmp_path: Path) -> None:
    image = Image.new("RGB", (4, 4))
    with pytest.raises(DataError, match="UTF-8"):
        write_given(([image, image], ["caf\udce9", "b"]), tmp_path)
    with pytest.raises(DataError, match="UTF-8"):
        write_given((["caf\udce9.png", "b.png"], ["a", "b"]), tmp_path)


def test_an_image_whose_name_is_not_utf8_is_used(tmp_path: Path) -> None:
    root = photos(tmp_path)
    folder = os.fsencode(root / "auk") + b"/caf\xe9"
    os.mkdir(folder)
    shutil.copy(root / "auk" / "0.jpg", folder + b"/\xff.jpg")
    data = open_data(root)
    assert len(data.train) + len(data.test) == 25
    assert data.problems == ()
    assert any(len(group) == 3 for group in exact_copies(data)), "the copy, its original, and that of the other class"

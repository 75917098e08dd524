from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_files import write_classes
from prototree.data import ImageData, Sample, open_data
from prototree.data.summary import contact_sheet, summarize
from prototree.errors import ConfigError


@pytest.fixture
def data(tmp_path: Path) -> ImageData:
    root = write_classes(tmp_path / "images", {"auk": 13, "bittern with quite a long name": 12, "crow": 15})
    for index in range(9):
        (root / "crow" / f"{index}.jpg").write_bytes(b"")
    return open_data(root)


def test_summary_counts_and_names_every_file_left_out(data: ImageData) -> None:
    text = summarize(data, [], ["one", "two"])
    for line in ("classes    3", "pixels     width     40 each", "left out   9 files", "copies     none"):
        assert f"{line}\n" in text
    assert "fewest     crow (" in text
    assert all(f"{index}.jpg is empty" in text for index in range(9))
    assert text.endswith("look alike one\n           two")
    assert all(line == line.rstrip() for line in text.splitlines())


def test_groups_that_keep_nothing_together_are_named(tmp_path: Path) -> None:
    paths = sorted(write_classes(tmp_path / "images", {"auk": 8, "crow": 8}).rglob("*.jpg"))
    for n_groups, text in ((16, "which keep nothing together"), (8, "8 of 16 images")):
        rows = [f"{path},{path.parent.name},{i % n_groups}\n" for i, path in enumerate(paths)]
        (tmp_path / "list.csv").write_text("path,label,group\n" + "".join(rows))
        assert text in summarize(open_data(tmp_path / "list.csv"))


def test_contact_sheet_shows_every_class(data: ImageData, tmp_path: Path) -> None:
    contact_sheet(data, tmp_path / "sheet.png", per_class=4, thumbnail=48)
    with Image.open(tmp_path / "sheet.png") as image:
        sheet = np.asarray(image.convert("RGB"))
    coloured = (sheet.max(axis=2).astype(int) - sheet.min(axis=2) > 40).sum()
    assert coloured > 0.5 * 12 * 48 * 48
    assert (sheet[:4] == 255).all(), "a margin of paper"


def test_contact_sheet_of_one_image_per_class_and_a_lost_file(tmp_path: Path) -> None:
    samples = (Sample(tmp_path / "gone.jpg", 0),)
    lost = ImageData(tmp_path, "folder", ("a", "b"), samples, ())
    contact_sheet(lost, tmp_path / "sheet.png", per_class=1)
    assert (tmp_path / "sheet.png").stat().st_size > 0
    with pytest.raises(ConfigError):
        contact_sheet(lost, tmp_path / "sheet.png", per_class=0)

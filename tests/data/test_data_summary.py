from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_files import write_classes
from prototree.data import ImageData, Sample, open_data
from prototree.data.summary import Spread, contact_sheet, render, summarise
from prototree.errors import ConfigError


def opened(tmp_path: Path) -> ImageData:
    root = write_classes(tmp_path / "photos", {"auk": 13, "bittern with quite a long name": 12, "crow": 6})
    (root / "crow" / "0.jpg").write_bytes(b"")
    return open_data(root)


def test_summary_counts(tmp_path: Path) -> None:
    summary = summarise(opened(tmp_path))
    assert (summary.kind, summary.n_classes, summary.n_train + summary.n_test) == ("folder", 3, 30)
    assert summary.train_per_class == Spread(4, 10.0, 10)
    assert summary.widths == Spread(40, 40.0, 40)
    assert summary.smallest_classes[0] == ("crow", 4)
    assert [problem.path.name for problem in summary.problems] == ["0.jpg"]


def test_rendered_summary_reads_well(tmp_path: Path) -> None:
    text = render(summarise(opened(tmp_path)))
    assert "classes    3\n" in text
    assert "per class  training  4 to 10, median 10\n" in text
    assert "fewest     crow (4)" in text
    assert "left out   1 file\n" in text
    assert "0.jpg is empty (0 bytes)" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_every_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    root = write_classes(tmp_path, {"a": 30, "b": 10})
    for index in range(9):
        (root / "a" / f"{index}.jpg").write_bytes(b"")
    text = render(summarise(open_data(root)))
    assert "left out   9 files\n" in text
    assert all(f"{index}.jpg is empty" in text for index in range(9))


def test_contact_sheet_shows_every_class(tmp_path: Path) -> None:
    data = opened(tmp_path)
    contact_sheet(data, tmp_path / "sheet.png", per_class=4, thumbnail=48)
    with Image.open(tmp_path / "sheet.png") as image:
        sheet = np.asarray(image.convert("RGB"))
    coloured = (sheet.max(axis=2).astype(int) - sheet.min(axis=2) > 40).sum()
    assert coloured > 0.5 * 12 * 48 * 48
    assert (sheet[:4] == 255).all(), "a margin of paper"


def test_contact_sheet_of_one_image_per_class_and_a_lost_file(tmp_path: Path) -> None:
    samples = (Sample(tmp_path / "gone.jpg", 0),)
    contact_sheet(ImageData(tmp_path, "folder", ("a", "b"), samples, ()), tmp_path / "sheet.png", per_class=1)
    assert (tmp_path / "sheet.png").stat().st_size > 0


def test_impossible_sheet(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="per_class >= 1"):
        contact_sheet(ImageData(tmp_path, "folder", ("a",), (), ()), tmp_path / "sheet.png", per_class=0)


def test_real_birds(cub_50: ImageData) -> None:
    summary = summarise(cub_50)
    assert summary.n_boxes == summary.n_train + summary.n_test
    assert summary.widths.largest <= 360

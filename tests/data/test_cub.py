from pathlib import Path

import pytest

from data_files import CUB_50, write_cub
from prototree.data import Box, ImageData, Part, open_data
from prototree.data.cub_cars import is_cub, read_cub
from prototree.errors import DataError


def test_reads_its_own_layout(tmp_path: Path) -> None:
    root = write_cub(tmp_path)
    assert is_cub(root)
    data = read_cub(root)
    assert (data.kind, data.class_names) == ("cub", ("Black footed Albatross", "Auk"))
    assert [(sample.path.name, sample.label) for sample in data.train] == [("1.jpg", 0), ("3.jpg", 1)]
    assert [(sample.path.name, sample.label) for sample in data.test] == [("2.jpg", 0), ("4.jpg", 1)]
    assert data.train[0].box == Box(10.0, 5.0, 30.0, 15.0)
    assert data.train[0].parts == (Part("beak", 12.5, 8.0),), "the hidden wing is left out"


def test_part_names_may_have_spaces(tmp_path: Path) -> None:
    root = write_cub(tmp_path)
    (root / "parts" / "part_locs.txt").write_text("1 2 3.0 4.0 1\n")
    assert read_cub(root).train[0].parts == (Part("left wing", 3.0, 4.0),)


def test_parts_are_optional(tmp_path: Path) -> None:
    root = write_cub(tmp_path)
    (root / "parts" / "part_locs.txt").unlink()
    assert read_cub(root).train[0].parts == ()


def test_boxes_past_the_edge_are_clipped(tmp_path: Path) -> None:
    root = write_cub(tmp_path)
    boxes = ["1 -2.0 5.0 60.0 40.0", "2 10 5 20 10", "3 100 5 20 10", "4 10 5 20 10"]
    (root / "bounding_boxes.txt").write_text("\n".join(boxes))
    train = open_data(root).train
    assert train[0].box == Box(0.0, 5.0, 40.0, 30.0)
    assert train[1].box is None, "nothing of it lies on the photo"


def test_class_names_that_would_coincide_stay_as_they_are(tmp_path: Path) -> None:
    root = write_cub(tmp_path)
    (root / "classes.txt").write_text("1 001.Auk\n2 002.Auk\n")
    assert read_cub(root).class_names == ("001.Auk", "002.Auk")


@pytest.mark.parametrize(
    ("file", "text", "token"),
    [
        ("images.txt", "1 a.jpg\ntwo b.jpg\n", "line 2"),
        ("images.txt", "1 a.jpg\n1 b.jpg\n", "line 2: the id 1"),
        ("images.txt", "1\n", "line 1"),
        ("image_class_labels.txt", "1 1\n2 7\n", "line 2"),
        ("image_class_labels.txt", "1 1\n", r"image 2 \(3 images"),
        ("train_test_split.txt", "1 1\n2 2\n", "line 2"),
        ("bounding_boxes.txt", "1 0 0 5\n", "line 1: expected 5"),
        ("bounding_boxes.txt", "1 0 0 -5 5\n", "line 1"),
        ("bounding_boxes.txt", "1 0 0 nan 5\n", "line 1"),
        ("parts/part_locs.txt", "1 9 0.0 0.0 1\n", "line 1"),
        ("parts/part_locs.txt", "1 1 0.0 0.0 yes\n", "line 1"),
        ("parts/part_locs.txt", "1 1 0.0 inf 1\n", "line 1"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, file: str, text: str, token: str) -> None:
    root = write_cub(tmp_path)
    (root / file).write_text(text)
    with pytest.raises(DataError, match=f"{Path(file).name} .*{token}"):
        read_cub(root)


def test_missing_table_is_named(tmp_path: Path) -> None:
    root = write_cub(tmp_path)
    (root / "bounding_boxes.txt").unlink()
    with pytest.raises(DataError, match="lacks bounding_boxes"):
        read_cub(root)


def test_real_birds(cub_50: ImageData) -> None:
    data = cub_50
    flags = [line.split()[1] for line in (CUB_50 / "train_test_split.txt").read_text().splitlines()]
    assert data.n_classes == 50
    assert (len(data.train), len(data.test)) == (flags.count("1"), flags.count("0"))
    assert data.unreadable == ()
    assert data.class_names[0] == "Black footed Albatross"
    for sample in data.train + data.test:
        assert sample.size is not None
        assert sample.box is not None
        assert Box.whole(sample.size).contains_box(sample.box)

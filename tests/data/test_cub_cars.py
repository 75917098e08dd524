from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from conftest import shared
from data_files import CUB_50, smooth_photo, write_cub
from prototree.data import Box, ImageData, Part, open_data
from prototree.data.cub_cars import cub_50, is_cars, is_cub, read_cars, read_cub, write_cub_subset
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
    (root / "parts" / "part_locs.txt").write_text("1 2 3.0 4.0 1\n")
    assert read_cub(root).train[0].parts == (Part("left wing", 3.0, 4.0),), "names may have spaces"
    (root / "parts" / "part_locs.txt").unlink()
    assert read_cub(root).train[0].parts == (), "parts are optional"


def test_a_subset_has_its_classes_numbered_anew_and_all_that_is_known(tmp_path: Path) -> None:
    root = write_cub(tmp_path / "whole")
    whole, out = read_cub(root), tmp_path / "some" / "subset"
    assert write_cub_subset(root, out, ["Auk", ""]) == 2
    part = read_cub(out)
    assert part.class_names == ("Auk",)
    for mine, theirs in ((part.train, whole.train), (part.test, whole.test)):
        expected = [sample for sample in theirs if sample.label == 1]
        assert [(s.box, s.parts, s.path.read_bytes()) for s in mine] == [
            (s.box, s.parts, s.path.read_bytes()) for s in expected
        ]
    assert write_cub_subset(root, tmp_path / "all", ["001.Black_footed_Albatross", "Auk"]) == 4
    with pytest.raises(DataError, match="did you mean 'Auk'"):
        write_cub_subset(root, tmp_path / "other", ["Auc"])
    with pytest.raises(DataError, match="exists already"):
        write_cub_subset(root, out)
    with pytest.raises(DataError, match="as it was published"):
        write_cub_subset(tmp_path, tmp_path / "other")
    (root / "images.txt").write_text("1 ../1.jpg\n2 2.jpg\n3 3.jpg\n4 4.jpg\n")
    with pytest.raises(DataError, match="below images/"):
        write_cub_subset(root, tmp_path / "other", ["Auk", "Black_footed_Albatross"])
    assert not list(tmp_path.glob("*other*"))


def test_the_50_classes_are_those_of_the_results(tmp_path: Path) -> None:
    assert len(set(cub_50())) == 50
    names = [line.split()[1] for line in (shared("data/CUB_50") / "classes.txt").read_text().splitlines()]
    assert cub_50() == names
    assert write_cub_subset(shared("data/CUB_50"), tmp_path / "subset", names[:2]) == 120
    subset = read_cub(tmp_path / "subset")
    assert (subset.n_classes, len(subset.train), len(subset.test)) == (2, 60, 60)


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


NAMES = ["AM General Hummer SUV 2000", "Acura RL Sedan 2012"]


def annotations(rows: list[dict[str, object]]) -> np.ndarray:
    """A MATLAB structure array."""
    fields = list(rows[0])
    array = np.empty((1, len(rows)), dtype=[(field, object) for field in fields])
    for column, row in enumerate(rows):
        array[0, column] = tuple(row[field] for field in fields)
    return array


def box() -> dict[str, object]:
    return {"bbox_x1": np.uint8(1), "bbox_y1": np.uint8(6), "bbox_x2": np.uint8(40), "bbox_y2": np.uint8(25)}


def name_cells() -> np.ndarray:
    return np.array([NAMES], dtype=object)


def write_devkit(root: Path, test_folder: str = "devkit") -> Path:
    (root / "devkit").mkdir(parents=True)
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": name_cells()})
    files = {"cars_train": "devkit/cars_train_annos.mat", "cars_test": f"{test_folder}/cars_test_annos_withlabels.mat"}
    for photos, file in files.items():
        (root / photos).mkdir()
        rows = [{**box(), "class": np.uint8(1 + index % 2), "fname": f"{index:05}.jpg"} for index in range(4)]
        for row in rows:
            smooth_photo().save(root / photos / str(row["fname"]))
        savemat(root / file, {"annotations": annotations(rows)})
    return root


def write_single(root: Path) -> Path:
    (root / "car_ims").mkdir(parents=True)
    rows = []
    for index in range(4):
        path = f"car_ims/{index:06}.jpg"
        smooth_photo().save(root / path)
        rows.append({"relative_im_path": path, **box(), "class": 1 + index % 2, "test": int(index >= 2)})
    savemat(root / "cars_annos.mat", {"annotations": annotations(rows), "class_names": name_cells()})
    return root


@pytest.mark.parametrize("test_folder", ["devkit", "."])
def test_devkit(tmp_path: Path, test_folder: str) -> None:
    root = write_devkit(tmp_path, test_folder)
    assert is_cars(root)
    data = open_data(root)
    assert (data.kind, data.class_names) == ("cars", tuple(NAMES))
    assert [sample.label for sample in data.train] == [0, 1, 0, 1]
    assert data.train[0].box == Box(0.0, 5.0, 40.0, 25.0)
    assert data.test[1].path == root / "cars_test" / "00001.jpg"


def test_single_file_form(tmp_path: Path) -> None:
    data = open_data(write_single(tmp_path))
    assert data.class_names == tuple(NAMES)
    assert [sample.path.name for sample in data.train] == ["000000.jpg", "000001.jpg"]
    assert [sample.label for sample in data.test] == [0, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nothing of the kind", "MATLAB"),
        ({"other": 1}, "has no annotations"),
        ({"annotations": annotations([{**box(), "class": 3, "fname": "0.jpg"}])}, r"class 3 is not in 1\.\.2"),
        ({"annotations": annotations([{**box(), "fname": "0.jpg"}])}, "annotation 1"),
        (None, "does not exist"),
    ],
)
def test_damaged_files_of_cars_are_named(tmp_path: Path, content: Any, message: str) -> None:
    file = write_devkit(tmp_path) / "devkit" / "cars_train_annos.mat"
    file.unlink()
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        savemat(file, content)
    with pytest.raises(DataError, match=rf"cars_train_annos\.mat .*{message}"):
        read_cars(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class": np.inf}, "annotation 1"),
        ({"test": None}, "for testing"),
        ({"test": np.array([0, 1])}, "for testing"),
        ({"names": 5}, r"class 2 is not in 1\.\.1"),
        ({"rows": 5}, "annotation 1"),
    ],
)
def test_odd_values_are_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    row = {"relative_im_path": "car_ims/0.jpg", **box(), "class": 2, "test": 0} | change
    rows = annotations([{key: value for key, value in row.items() if value is not None}])
    content = {"annotations": change.get("rows", rows), "class_names": change.get("names", name_cells())}
    savemat(tmp_path / "cars_annos.mat", content)
    with pytest.raises(DataError, match=message):
        read_cars(tmp_path)

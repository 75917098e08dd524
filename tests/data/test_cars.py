from pathlib import Path

import numpy as np
import pytest

from data_files import smooth_photo
from prototree.data import Box, open_data
from prototree.data.cub_cars import is_cars, read_cars
from prototree.errors import DataError

pytest.importorskip("scipy")
from scipy.io import savemat

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


def test_damaged_files_are_named(tmp_path: Path) -> None:
    root = write_devkit(tmp_path)
    file = root / "devkit" / "cars_train_annos.mat"
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match=r"cars_train_annos\.mat cannot be read as a MATLAB file"):
        read_cars(root)
    savemat(file, {"other": 1})
    with pytest.raises(DataError, match=r"cars_train_annos\.mat has no annotations"):
        read_cars(root)
    savemat(file, {"annotations": annotations([{**box(), "class": 3, "fname": "0.jpg"}])})
    with pytest.raises(DataError, match=r"annotation 1: class 3 is not in 1\.\.2"):
        read_cars(root)
    savemat(file, {"annotations": annotations([{**box(), "fname": "0.jpg"}])})
    with pytest.raises(DataError, match="annotation 1"):
        read_cars(root)
    file.unlink()
    with pytest.raises(DataError, match=r"cars_train_annos\.mat does not exist"):
        read_cars(root)


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

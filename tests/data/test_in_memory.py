"""Data that comes as objects: it is written down once, and opens again like any other."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from prototree.data import open_data
from prototree.data.folder import read_manifest
from prototree.data.images import read_image
from prototree.data.in_memory import write_in_memory
from prototree.errors import DataError
from tiny_training import write_squares


def pixels(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 20, 24, 3), dtype=np.uint8)


def opened(source: Any, folder: Path) -> list[tuple[str, np.ndarray]]:
    """Class and pixels of every photo, as they come back."""
    data = open_data(write_in_memory(source, folder))
    every = sorted((*data.train, *data.test), key=lambda sample: sample.path.name)
    return [(data.class_names[sample.label], np.asarray(read_image(sample.path))) for sample in every]


LABELS = ["crow", "wren"] * 4


class Items(Dataset[Any]):
    classes = ("crow", "wren")

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(pixels(8)[index]), index % 2


def first_channels() -> torch.Tensor:
    return torch.from_numpy(pixels(8)).permute(0, 3, 1, 2)


FORMS = {
    "arrays": lambda: (pixels(8), LABELS),
    "images": lambda: ([Image.fromarray(one) for one in pixels(8)], np.array(LABELS)),
    "dataset": Items,
    "tensors": lambda: (first_channels(), LABELS),
    "floats": lambda: (first_channels() / 255, LABELS),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_comes_back_as_it_was(form: str, tmp_path: Path) -> None:
    found = opened(FORMS[form](), tmp_path)
    assert [label for label, _ in found] == LABELS
    assert np.array_equal(np.stack([one for _, one in found]), pixels(8))


def test_the_same_photos_are_written_once(tmp_path: Path) -> None:
    first = write_in_memory((pixels(8), LABELS), tmp_path)
    assert write_in_memory((pixels(8), LABELS), tmp_path) == first
    assert write_in_memory((pixels(8, seed=1), LABELS), tmp_path) != first
    assert write_in_memory((pixels(8), LABELS[::-1]), tmp_path) != first
    assert len(list(tmp_path.iterdir())) == 3


def test_numbers_are_named_and_splits_kept(tmp_path: Path) -> None:
    numbers = TensorDataset(torch.from_numpy(pixels(4)).permute(0, 3, 1, 2), torch.tensor([0, 1, 0, 1]))
    data = open_data(write_in_memory({"train": numbers, "test": (pixels(2, 1), [1, 0])}, tmp_path))
    assert data.class_names == ("0", "1")
    assert [len(data.train), len(data.test)] == [4, 2]


def test_a_table_of_paths_copies_no_photo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas, which is not installed")
    write_squares(tmp_path / "squares", train=2, test=1)
    monkeypatch.chdir(tmp_path)
    paths = sorted(Path("squares").rglob("*.png"))
    frame = pandas.DataFrame(
        {"Path": map(str, paths), "label": [p.parent.name for p in paths], "split": [p.parts[1] for p in paths]}
    )
    file = write_in_memory(frame, tmp_path / "given")
    assert [path.name for path in file.parent.iterdir()] == ["data.csv"]
    data = open_data(file)
    assert (len(data.train), len(data.test), data.class_names) == (6, 3, ("blue", "green", "red"))
    with pytest.raises(DataError, match="label is missing from Path"):
        write_in_memory(frame[["Path"]], tmp_path)


def test_a_table_with_an_image_column_by_its_looks(tmp_path: Path) -> None:
    """What stands for the package datasets where it is not installed."""
    kinds = {"Image": type("Image", (), {}), "ClassLabel": type("ClassLabel", (), {"names": ["crow", "wren"]})}

    class Table(list[dict[str, Any]]):
        column_names = ("photo", "kind")
        features = {"photo": kinds["Image"](), "kind": kinds["ClassLabel"]()}  # noqa: RUF012

    table = Table({"photo": Image.fromarray(one), "kind": k % 2} for k, one in enumerate(pixels(8)))
    assert [label for label, _ in opened(table, tmp_path)] == LABELS


class HalfSplit:
    """A table with an empty cell, which is not a number to pandas."""

    columns = ("path", "label", "split")
    itertuples = None

    def __getitem__(self, name: str) -> list[Any]:
        return ["train", float("nan")] if name == "split" else ["a", "b"]


@pytest.mark.parametrize(
    ("source", "token"),
    [
        (SimpleNamespace(), "SimpleNamespace"),
        ((pixels(2), ["a"]), "2 images and 1 labels"),
        (([np.zeros((4, 4, 3)) - 1], ["a"]), "float64"),
        ((pixels(1), [0.5]), r"0\.5"),
        ([], "none"),
        ({"train": (pixels(2), ["a", "b"])}, "got 'train'"),
        ({"trian": [], "test": []}, "got 'trian', 'test'"),
        (HalfSplit(), "row 1"),
        ([3], "got int"),
    ],
)
def test_what_is_no_data_is_refused(source: Any, token: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=token):
        write_in_memory(source, tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_classes_and_paths_that_are_not_utf8(tmp_path: Path) -> None:
    for source in ((pixels(2), ["caf\udce9", "b"]), (["caf\udce9.png", "b.png"], ["a", "b"])):
        with pytest.raises(DataError, match="UTF-8"):
            write_in_memory(source, tmp_path)


def test_a_group_may_be_missing_in_every_way_that_tables_have(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(6)]
    for path in paths:
        Image.new("RGB", (8, 8)).save(path)
    groups = pandas.Series(["herd", "herd", None, float("nan"), "", pandas.NA], dtype=object)
    frame = pandas.DataFrame({"path": paths, "label": list("aabbab"), "group": groups})
    data = read_manifest(write_in_memory(frame, tmp_path / "out"))
    assert sorted(sample.group for sample in data.train + data.test) == ["", "", "", "", "herd", "herd"]

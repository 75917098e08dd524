"""Data that comes as objects: it is written down once, and opens again like any other."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from prototree.data import open_data
from prototree.data.folds import take_fold
from prototree.data.images import read_image
from prototree.data.in_memory import write_given
from prototree.errors import ConfigError, DataError
from tiny_training import write_squares


def pixels(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 20, 24, 3), dtype=np.uint8)


def opened(source: Any, folder: Path) -> list[tuple[str, np.ndarray]]:
    """Class and pixels of every photo, as they come back."""
    data = open_data(write_given(source, folder))
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
    first = write_given((pixels(8), LABELS), tmp_path)
    assert write_given((pixels(8), LABELS), tmp_path) == first
    assert write_given((pixels(8, seed=1), LABELS), tmp_path) != first
    assert write_given((pixels(8), LABELS[::-1]), tmp_path) != first
    assert len(list(tmp_path.iterdir())) == 3


def test_numbers_are_named_and_splits_kept(tmp_path: Path) -> None:
    numbers = TensorDataset(torch.from_numpy(pixels(4)).permute(0, 3, 1, 2), torch.tensor([0, 1, 0, 1]))
    data = open_data(write_given({"train": numbers, "test": (pixels(2, 1), [1, 0])}, tmp_path))
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
    file = write_given(frame, tmp_path / "given")
    assert [path.name for path in file.parent.iterdir()] == ["data.csv"]
    data = open_data(file)
    assert (len(data.train), len(data.test), data.class_names) == (6, 3, ("blue", "green", "red"))
    with pytest.raises(DataError, match="label is missing from Path"):
        write_given(frame[["Path"]], tmp_path)


def test_a_table_by_its_looks(tmp_path: Path) -> None:
    """What stands for pandas where it is not installed: columns that can be read by name."""

    write_squares(tmp_path / "squares", train=2, test=1)
    paths = sorted((tmp_path / "squares" / "train").rglob("*.png"))

    class Table:
        columns = ("path", "label")
        itertuples = None

        def __getitem__(self, name: str) -> list[str]:
            return [str(p) if name == "path" else p.parent.name for p in paths]

    assert len(open_data(write_given(Table(), tmp_path / "given")).train) == 3


@pytest.mark.filterwarnings("ignore")  # the package's own
def test_a_dataset_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the package datasets, which is not installed")
    features = datasets.Features({"photo": datasets.Image(), "kind": datasets.ClassLabel(names=["crow", "wren"])})
    files = [io.BytesIO() for _ in range(8)]
    for file, one in zip(files, pixels(8), strict=True):
        Image.fromarray(one).save(file, "PNG")
    rows = {"photo": [{"bytes": file.getvalue(), "path": None} for file in files], "kind": [k % 2 for k in range(8)]}
    # Given a name, since making one up fails beside some versions of pyarrow.
    table = datasets.Dataset(
        datasets.table.InMemoryTable.from_pydict(rows, schema=features.arrow_schema), fingerprint="tiny"
    )
    found = opened(table, tmp_path)
    assert [label for label, _ in found] == LABELS
    assert np.array_equal(np.stack([one for _, one in found]), pixels(8))
    data = open_data(write_given(datasets.DatasetDict({"train": table, "test": table}), tmp_path))
    assert (len(data.train), len(data.test)) == (8, 8)


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
    ("source", "message"),
    [
        (SimpleNamespace(), "expected a path, a DataFrame .* got SimpleNamespace"),
        ((pixels(2), ["a"]), "expected a label for each photo, got 2 photos and 1 labels"),
        (([np.zeros((4, 4, 3)) - 1], ["a"]), "photo 0: expected .* got float64 .* before they are normalised"),
        ((pixels(1), [0.5]), r"expected labels that are names or whole numbers, got 0\.5"),
        ([], "got none"),
        (
            {"train": (pixels(2), ["a", "b"])},
            "expected the parts train and test .* got 'train'; name both",
        ),
        ({"trian": [], "test": []}, "got 'trian', 'test'"),
        (HalfSplit(), "row 1 of the table has an empty split; expected train, test or val"),
        ([3], "expected items of the dataset that are a photo and a label, got int"),
    ],
)
def test_what_is_no_data_is_refused(source: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        write_given(source, tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_folds_share_out_every_photo_once(tmp_path: Path) -> None:
    data = open_data(write_squares(tmp_path / "squares", train=5, test=2))
    folds = [take_fold(data, f"{k}/4") for k in range(1, 5)]
    everything = {sample.path for sample in (*data.train, *data.test)}
    tested = [sample.path for fold in folds for sample in fold.test]
    assert sorted(tested) == sorted(everything)
    assert sorted(len(fold.test) for fold in folds) == [5, 5, 5, 6]
    for fold in folds:
        assert {s.path for s in fold.train} == everything - {s.path for s in fold.test}
        assert {s.label for s in fold.test} == {0, 1, 2}
    assert open_data(data.root, fold="2/4") == folds[1]
    for wrong in ("5/4", "0/4", "1/1", "2", "a/b", "1/1000"):
        with pytest.raises(ConfigError, match="expected a fold such as 2/5"):
            open_data(data.root, fold=wrong)


def test_a_list_without_test_rows_says_what_to_do(tmp_path: Path) -> None:
    photos = write_squares(tmp_path / "squares", train=2, test=1)
    rows = [f"{path},{path.parent.name},train\n" for path in sorted(photos.rglob("*.png"))]
    (tmp_path / "list.csv").write_text("path,label,split\n" + "".join(rows))
    with pytest.raises(DataError, match="got 9 and 0; give some rows of the column split the word test, or leave"):
        open_data(tmp_path / "list.csv")

import inspect
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import prototree.data
from data_files import smooth_photo, write_classes, write_cub
from prototree.data import open_data
from prototree.data.birds import dataset
from prototree.data.birds.dataset import write_birds
from prototree.errors import DataError


def test_exported_names() -> None:
    assert prototree.data.__all__ == ["Box", "ImageData", "Part", "Problem", "Sample", "open_data"]


def test_opening_data_does_not_import_torch() -> None:
    code = "import sys, prototree.data, prototree.data.summary; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("as_type", [str, Path])
def test_finds_the_form(tmp_path: Path, as_type: type) -> None:
    write_classes(tmp_path / "photos", {"a": 2, "b": 2})
    rows = [f"photos/{label}/{index}.jpg,{label}" for label in "ab" for index in range(2)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *rows]))
    write_cub(tmp_path / "birds")
    for source, kind in (("photos", "folder"), ("list.csv", "manifest"), ("birds", "cub")):
        data = open_data(as_type(tmp_path / source))
        assert data.kind == kind
        assert all(sample.size == (40, 30) for sample in data.train + data.test)


def test_seed_and_share_reach_the_split(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 20, "b": 20})
    data = open_data(tmp_path, test_fraction=0.5)
    assert len(data.train) == len(data.test) == 20
    assert open_data(tmp_path, test_fraction=0.5, seed=1) != data


def test_missing_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; expected a folder of images or a CSV file"):
        open_data(tmp_path / "gone")


def test_a_file_that_is_no_manifest(tmp_path: Path) -> None:
    smooth_photo().save(tmp_path / "a.jpg")
    with pytest.raises(DataError, match=r"manifest that ends in \.csv or \.tsv"):
        open_data(tmp_path / "a.jpg")


def test_one_class_only(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 4})
    with pytest.raises(DataError, match=r"at least two classes in .*, got 1 \(a\)"):
        open_data(tmp_path)


def test_no_test_images(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 1, "b": 1})
    with pytest.raises(DataError, match="got 2 and 0; a class needs two images"):
        open_data(tmp_path)


def test_class_that_loses_its_last_training_image(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_classes(tmp_path / split, {"a": 2, "b": 1})
    (tmp_path / "train" / "b" / "0.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"1 classes of .* have no training image \(1 files could not be used\): b"):
        open_data(tmp_path)


def test_strict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_classes(tmp_path, {"a": 20, "b": 20})
    (tmp_path / "a" / "1.jpg").write_bytes(b"")
    assert len(open_data(tmp_path).problems) == 1
    (record,) = caplog.records
    assert record.message.startswith(f"1 file of {tmp_path} cannot be used:\n{tmp_path / 'a' / '1.jpg'} is empty")
    with pytest.raises(DataError, match="cannot be used"):
        open_data(tmp_path, strict=True)


def test_few_images_are_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_classes(tmp_path, {"many": 20, "few": 5, "fewer": 4})
    with caplog.at_level(logging.WARNING):
        open_data(tmp_path)
    (record,) = caplog.records
    assert "2 of 3 classes" in record.message
    assert "few, fewer" in record.message
    assert "a leaf's confidence is bounded by how many images reach it" in record.message


def test_birds_are_drawn_on_first_use_unless_there_is_a_folder_of_that_name(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named: list[dict[str, object]] = []

    def draw_few(folder: Path, **options: object) -> Path:
        named.append(options)
        return write_birds(folder, **options, train_per_species=2, test_per_species=1)  # type: ignore[arg-type]

    monkeypatch.setattr(dataset, "write_birds", draw_few)
    data = open_data("birds")
    assert (data.kind, data.n_classes, len(data.train), len(data.test)) == ("cub", 12, 24, 12)
    distance_p95 = {name: one.default for name, one in inspect.signature(write_birds).parameters.items()}
    assert (distance_p95["train_per_species"], distance_p95["test_per_species"]) == (60, 20)
    assert data.root.is_relative_to(own_cache)
    assert open_data("birds").root == data.root
    assert named == [{"workers": 1}], "drawn once, as many as usual"
    write_classes(tmp_path / "birds", {"crow": 12, "wren": 12})
    assert open_data("birds").class_names == ("crow", "wren")

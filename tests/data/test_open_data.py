import inspect
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_files import smooth_photo, write_classes, write_cub
from prototree.data import open_data
from prototree.data.duplicates import exact_duplicates
from prototree.errors import DataError
from prototree_birds import write_birds


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


def test_seed_fraction_and_fold_reach_the_split(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 20, "b": 20})
    data = open_data(tmp_path, test_fraction=0.5)
    assert len(data.train) == len(data.test) == 20
    assert open_data(tmp_path, test_fraction=0.5, seed=1) != data
    assert len(open_data(tmp_path, fold="2/4").test) == 10


def test_sources_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_data(tmp_path / "gone")
    smooth_photo().save(tmp_path / "a.jpg")
    with pytest.raises(DataError, match=r"\.csv"):
        open_data(tmp_path / "a.jpg")


@pytest.mark.parametrize(("counts", "token"), [({"a": 4}, r"got 1 \(a\)"), ({"a": 1, "b": 1}, "got 2 and 0")])
def test_data_that_cannot_be_trained_on(tmp_path: Path, counts: dict[str, int], token: str) -> None:
    write_classes(tmp_path, counts)
    with pytest.raises(DataError, match=token):
        open_data(tmp_path)


def test_a_manifest_without_test_rows_says_what_to_do(tmp_path: Path) -> None:
    paths = sorted(write_classes(tmp_path / "photos", {"a": 2, "b": 2}).rglob("*.jpg"))
    rows = [f"{path},{path.parent.name},train\n" for path in paths]
    (tmp_path / "list.csv").write_text("path,label,split\n" + "".join(rows))
    with pytest.raises(DataError, match=r"got 4 and 0; .*column split"):
        open_data(tmp_path / "list.csv")


def test_class_that_loses_its_last_training_image(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_classes(tmp_path / split, {"a": 2, "b": 1})
    (tmp_path / "train" / "b" / "0.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"got none of b \(files that could not be used: 1\)"):
        open_data(tmp_path)


def test_unreadable_files_are_warned_about_or_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_classes(tmp_path, {"a": 20, "b": 20})
    (tmp_path / "a" / "1.jpg").write_bytes(b"")
    assert len(open_data(tmp_path).unreadable) == 1
    (record,) = caplog.records
    assert str(tmp_path / "a" / "1.jpg") in record.message
    with pytest.raises(DataError, match=r"1\.jpg"):
        open_data(tmp_path, strict=True)


def test_few_images_are_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_classes(tmp_path, {"many": 20, "few": 5, "fewer": 4})
    with caplog.at_level(logging.WARNING):
        open_data(tmp_path)
    (record,) = caplog.records
    assert "few, fewer" in record.message


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "photos", {"auk": 12, "crow": 12})
    folder = os.fsencode(root / "auk") + b"/caf\xe9"
    os.mkdir(folder)
    shutil.copy(root / "auk" / "0.jpg", folder + b"/\xff.jpg")
    data = open_data(root)
    assert (len(data.train) + len(data.test), data.unreadable) == (25, ()), "an image may be called so"
    assert any(len(group) == 3 for group in exact_duplicates(data)), "the copy, its original, that of the other class"
    os.rename(root / "auk", os.fsencode(root) + b"/caf\xe9")
    with pytest.raises(DataError, match="UTF-8") as caught:
        open_data(root)
    str(caught.value).encode()
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.rename(root, odd)
    with pytest.raises(DataError, match="UTF-8"):
        open_data(odd)


def test_birds_are_drawn_on_first_use_unless_there_is_a_folder_of_that_name(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[dict[str, object]] = []

    def draw_few(folder: Path, **options: object) -> Path:
        calls.append(options)
        return write_birds(folder, **options, train_per_species=2, test_per_species=1)  # type: ignore[arg-type]

    monkeypatch.setattr("prototree_birds.write_birds", draw_few)
    data = open_data("birds")
    assert (data.kind, data.n_classes, len(data.train), len(data.test)) == ("cub", 12, 24, 12)
    defaults = {name: value.default for name, value in inspect.signature(write_birds).parameters.items()}
    assert (defaults["train_per_species"], defaults["test_per_species"]) == (60, 20)
    assert data.root.is_relative_to(own_cache)
    assert open_data("birds").root == data.root
    assert calls == [{"workers": 1}], "drawn once, as many as usual"
    write_classes(tmp_path / "birds", {"crow": 12, "wren": 12})
    assert open_data("birds").class_names == ("crow", "wren")

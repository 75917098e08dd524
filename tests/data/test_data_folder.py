from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_files import smooth_photo, write_classes
from prototree.data.folder import natural_key, read_folder, read_manifest, split_classes
from prototree.errors import ConfigError, DataError


def test_natural_order() -> None:
    names = ["class 10", "Class 2", "class 1", "b", "10", "9"]
    assert sorted(names, key=natural_key) == ["9", "10", "b", "class 1", "Class 2", "class 10"]
    assert sorted(["a10", "a010", "a9", "a0", "a"], key=natural_key) == ["a", "a0", "a9", "a010", "a10"]


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 1000),
)
def test_split_properties(counts: list[int], share: float, seed: int) -> None:
    labels = [str(label) for label, count in enumerate(counts) for _ in range(count)]
    in_test = split_classes(labels, test_fraction=share, seed=seed)
    assert in_test == split_classes(labels, test_fraction=share, seed=seed)
    for label, count in enumerate(counts):
        n_test = sum(test for test, name in zip(in_test, labels, strict=True) if name == str(label))
        if count == 1:
            assert n_test == 0
        else:
            assert 1 <= n_test <= count - 1
            assert n_test in (1, count - 1) or abs(n_test - share * count) <= 0.5


def test_split_of_a_class_does_not_depend_on_the_others() -> None:
    alone = split_classes(["a"] * 20, test_fraction=0.3, seed=1)
    assert split_classes(["a"] * 20 + ["b"] * 5, test_fraction=0.3, seed=1)[:20] == alone
    assert split_classes(["a"] * 20, test_fraction=0.3, seed=2) != alone


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 20.0])
def test_impossible_share(share: float) -> None:
    with pytest.raises(ConfigError, match="test share between 0 and 1"):
        split_classes(["a"], test_fraction=share, seed=0)


def test_one_folder_of_classes(tmp_path: Path) -> None:
    write_classes(tmp_path, {"class 10": 5, "class 2": 10})
    (tmp_path / "class 2" / "readme.txt").write_text("not an image")
    (tmp_path / "class 2" / "._0.jpg").write_text("a companion file of macOS")
    data = read_folder(tmp_path)
    assert data.class_names == ("class 2", "class 10")
    assert (len(data.train), len(data.test)) == (12, 3)
    assert all(sample.path.parent.name == data.class_names[sample.label] for sample in data.train + data.test)
    assert {sample.path for sample in data.train}.isdisjoint(sample.path for sample in data.test)
    assert data == read_folder(tmp_path)


@pytest.mark.parametrize("test_name", ["test", "val", "valid", "validation", "Test"])
def test_train_and_test_folders(tmp_path: Path, test_name: str) -> None:
    write_classes(tmp_path / "train", {"a": 3, "b": 2})
    write_classes(tmp_path / test_name, {"a": 1, "b": 4})
    data = read_folder(tmp_path)
    assert data.class_names == ("a", "b")
    assert [sample.label for sample in data.train] == [0, 0, 0, 1, 1]
    assert [sample.label for sample in data.test] == [0, 1, 1, 1, 1]


def test_a_validation_folder_is_neither_trained_nor_tested_on(tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        write_classes(tmp_path / name, {"a": 1, "b": 1})
    data = read_folder(tmp_path)
    assert all("test" in sample.path.parts for sample in data.test)
    assert [sample.path.parts[-3] for sample in data.validation] == ["val", "val"]


def test_train_folder_alone_is_split(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"a": 5, "b": 5})
    data = read_folder(tmp_path)
    assert data.class_names == ("a", "b")
    assert (len(data.train), len(data.test)) == (8, 2)


def test_a_class_called_train(tmp_path: Path) -> None:
    write_classes(tmp_path, {"bus": 5, "train": 5})
    assert read_folder(tmp_path).class_names == ("bus", "train")


def test_images_in_folders_below_a_class(tmp_path: Path) -> None:
    write_classes(tmp_path / "a", {"monday": 2, "tuesday": 2})
    write_classes(tmp_path, {"b": 4})
    data = read_folder(tmp_path)
    assert data.class_names == ("a", "b")
    assert len(data.train) + len(data.test) == 8


def test_differing_classes_are_named(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"a": 1, "b": 1})
    write_classes(tmp_path / "test", {"a": 1, "c": 1})
    with pytest.raises(DataError, match=r"only in the first: b; only in the second: c"):
        read_folder(tmp_path)


def test_images_without_class_folders(tmp_path: Path) -> None:
    smooth_photo().save(tmp_path / "0.jpg")
    with pytest.raises(DataError, match=r"has no class folders; expected one folder of images for each class"):
        read_folder(tmp_path)


def test_folders_without_images(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match="has no images"):
        read_folder(tmp_path)
    write_classes(tmp_path, {"b": 2})
    with pytest.raises(DataError, match=r"class folders with no image in .*: a; add images"):
        read_folder(tmp_path)


def write_manifest(folder: Path, text: str, name: str = "photos.csv") -> Path:
    write_classes(folder, {"images": 6})
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_manifest_with_split(tmp_path: Path) -> None:
    text = "path,label,split\nimages/0.jpg,b,train\nimages/1.jpg,a,Test\n\nimages/2.jpg,a,train\nimages/3.jpg,b,test\n"
    data = read_manifest(write_manifest(tmp_path, text))
    assert (data.kind, data.class_names) == ("manifest", ("a", "b"))
    assert [(sample.path.name, sample.label) for sample in data.train] == [("0.jpg", 1), ("2.jpg", 0)]
    assert [(sample.path.name, sample.label) for sample in data.test] == [("1.jpg", 0), ("3.jpg", 1)]


def test_manifest_without_split(tmp_path: Path) -> None:
    text = "path,label\n" + "".join(f"images/{index}.jpg,{'ab'[index % 2]}\n" for index in range(6))
    data = read_manifest(write_manifest(tmp_path, text))
    assert (len(data.train), len(data.test)) == (4, 2)


@pytest.mark.parametrize(("delimiter", "name"), [("\t", "photos.tsv"), (";", "photos.csv"), ("\t", "photos.csv")])
def test_manifest_forms(tmp_path: Path, delimiter: str, name: str) -> None:
    rows = [("\ufeffLabel", "Path", "note"), ("a", str(tmp_path / "images/0.jpg"), "x"), ("b", "images/1.jpg", "y")]
    data = read_manifest(write_manifest(tmp_path, "\r\n".join(map(delimiter.join, rows)), name))
    assert [sample.path.name for sample in data.train] == ["0.jpg", "1.jpg"]


def test_manifest_quotes_and_paths_above_it(tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()
    write_classes(tmp_path, {"images": 2})
    file = tmp_path / "lists" / "photos.csv"
    file.write_text('path,label\n../images/0.jpg,"gull, herring"\n../images/1.jpg,tern\n')
    assert read_manifest(file).class_names == ("gull, herring", "tern")


def test_manifest_rows_for_validation_are_kept_and_counted(tmp_path: Path) -> None:
    text = "path,label,split\nimages/0.jpg,a,train\nimages/1.jpg,a,val\nimages/2.jpg,b,test\nimages/3.jpg,b,training\n"
    data = read_manifest(write_manifest(tmp_path, text))
    assert [sample.path.name for sample in data.test] == ["2.jpg"]
    assert [sample.path.name for sample in data.validation] == ["1.jpg"]
    assert len(data.train) == 2


def test_validation_rows_as_test_set_are_said_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "path,label,split\nimages/0.jpg,a,train\nimages/1.jpg,a,val\nimages/2.jpg,b,train\nimages/3.jpg,b,valid\n"
    data = read_manifest(write_manifest(tmp_path, text))
    assert (len(data.train), len(data.test), len(data.validation)) == (2, 2, 0)
    assert "its 2 validation photos are the test set" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected a header with the columns path and label"),
        ("file,class\na.jpg,b\n", "line 1: expected a header with the columns path and label, got 'file,class'"),
        ("path,label\n", "lists no images"),
        ("path,label\nimages/0.jpg,a\nimages/9.jpg,a\n", r"line 3: .*9\.jpg does not exist"),
        ("path,label\nimages/0.jpg,a\nimages/../images/0.jpg,b\n", "line 3: .* is already on line 2"),
        ("path,label,split\nimages/0.jpg,a,trial\n", "line 2: unknown split 'trial'; expected train, test or val"),
        ("path,label,split\nimages/0.jpg,a,\n", "line 2: unknown split ''"),
        ("path,label\nimages/0.jpg,\n", "line 2: the label is empty"),
        ("path,label\nimages/0.jpg\n", "line 2: expected 2 columns, got 1"),
        ('path,"label\nimages/0.jpg,a\n', "line 1: expected a header with the columns path and label"),
        (f"path,label\nimages/0.jpg,{'a' * 200_000}\n", "line 2: field larger than field limit"),
        (f"path,label\n{'a' * 5000}.jpg,a\n", "line 2: .* does not exist"),
    ],
)
def test_manifest_mistakes_have_line_numbers(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_manifest(write_manifest(tmp_path, text))


def test_manifest_of_an_old_mac_and_a_label_of_many_digits(tmp_path: Path) -> None:
    digits = "9" * 5000
    file = write_manifest(tmp_path, "")
    file.write_bytes(f"path,label\rimages/0.jpg,{digits}\rimages/1.jpg,a\r".encode())
    assert read_manifest(file).class_names == (digits, "a")


def test_manifest_mistakes_come_together_but_not_all(tmp_path: Path) -> None:
    text = "path,label\n" + "".join(f"gone/{index}.jpg,a\n" for index in range(12))
    with pytest.raises(DataError, match=r"12 mistakes:\n(line \d+: .*\n){5}… and 7 more"):
        read_manifest(write_manifest(tmp_path, text))


def test_manifest_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "photos.csv"
    file.write_bytes(b"path,label\n\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read as UTF-8 text"):
        read_manifest(file)

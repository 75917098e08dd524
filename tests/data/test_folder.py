from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_files import smooth_photo, write_classes
from prototree.data import open_data, read_data
from prototree.data.folder import (
    describe_ignored,
    describe_unsupported,
    natural_key,
    read_folder,
    read_manifest,
    split_classes,
)
from prototree.data.summary import summarize
from prototree.errors import ConfigError, DataError


def test_natural_order() -> None:
    names = ["class 10", "Class 2", "class 1", "b", "10", "9"]
    assert sorted(names, key=natural_key) == ["9", "10", "b", "class 1", "Class 2", "class 10"]
    assert sorted(["a10", "a010", "a9", "a0", "a"], key=natural_key) == ["a", "a0", "a9", "a010", "a10"]


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 1000),
)
def test_split_properties(counts: list[int], fraction: float, seed: int) -> None:
    labels = [str(label) for label, count in enumerate(counts) for _ in range(count)]
    in_test = split_classes(labels, test_fraction=fraction, seed=seed)
    assert in_test == split_classes(labels, test_fraction=fraction, seed=seed)
    for label, count in enumerate(counts):
        n_test = sum(test for test, name in zip(in_test, labels, strict=True) if name == str(label))
        if count == 1:
            assert n_test == 0
        else:
            assert 1 <= n_test <= count - 1
            assert n_test in (1, count - 1) or abs(n_test - fraction * count) <= 0.5


def test_split_of_a_class_does_not_depend_on_the_others() -> None:
    alone = split_classes(["a"] * 20, test_fraction=0.3, seed=1)
    assert split_classes(["a"] * 20 + ["b"] * 5, test_fraction=0.3, seed=1)[:20] == alone
    assert split_classes(["a"] * 20, test_fraction=0.3, seed=2) != alone
    for fraction in (0.0, 1.0, -0.1, 20.0):
        with pytest.raises(ConfigError):
            split_classes(["a"], test_fraction=fraction, seed=0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 6)), min_size=2, max_size=60), st.floats(0.1, 0.9))
def test_a_group_is_on_one_side_of_a_split(items: list[tuple[str, int]], fraction: float) -> None:
    labels, groups = [label for label, _ in items], [str(group) if group else "" for _, group in items]
    in_test = split_classes(labels, groups, test_fraction=fraction, seed=0)
    for group in set(groups) - {""}:
        assert len({test for test, own in zip(in_test, groups, strict=True) if own == group}) == 1
    units = [
        (labels[groups.index(own)] if own else label, own or i)
        for i, (label, own) in enumerate(zip(labels, groups, strict=True))
    ]
    for label in set(labels):
        sides = {test for test, unit in zip(in_test, units, strict=True) if unit[0] == label}
        assert sides == {True, False} if len({unit for unit in units if unit[0] == label}) > 1 else True not in sides


def test_one_folder_of_classes(tmp_path: Path) -> None:
    write_classes(tmp_path, {"class 10": 5, "class 2": 10})
    write_classes(tmp_path / "class 10", {"monday": 2})  # images below a folder of the class
    (tmp_path / "class 2" / "readme.txt").write_text("not an image")
    (tmp_path / "class 2" / "._0.jpg").write_text("a companion file of macOS")
    data = read_folder(tmp_path)
    assert data.class_names == ("class 2", "class 10")
    assert (len(data.train), len(data.test)) == (14, 3)
    assert all(data.class_names[sample.label] in sample.path.parts for sample in data.train + data.test)
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
        (tmp_path / name / "a" / "x.psd").touch()
    data = read_folder(tmp_path)
    assert all("test" in sample.path.parts for sample in data.test)
    assert [sample.path.parts[-3] for sample in data.validation_split] == ["val", "val"]
    assert len(data.ignored) == 3


def test_a_train_folder_alone_is_split_and_a_class_may_be_called_so(tmp_path: Path) -> None:
    write_classes(tmp_path / "one" / "train", {"a": 5, "b": 5})
    data = read_folder(tmp_path / "one")
    assert (data.class_names, len(data.train), len(data.test)) == (("a", "b"), 8, 2)
    write_classes(tmp_path / "two", {"bus": 5, "train": 5})
    assert read_folder(tmp_path / "two").class_names == ("bus", "train")


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"a": 1, "b": 1})
    write_classes(tmp_path / "test", {"a": 1, "c": 1})
    with pytest.raises(DataError, match=r"first: b; .*second: c"):
        read_folder(tmp_path)
    smooth_photo().save(tmp_path / "train" / "a" / "0.jpg")
    with pytest.raises(DataError, match="no class folders"):
        read_folder(tmp_path / "train" / "a")
    (tmp_path / "test" / "empty").mkdir()
    with pytest.raises(DataError, match="empty"):
        read_folder(tmp_path / "test")


@pytest.fixture
def without_heic(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where pillow-heif is not installed."""
    monkeypatch.setattr("prototree.data.images.suffixes", lambda: (".jpg", ".png", ".jfif"))


def images(tmp_path: Path, *others: str) -> Path:
    root = write_classes(tmp_path / "images", {"auk": 12, "crow": 12})
    for name in others:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


def test_images_that_are_not_read_are_counted_and_named(
    tmp_path: Path, without_heic: None, caplog: pytest.LogCaptureFixture
) -> None:
    root = images(tmp_path, "auk/a.HEIC", "auk/b.HEIC", "crow/c.cr2", "crow/notes.txt")
    text = summarize(read_data(root))
    for words in ("left out   3 files\n", "2 .HEIC, 1 .cr2", "pillow-heif", "not used   1 .txt"):
        assert words in text
    open_data(root)
    (line,) = [message for message in caplog.messages if ".cr2" in message]
    assert "\n" not in line
    assert ".txt" not in line
    with pytest.raises(DataError, match=r"1 \.cr2"):
        open_data(root, strict=True)
    (root / "wren").mkdir()
    (root / "wren" / "a.HEIC").touch()
    with pytest.raises(DataError, match=r"wren.*1 \.HEIC.*pillow-heif"):
        read_folder(root)


def test_other_files_are_only_counted(tmp_path: Path) -> None:
    assert "not used" not in summarize(read_data(images(tmp_path)))
    root = images(tmp_path, "auk/.DS_Store", "auk/Thumbs.db", "auk/._0.jpg", "auk/labels.json", "crow/LICENSE")
    (root / "auk" / "0.jpg").rename(root / "auk" / "0.jfif")  # as browsers save it
    smooth_photo().save(root / "loose.jpg")
    data = open_data(root, strict=True)
    assert len(data.train + data.test) == 24
    assert describe_unsupported(data.ignored) == ""
    assert describe_ignored(data.ignored) == "1 image in no class folder, 1 .json, 1 without a suffix"


def write_manifest(folder: Path, text: str, name: str = "images.csv") -> Path:
    write_classes(folder, {"images": 6})
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_manifest_with_split(tmp_path: Path) -> None:
    rows = ["0.jpg,b,train", "1.jpg,a,Test", "", "2.jpg,a,training", "3.jpg,b,test", "4.jpg,b,val"]
    text = "path,label,split\n" + "\n".join(row and f"images/{row}" for row in rows)
    data = read_manifest(write_manifest(tmp_path, text))
    assert (data.kind, data.class_names) == ("manifest", ("a", "b"))
    assert [(sample.path.name, sample.label) for sample in data.train] == [("0.jpg", 1), ("2.jpg", 0)]
    assert [(sample.path.name, sample.label) for sample in data.test] == [("1.jpg", 0), ("3.jpg", 1)]
    assert [sample.path.name for sample in data.validation_split] == ["4.jpg"]


def test_manifest_without_split(tmp_path: Path) -> None:
    text = "path,label\n" + "".join(f"images/{index}.jpg,{'ab'[index % 2]}\n" for index in range(6))
    data = read_manifest(write_manifest(tmp_path, text))
    assert (len(data.train), len(data.test)) == (4, 2)


def test_images_of_a_group_are_trained_or_tested_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "path,label,group\n" + "".join(
        f"images/{i}.jpg,{'ab'[i // 3]},{('x', 'x', 'y')[i % 3]}{i // 3}\n" for i in range(6)
    )
    data = read_manifest(write_manifest(tmp_path, text))
    assert {sample.group for sample in data.train + data.test} == {"x0", "y0", "x1", "y1"}
    assert not {sample.group for sample in data.train} & {sample.group for sample in data.test}
    assert "groups" in summarize(data)
    assert not caplog.text
    rows = ["0.jpg,a,train,x", "1.jpg,a,test,x", "2.jpg,b,test,y", "3.jpg,b,train,"]
    torn = "path,label,split,group\n" + "".join(f"images/{row}\n" for row in rows)
    read_manifest(write_manifest(tmp_path, torn, "torn.csv"))
    assert "1 groups are in training and in test (x)" in caplog.text


@pytest.mark.parametrize(("delimiter", "name"), [("\t", "images.tsv"), (";", "images.csv"), ("\t", "images.csv")])
def test_manifest_forms(tmp_path: Path, delimiter: str, name: str) -> None:
    rows = [("\ufeffLabel", "Path", "note"), ("a", str(tmp_path / "images/0.jpg"), "x"), ("b", "images/1.jpg", "y")]
    data = read_manifest(write_manifest(tmp_path, "\r\n".join(map(delimiter.join, rows)), name))
    assert [sample.path.name for sample in data.train] == ["0.jpg", "1.jpg"]


def test_manifest_quotes_and_paths_above_it(tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()
    write_classes(tmp_path, {"images": 2})
    file = tmp_path / "lists" / "images.csv"
    file.write_text('path,"label"\n../images/0.jpg,"gull, herring"\n../images/1.jpg,tern\n')
    assert read_manifest(file).class_names == ("gull, herring", "tern")


def test_validation_rows_as_test_set_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "path,label,split\nimages/0.jpg,a,train\nimages/1.jpg,a,val\nimages/2.jpg,b,train\nimages/3.jpg,b,valid\n"
    data = read_manifest(write_manifest(tmp_path, text))
    assert (len(data.train), len(data.test), len(data.validation_split)) == (2, 2, 0)
    assert "2 validation images" in caplog.text


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("", "line 1"),
        ("file,class\na.jpg,b\n", "line 1.*file,class"),
        ("path,label\n", "no images"),
        ("path,label\nimages/0.jpg,a\nimages/9.jpg,a\n", r"line 3: .*9\.jpg"),
        ("path,label\nimages/0.jpg,a\nimages/../images/0.jpg,b\n", "line 3: .* line 2"),
        ("path,label,split\nimages/0.jpg,a,trial\n", "line 2: .*'trial'"),
        ("path,label,split\nimages/0.jpg,a,\n", "line 2: .*''"),
        ("path,label\nimages/0.jpg,\n", "line 2: .*label"),
        ("path,label\nimages/0.jpg\n", "line 2: .*columns"),
        ('path,"label\nimages/0.jpg,a\n', "line 1"),
        (f"path,label\nimages/0.jpg,{'a' * 200_000}\n", "line 2: "),
        (f"path,label\n{'a' * 5000}.jpg,a\n", "line 2: "),
        ("path,label\n" + "".join(f"gone/{index}.jpg,a\n" for index in range(12)), r"\(12\)(.*\n){6}… and 7"),
    ],
)
def test_manifest_mistakes_have_line_numbers(tmp_path: Path, text: str, token: str) -> None:
    with pytest.raises(DataError, match=token):
        read_manifest(write_manifest(tmp_path, text))


def test_manifest_of_an_old_mac_and_a_label_of_many_digits(tmp_path: Path) -> None:
    digits = "9" * 5000
    file = write_manifest(tmp_path, "")
    file.write_bytes(f"path,label\rimages/0.jpg,{digits}\rimages/1.jpg,a\r".encode())
    assert read_manifest(file).class_names == (digits, "a")
    file.write_bytes(b"path,label\n\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        read_manifest(file)

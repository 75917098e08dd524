"""Images that are there more than once: in two splits, in two classes, or several times in one."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from data_files import write_cub
from prototree.data import ImageData, Sample, read_data
from prototree.data.duplicates import (
    MAX_HAMMING,
    describe_duplicates,
    describe_near_duplicates,
    exact_duplicates,
    near_duplicates,
    near_pairs,
)
from prototree.data.in_memory import write_in_memory
from prototree.pipeline.fit import fit
from tiny_training import TINY, write_squares


def lines(source: Path) -> list[str]:
    data = read_data(source)
    return describe_duplicates(data, exact_duplicates(data))


def alike(source: Path) -> list[str]:
    data = read_data(source)
    return describe_near_duplicates(data, near_duplicates(data))


@pytest.fixture
def squares(tmp_path: Path) -> Path:
    return write_squares(tmp_path / "photos")


def test_copies_in_training_and_test(squares: Path) -> None:
    shutil.copy(squares / "train/red/0.png", squares / "test/red/again.png")
    shutil.copy(squares / "train/red/1.png", squares / "test/red/other.png")
    found = lines(squares)
    assert found[0] == "2 images are in training and test (first: train/red/0.png = test/red/again.png)"
    assert len(found) == 2  # they are of one class too


def test_copies_in_two_classes(squares: Path) -> None:
    shutil.copy(squares / "train/red/0.png", squares / "train/blue/again.png")
    (found,) = lines(squares)
    assert found.startswith("1 image is in more than one class")
    assert "train/red/0.png" in found
    assert "train/blue/again.png" in found


def test_many_copies_in_one_class(squares: Path) -> None:
    for number in range(9):
        shutil.copy(squares / "train/red/0.png", squares / f"train/red/copy {number}.png")
    shutil.copy(squares / "train/blue/0.png", squares / "train/blue/copy.png")
    (found,) = lines(squares)
    assert found.startswith("2 images are more than once in a class, at most 10 copies of one image in class red")


def test_a_class_folder_that_links_to_another_is_named(squares: Path) -> None:
    for day in ("monday", "tuesday"):  # named once, however many folders it holds
        (squares / "train/red" / day).mkdir()
        shutil.copy(squares / "test/red/0.png", squares / "train/red" / day / f"{day}.png")
    shutil.rmtree(squares / "train/blue")
    (squares / "train/blue").symlink_to(squares / "train/red", target_is_directory=True)
    assert [line for line in lines(squares) if "link" in line] == [
        f"the folder {squares / 'train/blue'} is a link to {squares / 'train/red'}"
    ]
    assert any("9 images are in more than one class" in line for line in lines(squares))


def test_data_of_every_kind(tmp_path: Path) -> None:
    cub = write_cub(tmp_path / "cub")
    one, other = (f"images/002.Auk/{number}.jpg" for number in (3, 4))
    shutil.copy(cub / one, cub / other)
    assert "1 image is in training and test" in lines(cub)[0]
    table = tmp_path / "photos.csv"
    table.write_text(f"path,label\ncub/{one},a\ncub/{other},b\ncub/images/001.Black_footed_Albatross/1.jpg,a\n")
    assert any("1 image is in more than one class" in line for line in lines(table))
    pixels = np.random.default_rng(0).integers(0, 256, (6, 20, 24, 3), dtype=np.uint8)
    parts = {"train": (pixels[:4], list("abab")), "test": (pixels[3:], list("bab"))}
    assert "1 image is in training and test" in lines(write_in_memory(parts, tmp_path / "given"))[0]


def test_an_image_that_is_drawn_twice_is_no_copy(squares: Path) -> None:
    assert exact_duplicates(read_data(squares).bootstrap(0)) == []


def test_files_of_other_lengths_are_not_read(squares: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def digests(paths: object) -> dict[Path, str]:
        asked.extend(paths)  # type: ignore[call-overload]
        return {path: str(path) for path in asked}

    monkeypatch.setattr("prototree.data.duplicates.file_digests", digests)
    samples = tuple(Sample(path, 0) for path in sorted((squares / "train/red").iterdir()))
    for number, sample in enumerate(samples):
        sample.path.write_bytes(bytes(100 + min(number, 6)))
    exact_duplicates(ImageData(squares, "folder", ("a",), samples, ()))
    assert [path.name for path in asked] == ["6.png", "7.png"]


def test_files_that_are_gone_are_no_copies(tmp_path: Path) -> None:
    samples = tuple(Sample(tmp_path / name, 0) for name in ("a.png", "b.png"))
    data = ImageData(tmp_path, "folder", ("a",), samples, ())
    assert exact_duplicates(data) == []
    assert near_duplicates(data) == []


def detailed_photo(seed: int = 0) -> Image.Image:
    """A photo with as much to see at every scale as real ones have."""
    random = np.random.default_rng(seed)
    layers = [random.integers(0, 256, (side, side, 3), dtype=np.uint8) for side in (3, 6, 12, 24)]
    grown = [np.asarray(Image.fromarray(layer).resize((320, 240)), dtype=float) for layer in layers]
    return Image.fromarray(np.mean(grown, axis=0).astype(np.uint8))


def changed(photo: Image.Image) -> dict[str, Image.Image]:
    """What becomes of a photo on its way from one page to the next."""
    file = io.BytesIO()
    photo.save(file, "JPEG", quality=30)
    return {
        "recompressed": Image.open(file),
        "smaller": photo.resize((photo.width // 2, photo.height // 2)),
        "brighter": ImageEnhance.Brightness(photo).enhance(1.1),
        "cut": photo.crop((2, 2, photo.width - 2, photo.height - 2)),
    }


@pytest.mark.parametrize("change", ["recompressed", "smaller", "brighter", "cut"])
def test_a_changed_copy_looks_alike(squares: Path, change: str) -> None:
    photo = detailed_photo()
    photo.save(squares / "train/red/photo.png")
    changed(photo)[change].save(squares / "test/blue/changed.png")
    assert lines(squares) == []
    found = alike(squares)
    assert found[0] == "1 group of images in training and test (train/red/photo.png ~ test/blue/changed.png)"
    assert found[1].startswith("1 group of images in more than one class")
    assert len(found) == 2


def test_the_same_shape_in_another_colour_does_not_look_alike(squares: Path) -> None:
    photo = detailed_photo().convert("L")
    for name, tint in (("red", (255, 150, 150)), ("blue", (150, 150, 255))):
        coloured = Image.merge("RGB", [photo.point(lambda value, share=share: value * share // 255) for share in tint])
        coloured.save(squares / f"train/{name}/photo.png")
    assert alike(squares) == []


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=12), st.lists(st.sets(st.integers(0, 63), max_size=8)))
def test_near_pairs_are_all_pairs_within_the_distance(hashes: list[int], flips: list[set[int]]) -> None:
    near = [hashes[0] ^ sum(1 << bit for bit in bits) for bits in flips]
    values = hashes + near
    expected = [
        [one, other]
        for one in range(len(values))
        for other in range(one + 1, len(values))
        if (values[one] ^ values[other]).bit_count() <= MAX_HAMMING
    ]
    found = near_pairs(np.array(values, dtype=np.uint64))
    pairs = {tuple(sorted(pair)) for some in found for pair in zip(*(side.tolist() for side in some), strict=True)}
    assert sorted(map(list, pairs)) == expected


def test_a_warning_before_training(squares: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {**TINY, "epochs": 1}
    fit(squares, tmp_path / "without", settings=settings, stages=["train"])
    assert "more than once" not in caplog.text
    shutil.copy(squares / "train/red/0.png", squares / "test/red/again.png")
    fit(squares, tmp_path / "with", settings=settings, stages=["train"])
    assert caplog.text.count("1 image is in training and test") == 1
    caplog.clear()
    fit(squares, tmp_path / "with", settings=settings, stages=["train"], resume=True)
    assert "more than once" not in caplog.text, "nothing is trained"


def test_many_images_that_look_alike_are_one_group(tmp_path: Path) -> None:
    """As frames of a film: each like the next, the first and the last no longer alike."""
    photo, samples = np.asarray(detailed_photo()), []
    for number in range(12):
        path = tmp_path / f"{number}.png"
        Image.fromarray(np.roll(photo, 4 * number, axis=1)).save(path)
        samples.append(Sample(path, 0))
    (group,) = near_duplicates(ImageData(tmp_path, "folder", ("a",), tuple(samples), ()))
    assert len(group) == 12


@pytest.mark.slow
def test_real_birds_that_look_alike(cub_50: ImageData) -> None:
    """One photo published twice in training and test, another twice in test; nothing else."""
    names = [[image.sample.path.stem for image in group] for group in near_duplicates(cub_50)]
    assert sorted(names) == [
        ["Marsh_Wren_0141_188796", "Marsh_Wren_0108_188788"],
        ["Summer_Tanager_0047_140164", "Summer_Tanager_0124_139963"],
    ]

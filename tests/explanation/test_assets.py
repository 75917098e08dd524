"""What a run stores about its tree: pictures from the data, from the run, or grey; histograms and pages."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_files import four_colours
from prototree.core.model import ProtoTree, PrototypeSource
from prototree.data import Box, ImageData, Sample, open_data
from prototree.data.images import LoadedImage
from prototree.explanation.assets import AssetStore, PrototypePictures, cut_out, reduced
from prototree.explanation.records import (
    DECISION_BOUNDARIES,
    HISTOGRAM_BINS,
    HISTOGRAM_LIMITS,
    DecisionHistogram,
    NodeKind,
    PatchContext,
)
from prototree.io import read_json, write_json

GREY = (160, 160, 160)


@pytest.fixture
def tree(tiny_tree: ProtoTree) -> ProtoTree:
    """Prototypes in the green quarter of a photo of 64 × 32."""
    source = PrototypeSource("a/photo.png", 1, "full", (0, 3), (40.0, 0.0, 64.0, 16.0), 0.1)
    tiny_tree.sources = (source,) * tiny_tree.topology.n_nodes
    return tiny_tree


@pytest.fixture
def data(tmp_path: Path) -> ImageData:
    root = tmp_path / "data"
    (root / "a").mkdir(parents=True)
    four_colours().save(root / "a" / "photo.png")
    sample = Sample(root / "a" / "photo.png", 0, size=(64, 32))
    return ImageData(root, "folder", ("a", "b", "c", "d", "e"), (sample,), ())


def test_stored_pictures_serve_where_the_data_is_not(tree: ProtoTree, data: ImageData, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    AssetStore(tree, folder).save_pictures(data)
    assert (folder / "000.webp").exists()
    pictures = PrototypePictures(tree, None, folder)
    assert pictures.complete
    gone = dataclasses.replace(data, root=tmp_path / "moved")
    for source in (PrototypePictures(tree, data), pictures, PrototypePictures(tree, gone, folder)):
        assert source.of(6).size == (64, 32)
        assert source.crop(6).shape == (16, 24, 3)
        assert (source.crop(6) == (0, 255, 0)).all()
        assert source.photo(6).shape == (32, 64, 3)
    data.train[0].path.unlink()
    AssetStore(tree, folder).save_pictures(data)
    assert PrototypePictures(tree, None, folder).complete, "where a photo is gone, its stored picture stays"


@pytest.mark.parametrize("damage", [b"", b"RIFF nonsense"])
def test_a_damaged_picture_or_none_is_grey(tree: ProtoTree, data: ImageData, tmp_path: Path, damage: bytes) -> None:
    tree.sources = (None, *tree.sources[1:])
    AssetStore(tree, tmp_path).save_pictures(data)
    (tmp_path / "001.webp").write_bytes(damage)
    pictures = PrototypePictures(tree, None, tmp_path)
    assert [(pictures.crop(row) == GREY).all() for row in range(3)] == [True, True, False]


def test_pictures_of_another_projection_are_not_used(tree: ProtoTree, data: ImageData, tmp_path: Path) -> None:
    AssetStore(tree, tmp_path).save_pictures(data)
    assert tree.sources[0] is not None
    moved = dataclasses.replace(tree.sources[0], patch_box=(0.0, 0.0, 24.0, 16.0))
    tree.sources = (moved, *tree.sources[1:])
    pictures = PrototypePictures(tree, None, tmp_path)
    assert not pictures.complete
    assert (pictures.crop(0) == GREY).all()


def test_stored_again_the_same_pictures_need_no_disk(
    tree: ProtoTree, data: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AssetStore(tree, tmp_path / "pictures").save_pictures(data)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, full)
    AssetStore(tree, tmp_path / "pictures").save_pictures(data)
    assert PrototypePictures(tree, None, tmp_path / "pictures").complete


@pytest.mark.parametrize("image", ["../secret.png", "/etc/secret.png"])
def test_sources_cannot_lead_out_of_the_data(tree: ProtoTree, data: ImageData, image: str) -> None:
    four_colours().save(data.root.parent / "secret.png")
    assert tree.sources[0] is not None
    tree.sources = (dataclasses.replace(tree.sources[0], image=image), *tree.sources[1:])
    assert (PrototypePictures(tree, data).photo(0) == GREY).all()


def test_a_box_is_cut_out_of_a_reduced_photo_at_the_same_place_and_never_grows() -> None:
    photo = LoadedImage(four_colours((64, 32)), (640, 320))  # decoded at a tenth
    assert (cut_out(photo, Box(320.0, 160.0, 480.0, 320.0)) == (255, 255, 0)).all()
    assert cut_out(photo, Box(639.0, 319.0, 640.0, 320.0)).shape == (1, 1, 3)
    assert cut_out(photo, Box(-50.0, 0.0, 0.0, 10.0)).shape == (1, 1, 3)
    assert reduced(LoadedImage(Image.new("RGB", (1000, 10)), (1000, 10)), 100).shape == (1, 100, 3)
    assert reduced(LoadedImage(Image.new("RGB", (30, 20)), (30, 20)), 100).shape == (20, 30, 3), "never enlarged"


@pytest.fixture
def listed(tmp_path: Path) -> ImageData:
    """A manifest of photos of the same name in three folders, one of them beside its own."""
    rows = []
    for place, colour in (("lists/a", "red"), ("lists/b", "green"), ("elsewhere", "blue")):
        (tmp_path / place).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (64, 32), colour).save(tmp_path / place / f"{number}.png")
            path = f"../{place}" if place == "elsewhere" else place.removeprefix("lists/")
            rows.append(f"{path}/{number}.png,{colour},{('train', 'test')[number]}")
    (tmp_path / "lists" / "photos.csv").write_text("\n".join(["path,label,split", *rows]))
    return open_data(tmp_path / "lists" / "photos.csv")


def test_photos_of_a_manifest_have_pictures_and_names_of_their_own(
    tree: ProtoTree, listed: ImageData, tmp_path: Path
) -> None:
    assert [listed.name(sample) for sample in listed.train] == ["a/0.png", "b/0.png", "../elsewhere/0.png"]
    source = tree.sources[0]
    assert source is not None
    colours = {"a/0.png": (255, 0, 0), "b/0.png": (0, 128, 0), "../elsewhere/0.png": (0, 0, 255)}
    tree.sources = tuple(dataclasses.replace(source, image=name) for name in (*colours, *colours, "a/0.png"))
    AssetStore(tree, tmp_path / "pictures").save_pictures(listed)
    for pictures in (PrototypePictures(tree, listed), PrototypePictures(tree, None, tmp_path / "pictures")):
        assert all((pictures.crop(i) == colour).all() for i, colour in enumerate(colours.values()))
    assert pictures.complete


def test_a_picture_that_is_missing_is_not_stored_as_complete(tree: ProtoTree, data: ImageData, tmp_path: Path) -> None:
    assert tree.sources[0] is not None
    tree.sources = (dataclasses.replace(tree.sources[0], image="a/gone.png"), *tree.sources[1:])
    AssetStore(tree, tmp_path / "pictures").save_pictures(data)
    assert not PrototypePictures(tree, None, tmp_path / "pictures").complete
    four_colours().save(data.root / "a" / "gone.png")
    back = dataclasses.replace(data, test=(Sample(data.root / "a" / "gone.png", 0, size=(64, 32)),))
    assert not (PrototypePictures(tree, back, tmp_path / "pictures").crop(0) == GREY).all()


def histogram(kind: NodeKind = "presence") -> DecisionHistogram:
    return DecisionHistogram(
        *HISTOGRAM_LIMITS[kind], DECISION_BOUNDARIES[kind], (1,) * HISTOGRAM_BINS, (2,) * HISTOGRAM_BINS
    )


def test_histograms_are_those_of_this_tree(
    tree: ProtoTree, data: ImageData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert AssetStore(tree, tmp_path).histograms() == {}
    AssetStore(tree, tmp_path).save_pictures(data)
    AssetStore(tree, tmp_path).save_histograms([histogram()] * tree.topology.n_nodes)
    assert AssetStore(tree, tmp_path).histograms() == dict.fromkeys(range(tree.topology.n_nodes), histogram())
    assert PrototypePictures(tree, None, tmp_path).complete, "what is stored already stays"
    path = tmp_path / "assets.json"
    content = read_json(path)
    write_json(path, content | {"histograms": [[[-1] * HISTOGRAM_BINS] * 2]})
    assert not caplog.text
    assert AssetStore(tree, tmp_path).histograms() == {}
    assert "cannot be used" in caplog.text
    write_json(path, content)
    tree.prototypes.data.add_(1)
    assert AssetStore(tree, tmp_path).histograms() == {}, "they are of another tree"
    assert not PrototypePictures(tree, None, tmp_path).complete


def test_a_prototype_is_lit_around_its_box_before_a_report_has_stored_where_it_is(
    tree: ProtoTree, data: ImageData, tmp_path: Path
) -> None:
    for pictures in (PrototypePictures(tree, data), PrototypePictures(tree, data, tmp_path)):
        context = pictures.context(0)
        assert context is not None
        assert context.light is not None
        left, top, right, bottom = (round(len(context.light) * edge) for edge in context.frame)
        assert context.light[top:bottom, left:right].mean() > 0.8
        assert context.light.min() < 0.1


def test_surroundings_are_three_times_as_wide_and_know_where_the_patch_is() -> None:
    photo = np.zeros((60, 120, 3), dtype=np.uint8)
    photo[20:30, 40:50] = 255  # a picture of a quarter of the photo's size
    found = PatchContext.of(photo, (480, 240), Box(160.0, 80.0, 200.0, 120.0))
    assert found.picture.shape == (30, 30, 3)
    left, top, right, bottom = (round(30 * edge) for edge in found.frame)
    assert (found.picture[top:bottom, left:right] == 255).all()
    assert found.picture.sum() == photo.sum()


@pytest.mark.parametrize(
    ("size", "box", "side", "frame"),
    [
        ((120, 90), (50.0, 30.0, 60.0, 60.0), 90, (40 / 90, 1 / 3, 50 / 90, 2 / 3)),  # people see it as it is
        ((60, 60), (50.0, 0.0, 60.0, 10.0), 30, (2 / 3, 0, 1, 1 / 3)),  # stays in the photo
    ],
)
def test_surroundings_of_an_oblong_patch_and_at_a_corner(
    size: tuple[int, int], box: tuple[float, ...], side: int, frame: tuple[float, ...]
) -> None:
    found = PatchContext.of(np.zeros((size[1], size[0], 3), dtype=np.uint8), size, Box(*box))
    assert found.picture.shape == (side, side, 3)
    assert found.frame == pytest.approx(frame)

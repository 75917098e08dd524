"""Feature extraction: each image is decoded once, and a failure leaves nothing half-made."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from prototree.backbones.backbone import Backbone
from prototree.data import ImageData, loader, open_data
from prototree.data.crops import random_views, source_views
from prototree.data.images import load_image
from prototree.data.loader import ViewDataset, image_loader
from prototree.data.scan import file_digests
from prototree.data.transforms import augmentation
from prototree.errors import TrainError
from prototree.features import extract
from prototree.features.cache import FOLDER, FeatureCache
from tiny_training import write_squares


@pytest.fixture
def data(tmp_path: Path) -> ImageData:
    return open_data(write_squares(tmp_path / "squares", train=3, test=2))


@pytest.fixture
def backbone() -> Backbone:
    torch.manual_seed(0)
    return Backbone("resnet18", None, image_size=32, split=False)


def datasets(data: ImageData, backbone: Backbone) -> list[ViewDataset]:
    preprocessing, more = backbone.preprocessing, partial(random_views, count=4, seed=0)
    return [
        ViewDataset(data.train, source_views, preprocessing),
        ViewDataset(data.train, more, preprocessing, transform=augmentation("light", preprocessing), seed=3),
    ]


def test_an_image_is_decoded_once_for_all_its_views(
    data: ImageData, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Path] = []

    def counted(path: Path, **options: Any) -> Any:
        decoded.append(path)
        return load_image(path, **options)

    monkeypatch.setattr(loader, "load_image", counted)
    views = datasets(data, backbone)
    together = FeatureCache(tmp_path / "together" / "run").compute(backbone, views)
    assert sorted(decoded) == sorted(sample.path for sample in data.train)
    cache = FeatureCache(tmp_path / "in turn" / "run")
    in_turn = [cache.compute(backbone, views[:1])[0], cache.compute(backbone, views)[1]]
    for dataset, first, second in zip(views, together, in_turn, strict=True):
        assert torch.equal(first.read(range(len(dataset))).values, second.read(range(len(dataset))).values)


def test_threads_give_the_same_views_in_the_same_order(data: ImageData, backbone: Backbone) -> None:
    views, rng, n_threads = datasets(data, backbone), torch.get_rng_state(), torch.get_num_threads()
    items = [dataset[1, index] for dataset in views for index in range(len(dataset))]
    data.train[4].path.write_bytes(b"no image")
    expected = list(image_loader(views, 7).epoch(1))
    for batch in expected:
        assert all(torch.equal(items[i].image, image) for i, image in zip(batch.entries, batch.images, strict=True))
    loader = image_loader(views, 7)
    try:
        torch.set_num_threads(4)
        batches = list(loader.map(1, lambda batch: (batch, torch.get_num_threads())))
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(n_threads)
    for wanted, (batch, threads) in zip(expected, batches, strict=True):
        assert threads == 1
        assert torch.equal(wanted.images, batch.images)
        assert torch.equal(wanted.entries, batch.entries)
    assert loader.unreadable == {str(data.train[4].path)}
    assert torch.equal(torch.get_rng_state(), rng)


def test_unreadable_images_are_noted_in_every_file(data: ImageData, backbone: Backbone, tmp_path: Path) -> None:
    data.train[1].path.write_bytes(b"no image")
    plain, varied = FeatureCache(tmp_path / "run").compute(backbone, datasets(data, backbone))
    assert (plain.unreadable, varied.unreadable) == ({2, 3}, {4, 5, 6, 7})


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("posix_fallocate", OSError(28, "No space left on device")),
        ("pwrite", OSError(28, "No space left on device")),
        ("fsync", KeyboardInterrupt()),
    ],
)
def test_a_failure_leaves_nothing_behind(
    data: ImageData,
    backbone: Backbone,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    error: BaseException,
) -> None:
    def fail(*_: object) -> None:
        raise error

    file_digests(sample.path for sample in data.train)  # are written elsewhere
    monkeypatch.setattr(extract.os, call, fail)
    with pytest.raises((TrainError, type(error)), match="No space left" if call != "fsync" else None) as caught:
        FeatureCache(tmp_path / "run").compute(backbone, datasets(data, backbone))
    assert isinstance(caught.value, TrainError) == (call == "posix_fallocate"), "known before hours are spent"
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_too_small_a_disk_is_known_at_once(
    data: ImageData, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = extract.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(extract.shutil, "disk_usage", lambda _: usage._replace(free=69))
    with pytest.raises(TrainError, match="free"):
        FeatureCache(tmp_path / "run").compute(backbone, datasets(data, backbone))


def test_a_batch_that_does_not_fit_into_memory_goes_in_parts() -> None:
    sizes = []

    def encode(images: torch.Tensor) -> torch.Tensor:
        sizes.append(len(images))
        if len(images) > fits:
            raise torch.cuda.OutOfMemoryError
        return 2 * images

    images, fits = torch.arange(22.0).reshape(11, 2), 3
    assert torch.equal(extract.encode_in_memory(encode, images), 2 * images)
    assert sizes == [11, 6, 3, 3, 5, 3, 2]
    fits = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        extract.encode_in_memory(encode, images)

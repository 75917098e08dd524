import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_files import smooth_photo, write_cub
from prototree.backbones.geometry import Box, Preprocessing
from prototree.data import Sample, open_data
from prototree.data.crops import FULL_IMAGE, View, evaluation_views
from prototree.data.images import load_image
from prototree.data.loader import (
    Batch,
    Item,
    Loader,
    Shard,
    ViewDataset,
    make_loader,
    seeded_rng,
    stable_seed,
)
from prototree.data.transforms import augmentation, eval_transform
from prototree.errors import DataError

SMALL = Preprocessing(size=24, resize=28)
TWO_VIEWS = (FULL_IMAGE, View("left", Box(0.0, 0.0, 20.0, 30.0)))


def two_views(sample: Sample) -> Sequence[View]:
    return TWO_VIEWS


def photos(folder: Path, count: int = 7) -> list[Sample]:
    folder.mkdir(exist_ok=True)
    samples = []
    for index in range(count):
        path = folder / f"{index}.png"
        smooth_photo(seed=index).save(path)
        samples.append(Sample(path, index % 3, size=(40, 30)))
    return samples


def dataset(folder: Path, seed: int = 0, count: int = 7) -> ViewDataset:
    return ViewDataset(photos(folder, count), two_views, SMALL, transform=augmentation("cub", SMALL), seed=seed)


def epoch_of(loader: Loader, epoch: int, start: int = 0) -> list[Batch]:
    return list(loader.epoch(epoch, start=start))


def assert_same(first: Sequence[Batch], second: Sequence[Batch]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        for tensor, twin in zip(one, other, strict=True):
            assert torch.equal(tensor, twin)


def test_items_are_views_in_order(tmp_path: Path) -> None:
    data = ViewDataset(photos(tmp_path), two_views, SMALL)
    assert len(data) == 14
    assert [(entry.sample_index, entry.view.name) for entry in data.entries[:4]] == [
        (0, "full"), (0, "left"), (1, "full"), (1, "left"),
    ]  # fmt: skip
    image, label, index = data[5]
    assert (image.shape, image.dtype, label, index) == ((3, 24, 24), torch.float32, 2, 5)
    torch.testing.assert_close(data[2].image, eval_transform(smooth_photo(seed=1), SMALL))
    half = smooth_photo(seed=1).crop((0, 0, 20, 30))
    # One grey level: at its cut edge the crop knows nothing of the pixels beyond.
    torch.testing.assert_close(data[3].image, eval_transform(half, SMALL), rtol=0, atol=0.02)


def test_augmentation_depends_on_seed_epoch_and_index_alone(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    item = data[3, 5].image
    torch.rand(7)
    assert torch.equal(data[3, 5].image, item)
    assert torch.equal(dataset(tmp_path)[3, 5].image, item)
    assert not torch.equal(data[4, 5].image, item)
    assert not torch.equal(dataset(tmp_path, seed=1)[3, 5].image, item)


def test_workers_change_nothing(tmp_path: Path) -> None:
    alone, helped = (make_loader(dataset(tmp_path), 4, shuffle=True, workers=workers) for workers in (0, 2))
    before = torch.get_rng_state()
    for epoch in (0, 5, 0):  # the workers live on from epoch to epoch
        next(helped.epoch(1))  # left early
        assert_same(epoch_of(alone, epoch), epoch_of(helped, epoch))
    assert torch.equal(torch.get_rng_state(), before), "the default generator is left alone"


def test_order_depends_on_seed_and_epoch(tmp_path: Path) -> None:
    def order(seed: int, epoch: int, batch_size: int = 4) -> list[int]:
        loader = make_loader(dataset(tmp_path, seed=seed), batch_size, shuffle=True)
        return torch.cat([batch.entries for batch in loader.epoch(epoch)]).tolist()

    assert sorted(order(0, 0)) == list(range(14))
    assert order(0, 0) == order(0, 0, batch_size=5)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


def test_unshuffled_loader_goes_through_in_order_and_keeps_the_short_batch(tmp_path: Path) -> None:
    loader = make_loader(dataset(tmp_path), 4)
    batches = list(loader)
    assert len(loader) == len(batches) == 4
    assert [len(batch.labels) for batch in batches] == [4, 4, 4, 2]
    assert torch.cat([batch.entries for batch in batches]).tolist() == list(range(14))
    assert batches[0].images.shape == (4, 3, 24, 24)
    assert batches[0].labels.tolist() == [0, 0, 1, 1]


def test_resuming_in_the_middle(tmp_path: Path) -> None:
    loader = make_loader(dataset(tmp_path), 4, shuffle=True)
    whole = epoch_of(loader, 2)
    assert_same(epoch_of(loader, 2, start=3), whole[3:])
    assert epoch_of(loader, 2, start=4) == []
    assert len(loader) == 4


@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_join_to_the_batches_of_one_process(tmp_path: Path, world_size: int) -> None:
    whole = epoch_of(make_loader(dataset(tmp_path), 6, shuffle=True), 1)
    shards = [
        epoch_of(make_loader(dataset(tmp_path), 6, shuffle=True, shard=Shard(rank, world_size)), 1)
        for rank in range(world_size)
    ]
    joined = [
        Batch(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))) for parts in zip(*shards, strict=True)
    ]
    assert_same(joined, whole)
    few = ViewDataset(photos(tmp_path, 5), evaluation_views, SMALL)
    last = list(make_loader(few, 4, shard=Shard(0, world_size)))[1]
    assert last.images.shape == (0, 3, 24, 24), "a process without items keeps step"


@given(length=st.integers(0, 50), world_size=st.integers(1, 9))
def test_shards_are_even(length: int, world_size: int) -> None:
    parts = [Shard(rank, world_size).of(range(length)) for rank in range(world_size)]
    assert [index for part in parts for index in part] == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("workers", [0, 2])
def test_file_deleted_after_the_scan_is_skipped(tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    data = dataset(tmp_path)
    data.entries[2].sample.path.unlink()
    loader = make_loader(data, 4, workers=workers)
    with caplog.at_level(logging.WARNING):
        for epoch in (0, 1):
            batches = epoch_of(loader, epoch)
            assert [len(batch.labels) for batch in batches] == [2, 4, 4, 2]
    (record,) = caplog.records
    assert loader.unreadable == {str(data.entries[2].sample.path)}
    assert "1.png" in record.message


@pytest.mark.parametrize("workers", [0, 1])
def test_strict_loader_raises(tmp_path: Path, workers: int) -> None:
    data = dataset(tmp_path)
    data.entries[2].sample.path.write_bytes(b"")
    with pytest.raises(DataError, match=r"1\.png"):
        list(make_loader(data, 4, workers=workers, strict=True))
    with pytest.raises(DataError):
        data[2]


def test_a_batch_of_bad_files_is_empty(tmp_path: Path) -> None:
    data = dataset(tmp_path, count=2)
    for entry in data.entries[::2]:
        entry.sample.path.write_bytes(b"")
    (batch,) = make_loader(data, 4)
    assert (batch.images.shape, batch.labels.shape) == ((0, 3, 24, 24), (0,))


def test_large_photos_are_decoded_no_larger_than_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.jpg"
    smooth_photo((1600, 1200)).save(path, quality=95)
    views = (FULL_IMAGE, View("crop", Box(0.0, 0.0, 400.0, 300.0)), View("sliver", Box(0.0, 0.0, 1600.0, 30.0)))
    data = ViewDataset([Sample(path, 0, size=(1600, 1200))], lambda sample: views, Preprocessing(size=100, resize=100))
    unscanned = ViewDataset([Sample(path, 0)], lambda sample: views, data.preprocessing)
    asked: list[int | None] = []

    def spy(path: Path, *, at_least: int | None) -> object:
        asked.append(at_least)
        return load_image(path, at_least=at_least)

    monkeypatch.setattr("prototree.data.loader.load_image", spy)
    for index in range(3):
        difference = (data[index].image - unscanned[index].image).abs().max()
        assert float(difference) < 0.15
    assert asked == [100, None, 400, None, 4000, None]


class _Deadly(ViewDataset):
    """Whose second item ends the process that reads it, as the system does that runs out of memory."""

    def item(self, epoch: int, index: int, cache: dict[Any, Any]) -> Item:
        if index == 1:
            os._exit(9)
        return super().item(epoch, index, cache)


def test_a_worker_that_dies_is_one_clear_error(tmp_path: Path) -> None:
    data = open_data(write_cub(tmp_path, n_images=8))
    dataset = _Deadly(data.train, evaluation_views, Preprocessing(16, 16))
    with pytest.raises(DataError):
        list(make_loader(dataset, 1, workers=2).epoch(0))


def test_seeds_differ_and_the_generator_comes_back_after_an_error() -> None:
    values = ((0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 11), (0, 1, 1), ("a", 0, 0))
    assert len({stable_seed(*value) for value in values}) == 6
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), seeded_rng(3):
        raise RuntimeError
    assert torch.equal(torch.get_rng_state(), before)

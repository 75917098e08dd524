"""Every photo is decoded once for all its views, and nothing that is kept is computed again."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from prototree.backbones.backbone import Backbone
from prototree.core.model import ProtoTree
from prototree.data import ImageData, loading, open_data
from prototree.data.dataset import Sample
from prototree.data.images import read_photo, reduction
from prototree.data.loading import Shard, ViewDataset, photo_loader
from prototree.data.stat_cache import photo_digests
from prototree.data.transforms import augmentation
from prototree.data.views import View, evaluation_views, source_views, squared, varied_views
from prototree.features import extract
from prototree.features.batches import CachedBatches, looking, maps_of
from prototree.features.cache import cache_all_borders, cache_borders, cache_features, kept_borders
from tiny_training import write_squares


@pytest.fixture
def squares(tmp_path: Path) -> ImageData:
    return open_data(write_squares(tmp_path / "squares", train=3, test=2))


@pytest.fixture
def backbone() -> Backbone:
    torch.manual_seed(0)
    return Backbone("resnet18", None, image_size=32, split=False)


def sets(data: ImageData, backbone: Backbone) -> list[ViewDataset]:
    given = backbone.preprocessing
    more = partial(varied_views, count=4, seed=0)
    return [
        ViewDataset(data.train, source_views, given),
        ViewDataset(data.train, more, given, transform=augmentation("light", given), seed=3),
    ]


def test_a_photo_is_decoded_once_for_all_its_views(
    squares: ImageData, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counted(path: Path, **options: Any) -> Any:
        read.append(path)
        return read_photo(path, **options)

    monkeypatch.setattr(loading, "read_photo", counted)
    datasets = sets(squares, backbone)
    together = cache_all_borders(backbone, datasets, tmp_path / "together")
    assert sorted(read) == sorted(sample.path for sample in squares.train)
    for number, (dataset, found) in enumerate(zip(datasets, together, strict=True)):
        alone = cache_borders(backbone, dataset, tmp_path / f"alone {number}")
        assert torch.equal(found.read(range(len(dataset)), 0).values, alone.read(range(len(dataset)), 0).values)
    # One of two files is there: the other one alone is filled, with the same bits.
    first = cache_borders(backbone, datasets[0], tmp_path / "in turn")
    second = cache_all_borders(backbone, datasets, tmp_path / "in turn")[1]
    assert torch.equal(second.read(range(9), 0).values, together[1].read(range(9), 0).values)
    assert torch.equal(first.read(range(9), 0).values, together[0].read(range(9), 0).values)


def test_views_are_those_that_the_data_sets_give_one_by_one(squares: ImageData, backbone: Backbone) -> None:
    datasets = sets(squares, backbone)
    items = [dataset[1, index] for dataset in datasets for index in range(len(dataset))]
    seen: dict[int, torch.Tensor] = {}
    for rank in range(2):
        loader = photo_loader(datasets, 7, shard=Shard(rank, 2))
        for batch in loader.epoch(1):
            seen.update(zip(batch.entries.tolist(), batch.images, strict=True))
            assert batch.labels.tolist() == [items[number].label for number in batch.entries.tolist()]
    assert sorted(seen) == list(range(len(items)))
    assert all(torch.equal(seen[number], item.image) for number, item in enumerate(items))


def test_threads_that_load_photos_give_the_same_views_in_the_same_order(squares: ImageData, backbone: Backbone) -> None:
    datasets, before, n_threads = sets(squares, backbone), torch.get_rng_state(), torch.get_num_threads()
    squares.train[4].path.write_bytes(b"no image")
    one, many = (photo_loader(datasets, 7, shard=Shard()) for _ in range(2))
    expected = list(one.epoch(1))
    try:
        torch.set_num_threads(4)
        found = list(many.each(1, lambda batch: (batch, torch.get_num_threads())))
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(n_threads)
    for wanted, (batch, threads) in zip(expected, found, strict=True):
        assert threads == 1
        assert torch.equal(wanted.images, batch.images)
        assert torch.equal(wanted.entries, batch.entries)
    assert one.problems.keys() == many.problems.keys() == {str(squares.train[4].path)}
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size", [(640, 480), (200, 1000), (333, 250), (64, 64)])
def test_photos_that_are_reduced_alike_are_the_same_picture(size: tuple[int, int], tmp_path: Path) -> None:
    path, alike = tmp_path / "photo.jpg", dict[int, bytes]()
    Image.effect_noise(size, 50).convert("RGB").save(path)
    for side in (8, 15, 30, 31, 32, 60, 120, 125, 126, 240, 480, 1000, None):
        image = read_photo(path, at_least=side).image
        factor = reduction(size, side)
        assert image.size == tuple(-(-edge // factor) for edge in size)
        assert alike.setdefault(factor, image.tobytes()) == image.tobytes()


def test_a_photo_that_cannot_be_read_is_left_out_of_both(
    squares: ImageData, backbone: Backbone, tmp_path: Path
) -> None:
    datasets = sets(squares, backbone)
    squares.train[1].path.write_bytes(b"no image")
    plain, varied = cache_all_borders(backbone, datasets, tmp_path / "maps")
    assert plain.unreadable == {2, 3}
    assert varied.unreadable == {4, 5, 6, 7}


def test_a_kill_leaves_neither_file(
    squares: ImageData, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    photo_digests(sample.path for sample in squares.train)  # are written elsewhere
    monkeypatch.setattr(extract.os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        cache_all_borders(backbone, sets(squares, backbone), tmp_path / "maps")
    assert list((tmp_path / "maps").iterdir()) == []


def fail(*_: object, **__: object) -> None:
    pytest.fail("the network looked again")


def test_what_a_run_kept_is_looked_at_again_without_the_network(
    squares: ImageData, tiny_tree: ProtoTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, given, backbone = tmp_path / "runs" / "one", tiny_tree.preprocessing, tiny_tree.features.backbone
    whole = ViewDataset(squares.train, source_views, given)
    some = ViewDataset(squares.train[2:5], evaluation_views, given)
    assert kept_borders(backbone, some, run, [whole]) is None
    fresh = list(maps_of(looking(tiny_tree.features, some), tiny_tree.features))
    cache_borders(backbone.unsplit(), whole, tmp_path / "runs" / "prototree-maps", run=run)
    monkeypatch.setattr(loading, "read_photo", fail)
    batches = looking(tiny_tree.features, some, run=run, among=[whole])
    assert isinstance(batches, CachedBatches)
    ((feature_map, labels, places),) = maps_of(batches, tiny_tree.features)
    torch.testing.assert_close(feature_map, fresh[0][0], rtol=2e-3, atol=2e-3)  # rounded to 16 bits
    assert (labels.tolist(), places.tolist()) == (fresh[0][1].tolist(), fresh[0][2].tolist())
    kept = kept_borders(backbone, some, run, [whole])
    stored = cache_features(tiny_tree, some, tmp_path / "edit", kept=kept)
    assert torch.equal(stored.maps(range(len(some))), feature_map)


def test_views_and_looks_share_what_they_can(
    squares: ImageData, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    resized: list[object] = []

    def counted(*words: Any, **options: Any) -> Any:
        resized.append(words)
        return squared(*words, **options)

    plain = sets(squares, backbone)[0]
    mirrored = ViewDataset(squares.train, lambda _: (View("mirrored", flip=True),), plain.preprocessing)
    every = [plain, plain.looking(0.7), mirrored]
    expected = torch.stack([one[index].image for one in every for index in range(len(one))])
    monkeypatch.setattr(loading, "squared", counted)
    batches = list(photo_loader(every, 5, shard=Shard()).epoch(0))
    images, entries = (torch.cat(part) for part in zip(*((b.images, b.entries) for b in batches), strict=True))
    assert len(resized) == len(plain), "a closer look and a mirrored view need no square of their own"
    assert torch.equal(images[entries.argsort()], expected)


def test_maps_of_other_photos_are_not_taken(squares: ImageData, tiny_tree: ProtoTree, tmp_path: Path) -> None:
    run, given, backbone = tmp_path / "runs" / "one", tiny_tree.preprocessing, tiny_tree.features.backbone
    whole = ViewDataset(squares.train, evaluation_views, given)
    cache_borders(backbone.unsplit(), whole, tmp_path / "runs" / "prototree-maps", run=run)
    assert kept_borders(backbone, whole, run) is not None
    strange = ViewDataset([*squares.train, Sample(squares.test[0].path, 0)], evaluation_views, given)
    assert kept_borders(backbone, strange, run, [whole]) is None
    with torch.no_grad():
        next(backbone.parameters()).mul_(1.01)
    assert kept_borders(backbone, whole, run) is None

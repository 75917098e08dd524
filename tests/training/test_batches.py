"""The frozen trunk cache: the same results as without it, and nothing stale or half-written is ever trusted."""

import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.backbones.preprocessing import Preprocessing
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.data import ImageData, open_data
from prototree.data.loading import ViewDataset
from prototree.data.transforms import augmentation
from prototree.data.views import training_views
from prototree.errors import TrainError
from prototree.features import extract as rooms
from prototree.features.batches import CachedBatches, PhasedBatches, PhotoBatches, maps_of
from prototree.features.cache import cache_borders, cache_size
from prototree.training.grow import sample_maps
from prototree.training.loop import Loop, Options
from prototree.training.objectives import Schedule, TreeObjective
from tiny_training import write_squares


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    return open_data(write_squares(tmp_path_factory.mktemp("squares")))


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.manual_seed(0)
    return Backbone("resnet18", None, image_size=32, feature_level=-2)


def dataset(data: ImageData, preprocessing: Preprocessing, augment: str = "light", seed: int = 0) -> ViewDataset:
    views = partial(training_views, kind=data.kind)
    return ViewDataset(data.train, views, preprocessing, transform=augmentation(augment, preprocessing), seed=seed)


def test_cached_and_uncached_training_agree(squares: ImageData, backbone: Backbone, tmp_path: Path) -> None:
    photos_set = dataset(squares, backbone.preprocessing)
    cache = cache_borders(backbone, photos_set, tmp_path, variants=3)
    results = []
    for batches in (
        PhotoBatches(photos_set, 8, shuffle=True),
        CachedBatches(cache, 8, shuffle=True, seed=photos_set.seed),
    ):
        torch.manual_seed(1)
        state = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
        tree = ProtoTree(Topology.full(3), FeatureExtractor(backbone, 8), squares.class_names)
        rows = Loop(TreeObjective(tree, batches, Schedule(3, freeze_epochs=3)), batches, 3, Options()).run()
        results.append(
            (tree.prototypes.detach().clone(), tree.leaf_logits.detach().clone(), [row.loss for row in rows])
        )
        backbone.load_state_dict(state)
    (prototypes, leaves, losses), (cached_prototypes, cached_leaves, cached_losses) = results
    # The cache rounds to float16, which keeps three digits.
    torch.testing.assert_close(cached_prototypes, prototypes, atol=3e-3, rtol=0)
    torch.testing.assert_close(cached_leaves, leaves, atol=0.05, rtol=0.05)
    assert cached_losses == pytest.approx(losses, rel=1e-2)


def test_the_cache_holds_the_borders_of_every_view_in_every_variant(
    squares: ImageData, backbone: Backbone, tmp_path: Path
) -> None:
    photos = dataset(squares, backbone.preprocessing)
    cache = cache_borders(backbone, photos, tmp_path, variants=2)
    backbone.eval()
    for variant in (0, 1):
        images = torch.stack([photos[variant, index].image for index in range(len(photos))])
        with torch.no_grad():
            expected = backbone.trunk(images)
        found = cache.read(list(range(len(photos))), epoch=variant + 2)
        torch.testing.assert_close(found.values, expected, atol=2e-3, rtol=2e-3)
        assert found.labels.tolist() == [sample.label for sample in squares.train]
    size = cache_size(backbone, len(photos), 2)
    assert size == next(tmp_path.glob("*.f16")).stat().st_size


def test_a_cache_is_used_again_and_another_one_made_for_anything_that_differs(
    squares: ImageData, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = []
    real = rooms.Job.run
    monkeypatch.setattr(rooms.Job, "run", lambda *args: filled.append(args) or real(*args))
    photos = dataset(squares, backbone.preprocessing)
    for _ in range(2):
        cache_borders(backbone, photos, tmp_path)
    assert len(filled) == 1
    cache_borders(backbone, dataset(squares, backbone.preprocessing, "none"), tmp_path)
    cache_borders(backbone, dataset(squares, backbone.preprocessing, seed=1), tmp_path)
    cache_borders(backbone, photos, tmp_path, variants=2)
    assert len(filled) == 4
    torch.manual_seed(99)
    other = Backbone("resnet18", None, image_size=32, feature_level=-2)
    cache_borders(other, photos, tmp_path)
    assert len(filled) == 5
    path = squares.train[0].path
    path.write_bytes(path.read_bytes() + b"\0")
    cache_borders(backbone, photos, tmp_path)
    assert len(filled) == 6
    status = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    cache_borders(backbone, photos, tmp_path)
    assert len(filled) == 7, "as long and as old as before, but another photo"
    with torch.no_grad():
        next(backbone.tail_parameters()).mul_(1.5)
    cache_borders(backbone, photos, tmp_path)
    assert len(filled) == 7, "the tail does not matter"


def test_a_copied_folder_is_known_again(
    squares: ImageData, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_borders(backbone, dataset(squares, backbone.preprocessing), tmp_path / "maps")
    shutil.copytree(squares.root, tmp_path / "copy", copy_function=shutil.copy)  # with new times of change
    monkeypatch.setattr(rooms.Job, "run", lambda *_: pytest.fail("the network looked again"))
    cache_borders(backbone, dataset(open_data(tmp_path / "copy"), backbone.preprocessing), tmp_path / "maps")


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_full_disk_is_a_clear_error_and_leaves_nothing_behind(
    squares: ImageData, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rooms.os, "posix_fallocate" if when == "at once" else "pwrite", full)
    with pytest.raises((TrainError, OSError), match="No space left on device") as caught:
        cache_borders(backbone, dataset(squares, backbone.preprocessing), tmp_path)
    if when == "at once":
        assert re.search(r"needs [\d,]+ bytes in .*, [\d,]+ MiB are free", str(caught.value))
    assert list(tmp_path.iterdir()) == []


def test_a_killed_extraction_is_not_trusted(squares: ImageData, backbone: Backbone, tmp_path: Path) -> None:
    photos = dataset(squares, backbone.preprocessing)
    cache_borders(backbone, photos, tmp_path)
    finished = next(tmp_path.glob("*.f16"))
    expected = finished.read_bytes()
    # What a kill leaves: rows that are partly zero, under the temporary name, and no description.
    finished.with_suffix(".partial").write_bytes(bytes(len(expected)))
    finished.unlink()
    next(tmp_path.glob("*.json")).unlink()
    cache_borders(backbone, photos, tmp_path)
    assert finished.read_bytes() == expected


def test_a_cache_of_another_size_is_computed_again(squares: ImageData, backbone: Backbone, tmp_path: Path) -> None:
    photos = dataset(squares, backbone.preprocessing)
    cache_borders(backbone, photos, tmp_path)
    path = next(tmp_path.glob("*.f16"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    cache_borders(backbone, photos, tmp_path)
    assert path.read_bytes() == whole


def test_a_photo_that_cannot_be_read_is_left_out_of_batches(backbone: Backbone, tmp_path: Path) -> None:
    data = open_data(write_squares(tmp_path / "photos"))
    data.train[3].path.write_bytes(b"not a photo any more")
    cache = cache_borders(backbone, dataset(data, backbone.preprocessing), tmp_path / "cache")
    assert cache.unreadable == {3}
    served = [e for inputs in CachedBatches(cache, 8, shuffle=True).epoch(0) for e in inputs.entries.tolist()]
    assert sorted(served) == [i for i in range(24) if i != 3]


def test_photos_take_over_when_the_trunk_is_freed(squares: ImageData, backbone: Backbone, tmp_path: Path) -> None:
    photos_set = dataset(squares, backbone.preprocessing)
    cached = CachedBatches(cache_borders(backbone, photos_set, tmp_path), 8, shuffle=True)
    both = PhasedBatches(cached, PhotoBatches(photos_set, 8, shuffle=True), switch=2)
    shapes = [next(both.epoch(epoch)).values.shape[1:] for epoch in (1, 2)]
    assert shapes[0] != shapes[1] == (3, 32, 32)
    features = FeatureExtractor(backbone, 4).eval()
    inputs = next(both.epoch(2))
    torch.testing.assert_close(both.encode(features, inputs.values), features(inputs.values))


def test_maps_of_are_plain_and_in_order(squares: ImageData, backbone: Backbone) -> None:
    batches = PhotoBatches(dataset(squares, backbone.preprocessing, "none"), 8, shuffle=False)
    features = FeatureExtractor(backbone, 4).train()
    places = torch.cat([places for _, _, places in maps_of(batches, features)])
    assert places.tolist() == list(range(24))
    assert not any(feature_map.requires_grad for feature_map, _, _ in maps_of(batches, features))


def test_no_views_to_cache(squares: ImageData, backbone: Backbone, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="at least one cached view"):
        cache_borders(backbone, dataset(squares, backbone.preprocessing), tmp_path, variants=0)


def test_progress_is_told(squares: ImageData, backbone: Backbone, tmp_path: Path) -> None:
    ticks: list[tuple[int, int]] = []
    tick: Callable[[int, int], None] = lambda done, total: ticks.append((done, total))  # noqa: E731
    cache_borders(backbone, dataset(squares, backbone.preprocessing), tmp_path, variants=2, tick=tick)
    assert ticks[-1] == (48, 48)
    assert np.all(np.diff([done for done, _ in ticks]) > 0)


def test_joined_caches_hold_the_entries_of_both(squares: ImageData, backbone: Backbone, tmp_path: Path) -> None:
    one, other = (
        cache_borders(backbone, dataset(squares, backbone.preprocessing, name), tmp_path) for name in ("none", "light")
    )
    joined = one.join(other)
    n = len(one.entries)
    mixed = joined.read([1, n + 2, 0], epoch=0)
    assert torch.equal(mixed.values[[0, 2]], one.read([1, 0], 0).values)
    assert torch.equal(mixed.values[1:2], other.read([2], 0).values)
    assert mixed.entries.tolist() == [1, n + 2, 0]
    assert joined.entries[n + 2].sample == other.entries[2].sample
    assert len(joined.read([], 0).values) == 0
    lost = dataclasses.replace(other, unreadable=frozenset({2}))
    assert one.join(lost).read([1, n + 2, 0], epoch=0).entries.tolist() == [1, 0]


def test_maps_are_sampled_although_the_first_photo_cannot_be_read(backbone: Backbone, tmp_path: Path) -> None:
    root = write_squares(tmp_path / "squares", 3, 2)
    data = open_data(root)
    data.train[0].path.write_bytes(data.train[0].path.read_bytes()[:200])
    dataset = ViewDataset(data.train, partial(training_views, kind=data.kind), Preprocessing(32, 32))
    cached = CachedBatches(cache_borders(backbone, dataset, tmp_path / "cache"), 4, shuffle=False)
    maps, labels = sample_maps(cached)
    assert len(maps) == len(labels) == len(dataset) - 1

"""The feature cache: named by everything that went into it, found again, and never trusted when it is damaged."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree, nearest_patches
from prototree.data import ImageData, loader, open_data
from prototree.data.crops import evaluation_views, source_views
from prototree.data.dataset import Sample
from prototree.data.loader import ViewDataset
from prototree.data.transforms import augmentation
from prototree.errors import DataError, TrainError
from prototree.features import cache as cache_module
from prototree.features.cache import (
    FOLDER,
    EvalBatches,
    FeatureCache,
    FeatureMaps,
    StoredMaps,
    cache_tree_features,
    eval_batches,
    files_used,
    link_files,
    remove_unfinished,
    shared_folder,
)
from tiny_training import feature_maps, write_squares


@pytest.fixture
def backbone() -> Backbone:
    torch.manual_seed(0)
    return Backbone("resnet18", None, image_size=32, feature_level=-2)


def augmented(data: ImageData, backbone: Backbone, augment: str = "light", seed: int = 0) -> ViewDataset:
    preprocessing = backbone.preprocessing
    return ViewDataset(
        data.train, evaluation_views, preprocessing, transform=augmentation(augment, preprocessing), seed=seed
    )


@pytest.fixture
def extractions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many files were filled in each extraction."""
    counts, write_files = list[int](), cache_module.write_files

    def counted(files: list[object], *rest: object) -> None:
        counts.append(len(files))
        write_files(files, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cache_module, "write_files", counted)
    return counts


def test_the_cache_holds_the_maps_of_every_view_in_every_variant(
    squares: ImageData, backbone: Backbone, tmp_path: Path
) -> None:
    dataset, ticks, stages = augmented(squares, backbone), list[tuple[int, int]](), list[str]()
    cache = FeatureCache(tmp_path / "run", stage=stages.append, tick=lambda *tick: ticks.append(tick))
    (maps,) = cache.compute(backbone, [dataset], variants=2)
    for variant in (0, 1):
        images = torch.stack([dataset[variant, index].image for index in range(len(dataset))])
        with torch.no_grad():
            expected = backbone.eval().split_features(images)
        batch = maps.read(range(24), epoch=variant + 2)
        torch.testing.assert_close(batch.values, expected, atol=2e-3, rtol=2e-3)
        assert batch.labels.tolist() == [sample.label for sample in squares.train]
    assert ticks[-1] == (48, 48)
    assert np.all(np.diff([done for done, _ in ticks]) > 0)
    assert files_used(tmp_path / "run") == maps.names == [path.name for path in (tmp_path / FOLDER).glob("*.f16")]
    cache.compute(backbone, [dataset], variants=2)
    assert len(stages) == 2
    with pytest.raises(TrainError):
        cache.compute(backbone, [dataset], variants=0)


def test_a_file_is_named_by_everything_that_went_into_it(
    backbone: Backbone, tmp_path: Path, extractions: list[int]
) -> None:
    data, cache = open_data(write_squares(tmp_path / "squares", 2, 1)), FeatureCache(tmp_path / "run")
    dataset = augmented(data, backbone)

    def computes(
        n_times: int, backbone: Backbone = backbone, dataset: ViewDataset = dataset, variants: int = 1
    ) -> None:
        cache.compute(backbone, [dataset], variants=variants)
        assert len(extractions) == n_times

    computes(1)
    computes(1)
    computes(2, dataset=augmented(data, backbone, "none"))
    computes(3, dataset=augmented(data, backbone, seed=1))
    computes(4, variants=2)
    torch.manual_seed(99)
    computes(5, backbone=Backbone("resnet18", None, image_size=32, feature_level=-2))
    path = data.train[0].path
    path.write_bytes(path.read_bytes() + b"\0")
    computes(6)
    status = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    computes(7)  # as long and as old as before, but another image
    with torch.no_grad():
        next(backbone.last_block_parameters()).mul_(1.5)
    computes(7)  # the last block does not matter
    shutil.copytree(data.root, tmp_path / "copy", copy_function=shutil.copy)  # with new times of change
    computes(7, dataset=augmented(open_data(tmp_path / "copy"), backbone))


def test_views_are_found_among_others_but_never_random_ones(
    squares: ImageData, tiny_tree: ProtoTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, preprocessing, run = tiny_tree.features, tiny_tree.preprocessing, tmp_path / "runs" / "a"
    backbone, cache = features.backbone.merge_last_block(), FeatureCache(run)
    run.mkdir(parents=True)
    sources = ViewDataset(squares.train, source_views, preprocessing)
    some = ViewDataset(squares.train[2:5], evaluation_views, preprocessing)
    assert cache.find(backbone, some) is None
    fresh = eval_batches(features, some, run=run)
    assert fresh.maps is None
    ((expected, labels, indices),) = fresh.encoded(features)
    cache.compute(backbone, [sources])
    monkeypatch.setattr(loader, "load_image", lambda *_, **__: pytest.fail("decoded again"))
    batches = eval_batches(features, some, run=tmp_path / "runs" / "b")
    assert batches.maps is not None
    ((feature_map, *rest),) = batches.encoded(features)
    torch.testing.assert_close(feature_map, expected, rtol=2e-3, atol=2e-3)  # rounded to 16 bits
    assert [part.tolist() for part in rest] == [labels.tolist(), indices.tolist()]
    stored = cache_tree_features(tiny_tree, some, tmp_path / "edit", kept=batches.maps)
    assert stored.is_rounded
    assert torch.equal(stored.maps(range(len(some))), feature_map)
    strange = ViewDataset([*squares.train, Sample(squares.test[0].path, 0)], evaluation_views, preprocessing)
    assert cache.find(backbone, strange) is None
    random = augmented(squares, backbone)
    assert cache.find(backbone, random) is None, "augmentation depends on the index"
    with torch.no_grad():
        next(backbone.parameters()).mul_(1.01)
    assert cache.find(backbone, some) is None
    with torch.no_grad():
        next(backbone.parameters()).div_(1.01)


def test_full_maps_are_those_of_all_crops(squares: ImageData, backbone: Backbone, tmp_path: Path) -> None:
    backbone = backbone.merge_last_block()
    backbone.crops = (1.0, 0.7)
    dataset, cache = ViewDataset(squares.test, evaluation_views, backbone.preprocessing), FeatureCache(tmp_path / "run")
    maps = cache.full(backbone, dataset)
    with torch.no_grad():
        expected = backbone.eval()(torch.stack([dataset[i].image for i in range(9)]))
    torch.testing.assert_close(maps.read(range(9)).values, expected, atol=5e-2, rtol=5e-2)
    assert maps.full_image.read([0]).values.shape[2] * 2 == expected.shape[2]
    found = cache.find(backbone, dataset)
    assert found is not None
    assert found.names == maps.names
    assert len(maps.names) == 2


Damage = Callable[[Path, Path], object]
FORGED = {"version": 1, "key": "", "rows": [], "unreadable": [], "sha256_maps": "0" * 64}


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda maps, header, text=text: header.write_text(text) for text in ("{}", "[]", "", json.dumps(FORGED))),
        lambda maps, header: header.write_text(header.read_text().replace('"unreadable": []', '"unreadable": [1]')),
        lambda maps, header: header.unlink(),
        lambda maps, header: maps.write_bytes(b"half"),
        lambda maps, header: maps.write_bytes(maps.read_bytes()[:-1] + bytes([maps.read_bytes()[-1] ^ 0x40])),
        lambda maps, header: maps.write_bytes(maps.read_bytes()[:64] + bytes(len(maps.read_bytes()) - 64)),
        # What a kill leaves: rows that are partly zero, under the temporary name, and no description.
        lambda maps, header: header.unlink() or maps.rename(maps.with_suffix(".partial")),
    ],
)
def test_damaged_files_are_computed_again(
    squares: ImageData, tiny_tree: ProtoTree, tmp_path: Path, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = ViewDataset(squares.test, evaluation_views, tiny_tree.preprocessing)
    expected = cache_tree_features(tiny_tree, dataset, tmp_path).maps(range(9))
    (file,), (header,) = tmp_path.glob("*.f32"), tmp_path.glob("*.json")
    before = file.read_bytes(), header.read_text()
    damage(file, header)
    is_silent = not (file.exists() and header.exists())
    assert torch.equal(cache_tree_features(tiny_tree, dataset, tmp_path).maps(range(9)), expected)
    assert (file.read_bytes(), header.read_text()) == before
    assert is_silent or "computed again" in caplog.text
    cache_tree_features(tiny_tree, dataset, tmp_path, lambda *tick: pytest.fail("computed again"))


def test_unreadable_images_are_left_out(tiny_tree: ProtoTree, tmp_path: Path) -> None:
    data = open_data(write_squares(tmp_path / "squares", 2, 1))
    data.test[1].path.write_bytes(b"no image")
    dataset = ViewDataset(data.test, evaluation_views, tiny_tree.preprocessing)
    stored = cache_tree_features(tiny_tree, dataset, tmp_path / "maps")
    assert [entry.sample_index for entry in stored.entries] == [0, 2]
    assert (len(stored), stored.labels.tolist()) == (2, [data.test[i].label for i in (0, 2)])
    (maps,) = FeatureCache(tmp_path / "run").compute(tiny_tree.features.backbone, [dataset])
    assert maps.unreadable == {1}
    batches = maps.batches(2, seed=0)
    assert sorted(index for batch in batches for index in batch.entries.tolist()) == [0, 2]
    for sample in data.test:
        sample.path.unlink()
    with pytest.raises(DataError):
        cache_tree_features(tiny_tree, dataset, tmp_path / "maps")


def read_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make a folder one that nothing can be written to; permissions do not bind who may do everything."""
    may, opened = os.access, os.open

    def guarded(path: Path, flags: int, *more: int) -> int:
        if Path(path).parent == folder and flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and may(path, mode))
    monkeypatch.setattr(os, "open", guarded)


def test_a_cache_that_is_read_only_is_used(
    squares: ImageData, tiny_tree: ProtoTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extractions: list[int]
) -> None:
    train, test = (
        ViewDataset(part, evaluation_views, tiny_tree.preprocessing) for part in (squares.train, squares.test)
    )
    backbone, run = tiny_tree.features.backbone.merge_last_block(), tmp_path / "run"
    assert shared_folder(run) == tmp_path.resolve() / FOLDER
    (expected,) = FeatureCache(run).compute(backbone, [train])
    read_only(monkeypatch, tmp_path / FOLDER)
    assert shared_folder(run) == run / FOLDER
    found = FeatureCache(run).compute(backbone, [train, test])
    assert extractions == [1, 1], "what is missing is computed, the rest is not"
    assert found[0].names == expected.names
    assert len(list((run / FOLDER).glob("*.f16"))) == 1
    stored = cache_tree_features(tiny_tree, test, run / FOLDER)
    read_only(monkeypatch, run / FOLDER)
    again = cache_tree_features(tiny_tree, test, run / FOLDER, lambda *tick: pytest.fail("computed again"))
    assert torch.equal(again.maps(range(9)), stored.maps(range(9)))


def test_maps_are_lent_to_another_run_and_unfinished_ones_removed(
    squares: ImageData, backbone: Backbone, tmp_path: Path, extractions: list[int]
) -> None:
    dataset = ViewDataset(squares.test, evaluation_views, backbone.preprocessing)
    (tmp_path / "a").mkdir()
    FeatureCache(tmp_path / "a" / "run").compute(backbone, [dataset])
    (tmp_path / "b").mkdir()
    link_files(tmp_path / "a" / FOLDER, tmp_path / "b" / "run")
    FeatureCache(tmp_path / "b" / "run").compute(backbone, [dataset])
    assert extractions == [1]
    (tmp_path / "a" / FOLDER / "x.partial").write_bytes(b"half")
    remove_unfinished(tmp_path / "a" / FOLDER)
    assert sorted(path.suffix for path in (tmp_path / "a" / FOLDER).iterdir()) == [".f16", ".json"]


def test_evaluation_batches_are_plain_and_in_order(squares: ImageData, backbone: Backbone) -> None:
    features = FeatureExtractor(backbone, 4).train()
    dataset = ViewDataset(squares.train, evaluation_views, backbone.preprocessing)
    batches = list(EvalBatches(dataset.entries, None, dataset, batch_size=7).encoded(features))
    assert torch.cat([indices for _, _, indices in batches]).tolist() == list(range(24))
    assert not any(feature_map.requires_grad for feature_map, _, _ in batches)


def test_subsets_and_joined_maps_read_the_right_rows() -> None:
    def numbers(first: int, count: int, unreadable: frozenset[int] = frozenset()) -> FeatureMaps:
        values = torch.arange(first, first + count, dtype=torch.float16).view(count, 1, 1, 1)
        return feature_maps(values, [0] * count, unreadable)

    some = numbers(0, 5, frozenset({3})).subset([4, 3, 1])
    joined = some.concat(numbers(10, 3).subset([2, 0]))
    assert joined.read(range(5)).values.flatten().tolist() == [4, 1, 12, 10]
    assert joined.read([4, 1, 0]).entries.tolist() == [4, 0]
    assert joined.subset([3, 0]).read([0, 1]).values.flatten().tolist() == [12, 4]
    assert [entry.sample.path.name for entry in joined.entries] == ["4.png", "3.png", "1.png", "2.png", "0.png"]
    assert len(joined.read([]).values) == 0


def test_forbidden_patches_are_not_found() -> None:
    maps, prototypes = random_maps(0, 5, 3, 2, 4, dtype=torch.float32), random_maps(1, 2, 3, 1, 1, dtype=torch.float32)
    stored = StoredMaps(feature_maps(maps, [0] * 5))
    free = stored.nearest(prototypes)
    assert torch.equal(free.distance, nearest_patches(maps, prototypes).distance)
    mask = torch.zeros(8, dtype=torch.bool)
    mask[free.patch[2, 0]] = True
    found = stored.nearest(prototypes, {2: mask, 3: torch.ones(8, dtype=torch.bool)})
    others = [i for i in range(8) if not mask[i]]
    for row in range(2):
        dists = [(maps[2].flatten(1)[:, i] - prototypes[row, :, 0, 0]).norm().item() for i in others]
        assert found.distance[2, row].item() == pytest.approx(min(dists), rel=1e-5)
        assert int(found.patch[2, row]) == others[dists.index(min(dists))]
    assert torch.isinf(found.distance[3]).all()
    assert torch.equal(found.distance[:2], free.distance[:2])

"""The head as a max-pooled classifier, and the soft labels that it gives."""

from pathlib import Path

import pytest
import torch

from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.checkpoint import read_state, write_state
from prototree.data import ImageData
from prototree.errors import CheckpointError
from prototree.training import head
from prototree.training.grow import standardise
from prototree.training.head import Baseline, compute_soft_labels, load_baseline, random_patches, save_baseline
from tiny_training import feature_maps, tiny_context


@pytest.fixture
def features(tiny_backbone: Backbone) -> FeatureExtractor:
    torch.manual_seed(0)
    return FeatureExtractor(tiny_backbone, 16, head_hidden_dim=8).eval()


@pytest.fixture
def baseline(features: FeatureExtractor) -> Baseline:
    return Baseline(head.wide_head(features), torch.nn.Linear(16, 3)).eval()


def test_the_baseline_classifies_the_largest_value_of_each_channel(baseline: Baseline) -> None:
    maps = random_maps(0, 2, 256, 3, 3, dtype=torch.float32)
    patches = torch.sigmoid(baseline.head(maps)).flatten(2)
    pooled = torch.stack([patches[:, :, i] for i in range(9)]).amax(dim=0)
    torch.testing.assert_close(baseline(maps), baseline.linear(4.0 * pooled))


def test_a_trained_head_knows_classes_by_a_single_patch(
    features: FeatureExtractor, squares: ImageData, tmp_path: Path
) -> None:
    labels = [i % 3 for i in range(60)]
    maps = random_maps(1, 60, 256, 3, 3, dtype=torch.float32)
    for index, label in enumerate(labels):
        maps[index, label * 9 : label * 9 + 9, index % 3, index // 3 % 3] += 3
    standardise(features, maps)
    baseline = head.train_head(tiny_context(tmp_path, squares), "head", features, feature_maps(maps, labels), 20, 5e-3)
    assert (baseline(maps).argmax(dim=1) == torch.tensor(labels)).float().mean() > 0.95


def test_cutmix_mixes_patches_and_targets_alike() -> None:
    torch.manual_seed(0)
    rows, target = torch.arange(6.0)[:, None, None].expand(6, 9, 2), torch.eye(6)
    mixed, mixed_target = head._cutmix(rows, target)
    assert (mixed[:, :, 0] == mixed[:, :, 1]).all(), "patches, not single numbers"
    for image in range(6):
        fractions = torch.stack([(mixed[image, :, 0] == other).float().mean() for other in range(6)])
        torch.testing.assert_close(mixed_target[image], fractions)
    assert (mixed_target > 0).sum() > 6, "some were mixed"


@pytest.mark.parametrize(("fraction", "minimum", "expected"), [(0.7, 60, 70), (0.7, 80, 80), (0.5, 200, 100)])
def test_random_patches_are_the_same_of_every_map(fraction: float, minimum: int, expected: int) -> None:
    maps = torch.arange(100.0).view(1, 1, 10, 10).repeat(3, 2, 1, 1)
    chosen = random_patches(maps, fraction, minimum)
    assert chosen.shape == (3, expected, 2)
    assert len(chosen[0, :, 0].unique()) == expected
    assert torch.equal(chosen[0], chosen[2])


def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    mask = head._dropout_mask(torch.zeros(200), 50, 0.2)
    assert set(mask.unique().tolist()) == {0.0, 1.25}
    assert mask.mean().item() == pytest.approx(1, abs=0.02)


def test_soft_labels_are_softened_and_uniform_where_unknown(baseline: Baseline) -> None:
    maps = random_maps(0, 5, 256, 3, 3, dtype=torch.float32)
    soft_labels = compute_soft_labels(baseline, feature_maps(maps, [0] * 5, frozenset({3})), 2, 2.0, 0)
    with torch.no_grad():
        expected = (baseline(maps) / 2.0).softmax(dim=1)
    expected[3] = 1 / 3
    torch.testing.assert_close(soft_labels(torch.tensor([4, 3, 0, 0])), expected[[4, 3, 0, 0]])
    assert soft_labels(torch.tensor([], dtype=torch.long)).shape == (0, 3)


def test_a_baseline_is_saved_and_a_damaged_one_refused(
    baseline: Baseline, features: FeatureExtractor, tmp_path: Path
) -> None:
    assert load_baseline(features, 3, tmp_path) is None
    save_baseline(baseline, tmp_path)
    maps = random_maps(0, 5, 256, 3, 3, dtype=torch.float32)
    loaded = load_baseline(features, 3, tmp_path)
    assert loaded is not None
    assert torch.equal(loaded(maps), baseline(maps))
    header, tensors = read_state(tmp_path / head.FOLDER, "baseline.json")
    tensors.pop("linear.weight")
    header.pop("sha256", None)
    write_state(tmp_path / head.FOLDER, "baseline.json", header, tensors)
    with pytest.raises(CheckpointError):
        load_baseline(features, 3, tmp_path)

"""The head as a max-pooled classifier, its soft labels, and backpropagation through nearest patches."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor, WideHead
from prototree.core.checkpoint import read_state, write_state
from prototree.core.model import nearest_patches
from prototree.data import ImageData
from prototree.errors import CheckpointError
from prototree.training import head
from prototree.training.grow import standardise
from prototree.training.head import (
    Baseline,
    compute_soft_labels,
    load_baseline,
    nearest_with_grad,
    random_patches,
    save_baseline,
)
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


class Head:
    """A head with frozen batch norm that counts the patches that go through it with a gradient."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        self.wide = WideHead(5, 7, 6).to(dtype)
        self.wide.norm.eval()
        self.n_patches = 0

    def __call__(self, maps: Tensor) -> Tensor:
        self.n_patches += torch.is_grad_enabled() * maps.shape[0] * maps.shape[2] * maps.shape[3]
        return torch.sigmoid(self.wide(maps))

    def gradient(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(self.wide.parameters())))


@pytest.mark.parametrize("map_size", [(4, 3), (1, 1), (1, 7)])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_gradient_is_that_of_all_patches(map_size: tuple[int, int], fraction: float) -> None:
    head, maps, anchors = Head(), random_maps(0, 3, 5, *map_size), random_maps(1, 4, 5, 1, 1)
    wanted = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) < fraction
    weight = random_maps(2, 3, 4) * wanted
    nearest, prototypes = nearest_with_grad(head, maps, anchors, wanted if fraction < 1 else None)
    expected = nearest_patches(head(maps), head(anchors))
    torch.testing.assert_close(nearest.distance, expected.distance)
    assert torch.equal(nearest.patch, expected.patch)
    torch.testing.assert_close(prototypes, head(anchors))
    gradients = [head.gradient((weight * result.distance).sum()) for result in (nearest, expected)]
    assert all(gradient.abs().max() > 1e-4 for gradient in gradients[0])
    torch.testing.assert_close(*gradients)


def test_gradcheck() -> None:
    maps, anchors = random_maps(0, 2, 5, 3, 2), random_maps(1, 3, 5, 1, 1)
    weight = random_maps(3, 6, 5).requires_grad_()

    def distances(weight: Tensor) -> Tensor:
        return nearest_with_grad(lambda x: torch.einsum("dc,bchw->bdhw", weight, x), maps, anchors)[0].distance

    assert torch.autograd.gradcheck(distances, (weight,))


def test_only_the_nearest_patches_go_through_the_head_with_a_gradient() -> None:
    head, maps, anchors = Head(), random_maps(0, 3, 5, 9, 9), random_maps(1, 4, 5, 1, 1)
    nearest, _ = nearest_with_grad(head, maps, anchors)
    distinct = sum(len(set(row.tolist())) for row in nearest.patch)
    assert head.n_patches == distinct + len(anchors) < maps.shape[0] * 81


def test_a_patch_that_is_its_own_prototype_has_distance_0_and_a_finite_gradient() -> None:
    head, maps = Head(torch.float32), random_maps(0, 3, 5, 4, 3).float()
    nearest, _ = nearest_with_grad(head, maps, maps[1, :, 2, 1][None, :, None, None])
    assert nearest.patch[1, 0] == 2 * 3 + 1
    assert nearest.distance[1, 0] <= 1e-6
    assert all(gradient.isfinite().all() for gradient in head.gradient(nearest.distance[1, 0]))

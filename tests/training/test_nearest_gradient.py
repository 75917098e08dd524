"""Backpropagating through the nearest patches is backpropagating through all of them."""

import pytest
import torch
from torch import Tensor

from conftest import random_maps
from prototree.backbones.backbone import WideHead
from prototree.core.model import nearest_patches
from prototree.training.nearest_gradient import nearest_with_grad


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

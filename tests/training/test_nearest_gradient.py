"""That following back what decides is following back everything."""

import pytest
import torch
from torch import Tensor

from conftest import random_maps
from prototree.backbones.backbone import WideHead
from prototree.core.patches import nearest_patches
from prototree.training.nearest_gradient import nearest_followed


class Head:
    """A head at rest that counts the patches that go through it with a gradient."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        self.wide = WideHead(5, 7, 6).to(dtype)
        self.wide.norm.eval()
        self.followed = 0

    def __call__(self, maps: Tensor) -> Tensor:
        self.followed += torch.is_grad_enabled() * maps.shape[0] * maps.shape[2] * maps.shape[3]
        return torch.sigmoid(self.wide(maps))

    def gradient(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(self.wide.parameters())))


@pytest.mark.parametrize("map_size", [(4, 3), (1, 1), (1, 7)])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_gradient_is_that_of_all_patches(map_size: tuple[int, int], share: float) -> None:
    head, maps, anchors = Head(), random_maps(0, 3, 5, *map_size), random_maps(1, 4, 5, 1, 1)
    wanted = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) < share
    weight = random_maps(2, 3, 4) * wanted
    found = nearest_followed(head, maps, anchors, wanted if share < 1 else None)
    every = nearest_patches(head(maps), head(anchors))
    torch.testing.assert_close(found.nearest.distance, every.distance)
    assert torch.equal(found.nearest.patch, every.patch)
    torch.testing.assert_close(found.prototypes, head(anchors))
    few, all_of_them = (head.gradient((weight * one.distance).sum()) for one in (found.nearest, every))
    assert all(one.abs().max() > 1e-4 for one in few)
    torch.testing.assert_close(few, all_of_them)


def test_only_the_nearest_patches_go_through_the_head_with_a_gradient() -> None:
    head, maps, anchors = Head(), random_maps(0, 3, 5, 9, 9), random_maps(1, 4, 5, 1, 1)
    found = nearest_followed(head, maps, anchors)
    distinct = sum(len(set(row.tolist())) for row in found.nearest.patch)
    assert head.followed == distinct + len(anchors) < maps.shape[0] * 81


def test_no_photos_leave_a_graph_that_reaches_the_head() -> None:
    """A process that has no photo of a batch takes part all the same."""
    head, anchors = Head(), random_maps(1, 4, 5, 1, 1)
    found = nearest_followed(head, random_maps(0, 3, 5, 4, 3)[:0], anchors)
    assert found.nearest.distance.shape == (0, 4)
    assert all((one == 0).all() for one in head.gradient(found.nearest.distance.sum()))


def test_a_patch_that_is_its_own_prototype_is_at_distance_zero_and_pulls_nowhere() -> None:
    head, maps = Head(torch.float32), random_maps(0, 3, 5, 4, 3).float()
    anchors = maps[1, :, 2, 1][None, :, None, None]
    found = nearest_followed(head, maps, anchors)
    assert found.nearest.patch[1, 0] == 2 * 3 + 1
    assert found.nearest.distance[1, 0] <= 1e-6
    gradient = head.gradient(found.nearest.distance[1, 0])
    assert all(one.isfinite().all() for one in gradient)

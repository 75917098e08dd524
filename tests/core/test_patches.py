"""Contract 1 (distances are exact where it matters) and the distance part of contract 4."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from conftest import random_maps
from prototree.core.nodes import PAPER
from prototree.core.patches import NEAR, distance_map, extract_patches, nearest_patches, pair_distances, rough_nearest
from prototree.errors import ShapeError

FAR_UNITS = 8  # of rounding; the largest error ever measured was under 3
SHAPES = [((4, 4), (1, 1)), ((3, 5), (2, 2)), ((5, 2), (3, 1)), ((2, 3), (2, 3)), ((1, 1), (1, 1))]


@pytest.mark.parametrize(("map_size", "size"), SHAPES)
def test_distances_and_patches_agree_with_the_oracle(map_size: tuple[int, int], size: tuple[int, int]) -> None:
    z, p = random_maps(0, 3, 6, *map_size), random_maps(1, 7, 6, *size)
    found = nearest_patches(z, p)
    for b in range(3):
        for n in range(7):
            distance, patch = oracle.nearest(z[b], p[n])
            assert found.distance[b, n] == pytest.approx(float(distance), abs=1e-12)
            assert found.patch[b, n] == patch


@pytest.mark.parametrize(("map_size", "size"), SHAPES)
def test_gradients_agree_with_the_oracle(map_size: tuple[int, int], size: tuple[int, int]) -> None:
    z, p = random_maps(0, 3, 6, *map_size).requires_grad_(), random_maps(1, 7, 6, *size).requires_grad_()
    weights = random_maps(2, 3, 7)
    fast = torch.autograd.grad((weights * nearest_patches(z, p).distance).sum(), (z, p))
    slow_loss = sum(weights[b, n] * oracle.nearest(z[b], p[n])[0] for b in range(3) for n in range(7))
    slow = torch.autograd.grad(slow_loss, (z, p))
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 0.05])  # far pairs go through the matrix product, near ones do not
def test_gradcheck(scale: float) -> None:
    z, p = scale * random_maps(3, 2, 4, 3, 3), scale * random_maps(4, 5, 4, 1, 1)
    distance = nearest_patches(z, p).distance
    assert ((distance < NEAR) if scale < 1 else (distance > NEAR / 4)).all()
    assert torch.autograd.gradcheck(lambda *x: nearest_patches(*x).distance, (z.requires_grad_(), p.requires_grad_()))


def test_what_is_found_by_matrix_product_alone_is_what_is_found_exactly() -> None:
    z, p = random_maps(0, 3, 6, 4, 5), random_maps(1, 7, 6, 1, 1)
    rough, exact = rough_nearest(z, p.requires_grad_()), nearest_patches(z, p)
    torch.testing.assert_close(rough.distance, exact.distance)
    assert torch.equal(rough.patch, exact.patch)
    assert not rough.distance.requires_grad
    near = rough_nearest(z.float(), z[1, :, 2, 3].float()[None, :, None, None])
    assert near.patch[1, 0] == 2 * 5 + 3
    assert near.distance[1, 0] < 1e-2, "a few times the rounding of squares"


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_distances_of_chosen_pairs_and_their_gradients(scale: float) -> None:
    z, p = (scale * random_maps(seed, count, 6) for seed, count in ((5, 4), (6, 3)))
    row, node = torch.tensor([0, 0, 3, 2]), torch.tensor([1, 2, 1, 0])
    inputs = z.requires_grad_(), p.requires_grad_()
    torch.testing.assert_close(pair_distances(*inputs, row, node), (z[row] - p[node]).norm(dim=1))
    assert torch.autograd.gradcheck(lambda *x: pair_distances(*x, row, node), inputs)
    nothing = pair_distances(*inputs, row[:0], node[:0])
    assert nothing.shape == (0,)
    assert all((one == 0).all() for one in torch.autograd.grad(nothing.sum(), inputs))


@pytest.mark.parametrize("distance", [0.0, 5e-4, 0.05, 0.399])
def test_chosen_pairs_that_are_near_are_exact_too(distance: float) -> None:
    z = random_maps(0, 8, 256).float()
    step = random_maps(1, 8, 256).float() - 0.5
    p = z + distance * step / step.norm(dim=1, keepdim=True)
    inputs, each = (z.requires_grad_(), p.requires_grad_()), torch.arange(8)
    found, exact = pair_distances(*inputs, each, each), (z.double() - p.double()).norm(dim=1)
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-6)
    found.sum().backward()
    direction = (p - z).double() / exact.clamp_min(1e-12)[:, None]
    torch.testing.assert_close(p.grad.double(), direction.detach(), rtol=0, atol=1e-3)
    torch.testing.assert_close(z.grad.double(), -direction.detach(), rtol=0, atol=1e-3)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1e-4, 0.02, 0.3, 3.0]))
@settings(deadline=None)
def test_float32_agrees_with_float64_at_every_scale(seed: int, height: int, width: int, spread: float) -> None:
    z = 0.5 + spread * (random_maps(seed, 2, 64, height, width) - 0.5)
    p = 0.5 + spread * (random_maps(seed + 1, 5, 64, 1, 1) - 0.5)
    z, p = z.float(), p.float()
    truth = torch.cdist(extract_patches(z.double(), (1, 1)), p.double().flatten(1).expand(2, -1, -1)).amin(dim=1)
    torch.testing.assert_close(nearest_patches(z, p).distance.double(), truth, atol=1e-7, rtol=1e-4)


def test_an_identical_patch_is_at_distance_zero_and_similarity_one() -> None:
    z = random_maps(0, 4, 256, 7, 7, dtype=torch.float32)
    p = z[2, :, 3, 4][None, :, None, None]
    found = nearest_patches(z, p)
    assert found.distance[2, 0] <= 1e-6
    assert math.exp(-found.distance[2, 0]) >= 1 - 1e-6
    assert found.patch[2, 0] == 3 * 7 + 4
    assert PAPER.similarity(distance_map(z, p), torch.ones(()))[2, 0, 3, 4] >= 1 - 1e-6


def test_the_nearest_of_almost_equal_patches_is_found() -> None:
    # Closer together than the matrix product can tell apart.
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(256, generator=generator)
    z = base[:, None, None] + 1e-4 * torch.rand(256, 7, 7, generator=generator)
    for patch in range(49):
        p = z[:, patch // 7, patch % 7][None, :, None, None]
        found = nearest_patches(z[None], p)
        assert found.patch.item() == patch
        assert found.distance.item() == 0


def test_a_tie_goes_to_the_first_patch() -> None:
    z = torch.full((1, 16, 3, 3), 0.25)
    assert nearest_patches(z, torch.full((1, 16, 1, 1), 0.26)).patch.item() == 0


@pytest.mark.parametrize("distance", [5e-4, 2e-3, 0.05, 0.399, 0.401, 2.0])
def test_small_distances_and_their_gradients_are_right(distance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.rand(8, 256, 7, 7, generator=generator, dtype=torch.float64)
    step = torch.randn(8, 256, generator=generator, dtype=torch.float64)
    p = z[:, :, 2, 2] + distance * step / step.norm(dim=1, keepdim=True)
    z32, p32 = z.float().requires_grad_(), p.float()[:, :, None, None].requires_grad_()
    found = nearest_patches(z32, p32)
    own = found.distance.diagonal()
    exact = (z32[:, :, 2, 2].double() - p32[:, :, 0, 0].double()).norm(dim=1)
    torch.testing.assert_close(own.double(), exact, rtol=1e-3, atol=0)
    own.sum().backward()
    torch.testing.assert_close(p32.grad.flatten(1).norm(dim=1), torch.ones(8), rtol=1e-3, atol=0)
    direction = (p32[:, :, 0, 0].double() - z32[:, :, 2, 2].double()) / exact[:, None]
    torch.testing.assert_close(p32.grad.flatten(1).double(), direction, rtol=0, atol=1e-3)
    torch.testing.assert_close(z32.grad[:, :, 2, 2].double(), -direction, rtol=0, atol=1e-3)


@pytest.mark.parametrize("depth", [16, 256, 1024])
@pytest.mark.parametrize("distance", [1.001 * NEAR, 0.7, 2.0])
@pytest.mark.parametrize("lowest", [0.0, 0.8])  # patches all over the cube, and in a corner of it
def test_beyond_the_threshold_the_error_is_that_of_rounding(depth: int, distance: float, lowest: float) -> None:
    z = lowest + (1 - lowest) * random_maps(0, 300, depth)
    step = random_maps(1, 300, depth) - 0.5
    p = z + distance * step / step.norm(dim=1, keepdim=True)
    z32, p32 = z.float()[:, :, None, None], p.float()[:, :, None, None].requires_grad_()
    found = torch.stack([nearest_patches(*(x[i : i + 1] for x in (z32, p32))).distance[0, 0] for i in range(300)])
    found, p32 = found.detach(), p32.detach()
    exact = (z32.double() - p32.double()).flatten(1).norm(dim=1)
    unit = torch.finfo(torch.float32).eps * (z.square().sum(1) + p.square().sum(1)) / (2 * distance)
    error = (found.double() - exact).abs()
    assert (error <= FAR_UNITS * unit).all()
    if (depth, distance) == (256, 1.001 * NEAR):
        assert error.max() <= 2.5e-4
        assert error.max() > 1e-5, "so the fast form is in use"


def test_the_gradient_at_distance_zero_is_zero() -> None:
    z = random_maps(0, 1, 8, 2, 2, dtype=torch.float32).requires_grad_()
    p = z.detach()[:, :, :1, :1].clone().requires_grad_()
    nearest_patches(z, p).distance.sum().backward()
    assert (z.grad == 0).all()
    assert (p.grad == 0).all()


@pytest.mark.parametrize(("map_size", "size"), SHAPES)
def test_similarity_map_is_equation_seven(map_size: tuple[int, int], size: tuple[int, int]) -> None:
    z, p = random_maps(5, 2, 3, *map_size), random_maps(6, 4, 3, *size)
    found = PAPER.similarity(distance_map(z, p), torch.ones(()))
    rows, columns = map_size[0] - size[0] + 1, map_size[1] - size[1] + 1
    assert found.shape == (2, 4, rows, columns)
    for b in range(2):
        for n in range(4):
            expected = [math.exp(-float((patch - p[n]).norm())) for patch in oracle.patches(z[b], size)]
            torch.testing.assert_close(found[b, n].flatten(), torch.tensor(expected, dtype=z.dtype))


def test_prototypes_larger_than_the_map_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"no larger than the feature map \(2, 2\), got \(3, 1\)"):
        nearest_patches(torch.rand(1, 4, 2, 2), torch.rand(2, 4, 3, 1))


def test_without_gradients_far_distances_are_exact_too() -> None:
    z, p = random_maps(5, 4, 256, 7, 7).float(), random_maps(6, 20, 256, 1, 1).float()
    truth = nearest_patches(z.double(), p.double()).distance
    assert truth.min() > NEAR
    torch.testing.assert_close(nearest_patches(z, p).distance.double(), truth, atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [(1, 1), (2, 3)])
def test_written_down_by_torch_export_the_distances_are_the_same(size: tuple[int, int]) -> None:
    class Nearest(torch.nn.Module):
        def forward(self, z: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = nearest_patches(z, p)
            return found.distance, found.patch

    z, p = random_maps(7, 3, 64, 4, 5).float(), random_maps(8, 6, 64, *size).float()
    p[0] = z[1, :, : size[0], : size[1]]  # at distance 0 of one of them
    shapes = ({0: torch.export.Dim("b")}, {})
    program = torch.export.export(Nearest(), (z, p), dynamic_shapes=shapes).module()
    for n in (1, 3):
        distance, patch = program(z[:n], p)
        found = nearest_patches(z[:n], p)
        torch.testing.assert_close(distance, found.distance, atol=1e-6, rtol=0)
        assert torch.equal(patch, found.patch)

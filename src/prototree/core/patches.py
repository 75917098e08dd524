"""Patches of the feature map and their distances to the prototypes (Eq. 1, 7).

Notation used for tensor shapes: B batch, D prototype depth, H W feature map, N prototypes, P patches in a map,
E = D·H₁·W₁ numbers in a patch.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prototree.errors import ShapeError

# ‖z‖² − 2z·p + ‖p‖² cancels when z is near p: in float32 it reads 0.002 for identical 256-d patches. While learning,
# patches below this distance are subtracted instead. Above it the error is a few units of rounding of ‖z‖² + ‖p‖²,
# divided by 2d: for 256 numbers from 0 to 1 about 3e-5 at a distance of 0.4, at most 2.5e-4, and less farther away.
# Without gradients all patches are subtracted.
NEAR = 0.4
# The fast form may rank patches wrongly that differ by its rounding error; all within this many units are compared.
_ROUNDING_UNITS = 32
# While `torch.export` writes down a tree, no step may depend on what an image shows.
is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
# In the gradient, Σ w z − Σ w p with w = 1/d, the error grows with 1/d, not its square: with all pairs 0.2 apart the
# gradient differed by 1.1e-4 from the subtracted one. Nearer pairs than this are subtracted there too.
_NEAR_BACKWARD = 0.05
_CHUNK = 1024  # pairs of patches subtracted at a time: they stay in the processor's cache, however many there are


@dataclass(frozen=True)
class NearestPatches:
    """Per image and prototype: the distance to the nearest patch, and which patch that is (row-major)."""

    distance: Float[Tensor, "B N"]
    patch: Int[Tensor, "B N"]


def extract_patches(feature_map: Float[Tensor, "B D H W"], size: tuple[int, int]) -> Float[Tensor, "B P E"]:
    """All H₁×W₁ patches of a feature map, row by row, as vectors (§3)."""
    height, width = size
    if not (1 <= height <= feature_map.shape[2] and 1 <= width <= feature_map.shape[3]):
        raise ShapeError(
            f"expected prototypes no larger than the feature map {tuple(feature_map.shape[2:])}, got {size}; "
            "use smaller prototypes, larger images or a finer feature level"
        )
    if size == (1, 1):
        return feature_map.flatten(2).transpose(1, 2)
    windows = feature_map.unfold(2, height, 1).unfold(3, width, 1)  # B D H' W' H₁ W₁
    return windows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def nearest_patches(feature_map: Float[Tensor, "B D H W"], prototypes: Float[Tensor, "N D H1 W1"]) -> NearestPatches:
    """Eq. 1: the patch of each image that is nearest to each prototype, and its distance.

    Exact where it matters: a prototype that is a patch of the image has distance 0, and the gradient of a small
    distance is a unit vector. The gradient of a distance of 0 is 0.
    """
    patches = extract_patches(feature_map, (prototypes.shape[2], prototypes.shape[3]))
    if is_exporting():
        return _in_double(patches, prototypes.flatten(1))
    learning = torch.is_grad_enabled() and (patches.requires_grad or prototypes.requires_grad)
    below = NEAR if learning else math.inf
    return NearestPatches(*_NearestPatch.apply(patches, prototypes.flatten(1), below))  # type: ignore[no-untyped-call]


@torch.no_grad()
def rough_nearest(feature_map: Float[Tensor, "B D H W"], prototypes: Float[Tensor, "N D 1 1"]) -> NearestPatches:
    """The same by matrix product alone: exact enough to choose by, in a fraction of the time, and without gradient."""
    patches, chosen = extract_patches(feature_map, (1, 1)), prototypes.flatten(1)
    lowest, index = _compared(patches.flatten(0, 1), chosen).view(*patches.shape[:2], len(chosen)).min(dim=1)
    return NearestPatches((lowest + chosen.square().sum(1)).clamp_min(0).sqrt(), index)


def pair_distances(
    patches: Float[Tensor, "R E"],
    prototypes: Float[Tensor, "N E"],
    row: Int[Tensor, " pairs"],
    node: Int[Tensor, " pairs"],
) -> Float[Tensor, " pairs"]:
    """How far patch `row[i]` is from prototype `node[i]`, as exact as in `nearest_patches`; no pair comes twice."""
    return _PairDistance.apply(patches, prototypes, row, node)  # type: ignore[no-any-return, no-untyped-call]


def distance_map(
    feature_map: Float[Tensor, "B D H W"], prototypes: Float[Tensor, "N D H1 W1"]
) -> Float[Tensor, "B N H2 W2"]:
    """The distance of every patch to every prototype, by subtraction throughout; its similarity is the map of Eq. 7."""
    size = (prototypes.shape[2], prototypes.shape[3])
    patches = extract_patches(feature_map, size)
    exact = "donot_use_mm_for_euclid_dist"
    distance = torch.cdist(patches, prototypes.flatten(1).expand(len(patches), -1, -1), compute_mode=exact)
    rows, columns = feature_map.shape[2] - size[0] + 1, feature_map.shape[3] - size[1] + 1
    return distance.transpose(1, 2).reshape(*distance.shape[0::2], rows, columns)


def _in_double(patches: Float[Tensor, "B P E"], prototypes: Float[Tensor, "N E"]) -> NearestPatches:
    """The same where no pair may be singled out: in double precision the fast form is exact enough for all of them."""
    z, p = patches.double(), prototypes.double()
    squared = z.square().sum(2, keepdim=True) - 2 * (z @ p.T) + p.square().sum(1)
    lowest, index = squared.min(dim=1)
    return NearestPatches(lowest.clamp_min(0).sqrt().to(patches.dtype), index)


class _NearestPatch(torch.autograd.Function):
    """Finds by matrix product, measures by subtraction; the gradient flows to the nearest patch alone."""

    @staticmethod
    def forward(
        ctx: Any, patches: Float[Tensor, "B P E"], prototypes: Float[Tensor, "N E"], below: float
    ) -> tuple[Float[Tensor, "B N"], Int[Tensor, "B N"]]:
        n_images, n_patches, _ = patches.shape
        patches, prototypes = patches.contiguous(), prototypes.contiguous()
        flat, prototype_norms = patches.flatten(0, 1), prototypes.square().sum(1)
        partial = _compared(flat, prototypes).view(n_images, n_patches, len(prototypes))
        lowest, index = partial.min(dim=1)
        squared = lowest + prototype_norms

        distance = squared.clamp_min(0).sqrt()
        image, node = torch.nonzero(squared < below**2, as_tuple=True)
        if len(image):
            distance[image, node] = _apart(flat, prototypes, image * n_patches + index[image, node], node)
            slack = _ROUNDING_UNITS * torch.finfo(partial.dtype).eps * (flat.square().sum(1).max() + prototype_norms)
            reach = lowest + slack
            # Hardly ever does a second patch come so near that rounding may have hidden which one is nearest.
            second = partial.scatter_(1, index[:, None], torch.inf).amin(dim=1)
            image, node = torch.nonzero((squared < below**2) & (second <= reach), as_tuple=True)
            contender = partial[image, :, node] <= reach[image, node][:, None]  # doubtful pairs × P
            contender[torch.arange(len(image), device=image.device), index[image, node]] = True
            distance[image, node], index[image, node] = _measure(patches, prototypes, image, node, contender)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(patches, prototypes, distance, index)
        return distance, index

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Float[Tensor, "B P E"] | None, Float[Tensor, "N E"] | None, None]:
        patches, prototypes, distance, index = ctx.saved_tensors
        n_images, n_patches, _ = patches.shape
        row = index + n_patches * torch.arange(n_images, device=index.device)[:, None]
        node = torch.arange(len(prototypes), device=index.device).expand_as(index)
        row, node, *values = (of.flatten() for of in (row, node, distance, gradients[0]))
        to_patches, to_prototypes = _gradients(patches.flatten(0, 1), prototypes, row, node, *values)
        return to_patches.view_as(patches), to_prototypes, None


class _PairDistance(torch.autograd.Function):
    """The same for pairs that were found before."""

    @staticmethod
    def forward(
        ctx: Any,
        patches: Float[Tensor, "R E"],
        prototypes: Float[Tensor, "N E"],
        row: Int[Tensor, " pairs"],
        node: Int[Tensor, " pairs"],
    ) -> Float[Tensor, " pairs"]:
        squared = _compared(patches, prototypes)[row, node] + prototypes.square().sum(1)[node]
        distance = squared.clamp_min(0).sqrt()
        near = torch.nonzero(squared < NEAR**2)[:, 0]
        distance[near] = _apart(patches, prototypes, row[near], node[near])
        ctx.save_for_backward(patches, prototypes, row, node, distance)
        return distance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Float[Tensor, "R E"], Float[Tensor, "N E"], None, None]:
        patches, prototypes, row, node, distance = ctx.saved_tensors
        return *_gradients(patches, prototypes, row, node, distance, gradients[0]), None, None


def _gradients(
    patches: Float[Tensor, "R E"],
    prototypes: Float[Tensor, "N E"],
    row: Int[Tensor, " pairs"],
    node: Int[Tensor, " pairs"],
    distance: Float[Tensor, " pairs"],
    gradient: Float[Tensor, " pairs"],
) -> tuple[Float[Tensor, "R E"], Float[Tensor, "N E"]]:
    """What the distances of pairs pass on to their patches and prototypes: d‖z − p‖ = (z − p) / ‖z − p‖."""
    weight = torch.where(distance > 0, gradient / distance, 0)
    near = torch.nonzero(distance < _NEAR_BACKWARD)[:, 0]
    near_weight = weight[near]
    weight[near] = 0
    # Σ_n w (z − p_n) and Σ_b w (p − z_b) as matrix products over a map that is 0 but at the pairs.
    spread = weight.new_zeros(len(patches), len(prototypes))
    spread[row, node] = weight
    to_patches = torch.addmm(spread.sum(1)[:, None] * patches, spread, prototypes, alpha=-1)
    to_prototypes = torch.addmm(spread.sum(0)[:, None] * prototypes, spread.T, patches, alpha=-1)
    # Near pairs again by subtraction: w is large where z − p is small.
    for r, n, w in zip(row[near].split(_CHUNK), node[near].split(_CHUNK), near_weight.split(_CHUNK), strict=True):
        pull = w[:, None] * (patches[r] - prototypes[n])
        to_patches.index_add_(0, r, pull)
        to_prototypes.index_add_(0, n, pull, alpha=-1)
    return to_patches, to_prototypes


def _compared(patches: Float[Tensor, "R E"], prototypes: Float[Tensor, "N E"]) -> Float[Tensor, "R N"]:
    """‖z‖² − 2z·p; ‖p‖² does not change which patch is nearest and is added to the winners only."""
    return torch.addmm(patches.square().sum(1)[:, None], patches, prototypes.T, alpha=-2)


def _apart(
    patches: Float[Tensor, "R E"],
    prototypes: Float[Tensor, "N E"],
    row: Int[Tensor, " pairs"],
    node: Int[Tensor, " pairs"],
) -> Float[Tensor, " pairs"]:
    """The distance of each pair of a patch and a prototype, by subtraction."""
    pairs = zip(row.split(_CHUNK), node.split(_CHUNK), strict=True)
    parts = [torch.linalg.vector_norm(patches[r].sub_(prototypes[n]), dim=1) for r, n in pairs]
    return torch.cat(parts) if parts else patches.new_zeros(0)


def _measure(
    patches: Float[Tensor, "B P E"],
    prototypes: Float[Tensor, "N E"],
    image: Int[Tensor, " pairs"],
    node: Int[Tensor, " pairs"],
    contender: Tensor,
) -> tuple[Float[Tensor, " pairs"], Int[Tensor, " pairs"]]:
    """For each (image, node) the smallest exact distance among its contending patches; the first one on a tie."""
    pair, patch = torch.nonzero(contender, as_tuple=True)
    exact = torch.full(contender.shape, torch.inf, dtype=patches.dtype, device=patches.device)
    row = image[pair] * patches.shape[1] + patch
    exact[pair, patch] = _apart(patches.flatten(0, 1), prototypes, row, node[pair])
    distance = exact.amin(dim=1)
    return distance, (exact == distance[:, None]).int().argmax(dim=1)

"""Backpropagate only through each prototype's nearest patch.

Every patch goes through the head by itself, and only a prototype's nearest patch passes a gradient on. So all patches
go through it once without one; then the few that were found, six of forty in a trained tree, go through it again. That
gives the gradient that following all of them back would give, for a fraction of the work. It needs a head whose batch
norm is frozen, or the other patches would have a part in it.

Notation used for tensor shapes: B images, P prototypes, C channels of the backbone's map, D prototype dimension,
H W feature map.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prototree.core.model import NearestPatches, nearest_patches, pair_distances

Encode = Callable[[Float[Tensor, "B C H W"]], Float[Tensor, "B D H W"]]


def nearest_with_grad(
    encode: Encode,
    maps: Float[Tensor, "B C H W"],
    anchors: Float[Tensor, "P C 1 1"],
    wanted: Bool[Tensor, "B P"] | None = None,
) -> tuple[NearestPatches, Float[Tensor, "P D 1 1"]]:
    """Return the nearest patch of each image to each prototype, and the prototypes, which are the encoded anchors.

    Distances have a gradient where they are wanted; None: all of them.
    """
    rows, sources, n_patches = flatten_patches(maps), anchors.flatten(1), maps.shape[2] * maps.shape[3]
    with torch.no_grad():
        z, prototypes = _encode_rows(encode, rows, sources)
        whole = z.view(len(maps), n_patches, z.shape[1]).transpose(1, 2)[:, :, None]
        distance, patch = (
            (nearest := nearest_patches(whole, prototypes[:, :, None, None], exact=False)).distance,
            nearest.patch,
        )
    wanted = torch.ones_like(distance, dtype=torch.bool) if wanted is None else wanted
    image, prototype = torch.nonzero(wanted, as_tuple=True)
    chosen, index = (image * n_patches + patch[image, prototype]).unique(return_inverse=True)
    # Images and sources together, so that a patch that is its own prototype is at a distance of 0.
    z, prototypes = _encode_rows(encode, rows[chosen], sources)
    with torch.autocast(maps.device.type, enabled=False):  # distances stay in full precision
        z, prototypes = z.to(anchors.dtype), prototypes.to(anchors.dtype)
        dists = pair_distances(z, prototypes, index, prototype)
    distance = distance.to(dists.dtype).index_put((image, prototype), dists)
    return NearestPatches(distance, patch), prototypes[:, :, None, None]


def flatten_patches(maps: Float[Tensor, "B C H W"]) -> Float[Tensor, "rows C"]:
    """List all patches of all maps, one below the other."""
    return maps.flatten(2).transpose(1, 2).flatten(0, 1)


def _encode_rows(encode: Encode, *rows: Float[Tensor, "_ C"]) -> tuple[Float[Tensor, "_ D"], ...]:
    z = encode(torch.cat(rows).T[None, :, None])[0, :, 0].T
    return z.split([len(part) for part in rows])  # type: ignore[no-any-return]

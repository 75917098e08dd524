"""Only what decides is followed back: of all patches of a photo, those that are nearest to a prototype.

Every patch goes through the head by itself, and only a prototype's nearest patch passes a gradient on. So all patches
go through it once without one; then the few that were found, six of forty in a trained tree, go through it again.
That gives the gradient that following all of them back would give, for a fraction of the work. It needs a head whose
batch norm is at rest, or the others would have a part in it.

Notation used for tensor shapes: B photos, P prototypes, C channels of the backbone's map, D prototype depth, H W map.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prototree.core.patches import NearestPatches, pair_distances, rough_nearest

Encode = Callable[[Float[Tensor, "B C H W"]], Float[Tensor, "B D H W"]]


@dataclass(frozen=True)
class Followed:
    """The nearest patches of some photos, and the prototypes that they are nearest to."""

    nearest: NearestPatches
    prototypes: Float[Tensor, "P D 1 1"]


def nearest_followed(
    encode: Encode,
    maps: Float[Tensor, "B C H W"],
    anchors: Float[Tensor, "P C 1 1"],
    wanted: Bool[Tensor, "B P"] | None = None,
) -> Followed:
    """How far the patch of each photo that is nearest to each prototype is from it; with a gradient, if it is wanted.

    `anchors` are the patches that the prototypes are. None: all are wanted.
    """
    rows, sources, n_patches = patch_rows(maps), anchors.flatten(1), maps.shape[2] * maps.shape[3]
    with torch.no_grad():
        z, prototypes = _encoded(encode, rows, sources)
        whole = z.view(len(maps), n_patches, z.shape[1]).transpose(1, 2)[:, :, None]
        found = rough_nearest(whole, prototypes[:, :, None, None])
        distance, patch = found.distance, found.patch
    wanted = torch.ones_like(distance, dtype=torch.bool) if wanted is None else wanted
    photo, prototype = torch.nonzero(wanted, as_tuple=True)
    chosen, place = (photo * n_patches + patch[photo, prototype]).unique(return_inverse=True)
    # Photos and sources together, so that a patch that is its own prototype is at a distance of 0.
    z, prototypes = _encoded(encode, rows[chosen], sources)
    with torch.autocast(maps.device.type, enabled=False):  # distances stay in full precision
        z, prototypes = z.to(anchors.dtype), prototypes.to(anchors.dtype)
        apart = pair_distances(z, prototypes, place, prototype)
    distance = distance.to(apart.dtype).index_put((photo, prototype), apart)
    return Followed(NearestPatches(distance, patch), prototypes[:, :, None, None])


def patch_rows(maps: Float[Tensor, "B C H W"]) -> Float[Tensor, "rows C"]:
    """All patches of all maps, one below the other."""
    return maps.flatten(2).transpose(1, 2).flatten(0, 1)


def _encoded(encode: Encode, *rows: Float[Tensor, "_ C"]) -> tuple[Float[Tensor, "_ D"], ...]:
    """Rows of patches through the head, together."""
    z = encode(torch.cat(rows).T[None, :, None])[0, :, 0].T
    return z.split([len(some) for some in rows])  # type: ignore[no-any-return]

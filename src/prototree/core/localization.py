"""Where between the cells of a map a prototype matches best: the middle of the peak around its nearest patch.

A cell of the last map is a ninth or a seventh of the image wide, and its neighbours, which saw much of the same, are
often nearly as near. The nearest cell alone is therefore a rough answer to where the match is. The middle of the peak,
each patch around the nearest one weighted by how near it is, is a finer one, from the same numbers.

Notation used for tensor shapes: n maps.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prototree.backbones.geometry import Box, PatchGrid

SHOWN_SHARE = 1 / 7  # of the input's side: the square that is shown around the middle of a match
RADIUS_SHARE = 1 / 4  # of a map: patches up to this far from the nearest one are looked at, neighbours always
FALL = 0.2  # of the radius: a patch that is farther by this counts e times less


def peak_places(
    distance: Float[Tensor, "n rows columns"], patch: Int[Tensor, " n"], rows_per_crop: int | None = None
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Row and column, no whole numbers, of the middle of the peak around the nearest patch of each map.

    Distances are in units of the radius. A patch counts by its own upper left cell, as everywhere. Where the network
    looks more than once, each look has `rows_per_crop` of the rows, and only patches of the same look are neighbours.
    """
    rows, columns = distance.shape[1:]
    rows_per_crop = rows_per_crop or rows
    down = torch.arange(rows, device=distance.device, dtype=distance.dtype)
    across = torch.arange(columns, device=distance.device, dtype=distance.dtype)
    row, column = (patch // columns)[:, None], (patch % columns)[:, None]
    radii = [max(1, int(RADIUS_SHARE * count)) for count in (rows_per_crop, columns)]
    beside = ((down - row).abs() <= radii[0]) & (down // rows_per_crop == row // rows_per_crop)
    near = beside[:, :, None] & ((across - column).abs() <= radii[1])[:, None, :]
    weight = (-distance / FALL).masked_fill(~near, -torch.inf).flatten(1).softmax(dim=1).view_as(distance)
    return (weight.sum(dim=2) * down).sum(dim=1), (weight.sum(dim=1) * across).sum(dim=1)


def peak_box(grid: PatchGrid, row: float, column: float) -> Box:
    """The square that is shown around such a place, in pixels of the input and as far as it lies in it.

    It is never smaller than the patch.
    """
    patch = grid.box(row, column)
    side = max(SHOWN_SHARE * grid.side, patch.width, patch.height)
    return patch.square(side).clip((grid.side, grid.side))


def peak_squares(grid: PatchGrid, row: Float[Tensor, " n"], column: Float[Tensor, " n"]) -> Float[Tensor, "n 4"]:
    """The same of many places at once: left, top, right, bottom."""
    crops = grid.extents or (Box.whole((grid.side, grid.side)),)
    extents = torch.tensor([one.edges for one in crops], dtype=row.dtype, device=row.device)
    look = (row // grid.rows_per_crop).long()
    corner, far_corner = extents[look].split(2, dim=1)
    cell = (far_corner - corner) / row.new_tensor([grid.columns, grid.rows])
    place = torch.stack([column, row - look * grid.rows_per_crop], dim=1)
    size = cell * row.new_tensor([grid.width, grid.height])
    middle = corner + cell * place + size / 2
    half = size.amax(dim=1, keepdim=True).clamp_min(SHOWN_SHARE * grid.side) / 2
    return torch.cat([middle - half, middle + half], dim=1).clamp(0, grid.side)

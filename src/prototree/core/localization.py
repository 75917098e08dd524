"""Localization: where between the cells of a map a prototype matches, as the middle of the peak of its nearest patch.

A cell is a seventh of the image wide, and its neighbours are often nearly as near. So each patch around the nearest one
is weighted by how near it is. Notation used for tensor shapes: n maps.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prototree.backbones.geometry import Box, PatchGrid

DISPLAY_FRACTION = 1 / 7  # of the input's side: the square that is displayed around the middle of a match
NEIGHBOUR_FRACTION = 1 / 4  # of a map: patches up to this far from the nearest one count, neighbours always
FALL = 0.2  # of the radius: a patch that is farther by this counts e times less


def peak_places(
    distance: Float[Tensor, "n rows columns"], patch: Int[Tensor, " n"], rows_per_crop: int | None = None
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Row and column, no whole numbers, of the middle of the peak around the nearest patch of each map.

    Distances are in units of the radius. A crop has `rows_per_crop` of the rows; neighbours are of the same crop.
    """
    rows, columns = distance.shape[1:]
    rows_per_crop = rows_per_crop or rows
    down = torch.arange(rows, device=distance.device, dtype=distance.dtype)
    across = torch.arange(columns, device=distance.device, dtype=distance.dtype)
    row, column = (patch // columns)[:, None], (patch % columns)[:, None]
    radii = [max(1, int(NEIGHBOUR_FRACTION * count)) for count in (rows_per_crop, columns)]
    is_near_row = ((down - row).abs() <= radii[0]) & (down // rows_per_crop == row // rows_per_crop)
    near = is_near_row[:, :, None] & ((across - column).abs() <= radii[1])[:, None, :]
    weight = (-distance / FALL).masked_fill(~near, -torch.inf).flatten(1).softmax(dim=1).view_as(distance)
    return (weight.sum(dim=2) * down).sum(dim=1), (weight.sum(dim=1) * across).sum(dim=1)


def peak_box(grid: PatchGrid, row: float, column: float) -> Box:
    """The displayed square around a peak, no smaller than a patch, in pixels of the input and clipped to it."""
    patch = grid.box(row, column)
    side = max(DISPLAY_FRACTION * grid.side, patch.width, patch.height)
    return patch.square(side).clip((grid.side, grid.side))


def peak_squares(grid: PatchGrid, row: Float[Tensor, " n"], column: Float[Tensor, " n"]) -> Float[Tensor, "n 4"]:
    """`peak_box` of many peaks at once: left, top, right, bottom."""
    boxes = grid.extents or (Box.whole((grid.side, grid.side)),)
    extents = row.new_tensor([box.edges for box in boxes])
    crop = (row // grid.rows_per_crop).long()
    corner, far_corner = extents[crop].split(2, dim=1)
    cell = (far_corner - corner) / row.new_tensor([grid.columns, grid.rows])
    offset = torch.stack([column, row - crop * grid.rows_per_crop], dim=1)
    size = cell * row.new_tensor([grid.width, grid.height])
    middle = corner + cell * offset + size / 2
    half = size.amax(dim=1, keepdim=True).clamp_min(DISPLAY_FRACTION * grid.side) / 2
    return torch.cat([middle - half, middle + half], dim=1).clamp(0, grid.side)

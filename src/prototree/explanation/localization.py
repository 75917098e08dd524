"""Localise a match: boxes and heat maps, from the network's input back to the pixels of the original image (§5.2).

The network sees a square that stands for a rectangle of the image, perhaps mirrored; what is found in the input is
brought back by the inverse of exactly that. Notation used for tensor shapes: B batch, n matches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor
from torch.nn.functional import grid_sample

from prototree.backbones.geometry import Box, Preprocessing, Size
from prototree.core.localization import peak_box, peak_places
from prototree.core.model import ProtoTree
from prototree.data.crops import View, to_image
from prototree.data.images import LoadedImage
from prototree.explanation.assets import CONTEXT_SIDE, cut_out
from prototree.explanation.attribution import RANDOM_BOXES, Features, Probes, hidden, random_boxes, similarities
from prototree.explanation.records import CONTEXT_SCALE, Heatmap, Location, Match, Method, OcclusionEffect, Picture

Grid = Float[ndarray, "_ _"]  # values over the network's input; its cells tile it

_MASS = 0.5  # of what is positive in a grid, that its box must hold
_FLAT = 1e-6  # a range below this is no pattern but rounding


@dataclass(frozen=True)
class Finding:
    """Where one method locates a match, in pixels of the network's input."""

    method: Method
    box: Box
    grid: Grid
    occlusion: OcclusionEffect | None = None


def find_match(tree: ProtoTree, patch: int, similarity_map: Grid) -> list[Finding]:
    """Locate a match by its similarity map: a square around the peak, which pages show, and the nearest cell."""
    dists = tree.node_function.relative_distance(torch.from_numpy(similarity_map.copy()))
    row, column = peak_places(dists[None], torch.tensor([patch]), tree.grid.rows_per_crop)
    return [
        Finding("peak", peak_box(tree.grid, float(row), float(column)), similarity_map),
        Finding("cell", tree.grid.box(*tree.grid.row_column(patch)), similarity_map),
    ]


def peaks(
    tree: ProtoTree, dists: Float[Tensor, "n rows columns"], patch: Int[Tensor, " n"], prototypes: Int[Tensor, " n"]
) -> Float[Tensor, "n 2"]:
    """Find row and column of the middle of each peak, from the distances of all patches of an image to a prototype."""
    radius = tree.radius[prototypes]
    return torch.stack(peak_places(dists / radius[:, None, None], patch, tree.grid.rows_per_crop), dim=1)


def find_in_grid(method: Method, grid: Float[Tensor, "rows columns"], preprocessing: Preprocessing) -> Finding:
    """Locate a match by the smallest box that holds half of an attribution or occlusion map."""
    values = grid.float().cpu().numpy()
    return Finding(method, smallest_box(values, preprocessing), values.clip(min=0.0))


def occlude_findings(
    features: Features,
    probes: Probes,
    findings: Sequence[Sequence[Finding]],
    before: Sequence[float],
    generator: torch.Generator,
) -> list[list[Finding]]:
    """Test each box by occluding it, and random boxes of its size; all of them go through the network together."""
    side, rows, boxes = probes.images.shape[-1], list[int](), list[Box]()
    for row, of_probe in enumerate(findings):
        for finding in of_probe:
            boxes += [finding.box, *random_boxes(finding.box, side, generator)]
            rows += [row] * (1 + RANDOM_BOXES)
    if not boxes:
        return [[] for _ in findings]
    after = similarities(features, probes.with_images(hidden(probes.images[rows], boxes), rows))
    tests = iter(after.view(-1, 1 + RANDOM_BOXES).tolist())
    return [
        [
            replace(finding, occlusion=OcclusionEffect(start, occluded, sum(random) / RANDOM_BOXES))
            for finding, (occluded, *random) in zip(of_probe, tests, strict=False)
        ]
        for of_probe, start in zip(findings, before, strict=True)
    ]


def smallest_box(grid: Grid, preprocessing: Preprocessing) -> Box:
    """Find the box of least area, in pixels of the input, that holds half of what is positive in the grid.

    Boxes end at the grid's cells. Of several the one that holds most is taken. The whole input if nothing is positive.
    """
    mass = np.maximum(grid.astype(np.float64), 0.0)
    rows, columns = mass.shape
    total = mass.sum()
    if total <= 0:
        return Box.whole((preprocessing.size, preprocessing.size))
    sums = np.pad(mass, ((1, 0), (1, 0))).cumsum(axis=0).cumsum(axis=1)
    top, bottom = np.triu_indices(rows + 1, 1)
    left, right = np.triu_indices(columns + 1, 1)
    strips = sums[bottom] - sums[top]  # the mass between two rows, up to each column
    held = strips[:, right] - strips[:, left]
    area = (bottom - top)[:, None] * (right - left)[None, :]
    # Area counts in whole cells, so a term below 1 only decides among equals.
    cost = np.where(held >= _MASS * total * (1 - 1e-9), area - 0.5 * held / total, np.inf)
    i, j = np.unravel_index(int(cost.argmin()), cost.shape)
    down, across = preprocessing.size / rows, preprocessing.size / columns
    return Box(float(left[j]) * across, float(top[i]) * down, float(right[j]) * across, float(bottom[i]) * down)


@dataclass(frozen=True)
class InputFrame:
    """Where the network's input lies in an image of width and height `size`."""

    view: View
    size: Size
    preprocessing: Preprocessing

    def box(self, box: Box) -> Box:
        """Convert a box of the input to the image's pixels."""
        return to_image(box, self.view, self.size, self.preprocessing)

    def heat(
        self, grid: Grid, shape: tuple[int, int], patch: tuple[int, int] = (1, 1), extents: Sequence[Box] = ()
    ) -> Heatmap:
        """Stretch a grid over the whole image, from 0 to 1 on `shape` rows and columns, by bicubic interpolation.

        For a similarity map of prototypes of several cells, `patch` is their height and width in cells: each value
        then stands at the centre of its patch. With several crops, `extents` are what they cover of the input, and the
        highest value of all crops counts. A flat map gives zeros.
        """
        extents = extents or (Box.whole((self.preprocessing.size,) * 2),)
        values = np.full(shape, -np.inf)
        for crop, extent in zip(np.split(grid, len(extents)), extents, strict=True):
            box, crop = self.box(extent), crop[:, ::-1] if self.view.flip else crop
            rows = _interpolation(shape[0], crop.shape[0], self.size[1], (box.top, box.bottom), patch[0])
            columns = _interpolation(shape[1], crop.shape[1], self.size[0], (box.left, box.right), patch[1])
            seen = np.logical_and.outer(rows.any(axis=1), columns.any(axis=1))
            values = np.where(seen, np.maximum(values, rows @ crop.astype(np.float64) @ columns.T), values)
        # The cubic dips below the lowest value beside a peak; that is no reason to call the lowest value more than 0.
        lowest, highest = float(grid.min()), float(values.max())
        if not highest - lowest >= _FLAT:
            return np.zeros(shape, dtype=np.float32)
        return ((values - lowest) / (highest - lowest)).clip(0.0, 1.0).astype(np.float32)


def _interpolation(
    count: int, cells: int, length: int, edges: tuple[float, float], patch: int
) -> Float[ndarray, "count cells"]:
    """Bicubic weights of each cell in each of `count` equal parts of the image; none where the input does not reach."""
    centre, (start, stop) = (torch.arange(count, dtype=torch.float64) + 0.5) * length / count, edges
    # In cells of the feature map; the first value stands at the centre of the first patch.
    index = (centre - start) / (stop - start) * (cells + patch - 1) - patch / 2
    rows, columns = ((2 * at + 1) / cells - 1 for at in (index, torch.arange(cells, dtype=torch.float64)))
    points = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1)
    identity = torch.eye(cells, dtype=torch.float64)[None, None]
    weights = grid_sample(identity, points[None], mode="bicubic", padding_mode="border", align_corners=False)[0, 0]
    weights[(centre < start) | (centre > stop)] = 0.0
    values: ndarray = weights.numpy()
    return values


@dataclass(frozen=True)
class ImageContext:
    """An image that the network was shown, as far as a match needs to know it."""

    image: str
    label: int | None
    frame: InputFrame
    photo: LoadedImage
    picture: Picture

    def match(self, tree: ProtoTree, similarity: float, findings: Sequence[Finding]) -> Match:
        """Bring findings back to the image's own pixels; the first one is cut out of it."""
        shape, grid = (self.picture.shape[0], self.picture.shape[1]), tree.grid
        locations, heats = [], dict[int, Heatmap]()
        for finding in findings:
            if id(finding.grid) not in heats:  # peak and cell have the same
                is_map = finding.method in ("peak", "cell")
                patch, extents = ((grid.height, grid.width), grid.extents) if is_map else ((1, 1), ())
                heats[id(finding.grid)] = self.frame.heat(finding.grid, shape, patch, extents)
            box, heat = self.frame.box(finding.box), heats[id(finding.grid)]
            locations.append(Location(finding.method, box, heat, finding.occlusion))
        first = locations[0].box
        return Match(
            image=self.image,
            label=self.label,
            similarity=similarity,
            size=self.photo.size,
            photo=self.picture,
            crop=cut_out(self.photo, first),
            locations=tuple(locations),
            context=cut_out(self.photo, first.context_square(CONTEXT_SCALE, self.photo.size), CONTEXT_SIDE),
        )

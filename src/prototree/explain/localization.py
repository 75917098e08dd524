"""Where in a photo a prototype was found: the cell, heat and boxes, from the network's input to the photo's own pixels.

The network sees a square that stands for a rectangle of the photo: all of it, the central part, a crop, perhaps
mirrored. Whatever is found in the input is brought back by the inverse of exactly that (§5.2).

Notation used for tensor shapes: B batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from prototree.backbones.geometry import Box, Size
from prototree.backbones.preprocessing import Preprocessing
from prototree.core.localization import peak_box, peak_places
from prototree.core.model import ProtoTree
from prototree.core.nodes import LN2
from prototree.data.images import Photo
from prototree.data.views import View, to_photo
from prototree.explain.attribution import Features, Probes, hide_boxes
from prototree.explain.prototype_pictures import AROUND_SIDE, cut_out
from prototree.explain.records import AROUND, Heat, Hiding, Location, Match, Method, Picture

Grid = Float[ndarray, "_ _"]
"""Values over the network's input; its cells tile it."""

MASS = 0.5  # of what is shown, that a box of it must hold
_FLAT = 1e-6  # a range below this is no pattern but rounding
_SHARPNESS = -0.75  # of the cubic, as torch and OpenCV have it


@dataclass(frozen=True)
class Finding:
    """One method's answer, in the network's input."""

    method: Method
    box: Box
    grid: Grid
    hiding: Hiding | None = None


def cell_finding(tree: ProtoTree, patch: int, similarity_map: Grid) -> Finding:
    """The paper's answer: the cell of the nearest patch."""
    return Finding("cell", tree.grid.box(*tree.grid.place(patch)), similarity_map)


def peak_finding(tree: ProtoTree, patch: int, similarity_map: Grid) -> Finding:
    """What pages show: a square around the middle of the peak of the similarity map."""
    apart = tree.question.relative_distance(torch.from_numpy(similarity_map.copy()))
    found = peak_places(apart[None], torch.tensor([patch]), tree.grid.rows_per_crop)
    row, column = (float(place) for place in found)
    return Finding("peak", peak_box(tree.grid, row, column), similarity_map)


def peaks(
    tree: ProtoTree, apart: Float[Tensor, "n rows columns"], patch: Int[Tensor, " n"], prototypes: Int[Tensor, " n"]
) -> Float[Tensor, "n 2"]:
    """Row and column of the middle of each peak, from the distances of all patches of a photo to a prototype."""
    reach = LN2 * tree.reach[prototypes]
    return torch.stack(peak_places(apart / reach[:, None, None], patch, tree.grid.rows_per_crop), dim=1)


def grid_finding(method: Method, grid: Grid, preprocessing: Preprocessing) -> Finding:
    """The smallest box that holds half of what the grid shows."""
    return Finding(method, smallest_box(grid, preprocessing), grid.clip(min=0.0))


def tested(
    features: Features,
    probes: Probes,
    findings: Sequence[Sequence[Finding]],
    before: Sequence[float],
    generator: torch.Generator,
) -> list[tuple[Finding, ...]]:
    """The same findings, each with what hiding its box does."""
    boxes = [[finding.box for finding in own] for own in findings]
    tests = hide_boxes(features, probes, boxes, before, generator)
    return [
        tuple(Finding(f.method, f.box, f.grid, hiding) for f, hiding in zip(own, results, strict=True))
        for own, results in zip(findings, tests, strict=True)
    ]


def grids_of(values: Float[Tensor, "B rows columns"]) -> list[Grid]:
    """Tensors as arrays."""
    return list(values.float().cpu().numpy())


def smallest_box(grid: Grid, preprocessing: Preprocessing, share: float = MASS) -> Box:
    """The box of least area, in pixels of the input, that holds this share of what is positive in the grid.

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
    cost = np.where(held >= share * total * (1 - 1e-9), area - 0.5 * held / total, np.inf)
    i, j = np.unravel_index(int(cost.argmin()), cost.shape)
    down, across = preprocessing.size / rows, preprocessing.size / columns
    return Box(float(left[j]) * across, float(top[i]) * down, float(right[j]) * across, float(bottom[i]) * down)


@dataclass(frozen=True)
class InputFrame:
    """Where the network's input lies in a photo of width and height `size`."""

    view: View
    size: Size
    preprocessing: Preprocessing

    def box(self, box: Box) -> Box:
        """A box of the input in the photo's pixels."""
        return to_photo(box, self.view, self.size, self.preprocessing)

    def heat(
        self, grid: Grid, shape: tuple[int, int], patch: tuple[int, int] = (1, 1), extents: Sequence[Box] = ()
    ) -> Heat:
        """The grid from 0 to 1 on `shape` rows and columns that cover the whole photo, by bicubic interpolation.

        For a similarity map of prototypes of several cells, `patch` is their height and width in cells: each value
        then stands at the centre of its patch. Where the network looks more than once, `extents` are what the looks
        cover of the input, and the highest value of all looks counts. A flat map gives zeros.
        """
        extents = extents or (Box.whole((self.preprocessing.size,) * 2),)
        each = [
            self._stretched(own, shape, patch, extent)
            for own, extent in zip(np.split(grid, len(extents)), extents, strict=True)
        ]
        stretched = np.stack([np.where(seen, values, -np.inf) for values, seen in each]).max(axis=0)
        # The cubic dips below the lowest value beside a peak; that is no reason to call the lowest value more than 0.
        return _from_zero_to_one(stretched, float(grid.min()), np.isfinite(stretched))

    def _stretched(
        self, grid: Grid, shape: tuple[int, int], patch: tuple[int, int], extent: Box
    ) -> tuple[Float[ndarray, "_ _"], Bool[ndarray, "_ _"]]:
        """The grid of one look over the whole photo, and where in the photo that look is."""
        photo = self.box(extent)
        weights = [
            _interpolation(count, cells, length, edges, wide)
            for count, cells, length, edges, wide in (
                (shape[0], grid.shape[0], self.size[1], (photo.top, photo.bottom), patch[0]),
                (shape[1], grid.shape[1], self.size[0], (photo.left, photo.right), patch[1]),
            )
        ]
        values = grid[:, ::-1] if self.view.flip else grid
        seen = np.logical_and.outer(*(own.any(axis=1) for own in weights))
        return weights[0] @ values.astype(np.float64) @ weights[1].T, seen


@dataclass(frozen=True)
class SeenPhoto:
    """A photo that the network was shown, as far as a match needs to know it."""

    image: str
    label: int | None
    frame: InputFrame
    photo: Photo
    picture: Picture

    def match(self, tree: ProtoTree, similarity: float, findings: Sequence[Finding]) -> Match:
        """The findings brought to the photo; the first one is cut out of it."""
        where = tuple(
            Location(
                method=finding.method,
                box=self.frame.box(finding.box),
                heat=self._heat(tree, finding),
                hiding=finding.hiding,
            )
            for finding in findings
        )
        return Match(
            image=self.image,
            label=self.label,
            similarity=similarity,
            size=self.photo.size,
            photo=self.picture,
            crop=cut_out(self.photo, where[0].box),
            where=where,
            around=cut_out(self.photo, where[0].box.surroundings(AROUND, self.photo.size), AROUND_SIDE),
        )

    def _heat(self, tree: ProtoTree, finding: Finding) -> Heat:
        shape = (self.picture.shape[0], self.picture.shape[1])
        if finding.method not in ("peak", "cell"):
            return self.frame.heat(finding.grid, shape)
        return self.frame.heat(finding.grid, shape, (tree.grid.height, tree.grid.width), tree.grid.extents)


def _interpolation(
    count: int, cells: int, extent: int, edges: tuple[float, float], patch: int
) -> Float[ndarray, "count cells"]:
    """Weights of each cell in each of `count` equal stretches of the photo; none where the input does not reach."""
    centre = (np.arange(count) + 0.5) * extent / count
    start, stop = edges
    # In cells of the feature map; the first value stands at the centre of the first patch.
    at = (centre - start) / (stop - start) * (cells + patch - 1) - patch / 2
    first = np.floor(at)
    weights = np.zeros((count, cells))
    rows = np.arange(count)
    for tap in (-1.0, 0.0, 1.0, 2.0):
        cell = np.clip(first + tap, 0, cells - 1).astype(int)
        np.add.at(weights, (rows, cell), _cubic(at - first - tap))
    weights[(centre < start) | (centre > stop)] = 0.0
    return weights


def _cubic(distance: Float[ndarray, " count"]) -> Float[ndarray, " count"]:
    a, x = _SHARPNESS, np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _from_zero_to_one(values: Float[ndarray, "rows columns"], lowest: float, seen: ndarray) -> Heat:
    if not seen.any():
        return np.zeros(values.shape, dtype=np.float32)
    highest = float(values[seen].max())
    if highest - lowest < _FLAT:
        return np.zeros(values.shape, dtype=np.float32)
    return np.where(seen, (values - lowest) / (highest - lowest), 0.0).clip(0.0, 1.0).astype(np.float32)

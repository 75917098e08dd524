"""From grids over the network's input to what is shown of a photo: boxes, heat maps and their tests.

Notation used for tensor shapes: B batch, h w pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from prototree.data.images import Photo
from prototree.explain.alterations import ALTERATIONS
from prototree.explain.attribution import Features, Probes, hide_boxes, similarities
from prototree.explain.heat import Frame, Grid, smallest_box
from prototree.explain.pictures import cut_out
from prototree.explain.records import Cause, Hiding, Match, Method, Picture, Where
from prototree.network.geometry import Box
from prototree.network.preprocessing import Preprocessing
from prototree.tree.model import ProtoTree


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


def causes(
    features: Features, probes: Probes, before: Sequence[float], preprocessing: Preprocessing
) -> list[tuple[Cause, ...]]:
    """How each probe's similarity changes with each alteration of its image."""
    mean, std = (probes.images.new_tensor(v).view(1, 3, 1, 1) for v in (preprocessing.mean, preprocessing.std))
    pixels = (probes.images * std + mean).clamp(0, 1)
    altered = torch.cat([(alter(pixels) - mean) / std for alter in ALTERATIONS.values()])
    prototypes = probes.prototypes.repeat(len(ALTERATIONS), 1, 1, 1)
    found = similarities(features, altered, prototypes).view(len(ALTERATIONS), -1).T.tolist()
    return [
        tuple(Cause(name, after - start) for name, after in zip(ALTERATIONS, row, strict=True))
        for row, start in zip(found, before, strict=True)
    ]


@dataclass(frozen=True)
class Place:
    """A photo as far as a match needs to know it."""

    image: str
    label: int | None
    frame: Frame
    photo: Photo
    picture: Picture

    def match(self, tree: ProtoTree, similarity: float, findings: Sequence[Finding]) -> Match:
        """The findings brought to the photo; the first one, the cell, is cut out of it."""
        size: tuple[int, int] = (tree.prototypes.shape[2], tree.prototypes.shape[3])
        shape = (self.picture.shape[0], self.picture.shape[1])
        where = tuple(
            Where(
                method=finding.method,
                box=self.frame.box(finding.box),
                heat=self.frame.heat(finding.grid, shape, size if finding.method == "cell" else (1, 1)),
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
        )


def grids_of(values: Float[Tensor, "B rows columns"]) -> list[Grid]:
    """Tensors as arrays."""
    return list(values.float().cpu().numpy())

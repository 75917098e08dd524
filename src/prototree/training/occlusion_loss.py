"""Occlusion loss: occluding the displayed box must remove the match.

Every cell of a feature map has seen its surroundings: a beak may be recognised by the neck. So in some steps a few
images are seen twice, once with a salient box occluded. Where it covers the square displayed for a node on
the way to the image's class, the image shall leave the radius of the node's patch, unless the patch matches elsewhere
too; where it does not touch the square, the image shall stay within the radius and on its side.
Notation used for tensor shapes: B images, P prototypes, C channels of the backbone's map, D prototype dimension.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import relu

from prototree.backbones.geometry import Box, PatchGrid, Preprocessing
from prototree.core.localization import peak_places, peak_squares
from prototree.core.model import ProtoTree
from prototree.data.crops import FULL_IMAGE, OccludedView, center_offset
from prototree.features.cache import FeatureMaps
from prototree.training.head import flatten_patches, nearest_with_grad

IMAGES_PER_STEP = 8
BOXES_PER_IMAGE = 2  # occluded one at a time
MIN_OVERLAP, MAX_OVERLAP = 0.6, 0.05  # fraction of the square that is occluded: covered, and still untouched
OUTSIDE, INSIDE = 1.15, 0.95  # distances wanted, in radii
MARGIN = 0.1  # by which the other patch of a node shall be farther
_CHUNK = 256  # maps


def salient_squares(maps: Float[Tensor, "B C H W"], grid: PatchGrid, count: int) -> Float[Tensor, "B count 4"]:
    """Find squares, as large as displayed ones, around the patches that differ most from the rest of an image."""
    strength = torch.linalg.vector_norm(maps - maps.mean(dim=(2, 3), keepdim=True), dim=1)
    x_all, y_all = _centres(_all_squares(grid, maps))
    result = []
    for _ in range(count):
        best, patch = strength.flatten(1).max(dim=1)
        weaker = 1 - strength / best[:, None, None].clamp_min(1e-12)
        squares = peak_squares(grid, *peak_places(weaker, patch, grid.rows_per_crop))
        result.append(squares)
        x, y = _centres(squares)
        size = (squares[:, 2:] - squares[:, :2])[:, None]
        beside = ((x_all - x[:, None]).abs() < size[:, :, 0]) & ((y_all - y[:, None]).abs() < size[:, :, 1])
        strength = strength.masked_fill(beside.view_as(strength), 0)
    return torch.stack(result, dim=1)


def _centres(squares: Float[Tensor, "n 4"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    centre = (squares[:, :2] + squares[:, 2:]) / 2
    return centre[:, 0], centre[:, 1]


def salient_boxes(full: FeatureMaps, grid: PatchGrid, preprocessing: Preprocessing) -> dict[Path, list[Box]]:
    """Boxes of every second image of each class, as fractions of the squashed image, from maps of full images."""
    of_class: dict[int, list[int]] = defaultdict(list)
    for index, entry in enumerate(full.entries):
        if index not in full.unreadable:
            of_class[entry.sample.label].append(index)
    chosen = [index for indices in of_class.values() for index in indices[::2]]
    offset, side, boxes = center_offset(preprocessing), preprocessing.resize, dict[Path, list[Box]]()
    for start in range(0, len(chosen), _CHUNK):
        batch = full.read(chosen[start : start + _CHUNK])
        squares = (salient_squares(batch.values, grid, BOXES_PER_IMAGE) + offset) / side
        for index, edges in zip(batch.entries.tolist(), squares.tolist(), strict=True):
            boxes[full.entries[index].sample.path] = [Box(*square) for square in edges]
    return boxes


@dataclass(frozen=True)
class OccludedPairs:
    """Feature maps of images, plain and with a box occluded."""

    plain: FeatureMaps
    occluded: FeatureMaps
    boxes: Float[Tensor, "B 4"]  # left, top, right, bottom in pixels of the input
    sides: Bool[Tensor, "B P"]  # patches that stand for the side of the image's class

    @classmethod
    def of(
        cls, tree: ProtoTree, leaf_class: Int[Tensor, " L"], plain: FeatureMaps, occluded: FeatureMaps | None
    ) -> "OccludedPairs | None":
        """Pair all images of which there are both; None if there is not one."""
        if occluded is None:
            return None
        index_of = {
            entry.sample_index: index
            for index, entry in enumerate(plain.entries)
            if entry.view == FULL_IMAGE and index not in plain.unreadable
        }
        chosen = [
            index
            for index, entry in enumerate(occluded.entries)
            if entry.sample_index in index_of and index not in occluded.unreadable
        ]
        if not chosen:
            return None
        entries = [occluded.entries[index] for index in chosen]
        edges = torch.tensor([entry.view.box.edges for entry in entries if isinstance(entry.view, OccludedView)])
        labels = torch.tensor([entry.sample.label for entry in entries])
        return cls(
            plain.subset([index_of[entry.sample_index] for entry in entries]),
            occluded.subset(chosen),
            edges * tree.preprocessing.resize - center_offset(tree.preprocessing),
            class_sides(tree, leaf_class.cpu())[labels],
        )

    def loss(self, tree: ProtoTree, anchors: Float[Tensor, "P C 1 1"]) -> Float[Tensor, ""]:
        """The occlusion loss of a few random images."""
        device = anchors.device
        rows = torch.randint(len(self.boxes), (IMAGES_PER_STEP,))
        plain, occluded = (maps.read(rows.tolist()).values.to(device) for maps in (self.plain, self.occluded))
        boxes, sides = self.boxes[rows].to(plain), self.sides[rows].to(device)
        encode, radius = tree.features.from_map, tree.radius
        both = sides | sides.roll(tree.topology.n_nodes, dims=1)
        after, prototypes = nearest_with_grad(encode, occluded, anchors, both)
        with torch.no_grad():
            before = CleanMatches.of(encode(plain), prototypes, boxes, radius, tree.grid)
        return occlusion_loss(before, after.distance, boxes, sides, radius)


@dataclass(frozen=True)
class CleanMatches:
    """Matches of the tree, as it is now, in the plain images."""

    distance: Float[Tensor, "B P"]
    squares: Float[Tensor, "B P 4"]  # that would be displayed
    elsewhere: Float[Tensor, "B P"]  # distance of the nearest patch far from the occluded box

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        feature_map: Float[Tensor, "B D H W"],
        prototypes: Float[Tensor, "P D 1 1"],
        boxes: Float[Tensor, "B 4"],
        radius: Float[Tensor, " P"],
        grid: PatchGrid,
    ) -> "CleanMatches":
        # Distances by matrix product: exact enough to tell which patch is nearest, in a sixth of the time.
        dists = torch.cdist(flatten_patches(feature_map), prototypes.flatten(1))
        dists = dists.view(len(feature_map), *feature_map.shape[2:], len(prototypes)).movedim(3, 1).contiguous()
        distance, patch = dists.flatten(2).min(dim=2)
        peaks = peak_places((dists / radius[:, None, None]).flatten(0, 1), patch.flatten(), grid.rows_per_crop)
        size = boxes[:, 2:] - boxes[:, :2]
        surroundings = torch.cat([boxes[:, :2] - size, boxes[:, 2:] + size], dim=1)  # three times as wide and high
        is_far = ~_touch(_all_squares(grid, boxes), surroundings)
        elsewhere = dists.flatten(2).masked_fill(~is_far[:, None], torch.inf).amin(dim=2)
        elsewhere = torch.where(is_far.any(dim=1)[:, None], elsewhere, 0)  # a map too small to have anything elsewhere
        return cls(distance, peak_squares(grid, *peaks).view(*distance.shape, 4), elsewhere)


def occlusion_loss(
    before: CleanMatches,
    distance: Float[Tensor, "B P"],
    boxes: Float[Tensor, "B 4"],
    sides: Bool[Tensor, "B P"],
    radius: Float[Tensor, " P"],
) -> Float[Tensor, ""]:
    """How far covered matches are from leaving the radius, and untouched ones from staying inside and on their side.

    `distance` is that of the occluded images; `sides` says which patches stand for the side of the image's class. Only
    patches to whose side the plain image goes count, and one that matches far from the occluded box, as a texture may,
    need not leave. Each part is a mean over images and patches.
    """

    def lead(dists: Float[Tensor, "B P"]) -> Float[Tensor, "B P"]:
        return dists.roll(dists.shape[1] // 2, dims=1) - dists  # over the other patch of the node

    counts, overlap = sides & (lead(before.distance) > 0), overlap_fraction(before.squares, boxes)
    covered = counts & (overlap >= MIN_OVERLAP) & (before.elsewhere > radius)
    untouched = counts & (overlap <= MAX_OVERLAP)
    leave = relu(OUTSIDE * radius - distance)
    stay = relu(distance - INSIDE * radius) + relu(MARGIN - lead(distance))
    means = [(part * mask).sum() / mask.sum().clamp_min(1) for part, mask in ((leave, covered), (stay, untouched))]
    return means[0] + means[1]


def _all_squares(grid: PatchGrid, like: Tensor) -> Float[Tensor, "n 4"]:
    """The displayed square around each patch of a map, in order."""
    patch = torch.arange(grid.n_patches, device=like.device)
    return peak_squares(grid, (patch // grid.shape[1]).to(like), (patch % grid.shape[1]).to(like))


def _touch(squares: Float[Tensor, "n 4"], boxes: Float[Tensor, "B 4"]) -> Bool[Tensor, "B n"]:
    low, high = torch.maximum(squares[:, :2], boxes[:, None, :2]), torch.minimum(squares[:, 2:], boxes[:, None, 2:])
    return (high > low).all(dim=2)


def overlap_fraction(squares: Float[Tensor, "B P 4"], boxes: Float[Tensor, "B 4"]) -> Float[Tensor, "B P"]:
    """The fraction of each square that an image's occluded box covers."""
    low, high = squares[:, :, :2], squares[:, :, 2:]
    first, last = torch.maximum(low, boxes[:, None, :2]), torch.minimum(high, boxes[:, None, 2:])
    return relu(last - first).prod(dim=2) / (high - low).prod(dim=2)


def class_sides(tree: ProtoTree, leaf_class: Int[Tensor, " L"]) -> Bool[Tensor, "K P"]:
    """Which patches stand for the side on which a leaf of each class lies."""
    sides, n_nodes = torch.zeros(tree.n_classes, tree.n_prototypes, dtype=torch.bool), tree.topology.n_nodes
    for leaf, label in enumerate(leaf_class.tolist()):
        path, right = tree.topology.paths[leaf], tree.topology.goes_right[leaf]
        sides[label, path[(path >= 0) & right]] = True
        sides[label, n_nodes + path[(path >= 0) & ~right]] = True
    return sides

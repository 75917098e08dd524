"""A tree learns to need what it shows: with the place hidden that is shown for a match, the match shall be gone.

A node compares the whole image with its patches, and one square of the image is shown. Because every cell of the
network's map has seen its surroundings, a bird's beak may be recognised by the bird's neck. So in some steps a few
photos are seen twice, once plain and once with a place hidden that the network finds striking (`data.hiding`). Where it
covers the square that would be shown for a node on the way to the photo's class, the photo shall leave the reach of the
node's patch, unless the patch matches far from there, too; where it does not touch the square, the photo shall stay
within reach and on its side. The places depend on the photo and the network alone, so that all trees share the maps of
hidden views.

Notation used for tensor shapes: B photos, P prototypes, C channels of the backbone's map, D prototype depth, H W map.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import relu

from prototree.backbones.geometry import Box, PatchGrid
from prototree.backbones.preprocessing import Preprocessing
from prototree.core.localization import peak_places, peak_squares
from prototree.core.model import ProtoTree
from prototree.core.nodes import NodeKind
from prototree.data.occlusion import HiddenView
from prototree.data.views import FULL, centre_offset
from prototree.features.batches import CachedBatches
from prototree.features.cache import MapCache
from prototree.training import distributed
from prototree.training.chance import WholeBatch
from prototree.training.nearest_gradient import patch_rows

PHOTOS_A_STEP = 8
PLACES = 2  # of a photo that are hidden, one at a time
COVERED, TOUCHED = 0.6, 0.05  # share of the square that is hidden: at least, and at most if it counts as untouched
OUT_OF_REACH, WITHIN_REACH = 1.15, 0.95  # of a distance, in reaches
LEAD = 0.1  # by which the other patch of a node shall be farther
_AT_ONCE = 256  # maps


def striking_squares(maps: Float[Tensor, "B C H W"], grid: PatchGrid, count: int) -> Float[Tensor, "B count 4"]:
    """Squares as large as those that are shown, around the places that differ most from the rest of a photo.

    Most trees look at these places, whatever they have learned: the network made them stand out long before.
    """
    strength = torch.linalg.vector_norm(maps - maps.mean(dim=(2, 3), keepdim=True), dim=1)
    across, down = _middles(_every_square(grid, maps))
    found = []
    for _ in range(count):
        best, patch = strength.flatten(1).max(dim=1)
        weaker = 1 - strength / best[:, None, None].clamp_min(1e-12)
        squares = peak_squares(grid, *peak_places(weaker, patch, grid.rows_per_crop))
        found.append(squares)
        x, y = _middles(squares)
        size = (squares[:, 2:] - squares[:, :2])[:, None]
        beside = ((across - x[:, None]).abs() < size[:, :, 0]) & ((down - y[:, None]).abs() < size[:, :, 1])
        strength = strength.masked_fill(beside.view_as(strength), 0)
    return torch.stack(found, dim=1)


def _middles(squares: Float[Tensor, "n 4"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    middle = (squares[:, :2] + squares[:, 2:]) / 2
    return middle[:, 0], middle[:, 1]


def striking_places(whole: MapCache, grid: PatchGrid, preprocessing: Preprocessing) -> dict[Path, list[Box]]:
    """Those of every second photo of each class, as shares of the squashed photo, from maps of whole photos."""
    of_class: dict[int, list[int]] = defaultdict(list)
    for place, one in enumerate(whole.entries):
        if place not in whole.unreadable:
            of_class[one.sample.label].append(place)
    chosen = [place for own in of_class.values() for place in own[::2]]
    offset, side, found = centre_offset(preprocessing), preprocessing.resize, dict[Path, list[Box]]()
    for start in range(0, len(chosen), _AT_ONCE):
        inputs = whole.read(chosen[start : start + _AT_ONCE], 0)
        squares = (striking_squares(inputs.values, grid, PLACES) + offset) / side
        squares = distributed.gather(squares)[0]  # of another machine perhaps, where the last digits differ
        for place, own in zip(inputs.entries.tolist(), squares.tolist(), strict=True):
            found[whole.entries[place].sample.path] = [Box(*edges) for edges in own]
    return found


@dataclass(frozen=True)
class OccludedPairs:
    """Maps of photos, plain and with a place hidden."""

    plain: CachedBatches
    hidden: CachedBatches
    places: Float[Tensor, "B 4"]  # left, top, right, bottom in pixels of the input
    labels: Int[Tensor, " B"]

    @classmethod
    def of(cls, judged: MapCache, hidden: MapCache, preprocessing: Preprocessing) -> "OccludedPairs | None":
        """All photos of which there are both; None if there is not one."""
        whole = {
            one.sample_index: place
            for place, one in enumerate(judged.entries)
            if one.view == FULL and place not in judged.unreadable
        }
        wanted = [
            place
            for place, one in enumerate(hidden.entries)
            if one.sample_index in whole and place not in hidden.unreadable
        ]
        if not wanted:
            return None
        entries = [hidden.entries[place] for place in wanted]
        both = judged.only([whole[one.sample_index] for one in entries]), hidden.only(wanted)
        plain, covered = (CachedBatches(one, PHOTOS_A_STEP, shuffle=False) for one in both)
        labels = torch.tensor([one.sample.label for one in entries])
        edges = torch.tensor([one.view.place.edges for one in entries if isinstance(one.view, HiddenView)])
        return cls(plain, covered, edges * preprocessing.resize - centre_offset(preprocessing), labels)

    def __len__(self) -> int:
        return len(self.labels)

    def draw(self, batch: WholeBatch, device: torch.device) -> "Pairs":
        """Some at random, the same ones in all processes: each takes as large a share of them as of the batch."""
        drawn = torch.randint(len(self), (PHOTOS_A_STEP,))
        first, last = (PHOTOS_A_STEP * edge // max(batch.total, 1) for edge in (batch.start, batch.stop))
        rows = drawn[first:last]
        plain, hidden = (one.inputs(rows.tolist()).values.to(device) for one in (self.plain, self.hidden))
        return Pairs(plain, hidden, self.places[rows].to(plain), self.labels[rows])


@dataclass(frozen=True)
class Pairs:
    """The photos of a step."""

    plain: Float[Tensor, "B C H W"]
    hidden: Float[Tensor, "B C H W"]
    places: Float[Tensor, "B 4"]
    labels: Int[Tensor, " B"]


@dataclass(frozen=True)
class Matches:
    """What the tree, as it is now, makes of the plain photos."""

    distance: Float[Tensor, "B P"]
    squares: Float[Tensor, "B P 4"]  # that it would show
    elsewhere: Float[Tensor, "B P"]  # the distance of the nearest patch far from the place that is hidden

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        feature_map: Float[Tensor, "B D H W"],
        prototypes: Float[Tensor, "P D 1 1"],
        places: Float[Tensor, "B 4"],
        unit: Float[Tensor, " P"],
        grid: PatchGrid,
    ) -> "Matches":
        """`places` are hidden in the photos' twins; `unit` are the reaches, as distances."""
        apart = _apart(feature_map, prototypes)
        distance, patch = apart.flatten(2).min(dim=2)
        middles = peak_places((apart / unit[:, None, None]).flatten(0, 1), patch.flatten(), grid.rows_per_crop)
        is_far = ~_touch(_every_square(grid, places), _surroundings(places))
        elsewhere = apart.flatten(2).masked_fill(~is_far[:, None], torch.inf).amin(dim=2)
        elsewhere = torch.where(is_far.any(dim=1)[:, None], elsewhere, 0)  # a map too small to have anything elsewhere
        return cls(distance, peak_squares(grid, *middles).view(*distance.shape, 4), elsewhere)


def _apart(feature_map: Float[Tensor, "B D H W"], prototypes: Float[Tensor, "P D 1 1"]) -> Float[Tensor, "B P H W"]:
    """Distances by matrix product: exact enough to tell which patch is nearest, in a sixth of the time."""
    apart = torch.cdist(patch_rows(feature_map), prototypes.flatten(1))
    n_photos, _, *size = feature_map.shape
    return apart.view(n_photos, *size, len(prototypes)).movedim(3, 1).contiguous()


def _every_square(grid: PatchGrid, like: Tensor) -> Float[Tensor, "n 4"]:
    """Around each patch of a map, in order."""
    patch = torch.arange(grid.n_patches, device=like.device)
    return peak_squares(grid, (patch // grid.shape[1]).to(like), (patch % grid.shape[1]).to(like))


def _surroundings(places: Float[Tensor, "B 4"]) -> Float[Tensor, "B 4"]:
    """Three times as wide and high."""
    size = places[:, 2:] - places[:, :2]
    return torch.cat([places[:, :2] - size, places[:, 2:] + size], dim=1)


def _touch(squares: Float[Tensor, "n 4"], places: Float[Tensor, "B 4"]) -> Bool[Tensor, "B n"]:
    low, high = torch.maximum(squares[:, :2], places[:, None, :2]), torch.minimum(squares[:, 2:], places[:, None, 2:])
    return (high > low).all(dim=2)


def own_sides(tree: ProtoTree, leaf_class: Int[Tensor, " L"], labels: Int[Tensor, " B"]) -> Bool[Tensor, "B P"]:
    """Which patches stand for the side on which a leaf of each class lies."""
    found, n_nodes = torch.zeros(len(labels), tree.n_prototypes, dtype=torch.bool), tree.topology.n_nodes
    for row, label in enumerate(labels):
        for leaf in torch.nonzero(leaf_class == label)[:, 0].tolist():
            path, right = tree.topology.paths[leaf], tree.topology.goes_right[leaf]
            right_nodes, left_nodes = (torch.from_numpy(path[(path >= 0) & turns]) for turns in (right, ~right))
            found[row, right_nodes] = True
            if tree.question.kind == "pairwise":
                found[row, n_nodes + left_nodes] = True
    return found


def hidden_share(squares: Float[Tensor, "B P 4"], places: Float[Tensor, "B 4"]) -> Float[Tensor, "B P"]:
    """How much of each square a photo's hidden place covers."""
    low, high = squares[:, :, :2], squares[:, :, 2:]
    first, last = torch.maximum(low, places[:, None, :2]), torch.minimum(high, places[:, None, 2:])
    return relu(last - first).prod(dim=2) / (high - low).prod(dim=2)


def hiding_loss(
    before: Matches,
    distance: Float[Tensor, "B P"],
    places: Float[Tensor, "B 4"],
    own: Bool[Tensor, "B P"],
    unit: Float[Tensor, " P"],
    kind: NodeKind,
) -> Float[Tensor, ""]:
    """How much nearer than out of reach the photos are whose shown square is hidden, and how much farther than within
    reach, or nearer to the other side, those are whose square is not.

    `distance` is that of the photos with a place hidden; `own` says which patches stand for the side of the photo's
    class. Only patches to whose side the plain photo turns count, and one that is within reach far from the hidden
    place, as a texture may be, need not be left. Each part is a mean over the photos and patches of all processes,
    whose losses add up to it.
    """

    def lead(apart: Float[Tensor, "B P"]) -> Float[Tensor, "B P"]:
        return unit - apart if kind == "presence" else apart.roll(apart.shape[1] // 2, dims=1) - apart

    turns, share = own & (lead(before.distance) > 0), hidden_share(before.squares, places)
    covered, untouched = turns & (share >= COVERED) & (before.elsewhere > unit), turns & (share <= TOUCHED)
    leave = relu(OUT_OF_REACH * unit - distance)
    stay = relu(distance - WITHIN_REACH * unit) + relu(LEAD - lead(distance))
    counts = distributed.sum_over(torch.stack([covered.sum(), untouched.sum()])).clamp_min(1)
    return (leave * covered).sum() / counts[0] + (stay * untouched).sum() / counts[1]

"""What a similarity depends on in the image: gradients, occlusion, and the test that every answer has to stand.

The cell of the nearest patch is where the network's map says the prototype is, but each number of that map depends on
much more of the image than its cell. Three functions say what counts:

- `attribute`: gradients of the distance of one patch, times the image, along the way from the image's mean
  colour to the image (integrated gradients), with a little noise at each step (SmoothGrad). At a projected prototype's
  own image the plain gradient is 0, because the distance is 0 and cannot fall; on the way there it is not.
- `occlude`: how much the similarity falls when a window is hidden, for windows all over the image.
- `hide_boxes`: the similarity with a box hidden, and with random boxes of its size hidden instead.

*Hidden* always means: replaced by the image's mean colour. The similarity after hiding is the tree's own, that of the
best patch anywhere in the image.

Notation used for tensor shapes: B batch, D prototype depth, H₁ W₁ prototype, h w pixels, n cells of a grid.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from prototree.backbones.backbone import FeatureExtractor
from prototree.backbones.crops import FULL_ONLY, center_crop
from prototree.backbones.geometry import Box
from prototree.core.model import ProtoTree, extract_patches
from prototree.core.nodes import NodeFunction
from prototree.explanation.records import OcclusionEffect

Features = Callable[[Tensor], Tensor]
"""Images B×3×h×w to feature maps B×D×H×W."""

STEPS = (0.3, 0.6, 0.9)  # from the mean colour (0) to the image (1)
RANDOM_BOXES = 3
_NOISE = 0.1  # standard deviation, in normalised pixels
_CELLS = 28  # at most, each way, of an attribution's grid
_WINDOWS = 7  # each way, of half-overlapping windows of a quarter of the side
_BATCH = 32


@dataclass(frozen=True)
class Probes:
    """Pairs of an image and a prototype, and the patch of the image that is looked at."""

    images: Float[Tensor, "B 3 h w"]
    prototypes: Float[Tensor, "B D H1 W1"]
    patch: Int[Tensor, " B"]
    radius: Float[Tensor, " B"]
    node_function: NodeFunction

    def __len__(self) -> int:
        return len(self.patch)

    @classmethod
    def of(
        cls, tree: ProtoTree, images: Float[Tensor, "B 3 h w"], prototypes: Sequence[int], patch: Int[Tensor, " B"]
    ) -> "Probes":
        """Images and the numbers of their prototypes in a tree."""
        chosen = list(prototypes)
        return cls(images, tree.prototypes.detach()[chosen], patch, tree.radius[chosen], tree.node_function)

    def similarity(self, distance: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Of patches at these distances to the probes' prototypes."""
        return self.node_function.similarity(distance, self.radius)

    def with_images(self, images: Float[Tensor, "B 3 h w"], rows: Sequence[int]) -> "Probes":
        """Other images, each with the prototype of one of these probes."""
        own = list(rows)
        return Probes(images, self.prototypes[own], self.patch[own], self.radius[own], self.node_function)


def patch_distances(
    feature_map: Float[Tensor, "B D H W"], prototypes: Float[Tensor, "B D H1 W1"]
) -> Float[Tensor, "B P"]:
    """The distance of every patch of each image to that image's own prototype."""
    patches = extract_patches(feature_map, (prototypes.shape[2], prototypes.shape[3]))
    distance: Tensor = torch.linalg.vector_norm(patches - prototypes.flatten(1)[:, None], dim=2)
    return distance


@torch.no_grad()
def similarities(features: Features, probes: Probes) -> Float[Tensor, " B"]:
    """Of each image's best patch to its own prototype, a batch of bounded size at a time."""
    pairs = zip(probes.images.split(_BATCH), probes.prototypes.split(_BATCH), strict=True)
    distance = torch.cat([patch_distances(features(some), own).amin(dim=1) for some, own in pairs])
    return probes.similarity(distance)


def attribute(features: Features, probes: Probes, generator: torch.Generator) -> Float[Tensor, "B n n"]:
    """How much nearer each part of the image brings the patch to its prototype; below 0 where it takes it away.

    The sum over the grid approximates the distance of an image of nothing but the mean colour, less the image's own.
    """
    background = probes.images.mean(dim=(2, 3), keepdim=True)
    total = torch.zeros_like(probes.images)
    for step in STEPS:
        noise = torch.randn(probes.images.shape, generator=generator).to(probes.images)
        image = (torch.lerp(background.expand_as(probes.images), probes.images, step) + _NOISE * noise).detach()
        image.requires_grad_(True)
        distance = _own_distances(features, image, probes)
        (gradient,) = torch.autograd.grad(-distance.sum(), image)
        total += gradient / len(STEPS)
    side = probes.images.shape[-1]
    n_cells = max(1, min(_CELLS, side // 4))
    pixels = ((probes.images - background) * total).sum(dim=1)
    return adaptive_avg_pool2d(pixels[:, None], n_cells)[:, 0] * (side / n_cells) ** 2


def _own_distances(features: Features, images: Float[Tensor, "B 3 h w"], probes: Probes) -> Float[Tensor, " B"]:
    """Of the patch of each probe; of a network that looks several times, only the look that shows it is run."""
    if not isinstance(features, FeatureExtractor) or features.backbone.crops == FULL_ONLY:
        return patch_distances(features(images), probes.prototypes).gather(1, probes.patch[:, None])[:, 0]
    n_patches, found = math.prod(features.backbone.map_size), []
    for number, share in enumerate(features.backbone.crops):
        rows = torch.nonzero(probes.patch // n_patches == number)[:, 0]
        if len(rows):
            maps = features.from_map(features.backbone.forward_single(center_crop(images[rows], share)))
            place = (probes.patch[rows] - number * n_patches)[:, None]
            found.append((rows, patch_distances(maps, probes.prototypes[rows]).gather(1, place)[:, 0]))
    every, distance = (torch.cat(part) for part in zip(*found, strict=True))
    return distance[every.argsort()]


def hidden(images: Float[Tensor, "B 3 h w"], boxes: Sequence[Box]) -> Float[Tensor, "B 3 h w"]:
    """Each image with its box, in its pixels, replaced by its mean colour; pixels count whose centre lies inside."""
    height, width = images.shape[2:]
    x, y = (torch.arange(n, device=images.device) + 0.5 for n in (width, height))
    edges = torch.tensor([box.edges for box in boxes], device=images.device)[:, :, None]
    columns, rows = (x >= edges[:, 0]) & (x < edges[:, 2]), (y >= edges[:, 1]) & (y < edges[:, 3])
    mask = rows[:, None, :, None] & columns[:, None, None, :]
    return torch.where(mask, images.mean(dim=(2, 3), keepdim=True), images)


def random_boxes(box: Box, side: int, count: int, generator: torch.Generator) -> list[Box]:
    """Boxes of the same size, anywhere in a square image."""
    places = torch.rand(count, 2, generator=generator, dtype=torch.float64).tolist()
    free_x, free_y = max(side - box.width, 0.0), max(side - box.height, 0.0)
    return [Box.from_corner(free_x * x, free_y * y, box.width, box.height) for x, y in places]


@torch.no_grad()
def hide_boxes(
    features: Features,
    probes: Probes,
    boxes: Sequence[Sequence[Box]],
    before: Sequence[float],
    generator: torch.Generator,
) -> list[list[OcclusionEffect]]:
    """For each probe the test of each of its boxes, all of which go through the network together."""
    side, rows_of, hide = probes.images.shape[-1], list[int](), list[Box]()
    for i, own in enumerate(boxes):
        for box in own:
            hide += [box, *random_boxes(box, side, RANDOM_BOXES, generator)]
            rows_of += [i] * (1 + RANDOM_BOXES)
    if not hide:
        return [[] for _ in boxes]
    found = similarities(features, probes.with_images(hidden(probes.images[rows_of], hide), rows_of))
    rows = iter(found.view(-1, 1 + RANDOM_BOXES).tolist())
    tests = []
    for own, start in zip(boxes, before, strict=True):
        tests.append([OcclusionEffect(start, row[0], sum(row[1:]) / RANDOM_BOXES) for row in (next(rows) for _ in own)])
    return tests


@torch.no_grad()
def occlude(features: Features, probes: Probes, before: Sequence[float]) -> Float[Tensor, "B n n"]:
    """How much each prototype's similarity falls on average over the windows that hide a place.

    The probes are of one image; the windows are the same for all.
    """
    image, prototypes = probes.images[0], probes.prototypes
    side, cells = image.shape[-1], _WINDOWS + 1
    stride = side / cells
    corners = [(row, column) for row in range(_WINDOWS) for column in range(_WINDOWS)]
    boxes = [Box.from_corner(column * stride, row * stride, 2 * stride, 2 * stride) for row, column in corners]
    fall = torch.zeros(len(prototypes), cells, cells, device=image.device)
    count = torch.zeros(cells, cells, device=image.device)
    start = torch.tensor(before, device=image.device)
    for first in range(0, len(boxes), _BATCH):
        some = boxes[first : first + _BATCH]
        feature_map = features(hidden(image.expand(len(some), -1, -1, -1), some))
        for number, (row, column) in enumerate(corners[first : first + _BATCH]):
            own = feature_map[number : number + 1].expand(len(prototypes), -1, -1, -1)
            now = probes.similarity(patch_distances(own, prototypes).amin(dim=1))
            fall[:, row : row + 2, column : column + 2] += (start - now)[:, None, None]
            count[row : row + 2, column : column + 2] += 1
    return fall / count

"""What a similarity depends on in the image: gradients, occlusion, perturbations.

The cell of the nearest patch is where the network's map says the prototype is, but each number of that map depends on
much more of the image than its cell. *Hidden* always means: replaced by the image's mean colour. The similarity after
hiding is the tree's own, that of the best patch anywhere in the image.

Notation used for tensor shapes: B batch, D prototype depth, H₁ W₁ prototype, h w pixels, n cells of a grid.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, grid_sample, pad

from prototree.backbones.backbone import FeatureExtractor
from prototree.backbones.crops import FULL_ONLY, center_crop
from prototree.backbones.geometry import Box, Preprocessing
from prototree.core.model import ProtoTree, extract_patches
from prototree.core.nodes import NodeFunction
from prototree.explanation.records import Perturbation, PerturbationEffect

Features = Callable[[Tensor], Tensor]  # images B×3×h×w to feature maps B×D×H×W
Images = Float[Tensor, "B 3 h w"]

STEPS = (0.3, 0.6, 0.9)  # from the mean colour (0) to the image (1)
RANDOM_BOXES = 3
_NOISE = 0.1  # standard deviation, in normalised pixels
_CELLS = 28  # at most, each way, of an attribution's grid
_WINDOWS = 7  # each way, of half-overlapping windows of a quarter of the side
_BATCH = 32
_LUMA = (0.299, 0.587, 0.114)
_CONTRAST = 0.4  # what is left of it
_SMOOTH_RADIUS = 1 / 40  # of the image's side
_SMOOTH_EDGE = 0.1  # differences of brightness below this are texture, above it edges
_BEND = 0.04  # of the image's side
_WAVES = 3.0  # over the image


@dataclass(frozen=True)
class Probes:
    """Pairs of an image and a prototype, and the patch of the image that is looked at."""

    images: Images
    prototypes: Float[Tensor, "B D H1 W1"]
    patch: Int[Tensor, " B"]
    radius: Float[Tensor, " B"]
    node_function: NodeFunction

    @classmethod
    def of(cls, tree: ProtoTree, images: Images, prototypes: Sequence[int], patch: Int[Tensor, " B"]) -> "Probes":
        """Pair images with prototypes of a tree, given by their rows."""
        rows = list(prototypes)
        return cls(images, tree.prototypes.detach()[rows], patch, tree.radius[rows], tree.node_function)

    def similarity(self, distance: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Convert distances of patches to the probes' prototypes."""
        return self.node_function.similarity(distance, self.radius)

    def with_images(self, images: Images, rows: Sequence[int]) -> "Probes":
        """Pair other images, each with the prototype of one of these probes."""
        chosen = list(rows)
        return Probes(images, self.prototypes[chosen], self.patch[chosen], self.radius[chosen], self.node_function)


def patch_distances(
    feature_map: Float[Tensor, "B D H W"], prototypes: Float[Tensor, "B D H1 W1"]
) -> Float[Tensor, "B P"]:
    """Compute the distance of every patch of each image to that image's own prototype."""
    patches = extract_patches(feature_map, (prototypes.shape[2], prototypes.shape[3]))
    distance: Tensor = torch.linalg.vector_norm(patches - prototypes.flatten(1)[:, None], dim=2)
    return distance


@torch.no_grad()
def similarities(features: Features, probes: Probes) -> Float[Tensor, " B"]:
    """Compute the similarity of each image's best patch to its own prototype, a batch of bounded size at a time."""
    pairs = zip(probes.images.split(_BATCH), probes.prototypes.split(_BATCH), strict=True)
    distance = torch.cat([patch_distances(features(images), rows).amin(dim=1) for images, rows in pairs])
    return probes.similarity(distance)


def attribute(features: Features, probes: Probes, generator: torch.Generator) -> Float[Tensor, "B n n"]:
    """Attribute similarity to parts of the image: integrated gradients of a patch's distance, smoothed by noise.

    Positive where a part brings the patch nearer to its prototype. The sum over the grid approximates the distance of
    an image of nothing but the mean colour, less the image's own. At a projected prototype's own image the plain
    gradient would be 0, because the distance is 0 and cannot fall; on the way there it is not.
    """
    background = probes.images.mean(dim=(2, 3), keepdim=True)
    total = torch.zeros_like(probes.images)
    for step in STEPS:
        noise = torch.randn(probes.images.shape, generator=generator).to(probes.images)
        image = (torch.lerp(background.expand_as(probes.images), probes.images, step) + _NOISE * noise).detach()
        image.requires_grad_(True)
        (gradient,) = torch.autograd.grad(-_probed_distances(features, image, probes).sum(), image)
        total += gradient / len(STEPS)
    side = probes.images.shape[-1]
    n_cells = max(1, min(_CELLS, side // 4))
    pixels = ((probes.images - background) * total).sum(dim=1)
    return adaptive_avg_pool2d(pixels[:, None], n_cells)[:, 0] * (side / n_cells) ** 2


def _probed_distances(features: Features, images: Images, probes: Probes) -> Float[Tensor, " B"]:
    """Compute the distance of each probe's patch; of a network with several crops, only the one that shows it runs."""
    if not isinstance(features, FeatureExtractor) or features.backbone.crops == FULL_ONLY:
        return patch_distances(features(images), probes.prototypes).gather(1, probes.patch[:, None])[:, 0]
    n_patches, indices, dists = math.prod(features.backbone.map_size), list[Tensor](), list[Tensor]()
    for crop, fraction in enumerate(features.backbone.crops):
        rows = torch.nonzero(probes.patch // n_patches == crop)[:, 0]
        if len(rows):
            maps = features.from_map(features.backbone.forward_single(center_crop(images[rows], fraction)))
            patch = (probes.patch[rows] - crop * n_patches)[:, None]
            indices.append(rows)
            dists.append(patch_distances(maps, probes.prototypes[rows]).gather(1, patch)[:, 0])
    return torch.cat(dists)[torch.cat(indices).argsort()]


def hidden(images: Images, boxes: Sequence[Box]) -> Images:
    """Replace each image's box, in its pixels, by its mean colour; pixels count whose centre lies inside."""
    height, width = images.shape[2:]
    x, y = (torch.arange(n, device=images.device) + 0.5 for n in (width, height))
    edges = torch.tensor([box.edges for box in boxes], device=images.device)[:, :, None]
    columns, rows = (x >= edges[:, 0]) & (x < edges[:, 2]), (y >= edges[:, 1]) & (y < edges[:, 3])
    mask = rows[:, None, :, None] & columns[:, None, None, :]
    return torch.where(mask, images.mean(dim=(2, 3), keepdim=True), images)


def random_boxes(box: Box, side: int, generator: torch.Generator) -> list[Box]:
    """Draw boxes of the same size, anywhere in a square image."""
    corners = torch.rand(RANDOM_BOXES, 2, generator=generator, dtype=torch.float64).tolist()
    free_x, free_y = max(side - box.width, 0.0), max(side - box.height, 0.0)
    return [Box.from_corner(free_x * x, free_y * y, box.width, box.height) for x, y in corners]


@torch.no_grad()
def occlude(features: Features, probes: Probes, before: Sequence[float]) -> Float[Tensor, "B n n"]:
    """Compute an occlusion map: how much each similarity falls on average over the windows that hide a cell.

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
        windows = boxes[first : first + _BATCH]
        feature_map = features(hidden(image.expand(len(windows), -1, -1, -1), windows))
        for number, (row, column) in enumerate(corners[first : first + _BATCH]):
            window_map = feature_map[number : number + 1].expand(len(prototypes), -1, -1, -1)
            after = probes.similarity(patch_distances(window_map, prototypes).amin(dim=1))
            fall[:, row : row + 2, column : column + 2] += (start - after)[:, None, None]
            count[row : row + 2, column : column + 2] += 1
    return fall / count


def perturbation_effects(
    features: Features, probes: Probes, before: Sequence[float], preprocessing: Preprocessing
) -> list[tuple[PerturbationEffect, ...]]:
    """Measure how each probe's similarity changes with each perturbation: why a prototype matches.

    A similarity that survives grey but not bent outlines was about shape.
    """
    mean, std = (probes.images.new_tensor(v).view(1, 3, 1, 1) for v in (preprocessing.mean, preprocessing.std))
    pixels = (probes.images * std + mean).clamp(0, 1)
    altered = torch.cat([(alter(pixels) - mean) / std for alter in PERTURBATIONS.values()])
    rows = [row for _ in PERTURBATIONS for row in range(len(pixels))]
    after = similarities(features, probes.with_images(altered, rows)).view(len(PERTURBATIONS), -1).T.tolist()
    return [
        tuple(PerturbationEffect(name, value - start) for name, value in zip(PERTURBATIONS, row, strict=True))
        for row, start in zip(after, before, strict=True)
    ]


def turn_hue(images: Images) -> Images:
    """Turn every colour into its complement of the same lightness, weakened where it would leave [0, 1]."""
    grey = _luma(images)
    colour = grey - images
    room = torch.where(colour > 0, (1 - grey) / colour.clamp_min(1e-6), grey / (-colour).clamp_min(1e-6))
    return grey + colour * room.amin(dim=1, keepdim=True).clamp(0, 1)


def remove_saturation(images: Images) -> Images:
    """Turn every colour into grey of the same lightness."""
    return _luma(images).expand_as(images)


def lower_contrast(images: Images) -> Images:
    """Move every colour towards the image's mean colour."""
    mean = images.mean(dim=(2, 3), keepdim=True)
    return mean + _CONTRAST * (images - mean)


def smooth_texture(images: Images) -> Images:
    """Blur fine detail, keeping edges and colours (a guided filter of the image by itself, twice)."""
    radius = max(1, round(_SMOOTH_RADIUS * images.shape[-1]))
    for _ in range(2):
        mean = _blur(images, radius)
        variance = (_blur(images * images, radius) - mean * mean).clamp_min(0).amax(dim=1, keepdim=True)
        keep = variance / (variance + _SMOOTH_EDGE**2)
        images = _blur(keep, radius) * images + _blur((1 - keep) * mean, radius)
    return images


def bend_shape(images: Images) -> Images:
    """Bend outlines by waves, keeping colours and fine texture."""
    y, x = ((torch.arange(n, device=images.device, dtype=images.dtype) + 0.5) / n * 2 - 1 for n in images.shape[2:])
    across = x[None, :] + 2 * _BEND * torch.sin(math.pi * _WAVES * y)[:, None]
    down = y[:, None] + 2 * _BEND * torch.sin(math.pi * _WAVES * x)[None, :]
    grid = torch.stack([across, down], dim=2).expand(len(images), -1, -1, -1)
    return grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


PERTURBATIONS: dict[Perturbation, Callable[[Images], Images]] = {  # each alters one property of RGB from 0 to 1
    "hue": turn_hue,
    "saturation": remove_saturation,
    "contrast": lower_contrast,
    "texture": smooth_texture,
    "shape": bend_shape,
}


def _luma(images: Images) -> Float[Tensor, "B 1 h w"]:
    return (images.new_tensor(_LUMA).view(1, 3, 1, 1) * images).sum(dim=1, keepdim=True)


def _blur(images: Float[Tensor, "B C h w"], radius: int) -> Float[Tensor, "B C h w"]:
    """Average over a square window: sums from the edge to here, less sums from the edge to the window's start."""
    edge = min(radius, images.shape[-1] - 1, images.shape[-2] - 1)
    width, padded = 2 * edge + 1, pad(images, (edge,) * 4, mode="reflect")
    down = pad(padded, (0, 0, 1, 0)).cumsum(dim=2)
    rows = (down[:, :, width:] - down[:, :, :-width]) / width
    across = pad(rows, (1, 0)).cumsum(dim=3)
    return (across[..., width:] - across[..., :-width]) / width

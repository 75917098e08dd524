"""Which region of an image the network is shown, perhaps with a box occluded, and the way back to pixels of the image.

The paper (supplement, "Data Augmentation") cuts each training image of CUB "into four corners based on the bounding box
annotations", adds the full image, and projects on "cropped training images only". As in the published code, the box is
enlarged by 10 % of its width and height on each side, and each corner view runs from a corner of the *image* to the
opposite corner of the enlarged box, so that every view shows the whole bird. Projection sees the box itself, without a
margin. Two differences: our regions are not rounded to whole pixels, and they are cut when the image is read, so that
no second JPEG compression blurs them.

An image is squashed to a square, then its centre is cut out (see `Preprocessing`); `to_image` and `from_image` undo and
repeat exactly that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, get_args

import numpy as np
from PIL import Image

from prototree.backbones.geometry import Box, Preprocessing, Size
from prototree.data.dataset import Kind, Part, Sample
from prototree.data.images import check_header

CORNER_MARGIN = 0.1
CLOSE_MARGIN = 0.4
MIDDLE_MARGIN = 0.15  # of an image without a box: its middle 70 % each way

Fill = Literal["blur", "noise", "margin"]
_BLUR_SIDE = 9  # pixels each way that a blurred image keeps


@dataclass(frozen=True)
class View:
    """A region of the upright image (`None`: all of it), mirrored left to right if `flip`."""

    name: str
    region: Box | None = None
    flip: bool = False

    def region_of(self, size: Size) -> Box:
        """The region in pixels of an image of this size."""
        return self.region if self.region is not None else Box.whole(size)

    def render(self, square: Image.Image) -> Image.Image:
        """The view, given its region as a square."""
        return square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if self.flip else square


@dataclass(frozen=True, kw_only=True)
class OccludedView(View):
    """A view with a box occluded, for the occlusion loss: its edges as fractions of the view's sides, and the fill.

    The fill is never the image's mean colour: that is what trees are tested with, so that none can learn the test.
    """

    box: Box
    fill: Fill
    seed: int  # of the noise, and of the corner that a piece of the margin is taken from

    def render(self, square: Image.Image) -> Image.Image:
        square = super().render(square)
        pixels, rng = np.array(square), np.random.default_rng(self.seed)
        side = len(pixels)
        left, top, right, bottom = (round(side * edge) for edge in self.box.edges)
        if self.fill == "blur":
            coarse = square.resize((_BLUR_SIDE, _BLUR_SIDE), Image.Resampling.BOX)
            fill = np.asarray(coarse.resize(square.size, Image.Resampling.BILINEAR))[top:bottom, left:right]
        elif self.fill == "noise":
            mean, std = pixels.mean(axis=(0, 1)), pixels.std(axis=(0, 1))
            fill = rng.normal(mean, std, (bottom - top, right - left, 3)).round().clip(0, 255)
        else:
            y, x = (int(rng.integers(2)) * (side - length) for length in (bottom - top, right - left))
            fill = pixels[y : y + bottom - top, x : x + right - left].copy()
        pixels[top:bottom, left:right] = fill
        return Image.fromarray(pixels)


FULL_IMAGE = View("full")


def training_views(sample: Sample, kind: Kind) -> tuple[View, ...]:
    """The paper's training views: for CUB the four corners and the full image, else the full image."""
    if kind != "cub" or sample.box is None:
        return (FULL_IMAGE,)
    width, height = map(float, image_size(sample))
    box = sample.box.enlarge(CORNER_MARGIN).clip(image_size(sample))
    return (
        View("upper left", Box(0.0, 0.0, box.right, box.bottom)),
        View("upper right", Box(box.left, 0.0, width, box.bottom)),
        View("lower left", Box(0.0, box.top, box.right, height)),
        View("lower right", Box(box.left, box.top, width, height)),
        FULL_IMAGE,
    )


def projection_views(sample: Sample, kind: Kind, *, margin: float = 0.0) -> tuple[View, ...]:
    """The one view prototypes are projected on: for CUB the bounding box, else the full image."""
    if kind != "cub" or sample.box is None:
        return (FULL_IMAGE,)
    return (View("box", sample.box.enlarge(margin).clip(image_size(sample))),)


def source_views(sample: Sample) -> tuple[View, ...]:
    """Where the recipe `distill` takes prototypes from: the full image, and a crop to its subject."""
    return (FULL_IMAGE, View("middle" if sample.box is None else "box", _subject(sample)))


def random_views(sample: Sample, count: int, seed: int) -> tuple[View, ...]:
    """More views to train on: the image mirrored, then random crops that keep the subject, mirrored or not.

    Crops come in turn from between the image and the subject and from close around the subject. The same for the same
    seed and file name.
    """
    size, subject = image_size(sample), _subject(sample)
    rng = Random(f"{seed}/{sample.path.name}")
    views = [View("mirrored", flip=True)]
    for number in range(1, count):
        outer = Box.whole(size) if number % 2 else subject.enlarge(CLOSE_MARGIN).clip(size)
        region = Box(
            rng.uniform(outer.left, subject.left),
            rng.uniform(outer.top, subject.top),
            rng.uniform(subject.right, outer.right),
            rng.uniform(subject.bottom, outer.bottom),
        )
        views.append(View(f"crop {number}", region, flip=rng.random() < 0.5))
    return tuple(views[:count])


def evaluation_views(sample: Sample) -> tuple[View, ...]:
    """The one view for evaluation: the full image."""
    return (FULL_IMAGE,)


@dataclass(frozen=True)
class OccludedViews:
    """An occluded view for each box of an image; the same for the same boxes, whatever the file's name."""

    boxes: Mapping[Path, Sequence[Box]]

    def __call__(self, sample: Sample) -> tuple[OccludedView, ...]:
        views = []
        for number, box in enumerate(self.boxes.get(sample.path, ()), 1):
            rng = Random(repr(box.edges))
            fill = rng.choice(get_args(Fill))
            views.append(OccludedView(f"occluded {number}", box=box, fill=fill, seed=rng.getrandbits(32)))
        return tuple(views)


def _subject(sample: Sample) -> Box:
    """What the image is about: its box with a margin; where there is none, the middle of the image."""
    size = image_size(sample)
    if sample.box is not None:
        return sample.box.enlarge(CORNER_MARGIN).clip(size)
    return Box.whole(size).enlarge(-MIDDLE_MARGIN)


def image_size(sample: Sample) -> Size:
    """Upright width and height; from the file's header where the sample was not scanned."""
    return sample.size if sample.size is not None else check_header(sample.path)


def center_offset(preprocessing: Preprocessing) -> int:
    """How far the test-time crop lies from the upper left corner of the squashed image."""
    return (preprocessing.resize - preprocessing.size) // 2


def resize_square(
    image: Image.Image, preprocessing: Preprocessing, region: Box | None = None, *, size: Size | None = None
) -> Image.Image:
    """Squash a region of an image to a square of `resize` pixels; `size` is the whole image's, if this is reduced."""
    side = preprocessing.resize
    resampling = Image.Resampling.BICUBIC if preprocessing.interpolation == "bicubic" else Image.Resampling.BILINEAR
    if region is None:
        return image if image.size == (side, side) else image.resize((side, side), resampling)
    (width, height), (whole_width, whole_height) = image.size, size or image.size
    across, down = width / whole_width, height / whole_height
    # Rounding may carry an edge past the image by an ulp, and Pillow resizes no region thinner than a pixel.
    left, top = min(max(region.left * across, 0.0), width - 1.0), min(max(region.top * down, 0.0), height - 1.0)
    right, bottom = min(region.right * across, float(width)), min(region.bottom * down, float(height))
    return image.resize((side, side), resampling, box=(left, top, max(right, left + 1.0), max(bottom, top + 1.0)))


def to_image(box: Box, view: View, size: Size, preprocessing: Preprocessing) -> Box:
    """A box in pixels of the network's input, as pixels of the upright image of width and height `size`."""
    region, side, offset = view.region_of(size), preprocessing.resize, center_offset(preprocessing)
    left, right = box.left + offset, box.right + offset
    if view.flip:
        left, right = side - right, side - left
    across, down = region.width / side, region.height / side
    return Box(
        region.left + left * across,
        region.top + (box.top + offset) * down,
        region.left + right * across,
        region.top + (box.bottom + offset) * down,
    )


def from_image(point: tuple[float, float], view: View, size: Size, preprocessing: Preprocessing) -> tuple[float, float]:
    """A point of the image in pixels of the network's input; outside of it if the view does not show the point."""
    region, side, offset = view.region_of(size), preprocessing.resize, center_offset(preprocessing)
    x = (point[0] - region.left) * side / region.width
    y = (point[1] - region.top) * side / region.height
    return (side - x if view.flip else x) - offset, y - offset


def parts_in_view(sample: Sample, view: View, preprocessing: Preprocessing) -> tuple[Part, ...]:
    """The sample's parts that the view shows, in pixels of the network's input."""
    size, frame = image_size(sample), Box.whole((preprocessing.size, preprocessing.size))
    parts = [Part(part.name, *from_image((part.x, part.y), view, size, preprocessing)) for part in sample.parts]
    return tuple(part for part in parts if frame.contains(part.x, part.y))

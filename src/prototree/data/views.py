"""Which region of a photo the network is shown, and the way back from its input to the photo.

The paper (supplement, "Data Augmentation") cuts each training photo of CUB "into four corners based on the
bounding box annotations", adds the full photo, and projects on "cropped training images only". The published
code makes this precise, and we follow it: the box is enlarged by 10 % of its width and height on each side,
and each corner view runs from a corner of the *photo* to the opposite corner of the enlarged box, so that
every view shows the whole bird, each with other surroundings. Projection sees the box itself, without a
margin. Two differences: our regions are not rounded to whole pixels, and they are cut when the photo is read,
so that no second JPEG compression blurs them.

A photo is squashed to a square, then its centre is cut out (see `Preprocessing`); `to_photo` and `from_photo`
undo and repeat exactly that.
"""

from dataclasses import dataclass
from random import Random

from PIL import Image

from prototree.backbones.geometry import Box, Size
from prototree.backbones.preprocessing import Preprocessing
from prototree.data.dataset import Kind, Part, Sample
from prototree.data.images import check_header

CORNER_MARGIN = 0.1
CLOSE_MARGIN = 0.4
MIDDLE_MARGIN = 0.15  # of a photo without a box: its middle 70 % each way


@dataclass(frozen=True)
class View:
    """A region of the upright photo (`None`: all of it), mirrored left to right if `flip`."""

    name: str
    region: Box | None = None
    flip: bool = False

    def altered(self, square: Image.Image) -> Image.Image:
        """What this kind of view makes of its region as a square, apart from mirroring it: nothing."""
        return square

    def finished(self, square: Image.Image) -> Image.Image:
        """The view, given its region as a square."""
        return self.altered(square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if self.flip else square)


FULL = View("full")


def training_views(sample: Sample, kind: Kind) -> tuple[View, ...]:
    """The views one training photo is learnt from: for CUB the four corners and the full photo, else the full photo."""
    if kind != "cub" or sample.box is None:
        return (FULL,)
    width, height = map(float, photo_size(sample))
    box = sample.box.enlarge(CORNER_MARGIN).clip(photo_size(sample))
    return (
        View("upper left", Box(0.0, 0.0, box.right, box.bottom)),
        View("upper right", Box(box.left, 0.0, width, box.bottom)),
        View("lower left", Box(0.0, box.top, box.right, height)),
        View("lower right", Box(box.left, box.top, width, height)),
        FULL,
    )


def projection_views(sample: Sample, kind: Kind, *, margin: float = 0.0) -> tuple[View, ...]:
    """The one view prototypes are projected on: for CUB the bounding box, else the full photo."""
    if kind != "cub" or sample.box is None:
        return (FULL,)
    return (View("box", sample.box.enlarge(margin).clip(photo_size(sample))),)


def source_views(sample: Sample) -> tuple[View, ...]:
    """Where the recipe `distill` takes prototypes from: the photo, and a closer look at what it is about."""
    name = "middle" if sample.box is None else "box"
    return (FULL, View(name, _subject(sample)))


def varied_views(sample: Sample, count: int, seed: int) -> tuple[View, ...]:
    """More views to learn from: the photo mirrored, then random crops that keep the subject, mirrored or not.

    Crops come in turn from between the photo and the subject and from close around the subject. The same for the same
    seed and file name.
    """
    size, subject = photo_size(sample), _subject(sample)
    whole, random = Box.whole(size), Random(f"{seed}/{sample.path.name}")
    views = [View("mirrored", flip=True)]
    for number in range(1, count):
        inner, outer = (subject, whole) if number % 2 else (subject, subject.enlarge(CLOSE_MARGIN).clip(size))
        region = Box(
            random.uniform(outer.left, inner.left),
            random.uniform(outer.top, inner.top),
            random.uniform(inner.right, outer.right),
            random.uniform(inner.bottom, outer.bottom),
        )
        views.append(View(f"crop {number}", region, flip=random.random() < 0.5))
    return tuple(views[:count])


def _subject(sample: Sample) -> Box:
    """What the photo is about: its box with a margin; where there is none, the middle of the photo."""
    size = photo_size(sample)
    if sample.box is not None:
        return sample.box.enlarge(CORNER_MARGIN).clip(size)
    return Box.whole(size).enlarge(-MIDDLE_MARGIN)


def evaluation_views(sample: Sample) -> tuple[View, ...]:
    """The one view for evaluation: the whole photo."""
    return (FULL,)


def photo_size(sample: Sample) -> Size:
    """Upright width and height; from the file's head where the sample was not scanned."""
    return sample.size if sample.size is not None else check_header(sample.path)


def region_of(view: View, size: Size) -> Box:
    """The region in pixels of a photo of this size."""
    return view.region if view.region is not None else Box.whole(size)


def centre_offset(preprocessing: Preprocessing) -> int:
    """How far the test-time crop lies from the upper left corner of the squashed photo."""
    return (preprocessing.resize - preprocessing.size) // 2


def squash(
    image: Image.Image, preprocessing: Preprocessing, view: View = FULL, *, size: Size | None = None
) -> Image.Image:
    """The view as a square of `resize` pixels; `size` is the whole photo's, if the image is a reduced one."""
    return view.finished(squared(image, preprocessing, view.region, size=size))


def squared(
    image: Image.Image, preprocessing: Preprocessing, region: Box | None, *, size: Size | None = None
) -> Image.Image:
    """The same of a region, neither mirrored nor altered."""
    side = preprocessing.resize
    if region is not None:
        across, down = (have / of for have, of in zip(image.size, size or image.size, strict=True))
        edges = (region.left * across, region.top * down, region.right * across, region.bottom * down)
        return image.resize((side, side), _resampling(preprocessing), box=_at_least_one_pixel(edges, image.size))
    return image if image.size == (side, side) else image.resize((side, side), _resampling(preprocessing))


def _resampling(preprocessing: Preprocessing) -> Image.Resampling:
    bicubic = preprocessing.interpolation == "bicubic"
    return Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR


def _at_least_one_pixel(edges: tuple[float, float, float, float], size: Size) -> tuple[float, float, float, float]:
    """Rounding may carry an edge past the image by an ulp, and Pillow resizes no region thinner than a pixel."""
    left, top = min(max(edges[0], 0.0), size[0] - 1.0), min(max(edges[1], 0.0), size[1] - 1.0)
    right, bottom = min(edges[2], float(size[0])), min(edges[3], float(size[1]))
    return left, top, max(right, left + 1.0), max(bottom, top + 1.0)


def to_photo(box: Box, view: View, size: Size, preprocessing: Preprocessing) -> Box:
    """A box in pixels of the network's input, as pixels of the upright photo of width and height `size`."""
    region, side = region_of(view, size), preprocessing.resize
    offset = centre_offset(preprocessing)
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


def from_photo(point: tuple[float, float], view: View, size: Size, preprocessing: Preprocessing) -> tuple[float, float]:
    """A point of the photo in pixels of the network's input; outside of it if the view does not show the point."""
    region, side = region_of(view, size), preprocessing.resize
    offset = centre_offset(preprocessing)
    x = (point[0] - region.left) * side / region.width
    y = (point[1] - region.top) * side / region.height
    return (side - x if view.flip else x) - offset, y - offset


def parts_in_view(sample: Sample, view: View, preprocessing: Preprocessing) -> tuple[Part, ...]:
    """The sample's parts that the view shows, in pixels of the network's input."""
    size, frame = photo_size(sample), Box.whole((preprocessing.size, preprocessing.size))
    placed = [Part(part.name, *from_photo((part.x, part.y), view, size, preprocessing)) for part in sample.parts]
    return tuple(part for part in placed if frame.contains(part.x, part.y))

"""Images that the app shows, by split and index, and patches of them; pictures are drawn when they are requested."""

from functools import lru_cache
from typing import Literal

from prototree.app.schemas import GridResponse, ImageResponse, PatchResponse, Split
from prototree.backbones.geometry import Box
from prototree.data.crops import image_size
from prototree.data.dataset import Sample
from prototree.data.images import LoadedImage, webp
from prototree.editing.edits import Region
from prototree.editing.session import EditSession
from prototree.editing.state import TreeState
from prototree.editing.workbench import Cell
from prototree.errors import DataError
from prototree.explanation.assets import cut_out, open_photo, reduced
from prototree.explanation.records import CONTEXT_SCALE, Picture

PICTURE_SIDE = 1024  # pixels of the longer side of a whole image
_THUMB_SIDE, _REGION_SIDE = 160, 192
PictureKind = Literal["picture", "thumb"]


class NotFoundError(Exception):
    """No such image, node or result."""


def encode(picture: Picture) -> bytes:
    """Encode a picture as WebP, quickly: somebody waits for it."""
    return webp(picture, quality=82, method=2)


class Gallery:
    """The training and validation images of a session."""

    def __init__(self, session: EditSession) -> None:
        self._workbench = session.workbench
        validation = tuple(entry.sample for entry in session.validation.entries)
        self._samples: dict[Split, tuple[Sample, ...]] = {"training": session.data.train, "validation": validation}
        self._index = {self._workbench.name(sample): index for index, sample in enumerate(session.data.train)}
        self._draw_cached = lru_cache(maxsize=1024)(self._draw)

    def count(self, split: Split) -> int:
        return len(self._samples[split])

    def images(self, split: Split, label: int | None, start: int, count: int) -> list[ImageResponse]:
        """List images, all or those of a class."""
        chosen = [i for i, sample in enumerate(self._samples[split]) if label is None or sample.label == label]
        return [self.image(split, index) for index in chosen[start : start + count]]

    def image(self, split: Split, index: int) -> ImageResponse:
        sample = self.sample(split, index)
        width, height = image_size(sample)
        return ImageResponse(
            split=split,
            index=index,
            name=self._workbench.name(sample),
            label=sample.label,
            width=width,
            height=height,
            picture=f"/images/{split}/{index}/picture",
            thumb=f"/images/{split}/{index}/thumb",
        )

    def training_image(self, index: int) -> ImageResponse:
        """Describe a training image with the grid of patches of its full view, to choose a patch in."""
        image = self.image("training", index)
        cells, corner = self._workbench.tree.grid, self._workbench.locate(image.name, (-1e9, -1e9, -1e9, -1e9))
        left, top, right, bottom = corner.box
        image.grid = GridResponse(
            left=left,
            top=top,
            cell_width=(right - left) / cells.width,
            cell_height=(bottom - top) / cells.height,
            rows=cells.rows,
            columns=cells.columns,
            patch_rows=cells.height,
            patch_columns=cells.width,
        )
        return image

    def sample(self, split: Split, index: int) -> Sample:
        samples = self._samples[split]
        if not 0 <= index < len(samples):
            raise NotFoundError(f"expected a {split} image from 0 to {len(samples) - 1}, got {index}")
        return samples[index]

    def open(self, split: Split, index: int) -> LoadedImage:
        """Decode an image; one that has gone or is damaged is not found: the request is not to blame."""
        try:
            return open_photo(self.sample(split, index).path)
        except DataError as error:
            raise NotFoundError(str(error)) from error

    def picture(self, split: Split, index: int, kind: PictureKind) -> bytes:
        self.sample(split, index)
        return self._draw_cached(split, index, _THUMB_SIDE if kind == "thumb" else PICTURE_SIDE, None)

    def region(self, index: int, region: Region) -> bytes:
        self.sample("training", index)
        return self._draw_cached("training", index, _REGION_SIDE, region)

    def source_cell(self, state: TreeState, row: int) -> Cell | None:
        """Return the patch that a prototype comes from, if its image is among the training images."""
        source = state.tree.sources[row]
        if source is None or not self._workbench.has(source.image, source.crop):
            return None
        return Cell(source.image, source.crop, source.patch, source.patch_box)

    def patch(self, state: TreeState, row: int, cell: Cell, similarity: float) -> PatchResponse:
        image, box = self.image("training", self._index[cell.image]), self._workbench.display_box(state, row, cell)
        size = (image.width, image.height)
        around = Box(*box).context_square(CONTEXT_SCALE, size)
        return PatchResponse(
            image=image,
            view=cell.view,
            patch=list(cell.patch),
            box=list(cell.box),
            display_box=list(box),
            crop=self.region_url(cell, box),
            context=self.region_url(cell, around.edges),
            frame=[round(edge, 4) for edge in Box(*box).clip(size).relative_to(around)],
            similarity=similarity,
        )

    def image_url(self, cell: Cell, kind: PictureKind = "picture") -> str:
        return f"/images/training/{self._index[cell.image]}/{kind}"

    def region_url(self, cell: Cell, region: Region) -> str:
        edges = "/".join(str(max(round(edge), 0)) for edge in region)
        return f"/images/training/{self._index[cell.image]}/region/{edges}"

    def _draw(self, split: Split, index: int, side: int, region: Region | None) -> bytes:
        image = self.open(split, index)
        return encode(cut_out(image, Box(*region), side) if region is not None else reduced(image, side))

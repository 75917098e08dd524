"""The photos that the app shows, by number, and patches of them; pictures are drawn when they are asked for."""

from functools import lru_cache
from typing import Literal

from prototree.app import schemas
from prototree.app.results import NotFoundError, picture_file
from prototree.backbones.geometry import Box
from prototree.data.dataset import ImageData, Sample
from prototree.data.images import Photo
from prototree.data.views import photo_size
from prototree.editing.edits import Region
from prototree.editing.state import TreeState
from prototree.editing.workbench import Cell, Workbench
from prototree.errors import DataError, EditError
from prototree.explain.prototype_pictures import cut_out, open_photo, reduced
from prototree.explain.records import AROUND

PICTURE_SIDE = 1024  # pixels of the longer side of a whole photo
_THUMB_SIDE, _CROP_SIDE = 160, 128
_REGION_SIDE = 192


class Gallery:
    """Training photos and photos for feedback."""

    def __init__(self, workbench: Workbench, data: ImageData) -> None:
        self._bench = workbench
        self._photos: dict[str, tuple[Sample, ...]] = {
            "training": data.train,
            "feedback": tuple(entry.sample for entry in workbench.feedback.entries),
        }
        self._number = {workbench.name(sample): index for index, sample in enumerate(data.train)}
        self._drawn = lru_cache(maxsize=1024)(self._draw)

    def count(self, split: str) -> int:
        return len(self._photos[split])

    def photos(self, split: str, label: int | None, start: int, count: int) -> list[schemas.PhotoShape]:
        """Some photos, all or those of a class."""
        samples = self._photos[split]
        found = [i for i, sample in enumerate(samples) if label is None or sample.label == label]
        return [self.photo(split, index) for index in found[start : start + count]]

    def photo(self, split: str, index: int) -> schemas.PhotoShape:
        """What there is to say of a photo."""
        sample = self.sample(split, index)
        width, height = photo_size(sample)
        where = f"/photos/{split}/{index}"
        return schemas.PhotoShape(
            split=split,  # type: ignore[arg-type]
            index=index,
            name=self._bench.name(sample),
            label=sample.label,
            width=width,
            height=height,
            picture=f"{where}/picture",
            thumb=f"{where}/thumb",
        )

    def training_photo(self, index: int) -> schemas.PhotoGridShape:
        """A photo with the grid of patches of its whole view, for dragging a region on it."""
        photo = self.photo("training", index)
        tree, cell = self._bench.tree, self._bench.locate(photo.name, (-1e9, -1e9, -1e9, -1e9))
        cells = tree.grid
        left, top, right, bottom = cell.box
        grid = schemas.GridShape(
            left=left,
            top=top,
            across=(right - left) / cells.width,
            down=(bottom - top) / cells.height,
            rows=cells.rows,
            columns=cells.columns,
            patch_rows=cells.height,
            patch_columns=cells.width,
        )
        return schemas.PhotoGridShape(**photo.model_dump(), grid=grid)

    def picture(self, split: str, index: int, kind: str) -> bytes:
        """A photo as WebP."""
        self.sample(split, index)
        return self._drawn(split, index, _THUMB_SIDE if kind == "thumb" else PICTURE_SIDE, None)

    def crop(self, index: int, view: str, row: int, column: int) -> bytes:
        """A patch of a training photo as WebP."""
        name = self._bench.name(self.sample("training", index))
        try:
            cell = self._bench.cell(name, view, (row, column))
        except EditError as error:
            raise NotFoundError(str(error)) from error
        return self._drawn("training", index, _CROP_SIDE, cell.box)

    def region(self, index: int, box: tuple[int, int, int, int]) -> bytes:
        """What lies in a box of a training photo as WebP."""
        self.sample("training", index)
        left, top, right, bottom = map(float, box)
        return self._drawn("training", index, _REGION_SIDE, (left, top, right, bottom))

    def sample(self, split: str, index: int) -> Sample:
        """A photo by its number."""
        samples = self._photos[split]
        if not 0 <= index < len(samples):
            raise NotFoundError(f"expected a {split} photo from 0 to {len(samples) - 1}, got {index}")
        return samples[index]

    def open(self, split: str, index: int) -> Photo:
        """A photo itself. One that has gone or is damaged is not there: no request could be better."""
        try:
            return open_photo(self.sample(split, index).path)
        except DataError as error:
            raise NotFoundError(str(error)) from error

    def name(self, index: int) -> str:
        """A training photo's name, as in the sources of prototypes."""
        return self._bench.name(self.sample("training", index))

    def own_cell(self, state: TreeState, index: int) -> Cell | None:
        """The patch that a prototype is, where its photo is among the training photos."""
        source = state.tree.sources[index]
        if source is None or not self._bench.has(source.image, source.view):
            return None
        return Cell(source.image, source.view, source.patch, source.box)

    def patch(self, state: TreeState, prototype: int, cell: Cell, similarity: float) -> schemas.PatchShape:
        """What there is to say of a patch that was found for a prototype."""
        photo, shown = self.photo("training", self._number[cell.image]), self._bench.shown(state, prototype, cell)
        size = (photo.width, photo.height)
        about = Box(*shown).surroundings(AROUND, size)
        return schemas.PatchShape(
            photo=photo,
            view=cell.view,
            patch=list(cell.patch),
            box=list(cell.box),
            shown=list(shown),
            crop=self.crop_url(cell, shown),
            around=self.crop_url(cell, about.edges),
            frame=[round(edge, 4) for edge in Box(*shown).clip(size).shares_of(about)],
            similarity=similarity,
        )

    def photo_url(self, cell: Cell, kind: Literal["picture", "thumb"] = "picture") -> str:
        """Where the photo of a patch is."""
        return f"/photos/training/{self._number[cell.image]}/{kind}"

    def crop_url(self, cell: Cell, shown: Region) -> str:
        """Where the picture of what is shown of a patch, or of a patch's photo, is."""
        edges = "/".join(str(max(round(edge), 0)) for edge in shown)
        return f"/photos/training/{self._number[cell.image]}/region/{edges}"

    def _draw(self, split: str, index: int, side: int, box: tuple[float, float, float, float] | None) -> bytes:
        photo = self.open(split, index)
        return picture_file(cut_out(photo, Box(*box), side) if box is not None else reduced(photo, side))

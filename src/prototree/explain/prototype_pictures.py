"""Small pictures of photos and of what lies in a box of them, and the pictures of the prototypes that a run keeps."""

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Mapping
from functools import cached_property, lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from prototree.backbones.geometry import Box, Size
from prototree.core.model import ProtoTree, PrototypeSource
from prototree.data.dataset import ImageData
from prototree.data.images import Photo, read_photo, webp
from prototree.errors import CheckpointError, DataError
from prototree.explain.records import Picture, Surroundings
from prototree.files import DIGESTS, read_json, read_listed, write_listed

log = logging.getLogger(__name__)

PHOTO_SIDE = 256  # pixels of the longer side of a whole photo's picture
THUMB_SIDE = 128  # of one among many
CROP_SIDE = 128
AROUND_SIDE = 192  # of the surroundings of a patch
CLASS_SIDE = 176  # of an example of a class
_DETAIL = 1024  # a photo's shorter side keeps at least this many pixels before a box is cut out of it
_GREY = 160
_QUALITY = 90  # of stored pictures
PICTURE_LIST = "prototypes.json"
_VERSION = 2
_KEPT = 512  # pictures held in memory
_UNUSABLE = (DataError, CheckpointError, LookupError, TypeError, ValueError)


def open_photo(path: Path) -> Photo:
    """A photo for making pictures of: large ones are decoded at a fraction of their size."""
    return read_photo(path, at_least=_DETAIL)


def reduced(photo: Photo, side: int = PHOTO_SIDE) -> Picture:
    """The whole photo, its longer side at most `side` pixels."""
    image = photo.image
    scale = min(side / max(image.size), 1.0)
    size = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
    return np.asarray(image.resize(size, Image.Resampling.LANCZOS) if size != image.size else image).copy()


def cut_out(photo: Photo, box: Box, side: int = CROP_SIDE) -> Picture:
    """What lies in a box of the photo, at least a pixel; never enlarged."""
    image = photo.image
    across, down = image.width / photo.size[0], image.height / photo.size[1]
    left = min(max(round(box.left * across), 0), image.width - 1)
    top = min(max(round(box.top * down), 0), image.height - 1)
    right = min(max(round(box.right * across), left + 1), image.width)
    bottom = min(max(round(box.bottom * down), top + 1), image.height)
    crop = image.crop((left, top, right, bottom))
    return reduced(Photo(crop, crop.size), side)


def grey_square(side: int = 32) -> Picture:
    """Stands where there is no picture."""
    return np.full((side, side, 3), _GREY, dtype=np.uint8)


@dataclasses.dataclass(frozen=True)
class SourcePictures:
    """The pictures of one prototype's source."""

    crop: Picture
    photo: Picture
    size: Size
    found: bool = True  # False: grey squares stand for them


class PrototypePictures:
    """The crop and the photo of each prototype: from the data where it is, else as stored in the run, else grey.

    >>> pictures = PrototypePictures(tree, data)
    >>> pictures.crop(0)
    """

    def __init__(self, tree: ProtoTree, data: ImageData | None = None, stored: Path | None = None) -> None:
        self._sources = tree.sources
        self._paths = _paths_by_name(data) if data is not None else None
        self._stored = stored if stored is not None and _describes(stored, tree) else None
        self._shown = lru_cache(maxsize=_KEPT)(self._find)

    def crop(self, prototype: int) -> Picture:
        """The prototype's patch, cut out of its photo."""
        return self._shown(prototype).crop

    def photo(self, prototype: int) -> Picture:
        """The photo that the prototype was found in."""
        return self._shown(prototype).photo

    def around(self, prototype: int) -> Surroundings | None:
        """The patch with its surroundings; None if there is no picture of it."""
        source, shown = self._sources[prototype], self._shown(prototype)
        if source is None or not shown.found:
            return None
        return Surroundings.of(shown.photo, shown.size, Box(*(source.shown or source.box)))

    def of(self, prototype: int) -> SourcePictures:
        """Both, and the size of the photo itself."""
        return self._shown(prototype)

    @property
    def complete(self) -> bool:
        """Whether every prototype's picture is stored, so that no data is needed."""
        if self._stored is None:
            return not self._sources
        listed = self._list
        if listed.get("version") != _VERSION:  # the first one could not say that a picture was missing
            return False
        pairs = enumerate(zip_longest(self._sources, listed.get("sizes", ())))
        return all(source is None or (size is not None and self._is_intact(number)) for number, (source, size) in pairs)

    def digests(self, prototype: int) -> dict[str, str]:
        """The SHA-256 of each stored picture of a prototype, as listed."""
        listed = self._list.get(DIGESTS, {})
        return {name: listed[name] for name in _names(prototype) if name in listed}

    def _is_intact(self, prototype: int) -> bool:
        try:
            self._stored_pictures(prototype)
        except _UNUSABLE:
            return False
        return True

    def _stored_pictures(self, prototype: int) -> SourcePictures:
        assert self._stored is not None
        width, height = self._list["sizes"][prototype]
        files = (read_listed(self._stored, self._list, name) for name in _names(prototype))
        crop, photo = (np.asarray(read_photo(content).image).copy() for content in files)
        return SourcePictures(crop, photo, (int(width), int(height)))

    @cached_property
    def _list(self) -> dict[str, Any]:
        return read_json(self._stored / PICTURE_LIST) if self._stored is not None else {}

    def _find(self, prototype: int) -> SourcePictures:
        source = self._sources[prototype]
        if source is not None and self._paths is not None:
            try:
                return _look(self._paths, source)
            except DataError as error:
                log.warning("no picture of prototype %d from the data: %s", prototype, error)
        if source is not None and self._stored is not None:
            try:
                return self._stored_pictures(prototype)
            except _UNUSABLE as error:
                log.warning("the stored picture of prototype %d cannot be used: %s", prototype, error)
        return SourcePictures(grey_square(), grey_square(), _size_from(source), found=False)


def write_pictures(tree: ProtoTree, data: ImageData, folder: Path) -> None:
    """Stores the crop and the reduced photo of every prototype, so that the folder explains without the data.

    The list says which sources the pictures are of: pictures of another projection are never used. Where a photo
    cannot be read, the picture of it that is stored already stays; without one, the prototype is listed without a size,
    and looked for again when it is shown.
    """
    sizes: list[Size | None] = []
    files: dict[str, bytes] = {}
    digests: dict[str, str] = {}
    pictures, stored = PrototypePictures(tree, data), PrototypePictures(tree, stored=folder)
    for prototype in range(tree.n_prototypes):
        shown = pictures.of(prototype)
        if shown.found:
            crop, photo = _names(prototype)
            files[crop] = webp(shown.crop, quality=_QUALITY, lossless=True)  # a few pixels, of which every one shows
            files[photo] = webp(shown.photo, quality=_QUALITY)
        else:
            shown = stored.of(prototype)
            digests |= stored.digests(prototype) if shown.found else {}
        sizes.append(shown.size if shown.found else None)
    content = {"version": _VERSION, "sizes": sizes, "sources": _identity(tree)}
    write_listed(folder, files, PICTURE_LIST, content, digests=digests)


def _paths_by_name(data: ImageData) -> dict[str, Path]:
    """The data's own photos: no name in a tree reaches any other. Manifests once named photos by file alone."""
    samples = (*data.train, *data.test, *data.validation)
    paths = {data.name(sample): sample.path for sample in samples}
    if data.kind == "manifest":
        alone = Counter(sample.path.name for sample in samples)
        paths = {sample.path.name: sample.path for sample in samples if alone[sample.path.name] == 1} | paths
    return paths


def _look(paths: Mapping[str, Path], source: PrototypeSource) -> SourcePictures:
    if source.image not in paths:
        raise DataError(f"expected the photo {source.image} in the data, found none of that name")
    photo = open_photo(paths[source.image])
    return SourcePictures(cut_out(photo, Box(*(source.shown or source.box))), reduced(photo), photo.size)


def _names(prototype: int) -> tuple[str, str]:
    return f"{prototype:03d}.webp", f"{prototype:03d}-photo.webp"


def _identity(tree: ProtoTree) -> list[Any]:
    rows = [
        source and [source.image, *(round(edge, 3) for edge in source.shown or source.box)] for source in tree.sources
    ]
    return list(json.loads(json.dumps(rows)))


def _describes(folder: Path, tree: ProtoTree) -> bool:
    if not (folder / PICTURE_LIST).exists():
        return False
    try:
        return bool(read_json(folder / PICTURE_LIST).get("sources") == _identity(tree))
    except CheckpointError as error:
        log.warning("the stored pictures cannot be used: %s", error)
        return False


def _size_from(source: PrototypeSource | None) -> Size:
    """The least size of a photo that holds the box, where the photo itself is nowhere."""
    if source is None:
        return (1, 1)
    edges = (source.box[2:], source.region[2:] if source.region else (1.0, 1.0))
    return int(max(edge[0] for edge in edges) + 0.999), int(max(edge[1] for edge in edges) + 0.999)

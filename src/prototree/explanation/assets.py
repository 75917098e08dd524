"""Assets of a run: pictures and page data about its tree, in one folder with one list, there also without the images.

Projection stores pictures of each prototype's image and histograms of the nodes; a report adds neighbours, heat maps
and tests. The list names the tree, its sources and the digest of every file: what does not fit is never shown.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from PIL import Image

from prototree.backbones.geometry import Box, Size
from prototree.backbones.inference import thread_map
from prototree.core import checkpoint
from prototree.core.model import ProtoTree, PrototypeSource
from prototree.data.dataset import ImageData
from prototree.data.images import LoadedImage, load_image, read_image, webp
from prototree.errors import CheckpointError, DataError
from prototree.explanation.records import (
    DECISION_BOUNDARIES,
    HISTOGRAM_BINS,
    HISTOGRAM_LIMITS,
    DecisionHistogram,
    Heatmap,
    Location,
    Match,
    Method,
    OcclusionEffect,
    PatchContext,
    PerturbationEffect,
    Picture,
    PrototypeExplanation,
    TreeExplanation,
)
from prototree.explanation.spotlight import spotlight
from prototree.io import DIGESTS, read_json, read_listed, write_listed
from prototree.run import ASSETS, Run

log = logging.getLogger(__name__)

ASSET_LIST, VERSION = "assets.json", 1
PHOTO_SIDE = 256  # pixels of the longer side of a whole image's picture
THUMB_SIDE = 128  # of one among many
CROP_SIDE = 128
CONTEXT_SIDE = 192  # of the surroundings of a patch
_DETAIL = 1024  # an image's shorter side keeps at least this many pixels before a box is cut out of it
_GREY = 160
_SOURCE_QUALITY, _PAGE_QUALITY = 90, 75
_HEAT_SIDE = 32
_MOST_NEIGHBOURS = 50
_PICTURES_IN_MEMORY = 512
_UNUSABLE = (DataError, CheckpointError, AttributeError, LookupError, TypeError, ValueError, OverflowError)


def open_photo(path: Path) -> LoadedImage:
    """Read an image for making pictures of: large ones are decoded at a fraction of their size."""
    return load_image(path, at_least=_DETAIL)


def reduced(photo: LoadedImage, side: int = PHOTO_SIDE) -> Picture:
    """Shrink an image so that its longer side has at most `side` pixels."""
    image = photo.image
    scale = min(side / max(image.size), 1.0)
    size = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
    return np.asarray(image.resize(size, Image.Resampling.LANCZOS) if size != image.size else image).copy()


def cut_out(photo: LoadedImage, box: Box, side: int = CROP_SIDE) -> Picture:
    """Crop a box of the image, at least a pixel; never enlarged."""
    image = photo.image
    across, down = image.width / photo.size[0], image.height / photo.size[1]
    left = min(max(round(box.left * across), 0), image.width - 1)
    top = min(max(round(box.top * down), 0), image.height - 1)
    right = min(max(round(box.right * across), left + 1), image.width)
    bottom = min(max(round(box.bottom * down), top + 1), image.height)
    crop = image.crop((left, top, right, bottom))
    return reduced(LoadedImage(crop, crop.size), side)


def node_fields(tree: ProtoTree, prototype: int) -> dict[str, Any]:
    """Look up the node of a prototype, its side and its radius, as fields of a `PrototypeExplanation`."""
    node, is_right = tree.node_of(prototype)
    radius = float(tree.radius[prototype])
    return {"prototype": prototype, "node": node, "side": "right" if is_right else "left", "radius": radius}


@dataclass(frozen=True)
class SourcePictures:
    """The pictures of one prototype's source."""

    crop: Picture
    photo: Picture
    size: Size
    found: bool = True  # False: grey squares stand for them


class AssetStore:
    """The assets of one tree in a folder; empty where there are none, or they are of another tree or damaged."""

    def __init__(self, tree: ProtoTree, folder: Path) -> None:
        self._tree, self._folder, self._content = tree, folder, dict[str, Any]()
        if not (folder / ASSET_LIST).exists():
            return
        try:
            content = read_json(folder / ASSET_LIST)
            if all(content.get(key) == value for key, value in self._header().items()):
                self._content = content
        except CheckpointError as error:
            log.warning("what is stored in %s cannot be used: %s", folder, error)

    def _header(self) -> dict[str, Any]:
        sources = [
            source and [source.image, *(round(edge, 3) for edge in source.display_box or source.patch_box)]
            for source in self._tree.sources
        ]
        return {"version": VERSION, "tree": checkpoint.fingerprint(self._tree), "sources": sources}

    def files(self) -> list[Path]:
        """List the files that hold the assets."""
        return [self._folder / name for name in (*self._content[DIGESTS], ASSET_LIST)] if self._content else []

    @property
    def has_pages(self) -> bool:
        """Whether a report has stored neighbours, heat maps and tests."""
        return "pages" in self._content

    def _save(self, files: Mapping[str, bytes], sections: Mapping[str, Any], *, sync: bool = True) -> None:
        """Add files and sections to what is stored of the same tree; the list comes last."""
        content = {**self._content, **self._header(), **sections}
        kept = {name: digest for name, digest in content.pop(DIGESTS, {}).items() if name not in files}
        write_listed(self._folder, files, ASSET_LIST, content, digests=kept, sync=sync)
        self._content = read_json(self._folder / ASSET_LIST)

    def save_pictures(self, data: ImageData) -> None:
        """Store the crop and the small image of every prototype's source.

        Where an image cannot be read, the picture of it that is stored already stays; without one, the prototype is
        listed without a size, and looked for again when it is shown.
        """
        pictures, sizes, files = PrototypePictures(self._tree, data), list[Size | None](), dict[str, bytes]()
        for row in range(self._tree.n_prototypes):
            shown = pictures.of(row)
            if shown.found:
                files[_name(row)] = webp(shown.crop, quality=_SOURCE_QUALITY, lossless=True)  # every pixel shows
                files[_name(row, "photo")] = webp(shown.photo, quality=_SOURCE_QUALITY)
            else:
                shown = self.pictures(row) or shown
            sizes.append(shown.size if shown.found else None)
        self._save(files, {"sizes": sizes})

    def save_histograms(self, histograms: Sequence[DecisionHistogram]) -> None:
        """Store how training images lie at each node."""
        self._save({}, {"histograms": [[list(h.right), list(h.left)] for h in histograms]})

    def save_pages(self, explanation: TreeExplanation) -> None:
        """Store what pages show beyond the prototypes' own pictures, so that they need no training images."""
        pictures = dict(_page_pictures(explanation))
        encoded = thread_map(partial(webp, quality=_PAGE_QUALITY), pictures.values())
        of_nodes = [p.histogram for p in explanation.prototypes[: len(explanation.left)]]  # right prototypes come first
        histograms = [[list(h.right), list(h.left)] for h in of_nodes if h is not None]
        pages = {
            "prototypes": [_encode_prototype(prototype) for prototype in explanation.prototypes],
            "class_images": [len(known.photos) for known in explanation.classes],
        }
        files = dict(zip(pictures, encoded, strict=True))
        self._save(files, {"pages": pages, "histograms": histograms}, sync=False)

    def pictures(self, row: int) -> SourcePictures | None:
        """Read the stored pictures of a prototype; None where they cannot be used."""
        try:
            if not self._content or (size := self._content["sizes"][row]) is None:
                return None
            crop, photo = self._picture(_name(row)), self._picture(_name(row, "photo"))
            return SourcePictures(crop, photo, (int(size[0]), int(size[1])))
        except _UNUSABLE as error:
            log.warning("the stored picture of prototype %d cannot be used: %s", row, error)
            return None

    def histograms(self) -> dict[int, DecisionHistogram]:
        """Read how training images lie at each node; nothing where that was never counted."""
        try:
            stored = enumerate(self._content.get("histograms", ()))
            return {node: _histogram(self._tree, counts) for node, counts in stored}
        except _UNUSABLE as error:
            log.warning("the histograms in %s cannot be used: %s", self._folder, error)
            return {}

    def class_pictures(self) -> list[tuple[Picture, ...]]:
        """Read images of each class; none where none are stored."""
        counts = self._content.get("pages", {}).get("class_images", ())
        pictures: list[tuple[Picture, ...]] = [()] * self._tree.n_classes
        for label, count in enumerate(counts if len(counts) == self._tree.n_classes else ()):
            try:
                names = [f"class-{label:04d}-{number}.webp" for number in range(min(int(count), _MOST_NEIGHBOURS))]
                pictures[label] = tuple(map(self._picture, names))
            except _UNUSABLE as error:
                log.warning("the stored images of a class cannot be used: %s", error)
        return pictures

    def prototype(self, row: int, shown: SourcePictures, note: str) -> PrototypeExplanation:
        """Explain a prototype from what is stored: at least its pictures and its box, without heat and neighbours."""
        source, page = self._tree.sources[row], self._page(row)
        locations, context = page.pop("locations", ()), page.pop("context", None)
        if not locations:
            box = _shown_box(source) if source is not None else Box.whole(shown.size)
            heat = np.zeros(shown.photo.shape[:2], dtype=np.float32)
            locations = (Location("peak" if source is not None and source.display_box else "cell", box, heat, None),)
        image, label = (source.image, source.label) if source is not None else ("", None)
        similarity = 1.0 if source is not None or page else 0.0
        fields = {"nearest": (), "class_pass_rate": (), "perturbation_effects": (), **page}
        return PrototypeExplanation(
            **node_fields(self._tree, row),
            source=Match(image, label, similarity, shown.size, shown.photo, shown.crop, locations, context),
            projection_distance=source.distance if source is not None else None,
            note=note,
            **fields,
        )

    def locations(self, row: int) -> tuple[Location, ...]:
        """Read where the prototype is in its image, and the heat maps; nothing where no report has stored that."""
        locations: tuple[Location, ...] = self._page(row).get("locations", ())
        return locations

    def perturbation_effects(self, row: int) -> tuple[PerturbationEffect, ...]:
        """Read how altered images change a prototype's similarity; nothing where no report has stored that."""
        effects: tuple[PerturbationEffect, ...] = self._page(row).get("perturbation_effects", ())
        return effects

    def _page(self, row: int) -> dict[str, Any]:
        """Decode what a report stored about a prototype; empty where there is nothing usable."""
        try:
            if not self.has_pages:
                return {}
            stored, n_classes = self._content["pages"]["prototypes"][row], self._tree.n_classes
            rates, node = tuple(map(float, stored["class_pass_rate"])), self._tree.node_of(row)[0]
            if len(rates) not in (0, n_classes) or len(stored["nearest"]) > _MOST_NEIGHBOURS:
                raise ValueError("it is of a tree with other classes")
            return {
                "locations": tuple(map(_decode_location, stored["locations"])),
                "context": self._picture(_name(row, "context")) if stored["context"] else None,
                "nearest": tuple(self._neighbour(row, rank, match) for rank, match in enumerate(stored["nearest"])),
                "class_pass_rate": rates,
                "perturbation_effects": tuple(
                    PerturbationEffect(name, float(change)) for name, change in stored["perturbation_effects"]
                ),
                "histogram": _histogram(self._tree, self._content["histograms"][node]),
            }
        except _UNUSABLE as error:
            log.warning("what is stored of prototype %d cannot be used: %s", row, error)
            return {}

    def _neighbour(self, row: int, rank: int, stored: Mapping[str, Any]) -> Match:
        label, (width, height) = int(stored["label"]), stored["size"]
        if not 0 <= label < self._tree.n_classes:
            raise ValueError("it names a class that the tree does not have")
        box, heat = Box(*map(float, stored["box"])), np.zeros((1, 1), dtype=np.float32)
        photo, crop = self._picture(_name(row, rank, "photo")), self._picture(_name(row, rank))
        size, similarity = (int(width), int(height)), float(stored["similarity"])
        return Match(str(stored["image"]), label, similarity, size, photo, crop, (Location("cell", box, heat, None),))

    def _picture(self, name: str) -> Picture:
        return np.asarray(read_image(read_listed(self._folder, self._content, name))).copy()


class PrototypePictures:
    """The crop and the image of each prototype: from the data where it is, else as stored in the run, else grey."""

    def __init__(self, tree: ProtoTree, data: ImageData | None = None, stored: Path | None = None) -> None:
        samples = (*data.train, *data.test, *data.validation) if data is not None else ()
        # The data's own images: no name in a tree reaches any other.
        self._paths = {data.name(sample): sample.path for sample in samples} if data is not None else None
        self._sources, self._store = tree.sources, AssetStore(tree, stored) if stored is not None else None
        self.of = lru_cache(maxsize=_PICTURES_IN_MEMORY)(self._find)

    def crop(self, prototype: int) -> Picture:
        """Return the prototype's patch, cut out of its image."""
        return self.of(prototype).crop

    def photo(self, prototype: int) -> Picture:
        """Return the image that the prototype was found in."""
        return self.of(prototype).photo

    def context(self, prototype: int) -> PatchContext | None:
        """Return the patch with its surroundings, lit by heat maps or else around its box; None without a picture."""
        source, shown = self._sources[prototype], self.of(prototype)
        if source is None or not shown.found:
            return None
        locations = self._store.locations(prototype) if self._store is not None else ()
        light = spotlight(locations, locations[0].box if locations else _shown_box(source), shown.size)
        return replace(PatchContext.of(shown.photo, shown.size, _shown_box(source)), light=light)

    @property
    def complete(self) -> bool:
        """Whether every prototype's picture is stored, so that no data is needed."""
        rows = [row for row, source in enumerate(self._sources) if source is not None]
        return not rows or (self._store is not None and all(map(self._store.pictures, rows)))

    def _find(self, prototype: int) -> SourcePictures:
        source = self._sources[prototype]
        if source is not None and self._paths is not None:
            try:
                if source.image not in self._paths:
                    raise DataError(f"expected the image {source.image} in the data, found none of that name")
                photo = open_photo(self._paths[source.image])
                return SourcePictures(cut_out(photo, _shown_box(source)), reduced(photo), photo.size)
            except DataError as error:
                log.warning("no picture of prototype %d from the data: %s", prototype, error)
        if source is not None and self._store is not None and (stored := self._store.pictures(prototype)) is not None:
            return stored
        grey = np.full((32, 32, 3), _GREY, dtype=np.uint8)
        return SourcePictures(grey, grey, _size_from(source), found=False)


def pictures_of(run: Run, tree: ProtoTree | None = None, data: ImageData | None = None) -> PrototypePictures:
    """Open the prototypes' pictures: from the data given, or from the run's folder, or from the run's own data."""
    tree = tree if tree is not None else run.tree()
    pictures = PrototypePictures(tree, data, run.folder / ASSETS)
    if data is not None or pictures.complete:
        return pictures
    return PrototypePictures(tree, run.data_or_none(), run.folder / ASSETS)


def stored_histograms(run: Run, tree: ProtoTree) -> dict[int, DecisionHistogram]:
    """Read how the training images lie at each node, as the run's training or last report counted them."""
    return AssetStore(tree, run.folder / ASSETS).histograms()


def _page_pictures(explanation: TreeExplanation) -> Iterator[tuple[str, Picture]]:
    for prototype in explanation.prototypes:
        row = prototype.prototype
        if prototype.source.context is not None:
            yield _name(row, "context"), prototype.source.context
        for rank, match in enumerate(prototype.nearest):
            yield _name(row, rank), match.crop
            small = Image.fromarray(match.photo)
            small.thumbnail((THUMB_SIDE, THUMB_SIDE))
            yield _name(row, rank, "photo"), np.asarray(small).copy()
    for label, known in enumerate(explanation.classes):
        for number, example in enumerate(known.photos):
            yield f"class-{label:04d}-{number}.webp", example


def _encode_prototype(prototype: PrototypeExplanation) -> dict[str, Any]:
    effects = [[effect.name, round(effect.change, 4)] for effect in prototype.perturbation_effects]
    return {
        "context": prototype.source.context is not None,
        "class_pass_rate": [round(rate, 4) for rate in prototype.class_pass_rate],
        "perturbation_effects": effects,
        "locations": [
            {
                "method": location.method,
                "box": [round(edge, 2) for edge in location.box.edges],
                "heat": _encode_heat(location.heat),
                "occlusion": location.occlusion and list(astuple(location.occlusion)),
            }
            for location in prototype.source.locations
        ],
        "nearest": [
            {
                "image": match.image,
                "label": match.label if match.label is not None else -1,
                "similarity": round(match.similarity, 4),
                "size": list(match.size),
                "box": [round(edge, 2) for edge in match.locations[0].box.edges],
            }
            for match in prototype.nearest
        ],
    }


def _decode_location(stored: Mapping[str, Any]) -> Location:
    if stored["method"] not in get_args(Method):
        raise ValueError(f"expected a method of localisation, got {stored['method']!r}")
    occlusion = OcclusionEffect(*map(float, stored["occlusion"])) if stored["occlusion"] is not None else None
    cells = np.frombuffer(bytes.fromhex(stored["heat"]), dtype=np.uint8)
    heat = cells.reshape(2 * [math.isqrt(len(cells))])
    return Location(stored["method"], Box(*map(float, stored["box"])), heat.astype(np.float32) / 255, occlusion)


def _encode_heat(heat: Heatmap) -> str:
    """Encode a heat map on a coarse grid, a byte a cell."""
    picture = Image.fromarray(np.nan_to_num(np.asarray(heat, dtype=np.float32)).clip(0, 1))
    coarse = np.asarray(picture.resize((_HEAT_SIDE, _HEAT_SIDE), Image.Resampling.BOX))
    return (coarse * 255).round().astype(np.uint8).tobytes().hex()


def _histogram(tree: ProtoTree, counts: Any) -> DecisionHistogram:
    right, left = (tuple(map(int, side)) for side in counts)
    if not len(right) == len(left) == HISTOGRAM_BINS or min(*right, *left) < 0:
        raise ValueError("its images are counted in other ranges")
    kind = tree.node_function.kind
    return DecisionHistogram(*HISTOGRAM_LIMITS[kind], DECISION_BOUNDARIES[kind], right, left)


def _name(row: int, *parts: int | str) -> str:
    """Name the file of a prototype's patch, its `photo`, its `context`, or a neighbour by its rank."""
    return f"{'-'.join([f'{row:03d}', *map(str, parts)])}.webp"


def _shown_box(source: PrototypeSource) -> Box:
    return Box(*(source.display_box or source.patch_box))


def _size_from(source: PrototypeSource | None) -> Size:
    """Compute the least size of an image that holds the box, where the image itself is nowhere."""
    if source is None:
        return (1, 1)
    edges = (source.patch_box[2:], source.crop_region[2:] if source.crop_region else (1.0, 1.0))
    return int(max(edge[0] for edge in edges) + 0.999), int(max(edge[1] for edge in edges) + 0.999)

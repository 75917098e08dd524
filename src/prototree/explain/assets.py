"""What the pages of a tree show beyond its own pictures, kept with the run: neighbours, shares, heat and tests.

It takes the training photos to find these out. Kept in a few small files, they are there where the photos are not.
"""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from PIL import Image

from prototree.backbones.geometry import Box
from prototree.backbones.thread_map import side_by_side
from prototree.core import checkpoint
from prototree.core.model import ProtoTree
from prototree.data.images import read_image, webp
from prototree.errors import CheckpointError, DataError
from prototree.explain.prototype_pictures import THUMB_SIDE, SourcePictures
from prototree.explain.prototypes import place_of
from prototree.explain.records import (
    Cause,
    Heat,
    Hiding,
    Location,
    Match,
    Method,
    Picture,
    PrototypeExplanation,
    Spread,
    TreeExplanation,
)
from prototree.explain.stored_histograms import stored_spread
from prototree.files import read_json, read_listed, write_listed

log = logging.getLogger(__name__)

PAGES = "pages"
PAGE_LIST = "pages.json"
_HEAT_SIDE = 16
_QUALITY = 75
_MOST_NEIGHBOURS = 50


def keep_pages(tree: ProtoTree, explanation: TreeExplanation, folder: Path) -> None:
    """Writes what was found out about a tree. The list comes last, and says which tree it is of."""
    pictures = dict(_pictures(explanation))
    encoded = side_by_side(partial(webp, quality=_QUALITY), pictures.values())
    files = dict(zip(pictures, encoded, strict=True))
    content = {
        "version": 1,
        "tree": checkpoint.fingerprint(tree),
        "prototypes": [_kept(one) for one in explanation.prototypes],
        "class_photos": [len(known.photos) for known in explanation.classes],
    }
    write_listed(folder, files, PAGE_LIST, content, survives=False)


def _pictures(explanation: TreeExplanation) -> Iterator[tuple[str, Picture]]:
    for one in explanation.prototypes:
        if one.source.around is not None:
            yield _around(one.prototype), one.source.around
        for rank, match in enumerate(one.nearest):
            crop, photo = _names(one.prototype, rank)
            yield crop, match.crop
            yield photo, _small(match.photo)
    for label, known in enumerate(explanation.classes):
        for number, example in enumerate(known.photos):
            yield _class_photo(label, number), example


class KeptPages:
    """What is kept about a tree; nothing, where that is of another tree or damaged."""

    def __init__(self, tree: ProtoTree, folder: Path) -> None:
        self._tree, self._folder = tree, folder
        self._kept: list[dict[str, Any]] = []
        self._class_photos: list[int] = []
        self._listed: dict[str, Any] = {}
        try:
            self._listed = _read(tree, folder)
            self._kept = list(self._listed.get("prototypes", ()))
            self._class_photos = [int(n) for n in self._listed.get("class_photos", ())]
        except (CheckpointError, LookupError, TypeError, ValueError) as error:
            log.warning("what is kept in %s cannot be used: %s", folder, error)

    def files(self) -> list[Path]:
        """The files that hold it."""
        ranks = [(number, rank) for number, one in enumerate(self._kept) for rank in range(len(one["nearest"]))]
        names = [name for place in ranks for name in _names(*place)]
        names += [_around(number) for number, one in enumerate(self._kept) if one.get("surroundings")]
        names += [_class_photo(label, i) for label, count in enumerate(self._class_photos) for i in range(count)]
        return [self._folder / name for name in (*names, PAGE_LIST)] if self._kept else []

    def class_photos(self) -> list[tuple[Picture, ...]]:
        """Some photos of each class; none where none are kept."""
        counts = self._class_photos if len(self._class_photos) == self._tree.n_classes else []
        found: list[tuple[Picture, ...]] = [() for _ in range(self._tree.n_classes)]
        for label, count in enumerate(counts):
            names = [_class_photo(label, number) for number in range(min(count, _MOST_NEIGHBOURS))]
            try:
                found[label] = tuple(self._picture(name) for name in names)
            except (DataError, CheckpointError) as error:
                log.warning("the photos kept of a class cannot be used: %s", error)
        return found

    def spreads(self) -> dict[int, Spread]:
        """How training photos lie at each node, by node; nothing where that was never counted."""
        found = {}
        for node, kept in enumerate(self._kept[: self._tree.topology.n_nodes]):  # the right ones have its number
            try:
                spread = _spread(self._tree, kept)
            except (TypeError, ValueError, OverflowError) as error:
                log.warning("what is kept of node %d cannot be used: %s", node, error)
                continue
            if spread is not None:
                found[node] = spread
        return found

    def of(self, number: int, pictures: SourcePictures, note: str) -> PrototypeExplanation | None:
        """One prototype; None where nothing usable is kept about it."""
        try:
            return self._explained(number, self._kept[number], pictures, note) if self._kept else None
        except (DataError, CheckpointError, AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            log.warning("what is kept of prototype %d cannot be used: %s", number, error)
            return None

    def _explained(
        self, number: int, kept: dict[str, Any], pictures: SourcePictures, note: str
    ) -> PrototypeExplanation:
        tree = self._tree
        source, shares = tree.sources[number], tuple(float(share) for share in kept["right_share"])
        if len(shares) not in (0, tree.n_classes) or len(kept["nearest"]) > _MOST_NEIGHBOURS:
            raise ValueError("it is of a tree with other classes")
        own = Match(
            image=source.image if source is not None else "",
            label=source.label if source is not None else None,
            similarity=1.0,
            size=pictures.size,
            photo=pictures.photo,
            crop=pictures.crop,
            where=tuple(_location(one) for one in kept["where"]),
            around=self._picture(_around(number)) if kept.get("surroundings") else None,
        )
        nearest = tuple(self._neighbour(number, rank, one) for rank, one in enumerate(kept["nearest"]))
        return PrototypeExplanation(
            **place_of(tree, number),
            source=own,
            distance_moved=source.distance if source is not None else None,
            nearest=nearest,
            right_share=shares,
            causes=tuple(Cause(name, float(change)) for name, change in kept["causes"] if name in _CAUSES),
            note=note,
            spread=_spread(tree, kept),
        )

    def _neighbour(self, number: int, rank: int, kept: dict[str, Any]) -> Match:
        crop, photo = (self._picture(name) for name in _names(number, rank))
        label, (width, height) = int(kept["label"]), kept["size"]
        if not 0 <= label < self._tree.n_classes:
            raise ValueError("it names a class that the tree does not have")
        where = (Location("cell", Box(*map(float, kept["box"])), np.zeros((1, 1), dtype=np.float32), None),)
        return Match(
            str(kept["image"]), label, float(kept["similarity"]), (int(width), int(height)), photo, crop, where
        )

    def _picture(self, name: str) -> Picture:
        return np.asarray(read_image(read_listed(self._folder, self._listed, name))).copy()


def _spread(tree: ProtoTree, kept: dict[str, Any]) -> Spread | None:
    """What was counted at the prototype's node; pages of older versions have nothing."""
    return stored_spread(tree, kept["spread"]) if kept.get("spread") is not None else None


_CAUSES = ("hue", "saturation", "contrast", "texture", "shape")


def _kept(one: PrototypeExplanation) -> dict[str, Any]:
    return {
        "surroundings": one.source.around is not None,  # "around" was that of an oblong, in earlier versions
        "right_share": [round(share, 4) for share in one.right_share],
        "causes": [[cause.name, round(cause.change, 4)] for cause in one.causes],
        "spread": one.spread and [list(one.spread.right), list(one.spread.left)],
        "where": [
            {
                "method": where.method,
                "box": [round(edge, 2) for edge in where.box.edges],
                "heat": _as_text(where.heat),
                "hiding": where.hiding and [where.hiding.before, where.hiding.box_hidden, where.hiding.random_hidden],
            }
            for where in one.source.where
        ],
        "nearest": [
            {
                "image": match.image,
                "label": match.label if match.label is not None else -1,
                "similarity": round(match.similarity, 4),
                "size": list(match.size),
                "box": [round(edge, 2) for edge in match.where[0].box.edges],
            }
            for match in one.nearest
        ],
    }


def _location(kept: dict[str, Any]) -> Location:
    if kept["method"] not in get_args(Method):
        raise ValueError(f"expected a way of finding places, got {kept['method']!r}")
    hiding = Hiding(*map(float, kept["hiding"])) if kept["hiding"] is not None else None
    return Location(kept["method"], Box(*map(float, kept["box"])), _from_text(kept["heat"]), hiding)


def _as_text(heat: Heat) -> str:
    """Heat on a coarse grid, a byte a cell."""
    picture = Image.fromarray(np.nan_to_num(np.asarray(heat, dtype=np.float32)).clip(0, 1))
    coarse = np.asarray(picture.resize((_HEAT_SIDE, _HEAT_SIDE), Image.Resampling.BOX))
    return (coarse * 255).round().astype(np.uint8).tobytes().hex()


def _from_text(text: str) -> Heat:
    values = np.frombuffer(bytes.fromhex(text), dtype=np.uint8).reshape(_HEAT_SIDE, _HEAT_SIDE)
    return values.astype(np.float32) / 255


def _read(tree: ProtoTree, folder: Path) -> dict[str, Any]:
    """The list of what is kept; empty where there is none, or it is of another tree or version."""
    if not (folder / PAGE_LIST).exists():
        return {}
    content = read_json(folder / PAGE_LIST)
    of_this = content.get("tree") == checkpoint.fingerprint(tree) and content.get("version") == 1
    return content if of_this and isinstance(content.get("prototypes"), list) else {}


def _names(prototype: int, rank: int) -> tuple[str, str]:
    return f"{prototype:03d}-{rank}.webp", f"{prototype:03d}-{rank}-photo.webp"


def _around(prototype: int) -> str:
    return f"{prototype:03d}-around.webp"


def _class_photo(label: int, number: int) -> str:
    return f"class-{label:04d}-{number}.webp"


def _small(picture: Picture) -> Picture:
    image = Image.fromarray(picture)
    image.thumbnail((THUMB_SIDE, THUMB_SIDE))
    return np.asarray(image).copy()

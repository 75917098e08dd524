"""Each prototype in its own photo and in the photos nearest to it: one pass over the training photos, then about twenty
images' worth of network for each prototype, in batches."""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prototree.backbones.backbone import FeatureExtractor
from prototree.backbones.bn_fusion import folded
from prototree.backbones.geometry import Box
from prototree.backbones.inference import frozen_features
from prototree.backbones.thread_map import side_by_side
from prototree.core.model import ProtoTree, PrototypeSource
from prototree.core.nodes import LN2
from prototree.data import ImageData
from prototree.data.dataset import Sample, name_in
from prototree.data.loading import Entry, ViewDataset, Views, derived_seed
from prototree.data.views import View, photo_size, projection_views
from prototree.errors import DataError
from prototree.explain.attribution import Probes, attribute, occlude, patch_distances
from prototree.explain.localization import (
    Finding,
    InputFrame,
    SeenPhoto,
    cell_finding,
    grid_finding,
    grids_of,
    peak_finding,
    tested,
)
from prototree.explain.neighbours import Matches, find_matches
from prototree.explain.perturbations import causes
from prototree.explain.prototype_pictures import THUMB_SIDE, open_photo, reduced
from prototree.explain.records import Cause, Match, PrototypeExplanation, Side
from prototree.features.batches import looking, maps_of
from prototree.features.cache import MapBatch, kept_sets
from prototree.features.extract import Tick

log = logging.getLogger(__name__)

_PROTOTYPES_AT_ONCE = 4  # few enough to share them out evenly; gradients of more images take longer each
_TICKS = 15  # what a prototype costs, in training photos


def explain_prototypes(
    tree: ProtoTree,
    data: ImageData,
    prototypes: Iterable[int],
    *,
    views: Views | None = None,
    nearest: int = 5,
    occlusion: bool = False,
    notes: Mapping[int, str] | None = None,
    tick: Tick | None = None,
    workers: int = 0,
    run: Path | None = None,
) -> tuple[PrototypeExplanation, ...]:
    """Some prototypes of a tree. One that was never projected, or whose photo is gone, is shown at its nearest
    training patch. `views` are those that the tree's prototypes come from; by default as in the paper. `run` is the
    folder of the tree's run, whose maps are used where it kept any.
    """
    chosen = list(prototypes)
    if not chosen:
        return ()
    tree.eval()
    own_views = views if views is not None else partial(projection_views, kind=data.kind)
    dataset = ViewDataset(data.train, own_views, tree.preprocessing)
    sets = kept_sets(data, own_views, tree.preprocessing) if run is not None else ()
    batches = looking(tree.features, dataset, run=run, among=sets, workers=workers)
    progress = Progress(tick, len(dataset) + _TICKS * len(chosen))
    maps = maps_of(batches, tree.features, tree.prototypes.device)
    views_each = -(-len(dataset) // max(len(data.train), 1))
    # One photo may be the prototype's own, and each may be near in all of its views.
    first = first_views(dataset.entries)
    found = find_matches(tree, progress.watch(maps), chosen, views_each * (nearest + 1), first)
    examination = _Examination(tree, data, dataset.entries, occlusion)
    matches, explained = examination.nearest(found, nearest), []
    starts = range(0, len(chosen), _PROTOTYPES_AT_ONCE)
    groups = [range(start, min(start + _PROTOTYPES_AT_ONCE, len(chosen))) for start in starts]
    for some, results in zip(groups, side_by_side(partial(examination.examine, found), groups), strict=True):
        for i, (source, why, moved) in zip(some, results, strict=True):
            explained.append(
                PrototypeExplanation(
                    **place_of(tree, chosen[i]),
                    source=source,
                    distance_moved=moved,
                    nearest=matches[i],
                    right_share=tuple(found.share[i].tolist()),
                    causes=why,
                    note=(notes or {}).get(chosen[i], ""),
                    spread=found.spreads[i],
                )
            )
        progress.add(_TICKS * len(some))
    return tuple(explained)


def first_views(entries: Sequence[Entry]) -> Bool[Tensor, " photos"]:
    """Which places of the data are a photo's first view, as it is shown when the tree is asked."""
    place_of_photo: dict[Path, int] = {}
    for place, entry in enumerate(entries):
        place_of_photo.setdefault(entry.sample.path, place)
    is_first = torch.zeros(len(entries), dtype=torch.bool)
    is_first[list(place_of_photo.values())] = True
    return is_first


class Place(TypedDict):
    """What a tree says of a prototype's place."""

    prototype: int
    node: int
    side: Side
    reach: float


def place_of(tree: ProtoTree, prototype: int) -> Place:
    """Where in the tree a prototype stands, and how far it reaches."""
    node, is_right = tree.node_of(prototype)
    reach = LN2 * float(tree.reach[prototype])
    return Place(prototype=prototype, node=node, side="right" if is_right else "left", reach=reach)


def fast_features(tree: ProtoTree) -> FeatureExtractor:
    """The tree's features with batch norm folded into the convolutions: the same maps but for the last digits, in about
    two thirds of the time, and with gradients. The features as they are where folding changes more than that."""
    features = copy.copy(tree.features)
    features._modules = dict(tree.features._modules)  # the copy shares the head and gets its own backbone
    features.backbone = folded(tree.features.backbone)
    size = tree.preprocessing.size
    image = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0)).to(tree.prototypes.device)
    with torch.no_grad():
        same = torch.allclose(features(image), tree.features(image), atol=1e-3)
    return features if same else tree.features


def view_of(source: PrototypeSource, entry: Entry) -> View:
    """What the network saw of the photo. Older trees only kept the name of the view."""
    if source.region is None and source.view == entry.view.name:
        return entry.view
    return View(source.view, Box(*source.region) if source.region else None, source.flip)


class Progress:
    """Counts what is done."""

    def __init__(self, tick: Tick | None, total: int) -> None:
        self._tick, self._done, self._total = tick, 0, total

    def add(self, count: int) -> None:
        self._done += count
        if self._tick:
            self._tick(min(self._done, self._total), self._total)

    def watch(self, maps: Iterable[MapBatch]) -> Iterator[MapBatch]:
        for batch in maps:
            yield batch
            self.add(len(batch[1]))


@dataclass(frozen=True)
class _Subject:
    """A prototype in its own photo."""

    prototype: int
    sample: Sample
    view: View
    patch: int
    pixels: Float[Tensor, "3 h w"]
    distance_moved: float | None


class _Examination:
    """Looks at prototypes a few at a time, all their altered and hidden images together."""

    def __init__(self, tree: ProtoTree, data: ImageData, entries: Sequence[Entry], occlusion: bool) -> None:
        self._tree, self._entries, self._occlusion = tree, entries, occlusion
        self._network, self._with_gradient = frozen_features(tree.features, threads=1), fast_features(tree)
        self._root = data.folder
        self._by_name = {self._name(entry.sample.path): entry for entry in entries}

    def _subject(self, found: Matches, i: int) -> _Subject:
        tree, prototype = self._tree, found.prototypes[i]
        source = tree.sources[prototype]
        entry = self._by_name.get(source.image) if source is not None else None
        if source is not None and entry is not None:
            view, patch, moved = view_of(source, entry), tree.grid.number(*source.patch), source.distance
        elif (place := int(found.place[i, 0])) >= 0:
            entry = self._entries[place]
            view, patch, moved = entry.view, int(found.patch[i, 0]), None
        else:
            raise DataError("expected at least one readable training photo to explain with, got none")
        pixels = ViewDataset((entry.sample,), lambda _: (view,), tree.preprocessing)[0].image
        return _Subject(prototype, entry.sample, view, patch, pixels, moved)

    def examine(self, found: Matches, some: Iterable[int]) -> list[tuple[Match, tuple[Cause, ...], float | None]]:
        """Some of the prototypes that were found: each in its own photo, why it is there, and how far it moved."""
        tree, network, subjects = self._tree, self._network, [self._subject(found, i) for i in some]
        device = tree.prototypes.device
        probes = Probes.of(
            tree,
            torch.stack([subject.pixels for subject in subjects]).to(device),
            [subject.prototype for subject in subjects],
            torch.tensor([subject.patch for subject in subjects], device=device),
        )
        generator = torch.Generator().manual_seed(derived_seed("explain", *(subject.prototype for subject in subjects)))
        with torch.no_grad():
            apart = patch_distances(network(probes.images), probes.prototypes)
            maps = tree.question.similarity(apart, probes.reach[:, None])
        before = maps.amax(dim=1).tolist()
        cells = grids_of(maps.view(len(maps), *tree.grid.shape))
        contributions = grids_of(attribute(self._with_gradient, probes, generator))
        findings = [
            [
                peak_finding(tree, subject.patch, cells[i]),
                cell_finding(tree, subject.patch, cells[i]),
                grid_finding("attribution", contributions[i], tree.preprocessing),
                *self._occlusion_of(probes, i, before[i]),
            ]
            for i, subject in enumerate(subjects)
        ]
        scored = tested(network, probes, findings, before, generator)
        why = causes(network, probes, before, tree.preprocessing)
        each = zip(subjects, before, scored, why, strict=True)
        return [(self._match(subject, own, places), w, subject.distance_moved) for subject, own, places, w in each]

    def nearest(self, found: Matches, count: int) -> list[tuple[Match, ...]]:
        """The nearest other photos. Each is read once, however many prototypes it is near to."""
        wanted: dict[int, list[tuple[int, int]]] = {}
        for i, (prototype, places) in enumerate(zip(found.prototypes, found.place.tolist(), strict=True)):
            source = self._tree.sources[prototype]
            first_of: dict[str, int] = {}  # the nearest view of each photo
            for place in places:
                if place >= 0:
                    first_of.setdefault(self._name(self._entries[place].sample.path), place)
            others = [place for name, place in first_of.items() if source is None or name != source.image]
            for place in others[:count]:
                wanted.setdefault(place, []).append((i, places.index(place)))
        matches: dict[tuple[int, int], Match] = {}
        for number, pairs in sorted(wanted.items()):
            sample, view = self._entries[number].sample, self._entries[number].view
            seen = self._seen_photo(sample, view, THUMB_SIDE)
            for i, rank in pairs:
                where = peak_finding(self._tree, int(found.patch[i, rank]), found.maps[i, rank].cpu().numpy())
                near = float(self._tree.similarity(found.distance[i, rank][None], [found.prototypes[i]])[0])
                matches[i, rank] = seen.match(self._tree, near, [where])
        return [
            tuple(matches[i, r] for r in range(found.place.shape[1]) if (i, r) in matches)
            for i in range(len(found.prototypes))
        ]

    def _occlusion_of(self, probes: Probes, i: int, before: float) -> list[Finding]:
        if not self._occlusion:
            return []
        fall = occlude(self._network, probes.with_images(probes.images[i : i + 1], [i]), [before])
        return [grid_finding("occlusion", grids_of(fall)[0], self._tree.preprocessing)]

    def _match(self, subject: _Subject, similarity: float, findings: Sequence[Finding]) -> Match:
        return self._seen_photo(subject.sample, subject.view).match(self._tree, similarity, findings)

    def _seen_photo(self, sample: Sample, view: View, side: int | None = None) -> SeenPhoto:
        photo = open_photo(sample.path)
        frame = InputFrame(view, photo_size(sample), self._tree.preprocessing)
        picture = reduced(photo, side) if side else reduced(photo)
        return SeenPhoto(self._name(sample.path), sample.label, frame, photo, picture)

    def _name(self, path: Path) -> str:
        return name_in(self._root, path)

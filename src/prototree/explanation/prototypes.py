"""Explain prototypes: each in its own image and in the training images nearest to it.

One pass over the training images, then about twenty images' worth of network for each prototype, in batches.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from prototree.backbones.backbone import FeatureExtractor
from prototree.backbones.geometry import Box
from prototree.backbones.inference import folded, frozen_features, thread_map
from prototree.core.model import ProtoTree
from prototree.data import ImageData
from prototree.data.crops import View, image_size, projection_views
from prototree.data.dataset import Sample, image_name
from prototree.data.loader import Entry, ViewDataset, Views, stable_seed
from prototree.errors import DataError
from prototree.explanation.assets import PHOTO_SIDE, THUMB_SIDE, node_fields, open_photo, reduced
from prototree.explanation.attribution import Probes, attribute, occlude, patch_distances, perturbation_effects
from prototree.explanation.localization import ImageContext, InputFrame, find_in_grid, find_match, occlude_findings
from prototree.explanation.neighbours import Matches, find_matches, first_views
from prototree.explanation.records import Match, PerturbationEffect, PrototypeExplanation
from prototree.features.cache import MapBatch, eval_batches
from prototree.features.extract import Tick

_PROTOTYPES_AT_ONCE = 4  # few enough to share them out evenly; gradients of more images take longer each
_TICKS = 15  # what a prototype costs, in training images


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
    """Explain some prototypes of a tree. One that was never projected, or whose image is gone, is shown at its nearest
    training patch. `views` are those that the tree's prototypes come from; by default as in the paper. `run` is the
    folder of the tree's run, whose feature maps are used where it kept any.
    """
    chosen = list(prototypes)
    if not chosen:
        return ()
    tree.eval()
    views = views if views is not None else partial(projection_views, kind=data.kind)
    dataset = ViewDataset(data.train, views, tree.preprocessing)
    batches = eval_batches(tree.features, dataset, run=run, workers=workers)
    progress = Progress(tick, len(dataset) + _TICKS * len(chosen))
    maps = progress.watch(batches.encoded(tree.features, tree.prototypes.device))
    views_each = -(-len(dataset) // max(len(data.train), 1))
    # One image may be the prototype's own, and each may be near in all of its views.
    matches = find_matches(tree, maps, chosen, views_each * (nearest + 1), first_views(dataset.entries))
    examiner = _Examiner(tree, data, dataset.entries, matches, occlusion)
    neighbours, explained = examiner.neighbours(nearest), []
    starts = range(0, len(chosen), _PROTOTYPES_AT_ONCE)
    groups = [range(start, min(start + _PROTOTYPES_AT_ONCE, len(chosen))) for start in starts]
    for group, examined in zip(groups, thread_map(examiner.examine, groups), strict=True):
        for i, (source, effects, moved) in zip(group, examined, strict=True):
            explained.append(
                PrototypeExplanation(
                    **node_fields(tree, chosen[i]),
                    source=source,
                    projection_distance=moved,
                    nearest=neighbours[i],
                    class_pass_rate=tuple(matches.share[i].tolist()),
                    perturbation_effects=effects,
                    note=(notes or {}).get(chosen[i], ""),
                    histogram=matches.histograms[i],
                )
            )
        progress.add(_TICKS * len(group))
    return tuple(explained)


def fast_features(tree: ProtoTree) -> FeatureExtractor:
    """Fold batch norm into the convolutions, with gradients; the features as they are where that changes the maps."""
    features = copy.copy(tree.features)
    features._modules = dict(tree.features._modules)  # the copy shares the head and gets its own backbone
    features.backbone = folded(tree.features.backbone)
    size = tree.preprocessing.size
    image = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0)).to(tree.prototypes.device)
    with torch.no_grad():
        is_same = torch.allclose(features(image), tree.features(image), atol=1e-3)
    return features if is_same else tree.features


class Progress:
    """Reports how much of a number of images is done."""

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


class _Examiner:
    """Examines prototypes a few at a time, all their altered and occluded images together."""

    def __init__(
        self, tree: ProtoTree, data: ImageData, entries: Sequence[Entry], matches: Matches, occlusion: bool
    ) -> None:
        self._tree, self._root, self._entries = tree, data.folder, entries
        self._matches, self._occlusion = matches, occlusion
        self._network, self._with_gradient = frozen_features(tree.features, threads=1), fast_features(tree)
        self._by_name = {image_name(self._root, entry.sample.path): entry for entry in entries}

    def _source(self, i: int) -> tuple[Sample, View, int, float | None]:
        """Find the image of a prototype, the view and the patch of it, and how far projection moved it there."""
        matches, source = self._matches, self._tree.sources[self._matches.prototypes[i]]
        if source is not None and (entry := self._by_name.get(source.image)) is not None:
            view = View(source.crop, Box(*source.crop_region) if source.crop_region else None, source.flip)
            return entry.sample, view, self._tree.grid.index(*source.patch), source.distance
        if (index := int(matches.index[i, 0])) < 0:
            raise DataError("expected at least one readable training image to explain with, got none")
        return self._entries[index].sample, self._entries[index].view, int(matches.patch[i, 0]), None

    def examine(self, group: Iterable[int]) -> list[tuple[Match, tuple[PerturbationEffect, ...], float | None]]:
        """Examine some of the prototypes: each in its own image, what its match depends on, and how far it moved."""
        tree, network, device = self._tree, self._network, self._tree.prototypes.device
        sources = [self._source(i) for i in group]
        numbers = [self._matches.prototypes[i] for i in group]
        patches = [patch for _, _, patch, _ in sources]

        def pixels(sample: Sample, view: View) -> Tensor:
            return ViewDataset((sample,), lambda _: (view,), tree.preprocessing)[0].image

        images = torch.stack([pixels(sample, view) for sample, view, *_ in sources]).to(device)
        probes = Probes.of(tree, images, numbers, torch.tensor(patches, device=device))
        generator = torch.Generator().manual_seed(stable_seed("explain", *numbers))
        with torch.no_grad():
            dists = patch_distances(network(probes.images), probes.prototypes)
            maps = tree.node_function.similarity(dists, probes.radius[:, None])
        before = maps.amax(dim=1).tolist()
        cells = maps.view(len(maps), *tree.grid.shape).float().cpu().numpy()
        contributions = attribute(self._with_gradient, probes, generator)
        findings = []
        for i, patch in enumerate(patches):
            findings.append(find_match(tree, patch, cells[i]))
            findings[i].append(find_in_grid("attribution", contributions[i], tree.preprocessing))
            if self._occlusion:
                fall = occlude(network, probes.with_images(probes.images[i : i + 1], [i]), before[i : i + 1])
                findings[i].append(find_in_grid("occlusion", fall[0], tree.preprocessing))
        findings = occlude_findings(network, probes, findings, before, generator)
        effects = perturbation_effects(network, probes, before, tree.preprocessing)
        return [
            (self._context(sample, view, PHOTO_SIDE).match(tree, before[i], findings[i]), effects[i], moved)
            for i, (sample, view, _, moved) in enumerate(sources)
        ]

    def neighbours(self, count: int) -> list[tuple[Match, ...]]:
        """Show the nearest other images of each prototype. Each is read once, however many prototypes it is near to."""
        tree, matches = self._tree, self._matches
        wanted: dict[int, list[tuple[int, int]]] = {}  # by index in the data: the prototype and the rank of a match
        for i, (prototype, indices) in enumerate(zip(matches.prototypes, matches.index.tolist(), strict=True)):
            source, first = tree.sources[prototype], dict[str, int]()  # the nearest view of each image
            for index in indices:
                if index >= 0:
                    first.setdefault(image_name(self._root, self._entries[index].sample.path), index)
            others = [index for name, index in first.items() if source is None or name != source.image]
            for index in others[:count]:
                wanted.setdefault(index, []).append((i, indices.index(index)))
        shown: dict[tuple[int, int], Match] = {}
        for index, pairs in sorted(wanted.items()):
            context = self._context(self._entries[index].sample, self._entries[index].view, THUMB_SIDE)
            for i, rank in pairs:
                peak, _ = find_match(tree, int(matches.patch[i, rank]), matches.maps[i, rank].cpu().numpy())
                similarity = float(tree.similarity(matches.distance[i, rank][None], [matches.prototypes[i]])[0])
                shown[i, rank] = context.match(tree, similarity, [peak])
        n_ranks = matches.index.shape[1]
        rows = range(len(matches.prototypes))
        return [tuple(shown[i, rank] for rank in range(n_ranks) if (i, rank) in shown) for i in rows]

    def _context(self, sample: Sample, view: View, side: int) -> ImageContext:
        photo = open_photo(sample.path)
        frame = InputFrame(view, image_size(sample), self._tree.preprocessing)
        name = image_name(self._root, sample.path)
        return ImageContext(name, sample.label, frame, photo, reduced(photo, side))

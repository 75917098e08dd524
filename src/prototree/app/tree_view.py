"""The tree as it is between two edits, for the report's page: all from kept feature maps, so it takes moments."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from prototree.app.gallery import Gallery
from prototree.backbones.geometry import Box
from prototree.core.leaves import class_log_probs
from prototree.core.patches import distance_map
from prototree.data.views import FULL, photo_size
from prototree.editing.edits import Region
from prototree.editing.session import EditSession
from prototree.editing.state import TreeState
from prototree.editing.workbench import Candidate
from prototree.explain.classes import explain_classes
from prototree.explain.histograms import SpreadCounts
from prototree.explain.localization import InputFrame
from prototree.explain.prototypes import place_of
from prototree.explain.records import (
    AROUND,
    TEST_PHOTOS,
    ClassExplanation,
    Location,
    Match,
    Picture,
    PrototypeExplanation,
    Spread,
    TreeExplanation,
)
from prototree.explain.tree import run_figures
from prototree.report.images import data_url
from prototree.report.tree_html import tree_data

_NEAREST = 6
_CLASS_PHOTOS = 4
_HEAT = (16, 16)
_NO_HEAT = np.zeros((1, 1), dtype=np.float32)
_NO_PICTURE: Picture = np.zeros((1, 1, 3), dtype=np.uint8)


@dataclass(frozen=True)
class _Judged:
    """How good a tree is, and on which photos."""

    accuracy: dict[str, float]
    confusion: list[tuple[int, int, int]]
    photos: str


class TreeView:
    """Draws states of one run's tree."""

    def __init__(self, title: str, session: EditSession, gallery: Gallery) -> None:
        self._title, self._session, self._bench, self._gallery = title, session, session.workbench, gallery

    def of(self, state: TreeState) -> tuple[TreeExplanation, dict[str, Any]]:
        """The explanation, and the data of its page."""
        tree = state.tree
        urls: dict[str, str] = {}
        spreads, n_nodes, judged = self.spreads(state), tree.topology.n_nodes, self._judged(state)
        prototypes = tuple(
            replace(self._prototype(state, one, share, urls), spread=spreads[one % n_nodes])
            for one, share in enumerate(self._shares(state))
        )
        explanation = TreeExplanation(
            title=self._title,
            class_names=tree.class_names,
            left=tuple(tree.topology.left.tolist()),
            right=tuple(tree.topology.right.tolist()),
            prototypes=prototypes,
            leaf_probs=class_log_probs(tree.leaf_logits.detach()).exp().cpu().numpy(),
            accuracy=judged.accuracy,
            question=tree.question.kind,
            sharpness=tree.question.sharpness,
            classes=self._classes(judged.confusion, urls),
            judged_on=judged.photos,
        )
        # The page fetches its pictures one by one when they come into view; here stand only their addresses.
        return explanation, tree_data(explanation, lambda name, picture: urls.get(name) or data_url(name, picture))

    def _judged(self, state: TreeState) -> "_Judged":
        """Of the tree as it was opened, what its report says; of an edited one, what the photos for feedback say."""
        if state is self._bench.start and (known := run_figures(self._session.run, state.tree)).accuracy:
            return _Judged(known.accuracy, known.confusion, TEST_PHOTOS)
        labels, answers = self._bench.feedback.labels.tolist(), state.decisions.labels("greedy").tolist()
        confusion = [(*pair, count) for pair, count in Counter(zip(labels, answers, strict=True)).items()]
        photos = f"photos for feedback ({self._session.feedback_name})"
        return _Judged(self._bench.figures(state).accuracy, confusion, photos)

    def _classes(self, confusion: Sequence[tuple[int, int, int]], urls: dict[str, str]) -> tuple[ClassExplanation, ...]:
        """Some training photos of each class, and how its photos fare."""
        found: list[tuple[Picture, ...]] = []
        for label in range(self._bench.tree.n_classes):
            photos = self._gallery.photos("training", label, 0, _CLASS_PHOTOS)
            urls.update({f"class-{label}-{i}": photo.thumb for i, photo in enumerate(photos)})
            found.append((_NO_PICTURE,) * len(photos))
        return explain_classes(found, confusion)

    def spreads(self, state: TreeState) -> list[Spread]:
        """How the training photos lie at each node."""
        whole, n_nodes = self._whole, state.tree.topology.n_nodes
        distance, counts = state.training.distance[whole], SpreadCounts(state.tree, range(n_nodes))
        left = distance[:, n_nodes:] if state.tree.question.kind == "pairwise" else None
        counts.add(distance[:, :n_nodes], left, self._bench.training.labels[whole])
        return counts.spreads()

    @cached_property
    def _whole(self) -> Bool[Tensor, " B"]:
        """Which of the training views show a whole photo."""
        return torch.tensor([entry.view == FULL for entry in self._bench.training.entries])

    def _shares(self, state: TreeState) -> list[tuple[float, ...]]:
        """For each prototype the share of each class's training photos that its node sends to its side."""
        whole = self._whole
        distance = state.training.distance[whole]
        if state.tree.question.kind == "pairwise":
            right, left = distance.chunk(2, dim=1)
            present = torch.cat([right < left, left <= right], dim=1).double()  # a tie goes left
        else:
            present = (state.tree.similarity(distance) > 0.5).double()
        labels = self._bench.training.labels[whole]
        counts = torch.bincount(labels, minlength=self._bench.tree.n_classes).clamp_min(1)
        sums = torch.zeros(self._bench.tree.n_classes, present.shape[1], dtype=torch.float64).index_add_(
            0, labels, present
        )
        return [tuple(row) for row in (sums / counts[:, None]).T.tolist()]

    def _prototype(
        self, state: TreeState, number: int, share: tuple[float, ...], urls: dict[str, str]
    ) -> PrototypeExplanation:
        workbench, source = self._bench, state.tree.sources[number]
        found = workbench.all_candidates(state, number, _NEAREST + 1)
        own = self._gallery.own_cell(state, number)
        nearest = [candidate for candidate in found if own is None or candidate.cell.image != own.image][:_NEAREST]
        own = own or nearest[0].cell
        entry = workbench.entry(own.image, own.view)
        prototype = state.tree.prototypes.detach()[number : number + 1]
        apart = distance_map(workbench.map_of(own), prototype)[0, 0]
        grid = state.tree.similarity(apart[..., None], [number])[..., 0].numpy()
        size = photo_size(entry.sample)
        frame = InputFrame(entry.view, size, state.tree.preprocessing)
        cells = state.tree.grid
        heat = frame.heat(grid, _HEAT, (cells.height, cells.width), cells.extents)
        urls[f"photo-{number}"] = self._gallery.photo_url(own)
        shown = workbench.shown(state, number, own)
        urls[f"crop-{number}"] = self._gallery.crop_url(own, shown)
        urls[f"around-{number}"] = self._gallery.crop_url(own, Box(*shown).surroundings(AROUND, size).edges)
        boxes = [workbench.shown(state, number, candidate.cell) for candidate in nearest]
        for rank, (candidate, box) in enumerate(zip(nearest, boxes, strict=True)):
            urls[f"nearest-{number}-{rank}"] = self._gallery.crop_url(candidate.cell, box)
            urls[f"nearest-photo-{number}-{rank}"] = self._gallery.photo_url(candidate.cell, "thumb")
        where = (Location("peak", Box(*shown), heat, None), Location("cell", Box(*own.box), heat, None))
        return PrototypeExplanation(
            **place_of(state.tree, number),
            source=Match(own.image, entry.sample.label, 1.0, size, _NO_PICTURE, _NO_PICTURE, where, _NO_PICTURE),
            distance_moved=source.distance if source else None,
            nearest=tuple(map(self._neighbour, nearest, boxes)),
            right_share=share,
            causes=(),
            note=state.notes.get(number, ""),
        )

    def _neighbour(self, candidate: Candidate, shown: Region) -> Match:
        cell = candidate.cell
        size = photo_size(self._bench.entry(cell.image, cell.view).sample)
        where = (Location("peak", Box(*shown), _NO_HEAT, None),)
        return Match(cell.image, candidate.label, candidate.similarity, size, _NO_PICTURE, _NO_PICTURE, where)

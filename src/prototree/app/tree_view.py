"""Explain the tree between two edits for the report's tree page, from cached features, so that it takes moments."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from prototree.app.gallery import Gallery
from prototree.backbones.geometry import Box
from prototree.core.leaves import class_log_probs
from prototree.core.model import distance_map
from prototree.data.crops import FULL_IMAGE, image_size
from prototree.editing.edits import Side
from prototree.editing.session import EditSession
from prototree.editing.state import TreeState
from prototree.explanation.assets import node_fields
from prototree.explanation.localization import InputFrame
from prototree.explanation.neighbours import SpreadCounts, explain_classes
from prototree.explanation.records import (
    CONTEXT_SCALE,
    TEST_PHOTOS,
    ClassExplanation,
    DecisionHistogram,
    Location,
    Match,
    Picture,
    PrototypeExplanation,
    TreeExplanation,
)
from prototree.explanation.tree import run_figures
from prototree.reporting.images import data_url
from prototree.reporting.tree_page import tree_data

_NEAREST = 6
_CLASS_IMAGES = 4
_HEAT = (16, 16)
_NO_HEAT = np.zeros((1, 1), dtype=np.float32)
_NO_PICTURE: Picture = np.zeros((1, 1, 3), dtype=np.uint8)


class TreeView:
    """Explains states of one run's tree."""

    def __init__(self, title: str, session: EditSession, gallery: Gallery) -> None:
        self._title, self._session, self._workbench, self._gallery = title, session, session.workbench, gallery
        self.explain, self.histograms = lru_cache(maxsize=2)(self._explain), lru_cache(maxsize=2)(self._histograms)

    def _explain(self, state: TreeState) -> tuple[TreeExplanation, dict[str, Any]]:
        """Return the explanation of a state and the data of its page, in which pictures are addresses."""
        tree, urls = state.tree, dict[str, str]()
        histograms, n_nodes = self.histograms(state), tree.topology.n_nodes
        accuracy, confusion, evaluated_on = self._results(state)
        prototypes = tuple(
            replace(self._prototype(state, row, rates, urls), histogram=histograms[row % n_nodes])
            for row, rates in enumerate(self._pass_rates(state))
        )
        explanation = TreeExplanation(
            title=self._title,
            class_names=tree.class_names,
            left=tuple(tree.topology.left.tolist()),
            right=tuple(tree.topology.right.tolist()),
            prototypes=prototypes,
            leaf_probs=class_log_probs(tree.leaf_logits.detach()).exp().cpu().numpy(),
            accuracy=accuracy,
            node_kind=tree.node_function.kind,
            sharpness=tree.node_function.sharpness,
            classes=self._classes(confusion, urls),
            evaluated_on=evaluated_on,
        )
        return explanation, tree_data(explanation, lambda name, picture: urls.get(name) or data_url(name, picture))

    def _histograms(self, state: TreeState) -> list[DecisionHistogram]:
        """Count how the training images lie at each node."""
        distance, n_nodes = state.training.distance[self._is_full], state.tree.topology.n_nodes
        counts = SpreadCounts(state.tree, range(n_nodes))
        left = distance[:, n_nodes:] if state.tree.node_function.kind == "pairwise" else None
        counts.add(distance[:, :n_nodes], left, self._workbench.training.labels[self._is_full])
        return counts.histograms()

    def _results(self, state: TreeState) -> tuple[dict[str, float], list[tuple[int, int, int]], str]:
        """Return accuracies, confusion and images: the report's for the tree as opened, else on validation images."""
        known = run_figures(self._session.run, state.tree)
        if state is self._workbench.start and known.accuracy:
            return known.accuracy, known.confusion, TEST_PHOTOS
        labels, classes = self._session.validation.labels.tolist(), state.prediction.labels("greedy").tolist()
        confusion = [(*pair, count) for pair, count in Counter(zip(labels, classes, strict=True)).items()]
        return self._workbench.metrics(state).accuracy, confusion, f"images ({self._session.validation_name})"

    def _classes(self, confusion: Sequence[tuple[int, int, int]], urls: dict[str, str]) -> tuple[ClassExplanation, ...]:
        """Show training images of each class, and how its images are classified."""
        pictures: list[tuple[Picture, ...]] = []
        for label in range(self._workbench.tree.n_classes):
            images = self._gallery.images("training", label, 0, _CLASS_IMAGES)
            urls.update({f"class-{label}-{i}": image.thumb for i, image in enumerate(images)})
            pictures.append((_NO_PICTURE,) * len(images))
        return explain_classes(pictures, confusion)

    @cached_property
    def _is_full(self) -> Bool[Tensor, " M"]:
        """Mask of the training views that show a full image."""
        return torch.tensor([entry.view == FULL_IMAGE for entry in self._workbench.training.entries])

    def _pass_rates(self, state: TreeState) -> list[tuple[float, ...]]:
        """For each prototype the fraction of each class's training images that its node sends to its side."""
        distance, labels = state.training.distance[self._is_full], self._workbench.training.labels[self._is_full]
        if state.tree.node_function.kind == "pairwise":
            right, left = distance.chunk(2, dim=1)
            passes = torch.cat([right < left, left <= right], dim=1).double()  # a tie goes left
        else:
            passes = (state.tree.similarity(distance) > 0.5).double()
        n_classes = self._workbench.tree.n_classes
        sums = torch.zeros(n_classes, passes.shape[1], dtype=torch.float64).index_add_(0, labels, passes)
        counts = torch.bincount(labels, minlength=n_classes).clamp_min(1)
        return [tuple(row) for row in (sums / counts[:, None]).T.tolist()]

    def _prototype(
        self, state: TreeState, row: int, pass_rates: tuple[float, ...], urls: dict[str, str]
    ) -> PrototypeExplanation:
        workbench, gallery, tree = self._workbench, self._gallery, state.tree
        node, is_right = tree.node_of(row)
        side: Side = "right" if is_right else "left"
        candidates = workbench.candidates(state, node, _NEAREST + 1, side, with_excluded=True)
        cell = gallery.source_cell(state, row)
        nearest = [near for near in candidates if cell is None or near.cell.image != cell.image][:_NEAREST]
        cell = cell or nearest[0].cell
        entry, source = workbench.entry(cell.image, cell.view), tree.sources[row]
        size, box = image_size(entry.sample), Box(*workbench.display_box(state, row, cell))
        urls[f"photo-{row}"] = gallery.image_url(cell)
        urls[f"crop-{row}"] = gallery.region_url(cell, box.edges)
        urls[f"context-{row}"] = gallery.region_url(cell, box.context_square(CONTEXT_SCALE, size).edges)
        matches = []
        for rank, near in enumerate(nearest):
            near_box = workbench.display_box(state, row, near.cell)
            urls[f"nearest-{row}-{rank}"] = gallery.region_url(near.cell, near_box)
            urls[f"nearest-photo-{row}-{rank}"] = gallery.image_url(near.cell, "thumb")
            near_size = image_size(workbench.entry(near.cell.image, near.cell.view).sample)
            peak = Location("peak", Box(*near_box), _NO_HEAT, None)
            match = Match(near.cell.image, near.label, near.similarity, near_size, _NO_PICTURE, _NO_PICTURE, (peak,))
            matches.append(match)
        dists = distance_map(workbench.map_of(cell), tree.prototypes.detach()[row : row + 1])[0, 0]
        similarity = tree.similarity(dists[..., None], [row])[..., 0].numpy()
        frame, grid = InputFrame(entry.view, size, tree.preprocessing), tree.grid
        heat = frame.heat(similarity, _HEAT, (grid.height, grid.width), grid.extents)
        where = (Location("peak", box, heat, None), Location("cell", Box(*cell.box), heat, None))
        return PrototypeExplanation(
            **node_fields(tree, row),
            source=Match(cell.image, entry.sample.label, 1.0, size, _NO_PICTURE, _NO_PICTURE, where, _NO_PICTURE),
            projection_distance=source.distance if source else None,
            nearest=tuple(matches),
            class_pass_rate=pass_rates,
            perturbation_effects=(),
            note=state.notes.get(row, ""),
        )

"""What the app shows of a run's images: pictures drawn when they are requested, and the tree between two edits.

The tree is explained for the report's page from cached features, so that it takes moments.
"""

from collections import Counter
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

import numpy as np
import torch
from jaxtyping import Bool
from pydantic import Field
from torch import Tensor

from prototree.app.schemas import ImageResponse, Index, PatchResponse, Split, WebP
from prototree.backbones.geometry import Box
from prototree.core.leaves import class_log_probs
from prototree.core.model import distance_map
from prototree.data.crops import FULL_IMAGE, image_size
from prototree.data.dataset import Sample
from prototree.data.images import LoadedImage, load_image, webp
from prototree.editing.edits import Region, Side
from prototree.editing.session import EditSession
from prototree.editing.workbench import Cell, TreeState
from prototree.errors import DataError, ProtoTreeError
from prototree.explanation import records
from prototree.explanation.assets import AssetStore, cut_out, node_fields, open_photo, reduced
from prototree.explanation.localization import InputFrame
from prototree.explanation.neighbours import HistogramCounts, explain_classes
from prototree.explanation.tree import made_from, run_metrics
from prototree.reporting.images import data_url
from prototree.reporting.tree_page import tree_data
from prototree.run import ASSETS

PICTURE_SIDE = 1024  # pixels of the longer side of a whole image
_THUMB_SIDE, _REGION_SIDE = 160, 192
_NEAREST, _CLASS_IMAGES = 6, 4
_HEAT = (16, 16)
_NO_HEAT = np.zeros((1, 1), dtype=np.float32)
_NO_PICTURE: records.Picture = np.zeros((1, 1, 3), dtype=np.uint8)
PictureKind = Literal["picture", "thumb"]
Count = Annotated[int, Field(ge=1, le=200)]


class NotFoundError(ProtoTreeError):
    """No such image, node or result."""


def encode(picture: records.Picture) -> bytes:
    """Encode a picture as WebP, quickly: somebody waits for it."""
    return webp(picture, quality=82, method=2)


class Gallery:
    """The training, validation and test images of a session, by split and index, and patches of them."""

    def __init__(self, session: EditSession) -> None:
        self._workbench = session.workbench
        validation = tuple(entry.sample for entry in session.validation.entries)
        self.samples: dict[Split, tuple[Sample, ...]] = {
            "training": session.data.train,
            "validation": validation,
            "test": session.data.test,
        }
        self._index = {self._workbench.name(sample): index for index, sample in enumerate(session.data.train)}
        self._draw = lru_cache(maxsize=1024)(self._draw_uncached)

    def images(
        self,
        split: Split,
        label: Index | None = None,
        start: Index = 0,
        count: Annotated[int, Field(ge=1, le=200)] = 60,
    ) -> list[ImageResponse]:
        """Images to choose from, all or those of a class."""
        chosen = [i for i, sample in enumerate(self.samples[split]) if label is None or sample.label == label]
        return [self.image(split, index) for index in chosen[start : start + count]]

    def image(self, split: Split, index: int) -> ImageResponse:
        sample = self.sample(split, index)
        (width, height), url = image_size(sample), f"/images/{split}/{index}"
        return ImageResponse(
            split=split,
            index=index,
            name=self._workbench.name(sample),
            label=sample.label,
            width=width,
            height=height,
            picture=f"{url}/picture",
            thumb=f"{url}/thumb",
        )

    def training_image(self, index: Index) -> ImageResponse:
        """A training image with the grid of its patches."""
        image, cells = self.image("training", index), self._workbench.tree.grid
        left, top, right, bottom = self._workbench.locate(image.name, (-1e9, -1e9, -1e9, -1e9)).box
        image.grid = {
            "left": left,
            "top": top,
            "cell_width": (right - left) / cells.width,
            "cell_height": (bottom - top) / cells.height,
            "rows": cells.rows,
            "columns": cells.columns,
            "patch_rows": cells.height,
            "patch_columns": cells.width,
        }
        return image

    def sample(self, split: Split, index: int) -> Sample:
        samples = self.samples[split]
        if not 0 <= index < len(samples):
            raise NotFoundError(f"expected a {split} image from 0 to {len(samples) - 1}, got {index}")
        return samples[index]

    def open(self, split: Split, index: int) -> LoadedImage:
        """Decode an image; one that has gone or is damaged is not found: the request is not to blame."""
        try:
            return open_photo(self.sample(split, index).path)
        except DataError as error:
            raise NotFoundError(str(error)) from error

    def picture(self, split: Split, index: Index, kind: PictureKind) -> WebP:
        """An image, reduced, as WebP."""
        return WebP(self._draw(split, index, _THUMB_SIDE if kind == "thumb" else PICTURE_SIDE, None))

    def region(self, index: Index, left: Index, top: Index, right: Index, bottom: Index) -> WebP:
        """A region of a training image as WebP."""
        return WebP(self._draw("training", index, _REGION_SIDE, Box(left, top, right, bottom)))

    def _draw_uncached(self, split: Split, index: int, side: int, region: Box | None) -> bytes:
        image = self.open(split, index)
        return encode(reduced(image, side) if region is None else cut_out(image, region, side))

    def source_cell(self, state: TreeState, row: int) -> Cell | None:
        """Return the patch that a prototype comes from, if its image is among the training images."""
        source = state.tree.sources[row]
        if source is None or not self._workbench.has(source.image, source.crop):
            return None
        return Cell(source.image, source.crop, source.patch, source.patch_box)

    def patch(self, state: TreeState, row: int, cell: Cell, similarity: float) -> PatchResponse:
        image, box = self.image("training", self._index[cell.image]), self._workbench.display_box(state, row, cell)
        size = (image.width, image.height)
        around = Box(*box).context_square(records.CONTEXT_SCALE, size)
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


class TreeView:
    """Explains states of one run's tree; in the data of its page, pictures are addresses."""

    def __init__(self, title: str, session: EditSession, gallery: Gallery) -> None:
        self._title, self._session, self._workbench, self._gallery = title, session, session.workbench, gallery
        self.explain, self.histograms = lru_cache(maxsize=2)(self._explain), lru_cache(maxsize=2)(self._histograms)
        self._small = lru_cache(maxsize=4096)(self._small_picture)

    def _explain(self, state: TreeState) -> tuple[records.TreeExplanation, dict[str, Any]]:
        tree, histograms, urls = state.tree, self.histograms(state), dict[str, str]()
        accuracy, confusion, evaluated_on = self._results(state)
        pictures: list[tuple[records.Picture, ...]] = []
        for label in range(tree.n_classes):
            images = self._gallery.images("training", label, 0, _CLASS_IMAGES)
            urls.update({f"class-{label}-{i}": image.thumb for i, image in enumerate(images)})
            pictures.append((_NO_PICTURE,) * len(images))
        prototypes = (self._prototype(state, row, rates, urls) for row, rates in enumerate(self._pass_rates(state)))
        explanation = records.TreeExplanation(
            title=self._title,
            made_from=made_from(self._session.run),
            class_names=tree.class_names,
            left=tuple(tree.topology.left.tolist()),
            right=tuple(tree.topology.right.tolist()),
            prototypes=tuple(replace(prototype, histogram=histograms[prototype.node]) for prototype in prototypes),
            leaf_probs=class_log_probs(tree.leaf_logits.detach()).exp().cpu().numpy(),
            accuracy=accuracy,
            node_kind=tree.node_function.kind,
            sharpness=tree.node_function.sharpness,
            classes=explain_classes(pictures, confusion),
            evaluated_on=evaluated_on,
        )
        return explanation, tree_data(explanation, lambda name, picture: urls.get(name) or data_url(name, picture))

    def _small_picture(self, cell: Cell, box: Box) -> records.Picture:
        """Cut a patch with its surroundings out of a small picture: its colours count, the page shows an address."""
        sample = self._workbench.entry(cell.image, cell.view).sample
        try:
            photo = np.asarray(load_image(sample.path, at_least=_THUMB_SIDE).image)
        except DataError:
            return _NO_PICTURE
        return records.PatchContext.of(photo, image_size(sample), box).picture.copy()

    @cached_property
    def _measured(self) -> dict[tuple[str, Region], tuple[str, tuple[records.PerturbationEffect, ...]]]:
        """What the run's report has measured of each patch: its part, and the effects of altered properties."""
        run, tree = self._session.run, self._workbench.start.tree
        parts, store = run_metrics(run, tree).parts, AssetStore(tree, run.folder / ASSETS)
        return {
            (source.image, source.patch_box): (parts.get(row, ""), store.perturbation_effects(row))
            for row, source in enumerate(tree.sources)
            if source is not None
        }

    @cached_property
    def _is_full(self) -> Bool[Tensor, " M"]:
        """Mask of the training views that show a full image."""
        return torch.tensor([entry.view == FULL_IMAGE for entry in self._workbench.training.entries])

    def _histograms(self, state: TreeState) -> list[records.DecisionHistogram]:
        """Count how the training images lie at each node."""
        distance, n_nodes = state.training.distance[self._is_full], state.tree.topology.n_nodes
        counts = HistogramCounts(state.tree, range(n_nodes))
        left = distance[:, n_nodes:] if state.tree.node_function.kind == "pairwise" else None
        counts.add(distance[:, :n_nodes], left, self._workbench.training.labels[self._is_full])
        return counts.histograms()

    def is_as_opened(self, state: TreeState) -> bool:
        """Tell whether a state has the tree of the run itself, whatever its patches are called."""
        return state.tree is self._workbench.start.tree

    def _results(self, state: TreeState) -> tuple[dict[str, float], list[tuple[int, int, int]], str]:
        """Return accuracies, confusion and images: the report's for the tree as opened, else on validation images."""
        known = run_metrics(self._session.run, state.tree)
        if self.is_as_opened(state) and known.accuracy:
            return known.accuracy, known.confusion, records.TEST_IMAGES
        labels, classes = self._session.validation.labels.tolist(), state.prediction.labels("greedy").tolist()
        confusion = [(*pair, count) for pair, count in Counter(zip(labels, classes, strict=True)).items()]
        return self._workbench.metrics(state).accuracy, confusion, self._session.validation_name

    def _pass_rates(self, state: TreeState) -> list[tuple[float, ...]]:
        """For each prototype the fraction of each class's training images that its node sends to its side."""
        distance, labels = state.training.distance[self._is_full], self._workbench.training.labels[self._is_full]
        if state.tree.node_function.kind == "pairwise":
            right, left = distance.chunk(2, dim=1)
            passes = torch.cat([right < left, left <= right], dim=1).double()  # a tie goes left
        else:
            passes = (state.tree.similarity(distance) > 0.5).double()
        n_classes = state.tree.n_classes
        sums = torch.zeros(n_classes, passes.shape[1], dtype=torch.float64).index_add_(0, labels, passes)
        counts = torch.bincount(labels, minlength=n_classes).clamp_min(1)
        return [tuple(rates) for rates in (sums / counts[:, None]).T.tolist()]

    def _prototype(
        self, state: TreeState, row: int, pass_rates: tuple[float, ...], urls: dict[str, str]
    ) -> records.PrototypeExplanation:
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
        urls[f"context-{row}"] = gallery.region_url(cell, box.context_square(records.CONTEXT_SCALE, size).edges)
        matches = []
        for rank, near in enumerate(nearest):
            near_box = workbench.display_box(state, row, near.cell)
            urls[f"nearest-{row}-{rank}"] = gallery.region_url(near.cell, near_box)
            urls[f"nearest-photo-{row}-{rank}"] = gallery.image_url(near.cell, "thumb")
            near_size = image_size(workbench.entry(near.cell.image, near.cell.view).sample)
            peak = (records.Location("peak", Box(*near_box), _NO_HEAT, None),)
            matches.append(
                records.Match(near.cell.image, near.label, near.similarity, near_size, _NO_PICTURE, _NO_PICTURE, peak)
            )
        dists = distance_map(workbench.map_of(cell), tree.prototypes.detach()[row : row + 1])[0, 0]
        similarity = tree.similarity(dists[..., None], [row])[..., 0].numpy()
        frame, grid = InputFrame(entry.view, size, tree.preprocessing), tree.grid
        heat = frame.heat(similarity, _HEAT, (grid.height, grid.width), grid.extents)
        where = (records.Location("peak", box, heat, None), records.Location("cell", Box(*cell.box), heat, None))
        part, effects = self._measured.get((source.image, source.patch_box), ("", ())) if source else ("", ())
        return records.PrototypeExplanation(
            **node_fields(tree, row),
            source=records.Match(
                cell.image, entry.sample.label, 1.0, size, _NO_PICTURE, _NO_PICTURE, where, self._small(cell, box)
            ),
            projection_distance=source.distance if source else None,
            nearest=tuple(matches),
            class_pass_rate=pass_rates,
            perturbation_effects=effects,
            part=part,
            note=state.notes.get(row, ""),
        )

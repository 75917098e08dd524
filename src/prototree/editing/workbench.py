"""Apply edits to a tree on cached features, and refit its leaves without gradients (§7, Eq. 5).

The network stays fixed while a tree is edited, so the feature maps of all images are computed once and an edit costs
moments. States are immutable; an edit makes a new one. A node is named by its index in the tree of its state.

Notation used for tensor shapes: M views of images, C patches of a map, L leaves, K classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.core import model
from prototree.core.confidence import fit_calibration
from prototree.core.localization import peak_box, peak_places
from prototree.core.model import NearestPatches, ProtoTree, PrototypeSource, distance_map, extract_patches
from prototree.core.nodes import LN2, PAPER
from prototree.core.projection import prototype_classes
from prototree.core.topology import STRATEGIES, Topology
from prototree.data.crops import FULL_IMAGE, from_image, image_size, to_image
from prototree.data.dataset import Sample, image_name
from prototree.data.loader import Entry, ViewDataset, Views
from prototree.editing.edits import Edit, Exclude, Note, Region, Remove, Replace, Side
from prototree.errors import EditError
from prototree.features.cache import StoredMaps
from prototree.training.calibrate import MIN_HELD_OUT
from prototree.training.distill import fit_distance_p95
from prototree.training.paper import refit_leaves

N_SWEEPS = 5  # of Eq. 5 over the training images after an edit
_MIN_OVERLAP = 0.01  # a patch is in a region if this fraction of either lies in the other


class UnknownNodeError(EditError):
    """A node that the tree does not have."""


@dataclass(frozen=True)
class EditMetrics:
    """Metrics of a tree on the validation images."""

    n_images: int
    accuracy: dict[str, float]  # by strategy
    fidelity: dict[str, float]  # agreement of a hard strategy with soft
    path_length: dict[str, float]  # mean number of nodes on the path
    n_prototypes: int


@dataclass(frozen=True, eq=False)
class TreeState:
    """A tree between two edits, with the distance of every image to each of its prototypes."""

    tree: ProtoTree
    training: NearestPatches
    validation: NearestPatches
    leaf_start: Float[Tensor, "L K"]  # where refitting begins: as trained, or 0 in leaves that other images reach now
    excluded: tuple[Exclude, ...]
    notes: Mapping[int, str]  # by the row of the prototype
    intended_classes: Int[Tensor, " L"]  # the class a leaf stands for; -1: the majority of the images that reach it

    def check_node(self, node: int) -> None:
        """Refuse the index of a node that the tree does not have."""
        n_nodes = self.tree.topology.n_nodes
        if node not in range(n_nodes):
            raise UnknownNodeError(
                f"expected a question from 1 to {n_nodes} (index 0 to {n_nodes - 1}), got {node + 1}"
            )

    def prototype_row(self, node: int, side: Side = "right") -> int:
        """Return the row of a node's prototype in the tensor of all prototypes."""
        self.check_node(node)
        if side == "left" and self.tree.node_function.kind == "pairwise":
            return node + self.tree.topology.n_nodes
        if side != "right":
            raise EditError(f"expected the side 'right' (or 'left' of a pairwise node) for {node + 1}, got {side!r}")
        return node

    @property
    def leaf_classes(self) -> Int[Tensor, " L"]:
        """The class each leaf is trained towards by fine-tuning.

        Replacing a prototype by a patch of the same side does not change which classes its subtree is to separate,
        even if the network cannot separate them yet and other images reach the leaves for now.
        """
        majority = self.tree.leaf_logits.detach().argmax(dim=1).cpu()
        return torch.where(self.intended_classes < 0, majority, self.intended_classes)

    @cached_property
    def prediction(self) -> model.TreePrediction:
        """Predictions for the validation images, from the cached distances."""
        with torch.no_grad():
            return self.tree.decode(self.tree.forward_distances(self.validation))


@dataclass(frozen=True)
class Cell:
    """One patch of one view of a training image."""

    image: str
    view: str
    patch: tuple[int, int]
    box: Region  # in pixels of the image

    def as_replacement(self, node: int, side: Side = "right") -> Replace:
        """Return the edit that makes this patch the prototype of a node, on one side of a pairwise node."""
        return Replace(node, self.image, self.view, self.patch, side)


@dataclass(frozen=True)
class Candidate:
    """A training patch that could become a prototype."""

    cell: Cell
    label: int
    similarity: float


class Workbench:
    """The tree and the cached feature maps of training and validation images.

    `training` holds for each image the views that prototypes may come from, and the full image, on which leaves are
    fitted. `excluded`, `notes` and `leaf_classes` come from earlier editing.
    """

    def __init__(
        self,
        tree: ProtoTree,
        root: Path,
        training: StoredMaps,
        validation: StoredMaps,
        source_views: Views,
        *,
        project_within_class: bool = True,
        excluded: tuple[Exclude, ...] = (),
        notes: Mapping[int, str] | None = None,
        leaf_classes: Sequence[int] | None = None,
    ) -> None:
        if tree.topology.n_nodes == 0:
            raise EditError("expected a tree with at least one prototype, got a single leaf; there is nothing to edit")
        self.tree, self.root, self.training, self.validation = tree.eval(), root, training, validation
        self._project_within_class = project_within_class
        self._row = {(self.name(entry.sample), entry.view.name): row for row, entry in enumerate(training.entries)}
        self._full = [row for row, entry in enumerate(training.entries) if entry.view == FULL_IMAGE]
        self._is_source = torch.tensor([entry.view in source_views(entry.sample) for entry in training.entries])
        self._weight = float(tree.leaf_logits.sum()) / len(self._full)  # how often training counted each image
        # In the paper's trees all radii are equal; they stay so.
        self._has_radii = tree.node_function != PAPER or bool((tree.radius != LN2).any())
        prototypes, leaf_logits = tree.prototypes.detach(), tree.leaf_logits.detach()
        nearest = training.nearest(prototypes), validation.nearest(prototypes)
        classes = leaf_logits.argmax(dim=1).cpu() if leaf_classes is None else torch.tensor(leaf_classes)
        self.start = TreeState(tree, *nearest, leaf_logits, excluded, notes or {}, classes)

    def name(self, sample: Sample) -> str:
        """Return an image's name as in the sources of prototypes."""
        return image_name(self.root, sample.path)

    def apply(self, state: TreeState, edit: Edit) -> TreeState:
        """Return the state after an edit, with its leaves refitted."""
        if not isinstance(edit, Exclude):
            state.check_node(edit.node)
        match edit:
            case Note():
                notes = {**state.notes, state.prototype_row(edit.node, edit.side): edit.text}
                return replace(state, notes={row: text for row, text in notes.items() if text})
            case Replace():
                row = state.prototype_row(edit.node, edit.side)
                cell = self.cell(edit.image, edit.view, edit.patch)
                if self.is_excluded(state, cell):
                    raise EditError(f"{edit.image} is excluded there; choose another patch, or undo the exclusion")
                return self._refit(self._replace(state, row, cell))
            case Exclude():
                return self._refit(self._exclude(state, edit))
            case Remove():
                return self._refit(_remove(state, edit))

    def metrics(self, state: TreeState) -> EditMetrics:
        """Compute metrics of a state on the validation images."""
        labels, prediction = self.validation.labels, state.prediction
        classes = {strategy: prediction.labels(strategy) for strategy in STRATEGIES}
        return EditMetrics(
            n_images=len(labels),
            accuracy={s: int((classes[s] == labels).sum()) / len(labels) for s in STRATEGIES},
            fidelity={s: int((classes[s] == classes["soft"]).sum()) / len(labels) for s in STRATEGIES[1:]},
            path_length={s: float(prediction.path(s).length.double().mean()) for s in STRATEGIES[1:]},
            n_prototypes=state.tree.n_prototypes,
        )

    # ---- patches

    def has(self, image: str, view: str) -> bool:
        """Tell whether there is such a view of a training image."""
        return (image, view) in self._row

    def entry(self, image: str, view: str) -> Entry:
        """Return a view of a training image."""
        row = self._row.get((image, view))
        if row is None:
            raise EditError(f"expected a training image, got {image!r} in the view {view!r}, which is none")
        return self.training.entries[row]

    def cell(self, image: str, view: str, patch: tuple[int, int]) -> Cell:
        """Return a patch by its row and column in the map of a view."""
        return self._cell(self.entry(image, view), *patch)

    def locate(self, image: str, region: Region, view: str = FULL_IMAGE.name) -> Cell:
        """Return the patch of a view that is nearest to a region of the image."""
        entry = self.entry(image, view)
        center = ((region[0] + region[2]) / 2, (region[1] + region[3]) / 2)
        x, y = from_image(center, entry.view, image_size(entry.sample), self.tree.preprocessing)
        return self._cell(entry, *self.tree.grid.nearest(x, y))

    def candidates(
        self, state: TreeState, node: int, n: int = 12, side: Side = "right", *, with_excluded: bool = False
    ) -> tuple[Candidate, ...]:
        """Find the training patches nearest to a node's prototype, one per image, nearest first.

        For a pairwise node they are of the classes on the prototype's side, if projection is constrained to classes.
        For a presence node all classes are shown, since a class that does not belong there reveals a shortcut. With
        excluded ones they come from cached distances, of all classes.
        """
        row = state.prototype_row(node, side)
        distance, patch = state.training.distance[:, row], state.training.patch[:, row]
        distance = distance.masked_fill(~self._is_source, torch.inf)
        if not with_excluded:
            distance, patch = self._nearest_allowed(state, row)
            if state.tree.node_function.kind == "pairwise":
                distance = self._within_class(state.tree, row, distance)
        views: dict[int, int] = {}  # the nearest of each image
        for view in distance.argsort(stable=True).tolist():
            if len(views) == n or not torch.isfinite(distance[view]):
                break
            views.setdefault(self.training.entries[view].sample_index, view)
        candidates = []
        for view in views.values():
            entry, similarity = self.training.entries[view], state.tree.similarity(distance[view][None], [row])
            cell = self._cell(entry, *self.tree.grid.row_column(int(patch[view])))
            candidates.append(Candidate(cell, entry.sample.label, float(similarity[0])))
        return tuple(candidates)

    def is_excluded(self, state: TreeState, cell: Cell) -> bool:
        """Tell whether a patch may not become a prototype."""
        return any(exclude.image == cell.image and _overlaps(exclude.region, cell.box) for exclude in state.excluded)

    def map_of(self, cell: Cell) -> Float[Tensor, "1 D H W"]:
        """Return the feature map that a patch is in."""
        return self.training.maps([self._row[cell.image, cell.view]])

    def display_box(self, state: TreeState, row: int, cell: Cell) -> Region:
        """Return the box that pages show of a patch that matches a prototype."""
        source, key = state.tree.sources[row], (cell.image, cell.view, cell.patch)
        if source is not None and source.display_box and (source.image, source.crop, source.patch) == key:
            return source.display_box
        return self._display_box(state.tree, row, state.tree.prototypes.detach()[row], cell)

    @torch.no_grad()
    def _display_box(self, tree: ProtoTree, row: int, vector: Float[Tensor, "D H1 W1"], cell: Cell) -> Region:
        """Localize the match around the nearest patch, in pixels of the image, as reports do."""
        entry, nearest = self.entry(cell.image, cell.view), torch.tensor([tree.grid.index(*cell.patch)])
        dists = distance_map(self.map_of(cell), vector[None])[0] / (float(tree.radius[row]))
        y, x = peak_places(dists, nearest, tree.grid.rows_per_crop)
        box = peak_box(tree.grid, float(y), float(x))
        return to_image(box, entry.view, image_size(entry.sample), tree.preprocessing).edges

    def _cell(self, entry: Entry, row: int, column: int) -> Cell:
        grid = self.tree.grid
        if not grid.has_patch(row, column):
            raise EditError(f"expected a patch in a map of {grid.rows}×{grid.columns}, got row {row}, column {column}")
        box = to_image(grid.box(row, column), entry.view, image_size(entry.sample), self.tree.preprocessing)
        return Cell(self.name(entry.sample), entry.view.name, (row, column), box.edges)

    def _nearest_allowed(self, state: TreeState, row: int) -> tuple[Float[Tensor, " M"], Int[Tensor, " M"]]:
        """Find each view's nearest patch that is not excluded; infinitely far in views that are no sources."""
        excluded, cells = {exclude.image for exclude in state.excluded}, self.tree.grid
        masks: dict[int, Bool[Tensor, " C"]] = {}
        for view, entry in enumerate(self.training.entries):
            if self.name(entry.sample) in excluded:
                patches = (self._cell(entry, *cells.row_column(patch)) for patch in range(cells.n_patches))
                masks[view] = torch.tensor([self.is_excluded(state, patch) for patch in patches])
        nearest = self.training.nearest(state.tree.prototypes.detach()[row : row + 1], masks)
        return nearest.distance[:, 0].masked_fill(~self._is_source, torch.inf), nearest.patch[:, 0]

    def _within_class(self, tree: ProtoTree, row: int, distance: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
        """Set other classes than the source may have (Eq. S1) infinitely far, if projection is constrained."""
        if not self._project_within_class:
            return distance
        other_class = ~prototype_classes(tree)[row, self.training.labels]
        constrained = distance.masked_fill(other_class, torch.inf)
        # As in projection: where no patch of these classes is left, any class will do.
        return constrained if torch.isfinite(constrained).any() else distance

    # ---- edits

    @torch.no_grad()
    def _replace(self, state: TreeState, row: int, cell: Cell) -> TreeState:
        """Put another patch in one row of the prototypes; the leaves below its node are to be refitted from zero."""
        view, grid, tree = self._row[cell.image, cell.view], self.tree.grid, copy_tree(state.tree)
        old, entry = tree.prototypes[row].clone(), self.training.entries[view]
        patches = extract_patches(self._exact_map(view), (old.shape[1], old.shape[2]))[0]
        # Patches are flattened as prototypes are: channels, then height, then width.
        vector = patches[grid.index(*cell.patch)].view_as(old)
        source = PrototypeSource(
            image=cell.image,
            crop=cell.view,
            patch=cell.patch,
            patch_box=cell.box,
            label=entry.sample.label,
            distance=float(torch.linalg.vector_norm(vector - old)),
            crop_region=entry.view.region.edges if entry.view.region is not None else None,
            flip=entry.view.flip,
            display_box=self._display_box(tree, row, vector, cell),
        )
        tree.prototypes[row] = vector
        tree.sources = (*tree.sources[:row], source, *tree.sources[row + 1 :])
        training, validation = (maps.nearest(vector[None]) for maps in (self.training, self.validation))
        if self.training.is_rounded:
            training.distance[view], training.patch[view] = 0.0, grid.index(*cell.patch)
        node, is_right = tree.node_of(row)
        topology, intended, is_below = tree.topology, state.intended_classes, leaves_below(tree.topology, node)
        on_side = torch.from_numpy(((topology.paths == node) & (topology.goes_right == is_right)).any(axis=1))
        if source.label not in state.leaf_classes[on_side].tolist():
            intended = intended.masked_fill(is_below, -1)
        return replace(
            state,
            tree=tree,
            training=_with_column(state.training, row, training),
            validation=_with_column(state.validation, row, validation),
            leaf_start=state.leaf_start.masked_fill(is_below[:, None], 0.0),
            intended_classes=intended,
        )

    @torch.no_grad()
    def _exact_map(self, view: int) -> Float[Tensor, "1 D H W"]:
        """Compute the feature map without rounding, so that a prototype cut from it has distance 0 to its image."""
        if not self.training.is_rounded:
            return self.training.maps([view])
        entry = self.training.entries[view]
        image = ViewDataset([entry.sample], lambda _: (entry.view,), self.tree.preprocessing)[0].image
        return self.tree.features(image[None].to(self.tree.prototypes.device)).cpu()  # type: ignore[no-any-return]

    def _exclude(self, state: TreeState, edit: Exclude) -> TreeState:
        """Project the prototypes that come from an excluded region again (Eq. 6, S1), onto what is still allowed."""
        if not any(image == edit.image for image, _ in self._row):
            raise EditError(f"expected a training image, got {edit.image!r}; there is none of that name")
        state = replace(state, excluded=(*state.excluded, edit))
        for row, source in enumerate(state.tree.sources):
            if source is None or source.image != edit.image or not _overlaps(edit.region, source.patch_box):
                continue
            distance, patches = self._nearest_allowed(state, row)
            distance = self._within_class(state.tree, row, distance)
            view = int(distance.argmin())
            if not torch.isfinite(distance[view]):
                number = state.tree.node_of(row)[0] + 1
                raise EditError(f"no patch would be left for question {number}; undo some exclusions first")
            patch = self.tree.grid.row_column(int(patches[view]))
            state = self._replace(state, row, self._cell(self.training.entries[view], *patch))
        return state

    @torch.no_grad()
    def _refit(self, state: TreeState) -> TreeState:
        """Refit the leaves by Eq. 5, then the distances that are usual on each side, then the calibration.

        Leaves that other images reach now start from zero, the rest from where training left them.
        """
        tree = copy_tree(state.tree)
        tree.leaf_logits.data = state.leaf_start.clone()
        full = NearestPatches(state.training.distance[self._full], state.training.patch[self._full])
        output, labels = tree.forward_distances(full), self.training.labels[self._full]
        for _ in range(N_SWEEPS):
            refit_leaves(tree, iter([(output, labels)]))
            tree.leaf_logits.mul_(self._weight)
        if self._has_radii:
            fit_distance_p95(tree, [(state.training.distance[self._is_source], self.training.labels[self._is_source])])
        state = replace(state, tree=tree)
        labels, prediction = self.validation.labels, state.prediction
        if not tree.calibration.n_images or len(labels) < MIN_HELD_OUT:
            return state
        calibrated = copy_tree(tree)  # the validation images were not trained on, so confidence can be fitted on them
        is_correct = prediction.labels("greedy") == labels
        calibrated.calibration = fit_calibration(prediction.margin, prediction.ood_score, is_correct)
        return replace(state, tree=calibrated)


def _overlaps(region: Region | None, box: Region) -> bool:
    """Tell whether a box lies in an excluded region, even in part."""
    if region is None:
        return True
    across = min(region[2], box[2]) - max(region[0], box[0])
    down = min(region[3], box[3]) - max(region[1], box[1])
    smaller = min((edges[2] - edges[0]) * (edges[3] - edges[1]) for edges in (region, box))
    return across > 0 and down > 0 and across * down > _MIN_OVERLAP * smaller


def _remove(state: TreeState, edit: Remove) -> TreeState:
    """Put one subtree of a node in its place."""
    topology, node = state.tree.topology, edit.node
    kept = int((topology.left if edit.keep == "left" else topology.right)[node])
    sides = (topology.left.tolist(), topology.right.tolist())
    left, right = ([kept if child == node else child for child in side] for side in sides)
    if topology.n_nodes == 1:
        raise EditError("expected at least one node to be left; a tree that is a single leaf decides nothing")
    smaller, nodes, leaves = Topology.from_children(left, right, root=kept if node == 0 else 0)
    if smaller.n_nodes == 0:
        raise EditError("expected at least one node to be left; keep the other side")
    rows, is_below = state.tree.prototypes_of(nodes), leaves_below(topology, kept)
    return replace(
        state,
        tree=state.tree.with_topology(smaller, nodes, leaves),
        training=NearestPatches(state.training.distance[:, rows], state.training.patch[:, rows]),
        validation=NearestPatches(state.validation.distance[:, rows], state.validation.patch[:, rows]),
        leaf_start=state.leaf_start.masked_fill(is_below[:, None], 0.0)[leaves],
        intended_classes=state.intended_classes.masked_fill(is_below, -1)[leaves],
        notes={new: state.notes[old] for new, old in enumerate(rows.tolist()) if old in state.notes},
    )


def copy_tree(tree: ProtoTree) -> ProtoTree:
    """Copy a tree so that it can be changed; both share the network."""
    topology = tree.topology
    return tree.with_topology(topology, np.arange(topology.n_nodes), np.arange(topology.n_leaves))


def leaves_below(topology: Topology, node: int) -> Bool[Tensor, " L"]:
    """Mask the leaves below a node, or one leaf, given as `~leaf`."""
    is_below = np.arange(topology.n_leaves) == ~node if node < 0 else (topology.paths == node).any(axis=1)
    return torch.from_numpy(is_below)


def _with_column(nearest: NearestPatches, row: int, column: NearestPatches) -> NearestPatches:
    distance, patch = nearest.distance.clone(), nearest.patch.clone()
    distance[:, row], patch[:, row] = column.distance[:, 0], column.patch[:, 0]
    return NearestPatches(distance, patch)

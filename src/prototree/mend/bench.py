"""A tree on the bench: prototypes replaced, sources banned, nodes removed, and the leaves refitted at once (§7).

The network stays as it is, so the feature maps of all photos are computed once. An edit changes the distances to one
prototype, then the leaves are fitted anew without gradients (Eq. 5). States are never changed; an edit makes a new one.
A node's number is always its place in the tree of the state at hand.

Notation used for tensor shapes: M photos, N nodes, L leaves, K classes, P patches of a map.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from prototree.data.loading import Entry, ViewDataset, Views
from prototree.data.samples import ImageData, Sample, name_in
from prototree.data.views import FULL, View, evaluation_views, from_photo, photo_size, to_photo
from prototree.errors import MendError
from prototree.mend.edits import Ban, Edit, Note, Region, Remove, Replace
from prototree.network.geometry import Box
from prototree.training import leaf_training
from prototree.training.maps import StoredMaps
from prototree.training.projection import prototype_classes
from prototree.tree.model import Decisions, ProtoTree, PrototypeSource, Routed
from prototree.tree.patches import NearestPatches, extract_patches
from prototree.tree.strategies import STRATEGIES, Strategy
from prototree.tree.topology import Topology

N_SWEEPS = 5  # of Eq. 5 over the training photos after an edit
_TOUCH = 0.01  # a patch is in a region if this share of either lies in the other


@dataclass(frozen=True)
class Cell:
    """One patch of one view of a training photo."""

    image: str
    view: str
    patch: tuple[int, int]
    box: Region  # in pixels of the photo

    def replaces(self, node: int) -> Replace:
        """The edit that puts this patch at a node."""
        return Replace(node, self.image, self.view, self.patch)


@dataclass(frozen=True)
class Candidate:
    """A training patch that could be a node's prototype."""

    cell: Cell
    label: int
    similarity: float


@dataclass(frozen=True)
class Figures:
    """How good a tree is on the photos that feedback comes from."""

    n_photos: int
    accuracy: dict[str, float]  # by strategy
    fidelity: dict[str, float]  # agreement of a hard strategy with soft
    path_length: dict[str, float]  # prototypes asked, on average
    class_accuracy: tuple[float | None, ...]  # soft; None for a class without photos
    n_prototypes: int


@dataclass(frozen=True)
class Changed:
    """A photo that is answered differently."""

    place: int  # in the list of photos
    label: int
    before: int
    after: int


@dataclass(frozen=True)
class Comparison:
    """Two trees on the same photos."""

    before: Figures
    after: Figures
    changed: tuple[Changed, ...]  # by the soft answer


@dataclass(frozen=True, eq=False)
class TreeState:
    """A tree between two edits, with the distance of every photo to every one of its prototypes."""

    tree: ProtoTree
    training: NearestPatches
    feedback: NearestPatches
    leaf_start: Float[Tensor, "L K"]  # what refitting begins with: as trained, or 0 where the photos are others now
    banned: tuple[Ban, ...]
    notes: Mapping[int, str]

    def expect(self, node: int) -> None:
        """Refuses a number that no node has."""
        n_nodes = self.tree.topology.n_nodes
        if node not in range(n_nodes):
            raise MendError(f"expected a prototype from 0 to {n_nodes - 1}, got {node}")

    @cached_property
    def decisions(self) -> Decisions:
        """What the tree decides for the photos of the feedback."""
        return self.tree.decide(_routed(self.tree, self.feedback))


class Bench:
    """What mending needs: the tree, and the feature maps of training photos and of photos for feedback.

    `training` holds for each photo the view that prototypes may come from, then the whole photo. `banned` and `notes`
    are what earlier mending left.
    """

    def __init__(
        self,
        tree: ProtoTree,
        root: Path,
        training: StoredMaps,
        feedback: StoredMaps,
        source_views: Views,
        *,
        constrain_classes: bool = True,
        banned: tuple[Ban, ...] = (),
        notes: Mapping[int, str] | None = None,
    ) -> None:
        if tree.topology.n_nodes == 0:
            raise MendError("expected a tree with at least one prototype, got a single leaf; there is nothing to mend")
        self.tree, self.root, self.training, self.feedback = tree.eval(), root, training, feedback
        self._constrain, self._banned_before, self._notes_before = constrain_classes, banned, notes or {}
        self._row = {(self.name(entry.sample), entry.view.name): row for row, entry in enumerate(training.entries)}
        self._whole = [row for row, entry in enumerate(training.entries) if entry.view == FULL]
        self._is_source = _are_sources(training.entries, source_views)
        self._weight = float(tree.leaf_logits.sum()) / len(self._whole)  # how often training counted each photo

    def name(self, sample: Sample) -> str:
        """A photo's name, as in the sources of prototypes."""
        return name_in(self.root, sample.path)

    @cached_property
    def start(self) -> TreeState:
        """The tree as it is, before any edit."""
        tree, prototypes = self.tree, self.tree.prototypes.detach()
        return TreeState(
            tree,
            self.training.nearest(prototypes),
            self.feedback.nearest(prototypes),
            tree.leaf_logits.detach(),
            self._banned_before,
            self._notes_before,
        )

    def apply(self, state: TreeState, edit: Edit) -> TreeState:
        """The state after an edit, with its leaves refitted."""
        if not isinstance(edit, Ban):
            state.expect(edit.node)
        match edit:
            case Note():
                notes = {**state.notes, edit.node: edit.text}
                return replace(state, notes={node: text for node, text in notes.items() if text})
            case Replace():
                return self._refitted(self._replaced(state, edit))
            case Ban():
                return self._refitted(self._banned(state, edit))
            case Remove():
                return self._refitted(self._removed(state, edit))

    def locate(self, image: str, region: Region, view: str = FULL.name) -> Cell:
        """The patch of a view that lies nearest to a region of the photo."""
        entry = self.entry(image, view)
        box = Box(*region)
        x, y = ((box.left + box.right) / 2, (box.top + box.bottom) / 2)
        across, down = from_photo((x, y), entry.view, photo_size(entry.sample), self.tree.preprocessing)
        return self._cell(entry, *self.tree.grid.nearest(across, down))

    def candidates(self, state: TreeState, node: int, n: int = 12) -> tuple[Candidate, ...]:
        """The nearest allowed patches to a node's prototype, one a photo, nearest first."""
        state.expect(node)
        prototype = state.tree.prototypes.detach()[node : node + 1]
        nearest = self.training.nearest(prototype, self._forbidden(state.banned))
        return self._nearest_first(state.tree, node, nearest, 0, n)

    def all_candidates(self, state: TreeState, node: int, n: int = 12) -> tuple[Candidate, ...]:
        """The same, banned patches and all, at no cost: the state knows their distances."""
        return self._nearest_first(state.tree, node, state.training, node, n)

    def _nearest_first(
        self, tree: ProtoTree, node: int, nearest: NearestPatches, column: int, n: int
    ) -> tuple[Candidate, ...]:
        distance = nearest.distance[:, column].masked_fill(~self._is_source, torch.inf)
        nearest_view: dict[int, int] = {}  # of each photo
        for row in distance.argsort(stable=True).tolist():
            if len(nearest_view) == n or not torch.isfinite(distance[row]):
                break
            nearest_view.setdefault(self.training.entries[row].sample_index, row)
        return tuple(
            Candidate(
                self._cell(entry := self.training.entries[row], *self.tree.grid.place(int(nearest.patch[row, column]))),
                entry.sample.label,
                float(tree.similarity(distance[row][None], [node])[0]),
            )
            for row in nearest_view.values()
        )

    def cell(self, image: str, view: str, patch: tuple[int, int]) -> Cell:
        """A patch by its place in the map of a view."""
        return self._cell(self.entry(image, view), *patch)

    def map_of(self, cell: Cell) -> Float[Tensor, "1 D H W"]:
        """The feature map that a patch is in."""
        return self.training.maps([self._row[cell.image, cell.view]])

    def is_banned(self, state: TreeState, cell: Cell) -> bool:
        """Whether a patch may not be a prototype."""
        return any(ban.image == cell.image and _overlaps(ban.region, cell.box) for ban in state.banned)

    def figures(self, state: TreeState) -> Figures:
        """The numbers of a state on the photos of the feedback."""
        decisions, labels = state.decisions, self.feedback.labels
        answers: dict[Strategy, Tensor] = {strategy: decisions.labels(strategy) for strategy in STRATEGIES}
        right = answers["soft"] == labels
        return Figures(
            n_photos=len(labels),
            accuracy={s: _share(answers[s] == labels) for s in STRATEGIES},
            fidelity={s: _share(answers[s] == answers["soft"]) for s in STRATEGIES[1:]},
            path_length={s: float(decisions.path(s).length.double().mean()) for s in STRATEGIES[1:]},
            class_accuracy=tuple(
                _share(right[labels == k]) if (labels == k).any() else None for k in range(self.tree.n_classes)
            ),
            n_prototypes=state.tree.n_prototypes,
        )

    def compare(self, before: TreeState, after: TreeState) -> Comparison:
        """What lies between two states."""
        then, now, labels = before.decisions.labels(), after.decisions.labels(), self.feedback.labels
        changed = torch.nonzero(then != now)[:, 0].tolist()
        rows = tuple(Changed(i, int(labels[i]), int(then[i]), int(now[i])) for i in changed)
        return Comparison(self.figures(before), self.figures(after), rows)

    def has(self, image: str, view: str) -> bool:
        """Whether there is such a view of a training photo."""
        return (image, view) in self._row

    def entry(self, image: str, view: str) -> Entry:
        """A view of a training photo."""
        row = self._row.get((image, view))
        if row is None:
            raise MendError(
                f"expected a training photo, got {image!r} in the view {view!r}; there is none of that name"
            )
        return self.training.entries[row]

    def _cell(self, entry: Entry, row: int, column: int) -> Cell:
        grid = self.tree.grid
        if not grid.holds(row, column):
            raise MendError(f"expected a patch in a map of {grid.rows}×{grid.columns}, got row {row}, column {column}")
        box = to_photo(grid.box(row, column), entry.view, photo_size(entry.sample), self.tree.preprocessing)
        return Cell(self.name(entry.sample), entry.view.name, (row, column), box.edges)

    def _forbidden(self, banned: Sequence[Ban]) -> dict[int, Bool[Tensor, " P"]]:
        """Banned patches of each view that has some."""
        grid = self.tree.grid
        places = [grid.place(patch) for patch in range(grid.n_patches)]
        masks: dict[int, Tensor] = {}
        for (image, _), row in self._row.items():
            regions = [ban.region for ban in banned if ban.image == image]
            if regions:
                boxes = [self._cell(self.training.entries[row], *place).box for place in places]
                masks[row] = torch.tensor([any(_overlaps(region, box) for region in regions) for box in boxes])
        return masks

    def _replaced(self, state: TreeState, edit: Replace) -> TreeState:
        cell = self._cell(self.entry(edit.image, edit.view), *edit.patch)
        if self.is_banned(state, cell):
            raise MendError(f"{edit.image} is banned there; choose another patch, or undo the ban")
        return self._with_prototype(state, edit.node, cell)

    def _with_prototype(self, state: TreeState, node: int, cell: Cell) -> TreeState:
        row = self._row[cell.image, cell.view]
        old, entry = state.tree.prototypes.detach(), self.training.entries[row]
        patches = extract_patches(self.training.maps([row]), (old.shape[2], old.shape[3]))[0]
        # Patches are flattened as prototypes are: depth, then height, then width.
        prototype = patches[self.tree.grid.number(*cell.patch)].view_as(old[node])
        tree = _copied(state.tree)
        tree.prototypes.data[node] = prototype
        region = entry.view.region
        source = PrototypeSource(
            image=cell.image,
            label=entry.sample.label,
            view=cell.view,
            patch=cell.patch,
            box=cell.box,
            distance=float(torch.linalg.vector_norm(prototype - old[node])),
            region=region.edges if region is not None else None,
            flip=entry.view.flip,
        )
        tree.sources = (*tree.sources[:node], source, *tree.sources[node + 1 :])
        return replace(
            state,
            tree=tree,
            training=_with_column(state.training, node, self.training.nearest(prototype[None])),
            feedback=_with_column(state.feedback, node, self.feedback.nearest(prototype[None])),
            leaf_start=_emptied(state.leaf_start, tree.topology, node),
        )

    def _banned(self, state: TreeState, edit: Ban) -> TreeState:
        """Prototypes that come from there are projected anew (Eq. 6, S1), on what is still allowed."""
        if not any(image == edit.image for image, _ in self._row):
            raise MendError(f"expected a training photo, got {edit.image!r}; there is none of that name")
        state = replace(state, banned=(*state.banned, edit))
        forbidden = self._forbidden(state.banned)
        for node, source in enumerate(state.tree.sources):
            if source is None or source.image != edit.image or not _overlaps(edit.region, source.box):
                continue
            nearest = self.training.nearest(state.tree.prototypes.detach()[node : node + 1], forbidden)
            distance = nearest.distance[:, 0].masked_fill(~self._is_source, torch.inf)
            if self._constrain:
                other_class = ~prototype_classes(state.tree)[node, self.training.labels]
                constrained = distance.masked_fill(other_class, torch.inf)
                # As in projection: where no patch of these classes is left, any class will do.
                distance = constrained if torch.isfinite(constrained).any() else distance
            row = int(distance.argmin())
            if not torch.isfinite(distance[row]):
                raise MendError(f"no patch would be left for prototype {node}; undo some bans first")
            place = self.tree.grid.place(int(nearest.patch[row, 0]))
            state = self._with_prototype(state, node, self._cell(self.training.entries[row], *place))
        return state

    def _removed(self, state: TreeState, edit: Remove) -> TreeState:
        topology = state.tree.topology
        if topology.n_nodes == 1:
            raise MendError("expected at least one node to be left; a tree that is a single leaf decides nothing")
        kept = int((topology.left if edit.keep == "left" else topology.right)[edit.node])
        smaller, nodes, leaf_ids = _spliced(topology, edit.node, kept)
        if smaller.n_nodes == 0:
            raise MendError("expected at least one node to be left; keep the other side")
        return replace(
            state,
            tree=state.tree.with_topology(smaller, nodes, leaf_ids),
            training=NearestPatches(state.training.distance[:, nodes], state.training.patch[:, nodes]),
            feedback=NearestPatches(state.feedback.distance[:, nodes], state.feedback.patch[:, nodes]),
            leaf_start=_emptied(state.leaf_start, topology, kept)[leaf_ids],
            notes={new: state.notes[old] for new, old in enumerate(nodes.tolist()) if old in state.notes},
        )

    @torch.no_grad()
    def _refitted(self, state: TreeState) -> TreeState:
        """Leaves whose photos are others now start from nothing, the rest from where training left them."""
        tree = _copied(state.tree)
        tree.leaf_logits.data = state.leaf_start.clone()
        whole = NearestPatches(state.training.distance[self._whole], state.training.patch[self._whole])
        routed, labels = _routed(tree, whole), self.training.labels[self._whole]
        for _ in range(N_SWEEPS):
            leaf_training.refit_leaves(tree, lambda visit: visit(routed, labels))
            tree.leaf_logits.mul_(self._weight)
        return replace(state, tree=tree)


def _spliced(topology: Topology, node: int, kept: int) -> tuple[Topology, Int[ndarray, " n"], Int[ndarray, " m"]]:
    """The tree with one child of a node in its place, with the old number of each node and leaf."""
    left, right = topology.left.tolist(), topology.right.tolist()
    for side in (left, right):
        side[:] = [kept if child == node else child for child in side]
    return Topology.from_children(left, right, root=kept if node == 0 else 0)


def training_set(data: ImageData, tree: ProtoTree, source_views: Views) -> ViewDataset:
    """The views of training photos that prototypes may come from, and the whole photos, on which leaves are fitted."""

    def views(sample: Sample) -> tuple[View, ...]:
        own = tuple(source_views(sample))
        return own if FULL in own else (*own, FULL)

    return ViewDataset(data.train, views, tree.preprocessing)


def photo_set(samples: Sequence[Sample], tree: ProtoTree) -> ViewDataset:
    """Whole photos."""
    return ViewDataset(samples, evaluation_views, tree.preprocessing)


def _are_sources(entries: Sequence[Entry], source_views: Views) -> Bool[Tensor, " M"]:
    """Which views prototypes may come from; the whole photos among them are there for the leaves, too."""
    return torch.tensor([entry.view in source_views(entry.sample) for entry in entries])


def _routed(tree: ProtoTree, nearest: NearestPatches) -> Routed:
    with torch.no_grad():
        return tree.routed(nearest)


def _copied(tree: ProtoTree) -> ProtoTree:
    topology = tree.topology
    return tree.with_topology(topology, np.arange(topology.n_nodes), np.arange(topology.n_leaves))


def _with_column(nearest: NearestPatches, index: int, column: NearestPatches) -> NearestPatches:
    distance, patch = nearest.distance.clone(), nearest.patch.clone()
    distance[:, index], patch[:, index] = column.distance[:, 0], column.patch[:, 0]
    return NearestPatches(distance, patch)


def _emptied(leaf_start: Float[Tensor, "L K"], topology: Topology, node: int) -> Float[Tensor, "L K"]:
    """With nothing in the leaves below a node, or in one leaf, given as `~leaf`."""
    is_below = np.arange(topology.n_leaves) == ~node if node < 0 else (topology.paths == node).any(axis=1)
    return leaf_start.masked_fill(torch.from_numpy(is_below)[:, None], 0.0)


def _overlaps(region: Region | None, box: Region) -> bool:
    """Whether a box lies in a banned region, be it in part."""
    if region is None:
        return True
    across = min(region[2], box[2]) - max(region[0], box[0])
    down = min(region[3], box[3]) - max(region[1], box[1])
    smaller = min((edge[2] - edge[0]) * (edge[3] - edge[1]) for edge in (region, box))
    return across > 0 and down > 0 and across * down > _TOUCH * smaller


def _share(hits: Bool[Tensor, " M"]) -> float:
    return int(hits.sum()) / len(hits)

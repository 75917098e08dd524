"""A tree on the bench: prototypes replaced, sources excluded, nodes removed, and the leaves refitted at once (§7).

The network stays as it is, so the feature maps of all photos are computed once. An edit changes the distances to one
prototype. Its reach, then the leaves are fitted again without gradients (Eq. 5), then the usual distances and the
confidence. A node's number is always its place in the tree of the current state.

Notation used for tensor shapes: M views of photos, C patches of a map.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prototree.backbones.geometry import Box
from prototree.core.confidence import fit_calibration
from prototree.core.model import ProtoTree, PrototypeSource
from prototree.core.patches import NearestPatches, extract_patches
from prototree.data.dataset import ImageData, Sample, name_in
from prototree.data.loading import Entry, ViewDataset, Views
from prototree.data.views import FULL, View, evaluation_views, from_photo, photo_size, to_photo
from prototree.editing.edits import Edit, Exclude, Note, Region, Remove, Replace, Side
from prototree.editing.figures import Comparison, Figures, changed_answers, figures_of
from prototree.editing.reaches import fitted_reach, has_reaches
from prototree.editing.shown_boxes import shown_box
from prototree.editing.state import TreeState, copied, routed, with_prototype, with_reach, without_node
from prototree.errors import EditError
from prototree.features.cache import StoredMaps
from prototree.training import leaf_training
from prototree.training.anchored import learn_usual
from prototree.training.calibrate import FEWEST_HELD
from prototree.training.projection import prototype_classes

N_SWEEPS = 5  # of Eq. 5 over the training photos after an edit
_TOUCH = 0.01  # a patch is in a region if this share of either lies in the other


@dataclass(frozen=True)
class Cell:
    """One patch of one view of a training photo."""

    image: str
    view: str
    patch: tuple[int, int]
    box: Region  # in pixels of the photo

    @property
    def place(self) -> tuple[str, str, tuple[int, int]]:
        """Which it is."""
        return self.image, self.view, self.patch

    def replaces(self, node: int, side: Side = "right") -> Replace:
        """The edit that puts this patch at a node, on one side where it compares two."""
        return Replace(node, self.image, self.view, self.patch, side)


@dataclass(frozen=True)
class Candidate:
    """A training patch that could be a prototype."""

    cell: Cell
    label: int
    similarity: float


class Workbench:
    """What editing needs: the tree, and the feature maps of training photos and of photos for feedback.

    `training` holds for each photo the view that prototypes may come from, then the whole photo. `excluded`, `notes`
    and what leaves were meant to stand for are what earlier editing left.
    """

    def __init__(
        self,
        tree: ProtoTree,
        root: Path,
        training: StoredMaps,
        feedback: StoredMaps,
        source_views: Views,
        *,
        project_within_class: bool = True,
        excluded: tuple[Exclude, ...] = (),
        notes: Mapping[int, str] | None = None,
        meant: Sequence[int] | None = None,
    ) -> None:
        if tree.topology.n_nodes == 0:
            raise EditError("expected a tree with at least one prototype, got a single leaf; there is nothing to edit")
        self.tree, self.root, self.training, self.feedback = tree.eval(), root, training, feedback
        self._constrain, self._banned_before, self._notes_before = project_within_class, excluded, notes or {}
        self._meant_before = tree.leaf_logits.argmax(dim=1).cpu() if meant is None else torch.tensor(meant)
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
            self._meant_before,
        )

    def apply(self, state: TreeState, edit: Edit) -> TreeState:
        """The state after an edit, with its leaves refitted."""
        if not isinstance(edit, Exclude):
            state.expect(edit.node)
        match edit:
            case Note():
                notes = {**state.notes, edit.node: edit.text}
                return replace(state, notes={node: text for node, text in notes.items() if text})
            case Replace():
                return self._refitted(self._replaced(state, edit))
            case Exclude():
                return self._refitted(self._banned(state, edit))
            case Remove():
                return self._refitted(without_node(state, edit))

    def locate(self, image: str, region: Region, view: str = FULL.name) -> Cell:
        """The patch of a view that lies nearest to a region of the photo."""
        entry = self.entry(image, view)
        box = Box(*region)
        x, y = ((box.left + box.right) / 2, (box.top + box.bottom) / 2)
        across, down = from_photo((x, y), entry.view, photo_size(entry.sample), self.tree.preprocessing)
        return self._cell(entry, *self.tree.grid.nearest(across, down))

    def candidates(self, state: TreeState, node: int, n: int = 12, side: Side = "right") -> tuple[Candidate, ...]:
        """The nearest allowed patches to a node's prototype, one per photo, nearest first.

        If a node compares two and sources are constrained, they are of the classes on the prototype's side. For a
        single prototype all classes are shown, since a class that does not belong there is what people look for.
        """
        prototype = state.prototype(node, side)
        nearest = self._allowed(state, prototype)
        distance = nearest.distance[:, 0]
        if state.tree.question.kind == "pairwise":
            distance = self._of_its_classes(state.tree, prototype, distance)
        return self._nearest_first(state.tree, prototype, distance, nearest.patch[:, 0], n)

    def all_candidates(self, state: TreeState, prototype: int, n: int = 12) -> tuple[Candidate, ...]:
        """The nearest patches to any prototype, excluded ones and all, at no cost: the state knows their distances."""
        distance = state.training.distance[:, prototype].masked_fill(~self._is_source, torch.inf)
        return self._nearest_first(state.tree, prototype, distance, state.training.patch[:, prototype], n)

    def _nearest_first(
        self, tree: ProtoTree, prototype: int, distance: Float[Tensor, " M"], patch: Int[Tensor, " M"], n: int
    ) -> tuple[Candidate, ...]:
        nearest_view: dict[int, int] = {}  # of each photo
        for row in distance.argsort(stable=True).tolist():
            if len(nearest_view) == n or not torch.isfinite(distance[row]):
                break
            nearest_view.setdefault(self.training.entries[row].sample_index, row)
        return tuple(
            Candidate(
                self._cell(entry := self.training.entries[row], *self.tree.grid.place(int(patch[row]))),
                entry.sample.label,
                float(tree.similarity(distance[row][None], [prototype])[0]),
            )
            for row in nearest_view.values()
        )

    def cell(self, image: str, view: str, patch: tuple[int, int]) -> Cell:
        """A patch by its place in the map of a view."""
        return self._cell(self.entry(image, view), *patch)

    def map_of(self, cell: Cell) -> Float[Tensor, "1 D H W"]:
        """The feature map that a patch is in."""
        return self.training.maps([self._row[cell.image, cell.view]])

    def shown(self, state: TreeState, prototype: int, cell: Cell) -> Region:
        """What people are shown of a patch that was found for a prototype."""
        source = state.tree.sources[prototype]
        if source is not None and source.shown and (source.image, source.view, source.patch) == cell.place:
            return source.shown
        return self._shown(state.tree, prototype, state.tree.prototypes.detach()[prototype], cell)

    def _shown(self, tree: ProtoTree, prototype: int, vector: Float[Tensor, "D H1 W1"], cell: Cell) -> Region:
        entry, reach = self.entry(cell.image, cell.view), float(tree.reach[prototype])
        return shown_box(tree, entry, self.map_of(cell), vector, reach, cell.patch)

    def is_banned(self, state: TreeState, cell: Cell) -> bool:
        """Whether a patch may not be a prototype."""
        return any(exclude.image == cell.image and _overlaps(exclude.region, cell.box) for exclude in state.excluded)

    def figures(self, state: TreeState) -> Figures:
        """The numbers of a state on the photos of the feedback."""
        return figures_of(state.tree, state.decisions, self.feedback.labels)

    def compare(self, before: TreeState, after: TreeState) -> Comparison:
        """What lies between two states."""
        changed = changed_answers(before.decisions, after.decisions, self.feedback.labels)
        return Comparison(self.figures(before), self.figures(after), changed)

    def has(self, image: str, view: str) -> bool:
        """Whether there is such a view of a training photo."""
        return (image, view) in self._row

    def entry(self, image: str, view: str) -> Entry:
        """A view of a training photo."""
        row = self._row.get((image, view))
        if row is None:
            raise EditError(
                f"expected a training photo, got {image!r} in the view {view!r}; there is none of that name"
            )
        return self.training.entries[row]

    def _cell(self, entry: Entry, row: int, column: int) -> Cell:
        grid = self.tree.grid
        if not grid.holds(row, column):
            raise EditError(f"expected a patch in a map of {grid.rows}×{grid.columns}, got row {row}, column {column}")
        box = to_photo(grid.box(row, column), entry.view, photo_size(entry.sample), self.tree.preprocessing)
        return Cell(self.name(entry.sample), entry.view.name, (row, column), box.edges)

    def _forbidden(self, excluded: Sequence[Exclude]) -> dict[int, Bool[Tensor, " C"]]:
        """Excluded patches of each view that has some."""
        grid = self.tree.grid
        places = [grid.place(patch) for patch in range(grid.n_patches)]
        masks: dict[int, Tensor] = {}
        for (image, _), row in self._row.items():
            regions = [exclude.region for exclude in excluded if exclude.image == image]
            if regions:
                boxes = [self._cell(self.training.entries[row], *place).box for place in places]
                masks[row] = torch.tensor([any(_overlaps(region, box) for region in regions) for box in boxes])
        return masks

    def _allowed(self, state: TreeState, prototype: int) -> NearestPatches:
        """Each view's nearest patch that is not excluded; infinitely far in views that are no sources."""
        own = state.tree.prototypes.detach()[prototype : prototype + 1]
        nearest = self.training.nearest(own, self._forbidden(state.excluded))
        return NearestPatches(nearest.distance.masked_fill(~self._is_source[:, None], torch.inf), nearest.patch)

    def _of_its_classes(self, tree: ProtoTree, prototype: int, distance: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
        """Infinitely far for other classes than may be the source (Eq. S1), if sources are constrained."""
        if not self._constrain:
            return distance
        other_class = ~prototype_classes(tree)[prototype, self.training.labels]
        constrained = distance.masked_fill(other_class, torch.inf)
        # As in projection: where no patch of these classes is left, any class will do.
        return constrained if torch.isfinite(constrained).any() else distance

    def _replaced(self, state: TreeState, edit: Replace) -> TreeState:
        prototype = state.prototype(edit.node, edit.side)
        cell = self._cell(self.entry(edit.image, edit.view), *edit.patch)
        if self.is_banned(state, cell):
            raise EditError(f"{edit.image} is excluded there; choose another patch, or undo the exclude")
        return self._with_prototype(state, prototype, cell)

    def _with_prototype(self, state: TreeState, prototype: int, cell: Cell) -> TreeState:
        row = self._row[cell.image, cell.view]
        old, entry = state.tree.prototypes.detach()[prototype], self.training.entries[row]
        patches = extract_patches(self._exact_map(row), (old.shape[1], old.shape[2]))[0]
        # Patches are flattened as prototypes are: depth, then height, then width.
        vector = patches[self.tree.grid.number(*cell.patch)].view_as(old)
        region = entry.view.region
        source = PrototypeSource(
            image=cell.image,
            label=entry.sample.label,
            view=cell.view,
            patch=cell.patch,
            box=cell.box,
            distance=float(torch.linalg.vector_norm(vector - old)),
            region=region.edges if region is not None else None,
            flip=entry.view.flip,
            shown=self._shown(state.tree, prototype, vector, cell),
        )
        training, feedback = (maps.nearest(vector[None]) for maps in (self.training, self.feedback))
        if self.training.is_rounded:
            training.distance[row], training.patch[row] = 0.0, self.tree.grid.number(*cell.patch)
        return self._with_fitted_reach(with_prototype(state, prototype, vector, source, training, feedback), prototype)

    @torch.no_grad()
    def _exact_map(self, row: int) -> Float[Tensor, "1 D H W"]:
        """The feature map that a prototype is cut from: the network's own, so that it finds itself at distance 0."""
        if not self.training.is_rounded:
            return self.training.maps([row])
        entry = self.training.entries[row]
        image = ViewDataset([entry.sample], lambda _: (entry.view,), self.tree.preprocessing)[0].image
        return self.tree.features(image[None].to(self.tree.prototypes.device)).cpu()  # type: ignore[no-any-return]

    def _with_fitted_reach(self, state: TreeState, prototype: int) -> TreeState:
        """Of one that stands alone. The leaves still say which classes are on which side; they are fitted later."""
        if state.tree.question.kind == "pairwise" or not has_reaches(state.tree):
            return state
        distance, labels = state.training.distance[self._whole, prototype], self.training.labels[self._whole]
        reach = fitted_reach(state.tree, prototype, distance, labels)
        return with_reach(state, prototype, reach) if reach is not None else state

    def _banned(self, state: TreeState, edit: Exclude) -> TreeState:
        """Prototypes that come from there are projected again (Eq. 6, S1), onto what is still allowed."""
        if not any(image == edit.image for image, _ in self._row):
            raise EditError(f"expected a training photo, got {edit.image!r}; there is none of that name")
        state = replace(state, excluded=(*state.excluded, edit))
        for prototype, source in enumerate(state.tree.sources):
            if source is None or source.image != edit.image or not _overlaps(edit.region, source.box):
                continue
            nearest = self._allowed(state, prototype)
            distance = self._of_its_classes(state.tree, prototype, nearest.distance[:, 0])
            row = int(distance.argmin())
            if not torch.isfinite(distance[row]):
                raise EditError(f"no patch would be left for {state.words_for(prototype)}; undo some exclusions first")
            place = self.tree.grid.place(int(nearest.patch[row, 0]))
            state = self._with_prototype(state, prototype, self._cell(self.training.entries[row], *place))
        return state

    @torch.no_grad()
    def _refitted(self, state: TreeState) -> TreeState:
        """Leaves whose photos are others now start from nothing, the rest from where training left them."""
        tree = copied(state.tree)
        tree.leaf_logits.data = state.leaf_start.clone()
        whole = NearestPatches(state.training.distance[self._whole], state.training.patch[self._whole])
        through, labels = routed(tree, whole), self.training.labels[self._whole]
        for _ in range(N_SWEEPS):
            leaf_training.refit_leaves(tree, lambda visit: visit(through, labels))
            tree.leaf_logits.mul_(self._weight)
        if has_reaches(tree):
            learn_usual(tree, [(state.training.distance[self._is_source], self.training.labels[self._is_source])])
        return self._as_sure_as_right(replace(state, tree=tree))

    def _as_sure_as_right(self, state: TreeState) -> TreeState:
        """Confidence fitted again, where it was fitted, on the photos of the feedback: the tree has not learned
        them."""
        decisions, labels = state.decisions, self.feedback.labels
        if not state.tree.calibration.n_photos or len(labels) < FEWEST_HELD:
            return state
        tree, is_right = copied(state.tree), decisions.labels("greedy") == labels
        tree.calibration = fit_calibration(decisions.margin, decisions.ood_score, is_right)
        return replace(state, tree=tree)


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


def _overlaps(region: Region | None, box: Region) -> bool:
    """Whether a box lies in an excluded region, be it in part."""
    if region is None:
        return True
    across = min(region[2], box[2]) - max(region[0], box[0])
    down = min(region[3], box[3]) - max(region[1], box[1])
    smaller = min((edge[2] - edge[0]) * (edge[3] - edge[1]) for edge in (region, box))
    return across > 0 and down > 0 and across * down > _TOUCH * smaller

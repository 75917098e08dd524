"""Between the API and the tree: answers in the API's shapes. Blocking, and called from threads.

Requests name photos by their number in a list and nodes by their number in the tree as it is at a revision, so no text
from a request is ever part of a path.
"""

import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from prototree import workbench
from prototree.checkpoint import read_json
from prototree.data.images import check_header, read_photo
from prototree.data.samples import Box, Sample
from prototree.data.views import FULL, photo_size
from prototree.edits import Ban, Edit, Note, Remove, Replace
from prototree.errors import DataError, MendError
from prototree.explain import PrototypePictures, explain_image
from prototree.explanations import Match, Picture, PrototypeExplanation, TreeExplanation, Where
from prototree.heat import Frame
from prototree.leaves import class_log_probs
from prototree.mending import MENDING, Session, Standing
from prototree.patches import similarity_map
from prototree.pictures import cut_out, open_photo, reduced
from prototree.report.pages import tree_data
from prototree.web import shapes
from prototree.web.results import NotFoundError, Results, result_of, webp
from prototree.workbench import Cell, Figures, State

MAX_CHANGED = 200  # photos listed as answered differently
_NEAREST = 6
_PICTURE_SIDE, _THUMB_SIDE, _CROP_SIDE = 1024, 160, 128


class UnusableError(Exception):
    """An upload that is no usable image."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Service:
    """Everything the app can be asked."""

    def __init__(self, session: Session) -> None:
        self.session, self.results = session, Results()
        bench, data = session.bench, session.data
        self.title, self.classes = session.run.folder.resolve().name, data.class_names
        self._photos: dict[str, tuple[Sample, ...]] = {
            "training": data.train,
            "feedback": tuple(entry.sample for entry in bench.feedback.entries),
        }
        self._number = {bench.name(sample): index for index, sample in enumerate(data.train)}
        self._drawn = lru_cache(maxsize=1024)(self._draw)
        self._explained = lru_cache(maxsize=2)(self._explain)
        self._crops = lru_cache(maxsize=1)(lambda state: PrototypePictures(state.tree, data))
        self._below = lru_cache(maxsize=2)(self._classes_below)

    # ---- the run and its photos

    def run(self) -> shapes.RunShape:
        session = self.session
        return shapes.RunShape(
            title=self.title,
            classes=list(self.classes),
            prototypes=session.state.tree.topology.n_nodes,
            training_photos=len(self._photos["training"]),
            feedback_photos=len(self._photos["feedback"]),
            feedback=session.feedback_name,
            held_back=len(session.held_back or ()),
        )

    def photos(self, split: str, label: int | None, start: int, count: int) -> list[shapes.Photo]:
        samples = self._photos[split]
        found = [i for i, sample in enumerate(samples) if label is None or sample.label == label]
        return [self.photo(split, index) for index in found[start : start + count]]

    def photo(self, split: str, index: int) -> shapes.Photo:
        sample = self._sample(split, index)
        width, height = photo_size(sample)
        where = f"/photos/{split}/{index}"
        return shapes.Photo(
            split=split,  # type: ignore[arg-type]
            index=index,
            name=self.session.bench.name(sample),
            label=sample.label,
            width=width,
            height=height,
            picture=f"{where}/picture",
            thumb=f"{where}/thumb",
        )

    def training_photo(self, index: int) -> shapes.PhotoShape:
        """A photo with the grid of patches of its whole view, for dragging a region on it."""
        photo = self.photo("training", index)
        tree, cell = self.session.bench.tree, self.session.bench.locate(photo.name, (-1e9, -1e9, -1e9, -1e9))
        (rows, columns), (high, wide) = tree.features.backbone.map_size, tree.prototypes.shape[2:]
        left, top, right, bottom = cell.box
        grid = shapes.Grid(
            left=left,
            top=top,
            across=(right - left) / wide,
            down=(bottom - top) / high,
            rows=rows,
            columns=columns,
            patch_rows=high,
            patch_columns=wide,
        )
        return shapes.PhotoShape(**photo.model_dump(), grid=grid)

    def picture(self, split: str, index: int, kind: str) -> bytes:
        """A photo as WebP."""
        self._sample(split, index)
        return self._drawn(split, index, _THUMB_SIDE if kind == "thumb" else _PICTURE_SIDE, None)

    def crop(self, index: int, view: str, row: int, column: int) -> bytes:
        """A patch of a training photo as WebP."""
        name = self.session.bench.name(self._sample("training", index))
        try:
            cell = self.session.bench.cell(name, view, (row, column))
        except MendError as error:
            raise NotFoundError(str(error)) from error
        return self._drawn("training", index, _CROP_SIDE, cell.box)

    # ---- the tree

    def tree(self) -> tuple[TreeExplanation, dict[str, Any]]:
        """The tree as it is, for the page of the report."""
        return self._explained(self.session.state)

    def nodes(self) -> list[shapes.NodeShape]:
        state = self.session.state
        return [self._node(state, index) for index in range(state.tree.topology.n_nodes)]

    def node(self, index: int) -> shapes.NodeShape:
        state = self.session.state
        self._original(state, index)
        return self._node(state, index)

    def candidates(self, index: int, count: int) -> shapes.CandidatesShape:
        standing = self.session.standing
        found = self.session.bench.candidates(standing.state, self._original(standing.state, index), count)
        patches = [self._patch(candidate.cell, candidate.similarity) for candidate in found]
        return shapes.CandidatesShape(node=index, revision=standing.history.revision, candidates=patches)

    # ---- trying images

    def decide(self, content: bytes, name: str) -> shapes.DecisionShape:
        """What the tree says of an image that somebody sent."""
        return self._decided(_decoded(content), name, None)

    def decide_sample(self, split: str, index: int) -> shapes.DecisionShape:
        """What the tree says of a photo that is here."""
        sample = self._sample(split, index)
        return self._decided(open_photo(sample.path).image, self.session.bench.name(sample), sample.label)

    def mistakes(self) -> shapes.MistakesShape:
        found = self.session.mistakes()
        return shapes.MistakesShape(
            strategy=found["strategy"],
            photos=len(self._photos["feedback"]),
            nodes=[
                shapes.BlameShape(node=b["node"], mistakes=b["n_mistakes"], found_wrongly=b["n_went_right"])
                for b in found["nodes"]
            ],
            images=[
                shapes.MistakeShape(
                    photo=self.photo("feedback", mistake["place"]),
                    truth=self.classes[mistake["label"]],
                    answer=self.classes[mistake["answer"]],
                    node=mistake["node"],
                    present=mistake["went_right"],
                    similarity=mistake["similarity"],
                )
                for mistake in found["images"]
            ],
        )

    # ---- mending

    def mending(self, standing: Standing | None = None) -> shapes.MendingShape:
        standing = standing or self.session.standing
        bench = self.session.bench
        comparison = bench.compare(standing.previous, standing.state)
        return shapes.MendingShape(
            revision=standing.history.revision,
            done=self._sentences(standing.history.done),
            undone=self._sentences((*standing.history.done, *reversed(standing.history.undone)))[
                len(standing.history.done) :
            ],
            original=_figures(bench.figures(bench.start)),
            before=_figures(comparison.before),
            now=_figures(comparison.after),
            changed=[
                shapes.ChangedShape(
                    photo=self.photo("feedback", changed.place),
                    truth=self.classes[changed.label],
                    before=self.classes[changed.before],
                    after=self.classes[changed.after],
                )
                for changed in comparison.changed[:MAX_CHANGED]
            ],
            nodes=list(range(standing.state.tree.topology.n_nodes)),
            feedback=self.session.feedback_name,
        )

    def edit(self, question: shapes.EditQuestion) -> shapes.MendingShape:
        standing = self.session.standing
        standing.history.expect(question.revision)
        edit = self._as_edit(standing.state, question.edit)
        return self.mending(self.session.apply(edit, question.revision))

    def undo(self, revision: int) -> shapes.MendingShape:
        return self.mending(self.session.undo(revision))

    def redo(self, revision: int) -> shapes.MendingShape:
        return self.mending(self.session.redo(revision))

    def save(self, revision: int) -> shapes.SavedShape:
        run = self.session.save(revision=revision)
        judged = read_json(run.folder / MENDING)["judged"]
        return shapes.SavedShape(
            run=run.folder.name, photos=judged["photos"], before=judged["before"], after=judged["after"]
        )

    # ---- inside

    def _sample(self, split: str, index: int) -> Sample:
        samples = self._photos[split]
        if not 0 <= index < len(samples):
            raise NotFoundError(f"expected a {split} photo from 0 to {len(samples) - 1}, got {index}")
        return samples[index]

    def _original(self, state: State, index: int) -> int:
        if not 0 <= index < len(state.nodes):
            raise NotFoundError(f"expected a prototype from 0 to {len(state.nodes) - 1}, got {index}")
        return int(state.nodes[index])

    def _as_edit(self, state: State, edit: Any) -> Edit:
        match edit:
            case shapes.ReplaceEdit():
                node, image = self._original(state, edit.node), self._name(edit.photo)
                if edit.patch is not None:
                    return Replace(node, image, edit.view, (edit.patch[0], edit.patch[1]))
                if edit.region is None:
                    raise MendError("expected a region of the photo or a patch of a view, got neither")
                return self.session.bench.locate(image, _region(edit.region), edit.view).replaces(node)
            case shapes.BanEdit():
                return Ban(self._name(edit.photo), _region(edit.region) if edit.region is not None else None)
            case shapes.RemoveEdit():
                return Remove(self._original(state, edit.node), edit.keep)
            case _:
                return Note(self._original(state, edit.node), edit.text.strip())

    def _name(self, index: int) -> str:
        return self.session.bench.name(self._sample("training", index))

    def _sentences(self, done: Sequence[Edit]) -> list[str]:
        """What was done, with the numbers that prototypes had at the time."""
        topology = self.session.bench.tree.topology
        nodes, sentences = np.arange(topology.n_nodes), []
        for edit in done:
            number = int(np.nonzero(nodes == edit.node)[0][0]) if not isinstance(edit, Ban) else -1
            match edit:
                case Replace():
                    sentences.append(f"Prototype {number} is now a patch of {edit.image}")
                case Ban():
                    what = "a region of " if edit.region is not None else ""
                    sentences.append(f"Banned {what}{edit.image} as a source")
                case Remove():
                    side = "absent" if edit.keep == "left" else "present"
                    sentences.append(f"Removed prototype {number}, keeping what was below “{side}”")
                    topology, kept, _ = workbench.spliced(topology, number, edit.keep)
                    nodes = nodes[kept]
                case Note():
                    sentences.append(
                        f"Prototype {number} is called “{edit.text}”"
                        if edit.text
                        else f"Removed the note of prototype {number}"
                    )
        return sentences

    def _node(self, state: State, index: int) -> shapes.NodeShape:
        topology, source = state.tree.topology, state.tree.sources[index]
        cell = self._own_cell(state, index)
        below, left, right = self._below(state), int(topology.left[index]), int(topology.right[index])
        return shapes.NodeShape(
            node=index,
            left=left,
            right=right,
            note=dict(state.notes).get(int(state.nodes[index]), ""),
            classes_left=[self.classes[label] for label in below[left]],
            classes_right=[self.classes[label] for label in below[right]],
            source=self._patch(cell, 1.0) if cell is not None else None,
            distance=source.distance if source is not None else 0.0,
        )

    def _own_cell(self, state: State, index: int) -> Cell | None:
        """The patch that a prototype is, where its photo is among the training photos."""
        source = state.tree.sources[index]
        if source is None or not self.session.bench.has(source.image, source.view):
            return None
        return Cell(source.image, source.view, source.patch, source.box)

    def _classes_below(self, state: State) -> dict[int, tuple[int, ...]]:
        """The classes that are decided below each node (or leaf, as `~leaf`), in the order of the leaves."""
        topology = state.tree.topology
        best = state.tree.leaf_logits.argmax(dim=1).tolist()
        below: dict[int, tuple[int, ...]] = {~leaf: (label,) for leaf, label in enumerate(best)}
        for node in reversed(range(topology.n_nodes)):  # children before parents
            both = (*below[int(topology.left[node])], *below[int(topology.right[node])])
            below[node] = tuple(dict.fromkeys(both))
        return below

    def _patch(self, cell: Cell, similarity: float) -> shapes.Patch:
        index = self._number[cell.image]
        return shapes.Patch(
            photo=self.photo("training", index),
            view=cell.view,
            patch=list(cell.patch),
            box=list(cell.box),
            crop=self._crop_url(index, cell),
            similarity=similarity,
        )

    def _crop_url(self, index: int, cell: Cell) -> str:
        return f"/photos/training/{index}/crop/{cell.view}/{cell.patch[0]}/{cell.patch[1]}"

    def _draw(self, split: str, index: int, side: int, box: tuple[float, float, float, float] | None) -> bytes:
        photo = open_photo(self._photos[split][index].path)
        return webp(cut_out(photo, Box(*box), side) if box is not None else reduced(photo, side))

    def _decided(self, image: Image.Image, name: str, label: int | None) -> shapes.DecisionShape:
        standing = self.session.standing
        state = standing.state
        notes = {state.index(node): text for node, text in state.notes}
        explained = explain_image(state.tree, image, self._crops(state), name=name, label=label, notes=notes)
        result = result_of(explained, secrets.token_urlsafe(9), standing.history.revision)
        self.results.add(result)
        return result.decision

    def _explain(self, state: State) -> tuple[TreeExplanation, dict[str, Any]]:
        bench, tree = self.session.bench, state.tree
        urls: dict[str, str] = {}
        notes = {state.index(node): text for node, text in state.notes}
        rights = self._right_shares(state)
        prototypes = tuple(self._prototype(state, node, notes, rights[node], urls) for node in range(len(state.nodes)))
        explanation = TreeExplanation(
            title=self.title,
            class_names=self.classes,
            left=tuple(tree.topology.left.tolist()),
            right=tuple(tree.topology.right.tolist()),
            prototypes=prototypes,
            leaf_probs=tuple(map(tuple, class_log_probs(tree.leaf_logits.detach()).exp().tolist())),
            accuracy=bench.figures(state).accuracy,
        )
        # The page fetches its pictures one by one when they come into view; here stand only their addresses.
        return explanation, tree_data(explanation, lambda name, _: urls[name])

    def _right_shares(self, state: State) -> list[tuple[float, ...]]:
        whole = torch.tensor([entry.view == FULL for entry in self.session.bench.training.entries])
        present = (torch.exp(-state.training.distance[whole]) > 0.5).double()
        labels = self.session.bench.training.labels[whole]
        counts = torch.bincount(labels, minlength=len(self.classes)).clamp_min(1)
        sums = torch.zeros(len(self.classes), present.shape[1], dtype=torch.float64).index_add_(0, labels, present)
        return [tuple(row) for row in (sums / counts[:, None]).T.tolist()]

    def _prototype(
        self, state: State, node: int, notes: dict[int, str], right: tuple[float, ...], urls: dict[str, str]
    ) -> PrototypeExplanation:
        bench, source = self.session.bench, state.tree.sources[node]
        found = bench.candidates_of(state, node, _NEAREST + 1)
        own = self._own_cell(state, node)
        nearest = [candidate for candidate in found if own is None or candidate.cell.image != own.image][:_NEAREST]
        own = own or nearest[0].cell
        entry = bench.entry(own.image, own.view)
        prototype = state.tree.prototypes.detach()[node : node + 1]
        grid = similarity_map(bench.map_of(own), prototype)[0, 0].numpy()
        size = photo_size(entry.sample)
        frame = Frame(entry.view, size, state.tree.preprocessing)
        heat = frame.heat(grid, (16, 16), (prototype.shape[2], prototype.shape[3]))
        index = self._number[own.image]
        urls[f"photo-{node}"] = f"/photos/training/{index}/picture"
        urls[f"crop-{node}"] = self._crop_url(index, own)
        for rank, candidate in enumerate(nearest):
            urls[f"nearest-{node}-{rank}"] = self._crop_url(self._number[candidate.cell.image], candidate.cell)
        where = (Where("cell", Box(*own.box), heat, None),)
        return PrototypeExplanation(
            node=node,
            source=Match(own.image, entry.sample.label, 1.0, size, _NO_PICTURE, _NO_PICTURE, where),
            distance_moved=source.distance if source else 0.0,
            nearest=tuple(
                Match(c.cell.image, c.label, c.similarity, size, _NO_PICTURE, _NO_PICTURE, ()) for c in nearest
            ),
            right_share=right,
            causes=(),
            note=notes.get(node, ""),
        )


_NO_PICTURE: Picture = np.zeros((1, 1, 3), dtype=np.uint8)


def _decoded(content: bytes) -> Image.Image:
    if not content:
        raise UnusableError(400, "expected an image, got nothing (0 bytes); choose a file that is not empty")
    try:
        check_header(content)
    except DataError as error:
        too_large = "the limit is" in str(error)
        raise UnusableError(413 if too_large else 415, str(error).removesuffix("; replace or remove it")) from error
    try:
        return read_photo(content, at_least=_PICTURE_SIDE).image
    except DataError as error:
        raise UnusableError(422, str(error).removesuffix("; replace or remove it")) from error


def _figures(figures: Figures) -> shapes.FiguresShape:
    return shapes.FiguresShape(
        photos=figures.n_photos,
        accuracy=figures.accuracy,
        fidelity=figures.fidelity,
        path_length=figures.path_length,
        prototypes=figures.n_prototypes,
    )


def _region(edges: Sequence[float]) -> tuple[float, float, float, float]:
    left, right = sorted((float(edges[0]), float(edges[2])))
    top, bottom = sorted((float(edges[1]), float(edges[3])))
    return left, top, right, bottom

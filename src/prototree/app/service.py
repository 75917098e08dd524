"""Between the API and the tree: answers in the API's shapes. Blocking, and called from threads.

Requests name photos by their number in a list and nodes by their number in the tree as it is at a revision, so no text
from a request is ever part of a path.
"""

import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from PIL import Image

from prototree.app import schemas
from prototree.app.edit_words import sentence
from prototree.app.finetune_job import FinetuneJob
from prototree.app.gallery import PICTURE_SIDE, Gallery
from prototree.app.results import NotFoundError, Results, result_of
from prototree.app.tree_view import TreeView
from prototree.backbones.inference import frozen_features
from prototree.data.images import read_photo
from prototree.editing.edits import Edit, Exclude, Note, Remove, Replace, Side
from prototree.editing.figures import Figures
from prototree.editing.finetuning import can_finetune
from prototree.editing.session import EDITS, EditSession, Snapshot
from prototree.editing.state import TreeState
from prototree.errors import EditError
from prototree.explain.decisions import explain_image
from prototree.explain.prototype_pictures import PrototypePictures
from prototree.explain.records import TreeExplanation
from prototree.files import read_json

MAX_CHANGED = 200  # photos listed as answered differently


class Service:
    """Everything the app can be asked."""

    edits = True

    def __init__(
        self, session: EditSession, results: Results | None = None, learned: schemas.FinetuneStatus | None = None
    ) -> None:
        self.session, self.results, self.learner = session, results or Results(), FinetuneJob(session, learned)
        workbench, data = session.workbench, session.data
        self.title, self.classes = session.run.folder.resolve().name, data.class_names
        self.gallery = Gallery(workbench, data)
        view = TreeView(self.title, session, self.gallery)
        self._explained, self._spreads = lru_cache(maxsize=2)(view.of), lru_cache(maxsize=2)(view.spreads)
        self._crops = lru_cache(maxsize=1)(lambda state: PrototypePictures(state.tree, data))
        self._below = lru_cache(maxsize=2)(self._classes_below)
        self._network = lru_cache(maxsize=1)(frozen_features)

    # ---- the run

    @property
    def revision(self) -> int:
        """Of the tree as it is."""
        return self.session.revision

    def close(self) -> None:
        """Ends what goes on in the background, and lets others edit the run."""
        self.learner.close()
        self.session.close()

    def run(self) -> schemas.RunShape:
        session = self.session
        return schemas.RunShape(
            title=self.title,
            classes=list(self.classes),
            prototypes=session.state.tree.topology.n_nodes,
            training_photos=self.gallery.count("training"),
            feedback_photos=self.gallery.count("feedback"),
            feedback=session.feedback_name,
            held_back=session.n_held_back,
            question=session.state.tree.question.kind,
            can_finetune=can_finetune(session.run),
        )

    # ---- the tree

    def tree(self) -> tuple[TreeExplanation, dict[str, Any]]:
        """The tree as it is, for the page of the report."""
        return self._explained(self.session.state)

    def nodes(self) -> list[schemas.NodeShape]:
        state = self.session.state
        return [self._node(state, node) for node in range(state.tree.topology.n_nodes)]

    def node(self, node: int) -> schemas.NodeShape:
        state = self.session.state
        _expect_node(state, node)
        return self._node(state, node)

    def candidates(self, node: int, count: int, side: Side = "right") -> schemas.CandidatesShape:
        snapshot = self.session.snapshot
        _expect_node(snapshot.state, node)
        found = self.session.workbench.candidates(snapshot.state, node, count, side)
        state, prototype = snapshot.state, snapshot.state.prototype(node, side)
        patches = [self.gallery.patch(state, prototype, one.cell, one.similarity) for one in found]
        return schemas.CandidatesShape(node=node, side=side, revision=snapshot.history.revision, candidates=patches)

    # ---- trying images

    def samples(self) -> list[schemas.PhotoShape]:
        """Photos to try, one of each class."""
        every = range(len(self.classes))
        return [photo for label in every for photo in self.gallery.photos("feedback", label, 0, 1)]

    def decide(self, content: bytes, name: str) -> schemas.DecisionShape:
        """What the tree says of an image that somebody sent."""
        return self._decided(read_photo(content, at_least=PICTURE_SIDE).image, name, None)

    def decide_sample(self, split: str, index: int) -> schemas.DecisionShape:
        """What the tree says of a photo that is here."""
        sample = self.gallery.sample(split, index)
        return self._decided(self.gallery.open(split, index).image, self.session.workbench.name(sample), sample.label)

    def mistakes(self) -> schemas.MistakesShape:
        found = self.session.mistakes()
        return schemas.MistakesShape(
            strategy=found["strategy"],
            photos=self.gallery.count("feedback"),
            nodes=[
                schemas.BlameShape(node=b["node"], mistakes=b["n_errors"], goes_right=b["n_goes_right"])
                for b in found["nodes"]
            ],
            images=[
                schemas.MistakeShape(
                    photo=self.gallery.photo("feedback", mistake["place"]),
                    truth=self.classes[mistake["label"]],
                    answer=self.classes[mistake["answer"]],
                    node=mistake["node"],
                    goes_right=mistake["goes_right"],
                    p_right=mistake["p_right"],
                )
                for mistake in found["images"]
            ],
        )

    # ---- editing

    def editing(self, snapshot: Snapshot | None = None) -> schemas.EditsShape:
        snapshot = snapshot or self.session.snapshot
        workbench = self.session.workbench
        comparison = workbench.compare(snapshot.previous, snapshot.state)
        done, undone = snapshot.history.done, snapshot.history.undone
        question = snapshot.state.tree.question.kind
        return schemas.EditsShape(
            revision=snapshot.history.revision,
            done=[sentence(edit, question) for edit in done],
            undone=[sentence(edit, question) for edit in reversed(undone)],
            original=_figures(workbench.figures(workbench.start)),
            before=_figures(comparison.before),
            now=_figures(comparison.after),
            changed=[
                schemas.ChangedShape(
                    photo=self.gallery.photo("feedback", changed.place),
                    truth=self.classes[changed.label],
                    before=self.classes[changed.before],
                    after=self.classes[changed.after],
                )
                for changed in comparison.changed[:MAX_CHANGED]
            ],
            nodes=list(range(snapshot.state.tree.topology.n_nodes)),
            feedback=self.session.feedback_name,
        )

    def edit(self, question: schemas.EditQuestion) -> schemas.EditsShape:
        snapshot = self.session.snapshot
        snapshot.history.expect(question.revision)
        if not isinstance(question.edit, schemas.ExcludeEdit):
            _expect_node(snapshot.state, question.edit.node)
        return self.editing(self.session.apply(self._as_edit(question.edit), question.revision))

    def undo(self, revision: int) -> schemas.EditsShape:
        return self.editing(self.session.undo(revision))

    def redo(self, revision: int) -> schemas.EditsShape:
        return self.editing(self.session.redo(revision))

    def save(self, revision: int) -> schemas.SavedShape:
        run = self.session.save(revision=revision)
        judged = read_json(run.folder / EDITS)["judged"]
        return schemas.SavedShape(
            run=run.folder.name, photos=judged["photos"], before=judged["before"], after=judged["after"]
        )

    # ---- inside

    def _as_edit(self, edit: Any) -> Edit:
        match edit:
            case schemas.ReplaceEdit():
                image = self.gallery.name(edit.photo)
                if edit.patch is not None:
                    return Replace(edit.node, image, edit.view, (edit.patch[0], edit.patch[1]), edit.side)
                if edit.region is None:
                    raise EditError("expected a region of the photo or a patch of a view, got neither")
                cell = self.session.workbench.locate(image, _region(edit.region), edit.view)
                return cell.replaces(edit.node, edit.side)
            case schemas.ExcludeEdit():
                return Exclude(self.gallery.name(edit.photo), _region(edit.region) if edit.region is not None else None)
            case schemas.RemoveEdit():
                return Remove(edit.node, edit.keep)
            case _:
                return Note(edit.node, edit.text.strip())

    def _node(self, state: TreeState, node: int) -> schemas.NodeShape:
        topology, question = state.tree.topology, state.tree.question.kind
        source, distance = self._prototype(state, state.prototype(node))
        other, other_distance = None, None
        if question == "pairwise":
            other, other_distance = self._prototype(state, state.prototype(node, "left"))
        below, left, right = self._below(state), int(topology.left[node]), int(topology.right[node])
        return schemas.NodeShape(
            node=node,
            question=question,
            left=left,
            right=right,
            note=state.notes.get(node, ""),
            classes_left=[self.classes[label] for label in below[left]],
            classes_right=[self.classes[label] for label in below[right]],
            source=source,
            distance=distance,
            other=other,
            other_distance=other_distance,
        )

    def _prototype(self, state: TreeState, prototype: int) -> tuple[schemas.PatchShape | None, float]:
        """The patch that a prototype is, and how far it has moved to become it."""
        source, cell = state.tree.sources[prototype], self.gallery.own_cell(state, prototype)
        shown = self.gallery.patch(state, prototype, cell, 1.0) if cell is not None else None
        return shown, source.distance if source else 0.0

    def _classes_below(self, state: TreeState) -> dict[int, tuple[int, ...]]:
        """The classes that are decided below each node (or leaf, as `~leaf`), in the order of the leaves."""
        topology = state.tree.topology
        best = state.tree.leaf_logits.argmax(dim=1).tolist()
        below: dict[int, tuple[int, ...]] = {~leaf: (label,) for leaf, label in enumerate(best)}
        for node in reversed(range(topology.n_nodes)):  # children before parents
            both = (*below[int(topology.left[node])], *below[int(topology.right[node])])
            below[node] = tuple(dict.fromkeys(both))
        return below

    def _decided(self, image: Image.Image, name: str, label: int | None) -> schemas.DecisionShape:
        snapshot = self.session.snapshot
        state = snapshot.state
        explained = explain_image(
            state.tree,
            image,
            self._crops(state),
            name=name,
            label=label,
            notes=state.notes,
            spreads=dict(enumerate(self._spreads(state))),
            network=self._network(state.tree.features),
        )
        result = result_of(explained, secrets.token_urlsafe(9), snapshot.history.revision, "/edit/{}".format)
        self.results.add(result)
        return result.decision


def _expect_node(state: TreeState, node: int) -> None:
    try:
        state.expect(node)
    except EditError as error:
        raise NotFoundError(str(error)) from error


def _figures(figures: Figures) -> schemas.FiguresShape:
    return schemas.FiguresShape(
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

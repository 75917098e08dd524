"""Between the API and the tree: answers in the API's shapes. Blocking, and called from threads.

Requests name photos by their number in a list and nodes by their number in the tree as it is at a revision, so no text
from a request is ever part of a path.
"""

import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from PIL import Image

from prototree.data.images import read_photo
from prototree.errors import MendError
from prototree.explain.decisions import explain_image
from prototree.explain.prototype_pictures import PrototypePictures
from prototree.explain.records import TreeExplanation
from prototree.files import read_json
from prototree.mend.edits import Ban, Edit, Note, Remove, Replace, Side
from prototree.mend.figures import Figures
from prototree.mend.relearning import learns_on
from prototree.mend.session import MENDING, Moment, Session
from prototree.mend.states import TreeState
from prototree.network.engine import frozen_features
from prototree.web import shapes
from prototree.web.edit_words import sentence
from prototree.web.gallery import PICTURE_SIDE, Gallery
from prototree.web.learning import Learner
from prototree.web.results import NotFoundError, Results, result_of
from prototree.web.tree_view import TreeView

MAX_CHANGED = 200  # photos listed as answered differently


class Service:
    """Everything the app can be asked."""

    mends = True

    def __init__(
        self, session: Session, results: Results | None = None, learned: shapes.LearningShape | None = None
    ) -> None:
        self.session, self.results, self.learner = session, results or Results(), Learner(session, learned)
        bench, data = session.bench, session.data
        self.title, self.classes = session.run.folder.resolve().name, data.class_names
        self.gallery = Gallery(bench, data)
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

    def run(self) -> shapes.RunShape:
        session = self.session
        return shapes.RunShape(
            title=self.title,
            classes=list(self.classes),
            prototypes=session.state.tree.topology.n_nodes,
            training_photos=self.gallery.count("training"),
            feedback_photos=self.gallery.count("feedback"),
            feedback=session.feedback_name,
            held_back=session.n_held_back,
            question=session.state.tree.question.kind,
            learns_on=learns_on(session.run),
        )

    # ---- the tree

    def tree(self) -> tuple[TreeExplanation, dict[str, Any]]:
        """The tree as it is, for the page of the report."""
        return self._explained(self.session.state)

    def nodes(self) -> list[shapes.NodeShape]:
        state = self.session.state
        return [self._node(state, node) for node in range(state.tree.topology.n_nodes)]

    def node(self, node: int) -> shapes.NodeShape:
        state = self.session.state
        _expect_node(state, node)
        return self._node(state, node)

    def candidates(self, node: int, count: int, side: Side = "right") -> shapes.CandidatesShape:
        moment = self.session.moment
        _expect_node(moment.state, node)
        found = self.session.bench.candidates(moment.state, node, count, side)
        state, prototype = moment.state, moment.state.prototype(node, side)
        patches = [self.gallery.patch(state, prototype, one.cell, one.similarity) for one in found]
        return shapes.CandidatesShape(node=node, side=side, revision=moment.history.revision, candidates=patches)

    # ---- trying images

    def samples(self) -> list[shapes.PhotoShape]:
        """Photos to try, one of each class."""
        every = range(len(self.classes))
        return [photo for label in every for photo in self.gallery.photos("feedback", label, 0, 1)]

    def decide(self, content: bytes, name: str) -> shapes.DecisionShape:
        """What the tree says of an image that somebody sent."""
        return self._decided(read_photo(content, at_least=PICTURE_SIDE).image, name, None)

    def decide_sample(self, split: str, index: int) -> shapes.DecisionShape:
        """What the tree says of a photo that is here."""
        sample = self.gallery.sample(split, index)
        return self._decided(self.gallery.open(split, index).image, self.session.bench.name(sample), sample.label)

    def mistakes(self) -> shapes.MistakesShape:
        found = self.session.mistakes()
        return shapes.MistakesShape(
            strategy=found["strategy"],
            photos=self.gallery.count("feedback"),
            nodes=[
                shapes.BlameShape(node=b["node"], mistakes=b["n_mistakes"], went_right=b["n_went_right"])
                for b in found["nodes"]
            ],
            images=[
                shapes.MistakeShape(
                    photo=self.gallery.photo("feedback", mistake["place"]),
                    truth=self.classes[mistake["label"]],
                    answer=self.classes[mistake["answer"]],
                    node=mistake["node"],
                    went_right=mistake["went_right"],
                    p_right=mistake["p_right"],
                )
                for mistake in found["images"]
            ],
        )

    # ---- mending

    def mending(self, moment: Moment | None = None) -> shapes.MendingShape:
        moment = moment or self.session.moment
        bench = self.session.bench
        comparison = bench.compare(moment.previous, moment.state)
        done, undone = moment.history.done, moment.history.undone
        question = moment.state.tree.question.kind
        return shapes.MendingShape(
            revision=moment.history.revision,
            done=[sentence(edit, question) for edit in done],
            undone=[sentence(edit, question) for edit in reversed(undone)],
            original=_figures(bench.figures(bench.start)),
            before=_figures(comparison.before),
            now=_figures(comparison.after),
            changed=[
                shapes.ChangedShape(
                    photo=self.gallery.photo("feedback", changed.place),
                    truth=self.classes[changed.label],
                    before=self.classes[changed.before],
                    after=self.classes[changed.after],
                )
                for changed in comparison.changed[:MAX_CHANGED]
            ],
            nodes=list(range(moment.state.tree.topology.n_nodes)),
            feedback=self.session.feedback_name,
        )

    def edit(self, question: shapes.EditQuestion) -> shapes.MendingShape:
        moment = self.session.moment
        moment.history.expect(question.revision)
        if not isinstance(question.edit, shapes.BanEdit):
            _expect_node(moment.state, question.edit.node)
        return self.mending(self.session.apply(self._as_edit(question.edit), question.revision))

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

    def _as_edit(self, edit: Any) -> Edit:
        match edit:
            case shapes.ReplaceEdit():
                image = self.gallery.name(edit.photo)
                if edit.patch is not None:
                    return Replace(edit.node, image, edit.view, (edit.patch[0], edit.patch[1]), edit.side)
                if edit.region is None:
                    raise MendError("expected a region of the photo or a patch of a view, got neither")
                cell = self.session.bench.locate(image, _region(edit.region), edit.view)
                return cell.replaces(edit.node, edit.side)
            case shapes.BanEdit():
                return Ban(self.gallery.name(edit.photo), _region(edit.region) if edit.region is not None else None)
            case shapes.RemoveEdit():
                return Remove(edit.node, edit.keep)
            case _:
                return Note(edit.node, edit.text.strip())

    def _node(self, state: TreeState, node: int) -> shapes.NodeShape:
        topology, question = state.tree.topology, state.tree.question.kind
        source, distance = self._prototype(state, state.prototype(node))
        other, other_distance = None, None
        if question == "choice":
            other, other_distance = self._prototype(state, state.prototype(node, "left"))
        below, left, right = self._below(state), int(topology.left[node]), int(topology.right[node])
        return shapes.NodeShape(
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

    def _prototype(self, state: TreeState, prototype: int) -> tuple[shapes.PatchShape | None, float]:
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

    def _decided(self, image: Image.Image, name: str, label: int | None) -> shapes.DecisionShape:
        moment = self.session.moment
        state = moment.state
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
        result = result_of(explained, secrets.token_urlsafe(9), moment.history.revision, "/mend/{}".format)
        self.results.add(result)
        return result.decision


def _expect_node(state: TreeState, node: int) -> None:
    try:
        state.expect(node)
    except MendError as error:
        raise NotFoundError(str(error)) from error


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

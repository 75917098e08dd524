"""What the app can be asked about a run: decisions, nodes, errors, edits. Blocking; called from worker threads.

Requests name images by their index in a split and nodes by their number in the tree at a revision, so no text of a
request is ever part of a path. Methods take the index of a node; responses have its number.
"""

import secrets
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import compress
from threading import Lock
from typing import Any, Literal

from PIL import Image

from prototree.app import schemas
from prototree.app.gallery import PICTURE_SIDE, Gallery, NotFoundError, encode
from prototree.app.jobs import FinetuneJob
from prototree.app.tree_view import TreeView
from prototree.backbones.inference import frozen_features
from prototree.core.model import ProtoTree
from prototree.core.nodes import NodeKind
from prototree.data.images import load_image
from prototree.editing.edits import Edit, Exclude, Note, Region, Remove, Replace, Side
from prototree.editing.finetune import can_finetune
from prototree.editing.session import EDITS, EditSession, Snapshot, edit
from prototree.editing.state import TreeState, leaves_below
from prototree.errors import EditError
from prototree.explanation.assets import PrototypePictures, pictures_of, spreads_of
from prototree.explanation.decision import explain_image
from prototree.explanation.records import DecisionHistogram, Picture, TreeExplanation
from prototree.explanation.tree import explain_tree
from prototree.io import read_json
from prototree.reporting.decision_page import decision_body, decision_json
from prototree.reporting.images import data_url
from prototree.reporting.tree_page import tree_data
from prototree.run import Run

MAX_CHANGED = 200  # images listed whose prediction has changed
MAX_RESULTS, MAX_RESULT_BYTES = 500, 128 << 20


@dataclass(frozen=True)
class Result:
    """A decision for the API and as the report's page, with the pictures that the page shows."""

    decision: schemas.DecisionResponse
    body: str
    pictures: dict[str, bytes]
    size: int  # bytes


class Service:
    """Answers about one run; with a session about its images and edits too."""

    def __init__(self, model: EditSession | Run, finetuned: schemas.FinetuneResponse | None = None) -> None:
        self._session = model if isinstance(model, EditSession) else None
        self._run = model.run if isinstance(model, EditSession) else model
        self._finetuned, self._lock = finetuned, Lock()
        self._results: OrderedDict[str, Result] = OrderedDict()
        self._tree = model.workbench.tree if isinstance(model, EditSession) else model.tree()
        self.title, self.classes = self._run.folder.resolve().name, self._tree.class_names
        self._network = lru_cache(maxsize=1)(frozen_features)
        self._pictures = lru_cache(maxsize=1)(self._open_pictures)

    @property
    def can_edit(self) -> bool:
        """Whether the run's images are here."""
        return self._session is not None

    @property
    def session(self) -> EditSession:
        assert self._session is not None, "without images there is nothing to edit"
        return self._session

    @property
    def revision(self) -> int:
        return self._session.revision if self._session else 0

    @cached_property
    def gallery(self) -> Gallery:
        return Gallery(self.session)

    @cached_property
    def view(self) -> TreeView:
        return TreeView(self.title, self.session, self.gallery)

    @cached_property
    def finetuning(self) -> FinetuneJob:
        return FinetuneJob(self.session, self._finetuned)

    def open_finetuned(self) -> "Service":
        """Open the run that fine-tuning has made; pages of this one notice by the revision."""
        status = self.finetuning.status()
        if status.state == "opened":  # by another page
            return self
        if status.state != "done":
            raise EditError("there is no new run to open yet; wait until the network is trained")
        session = edit(self.finetuning.out, data=self.session.source)
        session.start_at(self.revision + 1)
        service = Service(session, status.model_copy(update={"state": "opened"}))
        service._results = OrderedDict(self._results)
        return service

    def close(self) -> None:
        """End what runs in the background, and let others edit the run."""
        if self._session is not None:
            self.finetuning.close()
            self._session.close()

    def run(self) -> schemas.RunResponse:
        tree = self._session.state.tree if self._session else self._tree
        kind, n_nodes = tree.node_function.kind, tree.topology.n_nodes
        run = schemas.RunResponse(title=self.title, classes=list(self.classes), node_kind=kind, n_nodes=n_nodes)
        if self._session is not None:
            run.n_training, run.n_validation = self.gallery.count("training"), self.gallery.count("validation")
            run.n_test, run.validation = self._session.n_test, self._session.validation_name
            run.can_finetune = can_finetune(self._run)
        return run

    # ---- the tree

    def tree(self) -> tuple[TreeExplanation, dict[str, Any]]:
        """Explain the current tree, for the report's page."""
        return self.view.explain(self._session.state) if self._session else self._explained

    @cached_property
    def _explained(self) -> tuple[TreeExplanation, dict[str, Any]]:
        explanation = explain_tree(self._run)
        return explanation, tree_data(explanation, data_url)

    def nodes(self) -> list[schemas.NodeResponse]:
        state = self.session.state
        return [self._node(state, node) for node in range(state.tree.topology.n_nodes)]

    def node(self, node: int) -> schemas.NodeResponse:
        return self._node(self.session.state, node)

    def _node(self, state: TreeState, node: int) -> schemas.NodeResponse:
        state.check_node(node)
        topology, is_pairwise = state.tree.topology, state.tree.node_function.kind == "pairwise"
        classes = [self.classes[label] for label in state.tree.leaf_logits.argmax(dim=1).tolist()]
        left, right = (
            list(dict.fromkeys(compress(classes, leaves_below(topology, int(child)))))
            for child in (topology.left[node], topology.right[node])
        )
        return schemas.NodeResponse(
            node=node + 1,
            kind=state.tree.node_function.kind,
            note=state.notes.get(node, ""),
            classes_left=left,
            classes_right=right,
            right=self._prototype(state, node),
            left=self._prototype(state, state.prototype_row(node, "left")) if is_pairwise else None,
        )

    def _prototype(self, state: TreeState, row: int) -> schemas.PatchResponse | None:
        source, cell = state.tree.sources[row], self.gallery.source_cell(state, row)
        if source is None or cell is None:
            return None
        return self.gallery.patch(state, row, cell, 1.0).model_copy(update={"projection_distance": source.distance})

    def candidates(self, node: int, count: int, side: Side = "right") -> list[schemas.PatchResponse]:
        """List the training patches nearest to a prototype that may replace it."""
        state = self.session.state
        row, candidates = state.prototype_row(node, side), self.session.workbench.candidates(state, node, count, side)
        return [self.gallery.patch(state, row, candidate.cell, candidate.similarity) for candidate in candidates]

    # ---- decisions

    def samples(self) -> list[schemas.ImageResponse]:
        """List images to try, one of each class; none if they are not here."""
        labels = range(len(self.classes)) if self._session else ()
        return [image for label in labels for image in self.gallery.images("validation", label, 0, 1)]

    def decide(self, content: bytes, name: str) -> schemas.DecisionResponse:
        return self._decide(load_image(content, at_least=PICTURE_SIDE).image, name)

    def decide_sample(self, split: schemas.Split, index: int) -> schemas.DecisionResponse:
        sample, image = self.gallery.sample(split, index), self.gallery.open(split, index).image
        return self._decide(image, self.session.workbench.name(sample), sample.label)

    def _decide(self, image: Image.Image, name: str, label: int | None = None) -> schemas.DecisionResponse:
        tree, revision, (notes, histograms) = self._tree, self.revision, self._stored
        if self._session is not None:
            snapshot = self._session.snapshot
            tree, notes, revision = snapshot.state.tree, dict(snapshot.state.notes), snapshot.history.revision
            histograms = dict(enumerate(self.view.histograms(snapshot.state)))
        explained = explain_image(
            tree,
            image,
            self._pictures(tree),
            name=name,
            label=label,
            notes=notes,
            histograms=histograms,
            network=self._network(tree.features),
        )
        key, pictures = secrets.token_urlsafe(9), dict[str, bytes]()

        def picture_url(name: str, picture: Picture) -> str:
            if name not in pictures:
                pictures[name] = encode(picture)
            return f"/results/{key}/{name}"

        body = decision_body(explained, picture_url, (lambda node: f"/edit/{node + 1}") if self.can_edit else None)
        urls = {name: f"/results/{key}/{name}" for name in pictures}
        content = decision_json(explained) | {"id": key, "link": f"/try/{key}", "revision": revision, "pictures": urls}
        size = len(body) + sum(map(len, pictures.values()))
        return self._keep(Result(schemas.DecisionResponse(**content), body, pictures, size))

    @cached_property
    def _stored(self) -> tuple[dict[int, str], dict[int, DecisionHistogram]]:
        """Notes and histograms of a run without a session."""
        return ({}, {}) if self._session else (self._run.notes, spreads_of(self._run, self._tree))

    def _open_pictures(self, tree: ProtoTree) -> PrototypePictures:
        return PrototypePictures(tree, self._session.data) if self._session else pictures_of(self._run, tree)

    def _keep(self, result: Result) -> schemas.DecisionResponse:
        """Keep the last results, up to a number and an amount of bytes."""
        with self._lock:
            self._results[result.decision.id] = result
            while len(self._results) > MAX_RESULTS or sum(r.size for r in self._results.values()) > MAX_RESULT_BYTES:
                self._results.popitem(last=False)
        return result.decision

    def result(self, key: str) -> Result:
        with self._lock:
            if key not in self._results:
                raise NotFoundError("this result is no longer kept; try the image again")
            return self._results[key]

    def result_picture(self, key: str, name: str) -> bytes:
        pictures = self.result(key).pictures
        if name not in pictures:
            raise NotFoundError("there is no such picture")
        return pictures[name]

    def errors(self) -> schemas.ErrorsResponse:
        collector = self.session.errors()
        return schemas.ErrorsResponse(
            n_images=self.gallery.count("validation"),
            nodes=[replace(node, node=node.node + 1) for node in collector.by_node()],
            images=[
                schemas.PredictionErrorResponse(
                    image=self.gallery.image("validation", error.index),
                    label=self.classes[error.label],
                    prediction=self.classes[error.prediction],
                    node=error.node + 1 if error.node is not None else None,
                    goes_right=error.goes_right,
                    p_right=error.p_right,
                )
                for error in collector.errors
            ],
        )

    # ---- edits

    def edits(self, snapshot: Snapshot | None = None) -> schemas.EditsResponse:
        snapshot, workbench = snapshot or self.session.snapshot, self.session.workbench
        history, state, previous = snapshot.history, snapshot.state, snapshot.previous
        kind, labels = state.tree.node_function.kind, self.session.validation.labels.tolist()
        before, after = (each.prediction.labels("greedy").tolist() for each in (previous, state))
        changed = [index for index in range(len(labels)) if before[index] != after[index]]
        return schemas.EditsResponse(
            revision=history.revision,
            n_nodes=state.tree.topology.n_nodes,
            done=[describe_edit(edit, kind) for edit in history.done],
            undone=[describe_edit(edit, kind) for edit in reversed(history.undone)],
            initial=workbench.metrics(workbench.start),
            previous=workbench.metrics(previous),
            current=workbench.metrics(state),
            changed=[
                schemas.ChangedResponse(
                    image=self.gallery.image("validation", index),
                    label=self.classes[labels[index]],
                    previous=self.classes[before[index]],
                    current=self.classes[after[index]],
                )
                for index in changed[:MAX_CHANGED]
            ],
            validation=self.session.validation_name,
        )

    def apply(self, request: schemas.EditRequest) -> schemas.EditsResponse:
        return self.edits(self.session.apply(self._parse(request.edit), request.revision))

    def _parse(self, edit: Any) -> Edit:
        match edit:
            case schemas.NoteRequest():
                return Note(edit.node - 1, edit.text.strip())
            case schemas.RemoveRequest():
                return Remove(edit.node - 1, edit.keep)
        image = self.session.workbench.name(self.gallery.sample("training", edit.image))
        region = None if edit.region is None else _sorted(edit.region)
        if isinstance(edit, schemas.ExcludeRequest):
            return Exclude(image, region)
        if edit.patch is not None:
            return Replace(edit.node - 1, image, edit.view, (edit.patch[0], edit.patch[1]), edit.side)
        if region is None:
            raise EditError("expected a region of the image or a patch of a view, got neither")
        return self.session.workbench.locate(image, region, edit.view).as_replacement(edit.node - 1, edit.side)

    def undo_or_redo(self, step: Literal["undo", "redo"], revision: int) -> schemas.EditsResponse:
        return self.edits(self.session.undo(revision) if step == "undo" else self.session.redo(revision))

    def save(self, revision: int) -> dict[str, Any]:
        run = self.session.save(revision=revision)
        return {"run": run.folder.name, **read_json(run.folder / EDITS)["evaluation"]}


def describe_edit(edit: Edit, kind: NodeKind) -> str:
    """Describe an edit in a sentence, with the number that the node had at the time."""
    match edit:
        case Replace():
            side = edit.side[0].upper() if kind == "pairwise" else ""
            return f"Prototype {edit.node + 1}{side} is now a patch of {edit.image}"
        case Exclude():
            return f"Excluded {'a region of ' if edit.region is not None else ''}{edit.image} as a source"
        case Remove():
            side = edit.keep if kind == "pairwise" else {"left": "“absent”", "right": "“present”"}[edit.keep]
            return f"Removed question {edit.node + 1}, keeping its {side} side"
        case Note():
            number = f"question {edit.node + 1}"
            return f"{number.capitalize()} is called “{edit.text}”" if edit.text else f"Removed the note of {number}"


def _sorted(edges: list[float]) -> Region:
    (left, right), (top, bottom) = sorted((edges[0], edges[2])), sorted((edges[1], edges[3]))
    return left, top, right, bottom

"""What the app can be asked about a run: decisions, nodes, errors, edits. Blocking; called from worker threads.

`api` serves these methods as they are: parameters are those of a request, and docstrings describe them on the API's
page. Requests name images by their index in a split and nodes by their number in the tree at a revision, so no text of
a request is ever part of a path.
"""

import secrets
import shlex
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import compress
from threading import Lock
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from markupsafe import Markup
from PIL import Image
from pydantic import Field
from torch import Tensor

from prototree.app import schemas
from prototree.app.jobs import FinetuneJob
from prototree.app.schemas import Key, NodeNumber, Split, WebP
from prototree.app.views import PICTURE_SIDE, Gallery, NotFoundError, TreeView, encode
from prototree.backbones.inference import frozen_features
from prototree.core.model import ProtoTree
from prototree.core.nodes import NodeKind
from prototree.data.images import load_image
from prototree.editing.edits import Edit, Exclude, Note, Remove, Replace, Side
from prototree.editing.finetune import can_finetune
from prototree.editing.session import EDITS, GIVEN_IMAGES, EditSession, Snapshot, edit
from prototree.editing.workbench import TreeState, leaves_below
from prototree.errors import EditError
from prototree.evaluation.schema import ImageError
from prototree.explanation.assets import PrototypePictures, pictures_of, stored_histograms
from prototree.explanation.comparison import lost_classes
from prototree.explanation.decision import explain_image
from prototree.explanation.records import TEST_IMAGES, DecisionHistogram, Picture, TreeExplanation
from prototree.explanation.tree import explain_tree
from prototree.features.cache import StoredMaps
from prototree.io import read_json
from prototree.reporting.decision_page import decision_body, decision_json
from prototree.reporting.images import data_url
from prototree.reporting.text import isolated, more_like, patch_name, quoted_note
from prototree.reporting.tree_page import tree_data
from prototree.run import ASSETS, Run

MAX_CHANGED = 200  # images listed whose prediction has changed
MAX_RESULTS, MAX_RESULT_BYTES = 500, 128 << 20


@dataclass(frozen=True)
class Result:
    """A decision for the API and as the report's page, with the pictures that the page shows."""

    decision: dict[str, Any]
    body: Markup
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

    def run(self) -> dict[str, Any]:
        """The run that is open, and how many images there are; `n_test` are held out until the tree is saved."""
        session, tree = self._session, self._session.state.tree if self._session else self._tree
        return {
            "title": self.title,
            "classes": list(self.classes),
            "node_kind": tree.node_function.kind,
            "n_nodes": tree.topology.n_nodes,
            "n_training": len(self.gallery.samples["training"]) if session else 0,
            "n_validation": len(self.gallery.samples["validation"]) if session else 0,
            "n_test": session.n_test if session else 0,
            "validation": session.validation_name if session else "none",
            "can_finetune": session is not None and can_finetune(self._run),
        }

    # ---- the tree

    def tree(self) -> tuple[TreeExplanation, dict[str, Any]]:
        """Explain the current tree, for the report's page."""
        return self.view.explain(self._session.state) if self._session else self._explained

    @cached_property
    def _explained(self) -> tuple[TreeExplanation, dict[str, Any]]:
        explanation = explain_tree(self._run)
        return explanation, tree_data(explanation, data_url)

    def nodes(self) -> list[schemas.NodeResponse]:
        """All nodes of the current tree, with their prototypes."""
        state = self.session.state
        return [self._node(state, node) for node in range(state.tree.topology.n_nodes)]

    def node(self, node: NodeNumber) -> schemas.NodeResponse:
        """One node with its prototypes."""
        return self._node(self.session.state, node - 1)

    def _node(self, state: TreeState, node: int) -> schemas.NodeResponse:
        state.check_node(node)
        topology, kind = state.tree.topology, state.tree.node_function.kind
        classes = [self.classes[label] for label in state.tree.leaf_logits.argmax(dim=1).tolist()]
        left, right = (
            list(dict.fromkeys(compress(classes, leaves_below(topology, int(child)))))
            for child in (topology.left[node], topology.right[node])
        )
        names = self._names(state, node)
        own_words = " or ".join(isolated(each.note) or each.patch for each in names)
        return schemas.NodeResponse(
            node=node + 1,
            kind=kind,
            note=own_words if any(each.note for each in names) else "",
            names=names,
            classes_left=left,
            classes_right=right,
            right=self._prototype(state, node),
            left=self._prototype(state, state.prototype_row(node, "left")) if kind == "pairwise" else None,
        )

    def _names(self, state: TreeState, node: int) -> list[schemas.NameResponse]:
        shown = self.view.explain(state)[1]["nodes"][node]
        sides: list[tuple[Side, dict[str, Any]]] = [("left", shown["other"])] if shown["other"] else []
        keys = ("patch", "note", "suggestion", "suggested_from")
        return [
            schemas.NameResponse(side=side, **{key: data[key] for key in keys})
            for side, data in [*sides, ("right", shown)]
        ]

    def _prototype(self, state: TreeState, row: int) -> schemas.PatchResponse | None:
        source, cell = state.tree.sources[row], self.gallery.source_cell(state, row)
        if source is None or cell is None:
            return None
        return self.gallery.patch(state, row, cell, 1.0).model_copy(update={"projection_distance": source.distance})

    def candidates(
        self, node: NodeNumber, count: Annotated[int, Field(ge=1, le=60)] = 12, side: Side = "right"
    ) -> list[schemas.PatchResponse]:
        """The training patches nearest to a prototype that may replace it, one per image."""
        state = self.session.state
        row, candidates = state.prototype_row(node - 1, side), self.session.workbench.candidates
        return [self.gallery.patch(state, row, c.cell, c.similarity) for c in candidates(state, node - 1, count, side)]

    # ---- decisions

    def samples(self) -> list[schemas.ImageResponse]:
        """List images to try, one of each class; none if they are not here."""
        labels = range(len(self.classes)) if self._session else ()
        return [image for label in labels for image in self.gallery.images("validation", label, 0, 1)]

    def decide(self, content: bytes, name: str) -> dict[str, Any]:
        """Decide about an encoded image."""
        return self._decide(load_image(content, at_least=PICTURE_SIDE).image, name)

    def decide_sample(self, request: schemas.SampleRequest) -> dict[str, Any]:
        """The tree's decision about one of the server's own images."""
        sample = self.gallery.sample(request.split, request.index)
        image = self.gallery.open(request.split, request.index).image
        return self._decide(image, self.session.workbench.name(sample), sample.label)

    def _decide(self, image: Image.Image, name: str, label: int | None = None) -> dict[str, Any]:
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

        body = decision_body(explained, picture_url, (lambda node: f"/edit/{node + 1}") if self.can_edit else None, "/")
        urls = {name: f"/results/{key}/{name}" for name in pictures}
        content = decision_json(explained) | {"id": key, "link": f"/test/{key}", "revision": revision, "pictures": urls}
        result = Result(content, body, pictures, len(body) + sum(map(len, pictures.values())))
        with self._lock:  # the last results are kept, up to a number and an amount of bytes
            self._results[key] = result
            while len(self._results) > MAX_RESULTS or sum(r.size for r in self._results.values()) > MAX_RESULT_BYTES:
                self._results.popitem(last=False)
        return result.decision

    @cached_property
    def _stored(self) -> tuple[dict[int, str], dict[int, DecisionHistogram]]:
        """Notes and histograms of a run without a session."""
        return ({}, {}) if self._session else (self._run.notes, stored_histograms(self._run, self._tree))

    def _open_pictures(self, tree: ProtoTree) -> PrototypePictures:
        if self._session is None:
            return pictures_of(self._run, tree)
        return PrototypePictures(tree, self._session.data, self._run.folder / ASSETS)

    def result(self, key: str) -> Result:
        with self._lock:
            if key not in self._results:
                raise NotFoundError("this result is no longer kept; try the image again")
            return self._results[key]

    def decision(self, key: Key) -> dict[str, Any]:
        """An earlier decision, while the server still keeps it."""
        return self.result(key).decision

    def result_picture(self, key: Key, name: Key) -> WebP:
        """A picture of a decision."""
        pictures = self.result(key).pictures
        if name not in pictures:
            raise NotFoundError("there is no such picture")
        return WebP(pictures[name])

    def errors(self) -> dict[str, Any]:
        """Wrong predictions of the current tree, and the nodes that are responsible, those with most errors first.

        Of the tree as it was opened on all test images, as in its report; of an edited one on the validation images.
        """
        session, state = self.session, self.session.state
        split, sets = self._judging(state)
        collector, samples = session.errors(*sets), [entry.sample for maps in sets for entry in maps.entries]
        index_of = {sample: index for index, sample in enumerate(self.gallery.samples[split])}
        distances = self._test_distances if split == "test" else state.validation.distance
        images = [
            {
                "image": self.gallery.image(split, index_of[samples[error.index]]),
                "label": self.classes[error.label],
                "prediction": self.classes[error.prediction],
                "node": error.node + 1 if error.node is not None else None,  # None: no leaf stands for the true class
                "goes_right": error.goes_right,
                "p_right": error.p_right,
                "text": "" if error.node is None else self._turn_text(state, error, distances[error.index]),
            }
            for error in sorted(collector.errors, key=lambda error: index_of[samples[error.index]])
        ]
        nodes = [replace(node, node=node.node + 1) for node in collector.by_node()]
        counted = TEST_IMAGES if split == "test" else session.validation_name
        return {"n_images": len(samples), "evaluated_on": counted, "nodes": nodes, "images": images}

    def _judging(self, state: TreeState) -> tuple[Split, tuple[StoredMaps, ...]]:
        """Return the images on which errors are counted: all test images, or, of an edited tree, validation images."""
        session, sets = self.session, list[StoredMaps]()
        if self.view.is_as_opened(state):
            apart = session.data.validation_split or session.validation_name == GIVEN_IMAGES
            sets = [maps for maps in (None if apart else session.validation, session.test) if maps is not None]
        return ("test", tuple(sets)) if sets else ("validation", (session.validation,))

    @cached_property
    def _test_distances(self) -> Float[Tensor, "M n"]:
        """The distances of all test images to the prototypes of the tree as it was opened."""
        start = self.session.workbench.start
        _, sets = self._judging(start)
        return torch.cat([maps.nearest(start.tree.prototypes.detach()).distance for maps in sets])

    def _turn_text(self, state: TreeState, error: ImageError, distances: Float[Tensor, " n"]) -> str:
        """Say which way an image went where it left the path to its class."""
        assert error.node is not None
        assert error.p_right is not None
        if state.tree.node_function.kind == "presence":
            return f"{'found' if error.goes_right else 'not found'}, similarity {error.p_right:.2f}"
        rows = (state.prototype_row(error.node, "left"), error.node)
        names = [quoted_note(state.notes.get(row, "")) or patch_name(error.node, row, "pairwise") for row in rows]
        return more_like(names, [float(distances[row]) for row in rows], error.p_right > 0.5)

    # ---- edits

    def edits(self) -> dict[str, Any]:
        """The history of edits, metrics before any edit, before the last change and now, and what that has changed."""
        return self._edits(self.session.snapshot)

    def _edits(self, snapshot: Snapshot) -> dict[str, Any]:
        history, state, previous = snapshot.history, snapshot.state, snapshot.previous
        kind, workbench = state.tree.node_function.kind, self.session.workbench
        labels = self.session.validation.labels.tolist()
        before, after = (each.prediction.labels("greedy").tolist() for each in (previous, state))
        changed = [
            {
                "image": self.gallery.image("validation", index),
                "label": self.classes[label],
                "previous": self.classes[before[index]],
                "current": self.classes[after[index]],
            }
            for index, label in enumerate(labels)
            if before[index] != after[index]
        ]
        return {
            "revision": history.revision,
            "n_nodes": state.tree.topology.n_nodes,
            "done": [describe_edit(edit, kind) for edit in history.done],
            "undone": [describe_edit(edit, kind) for edit in reversed(history.undone)],
            "initial": workbench.metrics(workbench.start),
            "previous": workbench.metrics(previous),
            "current": workbench.metrics(state),
            "changed": changed[:MAX_CHANGED],
            "lost_classes": list(lost_classes(workbench.start.tree, state.tree)),
            "validation": self.session.validation_name,
        }

    def apply(self, request: schemas.EditRequest) -> dict[str, Any]:
        """Applies an edit and refits the leaves."""
        return self._edits(self.session.apply(self._parse(request.edit), request.revision))

    def _parse(self, edit: Any) -> Edit:
        match edit:
            case schemas.NoteRequest():
                return Note(edit.node - 1, edit.text.strip(), edit.side)
            case schemas.RemoveRequest():
                return Remove(edit.node - 1, edit.keep)
        workbench = self.session.workbench
        image, region = workbench.name(self.gallery.sample("training", edit.image)), None
        if edit.region is not None:
            (left, right), (top, bottom) = sorted(edit.region[::2]), sorted(edit.region[1::2])
            region = (left, top, right, bottom)
        if isinstance(edit, schemas.ExcludeRequest):
            return Exclude(image, region)
        if edit.patch is not None:
            return Replace(edit.node - 1, image, edit.view, (edit.patch[0], edit.patch[1]), edit.side)
        if region is None:
            raise EditError("expected a region of the image or a patch of a view, got neither")
        return workbench.locate(image, region, edit.view).as_replacement(edit.node - 1, edit.side)

    def undo_or_redo(self, step: Literal["undo", "redo"], request: schemas.RevisionRequest) -> dict[str, Any]:
        """Undoes the last edit, or applies the last undone edit again."""
        change = self.session.undo if step == "undo" else self.session.redo
        return self._edits(change(request.revision))

    def save(self, request: schemas.RevisionRequest) -> dict[str, Any]:
        """Writes a new run beside the one that is open; accuracies before and after on the images that it names."""
        run = self.session.save(revision=request.revision)
        names = run.folder.name, self._run.folder.resolve().name
        comparison = f"prototree report {shlex.quote(names[0])} --against {shlex.quote(names[1])}"
        return {"run": names[0], "comparison": comparison, **read_json(run.folder / EDITS)["evaluation"]}


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
            side = edit.side[0].upper() if kind == "pairwise" else ""
            patch = f"patch {edit.node + 1}{side}"
            return f"P{patch[1:]} is called “{isolated(edit.text)}”" if edit.text else f"Removed the name of {patch}"

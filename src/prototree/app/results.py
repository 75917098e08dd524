"""Decisions about images that were tried, as the API tells them, kept for a while with their pictures."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from prototree.app import schemas
from prototree.data.images import webp
from prototree.explain.records import DecisionExplanation, PathExplanation, Picture, SeenPatch, Step
from prototree.report.decision_html import decision_body
from prototree.report.text import flip_words, step_words

_TOP = 5  # classes listed


class NotFoundError(Exception):
    """No such photo, node or result."""


@dataclass(frozen=True)
class Result:
    """A decision, its page (the report's own), and the pictures that both show."""

    decision: schemas.DecisionShape
    pictures: dict[str, bytes]
    body: str = ""

    @property
    def size(self) -> int:
        return len(self.body) + sum(map(len, self.pictures.values()))


class Results:
    """The last decisions, up to a number and an amount of bytes."""

    def __init__(self, max_number: int = 500, max_bytes: int = 128 << 20) -> None:
        self._max_number, self._max_bytes = max_number, max_bytes
        self._kept: OrderedDict[str, Result] = OrderedDict()
        self._lock = Lock()

    def add(self, result: Result) -> None:
        with self._lock:
            self._kept[result.decision.id] = result
            while len(self._kept) > self._max_number or sum(r.size for r in self._kept.values()) > self._max_bytes:
                self._kept.popitem(last=False)

    def get(self, id_: str) -> Result:
        with self._lock:
            if id_ not in self._kept:
                raise NotFoundError("this result is no longer kept; try the image again")
            return self._kept[id_]


def result_of(
    explained: DecisionExplanation, id_: str, revision: int, node_url: Callable[[int], str] | None = None
) -> Result:
    """A decision for the API and as a page, with pictures as WebP; `node_url` is where a node can be edited."""
    teller = _Teller(explained, id_)
    names, order = explained.class_names, np.argsort(explained.soft)[::-1][:_TOP]
    paths = sorted(explained.paths.values(), key=lambda path: path.strategy != "greedy")
    decision = schemas.DecisionShape(
        id=id_,
        link=f"/try/{id_}",
        name=explained.image,
        revision=revision,
        width=explained.size[0],
        height=explained.size[1],
        photo=f"/results/{id_}/photo",
        truth=names[explained.label] if explained.label is not None else None,
        question=explained.question,
        answer=names[explained.answer],
        confidence=explained.confidence,
        is_known=explained.doubt is None,
        doubt=None if explained.doubt is None else explained.doubt.reason,
        soft=[teller.share(int(label), explained.soft) for label in order],
        ways=[teller.way(path) for path in paths],
    )
    return Result(decision, teller.pictures, decision_body(explained, teller.picture_url, node_url))


class _Teller:
    """Tells the parts of one decision, and gathers the pictures that they show."""

    def __init__(self, explained: DecisionExplanation, id_: str) -> None:
        self._explained, self._id = explained, id_
        self.pictures: dict[str, bytes] = {"photo": picture_file(explained.photo)}

    def picture_url(self, name: str, picture: Picture) -> str:
        """Where a picture is; one that the API does not speak of is kept as it is handed in."""
        if name not in self.pictures:
            self.pictures[name] = picture_file(picture)
        return f"/results/{self._id}/{name}"

    def share(self, label: int, probs: Sequence[float]) -> schemas.ClassShareShape:
        name = self._explained.class_names[label]
        return schemas.ClassShareShape(label=label, name=name, share=float(probs[label]))

    def way(self, path: PathExplanation) -> schemas.WayShape:
        runner_up, needed = self._explained.runner_up.get(path.strategy), []
        if runner_up is not None:
            needed = [self._explained.class_names[runner_up.label], *map(flip_words, runner_up.flips)]
        return schemas.WayShape(
            strategy=path.strategy,  # type: ignore[arg-type]
            differs=path in self._explained.shown_paths[1:],
            steps=list(map(self._step, path.steps)),
            answer=self.share(int(np.argmax(path.class_probs)), path.class_probs),
            needed=needed,
        )

    def _step(self, step: Step) -> schemas.StepShape:
        return schemas.StepShape(
            node=step.node,
            similarity=step.p_right,
            present=step.goes_right,
            words=step_words(step),
            other=self._compared(step.left) if step.left is not None else None,
            **self._compared(step.right).model_dump(exclude={"number"}),
        )

    def _compared(self, side: SeenPatch) -> schemas.ComparedShape:
        self.pictures[f"prototype-{side.prototype}"] = picture_file(side.picture)
        self.pictures[f"patch-{side.prototype}"] = picture_file(side.match.crop)
        return schemas.ComparedShape(
            number=side.prototype,
            note=side.note,
            prototype=f"/results/{self._id}/prototype-{side.prototype}",
            patch=f"/results/{self._id}/patch-{side.prototype}",
            box=list(side.match.where[0].box.edges),
            distance=side.distance,
            in_reach=side.in_reach,
        )


def picture_file(picture: Picture) -> bytes:
    """A picture as a WebP file, made quickly: somebody waits for it."""
    return webp(picture, quality=82, method=2)

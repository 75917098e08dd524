"""One decision as a page and as JSON, and many decisions as a list; of one tree, or of several that vote.

As with the tree, the page's body has no inline styles or handlers. A step stands there in short and opens at a click;
where a node asks for one patch, runs of absences are one line.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from markupsafe import Markup

from prototree.backbones.geometry import Box
from prototree.evaluation.tables import percent
from prototree.explanation import records
from prototree.reporting import asset, images, json_number, render, text
from prototree.reporting.histogram import histogram_svg, histogram_text
from prototree.reporting.images import PictureUrl, reduced

Decision = records.DecisionExplanation | records.EnsembleExplanation

_MAX_BARS = 6
_PHOTO_SIDE, _THUMB_SIDE = 480, 96
_MAX_NUMBERS = 4  # of absences in a row


def decision_page(explanation: Decision, report_url: str = "") -> str:
    """Write one self-contained HTML file, without a script; `report_url` is where the page of the tree is."""
    decisions, _, _ = _summary(explanation)
    title = decisions[0].image if explanation is decisions[0] else f"{decisions[0].image}: {len(decisions)} trees"
    return render(
        "decision.html", title=title, body=decision_body(explanation, report_url=report_url), styles=_styles()
    )


def decision_body(
    explanation: Decision,
    picture_url: PictureUrl = images.data_url,
    node_url: Callable[[int], str] | None = None,
    report_url: str = "",
) -> Markup:
    """Fill the page's body; its style sheets are `base.css` and `decision.css`.

    Whoever keeps pictures elsewhere says where (`photo`, `prototype-3` or `around-3`, `piece-3`; in a vote of trees
    `2-piece-3`); `node_url` is where a node, given by its index, can be edited, `report_url` where the tree is shown.
    """
    decisions, probs, predicted = _summary(explanation)
    first, several = decisions[0], isinstance(explanation, records.EnsembleExplanation)
    steps = [step for decision in decisions for path in decision.distinct_paths for step in path.steps]
    locations = [where for step in steps for side in step.sides for where in side.match.locations]
    methods = dict.fromkeys(where.method for where in locations)
    share, share_text = percent(max(probs)), "of the trees’ mean vote"
    if not several:
        share = text.confidence_percent(first.confidence)
        share_text = text.confidence_text(first.confidence, first.n_calibration)
    body = render(
        "decision_body.html",
        image=first.image,
        photo=picture_url("photo", reduced(first.photo, _PHOTO_SIDE)),
        size=first.size,
        winner=first.class_names[predicted],
        share=share,
        share_text=share_text,
        unknown=records.UNKNOWN,
        abstain_reason=None if several or first.abstention is None else first.abstention.reason,
        truth=None if first.label is None else first.class_names[first.label],
        right=first.label == predicted,
        bars=_bars(probs, first.class_names),
        several=several,
        methods=[(method, *text.METHODS[method]) for method in methods],
        untested=text.untested_text([where.occlusion for where in locations]),
        trees=[
            _TreePart(decision, picture_url, f"{number}-" if several else "").values()
            for number, decision in enumerate(decisions, 1)
        ],
        node_url=node_url,
        report_url="" if several else report_url,
        has_histograms=any(step.histogram for step in steps),
    )
    return Markup(body)


def _summary(explanation: Decision) -> tuple[tuple[records.DecisionExplanation, ...], tuple[float, ...], int]:
    """Return the decisions of the trees, the class probabilities, and the predicted class: greedy, or of the mean."""
    if isinstance(explanation, records.EnsembleExplanation):
        return explanation.decisions, explanation.class_probs, text.likeliest(explanation.class_probs)
    return (explanation,), explanation.class_probs, explanation.answer


def _styles() -> list[Markup]:
    return [asset("base.css"), asset("decision.css")]


def _bars(probs: Sequence[float], names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return name, width in percent and text of the most likely classes."""
    order = sorted(range(len(probs)), key=lambda k: -probs[k])[:_MAX_BARS]
    return [(names[k], f"{100 * min(probs[k], 1.0):.1f}", percent(probs[k])) for k in order if probs[k] >= 0.005]


@dataclass(frozen=True)
class _TreePart:
    """What the template shows of the paths through one tree."""

    decision: records.DecisionExplanation
    picture_url: PictureUrl
    prefix: str  # of the names of its pictures

    def values(self) -> dict[str, Any]:
        decision, names = self.decision, self.decision.class_names
        paths = decision.distinct_paths
        elsewhere = [path for path in decision.paths.values() if path.leaf != paths[0].leaf]
        return {
            "winner": names[decision.answer],
            "share": text.confidence_percent(decision.confidence) or records.UNKNOWN,
            "abstains": decision.abstention is not None,
            "is_pairwise": decision.node_kind == "pairwise",
            "paths": list(map(self._path, paths)),
            "bars": _bars(decision.class_probs, names),
            "soft": names[text.likeliest(decision.class_probs)],
            # The other path is shown where it leads to another class; where it does not, that is all there is to say.
            "other_way": bool(elsewhere) and len(paths) == 1,
        }

    def _path(self, path: records.PathExplanation) -> dict[str, Any]:
        names, n_steps = self.decision.class_names, len(path.steps)
        return {
            "strategy": path.strategy,
            "name": text.STRATEGY_NAMES[path.strategy],
            "meaning": text.strategy_text(path.strategy, self.decision.node_kind),
            "length": f"{text.number_word(n_steps)} {'question' if n_steps == 1 else 'questions'}",
            "runs": list(self._runs(path.steps)),
            "end": names[path.answer],
            "counterfactuals": text.runner_up_text(self.decision.counterfactuals.get(path.strategy), names),
        }

    def _runs(self, steps: Sequence[records.Step]) -> Iterable[dict[str, Any]]:
        """Yield the steps in order; those whose one patch is absent, as many together as follow."""
        for absent, group in groupby(steps, key=lambda step: step.left is None and not step.goes_right):
            run = list(map(self._step, group))
            if not absent:
                yield from ({"absent": False, "steps": [step]} for step in run)
                continue
            numbers = [str(step["number"]) for step in run]
            if len(numbers) > _MAX_NUMBERS:
                numbers = [*numbers[: _MAX_NUMBERS - 2], "…", numbers[-1]]
            line = "not this one" if len(run) == 1 else f"none of these {text.number_word(len(run))}"
            yield {"absent": True, "numbers": ", ".join(numbers), "text": line, "steps": run}

    def _step(self, step: records.Step) -> dict[str, Any]:
        kind, taken = self.decision.node_kind, int(step.goes_right and step.left is not None)
        distances = zip(step.sides, text.told_apart([side.distance for side in step.sides]), strict=True)
        sides = [self._side(step, side, distance) for side, distance in distances]
        return {
            "step": step,
            "number": text.node_number(step.node),
            "text": text.step_line(step),
            "strength": f"{100 * text.strength(step):.1f}",
            "far": step.left is not None and not any(side.in_radius for side in step.sides),
            "nearer": int(step.p_right > 0.5),  # which of the two sides
            "taken": sides[taken],
            "other": sides[1 - taken] if step.left is not None else None,
            "sides": sides,
            "histogram": step.histogram and histogram_svg(step.histogram, kind, at=step.at),
            "histogram_caption": histogram_text(step.histogram, kind) if step.histogram else "",
        }

    def _side(self, step: records.Step, side: records.PatchComparison, distance: str) -> dict[str, Any]:
        match, row, patch = side.match, side.prototype, text.step_patch(step, side)
        if side.context is None:  # a patch alone, which is hard to recognise
            url = self.picture_url(f"{self.prefix}prototype-{row}", reduced(side.picture, images.CROP_SIDE))
            picture: dict[str, Any] = {"url": url, "frame": None, "light": ""}
        else:
            picture = self._framed(f"context-{row}", side.context.picture, side.context.frame, side.context.light)
        locations = [
            {
                "method": where.method,
                "box": where.box.clip(match.size),
                "heat": images.heat_url(where.heat),
                "text": text.occlusion_text(where.occlusion) if where.occlusion is not None else "",
            }
            for where in match.locations
        ]
        return {
            "patch": patch,
            "note": side.note,
            "name": side.note or f"patch {patch}",
            "distance": distance,
            "in_radius": side.in_radius,
            "picture": picture,
            "piece": self._framed(
                f"piece-{row}", images.crop_around(match), images.patch_frame(match), images.spotlight_of(match)
            ),
            "size": match.size,
            "locations": locations,
        }

    def _framed(
        self,
        name: str,
        picture: records.Picture,
        edges: tuple[float, float, float, float],
        light: records.Heatmap | None,
    ) -> dict[str, Any]:
        """Return a picture, where its frame stands, from its edges as fractions, and the shade around its light."""
        picture = reduced(picture, images.CONTEXT_SIDE)
        (height, width, _), (left, top, right, bottom) = picture.shape, edges
        shade = "" if light is None else images.spotlight_url(light)
        frame = Box(left * width, top * height, right * width, bottom * height)
        return {
            "url": self.picture_url(f"{self.prefix}{name}", picture),
            "frame": frame,
            "size": (width, height),
            "light": shade,
        }


# ---- many decisions ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class IndexEntry:
    """One image in the list. Its picture is encoded, so that thousands of images need not be held in memory."""

    image: str
    href: str  # of its own page
    thumb: str
    predicted_class: str
    label: str | None
    confidence: float | None  # None: the tree abstains
    abstain_reason: str = ""


def index_entry(explanation: Decision, href: str) -> IndexEntry:
    """Make a line of the list; of several trees, from their mean."""
    (first, *_), probs, predicted = _summary(explanation)
    names = first.class_names
    return IndexEntry(
        image=first.image,
        href=href,
        thumb=images.data_url("thumb", reduced(first.photo, _THUMB_SIDE)),
        predicted_class=names[predicted],
        label=None if first.label is None else names[first.label],
        confidence=first.confidence if explanation is first else max(probs),
        abstain_reason=first.abstention.reason if explanation is first and first.abstention is not None else "",
    )


def index_page(entries: Sequence[IndexEntry]) -> str:
    """Write the list of decisions as one HTML file: those without an answer and the least sure first."""
    ordered = sorted(entries, key=lambda entry: (entry.confidence is not None, entry.confidence or 0.0, entry.image))
    answered = [entry for entry in entries if entry.confidence is not None]
    labelled = [entry for entry in answered if entry.label is not None]
    summary = f"{len(answered)} of {len(entries)} answered"
    if labelled:
        n_right = sum(entry.label == entry.predicted_class for entry in labelled)
        summary += f", {n_right} of {len(labelled)} answers right"
    title = text.count(len(entries), "image")
    shares = [text.confidence_percent(entry.confidence) for entry in ordered]
    shown = [(e, share, f"{100 * (e.confidence or 0.0):.1f}") for e, share in zip(ordered, shares, strict=True)]
    return render(
        "decision_index.html", title=title, summary=summary, styles=_styles(), entries=shown, unknown=records.UNKNOWN
    )


# ---- JSON -------------------------------------------------------------------------------------------------------
def decision_json(explanation: Decision) -> dict[str, Any]:
    """Return all numbers of a decision, without pictures; of several trees, their mean and each of them.

    Keys are the ones of the data formats, whatever the records call their fields. Nodes are counted from 1.
    """
    (first, *_), probs, predicted = _summary(explanation)
    names, abstention = first.class_names, first.abstention if explanation is first else None
    prediction = {
        "prediction": names[predicted] if abstention is None else None,
        "predicted_class": names[predicted],
        "class_probs": _rounded(probs),
    }
    if isinstance(explanation, records.EnsembleExplanation):
        return {**prediction, "trees": [decision_json(decision) for decision in explanation.decisions]}
    return {
        "image": explanation.image,
        "size": list(explanation.size),
        "label": None if explanation.label is None else names[explanation.label],
        "node_kind": explanation.node_kind,
        "classes": list(names),
        **prediction,
        "confidence": _rounded(explanation.confidence),
        "abstained": abstention is not None,
        "abstain_reason": None if abstention is None else abstention.reason,
        "paths": {strategy: _path_json(path, names) for strategy, path in explanation.paths.items()},
        "counterfactuals": {
            strategy: result and {"class": names[result.label], "changes": list(map(_change_json, result.flips))}
            for strategy, result in explanation.counterfactuals.items()
        },
    }


def _rounded(value: Any) -> Any:
    """Round the numbers in a value, and make lists of tuples, as JSON has them."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_rounded, value))
    return json_number(value) if isinstance(value, float) else value


def _path_json(path: records.PathExplanation, names: Sequence[str]) -> dict[str, Any]:
    steps = [
        {
            "node": text.node_number(step.node),
            "note": step.note,
            "goes_right": step.goes_right,
            "p_right": step.p_right,
            "text": text.step_text(step),
            "left": None if step.left is None else _side_json(step, step.left),
            "right": _side_json(step, step.right),
        }
        for step in path.steps
    ]
    content = {"leaf": path.leaf, "predicted_class": names[path.answer], "class_probs": path.class_probs}
    return _rounded({**content, "steps": steps})  # type: ignore[no-any-return]


def _side_json(step: records.Step, side: records.PatchComparison) -> dict[str, Any]:
    return {
        "patch": text.step_patch(step, side),
        "note": side.note,
        "prototype_row": side.prototype,
        "distance": side.distance,
        "similarity": step.p_right if step.left is None else side.match.similarity,
        "in_radius": side.in_radius,
        "locations": [
            {
                "method": where.method,
                "box": where.box.edges,
                "occlusion_test": where.occlusion and asdict(where.occlusion),
            }
            for where in side.match.locations
        ],
    }


def _change_json(flip: records.Flip) -> dict[str, Any]:
    change = {"node": text.node_number(flip.node), "p_right": flip.p_right, "needed": flip.needed}
    if flip.nearer is not None:
        rows = {"nearer": flip.nearer.prototype, "farther": flip.nearer.than}
        patches = {key: text.patch_name(flip.node, row, "pairwise") for key, row in rows.items()}
        return _rounded({**change, **patches, "by": flip.nearer.by})  # type: ignore[no-any-return]
    return _rounded(change)  # type: ignore[no-any-return]

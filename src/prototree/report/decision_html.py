"""One decision as a page: the way of a photo through one tree, or through several that vote.

As with the tree, the page's body has no inline styles or handlers. A step stands there in short and opens at a click;
where a node asks for one patch, runs of absences are one line.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from markupsafe import Markup

from prototree.backbones.geometry import Box
from prototree.evaluation.tables import percent
from prototree.explain.records import (
    UNKNOWN,
    DecisionExplanation,
    Location,
    Match,
    PathExplanation,
    Picture,
    SeenPatch,
    Step,
    VoteExplanation,
)
from prototree.report.decision_words import (
    asked_words,
    compact_words,
    confidence_words,
    none_of_words,
    untested_words,
)
from prototree.report.histogram import spread_svg, spread_words
from prototree.report.images import AROUND_SIDE, CROP_SIDE, around_of, data_url, frame_in, heat_url, reduced
from prototree.report.templating import asset, render
from prototree.report.text import (
    METHOD_LONG,
    METHOD_SHORT,
    STRATEGY_NAMES,
    compared_distances,
    hiding_words,
    likeliest,
    runner_up_words,
    strategy_words,
)

Decided = DecisionExplanation | VoteExplanation
PictureUrl = Callable[[str, Picture], str]

_MOST_BARS = 6
_SUBJECT_SIDE = 480
SUREST = 0.9999  # nothing is known beyond doubt, whatever rounding says


def decision_page(explanation: Decided) -> str:
    """One self-contained HTML file, without a script."""
    styles = [Markup(asset("base.css")), Markup(asset("decision.css"))]
    return render("decision.html", title=_title(explanation), body=Markup(decision_body(explanation)), styles=styles)


def decision_body(
    explanation: Decided, picture_url: PictureUrl = data_url, node_url: Callable[[int], str] | None = None
) -> str:
    """What stands in the page's body; its style sheets are `base.css` and `decision.css`.

    Whoever keeps pictures elsewhere says where (`photo`, `prototype-3` or `around-3`, `piece-3`; in a vote of trees
    `2-piece-3`); `node_url` is where a node can be edited.
    """
    several = isinstance(explanation, VoteExplanation)
    decisions = explanation.decisions if isinstance(explanation, VoteExplanation) else (explanation,)
    probs = explanation.class_probs if isinstance(explanation, VoteExplanation) else explanation.soft
    first = decisions[0]
    winner = likeliest(probs) if several else first.answer
    places = list(_places(decisions))
    methods = tuple(dict.fromkeys(where.method for where in places))
    drawers = [_Drawer(one, picture_url, f"{number}-" if several else "") for number, one in enumerate(decisions, 1)]
    return render(
        "decision_body.html",
        image=first.image,
        photo=picture_url("photo", reduced(first.photo, _SUBJECT_SIDE)),
        size=first.size,
        winner=first.class_names[winner],
        share=percent(max(probs)) if several else sure_share(first),
        share_words="of the trees’ mean vote" if several else confidence_words(first.confidence, first.n_calibration),
        unknown=UNKNOWN,
        doubt=None if several or first.doubt is None else first.doubt.reason,
        truth=None if first.label is None else first.class_names[first.label],
        right=first.label == winner,
        bars=_bars(probs, first.class_names),
        several=several,
        methods=[(method, METHOD_SHORT[method], METHOD_LONG[method]) for method in methods],
        untested=untested_words([where.hiding for where in places]),
        trees=[drawer.tree() for drawer in drawers],
        node_url=node_url,
    )


def sure_share(decision: DecisionExplanation) -> str:
    """How sure an answer is, in percent; empty where there is none."""
    return "" if decision.confidence is None else percent(min(decision.confidence, SUREST))


def _title(explanation: Decided) -> str:
    if isinstance(explanation, VoteExplanation):
        return f"{explanation.decisions[0].image}: the vote of {len(explanation.decisions)} trees"
    return explanation.image


def _places(decisions: Sequence[DecisionExplanation]) -> Iterable[Location]:
    """Every box on the page."""
    steps = (step for one in decisions for path in one.shown_paths for step in path.steps)
    return (where for step in steps for side in step.sides for where in side.match.where)


def _bars(probs: Sequence[float], names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Name, width in percent and words of the likeliest classes."""
    order = sorted(range(len(probs)), key=lambda k: -probs[k])[:_MOST_BARS]
    return [(names[k], f"{100 * min(probs[k], 1.0):.1f}", percent(probs[k])) for k in order if probs[k] >= 0.005]


@dataclass(frozen=True)
class _Drawer:
    """Draws the ways through one tree."""

    decision: DecisionExplanation
    picture_url: PictureUrl
    prefix: str

    def tree(self) -> dict[str, Any]:
        decision, names = self.decision, self.decision.class_names
        paths = decision.shown_paths
        other = [path for path in decision.paths.values() if path.leaf != paths[0].leaf]
        return {
            "winner": names[decision.answer],
            "share": sure_share(decision) or UNKNOWN,
            "is_choice": decision.question == "pairwise",
            "paths": list(map(self._path, paths)),
            "bars": _bars(decision.soft, names),
            "soft": names[likeliest(decision.soft)],
            # The other way is told where it leads to another class; where it does not, that is all there is to say.
            "other_way": bool(other) and len(paths) == 1,
        }

    def _path(self, path: PathExplanation) -> dict[str, Any]:
        names = self.decision.class_names
        return {
            "strategy": path.strategy,
            "name": STRATEGY_NAMES[path.strategy],
            "meaning": strategy_words(path.strategy, self.decision.question),
            "asked": asked_words(len(path.steps)),
            "runs": list(self._runs(path.steps)),
            "end": names[path.answer],
            "runner_up": runner_up_words(self.decision.runner_up.get(path.strategy), names, path.steps),
        }

    def _runs(self, steps: Sequence[Step]) -> Iterable[dict[str, Any]]:
        """The steps in order; those at which one patch was asked for and not there, as many together as follow."""
        numbered = list(enumerate(steps, 1))
        for absent, group in groupby(numbered, key=lambda one: one[1].left is None and not one[1].goes_right):
            drawn = [self._step(number, step) for number, step in group]
            if absent:
                yield {"absent": True, "words": none_of_words(len(drawn)), "steps": drawn}
            else:
                yield from ({"absent": False, "steps": [one]} for one in drawn)

    def _step(self, number: int, step: Step) -> dict[str, Any]:
        sides = [self._side(side, words) for side, words in zip(step.sides, compared_distances(step), strict=True)]
        taken = int(step.goes_right) if step.left is not None else 0
        return {
            "number": number,
            "node": step.node,
            "present": step.goes_right,
            "p_right": f"{step.p_right:.2f}",
            "width": f"{100 * min(max(step.p_right, 0.0), 1.0):.1f}",
            "words": compact_words(step),
            "against": step.against_odds,
            "is_choice": step.left is not None,
            "nearer": int(step.p_right > 0.5),  # which of the two sides
            "taken": sides[taken],
            "other": sides[1 - taken] if step.left is not None else None,
            "turn": "right" if step.goes_right else "left",
            "sides": sides,
            "spread": step.spread and spread_svg(step.spread, self.decision.question, at=step.at),
            "spread_words": spread_words(step.spread, self.decision.question) if step.spread else "",
        }

    def _side(self, side: SeenPatch, distance: str) -> dict[str, Any]:
        match, number = side.match, side.prototype
        return {
            "prototype": number,
            "note": side.note,
            "name": side.note or f"prototype {number}",
            "distance": distance,
            "in_reach": side.in_reach,
            "picture": self._prototype(side),
            "piece": self._framed(f"piece-{number}", around_of(match), frame_in(match)),
            "size": match.size,
            "where": [_where(match, where) for where in match.where],
        }

    def _prototype(self, side: SeenPatch) -> dict[str, Any]:
        """With its surroundings, if they are known: a patch alone is hard to recognise."""
        if side.around is None:
            crop = reduced(side.picture, CROP_SIDE)
            return {"url": self.picture_url(f"{self.prefix}prototype-{side.prototype}", crop), "frame": None}
        return self._framed(f"around-{side.prototype}", side.around.picture, side.around.frame)

    def _framed(self, name: str, picture: Picture, edges: tuple[float, float, float, float]) -> dict[str, Any]:
        """A picture, and where in it a frame stands, from its edges as shares."""
        picture = reduced(picture, AROUND_SIDE)
        (height, width, _), (left, top, right, bottom) = picture.shape, edges
        frame = Box(left * width, top * height, right * width, bottom * height)
        return {"url": self.picture_url(f"{self.prefix}{name}", picture), "frame": frame, "size": (width, height)}


def _where(match: Match, where: Location) -> dict[str, Any]:
    words = hiding_words(where.hiding) if where.hiding is not None else ""
    return {
        "method": where.method,
        "box": where.box.clip(match.size),
        "heat": heat_url(where.heat),
        "words": words,
    }

"""One decision as a page and as JSON: the way of a photo through one tree, or through several that vote.

As with the tree, the page's body has no inline styles or handlers.
"""

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from prototree.evaluation.tables import percent
from prototree.explain.records import (
    UNKNOWN,
    DecisionExplanation,
    Flip,
    Location,
    Match,
    PathExplanation,
    SeenPatch,
    Step,
    VoteExplanation,
)
from prototree.report.encoding import CROP_SIDE, PHOTO_SIDE, data_url, heat_url, reduced
from prototree.report.templating import asset, render
from prototree.report.words import (
    METHOD_LONG,
    METHOD_SHORT,
    STRATEGY_NAMES,
    compared_distances,
    doubt_words,
    hiding_words,
    likeliest,
    runner_up_words,
    step_words,
    strategy_words,
)

Decided = DecisionExplanation | VoteExplanation

_MOST_BARS = 6


def decision_page(explanation: Decided) -> str:
    """One self-contained HTML file, without a script."""
    styles = [Markup(asset("base.css")), Markup(asset("decision.css"))]
    return render("decision.html", title=_title(explanation), body=Markup(decision_body(explanation)), styles=styles)


def decision_body(explanation: Decided) -> str:
    """What stands in the page's body; its style sheets are `base.css` and `decision.css`."""
    several = isinstance(explanation, VoteExplanation)
    decisions = explanation.decisions if isinstance(explanation, VoteExplanation) else (explanation,)
    probs = explanation.class_probs if isinstance(explanation, VoteExplanation) else explanation.soft
    first = decisions[0]
    winner, share = (likeliest(probs), max(probs)) if several else (first.answer, first.sureness)
    methods = _methods(decisions)
    return render(
        "decision_body.html",
        image=first.image,
        photo=data_url("photo", reduced(first.photo, 480)),
        winner=first.class_names[winner],
        share=percent(share),
        unknown=UNKNOWN,
        doubt=None if several or first.doubt is None else doubt_words(first.doubt),
        truth=None if first.label is None else first.class_names[first.label],
        right=first.label == winner,
        bars=_bars(probs, first.class_names),
        several=several,
        methods=[(method, METHOD_SHORT[method], METHOD_LONG[method]) for method in methods],
        trees=[_tree(decision) for decision in decisions],
    )


def decision_json(explanation: Decided) -> dict[str, Any]:
    """The same for programs, without pictures."""
    if isinstance(explanation, VoteExplanation):
        winner = likeliest(explanation.class_probs)
        return {
            "prediction": {"label": winner, "class": explanation.decisions[0].class_names[winner]},
            "class_probs": _numbers(explanation.class_probs),
            "trees": [decision_json(decision) for decision in explanation.decisions],
        }
    names = explanation.class_names
    return {
        "image": explanation.image,
        "question": explanation.question,
        "size": list(explanation.size),
        "label": explanation.label,
        "classes": list(names),
        "answer": {"label": explanation.answer, "class": names[explanation.answer]},
        "sureness": round(explanation.sureness, 6),
        "is_known": explanation.doubt is None,
        "doubt": None if explanation.doubt is None else doubt_words(explanation.doubt),
        "soft": _numbers(explanation.soft),
        "paths": {strategy: _path_json(path, names) for strategy, path in explanation.paths.items()},
        "runner_up": {
            strategy: runner_up
            and {
                "label": runner_up.label,
                "class": names[runner_up.label],
                "flips": list(map(_flip_json, runner_up.flips)),
            }
            for strategy, runner_up in explanation.runner_up.items()
        },
    }


def _title(explanation: Decided) -> str:
    if isinstance(explanation, VoteExplanation):
        return f"{explanation.decisions[0].image}: the vote of {len(explanation.decisions)} trees"
    return explanation.image


def _methods(decisions: Sequence[DecisionExplanation]) -> tuple[Any, ...]:
    steps = (step for one in decisions for path in one.paths.values() for step in path.steps)
    matches = (side.match for step in steps for side in step.sides)
    return tuple(dict.fromkeys(where.method for match in matches for where in match.where))


def _bars(probs: Sequence[float], names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Name, width in percent and words of the likeliest classes."""
    order = sorted(range(len(probs)), key=lambda k: -probs[k])[:_MOST_BARS]
    return [(names[k], f"{100 * min(probs[k], 1.0):.1f}", percent(probs[k])) for k in order if probs[k] >= 0.005]


def _tree(decision: DecisionExplanation) -> dict[str, Any]:
    names = decision.class_names
    return {
        "winner": names[decision.answer],
        "share": percent(decision.sureness),
        "bars": _bars(decision.soft, names),
        "paths": [
            {
                "strategy": path.strategy,
                "name": STRATEGY_NAMES[path.strategy],
                "meaning": strategy_words(path.strategy, decision.question),
                "steps": list(map(_step, path.steps)),
                "end": names[likeliest(path.class_probs)],
                "share": percent(max(path.class_probs)),
                "bars": _bars(path.class_probs, names),
                "runner_up": runner_up_words(decision.runner_up.get(path.strategy), names),
            }
            for path in decision.shown_paths
        ],
    }


def _step(step: Step) -> dict[str, Any]:
    sides = [_side(side, words) for side, words in zip(step.sides, compared_distances(step), strict=True)]
    return {
        "node": step.node,
        "present": step.goes_right,
        "p_right": f"{step.p_right:.2f}",
        "width": f"{100 * min(max(step.p_right, 0.0), 1.0):.1f}",
        "words": step_words(step),
        "against": step.against_odds,
        "is_choice": step.left is not None,
        "nearer": int(step.p_right > 0.5),  # which of the two sides
        "taken": int(step.goes_right),
        "sides": sides,
        "only": sides[-1],
    }


def _side(side: SeenPatch, distance: str) -> dict[str, Any]:
    match, number = side.match, side.prototype
    return {
        "prototype": number,
        "note": side.note,
        "distance": distance,
        "in_reach": side.in_reach,
        "picture": data_url(f"prototype-{number}", reduced(side.picture, CROP_SIDE)),
        "crop": data_url(f"piece-{number}", reduced(match.crop, CROP_SIDE)),
        "photo": data_url(f"photo-{number}", reduced(match.photo, PHOTO_SIDE)),
        "size": match.size,
        "where": [_where(match, where) for where in match.where],
    }


def _where(match: Match, where: Location) -> dict[str, Any]:
    box = where.box.clip(match.size)
    return {"method": where.method, "box": box, "heat": heat_url(where.heat), "words": hiding_words(where.hiding)}


def _path_json(path: PathExplanation, names: Sequence[str]) -> dict[str, Any]:
    winner = likeliest(path.class_probs)
    return {
        "leaf": path.leaf,
        "prediction": {"label": winner, "class": names[winner]},
        "class_probs": _numbers(path.class_probs),
        "steps": list(map(_step_json, path.steps)),
    }


def _step_json(step: Step) -> dict[str, Any]:
    """One patch that is there or not; or, of a choice, what was compared on either side."""
    told: dict[str, Any] = {"node": step.node, "note": step.note}
    if step.left is None:
        told |= {"present": step.goes_right, "similarity": _number(step.p_right), **_seen_json(step.right)}
    else:
        told |= {
            "goes_right": step.goes_right,
            "p_right": _number(step.p_right),
            "words": step_words(step),
            "left": {**_seen_json(step.left), "similarity": _number(step.left.match.similarity)},
            "right": {**_seen_json(step.right), "similarity": _number(step.right.match.similarity)},
        }
    return told


def _seen_json(side: SeenPatch) -> dict[str, Any]:
    return {
        "prototype": side.prototype,
        "distance": _number(side.distance),
        "in_reach": side.in_reach,
        "where": [
            {
                "method": where.method,
                "box": _numbers(where.box.edges),
                "hiding": where.hiding
                and {
                    "before": _number(where.hiding.before),
                    "box_hidden": _number(where.hiding.box_hidden),
                    "random_hidden": _number(where.hiding.random_hidden),
                },
            }
            for where in side.match.where
        ],
    }


def _flip_json(flip: Flip) -> dict[str, Any]:
    if flip.nearer is None:
        return {"node": flip.node, "similarity": _number(flip.p_right), "needed": _number(flip.needed)}
    return {
        "node": flip.node,
        "p_right": _number(flip.p_right),
        "needed": _number(flip.needed),
        "nearer": {"prototype": flip.nearer.prototype, "than": flip.nearer.than, "by": _number(flip.nearer.by)},
    }


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None

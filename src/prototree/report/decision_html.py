"""One decision as a page and as JSON: the way of a photo through one tree, or through several that vote.

As with the tree, the page's body has no inline styles or handlers.
"""

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from prototree.evaluation.tables import percent
from prototree.explain.records import DecisionExplanation, Location, Match, PathExplanation, VoteExplanation
from prototree.report.encoding import CROP_SIDE, PHOTO_SIDE, data_url, heat_url, reduced
from prototree.report.templating import asset, render
from prototree.report.words import (
    METHOD_LONG,
    METHOD_SHORT,
    STRATEGY_LONG,
    STRATEGY_NAMES,
    hiding_words,
    likeliest,
    runner_up_words,
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
    first, winner = decisions[0], likeliest(probs)
    methods = _methods(decisions)
    return render(
        "decision_body.html",
        image=first.image,
        photo=data_url("photo", reduced(first.photo, 480)),
        winner=first.class_names[winner],
        share=percent(probs[winner]),
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
        "size": list(explanation.size),
        "label": explanation.label,
        "classes": list(names),
        "soft": _numbers(explanation.soft),
        "paths": {strategy: _path_json(path, names) for strategy, path in explanation.paths.items()},
        "runner_up": {
            strategy: runner_up
            and {
                "label": runner_up.label,
                "class": names[runner_up.label],
                "flips": [
                    {"node": flip.node, "similarity": _number(flip.p_right), "needed": _number(flip.needed)}
                    for flip in runner_up.flips
                ],
            }
            for strategy, runner_up in explanation.runner_up.items()
        },
    }


def _title(explanation: Decided) -> str:
    if isinstance(explanation, VoteExplanation):
        return f"{explanation.decisions[0].image}: the vote of {len(explanation.decisions)} trees"
    return explanation.image


def _methods(decisions: Sequence[DecisionExplanation]) -> tuple[Any, ...]:
    matches = (step.match for one in decisions for path in one.paths.values() for step in path.steps)
    return tuple(dict.fromkeys(where.method for match in matches for where in match.where))


def _bars(probs: Sequence[float], names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Name, width in percent and words of the likeliest classes."""
    order = sorted(range(len(probs)), key=lambda k: -probs[k])[:_MOST_BARS]
    return [(names[k], f"{100 * min(probs[k], 1.0):.1f}", percent(probs[k])) for k in order if probs[k] >= 0.005]


def _tree(decision: DecisionExplanation) -> dict[str, Any]:
    names = decision.class_names
    winner = likeliest(decision.soft)
    return {
        "winner": names[winner],
        "share": percent(decision.soft[winner]),
        "bars": _bars(decision.soft, names),
        "paths": [
            {
                "strategy": strategy,
                "name": STRATEGY_NAMES[strategy],
                "meaning": STRATEGY_LONG[strategy],
                "steps": [_step(path, i) for i in range(len(path.steps))],
                "end": names[likeliest(path.class_probs)],
                "share": percent(max(path.class_probs)),
                "bars": _bars(path.class_probs, names),
                "runner_up": runner_up_words(decision.runner_up.get(strategy), names),
            }
            for strategy, path in decision.paths.items()
        ],
    }


def _step(path: PathExplanation, i: int) -> dict[str, Any]:
    step = path.steps[i]
    match, against = step.match, step.goes_right != (step.similarity > 0.5)
    return {
        "node": step.node,
        "note": step.note,
        "present": step.goes_right,
        "similarity": f"{step.similarity:.2f}",
        "width": f"{100 * min(max(step.similarity, 0.0), 1.0):.1f}",
        "against": against and path.strategy == "max_path",
        "prototype": data_url(f"prototype-{step.node}", reduced(step.prototype, CROP_SIDE)),
        "crop": data_url(f"piece-{step.node}", reduced(match.crop, CROP_SIDE)),
        "photo": data_url(f"photo-{step.node}", reduced(match.photo, PHOTO_SIDE)),
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
        "steps": [
            {
                "node": step.node,
                "note": step.note,
                "present": step.goes_right,
                "similarity": _number(step.similarity),
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
                    for where in step.match.where
                ],
            }
            for step in path.steps
        ],
    }


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None

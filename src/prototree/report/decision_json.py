"""One decision as JSON, for programs: all numbers, no pictures."""

import math
from collections.abc import Sequence
from typing import Any

from prototree.explain.records import (
    DecisionExplanation,
    Flip,
    PathExplanation,
    SeenPatch,
    Step,
    VoteExplanation,
)
from prototree.report.text import likeliest, step_words


def decision_json(explanation: DecisionExplanation | VoteExplanation) -> dict[str, Any]:
    """A decision of one tree, or of each of several and their vote."""
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
        "confidence": None if explanation.confidence is None else round(explanation.confidence, 6),
        "is_known": explanation.doubt is None,
        "doubt": None if explanation.doubt is None else explanation.doubt.reason,
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


def _path_json(path: PathExplanation, names: Sequence[str]) -> dict[str, Any]:
    winner = likeliest(path.class_probs)
    return {
        "leaf": path.leaf,
        "prediction": {"label": winner, "class": names[winner]},
        "class_probs": _numbers(path.class_probs),
        "steps": list(map(_step_json, path.steps)),
    }


def _step_json(step: Step) -> dict[str, Any]:
    """One patch that is there or not; or, of a pairwise node, what was compared on either side."""
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

"""Sentences that only the page of a decision says."""

from collections.abc import Sequence

from prototree.explain.records import Hiding, Step
from prototree.report.text import NEITHER_CLOSE, PRESENT, compared_distances, plain

_NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
HOW_TO_TEST = "prototree explain … --attribution tests every box by hiding it"


def confidence_words(confidence: float | None, n_photos: int) -> str:
    """What a confidence means, after the percentage: only what was measured is promised."""
    if confidence is None:
        return ""
    if not n_photos:
        return "sure by the tree’s own estimate, which was not checked on held-out photos"
    if confidence > 0.99:
        return "sure: right in more than 99 of 100 such cases"
    return f"sure: right in about {max(round(100 * confidence), 1)} of 100 such cases"


def number_word(number: int) -> str:
    """`five`, as far as that is shorter to read than the digits."""
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


def none_of_words(number: int) -> str:
    """What is said of a run of patches that are not there."""
    return "not this one" if number == 1 else f"none of these {number_word(number)}"


def asked_words(number: int) -> str:
    """How long a path is."""
    return f"{number_word(number)} question{'' if number == 1 else 's'}"


def compact_words(step: Step) -> str:
    """How it went at one node, as the line above its pictures."""
    if step.left is not None:
        return _nearer_words(step)
    name = f"“{plain(step.note)}”" if step.note else "this patch"
    return f"{name} is {PRESENT if step.goes_right else 'absent'}, similarity {step.p_right:.2f}"


def _nearer_words(step: Step) -> str:
    """Of a pairwise node: its pictures stand below, so that what has no note needs no number."""
    (left, left_words), (right, right_words) = zip(step.sides, compared_distances(step), strict=True)
    (near, at), (_, other) = ((right, right_words), (left, left_words)) if step.p_right > 0.5 else (
        (left, left_words), (right, right_words),
    )  # fmt: skip
    name = f"“{plain(near.note)}”" if near.note else "this one" if near is step.chosen else "the other one"
    neither = "" if any(side.in_reach for side in step.sides) else f"; {NEITHER_CLOSE}"
    return f"nearer to {name}: {at} against {other}{neither}"


def untested_words(hidings: Sequence[Hiding | None]) -> str:
    """Said once for a page: whether its boxes stood the test of being hidden; empty where all were tested."""
    untested = sum(hiding is None for hiding in hidings)
    if not untested:
        return ""
    which = "The boxes" if untested == len(hidings) else "Boxes without a figure"
    return f"{which} were not tested by hiding them ({HOW_TO_TEST})."

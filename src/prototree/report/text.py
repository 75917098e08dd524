"""The sentences of an explanation, said once for the page, the print and the text."""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from prototree.core.strategies import Strategy
from prototree.evaluation.tables import percent
from prototree.explain.records import (
    UNKNOWN,
    ClassExplanation,
    DecisionExplanation,
    Flip,
    Hiding,
    Method,
    NodeKind,
    PrototypeExplanation,
    RunnerUp,
    SeenPatch,
    Step,
    TreeExplanation,
    VoteExplanation,
)
from prototree.report.layout import reading_order

PRESENT, ABSENT = "present", "absent"

METHOD_SHORT: dict[Method, str] = {
    "peak": "Match",
    "cell": "Nearest patch",
    "attribution": "Attribution",
    "occlusion": "Occlusion",
}
METHOD_LONG: dict[Method, str] = {
    "peak": "Centred on the place that matches the prototype.",
    "cell": "The part of the photo that the network compared with the prototype.",
    "attribution": "The pixels on which the similarity depends most.",
    "occlusion": "The places where the similarity falls most when they are covered up.",
}
STRATEGY_NAMES: dict[Strategy, str] = {"soft": "Soft", "max_path": "Most likely path", "greedy": "Greedy path"}
_STRATEGY_LONG: dict[Strategy, str] = {
    "soft": "All leaves vote, each weighted by how likely the photo is to reach it.",
    "max_path": "The leaf that the photo is most likely to reach decides.",
}
_GREEDY_LONG: dict[NodeKind, str] = {
    "presence": "At each prototype the photo goes to “present” if the similarity is above 0.5, otherwise to “absent”.",
    "pairwise": "At each node the photo goes to the side of the prototype that it is nearer to.",
}
NEITHER_CLOSE = "neither is close"


def strategy_words(strategy: Strategy, question: NodeKind) -> str:
    """What a strategy does, as a sentence."""
    return _GREEDY_LONG[question] if strategy == "greedy" else _STRATEGY_LONG[strategy]


def headline(tree: TreeExplanation) -> str:
    """How often the path that pages show is right: `82.1 % of test photos right`; empty if never evaluated."""
    return f"{percent(tree.accuracy['greedy'], 1)} of {tree.judged_on} right" if "greedy" in tree.accuracy else ""


def plain(text: str) -> str:
    """One line without control characters, for files where those would break something."""
    return " ".join("".join(c if unicodedata.category(c) not in ("Cc", "Cs") else " " for c in text).split())


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 class`, `3 classes`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def hiding_words(hiding: Hiding | None) -> str:
    """The test of a box, as a sentence."""
    if hiding is None:
        return "This box was not tested by hiding it."
    return (
        f"Hiding this box lowers the similarity from {hiding.before:.2f} to {hiding.box_hidden:.2f}; "
        f"hiding a random box of the same size: to {hiding.random_hidden:.2f}."
    )


def runner_up_words(runner_up: RunnerUp | None, class_names: Sequence[str], steps: Sequence[Step] = ()) -> str:
    """What another class would have needed, as a sentence; questions on the way are called by their place on it."""
    if runner_up is None:
        return "No change would have led this tree to another class."
    asked = {step.node: (number, step) for number, step in enumerate(steps, 1)}
    needed = " and ".join(_asked_flip_words(flip, *asked.get(flip.node, (0, None))) for flip in runner_up.flips)
    return f"For {class_names[runner_up.label]} to win instead, {needed or 'nothing would have to change'}."


def _asked_flip_words(flip: Flip, number: int, step: Step | None) -> str:
    if step is None:
        return flip_words(flip)
    if flip.nearer is None:
        return f"at question {number} the similarity would have to {_change_words(flip)}"
    if flip.nearer.than != step.chosen.prototype:
        return flip_words(flip)
    return f"at question {number} the other patch would have to be {_nearer_by(flip.nearer.by)}"


def flip_words(flip: Flip) -> str:
    """What would have to change at one node, as half a sentence."""
    if flip.nearer is not None:
        by = _nearer_by(flip.nearer.by)
        return f"prototype {flip.nearer.prototype} would have to be {by}, compared with prototype {flip.nearer.than}"
    return f"at prototype {flip.node} the similarity would have to {_change_words(flip)}"


def _nearer_by(distance: float) -> str:
    return f"{distance_words(distance)} nearer" if distance >= 0.0005 else "a little nearer"


def _change_words(flip: Flip) -> str:
    turn = "rise" if flip.needed > flip.p_right else "fall"
    for digits in (2, 3, 4):
        now, then = f"{flip.p_right:.{digits}f}", f"{flip.needed:.{digits}f}"
        if now != then:
            return f"{turn} from {now} to {then}"
    return f"{turn} a little from {flip.p_right:.2f}"


def distance_words(distance: float) -> str:
    """A distance with as many digits as it takes to tell it from 0."""
    return f"{distance:.2f}" if distance >= 0.05 or distance <= 0 else f"{distance:.3f}"


def compared_distances(step: Step) -> tuple[str, ...]:
    """The distances of a step's sides, left to right, with enough digits to tell which is smaller."""
    for digits in (2, 3, 4):
        said = tuple(f"{side.distance:.{digits}f}" for side in step.sides)
        if len(set(said)) == len(said):
            break
    return said


def seen_name(side: SeenPatch) -> str:
    """What a prototype is called in the sentences about a photo."""
    return f"“{plain(side.note)}”" if side.note else str(side.prototype)


def answer_words(explanation: DecisionExplanation | VoteExplanation) -> str:
    """What is said of an image, as a line: the answer, how sure it is, and the way to it."""
    if isinstance(explanation, VoteExplanation):
        first, probs = explanation.decisions[0], explanation.class_probs
        best = likeliest(probs)
        votes = count(len(explanation.decisions), "tree")
        return f"{first.image}: {first.class_names[best]} ({percent(probs[best])} by {votes})"
    steps = "; ".join(map(_turn_words, explanation.paths["greedy"].steps)) or "no question asked"
    guess = explanation.class_names[explanation.answer]
    if explanation.confidence is None:
        reason = explanation.doubt.reason if explanation.doubt is not None else ""
        return f"{explanation.image}: {UNKNOWN} (best guess {guess}): {reason} {steps}"
    return f"{explanation.image}: {guess} ({percent(explanation.confidence)} sure): {steps}"


def _turn_words(step: Step) -> str:
    name = "" if step.left is not None else f"{seen_name(step.right)} "
    return f"{name}{step_words(step)}"


def step_words(step: Step) -> str:
    """How it went at one node: `present`, or `nearer to 7 (0.40) than to 17 (1.10)`."""
    if step.left is None:
        return PRESENT if step.goes_right else ABSENT
    left, right = (f"{seen_name(s)} ({d})" for s, d in zip(step.sides, compared_distances(step), strict=True))
    near, far = (right, left) if step.p_right > 0.5 else (left, right)
    neither = "" if any(side.in_reach for side in step.sides) else f"; {NEITHER_CLOSE}"
    return f"nearer to {near} than to {far}{neither}"


def likeliest(probs: Sequence[float]) -> int:
    """The class with the highest probability, the first one on a tie."""
    return max(range(len(probs)), key=probs.__getitem__)


def prototype_name(prototype: PrototypeExplanation) -> str:
    """What a prototype is called in text: the user's own words, or its number."""
    return f"“{plain(prototype.note)}”" if prototype.note else str(prototype.prototype)


@dataclass(frozen=True)
class Rule:
    """The way to one leaf: each node on it, and whether it is left to the right: its prototype must be present, or the
    right one of its two must be nearer."""

    leaf: int
    label: int  # the leaf's most likely class
    share: float  # how likely
    turns: tuple[tuple[int, bool], ...]


@dataclass(frozen=True)
class Reading:
    """What follows from a tree's shape and its leaves, worked out once."""

    explanation: TreeExplanation

    @property
    def is_choice(self) -> bool:
        """Whether nodes choose between two prototypes."""
        return self.explanation.question == "pairwise"

    def sides(self, node: int) -> tuple[PrototypeExplanation, ...]:
        """A node's prototypes, as they stand on a page: left to right."""
        right = self.explanation.prototype_at(node, "right")
        return (self.explanation.prototype_at(node, "left"), right) if self.is_choice else (right,)

    def rather(self, node: int, right: bool) -> tuple[PrototypeExplanation, PrototypeExplanation]:
        """Of a pairwise node: the prototype that must be nearer for this turn, and the other one."""
        left, other = self.sides(node)
        return (other, left) if right else (left, other)

    def conditions(self, rule: Rule) -> tuple[tuple[int, bool], ...]:
        """The turns as people say them: first what must be there; choices in their order."""
        return rule.turns if self.is_choice else tuple(sorted(rule.turns, key=lambda turn: not turn[1]))

    def side_word(self, node: int, right: bool) -> str:
        """What stands at a line: `present`, or `more like 7`."""
        if self.is_choice:
            return f"more like {self.rather(node, right)[0].prototype}"
        return PRESENT if right else ABSENT

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """One per leaf, by the leaf's number."""
        tree, rules = self.explanation, {}
        way: dict[int, tuple[tuple[int, bool], ...]] = {0 if tree.left else ~0: ()}
        for id_, _ in reading_order(tree.left, tree.right):
            turns = way.pop(id_)
            if id_ >= 0:
                way[tree.left[id_]] = (*turns, (id_, False))
                way[tree.right[id_]] = (*turns, (id_, True))
            else:
                probs = tree.leaf_probs[~id_].tolist()
                label = likeliest(probs)
                rules[~id_] = Rule(~id_, label, probs[label], turns)
        return tuple(rules[leaf] for leaf in range(len(rules)))

    @cached_property
    def leaves_below(self) -> dict[int, tuple[int, ...]]:
        """Of each id, in reading order."""
        tree = self.explanation
        below: dict[int, tuple[int, ...]] = {}
        for id_, _ in reversed(reading_order(tree.left, tree.right)):
            below[id_] = (~id_,) if id_ < 0 else (*below[tree.left[id_]], *below[tree.right[id_]])
        return below

    @cached_property
    def hues(self) -> dict[int, float]:
        """A colour for each id, in degrees: neighbours in the tree have neighbouring ones. As in tree.js."""
        tree = self.explanation
        order = [id_ for id_, _ in reading_order(tree.left, tree.right)]
        ends = [id_ for id_ in order if id_ < 0]
        spans = {end: (place, place) for place, end in enumerate(ends)}
        for id_ in reversed(order):
            if id_ >= 0:
                spans[id_] = (spans[tree.left[id_]][0], spans[tree.right[id_]][1])
        return {id_: (25 + 330 * (first + last + 1) / 2 / len(ends)) % 360 for id_, (first, last) in spans.items()}

    def known(self, label: int) -> ClassExplanation:
        """What is known of a class; nothing where the explanation does not say."""
        classes = self.explanation.classes
        return classes[label] if label < len(classes) else ClassExplanation(())

    def labels_below(self, id_: int) -> tuple[int, ...]:
        """The classes that the leaves below are for, each once, in reading order; unsure leaves are for none."""
        labels = (self.rules[leaf].label for leaf in self.leaves_below[id_] if not self.is_unsure(leaf))
        return tuple(dict.fromkeys(labels))

    def is_unsure(self, leaf: int) -> bool:
        """Whether a leaf is nearly uniform over the classes (its maximum is at most 2/K), so that it says little."""
        n_classes = len(self.explanation.class_names)
        return n_classes > 2 and self.rules[leaf].share <= 2 / n_classes

    def below_words(self, id_: int, most: int = 3) -> str:
        """What lies below: a class, or how many and which."""
        names = [self.explanation.class_names[label] for label in self.labels_below(id_)]
        if not names:
            return "no clear class"
        if len(names) == 1:
            return names[0]
        return f"{count(len(names), 'class', 'classes')}: {listed(names, most)}"

    def turn_words(self, turns: Iterable[tuple[int, bool]]) -> str:
        """`has “long beak”, 7; lacks 3`, present ones first; or `more like 7 than 17`. Numbers are prototypes."""
        turns, said = tuple(turns), []
        if self.is_choice:
            pairs = [map(prototype_name, self.rather(node, right)) for node, right in turns]
            return ", ".join(f"more like {near} than {far}" for near, far in pairs)
        for word, wanted in (("has", True), ("lacks", False)):
            names = [prototype_name(self.explanation.prototypes[node]) for node, has in turns if has is wanted]
            if names:
                said.append(f"{word} {', '.join(names)}")
        return "; ".join(said)

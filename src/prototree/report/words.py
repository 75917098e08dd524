"""The sentences of an explanation, said once for the page, the print and the text."""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from prototree.explain.records import Hiding, Method, PrototypeExplanation, RunnerUp, TreeExplanation
from prototree.report.layout import reading_order
from prototree.tree.strategies import Strategy

PRESENT, ABSENT = "present", "absent"

METHOD_SHORT: dict[Method, str] = {"cell": "Nearest patch", "attribution": "Attribution", "occlusion": "Occlusion"}
METHOD_LONG: dict[Method, str] = {
    "cell": "The part of the photo that the network compared with the prototype.",
    "attribution": "The pixels on which the similarity depends most.",
    "occlusion": "The places where the similarity falls most when they are covered up.",
}
STRATEGY_NAMES: dict[Strategy, str] = {"soft": "Soft", "max_path": "Most likely path", "greedy": "Greedy path"}
STRATEGY_LONG: dict[Strategy, str] = {
    "soft": "All leaves vote, each weighted by how likely the photo is to arrive there.",
    "max_path": "The leaf that the photo is most likely to arrive at decides, and the way to it is the explanation.",
    "greedy": "At each prototype the photo goes to “present” if the similarity is above 0.5, otherwise to “absent”.",
}


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


def runner_up_words(runner_up: RunnerUp | None, class_names: Sequence[str]) -> str:
    """What another class would have needed, as a sentence."""
    if runner_up is None:
        return "No change of the similarities would have led this tree to another class."
    name = class_names[runner_up.label]
    needed = [
        f"at prototype {flip.node} the similarity would have to {'rise' if flip.needed > flip.p_right else 'fall'} "
        f"from {flip.p_right:.2f} to {flip.needed:.2f}"
        for flip in runner_up.flips
    ]
    return f"For {name} to win instead, {' and '.join(needed) or 'nothing would have to change'}."


def likeliest(probs: Sequence[float]) -> int:
    """The class with the highest probability, the first one on a tie."""
    return max(range(len(probs)), key=probs.__getitem__)


def prototype_name(prototype: PrototypeExplanation) -> str:
    """What a prototype is called in text: the user's own words, or its number."""
    return f"“{plain(prototype.note)}”" if prototype.note else str(prototype.node)


@dataclass(frozen=True)
class Rule:
    """The way to one leaf: each prototype on it, and whether it must be present."""

    leaf: int
    label: int  # the leaf's most likely class
    share: float  # how likely
    turns: tuple[tuple[int, bool], ...]

    @property
    def conditions(self) -> tuple[tuple[int, bool], ...]:
        """The turns as people say them: first what must be there."""
        return tuple(sorted(self.turns, key=lambda turn: not turn[1]))


@dataclass(frozen=True)
class Reading:
    """What follows from a tree's shape and its leaves, worked out once."""

    explanation: TreeExplanation

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """One a leaf, by the leaf's number."""
        tree, rules = self.explanation, {}
        way: dict[int, tuple[tuple[int, bool], ...]] = {0 if tree.left else ~0: ()}
        for id_, _ in reading_order(tree.left, tree.right):
            turns = way.pop(id_)
            if id_ >= 0:
                way[tree.left[id_]] = (*turns, (id_, False))
                way[tree.right[id_]] = (*turns, (id_, True))
            else:
                probs = tree.leaf_probs[~id_]
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
        """`has “long beak”, 7; lacks 3`: first what must be present; numbers are prototypes."""
        turns = tuple(turns)
        said = []
        for word, wanted in (("has", True), ("lacks", False)):
            names = [prototype_name(self.explanation.prototypes[node]) for node, has in turns if has is wanted]
            if names:
                said.append(f"{word} {', '.join(names)}")
        return "; ".join(said)

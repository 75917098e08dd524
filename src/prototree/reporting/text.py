"""A tree and its decisions in words: every sentence once, for pages, figures and the terminal; and the tree's rules.

Ids of a tree are as in `Topology`: a node, or `~leaf`.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from prototree.core.topology import Strategy
from prototree.evaluation.tables import percent
from prototree.explanation import records
from prototree.reporting.layout import reading_order

PRESENT, ABSENT = "present", "absent"
NO_CLASS = "no clear class"
NEITHER_CLOSE = "neither is close"
_IF_KNOWN = "if the image shows one of the known classes"
HIGHEST_CONFIDENCE = 0.9999  # never shown as certain, whatever rounding says

# The ways to find a patch in a image: name and meaning.
METHODS: dict[records.Method, tuple[str, str]] = {
    "peak": ("Match", "Centred on the place that matches the prototype."),
    "cell": ("Nearest patch", "The part of the image that the network compared with the prototype."),
    "attribution": ("Attribution", "The pixels on which the similarity depends most."),
    "occlusion": ("Occlusion", "The places where the similarity falls most when they are covered up."),
}
STRATEGY_NAMES: dict[Strategy, str] = {"max_path": "Most likely path", "greedy": "Single path"}
_GREEDY_TEXT: dict[records.NodeKind, str] = {
    "presence": "At each question the image goes to “present” if its similarity to the patch is above 0.5, "
    "otherwise to “absent”.",
    "pairwise": "At each question the image goes to the side of the patch that it is more like, at the smaller "
    "distance.",
}
_NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def plain(text: str) -> str:
    """Strip line breaks, control characters and what XML forbids, for files where those would break something."""
    return " ".join(
        "".join(" " if unicodedata.category(c) in ("Cc", "Cs") or c in "\ufffe\uffff" else c for c in text).split()
    )


def count(number: int, noun: str, plural: str = "") -> str:
    """Join a number and its noun: `1 class`, `3 classes`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def number_word(number: int) -> str:
    """Spell a small number out."""
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


def likeliest(probs: Sequence[float]) -> int:
    """Return the class with the highest probability, the first one on a tie."""
    return max(range(len(probs)), key=probs.__getitem__)


def node_number(node: int) -> int:
    """Return the number that people see of a node: its index in the topology, counted from 1."""
    return node + 1


def tree_size(tree: records.TreeExplanation) -> str:
    """Say how large a tree is: `12 classes · 11 questions · 22 prototypes`."""
    sizes = ((len(tree.class_names), "class", "classes"), (len(tree.left), "question", ""))
    return " · ".join(count(*size) for size in (*sizes, (len(tree.prototypes), "prototype", "")))


def patch_name(node: int, row: int, kind: records.NodeKind) -> str:
    """Name a node's patch: `7`, or `7L` and `7R` of a pairwise node, whose right prototype has the node's row."""
    side = "" if kind == "presence" else "R" if row == node else "L"
    return f"{node_number(node)}{side}"


def step_patch(step: records.Step, side: records.PatchComparison) -> str:
    """Name one of the patches that a step compares."""
    return patch_name(step.node, side.prototype, "presence" if step.left is None else "pairwise")


def isolated(name: str) -> str:
    """Give a name with right-to-left letters a text direction of its own, so that it moves nothing around it."""
    return f"\u2068{name}\u2069" if any(unicodedata.bidirectional(c) in ("R", "AL") for c in name) else name


def quoted_note(note: str) -> str:
    """Put the user's own words for a patch into quotation marks; empty where there are none."""
    return f"“{isolated(plain(note))}”" if note else ""


# ---- decisions --------------------------------------------------------------------------------------------------
def strategy_text(strategy: Strategy, kind: records.NodeKind) -> str:
    """Say how a path through the tree is chosen."""
    return _GREEDY_TEXT[kind] if strategy == "greedy" else "The leaf that the image is most likely to reach decides."


def confidence_percent(confidence: float | None) -> str:
    """Write a confidence in percent; empty where the tree abstains."""
    return "" if confidence is None else percent(min(confidence, HIGHEST_CONFIDENCE))


def confidence_text(confidence: float | None, n_calibration: int) -> str:
    """Say after the percentage what a confidence means: only what was measured is promised."""
    if confidence is None:
        return ""
    if not n_calibration:
        return "confident by the tree’s own estimate, which was not checked on held-out images"
    if confidence > 0.99:
        return f"confident: right in more than 99 of 100 such cases, {_IF_KNOWN}"
    return f"confident: right in about {max(round(100 * confidence), 1)} of 100 such cases, {_IF_KNOWN}"


def decision_text(explanation: records.DecisionExplanation | records.EnsembleExplanation) -> str:
    """Sum up a decision in one line: prediction, confidence and the path."""
    if isinstance(explanation, records.EnsembleExplanation):
        first, probs = explanation.decisions[0], explanation.class_probs
        best, trees = likeliest(probs), count(len(explanation.decisions), "tree")
        return f"{first.image}: {isolated(first.class_names[best])} ({percent(probs[best])} by {trees})"
    path = explanation.paths["greedy"].steps
    names = ["" if step.left is not None else f"{quoted_note(step.note) or node_number(step.node)} " for step in path]
    steps = "; ".join(name + step_text(step) for name, step in zip(names, path, strict=True)) or "no question asked"
    predicted_class = isolated(explanation.class_names[explanation.answer])
    if explanation.confidence is None:
        reason = explanation.abstention.reason if explanation.abstention is not None else ""
        asked = f"{steps[0].upper()}{steps[1:]}" if reason.endswith(".") else steps
        return f"{explanation.image}: {records.UNKNOWN} (best guess {predicted_class}): {reason} {asked}"
    return f"{explanation.image}: {predicted_class} ({percent(explanation.confidence)} confidence): {steps}"


def step_text(step: records.Step) -> str:
    """Say how one node decided: `present`, or `more like 7L (0.40) than 7R (1.10)`, with the distances."""
    if step.left is None:
        return PRESENT if step.goes_right else ABSENT
    names = [quoted_note(side.note) or step_patch(step, side) for side in step.sides]
    neither = "" if any(side.in_radius for side in step.sides) else f"; {NEITHER_CLOSE}"
    return more_like(names, [side.distance for side in step.sides], step.p_right > 0.5) + neither


def more_like(names: Sequence[str], distances: Sequence[float], is_right: bool) -> str:
    """Say to which of two patches, left and right, an image is nearer: `more like 7L (0.40) than 7R (1.10)`."""
    left, right = (f"{name} ({distance})" for name, distance in zip(names, told_apart(distances), strict=True))
    near, far = (right, left) if is_right else (left, right)
    return f"more like {near} than {far}"


def step_line(step: records.Step) -> str:
    """Say after its number how one node decided, above the pictures of its patches."""
    if step.left is not None:
        return step_text(step)
    return f"{quoted_note(step.note) or 'the patch'} is {step_text(step)}, similarity {step.p_right:.2f}"


def strength(step: records.Step) -> float:
    """Compute how clear a decision was, from 0 (undecided) to 1, out of the probability of its side."""
    return abs(2 * step.p_right - 1)


def told_apart(distances: Sequence[float]) -> tuple[str, ...]:
    """Write distances with enough digits to tell which is smaller."""
    for digits in (2, 3, 4):
        written = tuple(f"{distance:.{digits}f}" for distance in distances)
        if len(set(written)) == len(written):
            break
    return written


def runner_up_text(counterfactuals: records.Counterfactual | None, class_names: Sequence[str]) -> str:
    """Say the counterfactual: what another class would have needed to win."""
    if counterfactuals is None:
        return "No change would have led this tree to another class."
    needed = " and ".join(map(flip_text, counterfactuals.flips)) or "nothing would have to change"
    return f"For {isolated(class_names[counterfactuals.label])} to win instead, {needed}."


def flip_text(flip: records.Flip) -> str:
    """Say what would have to change at one node, as half a sentence; never from a number to itself."""
    where = f"at question {node_number(flip.node)}"
    if flip.nearer is not None:
        patch, than = (patch_name(flip.node, row, "pairwise") for row in (flip.nearer.prototype, flip.nearer.than))
        by, digits = flip.nearer.by, 2 if flip.nearer.by >= 0.05 else 3
        nearer = f"{by:.{digits}f} nearer" if by >= 0.0005 else "a little nearer"
        return f"{where} patch {patch} would have to be {nearer}, compared with {than}"
    numbers = [(f"{flip.p_right:.{digits}f}", f"{flip.needed:.{digits}f}") for digits in (2, 3, 4)]
    change = next((f"from {now} to {needed}" for now, needed in numbers if now != needed), "")
    turn = "rise" if flip.needed > flip.p_right else "fall"
    return f"{where} the similarity would have to {turn} {change or f'a little from {numbers[0][0]}'}"


def occlusion_text(test: records.OcclusionEffect | None) -> str:
    """Say how the occlusion test of a box went."""
    if test is None:
        return "This box was not tested by hiding it; prototree report tests every box of a run."
    return (
        f"Hiding this box lowers the similarity from {test.before:.2f} to {test.box_occluded:.2f}; "
        f"hiding a random box of the same size: to {test.random_occluded:.2f}."
    )


def untested_text(tests: Sequence[records.OcclusionEffect | None]) -> str:
    """Say once for a page which boxes had no occlusion test; empty where all had one."""
    untested = sum(test is None for test in tests)
    if not untested:
        return ""
    which = "The boxes" if untested == len(tests) else "Boxes without a figure"
    return f"{which} were not tested by hiding them (prototree explain … --attribution tests every box by hiding it)."


# ---- the tree ---------------------------------------------------------------------------------------------------
def headline(tree: records.TreeExplanation) -> str:
    """Say the accuracy: `test accuracy 82.1 % (single path; 240 images)`; empty if never evaluated."""
    if "greedy" not in tree.accuracy:
        return ""
    on_test = tree.evaluated_on == records.TEST_IMAGES
    what = "test accuracy" if on_test else f"accuracy on {tree.evaluated_on}"
    images = f"; {count(tree.n_evaluated, 'image')}" if tree.n_evaluated else ""
    return f"{what} {percent(tree.accuracy['greedy'], 1)} (single path{images})"


@dataclass(frozen=True)
class Rule:
    """The path to one leaf: each node on it, and whether it is left to the right."""

    leaf: int
    predicted: int  # the leaf's most likely class
    share: float  # its probability
    steps: tuple[tuple[int, bool], ...]  # node, goes_right


@dataclass(frozen=True)
class TreeText:
    """A tree in words: its rules, and what lies below each node."""

    explanation: records.TreeExplanation

    @property
    def is_pairwise(self) -> bool:
        """Whether nodes compare two prototypes."""
        return self.explanation.node_kind == "pairwise"

    def sides(self, node: int) -> tuple[records.PrototypeExplanation, ...]:
        """Return a node's prototypes as they stand on a page: left to right."""
        right = self.explanation.prototype_at(node, "right")
        return (self.explanation.prototype_at(node, "left"), right) if self.is_pairwise else (right,)

    def nearer(self, node: int, goes_right: bool) -> tuple[records.PrototypeExplanation, records.PrototypeExplanation]:
        """Return the prototype of a pairwise node that must be nearer to go this way, and the other one."""
        left, right = self.sides(node)
        return (right, left) if goes_right else (left, right)

    def patch(self, prototype: records.PrototypeExplanation) -> str:
        """Name a prototype's patch: `7`, or `7L` and `7R` where a node has two."""
        return patch_name(prototype.node, prototype.prototype, self.explanation.node_kind)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """One per leaf, in the order of the leaves."""
        tree, rules = self.explanation, {}
        paths: dict[int, tuple[tuple[int, bool], ...]] = {0 if tree.left else ~0: ()}
        for id_, _ in reading_order(tree.left, tree.right):
            steps = paths.pop(id_)
            if id_ >= 0:
                paths[tree.left[id_]] = (*steps, (id_, False))
                paths[tree.right[id_]] = (*steps, (id_, True))
            else:
                probs = tree.leaf_probs[~id_].tolist()
                best = likeliest(probs)
                rules[~id_] = Rule(~id_, best, probs[best], steps)
        return tuple(rules[leaf] for leaf in range(len(rules)))

    @cached_property
    def leaves_below(self) -> dict[int, tuple[int, ...]]:
        """The leaves below each id, in reading order."""
        tree = self.explanation
        below: dict[int, tuple[int, ...]] = {}
        for id_, _ in reversed(reading_order(tree.left, tree.right)):
            below[id_] = (~id_,) if id_ < 0 else (*below[tree.left[id_]], *below[tree.right[id_]])
        return below

    @cached_property
    def hues(self) -> dict[int, float]:
        """A colour for each id, in degrees: neighbours in the tree have neighbouring ones. As in tree.js."""
        rank = {leaf: number for number, leaf in enumerate(self.leaves_below[0 if self.explanation.left else ~0])}
        middles = {id_: (rank[leaves[0]] + rank[leaves[-1]] + 1) / 2 for id_, leaves in self.leaves_below.items()}
        return {id_: (25 + 330 * middle / len(rank)) % 360 for id_, middle in middles.items()}

    def class_facts(self, label: int) -> records.ClassExplanation:
        """Return what is known of a class; nothing where the explanation does not say."""
        classes = self.explanation.classes
        return classes[label] if label < len(classes) else records.ClassExplanation(())

    def is_unsure(self, leaf: int) -> bool:
        """Whether a leaf is nearly uniform over the classes: its maximum is at most 2/K."""
        n_classes = len(self.explanation.class_names)
        return n_classes > 2 and self.rules[leaf].share <= 2 / n_classes

    def classes_below(self, id_: int) -> tuple[int, ...]:
        """Return the classes that the leaves below predict, each once, in reading order; unsure leaves predict none."""
        predicted = (self.rules[leaf].predicted for leaf in self.leaves_below[id_] if not self.is_unsure(leaf))
        return tuple(dict.fromkeys(predicted))

    def rule_text(self, rule: Rule) -> str:
        """Write a rule's conditions: `has “long beak”, 7; lacks 3`, or `more like 7L than 7R`."""

        def name(prototype: records.PrototypeExplanation) -> str:
            return quoted_note(prototype.note) or self.patch(prototype)

        if self.is_pairwise:
            pairs = (self.nearer(*step) for step in rule.steps)
            return ", ".join(f"more like {name(near)} than {name(far)}" for near, far in pairs) or "always"
        names = {
            verb: [name(self.explanation.prototypes[node]) for node, goes_right in rule.steps if goes_right is present]
            for verb, present in (("has", True), ("lacks", False))
        }
        return "; ".join(f"{verb} {', '.join(nodes)}" for verb, nodes in names.items() if nodes) or "always"


# ---- rules as files ---------------------------------------------------------------------------------------------
def rules_text(explanation: records.TreeExplanation) -> str:
    """Write every rule on one line, by class: `has 7; lacks 3 → Scarlet Tanager`; then where patches come from."""
    tree, names = TreeText(explanation), [isolated(plain(name)) for name in explanation.class_names]
    ranked = sorted(tree.rules, key=lambda rule: (names[rule.predicted], -rule.share))
    clear = [rule for rule in ranked if not tree.is_unsure(rule.leaf)]
    unsure = [rule for rule in ranked if tree.is_unsure(rule.leaf)]
    facts = [plain(explanation.title), *filter(None, (tree_size(explanation), headline(explanation)))]
    lines = [*facts, "", "RULES (numbers are questions, whose patches are listed below)", ""]
    lines += [f"{tree.rule_text(rule)} → {names[rule.predicted]} ({percent(rule.share)})" for rule in clear]
    if unsure:
        lines += ["", "LEAVES WITHOUT A CLEAR CLASS", "", *(f"{tree.rule_text(rule)} → {NO_CLASS}" for rule in unsure)]
    lines += ["", "PATCHES", ""]
    for prototype in (side for node in range(len(explanation.left)) for side in tree.sides(node)):
        source, box = prototype.source, _box(prototype.source)
        note = f" {quoted_note(prototype.note)}" if prototype.note else ""
        label = f" ({names[source.label]})" if source.label is not None else ""
        pixels = f", pixels {box[0]:.0f}–{box[2]:.0f} across and {box[1]:.0f}–{box[3]:.0f} down" if box else ""
        lines.append(f"{tree.patch(prototype)}{note}: {plain(source.image)}{label}{pixels}")
    return "\n".join(lines) + "\n"


def rules_json(explanation: records.TreeExplanation) -> dict[str, Any]:
    """Return the rules for programs: every leaf with its conditions from the root down, and where patches come from."""
    tree, names = TreeText(explanation), explanation.class_names

    def condition(node: int, goes_right: bool) -> dict[str, Any]:
        step = {"node": node_number(node), "goes_right": goes_right}
        if not tree.is_pairwise:
            return step
        nearer, farther = map(tree.patch, tree.nearer(node, goes_right))
        return {**step, "nearer": nearer, "farther": farther}

    return {
        "title": explanation.title,
        "node_kind": explanation.node_kind,
        "classes": list(names),
        "prototypes": [
            {
                "patch": tree.patch(prototype),
                "node": node_number(prototype.node),
                "side": prototype.side,
                "prototype_row": prototype.prototype,
                "radius": round(prototype.radius, 6),
                "note": prototype.note,
                "image": prototype.source.image,
                "label": None if prototype.source.label is None else names[prototype.source.label],
                "box": _box(prototype.source),
            }
            for prototype in explanation.prototypes
        ],
        "rules": [
            {
                "leaf": rule.leaf,
                "class": names[rule.predicted],
                "probability": round(rule.share, 6),
                "near_uniform": tree.is_unsure(rule.leaf),
                "conditions": [condition(*step) for step in rule.steps],
            }
            for rule in tree.rules
        ],
    }


def _box(match: records.Match) -> list[float]:
    return [round(edge, 2) for edge in match.locations[0].box.edges] if match.locations else []

"""Rules agree with the shape of the tree, and sentences say what the numbers say."""

import json
import re
from dataclasses import replace

from hypothesis import given, settings

from conftest import grow, tree_shapes
from prototree.core.topology import Topology
from prototree.explain.records import Flip, Hiding, Nearer, RunnerUp
from prototree.report import rules_json, rules_text
from prototree.report.text import Reading, headline, hiding_words, listed, plain, runner_up_words, step_words
from sample_explanations import AWKWARD_NAMES, decision, random_topology, tree


@given(tree_shapes)
@settings(max_examples=20, deadline=None)
def test_every_leaf_has_the_rule_of_its_path(shape: list[int]) -> None:
    topology = grow(shape)
    rules = rules_json(tree(topology, n_nearest=0))["rules"]
    assert [rule["leaf"] for rule in rules] == list(range(topology.n_leaves))
    for leaf, rule in enumerate(rules):
        depth = topology.depths[leaf]
        expected = zip(topology.paths[leaf][:depth].tolist(), topology.goes_right[leaf][:depth].tolist(), strict=True)
        assert [(one["node"], one["present"]) for one in rule["conditions"]] == list(expected)


def test_text_says_what_is_there_and_what_is_not() -> None:
    text = rules_text(tree(Topology.full(2), names=("Wren", "Owl", "Jay", "Kite")))
    assert 'lacks 0, “long "beak" <b>” → Wren (90 %)' in text
    assert 'has “long "beak" <b>”; lacks 0 → Owl (90 %)' in text
    assert "has 0; lacks 2 → Jay (90 %)" in text
    assert "has 0, 2 → no clear class" in text  # the last leaf is nearly uniform
    assert "prototype 2: images/class_2/photo_34.jpg (Jay), pixels" in text


def test_rules_are_valid_json_with_names_as_they_are() -> None:
    explained = tree(random_topology(12), names=AWKWARD_NAMES)
    told = json.loads(json.dumps(rules_json(explained), allow_nan=False))
    assert told["classes"][: len(AWKWARD_NAMES)] == list(AWKWARD_NAMES)
    assert [rule["near_uniform"] for rule in told["rules"]] == [False] * 12 + [True]


def test_a_rule_in_text_stays_on_one_line() -> None:
    lines = rules_text(tree(random_topology(8), names=AWKWARD_NAMES)).split("\n")
    assert len([line for line in lines if "→" in line]) == 9
    assert plain("a\x00b\tc\nd\x1b[31m") == "a b c d [31m"


def test_what_lies_below_is_said_with_number_and_names() -> None:
    reading = Reading(tree(Topology.full(3), names=("A", "B", "C", "D", "E", "F", "G")))
    assert reading.below_words(1) == "4 classes: A, B, C, D"
    assert reading.below_words(0) == "7 classes: A, B, C and 4 more"
    assert reading.below_words(~2) == "C"
    assert reading.below_words(~7) == "no clear class"


def test_sentences() -> None:
    assert hiding_words(Hiding(0.98, 0.31, 0.92)) == (
        "Hiding this box lowers the similarity from 0.98 to 0.31; hiding a random box of the same size: to 0.92."
    )
    assert "not tested" in hiding_words(None)
    assert listed(["a", "b", "c", "d"]) == "a, b, c, d"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    needed = runner_up_words(RunnerUp(1, (Flip(0, 0.42, 0.61), Flip(3, 0.8, 0.4))), ("Wren", "Owl"))
    assert needed.startswith("For Owl to win instead, at prototype 0 the similarity would have to rise from 0.42 to")
    assert "prototype 3 the similarity would have to fall from 0.80 to 0.40" in needed
    assert "No change" in runner_up_words(None, ("Wren",))


def test_a_change_is_never_from_a_number_to_itself() -> None:
    for flip, words in (
        (Flip(0, 0.224, 0.221), "fall from 0.224 to 0.221"),
        (Flip(0, 0.49996, 0.50001), "rise a little from 0.50"),
        (Flip(0, 0.22, 0.220000001), "rise a little from 0.22"),
        (Flip(0, 0.2, 0.8, Nearer(3, 9, 0.41)), "prototype 3 would have to be 0.41 nearer, compared with prototype 9"),
        (Flip(0, 0.2, 0.8, Nearer(3, 9, 0.012)), "prototype 3 would have to be 0.012 nearer"),
        (Flip(0, 0.2, 0.8, Nearer(3, 9, 1e-5)), "prototype 3 would have to be a little nearer"),
    ):
        said = runner_up_words(RunnerUp(1, (flip,)), ("Wren", "Owl"))
        assert words in said
        numbers = re.search(r"from (\S+) to (\S+)\.", said)
        assert numbers is None or numbers[1] != numbers[2]


def test_what_another_class_would_have_needed_is_said_by_question() -> None:
    steps = decision(tree(Topology.full(2), question="pairwise")).paths["greedy"].steps
    last = steps[-1]
    other = next(side for side in last.sides if side is not last.chosen)
    flip = Flip(last.node, 0.2, 0.8, Nearer(other.prototype, last.chosen.prototype, 0.41))
    said = runner_up_words(RunnerUp(1, (flip,)), ("Wren", "Owl"), steps)
    assert said == "For Owl to win instead, at question 2 the other patch would have to be 0.41 nearer."
    steps = decision(tree(Topology.full(2))).paths["greedy"].steps
    said = runner_up_words(RunnerUp(0, (Flip(steps[0].node, 0.42, 0.61),)), ("Wren",), steps)
    assert said == "For Wren to win instead, at question 1 the similarity would have to rise from 0.42 to 0.61."


def test_a_headline_counts_the_path_that_is_shown() -> None:
    explained = tree(Topology.full(2))
    accuracy = {"soft": 0.84, "max_path": 0.83, "greedy": 0.821}
    assert headline(replace(explained, accuracy=accuracy)) == "82.1 % of test photos right"
    assert headline(replace(explained, accuracy={})) == ""


def test_rules_of_a_choice_say_rather_this_than_that() -> None:
    explained = tree(Topology.full(2), names=("Wren", "Owl", "Jay", "Kite"), question="pairwise")
    text = rules_text(explained)
    assert 'more like 3 than 0, more like 4 than “long "beak" <b>” → Wren (90 %)' in text
    assert 'more like 3 than 0, more like “long "beak" <b>” than 4 → Owl (90 %)' in text
    assert "more like 0 than 3, more like 5 than 2 → Jay (90 %)" in text
    assert "prototype 5, left of node 2: images/" in text
    assert not {"has", "lacks", "present", "absent"} & set(text.split())
    told = rules_json(explained)
    assert told["question"] == "pairwise"
    assert told["rules"][1]["conditions"] == [
        {"node": 0, "goes_right": False, "rather": 3, "than": 0},
        {"node": 1, "goes_right": True, "rather": 1, "than": 4},
    ]
    assert [(one["prototype"], one["node"], one["side"]) for one in told["prototypes"]][3:] == [
        (3, 0, "left"), (4, 1, "left"), (5, 2, "left"),
    ]  # fmt: skip


def test_a_step_in_words() -> None:
    decided = decision(tree(Topology.full(2), question="pairwise"))
    first, second = decided.paths["max_path"].steps
    assert step_words(first) == "nearer to 3 (0.40) than to 0 (1.10)"
    assert step_words(second) == 'nearer to “long "beak" <b>” (0.40) than to 4 (1.14)'
    assert first.left is not None
    nowhere = replace(first, left=replace(first.left, in_reach=False, distance=1.1002))
    assert step_words(nowhere) == "nearer to 3 (1.1002) than to 0 (1.1000); neither is close"
    present = decision(tree(Topology.full(2))).paths["max_path"].steps
    assert [step_words(step) for step in present] == ["absent", "present"]

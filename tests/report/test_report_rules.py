"""Rules agree with the shape of the tree, and sentences say what the numbers say."""

import json

from hypothesis import given, settings

from conftest import grow, tree_shapes
from prototree.explain.records import Flip, Hiding, RunnerUp
from prototree.report import rules_json, rules_text
from prototree.report.words import Reading, hiding_words, listed, plain, runner_up_words
from prototree.tree.topology import Topology
from sample_explanations import AWKWARD_NAMES, random_topology, tree


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

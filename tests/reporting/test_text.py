"""Rules agree with the shape of the tree, and sentences say what the numbers say."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings

from conftest import grow, tree_shapes
from prototree.core.topology import Topology
from prototree.explanation.records import Counterfactual, Flip, Nearer, NodeKind
from prototree.reporting.text import flip_text, plain, rules_json, rules_text, runner_up_text, step_text
from sample_explanations import AWKWARD_NAMES, decision, random_topology, tree

BIRDS = ("Wren", "Owl", "Jay", "Kite")
NOTE = '“long "beak" <b>”'


@given(tree_shapes)
@settings(max_examples=20, deadline=None)
def test_every_leaf_has_the_rule_of_its_path(shape: list[int]) -> None:
    topology = grow(shape)
    rules = rules_json(tree(topology, n_nearest=0))["rules"]
    assert [rule["leaf"] for rule in rules] == list(range(topology.n_leaves))
    for leaf, rule in enumerate(rules):
        depth = topology.depths[leaf]
        nodes, goes_right = topology.paths[leaf][:depth] + 1, topology.goes_right[leaf][:depth]
        expected = list(zip(nodes.tolist(), goes_right.tolist(), strict=True))
        assert [(condition["node"], condition["goes_right"]) for condition in rule["conditions"]] == expected


RULES: dict[NodeKind, tuple[str, ...]] = {
    "presence": (f"lacks 1, {NOTE} → Wren", f"has {NOTE}; lacks 1 → Owl", "has 1; lacks 3 → Jay", "has 1, 3 →"),
    "pairwise": (f"1L than 1R, more like 2L than {NOTE} → Wren", "more like 1R than 1L, more like 3L than 3R → Jay"),
}


@pytest.mark.parametrize(("kind", "patches"), [("presence", "1 2 3"), ("pairwise", "1L 1R 2L 2R 3L 3R")])
def test_rules_name_patches_by_the_number_of_their_node(kind: NodeKind, patches: str) -> None:
    text = rules_text(tree(Topology.full(2), names=BIRDS, node_kind=kind))
    assert all(rule in text for rule in RULES[kind])
    assert " ".join(re.findall(r"^(\d+[LR]?)\b.*: images/", text, re.MULTILINE)) == patches


def test_rules_as_json_have_names_as_they_are() -> None:
    explained = tree(random_topology(12), names=AWKWARD_NAMES, node_kind="pairwise")
    rules = json.loads(json.dumps(rules_json(explained), allow_nan=False))
    assert rules["classes"][: len(AWKWARD_NAMES)] == list(AWKWARD_NAMES)
    assert [rule["near_uniform"] for rule in rules["rules"]] == [False] * 12 + [True]
    assert rules["node_kind"] == "pairwise"
    first = rules["rules"][0]["conditions"][0]
    nearer, farther = ("1R", "1L") if first["goes_right"] else ("1L", "1R")
    assert first == {"node": 1, "goes_right": first["goes_right"], "nearer": nearer, "farther": farther}
    last = rules["prototypes"][-1]
    assert (last["patch"], last["node"], last["side"], last["prototype_row"]) == ("12L", 12, "left", 23)


def test_a_rule_in_text_stays_on_one_line() -> None:
    lines = rules_text(tree(random_topology(8), names=AWKWARD_NAMES)).split("\n")
    assert len([line for line in lines if "→" in line]) == 9
    assert plain("a\x00b\tc\nd\x1b[31m\udc80\uffff") == "a b c d [31m"


@pytest.mark.parametrize(
    ("flip", "expected"),
    [
        (Flip(0, 0.224, 0.221), "fall from 0.224 to 0.221"),
        (Flip(0, 0.49996, 0.50001), "rise a little from 0.50"),
        (Flip(3, 0.42, 0.61), "at question 4 the similarity would have to rise from 0.42 to 0.61"),
        (Flip(3, 0.2, 0.8, Nearer(3, 9, 0.41)), "4R would have to be 0.41 nearer, compared with 4L"),
        (Flip(3, 0.8, 0.2, Nearer(9, 3, 0.012)), "4L would have to be 0.012 nearer, compared with 4R"),
        (Flip(3, 0.2, 0.8, Nearer(3, 9, 1e-5)), "4R would have to be a little nearer"),
    ],
)
def test_a_change_names_the_node_and_never_goes_from_a_number_to_itself(flip: Flip, expected: str) -> None:
    text = flip_text(flip)
    assert expected in text
    numbers = re.search(r"from (\S+) to (\S+)", text)
    assert numbers is None or numbers[1] != numbers[2]
    assert "Owl" in runner_up_text(Counterfactual(1, (flip,)), BIRDS)
    assert runner_up_text(None, BIRDS)


def test_a_name_from_right_to_left_moves_no_numbers() -> None:
    step = decision(tree(Topology.full(2), node_kind="pairwise")).paths["max_path"].steps[0]
    assert step.left is not None
    named = replace(step, left=replace(step.left, note="כנף"), right=replace(step.right, note="red wing"))
    assert step_text(named) == "more like “\u2068כנף\u2069” (0.40) than “red wing” (1.10)"


def test_a_step_in_words() -> None:
    first, second = decision(tree(Topology.full(2), node_kind="pairwise")).paths["max_path"].steps
    assert step_text(first) == "more like 1L (0.40) than 1R (1.10)"
    assert step_text(second) == f"more like {NOTE} (0.40) than 2L (1.14)"
    assert first.left is not None
    nowhere = replace(first, left=replace(first.left, in_radius=False, distance=1.1002))
    assert step_text(nowhere).startswith("more like 1L (1.1002) than 1R (1.1000); ")
    present = decision(tree(Topology.full(2))).paths["max_path"].steps
    assert [step_text(step) for step in present] == ["absent", "present"]

"""The page, the list and the JSON of decisions say what was measured, and no more."""

import html
import json
from dataclasses import replace
from typing import get_args

import pytest

import sample_explanations
from prototree.core.topology import Topology
from prototree.explanation.records import UNKNOWN, Abstention, Method, NodeKind
from prototree.reporting import asset
from prototree.reporting.decision_page import decision_body, decision_json, decision_page, index_entry, index_page
from sample_explanations import AWKWARD_NAMES, decision, tree, vote


def test_decision_json_has_the_paths_and_the_trees_of_a_vote() -> None:
    explained = tree(Topology.full(3), names=AWKWARD_NAMES)
    data = json.loads(json.dumps(decision_json(decision(explained)), allow_nan=False))
    assert list(data["paths"]) == ["greedy", "max_path"]
    path = data["paths"]["greedy"]
    assert [(step["node"], step["goes_right"]) for step in path["steps"]] == [(1, False), (2, False), (4, False)]
    assert data["prediction"] == data["predicted_class"] == path["predicted_class"] == AWKWARD_NAMES[0]
    assert data["label"] == AWKWARD_NAMES[0]
    changes = [{"node": 1, "p_right": 0.42, "needed": 0.61}]
    assert data["counterfactuals"] == {"greedy": {"class": AWKWARD_NAMES[1], "changes": changes}, "max_path": None}
    step = path["steps"][0]
    assert (step["left"], step["right"]["patch"], step["right"]["prototype_row"]) == (None, "1", 0)
    test = {"before": 0.98, "box_occluded": 0.31, "random_occluded": 0.92}
    assert step["right"]["locations"][0]["occlusion_test"] == test
    voted = decision_json(vote(explained, 2))
    assert (len(voted["trees"]), voted["prediction"]) == (2, AWKWARD_NAMES[0])


def test_decision_json_of_a_pairwise_tree_has_both_sides() -> None:
    data = decision_json(decision(tree(Topology.full(2), node_kind="pairwise")))
    step = data["paths"]["greedy"]["steps"][0]
    assert (data["node_kind"], step["node"], step["goes_right"]) == ("pairwise", 1, False)
    assert [(step[side]["patch"], step[side]["prototype_row"]) for side in ("left", "right")] == [("1L", 3), ("1R", 0)]
    assert (step["left"]["distance"], step["left"]["in_radius"], step["right"]["in_radius"]) == (0.4, True, False)
    (change,) = data["counterfactuals"]["greedy"]["changes"]
    assert change == {"node": 1, "p_right": 0.42, "needed": 0.61, "nearer": "1R", "farther": "1L", "by": 0.31}


@pytest.mark.parametrize("kind", ["presence", "pairwise"])
def test_steps_are_called_by_the_number_of_their_node(kind: NodeKind) -> None:
    decided = decision(tree(Topology.full(3), names=AWKWARD_NAMES, node_kind=kind))
    page = decision_page(decided)
    numbers = ["1, 2, 4"] if kind == "presence" else ["1", "2", "4"]  # absences in a row are one line
    for number in numbers:
        assert f'<b class="number">{"" if "," in number else "Question "}{number}</b>' in page
    assert ("patch 4L" in page) is (kind == "pairwise")


def test_the_most_likely_path_is_on_the_page_only_where_it_ends_elsewhere() -> None:
    decided = decision(tree(Topology.full(2)))
    shown = 'class="way way-max_path"'
    assert shown in decision_page(decided)
    same_end = replace(decided.paths["max_path"], class_probs=decided.paths["greedy"].class_probs)
    agreed = replace(decided, paths={**decided.paths, "max_path": same_end})
    assert shown not in decision_page(agreed)
    assert set(decision_json(agreed)["paths"]) == {"greedy", "max_path"}


def test_confidence_promises_only_what_was_measured() -> None:
    sure = replace(decision(tree(Topology.full(2))), confidence=0.824, n_calibration=100)
    page = decision_page(sure)
    assert page.count("82 %") == 1
    assert "82 of 100" in page
    assert "of 100" not in decision_page(replace(sure, n_calibration=0))


def test_what_was_not_tested_is_said_once_and_a_choice_of_one_method_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    page = decision_page(decision(tree(Topology.full(2))))
    assert page.count("not tested") == 1
    assert 'name="method"' in page
    monkeypatch.setattr(sample_explanations.match, "__defaults__", (("cell",),))
    tested = decision_page(decision(tree(Topology.full(2))))
    assert "not tested" not in tested
    assert 'name="method"' not in tested
    assert 'id="with-heat"' in tested


def test_a_body_names_its_pictures_and_the_nodes_to_edit() -> None:
    decided, names = decision(tree(Topology.full(2))), set[str]()
    body = decision_body(decided, lambda name, picture: str(names.add(name)), node_url=lambda node: f"/edit/{node}")
    assert {"photo", "prototype-0", "piece-0"} <= names
    assert 'href="/edit/1"' in body
    assert decision_body(decided) in decision_page(decided)
    decision_body(vote(tree(Topology.full(2)), 2), lambda name, picture: str(names.add(name)))
    assert {"1-piece-0", "2-piece-0"} <= names


def test_a_tree_that_abstains_says_so_and_why() -> None:
    decided = decision(tree(Topology.full(2), names=AWKWARD_NAMES))
    assert UNKNOWN not in html.unescape(decision_page(decided))
    assert not decision_json(decided)["abstained"]
    for abstention in (Abstention(node=2, distance_ratio=1.84), Abstention()):
        far = replace(decided, abstention=abstention, confidence=None)
        page, data = html.unescape(decision_page(far)), decision_json(far)
        assert f'<h1 id="answer">{UNKNOWN}</h1>' in page
        assert abstention.reason in page
        assert f"<bdi>{AWKWARD_NAMES[0]}</bdi>" in page
        assert "such cases" not in page
        assert (data["prediction"], data["predicted_class"], data["confidence"]) == (None, AWKWARD_NAMES[0], None)
        assert (data["abstained"], data["abstain_reason"]) == (True, abstention.reason)


def test_the_list_of_many_begins_with_the_doubtful_ones() -> None:
    explained = tree(Topology.full(2), names=AWKWARD_NAMES)
    decisions = [replace(decision(explained, i), confidence=0.9 - 0.2 * i, image=f"{i}.jpg") for i in range(3)]
    decisions.append(replace(decisions[0], abstention=Abstention(), confidence=None, image="who.jpg"))
    page = html.unescape(index_page([index_entry(each, "decision.html") for each in decisions]))
    order = [page.index(f"<bdi>{name}.jpg</bdi>") for name in ("who", "2", "1", "0")]
    assert order == sorted(order)
    assert all(part in page for part in (UNKNOWN, "3 of 4", AWKWARD_NAMES[0]))
    assert page.count(" %</b>") == 3, "no percentage where there is no answer"
    voted = vote(explained)
    assert index_entry(voted, "decision.html").confidence == max(voted.class_probs)


@pytest.mark.parametrize("method", get_args(Method))
def test_what_one_way_of_finding_shows_is_hidden_while_another_is_chosen(method: Method) -> None:
    others = [f".by-{other}" for other in get_args(Method) if other != method]
    assert f"body:has(#by-{method}:checked) :is({', '.join(others)})" in asset("decision.css")

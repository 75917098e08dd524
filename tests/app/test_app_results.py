"""Decisions as the API and the Try page tell them, for both kinds of questions."""

from dataclasses import replace

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

from prototree.app.results import result_of
from prototree.core.topology import Topology
from prototree.explain.records import Doubt
from sample_explanations import decision, tree


def test_presence_is_told_as_ever() -> None:
    explained = decision(tree(Topology.full(2)))
    result = result_of(explained, "id", 3)
    told = result.decision
    assert told.question == "presence"
    assert [way.strategy for way in told.ways] == ["greedy", "max_path"]
    assert [way.differs for way in told.ways] == [False, True]
    first, own = told.ways[0].steps[0], explained.paths["greedy"].steps[0]
    assert first.other is None
    assert (first.node, first.present, first.similarity) == (own.node, own.goes_right, own.p_right)
    assert first.words == "absent"
    assert first.box == list(own.right.match.where[0].box.edges)
    assert told.ways[0].needed == [
        explained.class_names[1], "at prototype 0 the similarity would have to rise from 0.42 to 0.61",
    ]  # fmt: skip
    assert result.pictures.keys() >= {"photo", "prototype-0", "patch-0"}


def test_a_choice_has_the_left_patch_beside_the_right_one() -> None:
    explained = decision(tree(Topology.full(2), question="pairwise"))
    result = result_of(explained, "id", 3)
    assert result.decision.question == "pairwise"
    step, own = result.decision.ways[0].steps[0], explained.paths["greedy"].steps[0]
    assert step.other is not None
    assert own.left is not None
    assert (step.node, step.other.number) == (0, 3)
    assert (step.distance, step.other.distance) == (own.right.distance, own.left.distance)
    assert (step.in_reach, step.other.in_reach) == (False, True)
    assert step.other.box == list(own.left.match.where[0].box.edges)
    assert (step.prototype, step.other.prototype) == ("/results/id/prototype-0", "/results/id/prototype-3")
    for address in (step.other.prototype, step.other.patch, step.prototype, step.patch):
        assert address.rsplit("/", 1)[1] in result.pictures
    assert step.words == "nearer to 3 (0.40) than to 0 (1.10)"
    assert result.decision.ways[0].needed[1].startswith("prototype 0 would have to be 0.31 nearer")


def test_a_doubt_is_told() -> None:
    known = decision(tree(Topology.full(2)))
    assert result_of(known, "id", 3).decision.is_known
    told = result_of(replace(known, doubt=Doubt(), confidence=None), "id", 3).decision
    assert not told.is_known
    assert told.doubt == Doubt().reason
    assert told.confidence is None
    assert told.answer == known.class_names[known.answer], "the guess is still there"

"""The page of a decision in a real browser: in short at first, everything at a click, and never taller than agreed."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from browser_pages import NARROW, WIDE, Open, serious_findings
from prototree.core.topology import Topology
from prototree.explain.records import DecisionExplanation, NodeKind, TreeExplanation
from prototree.report import decision_page, index_entry, index_page
from sample_explanations import AWKWARD_NAMES, decision, random_topology, spine, tree, vote

QUESTIONS: tuple[NodeKind, ...] = ("presence", "pairwise")
HEIGHT = "document.documentElement.scrollHeight"


@pytest.fixture(scope="module")
def explained() -> TreeExplanation:
    return tree(random_topology(14, seed=2), names=AWKWARD_NAMES)


@pytest.fixture(scope="module")
def choosing() -> TreeExplanation:
    return tree(random_topology(6, seed=2), names=AWKWARD_NAMES, question="pairwise")


@cache
def distance_p95(question: NodeKind) -> DecisionExplanation:
    """A path of seven questions; where presence is asked, three of them find something."""
    shape = spine(7)
    if question == "presence":  # right at the second, the fifth and the last
        left = [1, ~0, 3, 4, ~1, 6, ~2]
        right = [~3, 2, ~4, ~5, 5, ~6, ~7]
        shape = Topology.from_children(left, right)[0]
    explained = tree(shape, names=("Black-footed Albatross", "Indigo Bunting"), question=question)
    every = (decision(explained, seed) for seed in range(shape.n_leaves))
    return replace(next(one for one in every if len(one.paths["greedy"].steps) == 7), confidence=0.82, n_calibration=90)


@cache
def usual_page(question: NodeKind) -> str:
    """Its page, which takes a while to write."""
    return decision_page(distance_p95(question))


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize(("viewport", "tallest"), [(WIDE, 1200), (NARROW, 2500)], ids=["wide", "phone"])
def test_a_usual_path_is_no_taller_than_this(
    open_page: Open, question: NodeKind, viewport: dict[str, int], tallest: int
) -> None:
    assert len(distance_p95(question).shown_paths[0].steps) == 7
    page = open_page(usual_page(question), viewport)
    page.wait_for_load_state("networkidle")
    assert page.evaluate(HEIGHT) <= tallest
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_one_way_and_one_kind_of_box_at_a_time(open_page: Open, explained: TreeExplanation) -> None:
    decided = decision(explained)
    page = open_page(decision_page(decided))
    steps = {strategy: len(path.steps) for strategy, path in decided.paths.items()}
    unfold(page)
    shown = page.locator(".step:visible")
    assert shown.count() == steps["greedy"]
    page.get_by_role("radio", name="Most likely path").check()
    assert shown.count() == steps["max_path"]
    page.get_by_label("Attribution").check()
    boxes = page.locator(".look .mark:visible")
    assert set(boxes.evaluate_all("list => list.map((b) => b.classList[1])")) == {"by-attribution"}
    assert page.locator(".heat:visible").count() == steps["max_path"]
    page.get_by_label("heat map").uncheck()
    assert page.locator(".heat:visible").count() == 0
    assert AWKWARD_NAMES[0] in page.locator("h1").text_content()


def unfold(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")


def test_absences_are_one_line_that_opens(open_page: Open) -> None:
    page = open_page(usual_page("presence"))
    way = page.locator(".way-greedy")
    lines, present = way.locator(".absences"), way.locator(".steps > li > .step.present")
    n_absent = way.locator(".absences .step").count()
    assert present.count() + n_absent == 7
    assert lines.count() < n_absent
    many = lines.filter(has_text="none of these two").first
    assert many.locator(".absent-ones img").count() == 2
    assert many.locator(".step").first.is_hidden()
    many.locator("summary").first.click()
    assert many.locator(".step").first.is_visible()
    assert "similarity 0.12" in many.locator(".said").nth(1).text_content()


def test_a_step_of_a_choice_shows_the_chosen_patch_large_and_opens_both_sides(
    open_page: Open, choosing: TreeExplanation
) -> None:
    decided = decision(choosing)
    page = open_page(decision_page(decided))
    n_steps = len(decided.paths["greedy"].steps)
    assert page.locator(".choice:visible").count() == n_steps
    first = page.locator(".choice:visible").first
    width = {kind: first.locator(f".short.{kind}").bounding_box()["width"] for kind in ("own", "chosen", "rival")}
    assert width["own"] == width["chosen"] > 1.5 * width["rival"]
    assert first.locator(".side").first.is_hidden()
    first.locator("summary").click()
    assert first.locator(".side:visible").count() == 2
    assert first.locator(".side.nearer:visible").count() == 1
    assert first.locator(".compared figure").count() == 4
    assert "0.40" in first.locator(".side.nearer .distance").text_content()
    assert first.locator(".said").text_content().startswith("nearer to")


def test_the_photos_of_both_sides_are_shown_small_and_at_a_click_with_words(open_page: Open) -> None:
    page = open_page(usual_page("pairwise"))
    first = page.locator(".choice").first
    assert first.locator(".spread-short .mark").is_visible()
    first.locator("summary").click()
    assert "On their side of the line" in first.locator(".spread-full p").text_content()
    phone = open_page(usual_page("pairwise"), NARROW)
    assert phone.locator(".spread-short").first.is_hidden()


def test_in_a_vote_each_tree_has_its_way(open_page: Open, explained: TreeExplanation) -> None:
    page = open_page(decision_page(vote(explained, 3)))
    assert page.locator("details.tree").count() == 3
    second = page.locator("#tree-2")
    second.locator("summary").first.click()
    second.get_by_role("radio", name="Most likely path").check()
    assert second.locator(".way-max_path").is_visible()
    assert page.locator("#tree-1 .way-greedy").is_visible()


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "phone"])
def test_the_list_of_many_fits_and_leads_to_each(
    open_page: Open, explained: TreeExplanation, viewport: dict[str, int]
) -> None:
    entries = [index_entry(decision(explained, seed), f"{seed:04d}/decision.html") for seed in range(5)]
    page = open_page(index_page(entries), viewport)
    assert page.locator(".photo-index a").count() == 5
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


@pytest.mark.parametrize("kind", [*QUESTIONS, "list"])
def test_nothing_keeps_anybody_out(open_page: Open, explained: TreeExplanation, kind: str) -> None:
    if kind == "list":
        source = index_page([index_entry(decision(explained, seed), f"{seed}/decision.html") for seed in range(2)])
    else:
        source = usual_page("pairwise" if kind == "pairwise" else "presence")
    page = open_page(source)
    unfold(page)
    assert serious_findings(page) == []

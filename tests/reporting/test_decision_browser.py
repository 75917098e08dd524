"""The page of a decision in a real browser: in short at first, everything at a click, and never taller than agreed."""

from dataclasses import replace
from functools import cache

import pytest

from browser_pages import NARROW, WIDE, Open, serious_findings
from prototree.core.topology import Topology
from prototree.reporting.decision_page import decision_page, index_entry, index_page
from sample_explanations import AWKWARD_NAMES, decision, random_topology, spine, tree, vote

UNFOLD = "document.querySelectorAll('details').forEach((details) => { details.open = true; })"


@cache
def long_page(kind: str) -> str:
    """The page of seven questions, three of which find something where presence is asked; or a list of photos."""
    shape = spine(7)
    if kind == "presence":  # right at the second, the fifth and the last
        shape = Topology.from_children([1, ~0, 3, 4, ~1, 6, ~2], [~3, 2, ~4, ~5, 5, ~6, ~7])[0]
    explained = tree(shape, names=AWKWARD_NAMES, node_kind="presence" if kind == "presence" else "pairwise")
    decisions = [decision(explained, seed) for seed in range(shape.n_leaves)]
    if kind == "list":
        return index_page([index_entry(each, f"{n:04d}/decision.html") for n, each in enumerate(decisions)])
    long = next(decided for decided in decisions if len(decided.paths["greedy"].steps) == 7)
    return decision_page(replace(long, confidence=0.82, n_calibration=90))


@pytest.mark.parametrize("kind", ["presence", "pairwise", "list"])
@pytest.mark.parametrize(("viewport", "tallest"), [(WIDE, 1200), (NARROW, 2500)], ids=["wide", "phone"])
def test_a_usual_path_fits(open_page: Open, kind: str, viewport: dict[str, int], tallest: int) -> None:
    page = open_page(long_page(kind), viewport)
    page.wait_for_load_state("networkidle")
    assert page.evaluate("document.documentElement.scrollHeight") <= tallest
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    if viewport is NARROW:
        assert page.locator(".histogram-short:visible").count() == 0
    page.evaluate(UNFOLD)
    assert serious_findings(page) == []


def test_one_path_and_one_kind_of_box_at_a_time(open_page: Open) -> None:
    decided = decision(tree(random_topology(14, seed=2), names=AWKWARD_NAMES))
    page = open_page(decision_page(decided))
    n_steps = {strategy: len(path.steps) for strategy, path in decided.paths.items()}
    page.evaluate(UNFOLD)
    shown = page.locator(".step:visible")
    assert shown.count() == n_steps["greedy"]
    page.get_by_role("radio", name="Most likely path").check()
    assert shown.count() == n_steps["max_path"]
    page.get_by_label("Attribution").check()
    boxes = page.locator(".look .mark:visible")
    assert set(boxes.evaluate_all("list => list.map((box) => box.classList[1])")) == {"by-attribution"}
    assert page.locator(".heat:visible").count() == n_steps["max_path"]


def test_steps_open_at_a_click(open_page: Open) -> None:
    page = open_page(long_page("presence"))
    absences = page.locator(".way-greedy .absences")
    n_present = page.locator(".way-greedy .steps > li > .step.present").count()
    assert n_present + absences.locator(".step").count() == 7
    assert absences.first.locator(".step").first.is_hidden()
    absences.first.locator("summary").first.click()
    assert absences.first.locator(".step").first.is_visible()
    page = open_page(long_page("pairwise"))
    first = page.locator(".choice:visible").first
    width = {kind: first.locator(f".short.{kind}").bounding_box()["width"] for kind in ("own", "chosen", "rival")}
    assert width["own"] == width["chosen"] == width["rival"]
    assert first.locator(".side").first.is_hidden()
    first.locator("summary").click()
    assert first.locator(".side:visible").count() == 2
    assert "0.40" in first.locator(".side.nearer .distance").text_content()


def test_in_a_vote_each_tree_has_its_path(open_page: Open) -> None:
    page = open_page(decision_page(vote(tree(random_topology(14, seed=2), names=AWKWARD_NAMES), 3)))
    page.locator("#tree-2 summary").first.click()
    page.locator("#tree-2").get_by_role("radio", name="Most likely path").check()
    assert page.locator("#tree-2 .way-max_path").is_visible()
    assert page.locator("#tree-1 .way-greedy").is_visible()

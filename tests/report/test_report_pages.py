"""Pages as text: self-contained, escaped, complete; and the files of a report."""

import base64
import dataclasses
import html
import json
import re
import sys
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from PIL import Image

from prototree.core.topology import Topology
from prototree.explain.records import UNKNOWN, Doubt, Method, NodeKind, PathExplanation
from prototree.report import (
    asset,
    decision_body,
    decision_json,
    decision_page,
    index_entry,
    index_page,
    script_json,
    show,
    tree_body,
    tree_data,
    tree_html,
    tree_page,
    write_decision,
    write_report,
)  # fmt: skip
from prototree.report.images import HEAT_COLOURS, heat_values, heated, reduced
from sample_explanations import AWKWARD_NAMES, decision, match, picture, random_topology, tree, vote

KINDS = ["tree", "decision", "vote", "choice tree", "choice decision"]
QUESTIONS: tuple[NodeKind, ...] = ("presence", "pairwise")


class Page(HTMLParser):
    """What a browser would see: elements, their attributes, and the text outside of scripts."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.inside: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.inside:
            while self.inside.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        place = next((tag for tag in reversed(self.inside) if tag in ("script", "style")), "body")
        self.text[place] = self.text.get(place, "") + data


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    explained = tree(random_topology(9), names=AWKWARD_NAMES)
    choosing = tree(random_topology(9), names=AWKWARD_NAMES, question="pairwise")
    return {
        "tree": tree_page(explained),
        "decision": decision_page(decision(explained)),
        "vote": decision_page(vote(explained)),
        "choice tree": tree_page(choosing),
        "choice decision": decision_page(decision(choosing)),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_needs_nothing_from_elsewhere(pages: dict[str, str], kind: str) -> None:
    page = Page(pages[kind])
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "data", "action", "srcset"):
            if value := attributes.get(name):
                assert value.startswith(("data:", "#")), (tag, value)
    assert not re.search(r"url\(|@import|https?:", page.text["style"])


@pytest.mark.parametrize("kind", KINDS)
def test_no_inline_handler_or_style(pages: dict[str, str], kind: str) -> None:
    for tag, attributes in Page(pages[kind]).tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_shown_as_text(pages: dict[str, str], kind: str) -> None:
    page = Page(pages[kind])
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert len(scripts) == (2 if "tree" in kind else 0)
    assert not [attributes for _, attributes in page.tags if attributes.get("src") == "x"]
    if "tree" not in kind:
        assert AWKWARD_NAMES[0] in page.text["body"]


def test_data_survives_the_script_element() -> None:
    explained = tree(random_topology(9), names=AWKWARD_NAMES)
    data = tree_data(explained, lambda name, picture: f"pictures/{name}.webp")
    inside = script_json(data)
    assert not set(inside) & set("<>&\u2028\u2029")
    assert json.loads(inside) == json.loads(json.dumps(data))
    assert json.loads(inside)["classes"][:9] == list(AWKWARD_NAMES)


def test_data_has_the_pictures_where_the_caller_wants_them() -> None:
    explained = tree(random_topology(7), n_nearest=2)
    seen: dict[str, tuple[int, ...]] = {}

    def url(name: str, picture: np.ndarray) -> str:
        assert name not in seen
        seen[name] = picture.shape
        return f"/pictures/{name}"

    data = tree_data(explained, url)
    assert len(seen) == 7 * 7 + 8 * 2
    assert data["class_facts"][3]["photos"] == ["/pictures/class-3-0", "/pictures/class-3-1"]
    assert data["class_facts"][7]["taken_for"] == [[0, 1]]
    assert data["nodes"][2]["spread"].startswith("<svg")
    assert data["nodes"][3]["nearest"][1]["crop"] == "/pictures/nearest-3-1"
    assert max(max(shape[:2]) for name, shape in seen.items() if "photo" not in name) <= 176
    assert max(max(shape[:2]) for shape in seen.values()) <= 288


def test_numbers_that_are_none_do_not_spoil_the_json() -> None:
    explained = tree(Topology.full(1))
    broken = explained.prototypes[0].__class__(**{**vars(explained.prototypes[0]), "distance_moved": float("nan")})
    data = tree_data(explained.__class__(**{**vars(explained), "prototypes": (broken,)}), lambda name, picture: "")
    assert json.loads(script_json(data))["nodes"][0]["moved"] is None


def test_a_prototype_that_is_no_patch_is_not_called_one() -> None:
    explained = tree(Topology.full(1))
    learned = explained.prototypes[0].__class__(**{**vars(explained.prototypes[0]), "distance_moved": None})
    data = tree_data(explained.__class__(**{**vars(explained), "prototypes": (learned,)}), lambda name, picture: "")
    assert data["nodes"][0]["projected"] is False
    assert tree_data(explained, lambda name, picture: "")["nodes"][0]["projected"] is True


def test_the_app_gets_the_same_body_and_assets() -> None:
    explained = tree(Topology.full(2))
    assert tree_body(explained) in tree_page(explained)
    assert asset("tree.js") in tree_page(explained)
    decided = decision(explained)
    assert decision_body(decided) in decision_page(decided)
    body = Page(tree_body(explained))
    ids = [attributes["id"] for _, attributes in body.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert "node-extra" in ids


def test_decision_json_tells_the_path() -> None:
    explained = tree(Topology.full(3), names=AWKWARD_NAMES)
    told = json.loads(json.dumps(decision_json(decision(explained)), allow_nan=False))
    assert list(told["paths"]) == ["greedy", "max_path"]
    path = told["paths"]["greedy"]
    assert [step["present"] for step in path["steps"]] == [False, False, False]
    assert path["prediction"] == {"label": 0, "class": AWKWARD_NAMES[0]}
    assert told["runner_up"]["greedy"]["flips"] == [{"node": 0, "similarity": 0.42, "needed": 0.61}]
    assert told["runner_up"]["max_path"] is None
    assert path["steps"][0]["where"][0]["hiding"] == {"before": 0.98, "box_hidden": 0.31, "random_hidden": 0.92}
    voted = decision_json(vote(explained, 2))
    assert len(voted["trees"]) == 2
    assert voted["prediction"]["label"] == 0


def test_decision_json_of_a_choice_tells_what_was_compared() -> None:
    explained = tree(Topology.full(2), question="pairwise")
    told = json.loads(json.dumps(decision_json(decision(explained)), allow_nan=False))
    assert told["question"] == "pairwise"
    step = told["paths"]["greedy"]["steps"][0]
    assert (step["node"], step["goes_right"]) == (0, False)
    assert (step["left"]["prototype"], step["right"]["prototype"]) == (3, 0)
    assert step["left"]["distance"] == 0.4
    assert step["left"]["in_reach"]
    assert not step["right"]["in_reach"]
    assert step["words"] == "nearer to 3 (0.40) than to 0 (1.10)"
    assert step["left"]["where"][0]["method"] == "cell"
    (flip,) = told["runner_up"]["greedy"]["flips"]
    assert flip == {"node": 0, "p_right": 0.42, "needed": 0.61, "nearer": {"prototype": 0, "than": 3, "by": 0.31}}


def test_the_most_likely_path_is_on_the_page_only_where_it_ends_elsewhere() -> None:
    decided = decision(tree(Topology.full(2)))
    assert [path.strategy for path in decided.shown_paths] == ["greedy", "max_path"]
    assert "Most likely path" in decision_page(decided)
    same = dataclasses.replace(decided.paths["greedy"], strategy="max_path")
    agreed = dataclasses.replace(decided, paths={"max_path": same, "greedy": decided.paths["greedy"]})
    assert [path.strategy for path in agreed.shown_paths] == ["greedy"]
    assert "Most likely path" not in decision_page(agreed)
    assert set(decision_json(agreed)["paths"]) == {"greedy", "max_path"}


def test_another_way_to_the_same_answer_is_one_sentence() -> None:
    decided = decision(tree(Topology.full(2)))
    elsewhere = dataclasses.replace(decided.paths["max_path"], class_probs=decided.paths["greedy"].class_probs)
    agreed = dataclasses.replace(decided, paths={**decided.paths, "max_path": elsewhere})
    page = decision_page(agreed)
    assert "reaches the same answer by another route" in page
    assert "Which path through the tree" not in page


def test_confidence_is_said_once_and_promises_only_what_was_measured() -> None:
    decided = decision(tree(Topology.full(2)))
    sure = dataclasses.replace(decided, confidence=0.824, n_calibration=100)
    page = decision_page(sure)
    assert page.count("82 %") == 1
    assert "right in about 82 of 100 such cases" in page
    assert "right in more than 99 of 100" in decision_page(dataclasses.replace(sure, confidence=1.0))
    unmeasured = decision_page(dataclasses.replace(sure, n_calibration=0))
    assert "of 100 such cases" not in unmeasured
    assert "not checked on held-out photos" in unmeasured


def test_what_was_not_tested_is_said_once_and_a_choice_of_one_is_none() -> None:
    decided = decision(tree(Topology.full(2)))
    page = decision_page(decided)
    assert page.count("not tested") == 1
    assert 'name="method"' in page
    only = dataclasses.replace(decided, paths={name: _with_one_box(path) for name, path in decided.paths.items()})
    tested = decision_page(only)
    assert "not tested" not in tested
    assert 'name="method"' not in tested
    assert 'id="with-heat"' in tested


def _with_one_box(path: PathExplanation) -> PathExplanation:
    steps = []
    for step in path.steps:
        found = dataclasses.replace(step.right.match, where=step.right.match.where[:1])
        steps.append(dataclasses.replace(step, right=dataclasses.replace(step.right, match=found)))
    return dataclasses.replace(path, steps=tuple(steps))


def test_a_body_names_its_pictures_for_whoever_keeps_them() -> None:
    seen: dict[str, tuple[int, ...]] = {}

    def url(name: str, picture: np.ndarray) -> str:
        seen[name] = picture.shape
        return f"/pictures/{name}"

    body = decision_body(decision(tree(Topology.full(2))), url, node_url=lambda node: f"/edit/{node}")
    assert {"photo", "prototype-0", "piece-0"} <= seen.keys()
    assert 'href="/pictures/piece-0"' in body
    assert 'href="/edit/1"' in body
    decision_body(vote(tree(Topology.full(2)), 2), url)
    assert {"1-piece-0", "2-piece-0"} <= seen.keys()


def test_pictures_of_larger_trees_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    def pixels() -> int:
        seen: list[int] = []
        tree_data(tree(Topology.full(2)), lambda name, picture: str(seen.append(picture.size)))
        return sum(seen)

    before = pixels()
    monkeypatch.setattr(tree_html, "MOST_LARGE", 1)  # of three prototypes
    assert pixels() == pytest.approx(before / 3, rel=0.05)


def test_the_list_of_many_begins_with_the_doubtful_ones() -> None:
    explained = tree(Topology.full(2), names=AWKWARD_NAMES)
    sure = [dataclasses.replace(decision(explained, i), confidence=0.9 - 0.2 * i, image=f"{i}.jpg") for i in range(3)]
    unknown = dataclasses.replace(sure[0], doubt=Doubt(), confidence=None, image="who.jpg")
    page = index_page([index_entry(one, f"{n}/decision.html") for n, one in enumerate([*sure, unknown])])
    order = [page.index(f"<bdi>{name}.jpg</bdi>") for name in ("who", "2", "1", "0")]
    assert order == sorted(order)
    assert UNKNOWN in html.unescape(page)
    assert page.count(" %</b>") == 3, "no percentage where there is no answer"
    assert "3 of 4 answered" in page
    assert AWKWARD_NAMES[0] in html.unescape(page)
    assert "<script" not in page
    voted = vote(explained)
    entry = index_entry(voted, "0/decision.html")
    assert (entry.confidence, entry.is_known) == (max(voted.class_probs), True)


def test_nothing_is_taken_against_the_odds_on_a_greedy_path() -> None:
    for question in QUESTIONS:
        decided = decision(tree(Topology.full(2), question=question))
        assert "the path as a whole is the most likely" not in decision_page(decided)
        steps = tuple(dataclasses.replace(step, p_right=0.7) for step in decided.paths["max_path"].steps)
        against = dataclasses.replace(decided.paths["max_path"], steps=steps)
        assert any(step.against_odds for step in steps)
        page = decision_page(dataclasses.replace(decided, paths={**decided.paths, "max_path": against}))
        assert "the path as a whole is the most likely" in page


def test_data_of_a_choice_has_both_prototypes() -> None:
    explained, seen = tree(random_topology(4), n_nearest=1, question="pairwise"), set()
    data = tree_data(explained, lambda name, picture: seen.add(name) or name)  # type: ignore[func-returns-value]
    assert data["question"] == "pairwise"
    assert [(node["prototype"], node["other"]["prototype"]) for node in data["nodes"]] == [(n, n + 4) for n in range(4)]
    assert data["nodes"][2]["other"]["crop"] == "crop-6"
    assert len(seen) == 8 * 5 + 5 * 2
    assert tree_data(tree(random_topology(4)), lambda name, picture: name)["nodes"][0]["other"] is None


def test_a_notebook_shows_the_page_in_a_frame_of_its_own() -> None:
    explained = tree(Topology.full(1), names=AWKWARD_NAMES)
    for shown, page in ((show(explained), tree_page(explained)), (show(decision(explained)), None)):
        frame = Page(shown._repr_html_())
        assert [tag for tag, _ in frame.tags] == ["iframe"]
        source = frame.tags[0][1]["srcdoc"]
        assert source == html.unescape(html.escape(page or shown.page))


def test_report_files(tmp_path: Path) -> None:
    written = write_report(tree(Topology.full(2), names=AWKWARD_NAMES), tmp_path / "new" / "report")
    assert sorted(path.name for path in written) == ["index.html", "rules.json", "rules.txt", "tree.pdf", "tree.svg"]
    assert sorted(path.name for path in (tmp_path / "new" / "report").iterdir()) == sorted(p.name for p in written)
    assert json.loads((tmp_path / "new" / "report" / "rules.json").read_text())["rules"]


def test_decision_files(tmp_path: Path) -> None:
    explained = tree(Topology.full(2))
    one = write_decision(decision(explained), tmp_path / "one")
    assert [path.name for path in one] == ["decision.html", "decision.json", "decision.png"]
    several = write_decision(vote(explained, 2), tmp_path / "several", "max_path")
    assert [path.name for path in several][2:] == ["decision-1.png", "decision-2.png"]
    assert several[2].read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_rest_of_a_report_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    written = write_report(tree(Topology.full(1)), tmp_path)
    assert sorted(path.name for path in written) == ["index.html", "rules.json", "rules.txt", "tree.svg"]
    assert "prototree[plot]" in caplog.text


def test_pictures_are_reduced_and_never_empty() -> None:
    assert reduced(picture(0, 400, 100), 96).shape == (24, 96, 3)
    assert reduced(picture(0, 40, 10), 96).shape == (10, 40, 3)
    assert reduced(np.zeros((0, 5, 3), dtype=np.uint8), 96).shape == (1, 1, 3)
    assert reduced(picture(0, 1000, 1), 96).shape == (1, 96, 3)


def test_heat_covers_where_it_is_hot_and_leaves_the_rest() -> None:
    photo, heat = picture(0, 60, 40), np.zeros((4, 6))
    assert (heated(photo, heat) == photo).all()
    heat[1, 4] = 1.0
    difference = np.abs(heated(photo, heat).astype(int) - photo).sum(axis=2)
    assert np.unravel_index(difference.argmax(), difference.shape)[1] // 10 == 4
    assert (difference[:, :10] == 0).all()
    values = heat_values(heat)
    small = np.frombuffer(base64.b64decode(str(values["values"])), np.uint8).reshape(4, 6)
    assert small[1, 4] == 255
    assert small.sum() == 255


def test_heat_grows_lighter_and_stronger() -> None:
    # What is told by lightness and cover alone can be read by people who see few colours.
    lightness = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue, _ in HEAT_COLOURS]
    cover = [colour[3] for colour in HEAT_COLOURS]
    assert lightness == sorted(lightness)
    assert cover == sorted(cover)


def test_pictures_in_a_page_are_webp() -> None:
    page = tree_page(tree(Topology.full(1)))
    first = re.search(r'"crop":"data:image/webp;base64,([^"]+)"', page)
    assert first is not None
    assert Image.open(BytesIO(base64.b64decode(first[1]))).format == "WEBP"


def test_boxes_outside_the_photo_are_cut_off() -> None:
    decided = decision(tree(Topology.full(1)))
    assert match(1, 3).where[0].box.left >= 0
    for tag, attributes in Page(decision_page(decided)).tags:
        if tag == "rect" and attributes.get("class") == "over":
            assert float(attributes["width"] or 0) >= 0


def test_a_tree_that_does_not_know_says_so_and_why() -> None:
    decided = decision(tree(Topology.full(2), names=AWKWARD_NAMES))
    assert UNKNOWN not in html.unescape(decision_page(decided))
    assert decision_json(decided)["is_known"]
    far = dataclasses.replace(decided, doubt=Doubt(node=2, times_usual=1.84), confidence=None)
    page, told = decision_page(far), decision_json(far)
    assert f'<h1 id="answer">{UNKNOWN}</h1>' in html.unescape(page)
    assert "At node 2" in page
    assert "1.8 times as far away as usual" in page
    assert f"The best guess is <bdi>{AWKWARD_NAMES[0]}</bdi>" in html.unescape(page)
    assert "such cases" not in page
    assert told["confidence"] is None
    assert not told["is_known"]
    assert "At node 2" in told["doubt"]
    unsure = dataclasses.replace(decided, doubt=Doubt(), confidence=None)
    assert "No class is far enough ahead" in decision_page(unsure)
    assert "such cases" not in decision_page(unsure)


@pytest.mark.parametrize("method", get_args(Method))
def test_what_one_way_of_finding_shows_is_hidden_while_another_is_chosen(method: Method) -> None:
    others = [f".by-{other}" for other in get_args(Method) if other != method]
    assert f"body:has(#by-{method}:checked) :is({', '.join(others)})" in asset("decision.css")

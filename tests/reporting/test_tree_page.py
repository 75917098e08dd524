"""Pages as text: self-contained, escaped, complete."""

import base64
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO
from typing import get_args

import numpy as np
import pytest
from PIL import Image

from prototree.core.topology import Topology
from prototree.explanation.records import NodeKind
from prototree.reporting import script_json, tree_page
from prototree.reporting.decision_page import decision_page
from prototree.reporting.images import HEAT_COLOURS, data_url, heat_overlay, reduced
from prototree.reporting.tree_page import tree_data
from sample_explanations import AWKWARD_NAMES, decision, picture, random_topology, tree, vote

KINDS = [f"{kind} {page}" for kind in get_args(NodeKind) for page in ("tree", "decision", "vote")]


class Page(HTMLParser):
    """The elements that a browser would see, with their attributes."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.tags = source, list[tuple[str, dict[str, str | None]]]()
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    found: dict[str, Page] = {}
    for kind in get_args(NodeKind):
        explained = tree(random_topology(9), names=AWKWARD_NAMES, node_kind=kind)
        found[f"{kind} tree"] = Page(tree_page.tree_page(explained))
        found[f"{kind} decision"] = Page(decision_page(decision(explained)))
        found[f"{kind} vote"] = Page(decision_page(vote(explained)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_stands_alone_and_shows_names_as_text(pages: dict[str, Page], kind: str) -> None:
    page = pages[kind]
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "data", "action", "srcset"):
            if value := attributes.get(name):
                assert value.startswith(("data:", "#")), (tag, value)
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        assert attributes.get("src") != "x"
        if tag == "rect":
            assert float((attributes["width"] or "").rstrip("%")) >= 0
    styles = "".join(re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL))
    assert not re.search(r"url\(|@import|https?:", styles)
    assert len([tag for tag, _ in page.tags if tag == "script"]) == (2 if "tree" in kind else 0)
    if "tree" not in kind:
        assert AWKWARD_NAMES[0] in html.unescape(page.source)


def test_data_survives_the_script_element() -> None:
    data = tree_data(tree(random_topology(9), names=AWKWARD_NAMES), lambda name, picture: name)
    inside = script_json(data)
    assert not set(inside) & set("<>&\u2028\u2029")
    assert json.loads(inside) == json.loads(json.dumps(data))


def test_data_has_the_pictures_where_the_caller_wants_them() -> None:
    seen: dict[str, int] = {}

    def url(name: str, picture: np.ndarray) -> str:
        assert name not in seen
        seen[name] = max(picture.shape[:2])
        return f"/pictures/{name}"

    data = tree_data(tree(random_topology(7), n_nearest=2), url)
    assert len(seen) == 7 * 7 + 8 * 2
    assert data["class_facts"][3]["photos"] == ["/pictures/class-3-0", "/pictures/class-3-1"]
    assert data["nodes"][3]["nearest"][1]["crop"] == "/pictures/nearest-3-1"
    assert max(side for name, side in seen.items() if "photo" not in name) <= 176
    assert max(seen.values()) <= 288


def test_data_of_a_pairwise_tree_has_both_patches_of_a_node() -> None:
    data = tree_data(tree(random_topology(3), n_nearest=1, node_kind="pairwise"), lambda name, picture: name)
    assert data["node_kind"] == "pairwise"
    patches = [(node["other"]["patch"], node["patch"]) for node in data["nodes"]]
    assert patches == [("1L", "1R"), ("2L", "2R"), ("3L", "3R")]
    assert data["nodes"][2]["other"]["crop"] == "crop-5"


def test_names_typed_on_a_page_belong_to_its_patches() -> None:
    explained = tree(random_topology(3))
    noted = replace(explained, prototypes=tuple(replace(p, note="beak") for p in explained.prototypes))
    first, *others = explained.prototypes
    moved = replace(first, source=replace(first.source, image="other.jpg"))
    other = replace(explained, prototypes=(moved, *others))
    assert tree_page.fingerprint(explained) == tree_page.fingerprint(noted) != tree_page.fingerprint(other)


@pytest.mark.parametrize("moved", [float("nan"), None, 0.2])
def test_what_is_not_known_of_a_prototype_does_not_spoil_the_json(moved: float | None) -> None:
    explained = tree(Topology.full(1))
    prototype = replace(explained.prototypes[0], projection_distance=moved)
    data = tree_data(replace(explained, prototypes=(prototype,)), lambda name, picture: "")
    node = json.loads(script_json(data))["nodes"][0]
    assert node["projected"] is (moved is not None)
    assert node["moved"] == (moved if moved == 0.2 else None)


def test_pictures_of_larger_trees_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[list[int]] = [[], []]
    for most, seen in zip((300, 1), sizes, strict=True):  # of three prototypes
        monkeypatch.setattr(tree_page, "MAX_LARGE", most)
        tree_data(tree(Topology.full(2)), lambda name, picture, seen=seen: str(seen.append(picture.size)))
    assert sum(sizes[1]) == pytest.approx(sum(sizes[0]) / 3, rel=0.05)


def test_pictures_are_reduced_never_empty_and_webp_in_a_page() -> None:
    for size, shape in (((400, 100), (24, 96, 3)), ((40, 10), (10, 40, 3)), ((1000, 1), (1, 96, 3))):
        assert reduced(picture(0, *size), 96).shape == shape
    assert reduced(np.zeros((0, 5, 3), dtype=np.uint8), 96).shape == (1, 1, 3)
    content = base64.b64decode(data_url("name", picture(0, 40, 10)).removeprefix("data:image/webp;base64,"))
    assert Image.open(BytesIO(content)).format == "WEBP"


def test_heat_covers_where_it_is_hot_and_grows_lighter() -> None:
    photo, heat = picture(0, 60, 40), np.zeros((4, 6))
    assert (heat_overlay(photo, heat) == photo).all()
    heat[1, 4] = 1.0
    difference = np.abs(heat_overlay(photo, heat).astype(int) - photo).sum(axis=2)
    assert np.unravel_index(difference.argmax(), difference.shape)[1] // 10 == 4
    assert (difference[:, :10] == 0).all()
    # What is told by lightness alone can be read by people who see few colours.
    lightness = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue, _ in HEAT_COLOURS]
    assert lightness == sorted(lightness)

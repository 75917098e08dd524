"""SVG, PDF and PNG: well formed, complete, not blank, whatever the classes are called."""

import re
from dataclasses import replace
from io import BytesIO
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image, ImageColor

from prototree.core.topology import Topology
from prototree.errors import ShapeError
from prototree.explanation.records import NodeKind
from prototree.reporting.figures import Figure, Rect, _image, _rect, decision_figure, text_width, tree_figure, wrapped
from prototree.reporting.text import TreeText, plain
from sample_explanations import AWKWARD_NAMES, decision, random_topology, spine, tree

SVG = "{http://www.w3.org/2000/svg}"
LEAF = Topology.from_children([], [], root=~0)[0]  # a tree of one leaf
LONG_NAMES = (
    *AWKWARD_NAMES,
    "Donaudampfschifffahrtsgesellschaftskapitänsmöwe",
    "紫水鸡长尾亚种（东北亚）的一个非常长的名字",
    "not a character \uffff",
)


def texts(figure: Figure) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(figure.svg).iter(f"{SVG}text")]


def n_images(figure: Figure) -> int:
    return len(list(ElementTree.fromstring(figure.svg).iter(f"{SVG}image")))


@pytest.mark.parametrize("kind", ["presence", "pairwise"])
@pytest.mark.parametrize("topology", [spine(5), random_topology(8), LEAF])
def test_a_tree_shows_every_prototype_leaf_and_number(topology: Topology, kind: NodeKind) -> None:
    figure = tree_figure(tree(topology, names=AWKWARD_NAMES, node_kind=kind))
    words = texts(figure)
    n_clear = max(topology.n_leaves - 1, 1)  # of several leaves, one says little
    on_lines = 2 * topology.n_nodes if kind == "pairwise" else 0
    assert n_images(figure) == 2 * topology.n_nodes + on_lines + n_clear
    assert words.count("present") == words.count("absent") == (topology.n_nodes if kind == "presence" else 0)
    assert words.count("9 of 10 correct") == n_clear
    assert {str(node + 1) for node in range(topology.n_nodes)} <= set(words)


@pytest.mark.parametrize("kind", ["presence", "pairwise"])
def test_everything_is_inside_the_figure(kind: NodeKind) -> None:
    root = ElementTree.fromstring(tree_figure(tree(random_topology(9), node_kind=kind)).svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for mark in (*root.iter(f"{SVG}image"), *root.iter(f"{SVG}rect")):
        x, y, wide, high = (float(mark.attrib.get(key, "0").rstrip("%")) for key in ("x", "y", "width", "height"))
        assert -24 <= x <= x + wide <= width - 24  # moved by its margin
        assert 0 <= y <= y + high <= height - 72


def test_long_names_leave_the_distances_of_a_decision() -> None:
    explained = decision(tree(Topology.full(2), node_kind="pairwise"))
    path = explained.paths["greedy"]
    step = path.steps[0]
    assert step.left is not None
    name = "a very long name of a patch that nobody can read"
    noted = replace(step, left=replace(step.left, note=name), right=replace(step.right, note=name))
    paths = {"greedy": replace(path, steps=(noted,))}
    words = " ".join(texts(decision_figure(replace(explained, paths=paths))))
    assert "(0.40)" in words
    assert "(1.10)" in words


def test_the_subtree_figure_has_its_levels() -> None:
    explained = tree(Topology.full(4))
    words = texts(tree_figure(explained, 1, 2))
    assert words.count("present") == 3  # nodes 1, 3 and 4 are opened
    assert {"2", "4", "5", "8", "9", "10", "11"} == {word for word in words if word.isdecimal()}
    with pytest.raises(ShapeError):
        tree_figure(explained, 15, 2)


def test_no_class_name_is_cut() -> None:
    explained = tree(Topology.full(4), len(LONG_NAMES), names=LONG_NAMES)
    reading, words = TreeText(explained), texts(tree_figure(explained))
    assert not [word for word in words if word.endswith("…")]
    together = "".join("".join(words).split())
    for predicted in {rule.predicted for rule in reading.rules if not reading.is_unsure(rule.leaf)}:
        assert "".join(plain(explained.class_names[predicted]).split()) in together


def test_the_same_tree_gives_the_same_pdf_of_one_page() -> None:
    explained = tree(random_topology(12), names=LONG_NAMES, n_nearest=0)
    first, second = tree_figure(explained).pdf(), tree_figure(explained).pdf()
    assert first == second
    assert len(re.findall(rb"/Type ?/Page\b", first)) == 1
    assert b"/ToUnicode" in first  # text can be selected and searched


def test_a_figure_of_any_size_has_a_picture_and_a_page() -> None:
    large = Figure.of("large", 30_000.0, 20_000.0, _rect(Rect(0.0, 0.0, 15_000.0, 20_000.0), "#00ff00"))
    assert Image.open(BytesIO(large.png(600))).size == (600, 400)
    box = re.search(rb"/MediaBox ?\[ ?0 0 ([\d.]+) ([\d.]+)", large.pdf())
    assert box is not None
    assert float(box[1]) <= 14_400  # points, beyond which viewers refuse it


def test_pictures_stand_where_they_should() -> None:
    photo = np.zeros((40, 60, 3), dtype=np.uint8)
    photo[:20, :, 0] = 255  # red above
    photo[20:, :30, 2] = 255  # blue below on the left, black on the right
    body = _image(Rect(10.0, 20.0, 60.0, 40.0), photo) + _rect(Rect(150.0, 10.0, 40.0, 20.0), "#00ff00")
    page = Image.open(BytesIO(Figure.of("pictures", 200.0, 100.0, body).png(200))).convert("RGB")
    assert page.size == (200, 100)
    points = {(170, 20): "lime", (5, 5): "white", (40, 28): "red", (22, 52): "blue", (58, 52): "black"}
    for at, colour in points.items():
        assert np.abs(np.array(page.getpixel(at)) - ImageColor.getrgb(colour)).max() < 12, at  # JPEG


@pytest.mark.parametrize("kind", ["presence", "pairwise"])
@pytest.mark.parametrize("topology", [spine(6), LEAF])
def test_the_figure_of_a_path_is_complete_and_not_blank(topology: Topology, kind: NodeKind) -> None:
    decided = decision(tree(topology, names=AWKWARD_NAMES, node_kind=kind))
    figure, steps = decision_figure(decided, "max_path"), decided.paths["max_path"].steps
    words = texts(figure)
    titles = " ".join(words)
    assert all(f"Question {step.node + 1}: " in titles for step in steps)
    said = "similarity" if kind == "presence" else "your image"
    assert len([word for word in words if word.startswith(said)]) == len(steps)
    if kind == "pairwise":
        assert words.count("more alike") == words.count("the other") == len(steps)
    image = Image.open(BytesIO(figure.png())).convert("RGB")
    assert image.size == pytest.approx((2 * figure.width, 2 * figure.height), abs=1)
    assert len(np.unique(np.asarray(image).reshape(-1, 3), axis=0)) > 1000
    with pytest.raises(ShapeError):
        decision_figure(decided, "soft")


def test_text_is_wrapped_within_its_width() -> None:
    for name in LONG_NAMES:
        lines = wrapped(name, 11.0, 96.0, 3)
        assert 1 <= len(lines) <= 3
        assert all(text_width(line, 11.0) <= 96.0 for line in lines)
        assert plain(name).startswith(lines[0].rstrip("…"))

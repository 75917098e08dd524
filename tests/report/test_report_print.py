"""SVG, PDF and PNG: well formed, complete, not blank, whatever the classes are called."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from prototree.core.topology import Topology
from prototree.errors import MissingExtraError, ShapeError
from prototree.report import decision_drawing, decision_png, lettering, printing, subtree_svg, tree_pdf, tree_svg
from prototree.report.lettering import BASE, families_for, missing_words
from prototree.report.marks import Anchor, Block, Drawing, Label, PhotoMark, text_width, wrapped
from prototree.report.text import Reading, plain
from prototree.report.tree_print import PAGE_HEIGHT, PAGE_WIDTH, pages
from sample_explanations import AWKWARD_NAMES, decision, random_topology, spine, tree

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("topology", [Topology.full(3), spine(5), random_topology(15)])
def test_svg_shows_every_prototype_and_leaf(topology: Topology) -> None:
    svg = tree_svg(tree(topology, names=AWKWARD_NAMES))
    root = ElementTree.fromstring(svg)
    assert len(list(root.iter(f"{SVG}image"))) == 2 * topology.n_nodes + topology.n_leaves - 1  # one says little
    words = texts(svg)
    assert words.count("present") == words.count("absent") == topology.n_nodes
    assert words.count("9 of 10 right") == topology.n_leaves - 1
    assert not list(root.iter(f"{SVG}script"))
    assert any("طائر" in word for word in words)


def test_svg_is_inside_its_frame() -> None:
    root = ElementTree.fromstring(tree_svg(tree(random_topology(20))))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for mark in (*root.iter(f"{SVG}image"), *root.iter(f"{SVG}rect")):
        if "x" in mark.attrib:
            x, y, wide, high = (float(mark.attrib[key]) for key in ("x", "y", "width", "height"))
            assert 0 <= x <= x + wide <= width
            assert 0 <= y <= y + high <= height


def test_a_tree_of_one_leaf_can_be_drawn(tmp_path: Path) -> None:
    lonely = tree(Topology.from_children([], [], root=~0)[0], names=("Wren",))
    assert "Wren" in texts(tree_svg(lonely))
    tree_pdf(lonely, tmp_path / "tree.pdf")
    assert (tmp_path / "tree.pdf").read_bytes().startswith(b"%PDF-")


def test_the_subtree_figure_has_its_levels_and_says_what_follows() -> None:
    explained = tree(Topology.full(4))
    svg = subtree_svg(explained, 1, 2)
    words = texts(svg)
    assert words.count("present") == 3  # prototypes 1, 3 and 4 are opened
    assert words.count("…") == 4
    assert words.count("2 classes") == 4
    with pytest.raises(ShapeError, match="a node from 0 to 14"):
        subtree_svg(explained, 15, 2)


def test_pdf_has_overview_subtrees_and_index(tmp_path: Path) -> None:
    explained = tree(random_topology(40), names=AWKWARD_NAMES, n_nearest=0)
    drawn = pages(explained)
    path = tmp_path / "tree.pdf"
    tree_pdf(explained, path)
    content = path.read_bytes()
    assert content.startswith(b"%PDF-")
    assert content.rstrip().endswith(b"%%EOF")
    assert len(re.findall(rb"/Type /Page\b", content)) == len(drawn)
    assert {(page.width, page.height) for page in drawn} == {(PAGE_WIDTH, PAGE_HEIGHT)}
    smallest = min(mark.size for page in drawn for mark in page.marks if isinstance(mark, Label))
    assert 0.94 * 0.75 * smallest >= 7  # points, as `printing` has them


def test_pages_lead_on_to_the_right_page_and_the_index_names_every_class() -> None:
    explained = tree(random_topology(60, seed=3), n_nearest=0)
    drawn = [[mark.text for mark in page.marks if hasattr(mark, "text")] for page in pages(explained)]
    followed = 0
    for number, words in enumerate(drawn, 1):
        for word in words:
            if found := re.fullmatch(r"→ page (\d+)", word):
                followed += 1
                assert int(found[1]) > number
                assert f"From page {number}" in drawn[int(found[1]) - 1]
    assert followed > 5
    index = [word for words in drawn for word in words if words[0].startswith("Classes")]
    assert {f"Class {k}" for k in range(60)} <= set(index)


def test_everything_on_a_page_is_on_the_paper() -> None:
    for page in pages(tree(random_topology(40), names=AWKWARD_NAMES, n_nearest=0)):
        for mark in page.marks:
            if hasattr(mark, "width"):
                assert mark.x >= 0
                assert mark.x + mark.width <= PAGE_WIDTH
                assert mark.y + mark.height <= PAGE_HEIGHT


LONG_NAMES = (
    *AWKWARD_NAMES,
    "Donaudampfschifffahrtsgesellschaftskapitänsmöwe",
    "紫水鸡长尾亚种（东北亚）的一个非常长的名字",
)


def test_no_class_name_is_cut() -> None:
    explained = tree(Topology.full(4), len(LONG_NAMES), names=LONG_NAMES)
    drawings = [texts(tree_svg(explained))]
    drawings.append([mark.text for page in pages(explained)[1:] for mark in page.marks if isinstance(mark, Label)])
    for words in drawings:
        assert not [word for word in words if word.endswith("…")]
        told = "".join("".join(words).split())
        for label in {rule.label for rule in Reading(explained).rules if not Reading(explained).is_unsure(rule.leaf)}:
            assert "".join(plain(explained.class_names[label]).split()) in told


def test_a_font_that_was_installed_since_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matplotlib keeps a list of fonts, and does not look again."""
    from fontTools.ttLib import TTFont
    from matplotlib import font_manager

    font = TTFont(font_manager.findfont(BASE))
    for table in font["cmap"].tables:
        table.cmap = {ord("鳥"): "A"} if table.isUnicode() else {}
    for record in font["name"].names:
        record.string = "Lately"
    font.save(tmp_path / "lately.ttf")
    known = [one for one in font_manager.fontManager.ttflist if one.name == BASE]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", known)
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(tmp_path / "lately.ttf")])
    lettering._families.cache_clear()
    assert families_for(["鳥"]) == [BASE, "Lately"]
    lettering._families.cache_clear()


def test_a_font_is_found_or_named(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    assert families_for(["Öwl", "σ", "птица", "طائر"]) == [BASE]
    assert missing_words(["鳥", "ก"]) == (
        "no font on this machine has ก 鳥, which are boxes in print; install Noto Sans CJK and Noto Sans Thai and "
        "write the report again"
    )
    assert families_for(["\U0001e2c0"])[0] == BASE  # a script that hardly any machine has a font for
    families_for(["\U0001e2c0"])  # what was said once is not said again
    assert len([record for record in caplog.records if "no font" in record.message]) <= 1


def test_the_same_tree_gives_the_same_pdf(tmp_path: Path) -> None:
    explained = tree(Topology.full(2))
    for name in ("one.pdf", "two.pdf"):
        tree_pdf(explained, tmp_path / name)
    assert (tmp_path / "one.pdf").read_bytes() == (tmp_path / "two.pdf").read_bytes()


@pytest.mark.parametrize("topology", [Topology.full(3), spine(12), Topology.from_children([], [], root=~0)[0]])
def test_png_of_a_path_is_not_blank(topology: Topology) -> None:
    decided = decision(tree(topology, names=AWKWARD_NAMES))
    image = decision_png(decided, "max_path")
    pixels = np.asarray(image)
    assert image.mode == "RGB"
    assert pixels.std() > 10
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 1000
    drawing = decision_drawing(decided, "max_path")
    assert image.size == (round(2 * drawing.width), round(2 * drawing.height))
    words = texts(drawing.svg("path"))
    assert len([word for word in words if word.startswith("similarity")]) == len(decided.paths["max_path"].steps)


@pytest.mark.parametrize("kind", ["png", "pdf"])
def test_pictures_and_marks_stand_where_they_should(tmp_path: Path, kind: str) -> None:
    photo = np.zeros((40, 60, 3), dtype=np.uint8)
    photo[:20, :, 0] = 255  # red above
    photo[20:, :30, 2] = 255  # blue below on the left, black on the right
    block = Block(150.0, 10.0, 40.0, 20.0, fill="#00ff00")
    drawing = Drawing(
        200.0, 100.0, (PhotoMark(10.0, 20.0, 60.0, 40.0, photo), block, PhotoMark(120.0, 50.0, 60.0, 40.0, photo))
    )
    if kind == "png":
        page = printing.image(drawing, 1.0)
    else:
        (tmp_path / "one.pdf").write_bytes(printing.pdf([drawing], "one"))
        try:
            command = ["pdftoppm", "-r", "96", "-png", "-singlefile", tmp_path / "one.pdf", tmp_path / "one"]
            subprocess.run(command, check=True, timeout=3600)
        except FileNotFoundError:
            pytest.skip("needs pdftoppm")
        with Image.open(tmp_path / "one.png") as opened:
            page = opened.convert("RGB")
    assert page.size == (200, 100)
    for x, y in ((10, 20), (120, 50)):
        assert page.getpixel((x + 30, y + 10)) == (255, 0, 0)
        assert page.getpixel((x + 15, y + 30)) == (0, 0, 255)
        assert page.getpixel((x + 45, y + 30)) == (0, 0, 0)
    assert page.getpixel((170, 20)) == (0, 255, 0)
    assert page.getpixel((5, 5)) == (255, 255, 255)


def test_text_is_anchored_as_in_svg() -> None:
    anchors: tuple[Anchor, ...] = ("start", "middle", "end")
    for anchor in anchors:
        page = printing.image(Drawing(200.0, 40.0, (Label(100.0, 25.0, "HHHHHH", 14.0, anchor=anchor),)), 1.0)
        rows, columns = np.nonzero(np.asarray(page).min(axis=2) < 128)
        found = {"start": columns.min(), "middle": (columns.min() + columns.max()) / 2, "end": columns.max()}[anchor]
        assert abs(found - 100) <= 3
        assert abs(rows.max() - 24) <= 1  # letters stand on the baseline


def test_a_path_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ShapeError, match="greedy, max_path"):
        decision_png(decision(tree(Topology.full(2))), "soft")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"prototree\[plot\]"):
        printing.pdf([], "title")


@pytest.mark.parametrize("name", AWKWARD_NAMES)
def test_text_is_wrapped_within_its_width(name: str) -> None:
    lines = wrapped(name, 11.0, 96.0, 3)
    assert 1 <= len(lines) <= 3
    assert all(text_width(line, 11.0) <= 96.0 for line in lines)
    assert plain(name).startswith(lines[0].rstrip("…"))


def test_drawing_names_no_tensor_library() -> None:
    folder = Path(printing.__file__).parent
    assert not [path for path in folder.rglob("*.py") if re.search(r"^\s*(import|from) torch", path.read_text(), re.M)]


def test_pages_of_the_pdf_can_be_rendered(tmp_path: Path) -> None:
    path = tmp_path / "tree.pdf"
    tree_pdf(tree(Topology.full(2)), path)
    try:
        subprocess.run(["pdftoppm", "-r", "20", "-png", path, tmp_path / "page"], check=True, timeout=3600)
    except FileNotFoundError:
        pytest.skip("needs pdftoppm")
    assert len(list(tmp_path.glob("page*.png"))) == 3


def test_a_choice_is_drawn_with_both_patches(tmp_path: Path) -> None:
    explained = tree(Topology.full(2), names=("Wren", "Owl", "Jay", "Kite"), question="pairwise")
    svg = tree_svg(explained)
    assert len(list(ElementTree.fromstring(svg).iter(f"{SVG}image"))) == 6 + 6 + 3  # on cards, at lines, of classes
    words = texts(svg)
    assert "present" not in words
    assert texts(subtree_svg(explained, 0, 1)).count("…") == 2
    tree_pdf(explained, tmp_path / "tree.pdf")
    assert (tmp_path / "tree.pdf").read_bytes().startswith(b"%PDF-")
    drawn = pages(tree(random_topology(40), names=AWKWARD_NAMES, n_nearest=0, question="pairwise"))
    for page in drawn:
        for mark in page.marks:
            if hasattr(mark, "width"):
                assert mark.x >= 0
                assert mark.x + mark.width <= PAGE_WIDTH
                assert mark.y + mark.height <= PAGE_HEIGHT


def test_a_step_of_a_choice_marks_the_nearer_patch() -> None:
    drawing = decision_drawing(decision(tree(Topology.full(2), question="pairwise")), "greedy")
    words = [mark.text for mark in drawing.marks if hasattr(mark, "text")]
    assert words.count("nearer: 0.40") == 2
    assert "1.10" in words
    assert decision_png(decision(tree(Topology.full(2), question="pairwise")), "greedy").width > 100

"""The page of a tree in a real browser: no error, no request, and everything can be found, opened and read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browser_pages import NARROW, WIDE, Open, drawn, serious_findings
from prototree.core.topology import Topology
from prototree.explanation.records import TreeExplanation
from prototree.reporting.layout import LEAF_SIZE, NODE_SIZE, arrange
from prototree.reporting.tree_page import tree_page
from sample_explanations import AWKWARD_NAMES, random_topology, tree

SHOW = "(node) => document.dispatchEvent(new CustomEvent('prototree:show', { detail: { node } }))"
LISTEN = "document.addEventListener('prototree:select', (event) => { window.heard = event.detail; })"


@pytest.fixture(scope="module")
def presence() -> TreeExplanation:
    return tree(random_topology(14, seed=2), names=AWKWARD_NAMES)


@pytest.fixture(scope="module")
def pairwise() -> TreeExplanation:
    return tree(random_topology(6, seed=2), names=AWKWARD_NAMES, node_kind="pairwise")


def card(page: Any, id_: int) -> Any:
    return page.locator(f'.card[data-id="{id_}"]')


def find(page: Any, name: str) -> None:
    page.keyboard.press("/")
    page.keyboard.insert_text(name)
    page.keyboard.press("Enter")


def press(page: Any, key: str, times: int = 1) -> None:
    for _ in range(times):
        page.keyboard.press(key)
    drawn(page)


def test_positions_and_sizes_on_the_page_are_those_of_the_figure(open_page: Open, presence: TreeExplanation) -> None:
    page = open_page(tree_page(presence))
    if page.evaluate("document.querySelectorAll('.card').length") < 29:  # it began with families
        page.locator("#fold-all").click()
    press(page, "0")
    corners = page.evaluate("""Object.fromEntries([...document.querySelectorAll(".card")].map((card) => {
        const matrix = new DOMMatrix(card.style.transform);
        return [card.dataset.id, [matrix.e, matrix.f, card.offsetWidth, card.offsetHeight]];
    }))""")
    sheet = json.loads(page.locator("#map").get_attribute("data-sheet"))
    sizes = {id_: NODE_SIZE if id_ >= 0 else LEAF_SIZE for id_ in range(-15, 14)}
    cards = arrange(presence.left, presence.right, sizes.__getitem__, sheet=(float(sheet[0]), float(sheet[1]))).cards
    expected = {str(id_): pytest.approx([c.x, c.y, c.width, c.height], abs=0.01) for id_, c in cards.items()}
    assert corners == expected


def test_any_name_can_be_found_and_is_shown_as_text(open_page: Open, presence: TreeExplanation) -> None:
    page = open_page(tree_page(presence))
    for label, name in enumerate(AWKWARD_NAMES):
        page.locator("#query").fill(name.strip("\x00\t").split("\x00")[0])
        page.locator(f'#found [data-label="{label}"]').click()
        assert page.locator("#panel-title").text_content() == name
        assert page.locator(".rule").count() >= 1
        assert page.locator("#panel script, #panel img[src=x]").count() == 0


def test_search_shows_the_rules_that_lead_to_a_class(open_page: Open) -> None:
    names = ("Wren", "Öwl", "Jay", "Ħanżira tal-baħar")
    page = open_page(tree_page(tree(Topology.full(3), names=names)))
    page.locator("#query").fill("hanzira")  # letters that only look like others
    assert page.locator("#found [role=option]").all_text_contents() == [names[3]]
    page.keyboard.press("Escape")
    find(page, "owl")
    assert page.locator("#panel-title").text_content() == "Öwl"
    assert "9 of 10 correct" in page.locator(".score").text_content()
    assert page.locator(".confused .link").all_text_contents() == ["Jay", "Wren"]  # taken for, and wrongly called so
    turns = page.locator(".rule .way li").evaluate_all("list => list.map((item) => item.className)")
    assert turns == ["absent", "absent", "present"]


def test_a_click_opens_everything_known_about_a_node(open_page: Open, presence: TreeExplanation) -> None:
    page = open_page(tree_page(presence))
    page.evaluate(LISTEN)
    card(page, 1).click()
    assert page.locator("#panel-title").text_content() == "Question 2"
    assert page.locator(".asked").text_content() == 'Is “long "beak" <b>” in the image?'
    assert page.evaluate("window.heard") == {"node": 1}
    assert card(page, 1).locator(".number").text_content() == "2"
    assert page.locator(".nearest li").count() == 3
    assert "from 0.98 to 0.31" in page.locator(".where .words").text_content()
    painted = page.locator(".look canvas")
    assert painted.evaluate("c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v > 0)")
    sections = page.locator("#panel-body h3").all_text_contents()
    assert sections.index("Most similar training patches") < sections.index("Is the box right?")
    assert page.locator(".histogram").count() == 0
    page.locator(".more-of-it summary").first.click()
    page.locator(".histogram").wait_for()
    assert page.locator(".grid li").count() == 3
    page.evaluate(SHOW, 2)
    assert page.locator("#panel-title").text_content() == "Question 3"


def test_the_panel_covers_nothing_below_the_question_that_was_clicked(
    open_page: Open, presence: TreeExplanation
) -> None:
    page = open_page(tree_page(presence))
    card(page, 0).click()
    page.wait_for_timeout(600)  # longer than the tree takes to move
    panel = page.locator("#panel").bounding_box()
    for child in (presence.left[0], presence.right[0]):
        box = card(page, child).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= panel["x"]
    before = page.evaluate("document.getElementById('world').style.transform")
    card(page, 1).click()
    page.wait_for_timeout(600)
    assert page.evaluate("document.getElementById('world').style.transform") == before, "it is in view already"


def test_a_pairwise_node_shows_two_patches_by_number(open_page: Open, pairwise: TreeExplanation) -> None:
    page = open_page(tree_page(pairwise))
    page.evaluate(LISTEN)
    data = page.evaluate("JSON.parse(document.getElementById('tree-data').textContent).nodes[0]")
    shown = card(page, 0).locator(".context img:not(.light)").evaluate_all("list => list.map((image) => image.src)")
    assert shown == [data["other"]["context"], data["context"]]
    turn = card(page, pairwise.right[0]).locator(".turn img")
    assert turn.get_attribute("src") == data["crop"]  # the line has its picture
    card(page, 1).click()
    assert page.evaluate("window.heard") == {"node": 1, "pair": True}
    page.locator(".more-of-it summary").first.click()
    page.locator(".histogram").wait_for()
    for part, number in ((".look", 2), (".nearest li", 6), (".grid li", 6), (".histogram", 1), (".name-form", 0)):
        assert page.locator(f"#panel {part}").count() == number
    names = page.locator("#panel .of-two h4 b").all_text_contents()
    assert names == ["2L", "2R", "2L", "2R"]  # left to right, of the nearest patches and of the boxes
    assert page.locator(".edges .absent").count() == 0
    find(page, pairwise.class_names[3])
    assert page.locator(".rule .way .than").count() == page.locator(".rule .way li").count() > 0
    page.locator("#show-key").click()
    assert page.locator(".couplet h2 b").all_text_contents() == ["1", "2", "3", "4", "5", "6"]


def test_keys_walk_along_the_tree(open_page: Open) -> None:
    page = open_page(tree_page(tree(Topology.full(3))))
    for key, node in (("ArrowRight", 2), ("ArrowLeft", 5), ("ArrowUp", 2)):
        page.keyboard.press(key)
        assert page.evaluate("Number(document.activeElement.dataset.id)") == node
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowRight")
    assert page.locator("#panel-title").text_content() == "Question 7"
    page.keyboard.press("Escape")
    assert page.locator("#panel").is_hidden()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize(("kind", "viewport"), [("presence", NARROW), ("pairwise", WIDE)], ids=["narrow", "wide"])
def test_nothing_keeps_anybody_out(open_page: Open, kind: Any, viewport: dict[str, int]) -> None:
    """What axe-core calls serious or worse: names of controls, contrast, roles, order."""
    page = open_page(tree_page(tree(Topology.full(3), names=AWKWARD_NAMES, node_kind=kind)), viewport)
    states = {
        "list": lambda: page.locator("#show-key").click(),
        "tree": lambda: page.locator("#show-map").click(),
        "node": lambda: page.evaluate(SHOW, 1),
        "class": lambda: find(page, "parrot"),
        "found": lambda: page.locator("#query").fill("parrot"),
        "not found": lambda: page.locator("#query").fill("no such class"),
    }
    for state, show in states.items():
        show()
        drawn(page)
        assert serious_findings(page) == [], state
        width = page.evaluate("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)")
        assert width <= viewport["width"], state


def test_folding_hides_what_is_below(open_page: Open) -> None:
    page = open_page(tree_page(tree(Topology.full(3))))
    card(page, 1).locator(".fold").click()
    assert page.locator(".card").count() == 9
    assert card(page, 1).get_attribute("aria-expanded") == "false"
    find(page, "Class 0")  # what is found is unfolded
    assert card(page, ~0).is_visible()


def test_zoom_and_drag(open_page: Open) -> None:
    page = open_page(tree_page(tree(Topology.full(3))))
    view = "(({ a, e, f }) => [a, e, f])(new DOMMatrix(document.getElementById('world').style.transform))"
    zoom, x, y = page.evaluate(view)
    press(page, "+")
    assert page.evaluate(view)[0] > zoom
    press(page, "0")
    page.mouse.move(300, 700)
    page.mouse.down()
    page.mouse.move(360, 740, steps=4)
    page.mouse.up()
    drawn(page)
    assert page.evaluate(view) == pytest.approx([zoom, x + 60, y + 40], abs=1)
    assert page.locator("#panel").is_hidden()  # a drag is no click


def middle(page: Any, id_: int) -> float:
    box = card(page, id_).bounding_box()
    return float(box["x"] + box["width"] / 2)


def test_left_is_left_and_the_root_is_in_the_middle(open_page: Open) -> None:
    explained = tree(Topology.full(3), node_kind="pairwise")
    page = open_page(tree_page(explained))
    assert middle(page, 0) == pytest.approx(700, abs=2)
    for node, (left, right) in enumerate(zip(explained.left, explained.right, strict=True)):
        assert middle(page, left) < middle(page, node) < middle(page, right)
    card(page, 0).focus()
    for key, sign in (("ArrowLeft", -1), ("ArrowUp", 1), ("ArrowRight", 1)):
        before = page.evaluate("document.activeElement.getBoundingClientRect().x")
        page.keyboard.press(key)
        assert sign * (page.evaluate("document.activeElement.getBoundingClientRect().x") - before) > 0, key


def test_a_large_tree_opens_as_families_and_shows_the_path_to_a_class(open_page: Open) -> None:
    names = tuple(
        f"{word}-{number} {family}" for number in range(20) for word, family in (("Red", "Wren"), ("Blue", "Owl"))
    )
    explained = tree(random_topology(39, seed=3), names=names, n_nearest=0)
    page = open_page(tree_page(explained))
    families = page.locator(".card.folded")
    assert 3 <= families.count() <= page.locator(".card").count() <= 30
    scale = page.evaluate("new DOMMatrix(document.getElementById('world').style.transform).a")
    assert scale >= 0.69
    assert page.locator(".folded .faces-of img").count() >= families.count()
    assert "×" in "".join(families.locator(".members").all_text_contents())
    largest = max(families.all(), key=lambda each: int(each.locator(".family b").text_content().split()[0]))
    node = int(largest.get_attribute("data-id"))
    largest.click()  # a family opens, and what does not fit is folded instead
    drawn(page)
    assert "folded" not in card(page, node).get_attribute("class")
    find(page, "Blue-7 Owl")
    drawn(page)
    end = next(~leaf for leaf in range(40) if explained.leaf_probs[leaf].argmax() == names.index("Blue-7 Owl"))
    way = page.locator(".card.on:not(.folded)").evaluate_all("list => list.map((each) => Number(each.dataset.id))")
    assert end in way
    assert page.locator(".card:not(.folded, .leaf)").count() == len(way) - 1  # all else is folded
    page.locator("#fold-all").click()
    drawn(page)
    assert families.count() == 0


def test_a_side_is_named_on_the_page(open_page: Open, pairwise: TreeExplanation) -> None:
    beak = next(p for p in pairwise.prototypes if (p.node, p.side) == (2, "left"))
    prototypes = tuple(replace(p, part="beak") if p is beak else p for p in pairwise.prototypes)
    page = open_page(tree_page(replace(pairwise, prototypes=prototypes)))
    card(page, 2).click()
    label = page.locator("label[for='name-3L']")
    assert "has no name yet" in label.text_content()
    suggested = page.locator(".invitation", has=label).locator(".suggestion .link")
    assert "not checked" in page.locator(".invitation", has=label).locator(".suggestion").text_content()
    suggested.click()
    name = page.locator("#name-3L").input_value()
    assert name == suggested.text_content()
    page.locator(".invitation", has=label).get_by_role("button", name="Keep").click()
    assert page.locator(".asked").text_content() == f"More like “{name}” or 3R?"
    assert card(page, 2).locator(".caption").text_content() == name
    with page.expect_download() as download:
        page.locator("#save-names").click()
    notes = json.loads(Path(download.value.path()).read_text())
    assert notes == {"2R": 'long "beak" <b>', "3L": name}
    page.locator("#saved-names button").click()
    page.locator("#show-key").click()
    assert name in page.locator("#key-2").text_content()
    page.reload()
    assert card(page, 2).locator(".caption").text_content() == name  # kept by the browser until it is saved
    stored = "JSON.parse(Object.entries(localStorage).find(([key]) => key.includes('prototree names'))[1])"
    assert page.evaluate(stored) == {"3L": {"name": name, "instead_of": ""}}
    older = "localStorage[key] = localStorage[key].replace(':\"\"', ':\"bill\"')"
    page.evaluate(f"for (const key of Object.keys(localStorage)) {older}")
    page.reload()
    assert card(page, 2).locator(".caption").count() == 0  # the run's own name has changed since
    assert page.evaluate("Object.keys(localStorage).some((key) => key.includes('prototree names'))") is False


def test_a_link_opens_its_question(open_page: Open, pairwise: TreeExplanation) -> None:
    page = open_page(tree_page(pairwise))
    page.evaluate("location.hash = '#question-4'")
    page.locator("#panel-title", has_text="Question 4").wait_for()


@pytest.mark.slow
def test_very_many_cards_are_one_drawing_that_opens_like_cards(open_page: Open) -> None:
    page = open_page(tree_page(tree(random_topology(300, seed=1), n_nearest=0)))
    page.locator("#fold-all").click()  # all of them, without families
    count = "(many) => document.querySelectorAll('.card').length === many"
    page.keyboard.press("0")
    page.locator("#mosaic").wait_for()
    page.wait_for_function(count, arg=1)  # the one that keys go on from
    page.keyboard.press("ArrowRight")  # somewhere else than at the root
    box = page.locator(".card:focus:not([data-id='0'])").bounding_box()
    page.keyboard.press("Home")
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator(".card.selected").wait_for()
    page.wait_for_function(count, arg=2)  # with the way to it
    press(page, "+", 5)
    page.locator("#mosaic").wait_for(state="hidden")
    assert page.locator(".card").count() < 120  # only what is near the view is in the document


def test_dark_follows_the_system_and_print_is_white(open_page: Open, presence: TreeExplanation) -> None:
    page = open_page(tree_page(presence), color_scheme="dark")
    brightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((sum, x) => sum + Number(x), 0)"
    assert page.evaluate(brightness) < 150
    page.emulate_media(media="print")
    assert page.evaluate(brightness) == 3 * 255
    assert page.pdf().startswith(b"%PDF-")
    assert page.locator(".couplet").count() == 14


def test_a_tree_of_one_leaf_has_a_page(open_page: Open) -> None:
    page = open_page(tree_page(tree(Topology.from_children([], [], root=~0)[0], names=("Wren",))))
    card(page, ~0).click()
    assert page.locator("#panel-title").text_content() == "Wren"
    page.locator("#show-key").click()
    assert "Wren" in page.locator("#key").text_content()

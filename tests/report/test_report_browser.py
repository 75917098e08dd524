"""The pages in a real browser: no error, no request, and everything can be found, opened and read."""

from typing import Any

import pytest

from browser_pages import NARROW, WIDE, Open, drawn, serious_findings
from prototree.core.topology import Topology
from prototree.explain.records import TreeExplanation
from prototree.report import decision_page, tree_page
from prototree.report.cards import LEAF_SIZE, NODE_SIZE, SPACING
from prototree.report.layout import arrange
from sample_explanations import AWKWARD_NAMES, decision, random_topology, spine, tree, vote


@pytest.fixture(scope="module")
def explained() -> TreeExplanation:
    return tree(random_topology(14, seed=2), names=AWKWARD_NAMES)


def card(page: Any, id_: int) -> Any:
    return page.locator(f'.card[data-id="{id_}"]')


def find(page: Any, name: str) -> None:
    page.keyboard.press("/")
    page.keyboard.insert_text(name)
    page.keyboard.press("Enter")


def test_positions_on_the_page_are_those_of_the_print(open_page: Open, explained: TreeExplanation) -> None:
    page = open_page(tree_page(explained))
    page.keyboard.press("0")
    found = page.evaluate("""Object.fromEntries([...document.querySelectorAll(".card")].map((card) => {
        const place = new DOMMatrix(card.style.transform);
        return [card.dataset.id, [place.e, place.f]];
    }))""")
    aspect = float(page.locator("#map").get_attribute("data-aspect"))
    size = lambda id_: NODE_SIZE if id_ >= 0 else LEAF_SIZE  # noqa: E731
    places = arrange(explained.left, explained.right, size, aspect=aspect, spacing=SPACING).places
    assert found == {str(id_): pytest.approx([place.x, place.y], abs=0.01) for id_, place in places.items()}


def test_cards_have_the_size_the_layout_counts_on(open_page: Open, explained: TreeExplanation) -> None:
    page = open_page(tree_page(explained))
    sizes = page.evaluate("JSON.parse(document.getElementById('tree-data').textContent).sizes")
    for kind in ("node", "leaf"):
        element = page.locator(f".card.{kind}").first
        assert element.evaluate("e => [e.offsetWidth, e.offsetHeight]") == sizes[kind]


@pytest.mark.parametrize("label", range(len(AWKWARD_NAMES)))
def test_any_name_can_be_found_and_is_shown_as_text(open_page: Open, explained: TreeExplanation, label: int) -> None:
    page = open_page(tree_page(explained))
    name = explained.class_names[label]
    page.keyboard.press("/")
    page.keyboard.insert_text(name.strip("\x00\t").split("\x00")[0])
    page.locator(f'#found [data-label="{label}"]').click()
    assert page.locator("#panel-title").text_content() == name
    assert page.locator(".rule").count() >= 1
    assert page.locator(".card.on.leaf").count() >= 1
    assert page.locator("#panel script, #panel img[src=x]").count() == 0


def test_search_shows_the_rules_that_lead_to_a_class(open_page: Open) -> None:
    page = open_page(tree_page(tree(Topology.full(3), names=("Wren", "Öwl", "Jay"))))
    find(page, "owl")  # without the dots
    assert page.locator("#panel-title").text_content() == "Öwl"
    assert 'lacks “long "beak" <b>”' in page.locator(".rule p").first.text_content()
    assert "9 of 10 right (test photos of this class)" in page.locator(".score").text_content()
    assert page.locator(".faces img").count() == 2
    assert page.locator(".confused .link").all_text_contents() == ["Jay", "Wren"]  # taken for, and wrongly called so
    turns = page.locator(".rule .way li").evaluate_all("list => list.map((item) => item.className)")
    assert turns == ["absent", "absent", "present"]
    on = page.locator(".card.on").evaluate_all("list => list.map((item) => Number(item.dataset.id))")
    assert sorted(on) == [~1, 0, 1, 3]
    page.keyboard.press("/")
    page.keyboard.insert_text("nothing is called so")
    assert "no class" in page.locator("#found").text_content()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert page.locator("#panel").is_hidden()


def test_a_click_opens_everything_known_about_a_prototype(open_page: Open, explained: TreeExplanation) -> None:
    page = open_page(tree_page(explained))
    page.evaluate("document.addEventListener('prototree:select', (event) => { window.heard = event.detail; })")
    card(page, 1).click()
    assert page.locator("#panel-title").text_content() == 'long "beak" <b>'
    assert page.evaluate("window.heard") == {"node": 1}
    assert page.locator(".grid li").count() == 3
    assert "On their side of the line" in page.locator("#panel .spread").get_attribute("aria-label")
    assert page.locator(".piece .around rect.over").count() == 1
    assert page.locator(".rows.warm li").count() == 5
    assert "from 0.98 to 0.31" in page.locator(".where .words").text_content()
    page.get_by_role("button", name="Occlusion").click()
    assert "not tested" in page.locator(".where .words").text_content()
    box = page.locator(".look .box .over")
    occlusion = explained.prototypes[1].source.where[2].box
    assert float(box.get_attribute("width")) == pytest.approx(occlusion.width, abs=0.11)
    painted = page.locator(".look canvas")
    assert painted.evaluate("c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v > 0)")
    page.get_by_label("heat map").uncheck()
    assert painted.is_hidden()
    page.evaluate("document.dispatchEvent(new CustomEvent('prototree:show', { detail: { node: 2 } }))")
    assert page.locator("#panel-title").text_content() == "Is this there?"
    assert page.locator("#panel-body").text_content().startswith("Node 2.")


def test_the_app_can_add_controls_of_its_own(open_page: Open, explained: TreeExplanation) -> None:
    page = open_page(tree_page(explained))
    page.evaluate("""document.addEventListener("prototree:select", (event) => {
        document.getElementById("node-extra").append(`about ${event.detail.node}`);
    })""")
    card(page, 0).click()
    page.locator(".lead.present").click()
    right = explained.right[0]
    assert page.locator("#node-extra").text_content() == (f"about {right}" if right >= 0 else "")


def test_keys_walk_along_the_tree(open_page: Open) -> None:
    page = open_page(tree_page(tree(Topology.full(3))))
    focus = "Number(document.activeElement.dataset.id)"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focus) == 2
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(focus) == 5
    page.keyboard.press("ArrowUp")
    assert page.evaluate(focus) == 2
    page.keyboard.press("Enter")
    assert page.locator("#panel-title").text_content() == "Is this there?"
    assert page.locator("#panel-body").text_content().startswith("Node 2.")
    page.keyboard.press("ArrowRight")
    assert page.locator("#panel-body").text_content().startswith("Node 6.")
    page.keyboard.press("Escape")
    assert page.locator("#panel").is_hidden()
    page.keyboard.press("Home")
    assert page.evaluate(focus) == 0
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_opening_a_card_leaves_the_tree_where_it_was(open_page: Open, explained: TreeExplanation) -> None:
    page = open_page(tree_page(explained))
    transform = "document.getElementById('world').style.transform"
    before = page.evaluate(transform)
    card(page, 0).click()
    assert page.locator("#panel").is_visible()
    assert page.evaluate(transform) == before
    page.keyboard.press("Escape")
    assert page.evaluate(transform) == before


def test_the_small_map_and_the_buttons_cover_nothing(open_page: Open, explained: TreeExplanation) -> None:
    page = open_page(tree_page(explained))
    tree_foot = page.locator("#map").bounding_box()
    for thing in ("#overview", ".zoom"):
        assert page.locator(thing).bounding_box()["y"] >= tree_foot["y"] + tree_foot["height"]


def test_from_afar_there_are_photos_and_from_near_there_are_cards(open_page: Open, explained: TreeExplanation) -> None:
    page = open_page(tree_page(explained))
    leaf = card(page, ~0)
    for _ in range(5):
        page.keyboard.press("-")
    drawn(page)
    assert leaf.locator(".face").is_visible()
    assert leaf.locator(".name").is_hidden()
    page.keyboard.press("0")
    drawn(page)
    assert leaf.locator(".name").evaluate("e => getComputedStyle(e).display") != "none"
    assert leaf.locator(".share").text_content() == "9 of 10 right"


@pytest.mark.parametrize("question", ["presence", "pairwise"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nothing_keeps_anybody_out(open_page: Open, question: Any, viewport: dict[str, int]) -> None:
    """What axe-core calls serious or worse: names of controls, contrast, roles, order."""
    page = open_page(tree_page(tree(Topology.full(3), names=AWKWARD_NAMES, question=question)), viewport)
    for state in ("list", "tree", "node", "class"):
        if state == "list":
            page.locator("#show-key").click()
        elif state == "tree":
            page.locator("#show-map").click()
        elif state == "node":
            page.evaluate("document.dispatchEvent(new CustomEvent('prototree:show', { detail: { node: 1 } }))")
        else:
            find(page, "parrot")
        drawn(page)
        assert serious_findings(page) == [], state
    for wanted in ("parrot", "no such class"):
        page.locator("#query").fill(wanted)
        assert serious_findings(page) == [], wanted


def test_letters_that_only_look_like_others_are_found_by_those(open_page: Open) -> None:
    page = open_page(tree_page(tree(Topology.full(1), names=("Ħanżira tal-baħar", "Øresunds skarv"))))
    for written, expected in (("hanzira", "Ħanżira tal-baħar"), ("oresund", "Øresunds skarv")):
        page.locator("#query").fill(written)
        assert page.locator("#found [role=option]").all_text_contents() == [expected]


def test_folding_hides_what_is_below_and_closes_the_gap(open_page: Open) -> None:
    page = open_page(tree_page(tree(Topology.full(3))))
    assert page.locator(".card").count() == 15
    card(page, 1).locator(".fold").click()
    assert page.locator(".card").count() == 9
    assert card(page, 1).get_attribute("aria-expanded") == "false"
    assert card(page, 1).locator(".fold").text_content() == "+ 4"
    width = card(page, 1).evaluate("e => e.offsetWidth")
    assert width == card(page, ~4).evaluate("e => e.offsetWidth")
    find(page, "Class 0")  # what is found is unfolded
    assert card(page, ~0).is_visible()
    page.keyboard.press("Escape")
    card(page, 0).focus()
    page.keyboard.press(" ")
    assert page.locator(".card").count() == 1
    page.locator("#fold-all").click()
    assert page.locator(".card").count() == 15


def test_zoom_by_key_button_and_wheel(open_page: Open) -> None:
    page = open_page(tree_page(tree(Topology.full(3))))

    def zoom() -> float:
        drawn(page)
        return float(page.evaluate("new DOMMatrix(document.getElementById('world').style.transform).a"))

    first = zoom()
    page.keyboard.press("+")
    second = zoom()
    page.locator("#zoom-out").click()
    third = zoom()
    page.mouse.move(500, 500)
    page.evaluate("addEventListener('wheel', () => { document.body.dataset.turned = 'yes'; }, true)")
    page.mouse.wheel(0, -300)
    page.locator("body[data-turned]").wait_for(state="attached")
    fourth = zoom()
    page.keyboard.press("0")
    assert second > first
    assert third == pytest.approx(first)
    assert fourth > third
    assert zoom() == pytest.approx(first)
    before = card(page, 0).bounding_box()
    page.mouse.move(300, 700)
    page.mouse.down()
    page.mouse.move(360, 740, steps=4)
    page.mouse.up()
    drawn(page)
    after = card(page, 0).bounding_box()
    assert (after["x"] - before["x"], after["y"] - before["y"]) == (pytest.approx(60, abs=1), pytest.approx(40, abs=1))
    assert page.locator("#panel").is_hidden()  # a drag is no click


def test_only_what_is_near_the_view_is_in_the_document(open_page: Open) -> None:
    page = open_page(tree_page(tree(random_topology(150, seed=1), n_nearest=0)))
    page.keyboard.press("Home")
    drawn(page)
    for _ in range(4):
        page.keyboard.press("+")
    drawn(page)
    assert page.locator(".card").count() < 120
    page.keyboard.press("0")
    drawn(page)
    assert page.locator(".card").count() == 301


def test_very_many_cards_are_one_drawing_that_opens_like_cards(open_page: Open) -> None:
    page = open_page(tree_page(tree(random_topology(190, seed=1), n_nearest=0)))
    count = "(many) => document.querySelectorAll('.card').length === many"
    page.keyboard.press("0")
    page.locator("#mosaic").wait_for()
    page.wait_for_function(count, arg=1)  # the one that keys go on from
    share = """() => {
        const canvas = document.getElementById("mosaic");
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return data.filter((value, i) => i % 4 === 3 && value > 0).length / (data.length / 4);
    }"""
    assert page.evaluate(share) > 0.1
    page.keyboard.press("ArrowRight")  # somewhere else than at the root
    box = page.locator(".card:focus:not([data-id='0'])").bounding_box()
    page.keyboard.press("Home")
    page.locator(".card:focus[data-id='0']").wait_for()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator("#panel").wait_for()
    page.locator(".card.selected").wait_for()
    page.wait_for_function(count, arg=2)  # with the way to it
    for _ in range(5):
        page.keyboard.press("+")
    page.locator("#mosaic").wait_for(state="hidden")
    page.wait_for_function("() => document.querySelectorAll('.card').length > 2")


def test_dark_follows_the_system_and_the_button(open_page: Open, explained: TreeExplanation) -> None:
    page = open_page(tree_page(explained), color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.locator("#theme").click()
    light = page.evaluate(paper)
    assert sum(map(int, dark[4:-1].split(","))) < 150
    assert sum(map(int, light[4:-1].split(","))) > 600


@pytest.mark.parametrize("kind", ["tree", "decision", "vote", "choice tree", "choice decision"])
def test_a_phone_needs_no_sideways_scrolling(open_page: Open, explained: TreeExplanation, kind: str) -> None:
    choosing = tree(random_topology(5, seed=2), names=AWKWARD_NAMES, question="pairwise")
    source = {
        "tree": lambda: tree_page(explained),
        "decision": lambda: decision_page(decision(explained)),
        "vote": lambda: decision_page(vote(explained)),
        "choice tree": lambda: tree_page(choosing),
        "choice decision": lambda: decision_page(decision(choosing)),
    }[kind]()
    page = open_page(source, NARROW, is_mobile=True, has_touch=True)
    widths = "[document.documentElement.scrollWidth, document.body.scrollWidth]"
    assert max(page.evaluate(widths)) <= NARROW["width"]
    if kind.endswith("tree"):
        page.locator("#show-map").tap()
        card(page, 0).tap()
        assert page.locator("#panel").is_visible()
        assert max(page.evaluate(widths)) <= NARROW["width"]


def test_the_list_leads_from_card_to_card(open_page: Open) -> None:
    page = open_page(tree_page(tree(spine(4), names=AWKWARD_NAMES)))
    page.locator("#show-key").click()
    assert page.locator(".couplet").count() == 4
    assert page.locator("#map").is_hidden()
    page.locator("#key-0 a").click()
    assert page.locator(".couplet h2 b").all_text_contents() == ["1", "2", "3", "4"]  # as in a printed key
    assert page.locator(".couplet:target h2 b").text_content() == "2"
    page.locator("#key-0 .pictures").click()
    assert page.locator("#panel-body").text_content().startswith("Node 0.")


def test_a_tree_of_one_leaf_has_a_page(open_page: Open) -> None:
    page = open_page(tree_page(tree(Topology.from_children([], [], root=~0)[0], names=("Wren",))))
    card(page, ~0).click()
    assert page.locator("#panel-title").text_content() == "Wren"
    page.locator("#show-key").click()
    assert "Every photo is taken for Wren" in page.locator("#key").text_content()


def test_the_page_can_be_printed(open_page: Open, explained: TreeExplanation) -> None:
    page = open_page(tree_page(explained))
    assert page.pdf().startswith(b"%PDF-")
    assert page.locator(".couplet").count() == 14


def test_print_is_on_white_paper_in_the_dark_too(open_page: Open, explained: TreeExplanation) -> None:
    page = open_page(tree_page(explained), color_scheme="dark")
    page.locator("#theme").click()
    page.locator("#theme").click()
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.fixture(scope="module")
def choosing() -> TreeExplanation:
    return tree(random_topology(6, seed=2), names=AWKWARD_NAMES, question="pairwise")


def test_a_choice_shows_two_patches_on_its_card_and_two_prototypes_in_its_panel(
    open_page: Open, choosing: TreeExplanation
) -> None:
    page = open_page(tree_page(choosing))
    page.evaluate("document.addEventListener('prototree:select', (event) => { window.heard = event.detail; })")
    assert card(page, 0).locator(".around img").count() == 2
    assert card(page, 0).evaluate("e => [e.offsetWidth, e.offsetHeight]") == [208, 122]
    pictures = [image.bounding_box()["x"] for image in card(page, 0).locator(".around img").all()]
    data = page.evaluate("JSON.parse(document.getElementById('tree-data').textContent).nodes[0]")
    shown = card(page, 0).locator(".around img").evaluate_all("list => list.map((image) => image.src)")
    assert shown == [data["other"]["around"], data["around"]]
    assert pictures == sorted(pictures)
    right = choosing.right[0]
    assert card(page, right).locator(".turn img").get_attribute("src") == data["crop"]  # the line has its picture
    card(page, 1).click()
    assert page.evaluate("window.heard") == {"node": 1, "pair": True}
    assert page.locator("#panel-title").text_content() == 'the left one or long "beak" <b>?'
    assert page.locator("#panel .of-two").count() == 2
    assert page.locator("#panel .look").count() == 2
    assert page.locator("#panel .grid li").count() == 6
    assert page.locator("#panel .lead").all_text_contents()[0].startswith("more like the left")
    assert page.locator("#panel .spread").count() == 1
    assert page.locator(".edges .absent").count() == 0


def test_a_choice_is_found_read_and_folded_like_any_tree(open_page: Open, choosing: TreeExplanation) -> None:
    page = open_page(tree_page(choosing))
    find(page, choosing.class_names[3])
    assert page.locator(".rule .way .than").count() == page.locator(".rule .way li").count() > 0
    page.keyboard.press("Escape")
    card(page, 1).locator(".fold").click()
    assert card(page, 1).locator(".around img").count() == 2
    page.locator("#show-key").click()
    assert page.locator(".couplet").count() == 6
    assert page.locator("#key-0 .half").count() == 2
    assert page.locator("#key-0 .half").nth(1).text_content().startswith("more like the right")
    page.locator("#key-0 .half .pictures").first.click()
    assert page.locator("#panel .of-two").count() == 2
    assert page.pdf().startswith(b"%PDF-")

"""A real browser on the real server: look, test, edit, undo, save."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app_server import Running, serving, undo
from browser_pages import serious_findings
from prototree.core.nodes import NodeFunction
from prototree.pipeline.fit import fit
from prototree.run import Run
from tiny_editing import content_of, tiny_run
from tiny_training import TINY_DISTILL, write_squares

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")

SHORT = {"pretrain_epochs": 1, "head_epochs": 2, "epochs": 2, "calibration_fraction": 0}


@pytest.fixture
def page(browser: Any, server: Running, client: Any) -> Iterator["sync_api.Page"]:
    context = browser.new_context(viewport={"width": 1280, "height": 860}, base_url=server.address)
    page, errors, requests = context.new_page(), list[str](), list[str]()
    page.on("console", lambda message: errors.append(message.text if message.type == "error" else ""))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda sent: requests.append(sent.url))
    yield page
    while undo(client).status_code == 200:  # so that each test begins with the tree as it was
        pass
    context.close()
    assert not [error for error in errors if error and "409" not in error]
    assert not [url for url in requests if not url.startswith((server.address, "data:", "blob:"))]


def ready(page: "sync_api.Page") -> None:
    page.locator("html[data-ready=yes]").wait_for(state="attached")  # evaluated text would be against the policy


def revision(page: "sync_api.Page") -> int:
    return int(page.evaluate("document.documentElement.dataset.revision"))


def after(page: "sync_api.Page", number: int) -> None:
    page.locator(f"html[data-revision='{number}']").wait_for(state="attached")
    page.locator("#candidates[aria-busy=true]").wait_for(state="detached")


def test_from_exploring_to_a_saved_run(page: "sync_api.Page", run: Run) -> None:
    before, saved_before = content_of(run.folder), len(list(run.folder.parent.glob("run-edited-*")))
    # The tree: open a prototype and go on to edit it.
    page.goto("/")
    page.locator(".card.node[data-id='1']").click()
    page.locator("#node-extra a").click()
    page.wait_for_url(re.compile("/edit/2$"))
    ready(page)
    start = revision(page)
    # A name.
    page.fill("#name-right", "<b>corner</b>")
    page.get_by_role("button", name="Keep", exact=True).click()
    after(page, start + 1)
    page.locator("h1 .note", has_text="<b>corner</b>").wait_for()
    # A patch dragged out of an image.
    page.select_option("#label", label="green")
    page.locator("#images[aria-busy=true]").wait_for(state="detached")
    page.locator("#images .thumb").nth(2).click()
    page.locator("#picker").wait_for()
    page.locator("#stage").scroll_into_view_if_needed()
    frame = page.locator("#stage-image").bounding_box()
    assert frame is not None
    page.mouse.move(frame["x"] + 0.30 * frame["width"], frame["y"] + 0.05 * frame["height"])
    page.mouse.down()
    page.mouse.move(frame["x"] + 0.45 * frame["width"], frame["y"] + 0.20 * frame["height"], steps=4)
    page.mouse.up()
    page.get_by_role("button", name="Use this patch").click()
    after(page, start + 2)
    source = page.request.get("/api/nodes/2").json()["right"]
    # What the page drew is what the server took: the square in row 0, column 1 of 4×4.
    assert (source["patch"], page.request.get("/api/run").json()["classes"][source["image"]["label"]]) == (
        [0, 1],
        "green",
    )
    page.locator("#message", has_text="Replaced.").wait_for()
    assert page.locator("#metrics tbody tr").count() == 1
    assert page.locator("#more-metrics tbody tr").count() == 6
    # The same with the keyboard: one square down.
    page.locator("#stage").press("ArrowDown")
    page.get_by_role("button", name="Use this patch").click()
    after(page, start + 3)
    assert page.request.get("/api/nodes/2").json()["right"]["patch"] == [1, 1]
    # Undo, redo.
    page.get_by_role("button", name="Undo").click()
    after(page, start + 4)
    assert page.request.get("/api/nodes/2").json()["right"]["patch"] == [0, 1]
    page.get_by_role("button", name="Redo").click()
    after(page, start + 5)
    page.locator("body").press("Control+z")
    after(page, start + 6)
    assert page.locator("#history .undone").count() == 1
    # Exclude one of the cluster.
    first = page.locator("#candidates li").first
    name = first.get_attribute("title")
    first.get_by_role("button", name="Exclude").click()
    after(page, start + 7)
    page.locator(f"#candidates li:first-child:not([title='{name}'])").wait_for()
    # Try an image with the tree as it is now.
    page.goto("/test")
    page.locator("button.thumb").first.click()
    page.wait_for_url(re.compile("/test/[^/]+$"))
    assert page.locator(".step").count() >= 2
    # Save.
    page.goto("/edit")
    ready(page)
    page.get_by_role("button", name="Save as a new run").click()
    page.locator("#message", has_text="Saved as").wait_for()
    assert len(list(run.folder.parent.glob("run-edited-*"))) == saved_before + 1
    assert content_of(run.folder) == before, "the original was changed"


def test_removing_leads_back_to_the_list(page: "sync_api.Page") -> None:
    page.goto("/edit/1")
    ready(page)
    number = revision(page)
    page.locator("button.remove").first.click()
    page.wait_for_url(re.compile("/edit$"))
    ready(page)
    assert revision(page) == number + 1
    assert page.locator(".node-list li").count() == 1
    page.get_by_role("button", name="Undo").click()
    page.wait_for_url(re.compile("/edit$"))
    sync_api.expect(page.locator(".node-list li")).to_have_count(3)


def test_a_change_by_somebody_else_is_told(page: "sync_api.Page") -> None:
    page.goto("/edit/2")
    ready(page)
    number = revision(page)
    other = {"revision": number, "edit": {"edit": "note", "node": 1, "text": "other"}}
    assert page.request.post("/api/edits", data=other).ok
    page.fill("#name-right", "mine")
    with page.expect_response("**/api/edits") as answer:
        page.get_by_role("button", name="Keep", exact=True).click()
    assert answer.value.status == 409
    page.locator("#message", has_text="Somebody else").wait_for()
    after(page, number + 1)
    page.get_by_role("button", name="Keep", exact=True).click()
    after(page, number + 2)


def test_images_are_chosen_dropped_and_pasted(page: "sync_api.Page", tmp_path: Path, run: Run) -> None:
    photo = next((run.folder.parent / "squares" / "test").rglob("*.png"))
    page.goto("/test")
    page.set_input_files("#file", photo)
    page.wait_for_url(re.compile("/test/[^/]+$"))
    for event in ("drop", "paste"):
        page.goto("/test")
        page.evaluate(
            """([event, bytes]) => {
                const files = new DataTransfer();
                files.items.add(new File([new Uint8Array(bytes)], "photo.png", { type: "image/png" }));
                const options = { bubbles: true, cancelable: true };
                document.getElementById("drop").dispatchEvent(event === "drop"
                    ? new DragEvent("drop", { ...options, dataTransfer: files })
                    : new ClipboardEvent("paste", { ...options, clipboardData: files }));
            }""",
            [event, list(photo.read_bytes())],
        )
        page.wait_for_url(re.compile("/test/[^/]+$"))
        assert page.locator("#decision").is_visible()


def test_pages_fit_their_width(page: "sync_api.Page") -> None:
    for width, path in itertools.product((1280, 390), ("/", "/test", "/errors", "/edit", "/edit/1", "/api")):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(path)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, path)
    page.goto("/")  # a phone shows the list first
    page.locator("#key-1 .pictures").click()
    page.locator("#node-extra a").wait_for()


def test_nothing_keeps_anybody_out(browser: Any, server: Running) -> None:
    # The pages' policy lets no other script in than their own; the checker is one.
    context = browser.new_context(base_url=server.address, bypass_csp=True)
    page = context.new_page()
    page.goto("/test")
    page.locator("button.thumb").first.click()
    page.wait_for_url(re.compile("/test/[^/]+$"))
    for path in (page.url, "/test", "/errors", "/edit", "/edit/1", "/api"):
        page.goto(path)
        page.wait_for_load_state("networkidle")
        assert serious_findings(page) == [], path
    context.close()


def test_where_two_are_compared_each_can_be_edited(browser: Any, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, NodeFunction("pairwise", 6.0))
    with serving(run.folder, cache=tmp_path) as server:
        page = browser.new_page(base_url=server.address, viewport={"width": 390, "height": 800})
        page.goto("/edit/1")
        ready(page)
        before = page.request.get("/api/nodes/1").json()
        assert page.locator(".side .side-pictures .patch").count() == 2
        left = page.get_by_role("button", name=re.compile(r"^Edit \d+L$"))
        assert left.get_attribute("aria-pressed") == "false"
        left.click()
        page.locator("h2", has_text="What 1L finds").wait_for()
        page.locator("#candidates[aria-busy=false]").wait_for()
        expected = page.request.get("/api/nodes/1/candidates?side=left").json()[2]
        page.locator("#candidates li").nth(2).get_by_role("button", name="Use").click()
        after(page, 1)
        now = page.request.get("/api/nodes/1").json()
        assert (now["left"]["image"]["name"], now["left"]["patch"]) == (expected["image"]["name"], expected["patch"])
        assert now["right"] == before["right"]
        page.locator(f".side[data-side=left] .patch img[src='{now['left']['context']}']").wait_for()
        assert "1L is now a patch of" in page.locator("#history").inner_text()
        for path in ("/edit", "/edit/1", "/errors"):
            page.goto(path)
            page.wait_for_load_state("networkidle")
            page.evaluate(
                "document.querySelectorAll('option').forEach((option) => { option.textContent = 'Long '.repeat(20); })"
            )
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.close()


@pytest.mark.slow
def test_the_network_is_finetuned_at_a_click(browser: Any, tmp_path: Path) -> None:
    photos = write_squares(tmp_path / "squares", train=4, test=4)
    run = fit(photos, tmp_path / "run", settings=TINY_DISTILL | SHORT)
    with serving(run.folder, cache=tmp_path) as server:
        page = browser.new_page(base_url=server.address)
        page.goto("/edit/1")
        ready(page)
        finetune, told = page.get_by_role("button", name="Retrain with these edits"), page.locator("#finetune-state")
        assert finetune.is_disabled(), "there is nothing to train with before the first edit"
        page.fill("#name-right", "square")
        page.get_by_role("article", name="The prototype on the right").get_by_role("button", name="Keep").click()
        after(page, 1)
        finetune.click()
        page.locator("#finetune-state[data-state=running]").wait_for()
        assert finetune.is_disabled()
        page.reload()  # whoever comes back finds it going on, or done
        page.locator("#finetune-state[data-state=opened]").wait_for(
            timeout=3_600_000
        )  # and it goes on with the new run
        assert "run-finetuned-1" in told.inner_text()
        assert re.search(r"[\d.]+ % retrained", told.inner_text())
        assert page.request.get("/api/run").json()["title"] == "run-finetuned-1"
        assert revision(page) > 1, "no revision of the old run is one of the new"
        assert "square" in page.locator("h1").inner_text()
        page.close()
    assert Run(tmp_path / "run-finetuned-1").notes == {0: "square"}

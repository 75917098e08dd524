"""The page of a tree in a real browser: how large it is, how soon it is on screen, and how smoothly it moves.

    python benchmarks/bench_pages.py [--prototypes 200,1000] [--browser chromium]

The trees are made up, with pictures of the usual sizes. On screen: from the start of loading to the first frame after
the tree is drawn. Moving: the tree is dragged about for two seconds at fit zoom, and again close up; frames are counted
by the browser. Processor time is that of all processes of the browser for each frame, which other work on the machine
does not change much: below 33 ms, one core draws 30 frames a second. Chromium draws without a GPU here, so that other
machines do better.
"""

import argparse
import shutil
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from prototree.reporting.tree_page import tree_page

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from sample_explanations import random_topology, tree  # type: ignore[import-not-found]

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
STEPS, SECONDS, SETTLED = 200, 2.0, 4.0
COUNT = """() => { window.frames_seen = []; const tick = (now) => { window.frames_seen.push(now);
    if (window.counting) requestAnimationFrame(tick); }; window.counting = true; requestAnimationFrame(tick); }"""
SHOWN = (
    """() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"""
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prototypes", default="200,1000")
    parser.add_argument("--browser", default="chromium")
    words = parser.parse_args()
    path = shutil.which(words.browser)
    if path is None:
        raise SystemExit(f"expected the browser {words.browser!r} to be installed; choose another with --browser")
    from playwright.sync_api import sync_playwright

    print("| prototypes | page | on screen | whole tree | close up |\n| --- | --- | --- | --- | --- |")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        for count in map(int, words.prototypes.split(",")):
            file = Path(folder) / f"{count}.html"
            file.write_text(tree_page(tree(random_topology(count, seed=1))), encoding="utf-8")
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.goto(file.as_uri())
            shown = page.evaluate(SHOWN)
            page.keyboard.press("0")
            page.wait_for_timeout(1000 * SETTLED)
            whole = smoothness(page)
            for _ in range(6):
                page.keyboard.press("+")
            page.wait_for_timeout(1000 * SETTLED)
            size = file.stat().st_size / 1e6
            print(f"| {count} | {size:.1f} MB | {shown / 1000:.2f} s | {whole} | {smoothness(page)} |")
            page.close()
        browser.close()


def processor_seconds(page: Any) -> float:
    """Of all processes of the browser so far."""
    processes = page.context.browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")
    return float(sum(process["cpuTime"] for process in processes["processInfo"]))


def smoothness(page: Any) -> str:
    """While the tree is dragged about; the slowest tenth of the frames counts, so that a jerk is not averaged away."""
    page.mouse.move(700, 450)
    page.mouse.down()
    page.evaluate(COUNT)
    start = processor_seconds(page)
    for step in range(STEPS):
        page.mouse.move(700 + 300 * ((step % 40) / 40 - 0.5), 450 + 100 * ((step % 25) / 25 - 0.5))
        page.wait_for_timeout(1000 * SECONDS / STEPS)
    page.mouse.up()
    page.evaluate("() => { window.counting = false }")
    seen = page.evaluate("() => window.frames_seen")
    gaps = sorted(later - earlier for earlier, later in pairwise(seen))
    took = (processor_seconds(page) - start) / len(gaps)
    frames = 1000 / max(gaps[int(0.9 * len(gaps))], 1e-9)
    return f"{frames:.0f} frames a second, {1000 * took:.0f} ms of processor time each"


if __name__ == "__main__":
    main()

"""Pictures of the pages for README and docs, of any run: `python benchmarks/screenshots.py runs/demo docs`."""

import argparse
import shutil
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from prototree import Run
from prototree.explanation.decision import explain_image
from prototree.reporting.decision_page import decision_page
from prototree.reporting.export import report

SHOW = "document.dispatchEvent(new CustomEvent('prototree:show', { detail: { node: 0 } }))"


def write(page: Page, path: Path, *, whole: bool = False) -> None:
    """Keep what the page shows as a small WebP."""
    page.wait_for_timeout(600)
    Image.open(BytesIO(page.screenshot(full_page=whole))).convert("RGB").save(path, quality=82, method=6)
    print(f"written: {path}")


def main(run: Run, folder: Path) -> None:
    """Draw the page of the tree, one with an open question, and one of a decision about a test image."""
    data, chromium = run.data(), shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        place = Path(temporary)
        report(run, place)
        (place / "decision.html").write_text(decision_page(explain_image(run, data.test[0].path)), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 900}, reduced_motion="reduce")
        page.goto((place / "index.html").as_uri())
        write(page, folder / "report.webp")
        page.evaluate(SHOW)
        write(page, folder / "node.webp")
        page.goto((place / "decision.html").as_uri())
        write(page, folder / "decision.webp", whole=True)
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Run.open)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    main(arguments.run, arguments.folder)

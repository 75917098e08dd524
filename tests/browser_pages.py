"""Pages from disk in a real browser: at the end there must have been no error and no request for anything else."""

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WIDE, NARROW = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
SECONDS = 600_000  # of patience, in milliseconds

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=path, args=ARGUMENTS, timeout=SECONDS)
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a page from disk."""
    contexts, complaints = [], []

    def opened(source: str, viewport: dict[str, int] = WIDE, **options: Any) -> Any:
        path = tmp_path / f"page-{len(contexts)}.html"
        path.write_text(source, encoding="utf-8")
        context = browser.new_context(viewport=viewport, reduced_motion="reduce", **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(SECONDS)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda sent: complaints.append(sent.url) if not _allowed(sent.url, path) else None)
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def drawn(page: Any) -> None:
    """Waits until what was asked of a page is drawn: it draws in the next frame."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def serious_findings(page: Any) -> list[str]:
    """What axe-core finds on a page that keeps somebody out, each with its first place; in light, then in dark."""
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("needs axe-playwright-python")
    page.evaluate(Path(found.origin).with_name("axe.min.js").read_text(encoding="utf-8"))
    findings = []
    # In the dark only colours are others.
    for scheme, only in (("light", ""), ("dark", 'runOnly: ["color-contrast"], ')):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        options = f"{{ {only}resultTypes: ['violations'] }}"
        violations = page.evaluate(f"axe.run(document, {options}).then((found) => found.violations)")
        findings += [
            f"{scheme}: {one['id']}: {one['nodes'][0]['target']} {one['nodes'][0]['failureSummary']}"
            for one in violations
            if one["impact"] in ("serious", "critical")
        ]
    return findings


def _allowed(url: str, path: Path) -> bool:
    return url.startswith(("data:", "blob:")) or url.split("#")[0] == path.as_uri()

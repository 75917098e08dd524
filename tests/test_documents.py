"""The documents: what they tell people to type works, what they name exists, and the site is built without outside help."""

import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import prototree
from doc_workspace import QUICK, ROOT, blocks, command_lines, quick_python, run_command, trained
from prototree.cli.commands_page import commands_page

sys.path.insert(0, str(ROOT / "tests" / "exchange"))
from hub_server import serving  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # the photos are few
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # the hub client's own
]

DOCS = ROOT / "docs"
RUN = [
    ROOT / "README.md",
    DOCS / "index.md",
    *sorted((DOCS / "tutorials").glob("*.md")),
    *sorted((DOCS / "how-to").glob("*.md")),
    DOCS / "concepts" / "recipes.md",
    DOCS / "explanations.md",
    DOCS / "mending.md",
]
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def is_run(page: Path) -> bool:
    return any(block.is_run and block.language in ("sh", "python") for block in blocks(page.read_text()))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.chdir(folder)
        trained(folder)
    return folder


@pytest.fixture
def workspace(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy to work in, a server that ends at once, and a model hub of our own."""
    folder = tmp_path / "here"
    shutil.copytree(template, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("prototree.web.server.serve", lambda app, listening: None)
    for name, value in (("CACHE", str(tmp_path / "hub")), ("OFFLINE", False), ("DISABLE_XET", True)):
        monkeypatch.setattr(f"huggingface_hub.constants.HF_HUB_{name}", value)
    with serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield folder


@pytest.mark.parametrize("page", [page for page in RUN if is_run(page)], ids=lambda page: page.stem)
def test_what_a_page_says_works(page: Path, workspace: Path) -> None:
    names: dict[str, object] = {"QUICK": QUICK}
    for block in blocks(page.read_text()):
        if not block.is_run:
            continue
        if block.language == "sh":
            for line in command_lines(block.code):
                run_command(line)
        elif block.language == "python":
            exec(compile(quick_python(block.code), str(page), "exec"), names)

"""The documents: what they tell people to type works, what they name exists, and the site is built strictly."""

import doctest
import http.server
import importlib
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch

import prototree
from browser_pages import SECONDS
from doc_workspace import QUICK, ROOT, blocks, command_lines, quick_python, run_command, trained
from prototree.cli.commands_page import commands_page

sys.path.insert(0, str(ROOT / "tests" / "exchange"))
from hub_server import serving

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
    DOCS / "editing.md",
]
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def is_run(page: Path) -> bool:
    return any(block.is_run and block.language in ("sh", "python") for block in blocks(page.read_text()))


@pytest.fixture(scope="module", autouse=True)
def as_users_run_it() -> Iterator[None]:
    """Without the shape checks that only tests have."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.chdir(folder)
        trained(folder)
    return folder


def start_and_stop(app: Any) -> None:
    from starlette.testclient import TestClient

    with TestClient(app):
        pass


@pytest.fixture
def workspace(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy to work in, a server that ends at once, and a model hub of our own."""
    folder = tmp_path / "here"
    shutil.copytree(template, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("prototree.app.server.serve", lambda app, listening: start_and_stop(app))
    for name, value in (("CACHE", str(tmp_path / "hub")), ("OFFLINE", False), ("DISABLE_XET", True)):
        monkeypatch.setattr(f"huggingface_hub.constants.HF_HUB_{name}", value)
    with serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield folder


LONG = {"README", "bias", "paper", "ensemble", "cross-validate", "vote"}  # several trainings each


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=pytest.mark.slow if page.stem in LONG else ())
        for page in RUN
        if is_run(page)
    ],
)
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


def test_one_version_everywhere() -> None:
    assert f"\nversion: {prototree.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{prototree.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def test_the_page_of_commands_is_that_of_the_code() -> None:
    assert (DOCS / "reference" / "commands.md").read_text() == commands_page(), "run: make settings"


def test_extras_that_pages_name_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"pip install '(?:prototree|\.)\[(\w+)\]'", text))
    assert named
    assert named <= set(extras)


def test_files_that_pages_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`((?:src|tests|examples|benchmarks)/[\w/]+\.\w+)", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
        for name in re.findall(r"`((?:tree|training|data|explain|edit|network|pipeline)/\w+\.py)`", page.read_text()):
            assert (ROOT / "src" / "prototree" / name).exists(), f"{page.name} names {name}"


def test_every_public_name_has_an_example_and_is_in_the_reference() -> None:
    listed = re.findall(r"^::: prototree\.[\w.]*?(\w+)$", (DOCS / "reference" / "python.md").read_text(), re.M)
    assert sorted(listed) == sorted(set(prototree.__all__) - {"__version__"})
    for name in listed:
        assert "Examples:\n" in (getattr(prototree, name).__doc__ or ""), name


VERSIONS = {
    "`tree.json`": "core.checkpoint.VERSION",
    "`config.toml`": "config.VERSION",
    "`metrics.json`": "run.METRICS_VERSION",
    "`history.json`": "editing.edits._VERSION",
    "`prototypes/prototypes.json`": "explain.prototype_pictures._VERSION",
    "descriptions of feature maps": "training.extract.VERSION",
}


@pytest.mark.parametrize("start", VERSIONS)
def test_the_versions_of_formats_are_those_of_the_code(start: str) -> None:
    home, _, name = VERSIONS[start].rpartition(".")
    version = getattr(importlib.import_module(f"prototree.{home}"), name)
    lines = (DOCS / "reference" / "formats.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"| {start}")]
    assert line.split("|")[2].strip() == str(version)


RIDDLES = [
    "have spoken", "is cold", "passes dear", "dearer", "learns on with", "learn on with", "left alone", "spine of left",
    "beside random", "moves nothing but", "loses nothing", " a photo each", "one a line", "one a core", "one a photo",
    "leaf a class", "views a second", "images a second", "patch a node", "setting a row", "photos a fold",
    "patch a question", "network looks once", "says how it goes", "the very patch", "what lies about", "own reckoning",
    "trains the network on", "led astray", "when to touch", "no share of right",
]  # fmt: skip


@pytest.mark.parametrize("riddle", RIDDLES)
def test_words_that_stop_readers_are_gone(riddle: str) -> None:
    places = [*PAGES, ROOT / "CHANGELOG.md"]
    places += [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".html", ".js", ".toml")]
    assert not [path.name for path in places if riddle in " ".join(path.read_text().split())]


def explained_names() -> dict[str, object]:
    """What the examples in docstrings take as given: a random tree of three classes, and a batch of maps."""
    torch.manual_seed(0)
    features = prototree.FeatureExtractor(prototree.Backbone("resnet18", None, image_size=64), prototype_dim=16)
    tree = prototree.ProtoTree(prototree.Topology.full(height=2), features, ["cat", "dog", "owl"]).eval()
    tree.leaf_logits.data = torch.tensor([[9.0, 0, 0], [0, 9, 0], [0, 0, 9], [0, 0, 0]])
    paths = sorted(str(path) for path in Path("photos/train").rglob("*.png"))
    batch = {"maps": torch.rand(2, 16, 2, 2), "labels": torch.tensor([0, 1]), "places": torch.tensor([0, 1])}
    names = {name: getattr(prototree, name) for name in prototree.__all__}
    return names | batch | {"tree": tree, "torch": torch, "np": np, "prototree": prototree, "paths": paths}


HEAVY = {"EditSession", "open_session", "fit", "ProtoTreeClassifier", "rerun", "write_report"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in HEAVY else ()) for n in sorted(prototree._HOMES)]
)
def test_the_example_of_a_public_name(name: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = explained_names()
    if name == "ProtoTreeClassifier":
        names["labels"] = [Path(str(path)).parent.name for path in names["paths"]]  # type: ignore[attr-defined]
    if name.startswith("write_"):
        names["Path"] = Path
    text = quick_python(getattr(prototree, name).__doc__)
    names["QUICK"] = QUICK
    example = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    failures: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=failures.append)
    assert not failures, "".join(failures)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs the extra 'docs'")
    pytest.importorskip("mkdocstrings", reason="needs the extra 'docs'")
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loading = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//"
        r"|<link(?![^>]*canonical)[^>]*\shref=[\"']?(?:https?:)?//"
    )
    for page in sorted(site.rglob("*.html")):
        assert not loading.search(page.read_text()), page.name
    for style in sorted(site.rglob("*.css")):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text()), style.name


READER = [  # words that a reader types, the page that answers, and among how many of the first results it must be
    ("own photos", "how-to/train.html", 6),
    ("wrong answer", "how-to/explain.html", 6),
    ("edit", "how-to/edit.html", 6),
    ("predict folder csv", "how-to/predict.html", 1),
    ("export onnx", "how-to/onnx.html", 1),
    ("sharpness", "settings.html", 1),
    ("--sharpness", "settings.html", 1),
    ("similarity function", "reference/maths.html", 1),
]


@pytest.fixture(scope="module")
def search(site: Path, browser: Any) -> Iterator[Callable[[str], list[str]]]:
    """The pages that the site's own search lists, best first."""
    handler = partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base, page = f"http://127.0.0.1:{server.server_port}/", browser.new_page()
        page.set_default_timeout(SECONDS)

        def found(words: str) -> list[str]:
            page.goto(f"{base}index.html")
            page.fill(".md-search__input", words)
            page.wait_for_selector(".md-search-result__item")
            links = page.eval_on_selector_all(".md-search-result__link", "links => links.map((link) => link.href)")
            return [link.removeprefix(base).split("?")[0] for link in links]

        yield found
        page.close()
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name it has in the library)
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("words", "page", "among"), READER)
def test_a_reader_finds_it_with_one_search(
    search: Callable[[str], list[str]], words: str, page: str, among: int
) -> None:
    assert page in search(words)[:among]


@pytest.mark.slow
def test_every_page_is_in_the_menu(site: Path) -> None:
    start = (site / "index.html").read_text()
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")} - {"404.html", "index.html"}
    assert {page for page in built if f'href="{page}"' not in start} == set()

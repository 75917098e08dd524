"""The documents: what they tell people to type works, what they name exists, and the site is built strictly."""

import doctest
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch

import prototree
from doc_workspace import QUICK, ROOT, blocks, command_lines, quick_python, run_command, trained
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.topology import Topology

sys.path.insert(0, str(ROOT / "tests" / "integrations"))
from hub_server import serving

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # the photos are few
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # the hub client's own
]

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
RUN = [
    ROOT / "README.md",
    *(DOCS / name for name in ("index.md", "concepts/recipes.md", "explanations.md", "editing.md")),
    *sorted((DOCS / "tutorials").glob("*.md")),
    *sorted((DOCS / "how-to").glob("*.md")),
]
LONG_PAGES = {  # several trainings each, or a conversion to ONNX
    "README", "bias", "paper", "ensemble", "cross-validate", "vote", "recipes", "inside-a-program", "onnx",
    "scikit-learn", "finetune", "settings", "train-from-python", "photos-to-tree", "network",
}  # fmt: skip
LONG_EXAMPLES = {"EditSession", "cross_validate", "fit", "fit_seeds", "ProtoTreeClassifier", "rerun"}
GENERATED = {DOCS / "settings.md", DOCS / "reference" / "commands.md"}  # by tools/docs_pages.py, when the site is built
FOLDERS = (path.name for path in (ROOT / "src" / "prototree").iterdir() if (path / "__init__.py").exists())
PACKAGES = "|".join(sorted(FOLDERS))


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


def marked(names: Iterable[str], long: set[str]) -> list[Any]:
    return [pytest.param(name, id=name, marks=pytest.mark.slow if Path(name).stem in long else ()) for name in names]


@pytest.mark.parametrize("name", marked((str(page.relative_to(ROOT)) for page in RUN if is_run(page)), LONG_PAGES))
def test_what_a_page_says_works(name: str, workspace: Path) -> None:
    page = ROOT / name
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


def test_extras_that_pages_name_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"pip install '(?:prototree|\.)\[(\w+)\]'", text))
    assert named
    assert named <= set(extras)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_links_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`((?:src|tests|examples|benchmarks|tools)/[\w/]+\.\w+)", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(rf"`((?:{PACKAGES})/\w+\.py)`", text):
        assert (ROOT / "src" / "prototree" / name).exists(), name
    for name in re.findall(r"\]\(([\w./-]+\.\w+)(?:#[\w-]*)?\)", text):
        linked = (page.parent / name).resolve()
        assert linked.exists() or linked in GENERATED, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_of_the_code_on_a_page_exist(page: Path) -> None:
    for name in re.findall(rf"`((?:prototree\.)?(?:{PACKAGES})\.(?!py`)[a-z]\w*[\w.]*)`", page.read_text()):
        parts = name.removeprefix("prototree.").split(".")
        place: Any = importlib.import_module(f"prototree.{parts[0]}")
        for number, part in enumerate(parts[1:], 2):
            if hasattr(place, part):
                place = getattr(place, part)
            else:
                place = importlib.import_module(f"prototree.{'.'.join(parts[:number])}")


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(r"^::: prototree\.[\w.]*?(\w+)$", (DOCS / "reference" / "python.md").read_text(), re.M)
    assert sorted(listed) == sorted(set(prototree.__all__) - {"__version__"})


def explained_names() -> dict[str, object]:
    """What the examples in docstrings take as given: a random tree of three classes, and a batch of maps."""
    torch.manual_seed(0)
    features = FeatureExtractor(Backbone("resnet18", None, image_size=64), prototype_dim=16)
    tree = prototree.ProtoTree(Topology.full(height=2), features, ["cat", "dog", "owl"]).eval()
    tree.leaf_logits.data = torch.tensor([[9.0, 0, 0], [0, 9, 0], [0, 0, 9], [0, 0, 0]])
    paths = sorted(str(path) for path in Path("photos/train").rglob("*.png"))
    batch = {"maps": torch.rand(2, 16, 2, 2), "labels": torch.tensor([0, 1]), "places": torch.tensor([0, 1])}
    names = {name: getattr(prototree, name) for name in prototree.__all__}
    modules = {"torch": torch, "np": np, "prototree": prototree, "Path": Path}
    return names | batch | modules | {"tree": tree, "paths": paths, "QUICK": QUICK}


@pytest.mark.parametrize("name", marked(sorted(set(prototree.__all__) - {"__version__"}), LONG_EXAMPLES))
def test_the_example_of_a_public_name(name: str, workspace: Path) -> None:
    names = explained_names()
    if name == "ProtoTreeClassifier":
        names["labels"] = [Path(str(path)).parent.name for path in names["paths"]]  # type: ignore[attr-defined]
    text = getattr(prototree, name).__doc__
    assert "Examples:\n" in text
    example = doctest.DocTestParser().get_doctest(quick_python(text), names, name, None, 0)
    failures: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.slow
def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the extra 'docs'")
    pytest.importorskip("mkdocstrings", reason="needs the extra 'docs'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    loading = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//"
        r"|<link(?![^>]*canonical)[^>]*\shref=[\"']?(?:https?:)?//"
    )
    for page in sorted((tmp_path / "site").rglob("*.html")):
        assert not loading.search(page.read_text()), page.name
    assert (tmp_path / "site" / "settings.html").exists()
    assert (tmp_path / "site" / "reference" / "commands.html").exists()

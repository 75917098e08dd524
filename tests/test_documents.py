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
from unittest.mock import patch

import jaxtyping
import numpy as np
import pytest
import torch
from fake_hub import use_fake_hub
from starlette.testclient import TestClient

import prototree
from doc_workspace import QUICK, ROOT, blocks, command_lines, quick_python, run_command, trained
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.config import RECIPE_SETTINGS
from prototree.core.topology import Topology
from prototree.training import RECIPES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the photos are few

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
RUN = ("README.md", "index.md", "get-started/*.md", "guides/*.md", "concepts/*.md", "research/*.md", "develop/*.md")
RUN_PAGES = [
    str(page.relative_to(ROOT))
    for page in PAGES
    if any(page.match(pattern) for pattern in RUN)
    and {"sh", "python"} & {language for language, _ in blocks(page.read_text())}
]
LONG_PAGES = {  # several trainings each, or a conversion to ONNX
    "README", "index", "first-tree", "train", "edit", "ensembles", "deploy", "reproduce", "predict",
    "extend", "faithfulness",
}  # fmt: skip
LONG_EXAMPLES = {"EditSession", "cross_validate", "fit", "fit_seeds", "ProtoTreeClassifier", "rerun"}
# Made by tools/docs_pages.py when the site is built.
GENERATED = {DOCS / "reference" / "settings.md", DOCS / "reference" / "commands.md"}
FOLDERS = (path.name for path in (ROOT / "src" / "prototree").iterdir() if (path / "__init__.py").exists())
PACKAGES = "|".join(sorted(FOLDERS))


@pytest.fixture(scope="module", autouse=True)
def as_users_run_it() -> Iterator[None]:
    """Without the shape checks that only tests have, also while the template is made."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        environment.chdir(folder)
        trained(folder)
    return folder


@pytest.fixture
def workspace(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to work in, a server that ends at once, and a model hub of our own."""
    folder = tmp_path / "here"
    shutil.copytree(template, folder)
    monkeypatch.chdir(folder)

    def start_and_stop(app: Any, listening: Any) -> None:
        with TestClient(app):
            pass

    monkeypatch.setattr("prototree.app.server.serve", start_and_stop)
    use_fake_hub(monkeypatch, tmp_path / "hub")
    return folder


def marked(names: Iterable[str], long: set[str]) -> list[Any]:
    return [pytest.param(name, id=name, marks=pytest.mark.slow if Path(name).stem in long else ()) for name in names]


@pytest.mark.parametrize("name", marked(RUN_PAGES, LONG_PAGES))
def test_what_a_page_says_works(name: str, workspace: Path) -> None:
    names: dict[str, object] = {"QUICK": QUICK}
    with patch.dict(RECIPES), patch.dict(RECIPE_SETTINGS):  # an example adds a recipe
        for language, code in blocks((ROOT / name).read_text()):
            if language == "sh":
                for line in command_lines(code):
                    run_command(line)
            elif language == "python":
                exec(compile(quick_python(code), name, "exec"), names)


def test_versions_extras_and_public_names() -> None:
    assert f"\nversion: {prototree.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{prototree.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()
    listed = re.findall(r"^::: prototree\.[\w.]*?(\w+)$", (DOCS / "reference" / "python.md").read_text(), re.M)
    assert sorted(listed) == sorted(set(prototree.__all__) - {"__version__"})
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"pip install '(?:prototree|\.)\[(\w+)\]'", text))
    assert set() < named <= set(extras)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`((?:src|tests|examples|benchmarks|tools)/[\w/]+\.\w+)", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(rf"`((?:{PACKAGES})/\w+\.py)`", text):
        assert (ROOT / "src" / "prototree" / name).exists(), name
    for name in re.findall(r"\]\(([\w./-]+\.\w+)(?:#[\w-]*)?\)", text):
        linked = (page.parent / name).resolve()
        assert linked.exists() or linked in GENERATED, name
    for name in re.findall(rf"`((?:prototree\.)?(?:{PACKAGES})\.(?!py`)[a-z]\w*[\w.]*)`", text):
        parts = name.removeprefix("prototree.").split(".")
        found: Any = importlib.import_module(f"prototree.{parts[0]}")
        for number, part in enumerate(parts[1:], 2):
            if not hasattr(found, part):
                importlib.import_module(f"prototree.{'.'.join(parts[:number])}")
            found = getattr(found, part)


def explained_names() -> dict[str, object]:
    """What the examples in docstrings take as given: a random tree of three classes, and a batch of maps."""
    torch.manual_seed(0)
    features = FeatureExtractor(Backbone("resnet18", None, image_size=64), prototype_dim=16)
    tree = prototree.ProtoTree(Topology.full(height=2), features, ["cat", "dog", "owl"]).eval()
    tree.leaf_logits.data = torch.tensor([[9.0, 0, 0], [0, 9, 0], [0, 0, 9], [0, 0, 0]])
    paths = sorted(str(path) for path in Path("photos/train").rglob("*.png"))
    batch = {"maps": torch.rand(2, 16, 2, 2), "labels": torch.tensor([0, 1]), "indices": torch.tensor([0, 1])}
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
    assert (tmp_path / "site" / "reference" / "settings.html").exists()
    assert (tmp_path / "site" / "reference" / "commands.html").exists()

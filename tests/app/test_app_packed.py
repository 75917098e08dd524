"""A packed tree in the browser: it can be looked at and tried; there is nothing to edit."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from app_server import Running, serving  # noqa: E402
from prototree.core.nodes import NodeFunction  # noqa: E402
from prototree.errors import CheckpointError  # noqa: E402
from prototree.explain.tree import explain_tree  # noqa: E402
from prototree.files import write_json  # noqa: E402
from prototree.inference.answers import ask  # noqa: E402
from prototree.pipeline.share import pack  # noqa: E402
from prototree.run import Run  # noqa: E402
from tiny_editing import tiny_run  # noqa: E402


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        run = tiny_run(folder, NodeFunction("pairwise", 4.0))
        pack(run, folder / "squares.prototree")
    found = sorted(Path(run.source).rglob("*.png"))[0]
    found.rename(folder / "photo.png")
    (folder / "squares").rename(folder / "gone")  # the training data is not on this machine
    return folder / "photo.png"


@pytest.fixture(scope="module")
def server(photo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(photo.with_name("squares.prototree"), cache=tmp_path_factory.mktemp("cache")) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator["httpx.Client"]:
    with httpx.Client(base_url=server.address, timeout=3600) as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/try", "/api"])
def test_its_pages_offer_only_what_it_can(client: "httpx.Client", path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    links = re.findall(r'(?:src|href)="(/[^"#]*)', answer.text)
    assert "/try" in links
    assert not [link for link in links if link.startswith(("/edit", "/review"))]
    for link in set(links):
        assert client.get(link).status_code == 200, link


def test_a_photo_can_be_tried(client: "httpx.Client", photo: Path) -> None:
    found = client.post("/api/decisions", content=photo.read_bytes(), headers={"Content-Type": "image/png"}).json()
    assert found["answer"] == ask(photo.with_name("squares.prototree"), photo).label
    page = client.get(found["link"])
    assert page.status_code == 200
    assert "/edit" not in page.text
    for picture in re.findall(r'src="(/results[^"]+)"', page.text):
        assert client.get(picture).headers["content-type"] == "image/webp"


def test_nothing_can_be_changed(client: "httpx.Client") -> None:
    assert client.post("/api/edits/undo", json={"revision": 0}).status_code == 404
    assert client.get("/edit").status_code == 404
    assert client.get("/photos/training/0/thumb").status_code == 404
    assert client.get("/api/run").json()["training_photos"] == 0


def test_the_api_page_names_its_own_address(client: "httpx.Client", server: Running) -> None:
    text = client.get("/api").text
    assert f"{server.address}api/decisions" in text
    assert ":8000" not in text


def test_a_run_whose_photos_are_gone_can_be_looked_at_and_tried(photo: Path, tmp_path: Path) -> None:
    run = photo.with_name("run")
    with serving(run, cache=tmp_path) as server, httpx.Client(base_url=server.address, timeout=3600) as client:
        assert client.get("/").status_code == 200
        found = client.post("/api/decisions", content=photo.read_bytes(), headers={"Content-Type": "image/png"})
        assert found.json()["answer"] == ask(run, photo).label
        assert client.get("/edit").status_code == 404


ODD: list[dict[str, object]] = [
    {"stages": []}, {"stages": {"projected": 3}}, {"stages": {"projected": {"accuracy": {"soft": "much"}}}},
    {"stages": {"projected": {"accuracy": [1]}}}, {"parts": "none"}, {"data": 7},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_odd_figures_are_refused_in_words(photo: Path, tmp_path: Path, odd: dict[str, object]) -> None:
    shutil.copytree(photo.with_name("run"), tmp_path / "run")
    write_json(tmp_path / "run" / "metrics.json", odd)
    with pytest.raises(CheckpointError, match=r"metrics.json is damaged .* evaluate"):
        explain_tree(Run(tmp_path / "run"))

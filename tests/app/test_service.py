"""The service in this process: nodes of both kinds, metrics as in the report, and trees without their images."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from app_server import png, serving  # noqa: E402
from prototree.app import schemas  # noqa: E402
from prototree.app import service as app_service  # noqa: E402
from prototree.app.api import Pages  # noqa: E402
from prototree.app.service import Service, describe_edit  # noqa: E402
from prototree.app.views import NotFoundError  # noqa: E402
from prototree.core.nodes import NodeFunction  # noqa: E402
from prototree.editing.edits import Note, Remove, Replace, Side  # noqa: E402
from prototree.editing.session import edit  # noqa: E402
from prototree.errors import EditError  # noqa: E402
from prototree.explanation.tree import explain_tree  # noqa: E402
from prototree.inference.predict import predict  # noqa: E402
from prototree.io import read_json  # noqa: E402
from prototree.pipeline.fit import rerun  # noqa: E402
from prototree.pipeline.share import pack  # noqa: E402
from prototree.run import Run  # noqa: E402
from tiny_editing import tiny_run  # noqa: E402

PAIRWISE = NodeFunction("pairwise", 6.0)


@pytest.fixture(scope="module")
def pairwise(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_run(tmp_path_factory.mktemp("pairwise"), PAIRWISE)


@pytest.fixture
def service(pairwise: Run, tmp_path: Path) -> Service:
    return Service(edit(pairwise, work=tmp_path / "work"))


def replace(side: Side, patch: schemas.PatchResponse) -> schemas.EditRequest:
    request = schemas.ReplaceRequest(
        edit="replace", node=2, side=side, image=patch.image.index, view=patch.view, patch=patch.patch
    )
    return schemas.EditRequest(revision=0, edit=request)


def test_a_pairwise_node_has_two_patches_and_either_can_be_replaced(service: Service) -> None:
    before = service.node(2)
    assert (before.node, before.kind, service.run()["node_kind"]) == (2, "pairwise", "pairwise")
    sources = service.session.state.tree.sources
    for patch, source in ((before.right, sources[1]), (before.left, sources[4])):
        assert patch is not None
        assert source is not None
        assert (patch.image.name, tuple(patch.patch)) == (source.image, source.patch)
    chosen = service.candidates(2, 12, "left")[2]
    assert service.apply(replace("left", chosen))["done"] == [f"Prototype 2L is now a patch of {chosen.image.name}"]
    now = service.node(2)
    assert now.right == before.right
    assert now.left is not None
    assert (now.left.image, now.left.patch) == (chosen.image, chosen.patch)


def test_a_presence_node_has_no_left_side(run: Run, tmp_path: Path) -> None:
    service = Service(edit(run, work=tmp_path / "work"))
    node, chosen = service.node(2), service.candidates(2, 12)[2]
    assert (node.kind, node.left) == ("presence", None)
    with pytest.raises(EditError, match="right"):
        service.candidates(2, 12, "left")
    with pytest.raises(EditError, match="right"):
        service.apply(replace("left", chosen))
    assert service.revision == 0, "nothing was changed"


def test_a_patch_is_framed_in_its_surroundings(service: Service) -> None:
    patch = service.node(2).right
    assert patch is not None
    left, top, right, bottom = (float(edge) for edge in patch.context.split("/")[-4:])
    assert right - left == pytest.approx(bottom - top, abs=2)  # a square of the image, whatever the network saw
    scale, start = (right - left, bottom - top) * 2, (left, top) * 2
    framed = [edge * size + offset for edge, size, offset in zip(patch.frame, scale, start, strict=True)]
    assert framed == pytest.approx(patch.display_box, abs=2)


def test_pages_show_both_patches(service: Service) -> None:
    node = service.node(2)
    assert node.right is not None
    assert node.left is not None
    for page in (Pages(service).edit(), Pages(service).edit_node(2)):
        assert node.right.context in page
        assert node.left.context in page
        assert ">present<" not in page
    errors = service.errors()["images"]
    assert errors, "a random network is not always right"
    review = Pages(service).errors()
    for error in errors:
        assert error["p_right"] is None or 0 <= error["p_right"] <= 1
        blamed = service.node(error["node"]) if error["node"] is not None else None
        assert blamed is None or (blamed.left is not None and blamed.left.context in review)
        assert error["node"] is None or re.search(r"^more like \S+ \([\d.]+\) than \S+ \([\d.]+\)$", error["text"])


def test_edits_are_described_with_the_number_and_the_side() -> None:
    edit = Replace(5, "a.png", "full", (0, 0), "left")
    assert "6L " in describe_edit(edit, "pairwise")
    assert "6 " in describe_edit(edit, "presence")
    assert "left" in describe_edit(Remove(5, "left"), "pairwise")
    assert "absent" in describe_edit(Remove(5, "left"), "presence")
    assert describe_edit(Note(6, "wing", "left"), "pairwise") == "Patch 7L is called “wing”"


def test_the_app_counts_as_the_report_does(tmp_path: Path) -> None:
    """The same path on the same images, or it says which images it counts."""
    run = tiny_run(tmp_path)
    rerun(run.folder, "evaluate")
    session = edit(run)
    service, report = Service(session), explain_tree(run, nearest=0)
    app, data = service.tree()
    assert app.accuracy == report.accuracy
    assert [c.correct_text for c in app.classes] == [c.correct_text for c in report.classes]
    right = sum(round((c.accuracy or 0) * c.n_test) for c in app.classes)
    assert right / sum(c.n_test for c in app.classes) == pytest.approx(report.accuracy["greedy"])
    assert data["evaluated_on"] == explain_tree(run, nearest=0).evaluated_on
    errors = service.errors()
    stored = read_json(run.folder / "errors.json")["images"]
    assert errors["n_images"] == sum(c.n_test for c in report.classes)
    assert [image["image"].name for image in errors["images"]] == sorted(error["image"] for error in stored)
    session.apply(Note(0, "wing"))
    assert service.tree()[0].accuracy == report.accuracy, "a name changes no answer"
    session.apply(Remove(0, "left"))
    assert service.errors()["n_images"] == 6
    assert "every second test image" in Pages(service).errors()
    app, data = service.tree()
    assert "every second test image" in data["evaluated_on"]
    assert sum(c.n_test for c in app.classes) == 6
    session.undo()
    assert service.tree()[0].accuracy == report.accuracy


def test_the_last_results_are_kept_and_older_ones_go(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_service, "MAX_RESULTS", 3)
    service = Service(run)
    keys = [service.decide(png(), "x")["id"] for _ in range(5)]
    assert [service.result(key).decision["id"] for key in keys[2:]] == keys[2:]
    with pytest.raises(NotFoundError):
        service.result(keys[0])


# ---- without the run's images


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image beside a packed tree and its run; the training data is not on this machine."""
    folder = tmp_path_factory.mktemp("packed")
    run = tiny_run(folder, PAIRWISE)
    pack(run, folder / "squares.prototree")
    next(Path(run.source).rglob("*.png")).rename(folder / "photo.png")
    (folder / "squares").rename(folder / "gone")
    return folder / "photo.png"


@pytest.fixture(scope="module", params=["squares.prototree", "run"])
def client(photo: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = photo.with_name(request.param)
    cache = tmp_path_factory.mktemp("cache")
    with serving(model, cache=cache) as server, httpx.Client(base_url=server.address, timeout=3600) as client:
        client.model = model
        yield client


def test_a_tree_without_images_can_be_explored_and_tried(client: Any, photo: Path) -> None:
    content = client.post("/api/decisions", content=photo.read_bytes(), headers={"Content-Type": "image/png"}).json()
    predicted = predict(client.model, photo).predicted_class
    assert predicted in str(content.get("answer", content.get("predicted_class")))
    for path in ("/", "/test", "/api", content["link"]):
        answer = client.get(path)
        assert answer.status_code == 200
        links = set(re.findall(r'(?:src|href)="(/[^"#]*)', answer.text))
        assert "/test" in links
        assert not [link for link in links if link.startswith(("/edit", "/errors"))]
        for link in links:
            assert client.get(link).status_code == 200, link
    assert f"{client.base_url}api/decisions" in client.get("/api").text


def test_a_tree_without_images_cannot_be_changed(client: Any) -> None:
    assert client.post("/api/edits/undo", json={"revision": 0}).status_code == 404
    assert client.get("/edit").status_code == 404
    assert client.get("/images/training/0/thumb").status_code == 404
    assert client.get("/api/run").json()["n_training"] == 0

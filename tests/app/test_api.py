"""The browser app as a real process on loopback: what it answers, and what it refuses."""

import io
import re
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

if TYPE_CHECKING:
    from fastapi import FastAPI

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")
anyio = pytest.importorskip("anyio", reason="needs the extra 'serve'")

from app_server import BYTES, Running, edit, png, revision, undo  # noqa: E402
from prototree.app.api import create_app  # noqa: E402
from prototree.app.jobs import BusyError  # noqa: E402
from prototree.app.service import Service  # noqa: E402
from prototree.app.views import NotFoundError  # noqa: E402
from prototree.backbones.inference import frozen_features  # noqa: E402
from prototree.data import open_data  # noqa: E402
from prototree.editing.session import edit as open_session  # noqa: E402
from prototree.errors import ConflictError, DataError, NotAnImageError, TooLargeError  # noqa: E402
from prototree.explanation.decision import explain_image  # noqa: E402
from prototree.reporting.decision_page import decision_json  # noqa: E402
from prototree.run import Run  # noqa: E402
from tiny_editing import content_of, tiny_run  # noqa: E402

HOSTILE = "<img src=x onerror=alert(1)>\"'&{{7*7}}"
PAGES = ["/", "/test", "/errors", "/edit", "/edit/1", "/api"]

# ---- pages


@pytest.mark.parametrize("path", PAGES)
def test_pages_come_without_anything_from_elsewhere(client: Any, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert answer.headers["x-content-type-options"] == "nosniff"
    for script in re.findall(r"<script[^>]*>", answer.text):
        assert "src=" in script or 'type="application/json"' in script, script
    assert not re.search(r"\s(style|on\w+)=", re.sub(r"(?s)<script.*?</script>|<pre>.*?</pre>", "", answer.text))
    for link in re.findall(r'(?:src|href)="([^"#]+)', answer.text):
        assert link.startswith(("/", "data:,")), link
        if link.startswith(("/assets", "/images", "/edit", "/test", "/openapi")):
            assert client.get(link).status_code == 200, link


def test_a_page_that_is_not_there_says_so(client: Any) -> None:
    answer = client.get("/edit/999", headers={"Accept": "text/html"})
    assert (answer.status_code, "from 1 to 3" in answer.text) == (404, True)
    assert client.get("/nothing").json() == {"detail": "Not Found"}


def test_names_and_notes_are_escaped(client: Any) -> None:
    assert edit(client, edit="note", node=1, text=HOSTILE).status_code == 200
    for path in PAGES:
        assert "<img src=x" not in client.get(path).text, path
    assert "&lt;img src=x" in client.get("/edit/1").text
    answer = client.post("/api/decisions", params={"name": HOSTILE}, content=png(), headers=BYTES).json()
    page = client.get(answer["link"]).text
    assert "<img src=x" not in page
    assert "49" not in re.findall(r"onerror=alert\(1\).{0,40}", page)[0]
    undo(client)


# ---- decisions


def test_decisions_are_those_of_the_library(client: Any, run: Run) -> None:
    network = frozen_features(run.tree().features)
    for sample in open_data(run.source).test[::3]:
        answer = client.post("/api/decisions", content=sample.path.read_bytes(), headers=BYTES).json()
        expected = decision_json(explain_image(run, sample.path, name="image", network=network))
        assert {key: answer[key] for key in expected} == expected
        assert "photo" in answer["pictures"]
        for address in answer["pictures"].values():
            assert client.get(address).headers["content-type"] == "image/webp"
        assert client.get(f"/api/decisions/{answer['id']}").json() == answer


def test_a_sample_has_its_label(client: Any) -> None:
    answer = client.post("/api/decisions/sample", json={"split": "validation", "index": 0}).json()
    assert answer["label"] in (0, "blue")
    assert client.post("/api/decisions/sample", json={"split": "validation", "index": 99}).status_code == 404


def bomb() -> bytes:
    """A PNG of a few bytes that claims 400 million pixels."""
    head = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def noise() -> bytes:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 90.0).convert("RGB").save(file, "JPEG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"hello, I am text", 415),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415),
        (b"%!PS-Adobe-3.0 EPSF", 415),
        (png()[:60], 422),
        (noise()[: len(noise()) // 2], 422),
        (bomb(), 413),
        (b"\0" * (20 * 2**20 + 1), 413),
    ],
    ids=["empty", "text", "svg", "postscript", "cut png", "cut jpeg", "bomb", "too many bytes"],
)
def test_what_is_no_usable_image_is_refused_and_the_server_lives(client: Any, content: bytes, status: int) -> None:
    answer = client.post("/api/decisions", content=content, headers=BYTES)
    assert (answer.status_code, bool(answer.json()["detail"])) == (status, True)
    assert client.get("/api/health").json()["status"] == "ok"
    assert client.post("/api/decisions", files={"photo": png()}).status_code == 415, "a form, not the file itself"


def answer_of(app: "FastAPI", method: str, path: str, **sent: Any) -> Any:
    """What an app in this process answers."""

    async def ask() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path, **sent)

    return anyio.run(ask)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TooLargeError("too much"), 413),
        (NotAnImageError("no image"), 415),
        (DataError("the limit is not what this is about"), 422),
        (NotFoundError("nowhere"), 404),
        (ConflictError("somebody else"), 409),
        (BusyError(7), 503),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_the_status_follows_from_the_class_of_the_error(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    def refuse(content: bytes, name: str) -> None:
        raise error

    service = Service(run)
    monkeypatch.setattr(service, "decide", refuse)
    answer = answer_of(create_app(service), "POST", "/api/decisions", content=png(), headers=BYTES)
    assert (answer.status_code, answer.json()["detail"]) == (status, str(error))
    assert answer.headers.get("retry-after") == ("7" if status == 503 else None)


def test_a_damaged_image_of_the_server_is_not_the_fault_of_the_request(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    app = create_app(Service(open_session(run, work=tmp_path / "work")))
    open_data(run.source).test[0].path.write_text("no longer an image")
    sample = {"split": "validation", "index": 0}
    assert answer_of(app, "GET", "/images/validation/0/thumb").status_code == 404
    assert answer_of(app, "POST", "/api/decisions/sample", json=sample).status_code == 404


# ---- editing


def test_editing_undoing_and_saving_over_the_api(client: Any, run: Run) -> None:
    before, start = content_of(run.folder), client.get("/api/edits").json()
    chosen = client.get("/api/nodes/2/candidates", params={"count": 5}).json()[3]
    patch = {"image": chosen["image"]["index"], "view": chosen["view"], "patch": chosen["patch"]}
    answer = edit(client, edit="replace", node=2, **patch)
    assert answer.status_code == 200
    assert answer.json()["previous"] == start["current"]
    assert answer.json()["done"][-1] == f"Prototype 2 is now a patch of {chosen['image']['name']}"
    assert client.get("/api/nodes/2").json()["right"]["box"] == chosen["box"]
    assert edit(client, edit="note", node=2, text="corner").json()["done"][-1] == "Patch 2 is called “corner”"
    assert edit(client, edit="remove", node=1, keep="left").json()["n_nodes"] == 1
    assert client.get("/api/nodes/2").status_code == 404
    back = undo(client).json()
    assert (back["n_nodes"], len(back["undone"])) == (3, 1)
    saved = client.post("/api/edits/save", json={"revision": revision(client)})
    assert saved.status_code == 200, saved.text
    new = Run(run.folder.parent / saved.json()["run"])
    assert new.notes == {1: "corner"}
    assert saved.json()["after"] == new.metrics["stages"]["projected"]["accuracy"]
    assert content_of(run.folder) == before, "the run that was opened was changed"


def test_a_dragged_region_becomes_the_patch_that_the_grid_says(client: Any) -> None:
    grid = client.get("/api/images/training/4").json()["grid"]
    row, column, width, height = 1, 0, grid["cell_width"], grid["cell_height"]
    x, y = grid["left"] + (column + 0.5) * width, grid["top"] + (row + 0.5) * height
    assert edit(client, edit="replace", node=3, image=4, region=[x - 3, y - 2, x + 3.5, y + 2]).status_code == 200
    source = client.get("/api/nodes/3").json()["right"]
    assert (source["image"]["index"], source["patch"], source["view"]) == (4, [row, column], "full")
    corner = (grid["left"], grid["top"] + height)
    assert source["box"] == pytest.approx([*corner, corner[0] + width, corner[1] + height])


@pytest.mark.parametrize(
    "content",
    [
        {"edit": "note", "node": 99, "text": "x"},
        {"edit": "note", "node": 1, "text": "two\nlines"},
        {"edit": "note", "node": "1", "text": "x"},
        {"edit": "replace", "node": 1, "image": 0},
        {"edit": "replace", "node": 1, "image": 0, "patch": [0, 99]},
        {"edit": "replace", "node": 1, "image": 10**6, "patch": [0, 0]},
        {"edit": "replace", "node": 1, "image": 0, "patch": [0, 0], "side": "left"},
        {"edit": "burn"},
        {"edit": "note", "node": 1, "text": "x", "more": 1},
    ],
)
def test_impossible_edits_are_refused(client: Any, content: dict[str, object]) -> None:
    before, answer = revision(client), edit(client, **content)
    assert answer.status_code in (404, 422)
    assert answer.json()["detail"]
    assert revision(client) == before


def test_of_two_edits_at_once_one_is_told(server: Running, client: Any) -> None:
    def note(text: str) -> int:
        with httpx.Client(base_url=server.address, timeout=3600) as own:
            request = {"revision": before, "edit": {"edit": "note", "node": 1, "text": text}}
            return int(own.post("/api/edits", json=request).status_code)

    before = revision(client)
    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(note, "abcdefgh")) == [200] + [409] * 7
    assert revision(client) == before + 1


# ---- many at once


def test_many_uploads_at_once_are_all_answered_rightly(server: Running, client: Any, run: Run) -> None:
    files = [sample.path.read_bytes() for sample in open_data(run.source).test]
    alone = [client.post("/api/decisions", content=file, headers=BYTES).json()["paths"] for file in files]
    start = threading.Barrier(24)

    def send(index: int) -> Any:
        with httpx.Client(base_url=server.address, timeout=3600) as own:
            start.wait()
            answer = own.post("/api/decisions", content=files[index % len(files)], headers=BYTES)
            return answer.status_code, answer.json()["paths"], own.get("/api/health").json()["status"]

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(send, range(24)))
    assert answers == [(200, alone[index % len(files)], "ok") for index in range(24)]


def test_too_many_requests_or_bytes_are_told_to_come_again(run: Run) -> None:
    app = create_app(Service(run), max_waiting=4, max_total=20_000)

    async def many() -> tuple[list[Any], Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            answers: list[Any] = []

            async def send() -> None:
                answers.append(await client.post("/api/decisions", content=png(), headers=BYTES))

            async with anyio.create_task_group() as group:
                for _ in range(12):
                    group.start_soon(send)
            return answers, await client.post("/api/decisions", content=noise() * 16, headers=BYTES)

    answers, heavy = anyio.run(many)
    assert sorted(answer.status_code for answer in answers) == [200] * 4 + [503] * 8
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 503)
    assert heavy.status_code == 503


# ---- the description


@pytest.mark.parametrize("valid", [True, False])
def test_the_server_does_what_its_description_says(server: Running, valid: bool) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    mode = schemathesis.GenerationMode.POSITIVE if valid else schemathesis.GenerationMode.NEGATIVE
    schema = schemathesis.openapi.from_url(f"{server.address}openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert len(operations) >= 18

    def check(case: object) -> None:
        # Bytes that are no image and nodes that are not there fit the description and are refused all the same.
        base = server.address.rstrip("/")
        case.call_and_validate(base_url=base, excluded_checks=[positive_data_acceptance])  # type: ignore[attr-defined]

    for operation in operations:
        if not valid and not operation.body and not operation.query and not operation.path_parameters:
            continue  # nothing could be wrong
        few = settings(
            max_examples=6, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        few(given(case=operation.as_strategy(generation_mode=mode))(check))()

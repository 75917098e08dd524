"""The browser app as a real process on loopback: what it answers, and what it refuses."""

import contextlib
import io
import re
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import Image

if TYPE_CHECKING:
    from fastapi import FastAPI

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")
anyio = pytest.importorskip("anyio", reason="needs the extra 'serve'")

from typer.testing import CliRunner  # noqa: E402

from app_server import Running, serving  # noqa: E402
from prototree import cli  # noqa: E402
from prototree.app import server as app_server  # noqa: E402
from prototree.app.app import create_app  # noqa: E402
from prototree.app.jobs import BusyError  # noqa: E402
from prototree.app.results import NotFoundError  # noqa: E402
from prototree.app.service import Service  # noqa: E402
from prototree.data import open_data  # noqa: E402
from prototree.data.loading import ViewDataset  # noqa: E402
from prototree.data.views import evaluation_views  # noqa: E402
from prototree.editing.session import open_session  # noqa: E402
from prototree.errors import (  # noqa: E402
    ConfigError,
    ConflictError,
    DataError,
    MissingExtraError,
    NotAnImageError,
    TooLargeError,
)
from prototree.pipeline.stages import Run  # noqa: E402
from tiny_editing import content_of, tiny_run  # noqa: E402

HOSTILE = "<img src=x onerror=alert(1)>\"'&{{7*7}}"
BYTES = {"Content-Type": "application/octet-stream"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return tiny_run(tmp_path_factory.mktemp("web"))


@pytest.fixture(scope="module")
def server(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(run.folder, cache=tmp_path_factory.mktemp("cache")) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator["httpx.Client"]:
    with httpx.Client(base_url=server.address, timeout=3600) as client:
        yield client


def revision(client: "httpx.Client") -> int:
    return int(client.get("/api/health").json()["revision"])


def edit(client: "httpx.Client", **content: object) -> "httpx.Response":
    return client.post("/api/edits", json={"revision": revision(client), "edit": content})


def png(size: tuple[int, int] = (40, 40), colour: tuple[int, int, int] = (200, 40, 40)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


# ---- pages

PAGES = ["/", "/try", "/review", "/edit", "/edit/0", "/api"]


@pytest.mark.parametrize("path", PAGES)
def test_pages_come_without_anything_from_elsewhere(client: "httpx.Client", path: str) -> None:
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
        if link.startswith(("/assets", "/photos", "/edit", "/try", "/openapi")):
            assert client.get(link).status_code == 200, link


def test_a_page_that_is_not_there_says_so(client: "httpx.Client") -> None:
    answer = client.get("/edit/999", headers={"Accept": "text/html"})
    assert answer.status_code == 404
    assert "expected a prototype from 0 to 2" in answer.text
    assert client.get("/nothing").json() == {"detail": "Not Found"}


def test_names_and_notes_are_escaped(client: "httpx.Client") -> None:
    assert edit(client, edit="note", node=0, text=HOSTILE).status_code == 200
    for path in PAGES:
        assert "<img src=x" not in client.get(path).text, path
    assert "&lt;img src=x" in client.get("/edit/0").text
    answer = client.post("/api/decisions", params={"name": HOSTILE}, content=png(), headers=BYTES).json()
    page = client.get(answer["link"]).text
    assert "<img src=x" not in page
    assert "49" not in re.findall(r"onerror=alert\(1\).{0,40}", page)[0]
    client.post("/api/edits/undo", json={"revision": revision(client)})


# ---- trying


def test_answers_are_those_of_the_library(client: "httpx.Client", run: Run) -> None:
    tree, data = run.tree(), open_data(run.metrics["source"])
    dataset = ViewDataset(data.test, evaluation_views, tree.preprocessing)
    expected = tree.predict(torch.stack([dataset[i].image for i in range(len(dataset))]))
    for i, sample in enumerate(data.test):
        answer = client.post("/api/decisions", content=sample.path.read_bytes(), headers=BYTES).json()
        soft = {entry["label"]: entry["share"] for entry in answer["soft"]}
        assert soft == pytest.approx(dict(enumerate(expected.soft[i].tolist())), abs=1e-4)
        for way in answer["ways"]:
            path = expected.path(way["strategy"])
            nodes = [node for node in path.nodes[i].tolist() if node >= 0]
            assert [step["node"] for step in way["steps"]] == nodes
            assert [step["similarity"] for step in way["steps"]] == pytest.approx(
                path.p_right[i, : len(nodes)].tolist(), abs=1e-4
            )
        assert client.get(answer["photo"]).headers["content-type"] == "image/webp"
        assert client.get(answer["ways"][0]["steps"][0]["patch"]).status_code == 200
        assert client.get(f"/api/decisions/{answer['id']}").json() == answer


def test_a_sample_is_answered_with_its_truth(client: "httpx.Client") -> None:
    answer = client.post("/api/decisions/sample", json={"split": "feedback", "index": 0})
    assert answer.json()["truth"] == "blue"
    assert client.post("/api/decisions/sample", json={"split": "feedback", "index": 99}).status_code == 404


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
    ("content", "status", "words"),
    [
        (b"", 400, "0 bytes"),
        (b"hello, I am text", 415, "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415, "not an image"),
        (b"%!PS-Adobe-3.0 EPSF", 415, "not an image"),
        (png()[:60], 422, "cannot be decoded"),
        (noise()[: len(noise()) // 2], 422, "cannot be decoded"),
        (bomb(), 413, "400,000,000"),
        (b"\0" * (20 * 2**20 + 1), 413, "at most 20 MiB"),
    ],
    ids=["empty", "text", "svg", "postscript", "cut png", "cut jpeg", "bomb", "too many bytes"],
)
def test_what_is_no_usable_image_is_refused_and_the_server_lives(
    client: "httpx.Client", content: bytes, status: int, words: str
) -> None:
    answer = client.post("/api/decisions", content=content, headers=BYTES)
    assert answer.status_code == status
    assert words in answer.json()["detail"]
    assert client.get("/api/health").json()["status"] == "ok"


def test_a_form_is_told_to_send_the_file_itself(client: "httpx.Client") -> None:
    answer = client.post("/api/decisions", files={"photo": png()})
    assert (answer.status_code, "got a form; send the file itself" in answer.json()["detail"]) == (415, True)


def answers(app: "FastAPI", method: str, path: str, **sent: Any) -> "httpx.Response":
    """What an app in this process answers."""

    async def ask() -> "httpx.Response":
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path, **sent)

    return anyio.run(ask)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TooLargeError("many words"), 413),
        (NotAnImageError("many words"), 415),
        (DataError("the limit is not what this is about"), 422),
        (NotFoundError("many words"), 404),
        (ConflictError("many words"), 409),
        (BusyError(7), 503),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_the_status_follows_from_the_kind_of_error_whatever_its_words(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    def refuse(content: bytes, name: str) -> None:
        raise error

    service = Service(open_session(run, work=tmp_path / "work"))
    monkeypatch.setattr(service, "decide", refuse)
    answer = answers(create_app(service), "POST", "/api/decisions", content=png(), headers=BYTES)
    assert answer.status_code == status
    assert answer.json()["detail"] == str(error)
    assert answer.headers.get("retry-after") == ("7" if status == 503 else None)


def test_a_photo_of_the_server_that_is_damaged_is_not_the_fault_of_the_request(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    app = create_app(Service(open_session(run, work=tmp_path / "work")))
    open_data(run.metrics["source"]).test[0].path.write_text("no longer a photo")
    for method, path, question in [
        ("GET", "/photos/feedback/0/thumb", None),
        ("POST", "/api/decisions/sample", {"split": "feedback", "index": 0}),
    ]:
        answer = answers(app, method, path, json=question)
        assert answer.status_code == 404
        assert "not an image we can read" in answer.json()["detail"]


def test_an_upload_of_unknown_length_is_cut_off(client: "httpx.Client") -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(22):
            yield b"\0" * 2**20

    with contextlib.suppress(httpx.WriteError):  # closing the connection is as good an answer
        assert client.post("/api/decisions", content=endless(), headers=BYTES).status_code == 413
    assert client.get("/api/health").json()["status"] == "ok"


# ---- who may ask


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.5", "", "[::"])
def test_other_names_are_refused(server: Running, host: str) -> None:
    where = httpx.URL(server.address)
    with socket.create_connection((where.host, where.port), timeout=3600) as connection:
        connection.sendall(f"GET /api/health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b" 400 " in answer.split(b"\r\n")[0]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "own", "Sec-Fetch-Site": "same-origin"}, 422),
        ({}, 422),
    ],
)
def test_pages_of_other_sites_change_nothing(client: "httpx.Client", headers: dict[str, str], status: int) -> None:
    own = str(client.base_url).rstrip("/")
    sent = {name: own if value == "own" else value for name, value in headers.items()}
    before = revision(client)
    # An undo with nothing to undo: 422 if the request is let in.
    while client.post("/api/edits/undo", json={"revision": revision(client)}).status_code == 200:
        pass
    before = revision(client)
    assert client.post("/api/edits/undo", json={"revision": before}, headers=sent).status_code == status
    assert revision(client) == before


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../../../../etc/passwd",
        "/assets/%2e%2e/%2e%2e/app.py",
        "/assets/..%2f..%2fapp.py",
        "/photos/training/..%2f..%2fetc%2fpasswd/picture",
        "/photos/..%2f/0/picture",
        "/photos/training/0/crop/..%2f..%2fetc/0/0",
        "/photos/training/-1/picture",
        "/photos/training/99999/picture",
        "/photos/training/0/crop/full/99/0",
        "/results/..%2f..%2fetc/passwd",
        "/try/..%2f..%2fetc%2fpasswd",
        "/api/nodes/99999999999999999999",
    ],
)
def test_no_path_from_a_request_reaches_a_file(server: Running, path: str) -> None:
    where = httpx.URL(server.address)
    with socket.create_connection((where.host, where.port), timeout=3600) as connection:  # httpx would tidy the path
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert re.match(rb"HTTP/1.1 4(04|22) ", answer), answer[:200]
    assert b"root:" not in answer


# ---- editing


def test_editing_undoing_and_saving_over_the_api(client: "httpx.Client", run: Run) -> None:
    before = content_of(run.folder)
    start = client.get("/api/edits").json()
    found = client.get("/api/nodes/1/candidates", params={"count": 5}).json()["candidates"]
    chosen = found[3]
    answer = edit(
        client, edit="replace", node=1, photo=chosen["photo"]["index"], view=chosen["view"], patch=chosen["patch"]
    )
    assert answer.status_code == 200
    now = answer.json()
    assert now["before"] == start["now"]
    assert now["done"][-1] == f"Prototype 1 is now a patch of {chosen['photo']['name']}"
    assert client.get("/api/nodes/1").json()["source"]["box"] == chosen["box"]
    assert edit(client, edit="note", node=1, text="corner").json()["done"][-1] == "Prototype 1 is called “corner”"
    assert len(edit(client, edit="remove", node=0, keep="left").json()["nodes"]) == 1
    assert client.get("/api/nodes/1").status_code == 404
    back = client.post("/api/edits/undo", json={"revision": revision(client)}).json()
    assert len(back["nodes"]) == 3
    assert back["undone"] == ["Removed prototype 0, keeping what was below “absent”"]
    saved = client.post("/api/edits/save", json={"revision": revision(client)})
    assert saved.status_code == 200, saved.text
    new = Run(run.folder.parent / saved.json()["run"])
    assert new.notes == {1: "corner"}
    assert saved.json()["after"] == new.metrics["stages"]["projected"]["accuracy"]
    assert content_of(run.folder) == before, "the original was changed"


def test_numbers_are_those_of_the_tree_at_the_time(client: "httpx.Client") -> None:
    last = client.get("/api/nodes/2").json()
    assert edit(client, edit="remove", node=1, keep="left").status_code == 200
    assert client.get("/api/nodes/1").json()["source"] == last["source"]
    assert edit(client, edit="note", node=1, text="moved up").json()["done"][-2:] == [
        "Removed prototype 1, keeping what was below “absent”",
        "Prototype 1 is called “moved up”",
    ]
    assert client.get("/api/nodes/1").json()["note"] == "moved up"
    gone = edit(client, edit="note", node=2, text="gone")
    assert (gone.status_code, gone.json()["detail"]) == (404, "expected a prototype from 0 to 1, got 2")
    for _ in range(2):
        client.post("/api/edits/undo", json={"revision": revision(client)})
    assert client.get("/api/nodes/2").json() == last


def test_a_dragged_region_becomes_the_patch_that_the_grid_says(client: "httpx.Client") -> None:
    photo = client.get("/api/photos/training/4").json()
    grid = photo["grid"]
    row, column = 1, 0
    middle = (grid["left"] + (column + 0.5) * grid["across"], grid["top"] + (row + 0.5) * grid["down"])
    region = [middle[0] - 3, middle[1] - 2, middle[0] + 3.5, middle[1] + 2]
    assert edit(client, edit="replace", node=2, photo=4, region=region).status_code == 200
    source = client.get("/api/nodes/2").json()["source"]
    assert (source["photo"]["index"], source["patch"], source["view"]) == (4, [row, column], "full")
    assert source["box"] == pytest.approx(
        [grid["left"], grid["top"] + grid["down"], grid["left"] + grid["across"], grid["top"] + 2 * grid["down"]]
    )


def test_banned_patches_are_offered_no_more(client: "httpx.Client") -> None:
    first = client.get("/api/nodes/0/candidates").json()["candidates"][0]
    assert edit(client, edit="exclude", photo=first["photo"]["index"]).status_code == 200
    names = [c["photo"]["name"] for c in client.get("/api/nodes/0/candidates").json()["candidates"]]
    assert first["photo"]["name"] not in names
    refused = edit(client, edit="replace", node=0, photo=first["photo"]["index"], patch=[0, 0])
    assert refused.status_code == 422
    assert "excluded" in refused.json()["detail"]


@pytest.mark.parametrize(
    "content",
    [
        {"edit": "note", "node": 99, "text": "x"},
        {"edit": "note", "node": 0, "text": "x" * 201},
        {"edit": "note", "node": 0, "text": "two\nlines"},
        {"edit": "replace", "node": 0, "photo": 0},
        {"edit": "replace", "node": 0, "photo": 0, "patch": [0, 99]},
        {"edit": "replace", "node": 0, "photo": 0, "region": [0, 0, 1]},
        {"edit": "replace", "node": 0, "photo": 10**6, "patch": [0, 0]},
        {"edit": "remove", "node": 0, "keep": "both"},
        {"edit": "burn"},
        {"edit": "note", "node": 0, "text": "x", "more": 1},
    ],
)
def test_impossible_edits_are_refused_in_words(client: "httpx.Client", content: dict[str, object]) -> None:
    before = revision(client)
    answer = edit(client, **content)
    assert answer.status_code in (404, 422)
    assert answer.json()["detail"]
    assert revision(client) == before


def test_of_two_edits_at_once_one_is_told(server: Running) -> None:
    def note(text: str) -> int:
        with httpx.Client(base_url=server.address, timeout=3600) as own:
            question = {"revision": at, "edit": {"edit": "note", "node": 0, "text": text}}
            return int(own.post("/api/edits", json=question).status_code)

    with httpx.Client(base_url=server.address, timeout=3600) as client:
        at = revision(client)
        with ThreadPoolExecutor(8) as pool:
            assert sorted(pool.map(note, "abcdefgh")) == [200] + [409] * 7
        assert revision(client) == at + 1


def test_people_who_try_again_lose_nothing(server: Running) -> None:
    names = [f"name {i}" for i in range(8)]

    def note(text: str) -> None:
        with httpx.Client(base_url=server.address, timeout=3600) as own:
            while edit(own, edit="note", node=1, text=text).status_code == 409:
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(note, names))
    with httpx.Client(base_url=server.address, timeout=3600) as client:
        done = client.get("/api/edits").json()["done"]
    assert {f"Prototype 1 is called “{name}”" for name in names} <= set(done)


# ---- many at once


def test_sixty_four_uploads_at_once_are_all_answered_rightly(server: Running, run: Run) -> None:
    with httpx.Client(base_url=server.address, timeout=3600) as client:
        state = client.get("/api/health").json()["revision"]
        data = open_data(run.metrics["source"])
        contents = [data.test[i % len(data.test)].path.read_bytes() for i in range(64)]
        alone = [
            client.post("/api/decisions", content=content, headers=BYTES).json()["soft"]
            for content in contents[: len(data.test)]
        ]
    start, healthy, over = threading.Barrier(65), [], threading.Event()

    def send(content: bytes) -> "httpx.Response":
        with httpx.Client(base_url=server.address, timeout=3600) as own:
            start.wait()
            return own.post("/api/decisions", content=content, headers=BYTES)

    def watch() -> None:
        with httpx.Client(base_url=server.address, timeout=3600) as own:
            start.wait()
            while not over.is_set():
                healthy.append(own.get("/api/health").json())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(send, contents))
    over.set()
    watcher.join()
    assert [answer.status_code for answer in answers] == [200] * 64
    for i, answer in enumerate(answers):
        assert answer.json()["soft"] == alone[i % len(alone)]
    assert healthy
    assert all(health["status"] == "ok" and health["revision"] == state for health in healthy)


def test_beyond_its_limit_the_queue_asks_to_come_again(run: Run, tmp_path: Path) -> None:
    app = create_app(Service(open_session(run, work=tmp_path / "work")), max_waiting=4, max_waiting_bytes=10_000)

    async def many() -> tuple[list["httpx.Response"], "httpx.Response"]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answers: list[httpx.Response] = []

            async def send() -> None:
                answers.append(await client.post("/api/decisions", content=png(), headers=BYTES))

            async with anyio.create_task_group() as group:
                for _ in range(12):
                    group.start_soon(send)
            heavy = await client.post("/api/decisions", content=noise() * 8, headers=BYTES)
            return answers, heavy

    answers, heavy = anyio.run(many)
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200] * 4 + [503] * 8
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 503)
    assert heavy.status_code == 503  # more bytes than may wait


def test_the_last_results_are_kept_and_older_ones_go(run: Run, tmp_path: Path) -> None:
    service = Service(open_session(run, work=tmp_path / "work"))
    service.results._max_number = 3
    ids = [service.decide(png(), "x").id for _ in range(5)]
    kept = [service.results.get(id_).decision.id for id_ in ids[2:]]
    assert kept == ids[2:]
    with pytest.raises(Exception, match="no longer kept"):
        service.results.get(ids[0])


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
        # Bytes that are no image and prototypes that are not there fit the description and are refused all the same.
        base = server.address.rstrip("/")
        case.call_and_validate(base_url=base, excluded_checks=[positive_data_acceptance])  # type: ignore[attr-defined]

    for operation in operations:
        if not valid and not operation.body and not operation.query and not operation.path_parameters:
            continue  # nothing could be wrong
        few = settings(
            max_examples=12, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        few(given(case=operation.as_strategy(generation_mode=mode))(check))()


# ---- the command


def test_a_port_in_use_is_one_clear_line(run: Run) -> None:
    with app_server.listen("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="is in use already"):
            app_server.listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="choose another address"):
        app_server.listen("203.0.113.7", 0)


def test_a_missing_extra_names_its_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(cli.app, ["serve", str(run.folder)])
    assert isinstance(result.exception, MissingExtraError)
    assert "pip install 'prototree[serve]'" in str(result.exception)
    assert "pip install '.[serve]'" in str(result.exception), "what works before anything is published"

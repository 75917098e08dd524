"""Requests that nobody sends by mistake, to a real server: none crashes it, fills it, locks others out or gets in."""

import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from app_server import Running, serving  # noqa: E402
from prototree.run import Run  # noqa: E402
from tiny_editing import tiny_run  # noqa: E402

METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "\x01")
PATHS = (
    "/", "/test", "/edit", "/edit/1", "/edit/0", "/edit/-1", "/edit/1e9", "/api/run", "/api/nodes",
    "/api/nodes/1/candidates?count=61",
    "/api/nodes/99999999999999999999", "/api/decisions", "/api/decisions/sample", "/api/edits",
    "/api/edits/undo", "/api/edits/redo", "/api/images/training?start=-1", "/images/training/0/picture",
    "/images/test/0/thumb", "/images/training/0/region/9/9/0/0", "/results/%00/x", "/assets/../../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd", "//evil.example/", "/openapi.json", "/?token=x", "/" + "a" * 5000, "/\u00e4",
)  # fmt: skip
HEADERS = (
    {"Host": "evil.example"}, {"Host": ""}, {"Origin": "http://evil.example"}, {"Origin": "null"},
    {"Content-Length": "-1"}, {"Content-Length": "99999999999"}, {"Content-Type": "application/json"},
    {"Content-Type": "multipart/form-data; boundary=x"}, {"Transfer-Encoding": "chunked"}, {"Expect": "100-continue"},
    {"Cookie": "prototree=\x7f; =;;"}, {"Authorization": "Bearer " + "x" * 3000}, {"Range": "bytes=0-99999999999"},
    {"Accept": "text/html"}, {"X": "y" * 8000}, {"Upgrade": "websocket", "Connection": "Upgrade"},
)  # fmt: skip
BODIES = (
    b"", b"{", b"null", b"[]", b"0" * 5000, b"[" * 100_000, b'{"revision": 1e999}', b'{"revision": -1}',
    b'{"revision": 0, "edit": {"edit": "note", "node": 0, "text": "' + b"x" * 20_000 + b'"}}', b'{"revision": "0"}',
    b'{"split": "training", "index": 99999999999999}', b"\x89PNG\r\n\x1a\n" + b"\0" * 100, b"\xff\xd8\xff" * 1000,
    b'{"revision": 0, "edit": {"edit": "replace", "node": 0, "image": -1, "view": "../x", "patch": [9, 9]}}',
)  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_run(tmp_path_factory.mktemp("web"))


@pytest.fixture(scope="module")
def server(run: Run, cache: Path) -> Iterator[Running]:
    with serving(run.folder, cache=cache) as running:
        yield running


def connected(server: Running) -> socket.socket:
    where = urlsplit(server.address)
    return socket.create_connection((where.hostname, where.port), timeout=3600)


def send_oddly(server: Running, chance: random.Random) -> int:
    """Return the status of the answer; 0 where the connection was closed without one."""
    headers = {"Host": "localhost", "Connection": "close"} | chance.choice(HEADERS)
    body = chance.choice(BODIES)
    headers.setdefault("Content-Length", str(len(body)))
    lines = [f"{chance.choice(METHODS)} {chance.choice(PATHS)} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    with connected(server) as connection:
        try:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            if chance.random() < 0.2:
                return 0  # hangs up without waiting for the answer
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as file:
                answer = file.readline()
                answer = file.read() if answer.startswith(b"HTTP/1.1 100") else answer
            return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0
        except (ConnectionError, BrokenPipeError):
            return 0


def healthy(server: Running) -> bool:
    return bool(httpx.get(f"{server.address}api/health", timeout=3600).status_code == 200)


@pytest.mark.parametrize("count", [200, pytest.param(4000, marks=pytest.mark.slow)])
def test_no_odd_request_is_a_fault_of_the_server(server: Running, cache: Path, count: int) -> None:
    assert {send_oddly(server, random.Random(seed)) // 100 for seed in range(count)} <= {0, 2, 3, 4}
    assert healthy(server)
    log = (cache / "server.log").read_text()
    assert "Traceback" not in log
    assert "failed" not in log, "hanging up is no error"


@pytest.mark.parametrize(
    ("method", "path", "limit"),
    [("POST", "/api/edits", 1 << 20), ("POST", "/api/decisions", 20 << 20), ("GET", "/", 0), ("POST", "/nowhere", 0)],
)
def test_chunks_without_end_are_cut_off(server: Running, method: str, path: str, limit: int) -> None:
    """Routes that read what is sent, and those that have no use for it."""
    chunk, sent = bytes(1 << 18), 0
    with connected(server) as connection:
        kind = "Transfer-Encoding: chunked\r\nContent-Type: application/json"
        connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{kind}\r\n\r\n".encode())
        try:
            while sent < 400 << 20:
                connection.sendall(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                sent += len(chunk)
        except (ConnectionError, BrokenPipeError):
            pass
    assert limit <= sent < limit + (64 << 20), "what the system buffers, but no more"
    assert healthy(server)


def test_promises_of_bodies_lock_nobody_out(server: Running, run: Run) -> None:
    photo = next((run.folder.parent / "squares" / "test").rglob("*.png")).read_bytes()
    with ExitStack() as open_ones:
        for number in range(60):
            connection = open_ones.enter_context(connected(server))
            path = ("/api/decisions", "/api/edits")[number % 2]
            length = (20 << 20, 1 << 20)[number % 2]
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\nx"
            connection.sendall(head.encode())
        for _ in range(5):
            assert httpx.post(f"{server.address}api/decisions", content=photo, timeout=3600).status_code == 200
            assert healthy(server)


def test_editors_at_once_lose_nothing(server: Running) -> None:
    """Each looks, edits, and tries again if somebody was faster: all edits are there at the end, each once."""

    def work(editor: int) -> None:
        with httpx.Client(base_url=server.address, timeout=3600) as client:
            for number in range(6):
                while True:
                    revision = client.get("/api/health").json()["revision"]
                    edit = {"edit": "note", "node": editor % 3 + 1, "text": f"editor {editor}, note {number}"}
                    status = client.post("/api/edits", json={"revision": revision, "edit": edit}).status_code
                    if status == 200:
                        break
                    assert status == 409

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    done = httpx.get(f"{server.address}api/edits", timeout=3600).json()["done"]
    wanted = [f"Patch {e % 3 + 1} is called “editor {e}, note {n}”" for e in range(8) for n in range(6)]
    assert all(done.count(text) == 1 for text in wanted)


@pytest.fixture(scope="module")
def open_server(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One that other computers can call."""
    folder = tmp_path_factory.mktemp("open")
    with serving(run.folder, "--host", "0.0.0.0", "--edits-dir", str(folder / "work"), cache=folder) as running:
        yield running


def test_other_computers_need_the_token(open_server: Running) -> None:
    where = urlsplit(open_server.address)
    base, token = f"http://127.0.0.1:{where.port}", where.query.removeprefix("token=")
    assert len(token) >= 32
    for path in ("/", "/api/health", "/api/run", "/assets/app.js", "/openapi.json", "/images/training/0/picture"):
        for given in ("", "?token=", f"?token={token[:-1]}", f"?token={token}x"):
            assert httpx.get(base + path + given, timeout=3600).status_code == 401
    wrong = {"Authorization": f"Bearer {token[::-1]}"}
    assert httpx.post(f"{base}/api/edits/undo", json={"revision": 0}, headers=wrong, timeout=3600).status_code == 401
    right = {"Authorization": f"Bearer {token}"}
    assert httpx.get(f"{base}/api/health", headers=right, timeout=3600).status_code == 200
    with httpx.Client(base_url=base, timeout=3600, follow_redirects=True) as browser:
        page = browser.get(f"/edit?token={token}")
        assert (page.status_code, page.url.path, page.url.query) == (200, "/edit", b"")
        assert browser.get("/api/run").status_code == 200
        assert browser.post(f"/api/edits/undo?token={token}", json={"revision": 0}).status_code == 422  # by cookie
    assert "httponly" in page.history[0].headers["set-cookie"].lower()
    with connected(open_server) as connection:
        connection.sendall(f"GET //evil.example/?{where.query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        answer = connection.recv(10_000).lower()
    assert answer.split()[1] in (b"303", b"404")
    assert b"location: //" not in answer, "a link leads nowhere else"

"""Whom the server answers, by the headers of a request; and how it starts."""

import re
import socket
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")

from starlette.applications import Starlette  # noqa: E402
from starlette.middleware.trustedhost import TrustedHostMiddleware  # noqa: E402
from starlette.responses import PlainTextResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from app_server import Running, revision, undo  # noqa: E402
from prototree import cli  # noqa: E402
from prototree.app import server as app_server  # noqa: E402
from prototree.app.api import create_app  # noqa: E402
from prototree.app.service import Service  # noqa: E402
from prototree.errors import ConfigError, MissingExtraError  # noqa: E402
from prototree.run import Run  # noqa: E402


def status(bound_to: str, method: str = "GET", **headers: str) -> int:
    """The status of the answer; 200 if the app behind was reached."""
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("reached"), methods=[method])])
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=app_server.allowed_hosts(bound_to), www_redirect=False)
    app.add_middleware(app_server.Guard)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return int(TestClient(app).request(method, "/", headers=sent).status_code)


@pytest.mark.parametrize(
    ("bound_to", "host", "expected"),
    [
        ("127.0.0.1", "127.0.0.1:8000", 200),
        ("127.0.0.1", "LOCALHOST:8000", 200),
        ("::1", "[::1]:8000", 200),
        ("127.0.0.1", "192.168.1.5:8000", 400),
        ("127.0.0.1", "rebound.example:8000", 400),
        ("127.0.0.1", "127.0.0.1.rebound.example", 400),
        ("localhost", "192.168.1.5", 400),
        ("0.0.0.0", "192.168.1.5:8000", 200),  # under any name, but with the token only
    ],
)
def test_only_its_own_names_are_answered(bound_to: str, host: str, expected: int) -> None:
    assert status(bound_to, host=host) == expected


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"origin": "http://localhost:1"}, 200),
        ({"origin": "http://localhost:1", "sec_fetch_site": "same-origin"}, 200),
        ({}, 200),  # no page: a program
        ({"origin": "http://localhost:2"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": ""}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
    ],
)
def test_changes_for_other_sites_are_refused(method: str, headers: dict[str, str], expected: int) -> None:
    assert status("127.0.0.1", method, host="localhost:1", **headers) == expected


def ask(server: Running, request: str) -> bytes:
    """Send a request as it is: a client library would tidy its path and headers."""
    where = httpx.URL(server.address)
    with socket.create_connection((where.host, where.port), timeout=3600) as connection:
        connection.sendall(f"{request}\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("host", ["evil.example:8000", "", "[::"])
def test_the_real_server_refuses_other_names(server: Running, host: str) -> None:
    assert ask(server, f"GET /api/health HTTP/1.1\r\nHost: {host}").startswith(b"HTTP/1.1 400 ")


def test_the_real_server_refuses_changes_by_other_sites(client: Any) -> None:
    while undo(client).status_code == 200:
        pass
    before = revision(client)
    for headers, expected in (({"Origin": "http://evil.example"}, 403), ({}, 422)):  # 422: there is nothing to undo
        answer = client.post("/api/edits/undo", json={"revision": before}, headers=headers)
        assert answer.status_code == expected
    assert revision(client) == before


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../../../../etc/passwd",
        "/assets/%2e%2e/%2e%2e/api.py",
        "/assets/..%2f..%2fapi.py",
        "/images/training/..%2f..%2fetc%2fpasswd/picture",
        "/images/training/-1/picture",
        "/images/training/99999/picture",
        "/results/..%2f..%2fetc/passwd",
        "/test/..%2f..%2fetc%2fpasswd",
        "/api/nodes/99999999999999999999",
    ],
)
def test_no_path_from_a_request_reaches_a_file(server: Running, path: str) -> None:
    answer = ask(server, f"GET {path} HTTP/1.1\r\nHost: localhost")
    assert re.match(rb"HTTP/1.1 4(04|22) ", answer), answer[:200]
    assert b"root:" not in answer


def test_a_port_in_use_is_one_clear_line() -> None:
    with app_server.listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="--port"):
        app_server.listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError):
        app_server.listen("203.0.113.7", 0)


def test_without_a_token_no_app_is_made_for_other_computers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {app_server.token_for(host) for host in ("127.0.0.1", "localhost", "::1", "[::1]")} == {None}
    assert app_server.token_for("0.0.0.0") != app_server.token_for("0.0.0.0")
    monkeypatch.setenv("PROTOTREE_TOKEN", "0123456789abcdef")
    assert {app_server.token_for(host) for host in ("127.0.0.1", "0.0.0.0")} == {"0123456789abcdef"}
    monkeypatch.setenv("PROTOTREE_TOKEN", "short")
    with pytest.raises(ConfigError, match="PROTOTREE_TOKEN"):
        app_server.token_for("0.0.0.0")
    with pytest.raises(ConfigError, match="token"):
        create_app(Service(run), host="192.168.1.5")


def test_a_missing_extra_names_its_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(cli.app, ["serve", str(run.folder)])
    assert isinstance(result.exception, MissingExtraError)
    assert "prototree[serve]" in str(result.exception)

"""Whom the server answers, by the headers of a request."""

import asyncio
from typing import Any

import pytest
import uvicorn
from starlette.exceptions import HTTPException
from uvicorn.server import ServerState

from prototree.app import guard, server
from prototree.app.guard import Guard


def ask(bound_to: str, method: str = "GET", **headers: str) -> int:
    """The status of the answer; 200 if the app behind was reached."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"Cache-Control", b"max-age=1")]})

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "headers": pairs}
    asyncio.run(Guard(app, host=bound_to, max_bytes=1000)(scope, receive, send))
    names = {name.lower() for name, _ in sent[0]["headers"]}
    assert {b"content-security-policy", b"x-content-type-options", b"referrer-policy", b"cache-control"} <= names
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("bound_to", "host", "status"),
    [
        ("127.0.0.1", "127.0.0.1:8000", 200),
        ("127.0.0.1", "localhost", 200),
        ("127.0.0.1", "LOCALHOST:8000", 200),
        ("127.0.0.1", "[::1]:8000", 200),
        ("::1", "[::1]:8000", 200),
        ("127.0.0.1", "192.168.1.5:8000", 400),
        ("127.0.0.1", "rebound.example:8000", 400),
        ("localhost", "192.168.1.5", 400),
        ("0.0.0.0", "192.168.1.5:8000", 200),  # a number cannot be rebound
        ("0.0.0.0", "rebound.example", 400),
        ("birds.lan", "birds.lan:8000", 200),
        ("birds.lan", "localhost.rebound.example", 400),
        ("127.0.0.1", "localhost:port", 400),
        ("127.0.0.1", "user@rebound.example", 400),
    ],
)
def test_only_its_own_names_are_answered(bound_to: str, host: str, status: int) -> None:
    assert ask(bound_to, host=host) == status


@pytest.mark.parametrize(
    ("bound_to", "host", "status"),
    [
        ("0.0.0.0", "birds:8000", 200),
        ("0.0.0.0", "Birds.lab.example:8000", 200),
        ("::", "birds.local", 200),
        ("192.168.1.5", "birds", 200),
        ("0.0.0.0", "birds.rebound.example", 400),
        ("0.0.0.0", "local", 400),
        ("127.0.0.1", "birds", 400),  # where only this computer calls, the name is not needed
    ],
)
def test_open_to_others_it_answers_to_the_name_of_its_computer(
    monkeypatch: pytest.MonkeyPatch, bound_to: str, host: str, status: int
) -> None:
    monkeypatch.setattr(guard.socket, "gethostname", lambda: "Birds.lab.example")
    assert ask(bound_to, host=host) == status


def test_a_request_without_a_host_is_refused() -> None:
    assert ask("127.0.0.1") == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_changes_for_other_sites_are_refused(method: str) -> None:
    assert ask("127.0.0.1", method, host="localhost:1", origin="http://localhost:1") == 200
    assert ask("127.0.0.1", method, host="localhost:1") == 200  # no page: a program
    assert ask("127.0.0.1", method, host="localhost:1", origin="http://localhost:2") == 403
    assert ask("127.0.0.1", method, host="localhost:1", origin="http://rebound.example") == 403
    assert ask("127.0.0.1", method, host="localhost:1", origin="null") == 403
    assert ask("127.0.0.1", method, host="localhost:1", origin="http://[") == 403
    assert ask("127.0.0.1", method, host="localhost:1", origin="") == 403
    assert ask("127.0.0.1", method, host="localhost:1", sec_fetch_site="cross-site") == 403


@pytest.mark.parametrize(("length", "status"), [("1000", 200), ("1001", 413), ("-1", 400), ("many", 400)])
def test_too_many_bytes_are_refused_before_they_are_sent(length: str, status: int) -> None:
    assert ask("127.0.0.1", "POST", host="localhost", content_length=length) == status


@pytest.mark.parametrize("promised", [1001, 50_000])
def test_what_is_too_much_is_read_within_limits_before_the_answer(promised: int) -> None:
    # Who was still sending when the connection closed once lost the answer.
    chunks, events = [b"x" * 100] * (promised // 100 + 1), list[str]()

    async def receive() -> Any:
        events.append("read")
        return {"type": "http.request", "body": chunks.pop(), "more_body": bool(chunks)}

    async def send(message: Any) -> None:
        events.append("answer")

    headers = [(b"host", b"localhost"), (b"content-length", str(promised).encode())]
    scope = {"type": "http", "method": "POST", "headers": headers}
    asyncio.run(Guard(send, host="localhost", max_bytes=1000)(scope, receive, send))
    assert events[-2:] == ["answer", "answer"]
    assert events.count("read") == (11 if promised == 1001 else 20), "all of it, but at most twice the limit"


def test_the_answer_to_chunks_ends_the_connection() -> None:
    """Also where nobody reads them: what follows an answer would be taken in without end."""
    answers: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"keep-alive")]})

    async def send(message: Any) -> None:
        answers.append(dict(message["headers"]))

    for headers in ([(b"Transfer-Encoding", b"chunked")], []):
        scope = {"type": "http", "method": "GET", "headers": [(b"host", b"localhost"), *headers]}
        asyncio.run(Guard(app, host="127.0.0.1", max_bytes=1000)(scope, never, send))
    assert [answer[b"connection"] for answer in answers] == [b"close", b"keep-alive"]


async def never() -> Any:
    raise AssertionError("nobody reads it")


class Wire(asyncio.Transport):
    """What the server writes to, here nowhere."""

    closed = False

    def write(self, data: Any) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def test_a_request_that_never_ends_its_head_is_closed() -> None:
    """At the second look; answers that take their time, and pauses between requests, are left alone."""
    answering = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answering.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def call() -> None:
        config = uvicorn.Config(app, log_level="critical", lifespan="off")
        config.load()
        state, whole = ServerState(), b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for asked_before in (False, True):
            connection, wire = server._Connection(config, state, {}), Wire()
            connection.connection_made(wire)
            if asked_before:
                connection.data_received(whole)
                await looked_at(connection, wire, 4, still_open=True)
                answering.set()
                await asyncio.gather(*state.tasks)
                await looked_at(connection, wire, 4, still_open=True)
            connection.data_received(whole[:20])
            await looked_at(connection, wire, 1, still_open=True)
            await looked_at(connection, wire, 1, still_open=False)
            connection.connection_lost(None)

    asyncio.run(call())


async def looked_at(connection: server._Connection, wire: Wire, times: int, *, still_open: bool) -> None:
    for _ in range(times):
        connection._look_again()
        await asyncio.sleep(0)
    assert wire.closed != still_open


def receive_all(monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, Any]], **limits: float) -> int:
    """The status that a body of these messages ends with; 200 if all of it is let through."""
    for name, value in limits.items():
        monkeypatch.setattr(guard, name, value)
    waiting = list(messages)

    async def receive() -> Any:
        if not waiting:
            await asyncio.Event().wait()  # sends nothing more, and stays
        return waiting.pop(0)

    async def read() -> int:
        within = guard._limited(receive, 1000)
        try:
            while (await within()).get("more_body"):
                pass
        except HTTPException as error:
            return error.status_code
        return 200

    return asyncio.run(read())


def test_bodies_are_limited_in_bytes_and_time_and_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"type": "http.request", "body": b"x" * 400, "more_body": True}
    last = {"type": "http.request", "body": b"x" * 200}
    assert receive_all(monkeypatch, [part, part, last]) == 200
    assert receive_all(monkeypatch, [part, part, part, last]) == 413
    assert receive_all(monkeypatch, [part, {"type": "http.disconnect"}]) == 400
    assert receive_all(monkeypatch, [part], _SILENT_SECONDS=0.01) == 408
    assert receive_all(monkeypatch, [part], _BODY_SECONDS=0.0) == 408

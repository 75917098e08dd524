"""What every request passes before anything else looks at it, and the headers of every answer.

A page elsewhere on the web can make this user's browser send requests here. It must not get anything done: the Host
header has to be one of this server's own names (against DNS rebinding), and a request that changes something has to
come from one of this server's own pages or from no page at all (against cross-site requests).

Where other computers can call, every request has to bring the token that was printed at the start: in the link, then in
a cookie, or, from a program, as `Authorization: Bearer TOKEN`.

What a request sends is limited on every route, in bytes and in time, whether it says its length or not.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from h11 import LocalProtocolError
from starlette.exceptions import HTTPException

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]
Refusal = tuple[int, str] | tuple[int, str, Header] | tuple[int, str, Header, Header]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_DISCARD_SECONDS = 5.0
_SILENT_SECONDS = 10.0  # without a byte of what was promised
_BODY_SECONDS = 60.0  # for all of it
MAX_JSON = 1 << 20  # bytes of a request that is no upload
_CLOSE = {"Connection": "close"}
_READING = ("GET", "HEAD", "OPTIONS")


class Guard:
    """Wraps an ASGI app. `uploads` are the paths that take up to `max_bytes`; others take as much as a form needs."""

    def __init__(
        self, app: App, *, host: str, max_bytes: int, uploads: Collection[str] = (), token: str | None = None
    ) -> None:
        self._app, self._host, self._max_bytes = app, host.strip("[]").lower(), max_bytes
        self._uploads, self._token = frozenset(uploads), token
        self._names = {"localhost", self._host, *(() if is_loopback(self._host) else own_names())}
        # Cookies are shared by all ports of a host: two servers must not take each other's.
        self._cookie = f"prototree-{hashlib.sha256((token or '').encode()).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        headers, gone = _first_of_each(scope), False

        async def send_with_headers(message: Message) -> None:
            nonlocal gone
            if gone:
                return
            if message["type"] == "http.response.start":
                own = {name for name, _ in _HEADERS}
                kept = [header for header in message["headers"] if header[0].lower() not in own]
                if not any(name.lower() == b"cache-control" for name, _ in kept):
                    kept.append((b"cache-control", b"no-store"))
                if b"transfer-encoding" in headers:  # unknown length: close the connection after the answer
                    kept = [header for header in kept if header[0].lower() != b"connection"]
                    kept.append((b"connection", b"close"))
                message["headers"] = [*kept, *_HEADERS]
            try:
                await send(message)
            except (LocalProtocolError, OSError):  # the client has gone, which is not our error
                gone = True

        limit = self._max_bytes if scope.get("path") in self._uploads else min(self._max_bytes, MAX_JSON)
        refusal = self._refusal(scope["method"], headers, limit) or self._stranger(scope, headers)
        if refusal is None:
            await self._app(scope, _limited(receive, limit), send_with_headers)
            return
        status, detail, *more = refusal
        body = json.dumps({"detail": detail}).encode()
        answer = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
        if status == 413:
            await _discard(receive, 2 * limit)
            answer.append((b"connection", b"close"))  # do not read what is still being sent
        await send_with_headers({"type": "http.response.start", "status": status, "headers": answer})
        await send_with_headers({"type": "http.response.body", "body": body})

    def _stranger(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Refusal | None:
        """Who does not bring the token; whoever comes by the link gets it as a cookie, and the page without it."""
        if self._token is None:
            return None
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if scope["method"] in ("GET", "HEAD") and self._is_token(given):
            cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Lax"
            path = b"/" + (scope.get("raw_path") or b"").lstrip(b"/\\")  # never of another host
            return 303, "welcome", (b"location", path), (b"set-cookie", cookie.encode())
        scheme, _, bearer = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(bearer.strip()):
            return None
        if self._is_token(_cookie(headers.get(b"cookie", b"").decode("latin-1"), self._cookie)):
            return None
        return (
            401,
            "this server is open to other computers and asks for a token: open the link that it printed at its start, "
            "or send the header Authorization: Bearer TOKEN",
            (b"www-authenticate", b"Bearer"),
        )

    def _is_token(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    def _refusal(self, method: str, headers: Mapping[bytes, bytes], limit: int) -> Refusal | None:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if not self._is_own(host):
            return 400, "this server answers under its own address only; open the address it printed at its start"
        if method not in _READING:
            origin = headers.get(b"origin")
            if origin is not None and _netloc(origin) != host:
                return 403, "a page of another site may not change anything here"
            if headers.get(b"sec-fetch-site", b"same-origin") not in (b"same-origin", b"none"):
                return 403, "a page of another site may not change anything here"
        length = headers.get(b"content-length", b"0").decode("latin-1")
        if not length.isdecimal():
            return 400, "expected a Content-Length that is a number"
        if int(length) > limit:
            return 413, f"expected at most {limit / 2**20:.3g} MiB, got {int(length) / 2**20:.1f} MiB; send less"
        return None

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            urlsplit(f"//{host}").port  # noqa: B018 (raises if it is none)
        except ValueError:
            return False
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # A rebound name arrives as that name, never as a number; numbers are safe where others may call at all.
        return address.is_loopback or not is_loopback(self._host)


def _netloc(origin: bytes) -> str | None:
    """Host and port of the page that sent a request; None where the header is no address."""
    try:
        return urlsplit(origin.decode("latin-1").lower()).netloc
    except ValueError:
        return None


def _first_of_each(scope: Scope) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.lower(), value)
    return headers


def _cookie(text: str, name: str) -> str:
    try:
        found = SimpleCookie(text).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _limited(receive: Receive, limit: int) -> Receive:
    """What a request sends, within limits: each is an answer of its own, also for whoever hangs up in the middle."""
    began, read, complete = time.monotonic(), 0, False

    async def receive_within() -> Message:
        nonlocal read, complete
        if complete:  # from here on only the end of the connection is waited for
            return await receive()
        try:
            left = began + _BODY_SECONDS - time.monotonic()
            async with asyncio.timeout(max(min(_SILENT_SECONDS, left), 0.0)):
                message = await receive()
        except TimeoutError as error:
            raise HTTPException(408, "the request took too long to arrive; try again", _CLOSE) from error
        if message["type"] == "http.disconnect":
            complete = True
            raise HTTPException(400, "the connection ended before all had arrived")
        read += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if read > limit:
            raise HTTPException(413, f"expected at most {limit / 2**20:.3g} MiB; send less", _CLOSE)
        return message

    return receive_within


async def _discard(receive: Receive, most: int) -> None:
    """Reads what a refused request sends, within limits: who is still sending when the door closes hears no answer."""
    read = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while read < most:
                message = await receive()
                read += len(message.get("body", b""))
                if not message.get("more_body"):
                    return


def own_names() -> list[str]:
    """The names under which other computers may know this one, without asking a name server."""
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return list(dict.fromkeys(one for one in (name, short, f"{short}.local") if short))


def is_loopback(host: str) -> bool:
    """Whether only this computer can call an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

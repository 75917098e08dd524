"""What every request passes before anything else looks at it, and the headers of every answer.

A page elsewhere on the web can make this user's browser send requests here. It must not get anything done: the Host
header has to be one of this server's own names (against DNS rebinding), and a request that changes something has to
come from one of this server's own pages or from no page at all (against cross-site requests).
"""

import asyncio
import contextlib
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

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
_READING = ("GET", "HEAD", "OPTIONS")


class Guard:
    """Wraps an ASGI app."""

    def __init__(self, app: App, *, host: str, max_bytes: int) -> None:
        self._app, self._host, self._max_bytes = app, host.strip("[]").lower(), max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in _HEADERS}
                kept = [header for header in message["headers"] if header[0].lower() not in own]
                if not any(name.lower() == b"cache-control" for name, _ in kept):
                    kept.append((b"cache-control", b"no-store"))
                message["headers"] = [*kept, *_HEADERS]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send_with_headers)
            return
        status, detail = refusal
        body = json.dumps({"detail": detail}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status == 413:
            await _discard(receive, 2 * self._max_bytes)
            headers.append((b"connection", b"close"))  # what may still be on its way is not worth reading
        await send_with_headers({"type": "http.response.start", "status": status, "headers": headers})
        await send_with_headers({"type": "http.response.body", "body": body})

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), value)
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if not self._is_own(host):
            return 400, "this server answers under its own address only; open the address it printed at its start"
        if scope["method"] not in _READING:
            origin = headers.get(b"origin")
            if origin is not None and urlsplit(origin.decode("latin-1").lower()).netloc != host:
                return 403, "a page of another site may not change anything here"
            if headers.get(b"sec-fetch-site", b"same-origin") not in (b"same-origin", b"none"):
                return 403, "a page of another site may not change anything here"
        length = headers.get(b"content-length", b"0").decode("latin-1")
        if not length.isdecimal():
            return 400, "expected a Content-Length that is a number"
        if int(length) > self._max_bytes:
            return 413, f"expected at most {self._max_bytes >> 20} MiB, got {int(length) / 2**20:.1f} MiB; send less"
        return None

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            urlsplit(f"//{host}").port  # noqa: B018 (raises if it is none)
        except ValueError:
            return False
        if name in ("localhost", self._host):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # A rebound name arrives as that name, never as a number; numbers are safe where others may call at all.
        return address.is_loopback or not _is_loopback(self._host)


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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

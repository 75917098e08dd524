"""The local server: one socket, one uvicorn process, and a guard that every request passes first.

Against DNS rebinding, the Host header has to be a name of this computer (`TrustedHostMiddleware`); against cross-site
requests, one that changes something has to come from one of the server's own pages or from no page at all. Where other
computers can connect, every request has to bring a token, that of the environment or the one that was printed at the
start: in the link, then in a cookie, or as `Authorization: Bearer TOKEN`. A rebound name has no such cookie, so any
Host is accepted then.
"""

import errno
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
from contextlib import suppress
from urllib.parse import urlsplit

import uvicorn
from h11 import LocalProtocolError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prototree.errors import ConfigError

MAX_UPLOAD = 20 << 20  # bytes of an image
MAX_JSON = 1 << 20  # bytes of any other request
MAX_TOTAL = 384 << 20  # bytes of all requests that are being read or answered
UPLOADS = "/api/decisions"
TOKEN_VARIABLE = "PROTOTREE_TOKEN"  # of the environment: the token, which is then not printed
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_BACKLOG = 256


def listen(host: str, port: int) -> socket.socket:
    """Open a socket, so that a port in use is known before anything long is done."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(_BACKLOG)  # requests that come before all is ready wait
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} is in use already; choose another one with --port") from error
        raise ConfigError(f"cannot listen at {host}, port {port} ({error.strerror}); choose another address") from error
    return listening


def address(listening: socket.socket) -> str:
    """Return the address for a browser on this computer."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def is_loopback(host: str) -> bool:
    """Tell whether only this computer can connect to an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def token_for(host: str) -> str | None:
    """Return the secret of the environment, or make one if other computers can connect; None if only this one can."""
    given = os.environ.get(TOKEN_VARIABLE)
    if given and not re.fullmatch(r"[A-Za-z0-9._~-]{16,200}", given):
        raise ConfigError(f"expected {TOKEN_VARIABLE} to be 16 to 200 letters, digits or . _ ~ -, got something else")
    return given or (None if is_loopback(host) else secrets.token_urlsafe(24))


def allowed_hosts(host: str) -> list[str]:
    """List the names in the Host header that are answered."""
    return ["localhost", "127.0.0.1", "::1", "[::1]", host.strip("[]")] if is_loopback(host) else ["*"]


def serve(app: ASGIApp, listening: socket.socket) -> None:
    """Serve until interrupted. The app logs its own failures; uvicorn's log of clients that hang up is off."""
    config = uvicorn.Config(
        app,
        http="h11",
        log_level="critical",
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=10,
        limit_concurrency=256,
        h11_max_incomplete_event_size=16 << 10,
    )
    uvicorn.Server(config).run(sockets=[listening])


class Guard:
    """ASGI middleware: cross-site requests, the token, limits of request bodies, security headers."""

    def __init__(self, app: ASGIApp, *, token: str | None = None, max_total: int = MAX_TOTAL) -> None:
        self._app, self._token, self._max_total, self._total = app, token, max_total, 0
        # Cookies are shared by all ports of a host: two servers must not take each other's.
        self._cookie = f"prototree-{hashlib.sha256((token or '').encode()).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, n_bytes = Request(scope), 0
        limit = MAX_UPLOAD if scope["path"] == UPLOADS else MAX_JSON

        async def receive_limited() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            self._total += len(message.get("body", b""))
            if n_bytes > limit:
                raise HTTPException(413, f"expected at most {limit >> 20} MiB; send less", {"Connection": "close"})
            if self._total > self._max_total:
                raise HTTPException(503, "too many requests at once; try again", {"Retry-After": "2"})
            return message

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
                if _is_longer(request, limit):  # otherwise the rest would be read without end
                    headers["Connection"] = "close"
            with suppress(LocalProtocolError):  # the client has broken off in the middle of its request
                await send(message)

        try:
            app = self._refuse(request) or self._app
            await app(scope, receive_limited, send_with_headers)
        finally:
            self._total -= n_bytes

    def _refuse(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD", "OPTIONS") and not _is_same_origin(request):
            return JSONResponse({"detail": "a page of another site may not change anything here"}, 403)
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = (bearer.strip() if scheme.lower() == "bearer" else "", request.cookies.get(self._cookie, ""))
        if self._token is None or any(map(self._is_token, given)):
            return None
        if request.method in ("GET", "HEAD") and self._is_token(request.query_params.get("token", "")):
            path = "/" + request.scope["path"].lstrip("/\\")  # never another host
            welcome = RedirectResponse(path, 303)
            welcome.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
            return welcome
        detail = "expected a token: open the link that the server printed, or send Authorization: Bearer TOKEN"
        return JSONResponse({"detail": detail}, 401, {"WWW-Authenticate": "Bearer"})

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), str(self._token).encode())


def _is_same_origin(request: Request) -> bool:
    """Tell whether a request comes from one of the server's own pages, or from a program."""
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("origin")
    try:
        return origin is None or urlsplit(origin.lower()).netloc == request.headers.get("host", "").lower()
    except ValueError:
        return False


def _is_longer(request: Request, limit: int) -> bool:
    """Tell whether a request has an unknown length or more than it may."""
    length = request.headers.get("content-length", "0")
    return "transfer-encoding" in request.headers or not length.isdecimal() or int(length) > limit

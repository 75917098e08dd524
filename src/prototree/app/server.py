"""The server process: one socket, one process, until it is told to stop."""

import asyncio
import errno
import secrets
import socket
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from prototree.app.app import create_app
from prototree.app.guard import is_loopback
from prototree.app.service import Service
from prototree.app.viewer import Viewer
from prototree.editing.session import EditSession
from prototree.errors import ConfigError
from prototree.run import Run

_BACKLOG = 256
_SILENT_SECONDS = 10.0  # from one look at a connection to the next
_NOTHING = object()


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address, so that a port in use is known before anything long is done."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(_BACKLOG)  # whoever comes before all is ready waits instead of being refused
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} is in use already; choose another one with --port") from error
        raise ConfigError(f"cannot listen at {host}, port {port} ({error.strerror}); choose another address") from error
    return listening


def address(listening: socket.socket) -> str:
    """Where a browser finds the app."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def token_for(host: str) -> str | None:
    """A new secret where other computers can call; none where only this one can."""
    return None if is_loopback(host.strip("[]").lower()) else secrets.token_urlsafe(24)


def open_app(session: EditSession, host: str, token: str | None = None) -> FastAPI:
    """The app, with the page that comes first ready. Where other computers can call, it needs a token."""
    return _opened(Service(session), host, token)


def open_viewer(packed: Path, host: str, token: str | None = None) -> FastAPI:
    """The same of a packed tree."""
    return _opened(Viewer(Run.open(packed)), host, token)


def _opened(service: Service | Viewer, host: str, token: str | None) -> FastAPI:
    if token is None and token_for(host) is not None:
        raise ConfigError(f"expected a token, since other computers can call {host}; make one with token_for")
    service.tree()
    return create_app(service, host=host, token=token)


class _Connection(H11Protocol):
    """One that survives being asked in no language at all, and ends where nothing is asked."""

    _look: asyncio.TimerHandle | None = None
    _silent_after: object = _NOTHING

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look = self.loop.call_later(_SILENT_SECONDS, self._look_again)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._look is not None:
            self._look.cancel()

    def _look_again(self) -> None:
        """Closes a connection that at two looks in a row has begun a request, or not even that, and not asked it.

        Between two requests the server's own timer is running, and ends what is not used any more.
        """
        silent = (self.cycle is None or self.cycle.response_complete) and self.timeout_keep_alive_task is None
        if silent and self._silent_after is self.cycle:
            self.transport.close()
            return
        self._silent_after = self.cycle if silent else _NOTHING
        self._look = self.loop.call_later(_SILENT_SECONDS, self._look_again)

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except LocalProtocolError:  # in the middle of an answer, or of one that may hold no words
            self.transport.close()


def serve(app: FastAPI, listening: socket.socket) -> None:
    """Serves until interrupted. What fails in the app is in our own log; that callers hang up or mumble is in none."""
    config = uvicorn.Config(
        app,
        http=_Connection,
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_keep_alive=10,
        backlog=_BACKLOG,
    )
    uvicorn.Server(config).run(sockets=[listening])

"""The browser app: its pages, its JSON API, and how errors are answered. What takes time runs in worker threads.

Most routes are methods of the service as they are (`ROUTES`). Pages are filled on the server; scripts only add to them.
"""

import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from jinja2 import Environment
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles

from prototree._version import __version__
from prototree.app.jobs import BusyError, Worker
from prototree.app.schemas import FinetuneResponse, Key, NodeNumber, WebP
from prototree.app.server import MAX_TOTAL, UPLOADS, Guard, allowed_hosts, is_loopback
from prototree.app.service import Service
from prototree.app.views import NotFoundError
from prototree.editing.workbench import UnknownNodeError
from prototree.errors import ConfigError, ConflictError, NotAnImageError, ProtoTreeError, TooLargeError
from prototree.evaluation.tables import percent
from prototree.reporting import script_json, templates
from prototree.reporting.tree_page import tree_body

log = logging.getLogger(__name__)

STATUS: dict[type[Exception], int] = {
    ClientDisconnect: 400,
    NotFoundError: 404,
    UnknownNodeError: 404,
    ConflictError: 409,
    TooLargeError: 413,
    NotAnImageError: 415,
    ProtoTreeError: 422,  # all others of ours
    BusyError: 503,
}
"""The HTTP status of each kind of error; the nearest base class counts."""
_DETAIL = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"description": "Why it was refused", "content": {"application/json": {"schema": _DETAIL}}}
    for code in (400, 401, 403, 404, 409, 413, 415, 422, 503)
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_UPLOAD = {"requestBody": {"required": True, "content": {"application/octet-stream": _BINARY}}}


# ---- pages


@dataclass(frozen=True)
class Pages:
    """The HTML pages of a run."""

    service: Service

    def tree(self) -> str:
        """Fill the page of the tree, which is the report's."""
        explanation, data = self.service.tree()
        return self._render("tree", body=tree_body(explanation), data=script_json(data))

    def try_image(self) -> str:
        """Fill the page that takes an image."""
        return self._render("test", decision=None, body="", samples=self.service.samples()[:24])

    def result(self, key: Key) -> str:
        """Fill the page of a decision, which is the report's, above the place for the next image."""
        result, samples = self.service.result(key), self.service.samples()[:24]
        return self._render("test", decision=result.decision, body=result.body, samples=samples)

    def errors(self) -> str:
        """Fill the page of wrong predictions, by the node that is responsible."""
        errors, by_node = self.service.errors(), dict[int | None, list[dict[str, Any]]]()
        for error in errors["images"]:
            by_node.setdefault(error["node"], []).append(error)
        nodes = {node.node: node for node in self.service.nodes()}
        groups = sorted(by_node.items(), key=lambda item: (item[0] is None, -len(item[1]), item[0] or 0))
        return self._render("errors", errors=errors, groups=groups, nodes=nodes)

    def edit(self) -> str:
        """Fill the page of all nodes, to choose one."""
        return self._render("edit", nodes=self.service.nodes())

    def edit_node(self, node: NodeNumber) -> str:
        """Fill the page of one node, and what can be done to it."""
        return self._render("edit", "edit_node.html", node=self.service.node(node))

    def api(self, request: Request) -> str:
        """Fill the page about the API, whose address is the one that the browser sees."""
        paths = request.app.openapi()["paths"].items()
        calls = [(method.upper(), path, call) for path, methods in paths for method, call in methods.items()]
        return self._render("api", calls=calls, address=str(request.base_url).rstrip("/"))

    def _render(self, here: str, template: str = "", **values: Any) -> str:
        common = {"run": self.service.run(), "can_edit": self.service.can_edit, "here": here}
        return _environment().get_template(template or f"{here}.html").render(common, **values)


@cache
def _environment() -> Environment:
    environment = templates("prototree.app")
    environment.filters |= {"percent": percent, "few": _few}
    return environment


def _few(names: list[str], shown: int = 3) -> str:
    isolated = (f"\u2068{name}\u2069" for name in names[:shown])  # each has a text direction of its own
    more = len(names) - shown
    return ", ".join(isolated) + (f" and {more} more" if more > 0 else "")


# ---- routes

REGION = "/images/training/{index}/region/{left}/{top}/{right}/{bottom}"


class Route(NamedTuple):
    """A method of the service or of a part of it, at an address; without a tag the API's description leaves it out."""

    method: Literal["GET", "POST"]
    path: str
    work: Callable[[Service], Callable[..., Any]]
    worker: Literal["predict", "edit", "draw"] | None = None  # None: at once
    tag: str = ""


ROUTES = (
    Route("GET", "/", lambda service: Pages(service).tree, "edit"),
    Route("GET", "/test", lambda service: Pages(service).try_image),
    Route("GET", "/test/{key}", lambda service: Pages(service).result),
    Route("GET", "/api", lambda service: Pages(service).api),
    Route("GET", "/api/run", lambda service: service.run, None, "tree"),
    Route("GET", "/api/decisions/{key}", lambda service: service.decision, None, "test"),
    Route("GET", "/results/{key}/{name}", lambda service: service.result_picture, None, "test"),
)
IMAGE_ROUTES = (  # where the run's images are here
    Route("GET", "/errors", lambda service: Pages(service).errors, "edit"),
    Route("GET", "/edit", lambda service: Pages(service).edit, "edit"),
    Route("GET", "/edit/{node}", lambda service: Pages(service).edit_node, "edit"),
    Route("GET", "/api/nodes", lambda service: service.nodes, "edit", "tree"),
    Route("GET", "/api/nodes/{node}", lambda service: service.node, "edit", "tree"),
    Route("GET", "/api/nodes/{node}/candidates", lambda service: service.candidates, "edit", "edit"),
    Route("GET", "/api/images/{split}", lambda service: service.gallery.images, None, "images"),
    Route("GET", "/api/images/training/{index}", lambda service: service.gallery.training_image, None, "images"),
    Route("GET", "/images/{split}/{index}/{kind}", lambda service: service.gallery.picture, "draw", "images"),
    Route("GET", REGION, lambda service: service.gallery.region, "draw", "images"),
    Route("GET", "/api/errors", lambda service: service.errors, "edit", "test"),
    Route("POST", "/api/decisions/sample", lambda service: service.decide_sample, "predict", "test"),
    Route("GET", "/api/edits", lambda service: service.edits, "edit", "edit"),
    Route("POST", "/api/edits", lambda service: service.apply, "edit", "edit"),
    Route("POST", "/api/edits/save", lambda service: service.save, "edit", "edit"),
    Route("POST", "/api/edits/{step}", lambda service: service.undo_or_redo, "edit", "edit"),
    Route("GET", "/api/finetune", lambda service: service.finetuning.status, "edit", "edit"),
    Route("POST", "/api/finetune", lambda service: service.finetuning.start, "edit", "edit"),
)


@dataclass
class AppState:
    """The service of the run that is open, and one thread for each kind of work, so that none waits for another."""

    service: Service
    predict: Worker
    edit: Worker
    draw: Worker

    def add_route(self, app: FastAPI, route: Route) -> None:
        """Serve a method: its parameters are those of the request, its return type is a page, a picture or JSON."""

        async def call(**params: Any) -> Any:
            work = partial(route.work(self.service), **params)
            return work() if route.worker is None else await getattr(self, route.worker).run(work)

        method = route.work(self.service)
        signature = inspect.signature(method)
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__name__, call.__doc__ = method.__name__, method.__doc__
        answer = {str: HTMLResponse, WebP: WebP}.get(signature.return_annotation, JSONResponse)
        options: dict[str, Any] = {"tags": [route.tag], "include_in_schema": bool(route.tag), "response_class": answer}
        app.add_api_route(route.path, call, methods=[route.method], **options)

    async def health(self) -> dict[str, str | int]:
        """That the server is running, even if other requests are waiting."""
        revision, waiting = self.service.revision, self.predict.waiting
        return {"status": "ok", "version": __version__, "revision": revision, "waiting": waiting}

    async def decide(self, request: Request, name: Annotated[str, Query(max_length=200)] = "image") -> dict[str, Any]:
        """The tree's decision about an image, sent as it is: JPEG, PNG, WebP, BMP, TIFF or GIF."""
        content = await request.body()
        if not content:
            raise HTTPException(400, "expected an image, got nothing (0 bytes); choose a file that is not empty")
        if request.headers.get("content-type", "").lower().startswith("multipart/"):
            raise NotAnImageError("expected the bytes of an image, got a form; send the file itself (--data-binary)")
        return await self.predict.run(self.service.decide, content, name)

    async def open_finetuned(self) -> FinetuneResponse:
        """Opens the run that fine-tuning has made, instead of the current one."""
        self.service = await self.edit.run(self.service.open_finetuned)
        return await self.edit.run(self.service.finetuning.status)


def create_app(
    service: Service,
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    max_waiting: int = 96,
    max_total: int = MAX_TOTAL,
) -> FastAPI:
    """Make the app of a run. Where other computers can connect, only requests with the token are answered."""
    if token is None and not is_loopback(host):
        raise ConfigError(f"expected a token, since other computers can connect to {host}; make one with token_for")
    state = AppState(service, Worker(max_waiting, 0.25), Worker(32, 1.0), Worker(512, 0.02))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        for part in (state.service, state.predict, state.edit, state.draw):
            part.close()

    app = FastAPI(
        title="prototree",
        version=__version__,
        description="Look at a prototype tree, test images, and edit the tree by hand.",
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; /api is our own
        redoc_url=None,
        lifespan=lifespan,
        responses=_ERRORS,
    )
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts(host), www_redirect=False)
    app.add_middleware(Guard, token=token, max_total=max_total)
    app.get("/api/health", tags=["server"])(state.health)
    app.post(UPLOADS, tags=["test"], openapi_extra=_UPLOAD)(state.decide)
    for route in (*ROUTES, *(IMAGE_ROUTES if service.can_edit else ())):
        state.add_route(app, route)
    if service.can_edit:
        app.post("/api/finetune/open", tags=["edit"])(state.open_finetuned)
    packages: list[str | tuple[str, str]] = [("prototree.reporting", "assets"), ("prototree.app", "assets")]
    app.mount("/assets", StaticFiles(packages=packages))
    handlers: dict[Any, Callable[..., Any]] = {StarletteHTTPException: _http_error, RequestValidationError: _invalid}
    handlers |= {kind: partial(_refused, status) for kind, status in STATUS.items()} | {Exception: _failed}
    for error, handler in handlers.items():
        app.add_exception_handler(error, handler)
    return app


# ---- errors


def _answer(request: Request, status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    if "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/api/"):
        page = _environment().get_template("error.html").render(status=status, detail=detail)
        return HTMLResponse(page, status, headers)
    return JSONResponse({"detail": detail}, status, headers)


async def _http_error(request: Request, error: StarletteHTTPException) -> Response:
    return _answer(request, error.status_code, str(error.detail), dict(error.headers or {}))


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    return _answer(request, 422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:500])


async def _refused(status: int, request: Request, error: Exception) -> Response:
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, BusyError) else None
    return _answer(request, status, str(error), headers)


async def _failed(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _answer(request, 500, "something went wrong in the server; its log says what")

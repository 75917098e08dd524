"""The routes of the browser app: its pages and its JSON API. Everything that takes time runs in a worker thread."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles

from prototree._version import __version__
from prototree.app import pages, schemas
from prototree.app.gallery import NotFoundError, PictureKind
from prototree.app.jobs import BusyError, Worker
from prototree.app.server import MAX_TOTAL, UPLOADS, Guard, allowed_hosts, is_loopback
from prototree.app.service import Service
from prototree.editing.edits import Side
from prototree.editing.state import UnknownNodeError
from prototree.errors import ConfigError, ConflictError, NotAnImageError, ProtoTreeError, TooLargeError

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
_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": schemas.ErrorResponse} for code in (400, 401, 403, 404, 409, 413, 415, 422, 503)
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_WEBP: dict[int | str, dict[str, Any]] = {200: {"content": {"image/webp": _BINARY}}}
_UPLOAD = {"requestBody": {"required": True, "content": {"application/octet-stream": _BINARY}}}


@dataclass
class AppState:
    """The service of the run that is open, and one thread for each kind of work, so that none waits for another."""

    service: Service
    predict: Worker
    edit: Worker
    draw: Worker

    def open_finetuned(self) -> schemas.FinetuneResponse:
        self.service = self.service.open_finetuned()
        return self.service.finetuning.status()


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
        description="Explore a prototype tree, try images, and edit the tree by hand.",
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; /api is our own
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.prototree = state
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts(host), www_redirect=False)
    app.add_middleware(Guard, token=token, max_total=max_total)
    app.include_router(router)
    if service.can_edit:
        app.include_router(image_router)
    packages: list[str | tuple[str, str]] = [("prototree.reporting", "assets"), ("prototree.app", "assets")]
    app.mount("/assets", StaticFiles(packages=packages))
    handlers: dict[Any, Callable[..., Any]] = {StarletteHTTPException: _http_error, RequestValidationError: _invalid}
    handlers |= {kind: partial(_refused, status) for kind, status in STATUS.items()} | {Exception: _failed}
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    return app


# ---- errors


def _answer(request: Request, status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    if "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/api/"):
        return HTMLResponse(pages.error(status, detail), status, headers)
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


# ---- routes with or without the run's images


def _state(request: Request) -> AppState:
    return request.app.state.prototree  # type: ignore[no-any-return]


State = Annotated[AppState, Depends(_state)]
Node = Annotated[int, Path(ge=1, le=schemas.MAX_INDEX, description="the node's number")]
Index = Annotated[int, Path(ge=0, le=schemas.MAX_INDEX)]
Key = Annotated[str, Path(max_length=40)]
router, image_router = APIRouter(responses=_ERRORS), APIRouter(responses=_ERRORS)
page = partial(router.get, include_in_schema=False, response_class=HTMLResponse)
image_page = partial(image_router.get, include_in_schema=False, response_class=HTMLResponse)


@page("/")
async def explore_page(state: State) -> str:
    return pages.explore(state.service, *await state.edit.run(state.service.tree))


@page("/try")
async def try_page(state: State) -> str:
    return pages.try_image(state.service, None)


@page("/try/{key}")
async def result_page(key: Key, state: State) -> str:
    return pages.try_image(state.service, state.service.result(key))


@page("/api")
async def api_page(request: Request, state: State) -> str:
    return pages.api(state.service, request.app.openapi(), str(request.base_url))


@router.get("/api/health", tags=["server"])
async def health(state: State) -> dict[str, str | int]:
    """That the server is running, even if other requests are waiting."""
    revision, waiting = state.service.revision, state.predict.waiting
    return {"status": "ok", "version": __version__, "revision": revision, "waiting": waiting}


@router.get("/api/run", tags=["tree"])
async def run(state: State) -> schemas.RunResponse:
    """The run that is open."""
    return state.service.run()


@router.post(UPLOADS, tags=["try"], openapi_extra=_UPLOAD)
async def decide(
    request: Request, state: State, name: Annotated[str, Query(max_length=200)] = "image"
) -> schemas.DecisionResponse:
    """The tree's decision about an image, sent as it is: JPEG, PNG, WebP, BMP, TIFF or GIF."""
    content = await request.body()
    if not content:
        raise HTTPException(400, "expected an image, got nothing (0 bytes); choose a file that is not empty")
    if request.headers.get("content-type", "").lower().startswith("multipart/"):
        raise NotAnImageError("expected the bytes of an image, got a form; send the file itself (curl --data-binary)")
    return await state.predict.run(state.service.decide, content, name)


@router.get("/api/decisions/{key}", tags=["try"])
async def decision(key: Key, state: State) -> schemas.DecisionResponse:
    """An earlier decision, while the server still keeps it."""
    return state.service.result(key).decision


@router.get("/results/{key}/{name}", tags=["try"], responses=_WEBP)
async def result_picture(key: Key, name: Key, state: State) -> Response:
    """A picture of a decision."""
    return _webp(state.service.result_picture(key, name))


def _webp(content: bytes) -> Response:
    return Response(content, media_type="image/webp", headers={"Cache-Control": "private, max-age=3600"})


# ---- routes with the run's images


@image_page("/review")
async def review_page(state: State) -> str:
    return await state.edit.run(pages.review, state.service)


@image_page("/edit")
async def edit_page(state: State) -> str:
    return await state.edit.run(pages.edit, state.service)


@image_page("/edit/{node}")
async def edit_node_page(node: Node, state: State) -> str:
    return await state.edit.run(pages.edit_node, state.service, node - 1)


@image_router.get("/api/nodes", tags=["tree"])
async def nodes(state: State) -> list[schemas.NodeResponse]:
    """All nodes of the current tree, with their prototypes."""
    return await state.edit.run(state.service.nodes)


@image_router.get("/api/nodes/{node}", tags=["tree"])
async def node(node: Node, state: State) -> schemas.NodeResponse:
    """One node with its prototypes."""
    return await state.edit.run(state.service.node, node - 1)


@image_router.get("/api/nodes/{node}/candidates", tags=["edit"])
async def candidates(
    node: Node, state: State, count: Annotated[int, Query(ge=1, le=60)] = 12, side: Side = "right"
) -> list[schemas.PatchResponse]:
    """The training patches nearest to a prototype that may replace it, one per image."""
    return await state.edit.run(state.service.candidates, node - 1, count, side)


@image_router.get("/api/images/{split}", tags=["images"])
async def images(
    split: schemas.Split,
    state: State,
    label: Annotated[int | None, Query(ge=0, le=schemas.MAX_INDEX)] = None,
    start: Annotated[int, Query(ge=0, le=schemas.MAX_INDEX)] = 0,
    count: Annotated[int, Query(ge=1, le=200)] = 60,
) -> list[schemas.ImageResponse]:
    """Images to choose from, all or those of a class."""
    return state.service.gallery.images(split, label, start, count)


@image_router.get("/api/images/training/{index}", tags=["images"])
async def training_image(index: Index, state: State) -> schemas.ImageResponse:
    """A training image with the grid of its patches."""
    return state.service.gallery.training_image(index)


@image_router.get("/images/{split}/{index}/{kind}", tags=["images"], responses=_WEBP)
async def picture(split: schemas.Split, index: Index, kind: PictureKind, state: State) -> Response:
    """An image, reduced, as WebP."""
    return _webp(await state.draw.run(state.service.gallery.picture, split, index, kind))


@image_router.get("/images/training/{index}/region/{left}/{top}/{right}/{bottom}", tags=["images"], responses=_WEBP)
async def region(index: Index, left: Index, top: Index, right: Index, bottom: Index, state: State) -> Response:
    """A region of a training image as WebP."""
    edges = (float(left), float(top), float(right), float(bottom))
    return _webp(await state.draw.run(state.service.gallery.region, index, edges))


@image_router.get("/api/errors", tags=["try"])
async def errors(state: State) -> schemas.ErrorsResponse:
    """Wrong predictions of the current tree, and the nodes that are responsible."""
    return await state.edit.run(state.service.errors)


@image_router.post("/api/decisions/sample", tags=["try"])
async def decide_sample(sample: schemas.SampleRequest, state: State) -> schemas.DecisionResponse:
    """The tree's decision about one of the server's own images."""
    return await state.predict.run(state.service.decide_sample, sample.split, sample.index)


@image_router.get("/api/edits", tags=["edit"])
async def edits(state: State) -> schemas.EditsResponse:
    """The history of edits, and the metrics of the tree."""
    return await state.edit.run(state.service.edits)


@image_router.post("/api/edits", tags=["edit"])
async def apply(request: schemas.EditRequest, state: State) -> schemas.EditsResponse:
    """Applies an edit and refits the leaves."""
    return await state.edit.run(state.service.apply, request)


@image_router.post("/api/edits/save", tags=["edit"])
async def save(request: schemas.RevisionRequest, state: State) -> dict[str, Any]:
    """Writes a new run beside the one that is open; accuracies before and after on the images that it names."""
    return await state.edit.run(state.service.save, request.revision)


@image_router.post("/api/edits/{step}", tags=["edit"])
async def undo_or_redo(
    step: Literal["undo", "redo"], request: schemas.RevisionRequest, state: State
) -> schemas.EditsResponse:
    """Undoes the last edit, or applies the last undone edit again."""
    return await state.edit.run(state.service.undo_or_redo, step, request.revision)


@image_router.get("/api/finetune", tags=["edit"])
async def finetune_status(state: State) -> schemas.FinetuneResponse:
    """Progress of fine-tuning."""
    return await state.edit.run(state.service.finetuning.status)


@image_router.post("/api/finetune", tags=["edit"])
async def finetune(request: schemas.RevisionRequest, state: State) -> schemas.FinetuneResponse:
    """Saves the tree, and trains the network further with it, in a new run; takes minutes."""
    return await state.edit.run(state.service.finetuning.start, request.revision)


@image_router.post("/api/finetune/open", tags=["edit"])
async def open_finetuned(state: State) -> schemas.FinetuneResponse:
    """Opens the run that fine-tuning has made, instead of the current one."""
    return await state.edit.run(state.open_finetuned)

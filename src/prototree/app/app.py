"""The browser app as routes. Everything that takes time runs in a thread; what waits for it is limited."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from prototree._version import __version__
from prototree.app import pages, schemas
from prototree.app.guard import Guard
from prototree.app.jobs import BusyError, Memory, Queue
from prototree.app.results import NotFoundError
from prototree.app.service import Service
from prototree.app.switching import Switch
from prototree.app.viewer import Viewer
from prototree.errors import ConflictError, NotAnImageError, ProtoTreeError, TooLargeError
from prototree.report.templating import asset as report_asset

log = logging.getLogger(__name__)

MAX_UPLOAD = 20 << 20
MAX_WAITING = 96  # requests that wait for the network, whatever their size
MAX_WAITING_BYTES = 384 << 20
_UPLOAD = "/api/decisions"
_REPORT_ASSETS = ("base.css", "tree.css", "mosaic.js", "tree.js", "decision.css")
_OWN_ASSETS = ("app.css", "pages.css", "app.js", "explore.js", "try.js", "edit.js")
_KINDS = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_PICTURES = {"Cache-Control": "private, max-age=3600"}

PathIndex = Annotated[int, Path(ge=0, le=schemas.MAX_INDEX)]
Refusals = dict[int | str, dict[str, Any]]
_DESCRIPTIONS = {
    400: "Not a request for this server, or an empty upload",
    401: "The token is missing",
    404: "No item has that number",
    409: "The tree has been changed in the meantime",
    413: "Too large",
    415: "Not an image",
    422: "Not possible",
    503: "Too many requests are waiting; Retry-After says when to try again",
}
STATUS: dict[type[Exception], int] = {
    NotFoundError: 404,
    ConflictError: 409,
    TooLargeError: 413,
    NotAnImageError: 415,
    ProtoTreeError: 422,  # all others of ours
    BusyError: 503,
}
"""What each kind of error is over HTTP; of an error's kinds the nearest counts."""

_WEBP: Refusals = {200: {"content": {"image/webp": {"schema": {"type": "string", "format": "binary"}}}}}


def _refusals(*codes: int) -> Refusals:
    return {
        code: {"model": schemas.ProblemShape, "description": _DESCRIPTIONS[code]} for code in (400, 401, 422, *codes)
    }


def create_app(
    service: Service | Viewer,
    *,
    host: str = "127.0.0.1",
    max_upload: int = MAX_UPLOAD,
    max_waiting: int = MAX_WAITING,
    max_waiting_bytes: int = MAX_WAITING_BYTES,
    token: str | None = None,
) -> FastAPI:
    """The app around a session, or a packed tree. One thread asks the tree, one edits it, one draws pictures.

    With a token, only requests that carry it are answered.
    """
    mendable = Switch(service) if isinstance(service, Service) else None
    service = mendable or service  # all routes ask the run that is open now
    asking = Queue(max_waiting, max_waiting_bytes)
    editing = Queue(32, 1 << 20, seconds_each=1.0)
    drawing = Queue(512, 1 << 20, seconds_each=0.02)
    queues = (asking, editing, drawing)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()
        for queue in queues:
            queue.close()

    app = FastAPI(
        title="prototree",
        version=__version__,
        description="Explore a prototype tree, try images, and edit the tree by hand.",
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; /api is our own
        redoc_url=None,
        lifespan=lifespan,
    )
    app.add_middleware(Guard, host=host, max_bytes=max_upload, uploads=(_UPLOAD,), token=token)
    _add_error_answers(app)
    _add_pages(app, service, editing)
    _add_health(app, service, asking)
    _add_trying(app, service, asking)
    if mendable is not None:
        _add_pages_of_photos(app, mendable, editing)
        _add_pictures(app, mendable, drawing)
        _add_reading(app, mendable, editing)
        _add_trying_samples(app, mendable, asking)
        _add_editing(app, mendable, editing)
        _add_learning(app, mendable, editing)
    return app


async def _in_turn(queue: Queue, work: Callable[[], Any]) -> Any:
    async with queue.place():
        return await queue.run(work)


def _add_health(app: FastAPI, service: Service | Viewer, asking: Queue) -> None:
    @app.get("/api/health", tags=["server"], responses=_refusals())
    async def health() -> schemas.HealthShape:
        """Answers immediately, even if other requests are waiting."""
        return schemas.HealthShape(status="ok", version=__version__, revision=service.revision, waiting=asking.n_jobs)

    @app.get("/api/run", tags=["tree"], responses=_refusals())
    async def run() -> schemas.RunShape:
        """The run that is open."""
        return service.run()


def _add_reading(app: FastAPI, service: Service, editing: Queue) -> None:
    @app.get("/api/nodes", tags=["tree"], responses=_refusals(503))
    async def nodes() -> list[schemas.NodeShape]:
        """All prototypes of the current tree."""
        return await _in_turn(editing, service.nodes)  # type: ignore[no-any-return]

    @app.get("/api/nodes/{node}", tags=["tree"], responses=_refusals(404, 503))
    async def node(node: PathIndex) -> schemas.NodeShape:
        """One prototype."""
        return await _in_turn(editing, partial(service.node, node))  # type: ignore[no-any-return]

    @app.get("/api/nodes/{node}/candidates", tags=["edit"], responses=_refusals(404, 503))
    async def candidates(
        node: PathIndex, count: Annotated[int, Query(ge=1, le=60)] = 12, side: schemas.Side = "right"
    ) -> schemas.CandidatesShape:
        """The training patches nearest to a prototype, one per photo."""
        return await _in_turn(editing, partial(service.candidates, node, count, side))  # type: ignore[no-any-return]

    @app.get("/api/photos/{split}", tags=["photos"], responses=_refusals(404))
    async def photos(
        split: schemas.Split,
        label: Annotated[int | None, Query(ge=0, le=schemas.MAX_INDEX)] = None,
        start: Annotated[int, Query(ge=0, le=schemas.MAX_INDEX)] = 0,
        count: Annotated[int, Query(ge=1, le=200)] = 60,
    ) -> list[schemas.PhotoShape]:
        """Photos to choose from, all or those of a class."""
        return service.gallery.photos(split, label, start, count)

    @app.get("/api/photos/training/{index}", tags=["photos"], responses=_refusals(404))
    async def photo(index: PathIndex) -> schemas.PhotoGridShape:
        """A training photo with the grid of its patches."""
        return service.gallery.training_photo(index)

    @app.get("/api/mistakes", tags=["try"], responses=_refusals(503))
    async def mistakes() -> schemas.MistakesShape:
        """Wrong answers of the current tree, and the prototypes that are responsible."""
        return await _in_turn(editing, service.mistakes)  # type: ignore[no-any-return]


def _add_trying(app: FastAPI, service: Service | Viewer, asking: Queue) -> None:
    upload = {
        "requestBody": {
            "required": True,
            "description": "The file as it is: JPEG, PNG, WebP, BMP, TIFF or GIF",
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    }

    @app.post(_UPLOAD, tags=["try"], openapi_extra=upload, responses=_refusals(413, 415, 503))
    async def decide(request: Request, name: Annotated[str, Query(max_length=200)] = "image") -> schemas.DecisionShape:
        """The tree's answer for an image."""
        with asking.memory() as memory:
            content = await _body(request, memory)
            if request.headers.get("content-type", "").lower().startswith("multipart/"):
                raise NotAnImageError(
                    "expected the bytes of a photo, got a form; send the file itself, as in: curl --data-binary "
                    "@photo.jpg"
                )
            async with asking.place():  # only whole requests stand in line
                return await asking.run(partial(service.decide, content, name))

    @app.get("/api/decisions/{id}", tags=["try"], responses=_refusals(404))
    async def decision(id: Annotated[str, Path(max_length=40)]) -> schemas.DecisionShape:  # noqa: A002
        """An earlier decision, while the server still keeps it."""
        return service.results.get(id).decision

    @app.get("/results/{id}/{name}", tags=["try"], responses=_refusals(404) | _WEBP)
    async def result_picture(
        id: Annotated[str, Path(max_length=40)],  # noqa: A002
        name: Annotated[str, Path(max_length=40)],
    ) -> Response:
        """A picture of a decision."""
        pictures = service.results.get(id).pictures
        if name not in pictures:
            raise NotFoundError("there is no such picture")
        return Response(pictures[name], media_type="image/webp", headers=_PICTURES)


def _add_trying_samples(app: FastAPI, service: Service, asking: Queue) -> None:
    @app.post("/api/decisions/sample", tags=["try"], responses=_refusals(404, 503))
    async def decide_sample(question: schemas.SampleQuestion) -> schemas.DecisionShape:
        """The tree's answer for one of the server's own photos."""
        return await _in_turn(asking, partial(service.decide_sample, question.split, question.index))  # type: ignore[no-any-return]


def _add_editing(app: FastAPI, service: Service, editing: Queue) -> None:
    @app.get("/api/edits", tags=["edit"], responses=_refusals(503))
    async def standing() -> schemas.EditsShape:
        """The current state of editing."""
        return await _in_turn(editing, service.editing)  # type: ignore[no-any-return]

    @app.post("/api/edits", tags=["edit"], responses=_refusals(404, 409, 503))
    async def edit(question: schemas.EditQuestion) -> schemas.EditsShape:
        """Makes an edit and refits the leaves."""
        return await _in_turn(editing, partial(service.edit, question))  # type: ignore[no-any-return]

    @app.post("/api/edits/undo", tags=["edit"], responses=_refusals(409, 503))
    async def undo(question: schemas.RevisionQuestion) -> schemas.EditsShape:
        """Undoes the last edit."""
        return await _in_turn(editing, partial(service.undo, question.revision))  # type: ignore[no-any-return]

    @app.post("/api/edits/redo", tags=["edit"], responses=_refusals(409, 503))
    async def redo(question: schemas.RevisionQuestion) -> schemas.EditsShape:
        """Makes the last undone edit again."""
        return await _in_turn(editing, partial(service.redo, question.revision))  # type: ignore[no-any-return]

    @app.post("/api/edits/save", tags=["edit"], responses=_refusals(409, 503))
    async def save(question: schemas.RevisionQuestion) -> schemas.SavedShape:
        """Makes a new run next to the original, which is not changed."""
        return await _in_turn(editing, partial(service.save, question.revision))  # type: ignore[no-any-return]


def _add_learning(app: FastAPI, service: Switch, editing: Queue) -> None:
    @app.post("/api/finetune", tags=["edit"], responses=_refusals(409, 503))
    async def learn(question: schemas.RevisionQuestion) -> schemas.FinetuneStatus:
        """Saves the tree, and trains the network further with it, in a new run; takes minutes."""
        return await _in_turn(editing, partial(service.learner.start, question.revision))  # type: ignore[no-any-return]

    @app.post("/api/finetune/open", tags=["edit"], responses=_refusals(409, 503))
    async def open_learned() -> schemas.FinetuneStatus:
        """Opens the run that training further has made, instead of the current one."""
        return await _in_turn(editing, service.open_learned)  # type: ignore[no-any-return]

    @app.get("/api/finetune", tags=["edit"], responses=_refusals(503))
    async def learning() -> schemas.FinetuneStatus:
        """Progress of training further."""
        return await _in_turn(editing, service.learner.status)  # type: ignore[no-any-return]


def _add_pictures(app: FastAPI, service: Service, drawing: Queue) -> None:
    @app.get("/photos/{split}/{index}/{kind}", tags=["photos"], responses=_refusals(404, 503) | _WEBP)
    async def picture(split: schemas.Split, index: PathIndex, kind: pages.PictureKind) -> Response:
        """A photo, reduced, as WebP."""
        content = await _in_turn(drawing, partial(service.gallery.picture, split, index, kind))
        return Response(content, media_type="image/webp", headers=_PICTURES)

    @app.get(
        "/photos/training/{index}/crop/{view}/{row}/{column}",
        tags=["photos"],
        responses=_refusals(404, 503) | _WEBP,
    )
    async def crop(
        index: PathIndex, view: Annotated[str, Path(max_length=40)], row: PathIndex, column: PathIndex
    ) -> Response:
        """A patch of a training photo as WebP."""
        content = await _in_turn(drawing, partial(service.gallery.crop, index, view, row, column))
        return Response(content, media_type="image/webp", headers=_PICTURES)

    @app.get(
        "/photos/training/{index}/region/{left}/{top}/{right}/{bottom}",
        tags=["photos"],
        responses=_refusals(404, 503) | _WEBP,
    )
    async def region(
        index: PathIndex, left: PathIndex, top: PathIndex, right: PathIndex, bottom: PathIndex
    ) -> Response:
        """A region of a training photo as WebP."""
        box = (left, top, right, bottom)
        content = await _in_turn(drawing, partial(service.gallery.region, index, box))
        return Response(content, media_type="image/webp", headers=_PICTURES)


def _add_page(app: FastAPI, path: str, make: Callable[..., Awaitable[str]]) -> None:
    app.add_api_route(path, make, response_class=HTMLResponse, include_in_schema=False)


def _add_pages(app: FastAPI, service: Service | Viewer, editing: Queue) -> None:
    async def explore() -> str:
        explanation, data = await _in_turn(editing, service.tree)
        return pages.explore(service, explanation, data)

    async def try_result(id: Annotated[str, Path(max_length=40)]) -> str:  # noqa: A002
        return pages.try_page(service, service.results.get(id))

    async def try_plain() -> str:
        return pages.try_page(service, None)

    async def describe(request: Request) -> str:
        return pages.api(service, app.openapi(), str(request.base_url))

    for path, make in (("/", explore), ("/try", try_plain), ("/try/{id}", try_result), ("/api", describe)):
        _add_page(app, path, make)
    for name in (*_REPORT_ASSETS, *_OWN_ASSETS):
        app.add_api_route(f"/assets/{name}", partial(_asset, name), include_in_schema=False)


def _add_pages_of_photos(app: FastAPI, service: Service, editing: Queue) -> None:
    async def review() -> str:
        return pages.review(service, await _in_turn(editing, service.mistakes))

    async def edit() -> str:
        return pages.edit(service, await _in_turn(editing, service.nodes))

    async def edit_node(node: PathIndex) -> str:
        return pages.edit_node(service, await _in_turn(editing, partial(service.node, node)))

    for path, make in (("/review", review), ("/edit", edit), ("/edit/{node}", edit_node)):
        _add_page(app, path, make)


async def _asset(name: str) -> Response:
    own = files("prototree.app").joinpath("assets", name)
    text = own.read_text(encoding="utf-8") if name in _OWN_ASSETS else report_asset(name)  # type: ignore[arg-type]
    return Response(text, media_type=_KINDS[name.rpartition(".")[2]], headers={"Cache-Control": "no-cache"})


async def _body(request: Request, memory: Memory) -> bytes:
    """The upload; `Guard` limits its size and its time."""
    content = bytearray()
    async for chunk in request.stream():
        memory.add(len(chunk))
        content += chunk
    if not content:
        raise HTTPException(400, "expected an image, got nothing (0 bytes); choose a file that is not empty")
    return bytes(content)


def _add_error_answers(app: FastAPI) -> None:
    def answer(request: Request, status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
        wants_page = "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/api/")
        if wants_page:
            return HTMLResponse(pages.error(status, detail), status, headers)
        return JSONResponse({"detail": detail}, status, headers)

    @app.exception_handler(StarletteHTTPException)
    async def plain(request: Request, error: StarletteHTTPException) -> Response:
        return answer(request, error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return answer(request, 422, f"{where}: {first['msg']}"[:500])

    async def refused(status: int, request: Request, error: Exception) -> Response:
        headers = {"Retry-After": str(error.retry_after)} if isinstance(error, BusyError) else None
        return answer(request, status, str(error), headers)

    for kind, status in STATUS.items():
        app.add_exception_handler(kind, partial(refused, status))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return answer(request, 500, "something went wrong in the server; its log says what")

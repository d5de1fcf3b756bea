"""The application: its routes, the limits on a request, and the format of errors."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import anyio
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gepc._version import __version__
from gepc.core.errors import OptionError
from gepc.core.files import StrPath
from gepc.serve import messages
from gepc.serve.batching import FullError
from gepc.serve.messages import FIELD, Options, Upload, explain, read_request
from gepc.serve.middleware import Guard, refusal
from gepc.serve.server import Settings
from gepc.serve.service import Service

STATIC = Path(__file__).parent / "static"
DESCRIPTION = 'Out-of-distribution scores, p-values and maps of images. Errors are `{"error": message}`.'
ERRORS = {
    401: "The token is missing or wrong.",
    403: "The request comes from a page of another site.",
    408: "The body arrives too slowly.",
    409: "The detector on disk cannot be loaded; the current one stays in use.",
    413: "Too many bytes or images.",
    415: "The body is neither multipart nor JSON.",
    421: "The host name is not allowed.",
    422: "An option is invalid, or no image could be scored.",
    503: "Busy; `Retry-After` gives the seconds to wait.",
    504: "The request timed out.",
}
BODY_SECONDS, BODY_RATE = 10.0, 50_000
public, api = APIRouter(), APIRouter()
T = TypeVar("T")


def create_app(detector: StrPath, settings: Settings | None = None, backbone: str | None = None) -> FastAPI:
    """An ASGI application that serves a detector. Run it in one process, which holds the queue and enforces the limits.

    Parameters
    ----------
    detector : folder of a saved detector; `GepcError` is raised if it cannot be loaded.
    settings : access and limits; the defaults allow requests from this machine only.
    backbone : replaces the backbone named in the folder.

    Returns
    -------
    fastapi.FastAPI

    Examples
    --------
    >>> import gepc, numpy as np, tempfile
    >>> from gepc.serve import create_app
    >>> images = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
    >>> detector = gepc.create_detector(gepc.load_backbone("photos-tiny"), "pixel_stats").fit(images)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     detector.save(f"{folder}/det")
    ...     app = create_app(f"{folder}/det")
    >>> app.title
    'gepc'
    """
    settings = Settings() if settings is None else settings
    service = Service(Path(detector), settings, backbone)
    app = FastAPI(
        title="gepc",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        lifespan=service.lifespan,
        exception_handlers=dict.fromkeys((HTTPException, RequestValidationError, OptionError, FullError), _error),
    )
    app.state.service = service
    # `Guard` checks the token, also of unknown paths; the dependency only documents it
    documented = [] if settings.token is None else [Depends(HTTPBearer(scheme_name="token", auto_error=False))]
    app.include_router(api, dependencies=documented)
    app.include_router(public)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_middleware(Guard, service=service)
    return app


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


CurrentService = Annotated[Service, Depends(_service)]


async def _error(request: Request, error: Exception) -> JSONResponse:
    """Every expected error as `{"error": message}`."""
    if isinstance(error, RequestValidationError):
        return refusal(422, explain(error.errors()))
    if isinstance(error, OptionError):
        return refusal(422, str(error))
    refused = error if isinstance(error, HTTPException) else _service(request).busy()
    return refusal(refused.status_code, str(refused.detail), dict(refused.headers or {}))


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": messages.Failure, "description": ERRORS[status]} for status in (401, 403, 421, *statuses)}


def _body(as_json: type[BaseModel], options: type[BaseModel]) -> dict[str, Any]:
    """The two formats of a body for OpenAPI, which FastAPI cannot derive from one function."""
    form = options.model_json_schema()
    form["properties"][FIELD] = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
    form["required"] = [FIELD]
    formats = {"multipart/form-data": form, "application/json": as_json.model_json_schema()}
    content = {name: {"schema": schema} for name, schema in formats.items()}
    return {"requestBody": {"required": True, "content": content}}


async def _answer(
    request: Request,
    service: Service,
    options: Options,
    body: type[BaseModel],
    work: Callable[[list[Upload], Options], Awaitable[T]],
) -> T:
    """Read a request and pass it to `work`, within the limits on bytes and time."""
    settings = service.settings
    with contextlib.ExitStack() as held, anyio.move_on_after(settings.timeout):
        chunks = _limited_chunks(request, service, held)
        asked = await read_request(request, options, body, settings.max_images, chunks)
        return await _while_connected(request, work(*asked))
    raise HTTPException(504, f"no answer within {settings.timeout:g} s; send fewer images or try again later")


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the caller goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        left.cancel()


async def _limited_chunks(
    request: Request, service: Service, held: contextlib.ExitStack
) -> AsyncGenerator[bytes, None]:
    """The body of a request, whose length need not be declared; its bytes count as held until `held` is closed.

    A body that is `BODY_SECONDS` later than at `BODY_RATE` bytes per second is given up.
    """
    most, size, start = service.settings.max_bytes, 0, anyio.current_time()
    too_large = HTTPException(413, f"the request is larger than the {most:,} bytes allowed")
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) > most:
        raise too_large
    stream = request.stream()
    while True:
        try:
            with anyio.fail_after(start + BODY_SECONDS + size / BODY_RATE - anyio.current_time()):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise HTTPException(408, "the body of the request arrives too slowly") from error
        size += len(chunk)
        if size > most:
            raise too_large
        held.enter_context(service.held_bytes.take(len(chunk)))
        yield chunk


@api.post(
    "/v1/score",
    response_model=messages.ScoreAnswer,
    responses=_errors(408, 413, 415, 422, 503, 504),
    openapi_extra=_body(messages.ScoreBody, messages.ScoreOptions),
    summary="Score images",
)
async def score(request: Request, service: CurrentService, options: Annotated[messages.ScoreOptions, Query()]) -> Any:
    """Score, p-value and decision for each image, in order.

    An image that cannot be scored has an `error`; if no image can be scored, the status is 422. Options may be query
    parameters, form fields or part of the JSON body.
    """
    answer = await _answer(request, service, options, messages.ScoreBody, service.score)
    if any(result.error is None for result in answer.results):
        return answer
    count = len(answer.results)
    reason = answer.results[0].error if count == 1 else f"none of the {count} images could be scored"
    return JSONResponse(messages.Failure(error=str(reason), results=answer.results).model_dump(), 422)


PNG = {"content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}, "description": "The map."}


@api.post(
    "/v1/map",
    response_class=Response,
    responses={200: PNG, **_errors(408, 413, 415, 422, 503, 504)},
    openapi_extra=_body(messages.MapBody, messages.MapOptions),
    summary="Map of an image",
)
async def map_(request: Request, service: CurrentService, options: Annotated[messages.MapOptions, Query()]) -> Response:
    """The map of one image as PNG. `X-Gepc-Map-Scale` is the map value at full strength, the same for all images."""
    png, scale = await _answer(request, service, options, messages.MapBody, service.map)
    return Response(png, media_type="image/png", headers={"X-Gepc-Map-Scale": f"{scale:.9g}"})


@api.get("/v1/detector", responses=_errors(422), summary="Describe the detector")
async def detector(
    service: CurrentService, options: Annotated[messages.DetectorOptions, Query()]
) -> messages.DetectorAnswer:
    """The detector in use, its guarantee at a false-alarm rate, and the limits on a request."""
    return await service.describe(options)


@api.post("/v1/reload", responses=_errors(409), summary="Reload the detector")
async def reload(service: CurrentService) -> messages.ReloadAnswer:
    """Load the detector again after its folder was replaced. Requests in progress use the former one."""
    return await service.reload()


@api.get("/metrics", response_class=Response, responses=_errors(), summary="Prometheus metrics")
async def metrics(service: CurrentService) -> Response:
    """Metrics in the Prometheus text format."""
    return Response(generate_latest(service.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})


@public.get("/healthz", summary="Liveness")
async def healthz() -> dict[str, str]:
    """`ok` while the process answers."""
    return {"status": "ok"}


@public.get("/readyz", responses={503: {"description": "Shutting down, or the queue is full."}}, summary="Readiness")
async def readyz(service: CurrentService, response: Response) -> dict[str, str]:
    """`ready` if a request would be accepted now, else `busy` and 503."""
    response.status_code = 200 if service.ready else 503
    return {"status": "ready" if service.ready else "busy"}


@public.get("/", include_in_schema=False)
async def page() -> HTMLResponse:
    """The page for images."""
    return _page("index", "gepc: has the model seen anything like this?", "app.js")


@public.get("/docs", include_in_schema=False)
async def docs() -> HTMLResponse:
    """The API reference, which needs no files from other sites."""
    return _page("docs", "gepc: API reference", "docs.js")


def _page(name: str, title: str, script: str) -> HTMLResponse:
    head, body = ((STATIC / f"{part}.html").read_text(encoding="utf-8") for part in ("head", name))
    return HTMLResponse(head.format(title=title, script=script) + body)

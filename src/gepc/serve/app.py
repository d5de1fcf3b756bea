"""The application: its routes and the format of errors."""

from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Form, Query, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartParser

from gepc._version import __version__
from gepc.core.errors import OptionError
from gepc.core.files import StrPath
from gepc.serve import messages
from gepc.serve.batching import FullError
from gepc.serve.messages import Upload, explain
from gepc.serve.middleware import Guard, refusal
from gepc.serve.server import Settings
from gepc.serve.service import Service

STATIC = Path(__file__).parent / "static"
DESCRIPTION = 'Out-of-distribution scores, p-values and maps of images. Errors are `{"error": message}`.'
ERRORS = {
    400: "The form cannot be read.",
    401: "The token is missing or wrong.",
    403: "The request comes from a page of another site.",
    413: "Too many bytes or images.",
    421: "The host name is not allowed.",
    422: "An option is invalid, or no image could be scored.",
    503: "Busy; `Retry-After` gives the seconds to wait.",
    504: "The request timed out.",
}
MAX_NAME_LENGTH = 120
MultiPartParser.spool_max_size = 1 << 40  # uploads stay in memory, since the size of a request is limited
public, api = APIRouter(), APIRouter()


def create_app(detector: StrPath, settings: Settings | None = None, backbone: str | None = None) -> FastAPI:
    """Create an ASGI application that serves a detector.

    Run it in one process, which holds the queue and enforces the limits.

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
    >>> detector = gepc.create_detector(gepc.load_backbone("photos-small"), "pixel_stats").fit(images)
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
    reason = f"the form cannot be read: {refused.detail}" if refused.status_code == 400 else str(refused.detail)
    return refusal(refused.status_code, reason, dict(refused.headers or {}))


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": messages.Failure, "description": ERRORS[status]} for status in (401, 403, 421, *statuses)}


@api.post(
    "/v1/score",
    response_model=messages.ScoreAnswer,
    responses=_errors(400, 413, 422, 503, 504),
    summary="Score images",
)
async def score(
    request: Request,
    service: CurrentService,
    query: Annotated[messages.ScoreOptions, Query()],
    form: Annotated[messages.ScoreForm, Form(media_type="multipart/form-data")],
) -> Any:
    """Score, p-value and decision for each image, in order.

    An image that cannot be scored has an `error`; if no image can be scored, the status is 422.
    """
    count, most = len(form.images), service.settings.max_images
    if count > most:
        raise HTTPException(413, f"{count} images in one request, more than the {most} allowed")
    sent = [name for name, _ in (await request.form()).multi_items() if name != messages.FIELD]
    for names in (sent, [name for name, _ in request.query_params.multi_items()]):
        if len(set(names)) < len(names):
            raise OptionError("an option is given more than once; give each of them once")
    options = query.model_copy(update=form.model_dump(include=set(sent)))
    uploads = [Upload(_plain_name(file, index), await file.read()) for index, file in enumerate(form.images)]
    answer = await service.score(uploads, options)
    if any(result.error is None for result in answer.results):
        return answer
    reason = answer.results[0].error if count == 1 else f"none of the {count} images could be scored"
    return JSONResponse(messages.Failure(error=str(reason), results=answer.results).model_dump(), 422)


def _plain_name(file: UploadFile, index: int) -> str:
    """The caller's file name without folders and control characters."""
    last = PurePosixPath(PureWindowsPath(file.filename or "").name).name
    printable = "".join(letter for letter in last if letter.isprintable()).strip()
    return printable[:MAX_NAME_LENGTH] or f"image {index}"


@api.get("/v1/detector", responses=_errors(422), summary="Describe the detector")
async def detector(
    service: CurrentService, options: Annotated[messages.DetectorOptions, Query()]
) -> messages.DetectorAnswer:
    """The detector in use, its guarantee at a false-alarm rate, and the limits on a request."""
    return await service.describe(options)


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
async def page() -> FileResponse:
    """The page for images."""
    return FileResponse(STATIC / "index.html")


@public.get("/docs", include_in_schema=False)
async def docs() -> FileResponse:
    """The API reference, which needs no files from other sites."""
    return FileResponse(STATIC / "docs.html")

"""The endpoints: what comes in, what goes out, nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BaseModel

from gepc.serve import schemas
from gepc.serve.reading import FIELD, read_order
from gepc.serve.service import Service

STATIC = Path(__file__).parent / "static"
router = APIRouter()

_SENTENCES = {
    401: "No token, or not the right one.",
    403: "Asked by a page of another site.",
    409: "The detector on disk cannot be loaded; the one in service stays.",
    413: "Too many bytes or images.",
    415: "Neither multipart nor JSON.",
    421: "A host name that is not this service's.",
    422: "An option has no sense here, or no image of the request could be scored.",
    503: "Busy; `Retry-After` says when to try again.",
    504: "Not done in time.",
}


def _failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {
        status: {"model": schemas.Failure, "description": _SENTENCES[status]} for status in (401, 403, 421, *statuses)
    }


def _body(as_json: type[BaseModel], options: type[BaseModel]) -> dict[str, Any]:
    """The two forms of a body for OpenAPI, which FastAPI cannot derive from one function."""
    form = options.model_json_schema()
    form["properties"][FIELD] = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
    form["required"] = [FIELD]
    content = {
        "multipart/form-data": {"schema": form},
        "application/json": {"schema": as_json.model_json_schema()},
    }
    return {"requestBody": {"required": True, "content": content}}


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.post(
    "/v1/score",
    response_model=schemas.ScoreAnswer,
    responses=_failures(413, 415, 422, 503, 504),
    openapi_extra=_body(schemas.ScoreBody, schemas.ScoreOptions),
    summary="Score images",
)
async def score(request: Request, options: Annotated[schemas.ScoreOptions, Query()]) -> Any:
    """Score, p-value and verdict of one or many images, in their order.

    An image that cannot be scored is a result with an `error`; when none can, the status is 422. Options may stand in
    the query, in form fields or in the JSON body.
    """
    service = _service(request)
    answer = await service.score(await read_order(request, options, schemas.ScoreBody, service.settings))
    if any(result.error is None for result in answer.results):
        return answer
    count = len(answer.results)
    reason = answer.results[0].error if count == 1 else f"none of the {count} images could be scored"
    failure = schemas.Failure(error=str(reason), results=answer.results)
    return JSONResponse(failure.model_dump(), 422)


@router.post(
    "/v1/map",
    response_class=Response,
    responses={
        200: {"content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}, "description": "The map."},
        **_failures(413, 415, 422, 503, 504),
    },
    openapi_extra=_body(schemas.MapBody, schemas.MapOptions),
    summary="Where in the image",
)
async def map_(request: Request, options: Annotated[schemas.MapOptions, Query()]) -> Response:
    """The map of one image as PNG. `X-Gepc-Map-Scale` is the map's value at full strength, the same for all images."""
    service = _service(request)
    png, scale = await service.map(await read_order(request, options, schemas.MapBody, service.settings))
    return Response(png, media_type="image/png", headers={"X-Gepc-Map-Scale": f"{scale:.9g}"})


@router.get("/v1/detector", responses=_failures(422), summary="What the detector is and promises")
async def detector(request: Request, options: Annotated[schemas.DetectorOptions, Query()]) -> schemas.DetectorAnswer:
    """The detector in service, its guarantee at an alpha, and what a request may hold."""
    return _service(request).describe(options.alpha)


@router.post("/v1/reload", responses=_failures(409), summary="Read the detector again")
async def reload(request: Request) -> schemas.ReloadAnswer:
    """Take up a detector that was replaced on disk. Calls under way are answered by the former one."""
    return await _service(request).reload()


@router.get("/healthz", summary="Is the process alive")
async def healthz() -> schemas.Status:
    """`ok` while the process answers at all."""
    return schemas.Status(status="ok")


@router.get(
    "/readyz",
    responses={503: {"model": schemas.Status, "description": "Shutting down, or the queue is full."}},
    summary="Would a request be served now",
)
async def readyz(request: Request) -> Any:
    """`ready`, or 503."""
    ready = _service(request).ready
    return schemas.Status(status="ready") if ready else JSONResponse({"status": "busy"}, 503)


@router.get("/metrics", response_class=Response, responses=_failures(), summary="Counters for Prometheus")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(_service(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/", include_in_schema=False)
async def page() -> FileResponse:
    """The page."""
    return FileResponse(STATIC / "index.html")


@router.get("/docs", include_in_schema=False)
async def docs() -> FileResponse:
    """The API for people, from files of this service alone."""
    return FileResponse(STATIC / "docs.html")

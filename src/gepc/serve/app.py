"""The application: routes inside layers of middleware, errors as one sentence each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException as StarletteHTTPException

from gepc._version import __version__
from gepc.serve import routes
from gepc.serve.middleware import Access, Bounded, Observe
from gepc.serve.reading import sentence
from gepc.serve.service import Service
from gepc.serve.settings import Settings

DESCRIPTION = 'Is this image out of distribution, how sure are we, and where? Errors are `{"error": sentence}`.'


def create_app(
    detector: str | os.PathLike[str], settings: Settings | None = None, backbone: str | None = None
) -> FastAPI:
    """An ASGI application that serves the detector in this folder; raises `GepcError` where it cannot be loaded.

    Run it in one process: the queue and its bounds are that process's. `backbone` replaces the one in the folder.
    """
    settings = Settings() if settings is None else settings
    service = Service(Path(detector), settings, backbone)
    app = FastAPI(
        title="gepc",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        exception_handlers={
            StarletteHTTPException: _refused,
            RequestValidationError: _invalid,
        },
    )
    app.state.service = service
    app.include_router(routes.router)
    app.mount("/static", StaticFiles(directory=routes.STATIC), name="static")
    app.add_middleware(Bounded, service=service)  # the last one added is the outermost
    app.add_middleware(Access, token=settings.token, hosts=settings.hosts)
    app.add_middleware(Observe, service=service)
    if settings.token is not None:
        _document_token(app)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.service.close()


def _document_token(app: FastAPI) -> None:
    plain = app.openapi

    def with_token() -> dict[str, Any]:
        schema = plain()
        schema.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"token": []}]
        return schema

    app.openapi = with_token  # type: ignore[method-assign]


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException)
    return JSONResponse({"error": str(error.detail)}, error.status_code, dict(error.headers or {}))


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"error": sentence(error.errors())}, 422)

"""A request's body to named image files and options: multipart or JSON, in memory, never on disk."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Generic, TypeVar

from fastapi import HTTPException, Request
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from gepc.serve.settings import Settings

FIELD = "images"
LONGEST_FIELD = 1024
LONGEST_NAME = 120
Options = TypeVar("Options", bound=BaseModel)


@dataclass(frozen=True)
class Upload:
    """One image file as it came; `data` is None where its text was not base64."""

    name: str
    data: bytes | None


@dataclass(frozen=True)
class ScoreRequest(Generic[Options]):
    """What one request asks for."""

    uploads: list[Upload]
    options: Options


class _InMemoryParser(MultiPartParser):
    """Starlette's parser writes parts above a size to temporary files; the body is bounded, so none need be."""

    spool_max_size = 1 << 40


async def read_order(
    request: Request, query: Options, body: type[BaseModel], settings: Settings
) -> ScoreRequest[Options]:
    """The images and options of a request; anything wrong with it is an `HTTPException` with a sentence."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        uploads, given = await _read_form(request, settings)
        chosen = _validated(type(query), given)
    elif kind == "application/json":
        # parsing megabytes takes time, which the event loop does not have
        uploads, chosen = await run_in_threadpool(_read_json, await request.body(), body)
    else:
        raise HTTPException(415, f"send multipart/form-data with the field {FIELD!r}, or application/json")
    if not uploads:
        raise HTTPException(422, f"there is no image; give at least one in the field {FIELD!r}")
    if len(uploads) > settings.max_images:
        raise HTTPException(413, f"{len(uploads)} images in one request, more than the {settings.max_images} allowed")
    update = {name: getattr(chosen, name) for name in chosen.model_fields_set & set(type(query).model_fields)}
    return ScoreRequest(uploads, query.model_copy(update=update))


async def _read_form(request: Request, settings: Settings) -> tuple[list[Upload], dict[str, Any]]:
    parser = _InMemoryParser(
        request.headers,
        request.stream(),
        max_files=settings.max_images,
        max_fields=16,
        max_part_size=LONGEST_FIELD,
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        status = 413 if "Too many files" in error.message else 422
        raise HTTPException(status, f"the form cannot be read: {error.message}") from error
    try:
        return await _uploads(form), {name: value for name, value in form.multi_items() if name != FIELD}
    finally:
        await form.close()


async def _uploads(form: FormData) -> list[Upload]:
    found: list[Upload] = []
    for name, value in form.multi_items():
        if isinstance(value, UploadFile) != (name == FIELD):
            raise HTTPException(422, f"images are files in the field {FIELD!r}, and nothing else is a file")
        if isinstance(value, UploadFile):
            found.append(Upload(_plain_name(value.filename, len(found)), await value.read()))
    return found


def _read_json(text: bytes, body: type[BaseModel]) -> tuple[list[Upload], BaseModel]:
    try:
        chosen = body.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise HTTPException(422, sentence(error.errors(include_input=False, include_url=False))) from error
    images: list[str] = getattr(chosen, FIELD)
    return [Upload(f"image {index}", _from_base64(image)) for index, image in enumerate(images)], chosen


def _from_base64(text: str) -> bytes | None:
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def _validated(options: type[BaseModel], given: dict[str, Any]) -> BaseModel:
    try:
        return options.model_validate(given)
    except ValidationError as error:
        raise HTTPException(422, sentence(error.errors(include_input=False, include_url=False))) from error


def sentence(errors: Sequence[Any], most: int = 3) -> str:
    """What is wrong with the options, without repeating what was sent."""
    parts = []
    for error in errors[:most]:
        place = ".".join(str(part) for part in error["loc"] if part not in ("query", "body"))
        parts.append(f"{place[:60]}: {error['msg']}" if place else str(error["msg"]))
    return "; ".join(parts)


def _plain_name(name: str | None, index: int) -> str:
    """The caller's name for a file without folders and control characters."""
    last = PurePosixPath(PureWindowsPath(name or "").name).name
    printable = "".join(letter for letter in last if letter.isprintable()).strip()
    return printable[:LONGEST_NAME] or f"image {index}"

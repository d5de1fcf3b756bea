"""The API's messages as typed data: requests, read from multipart or JSON bodies in memory, and answers."""

from __future__ import annotations

import base64
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Annotated, Any, TypeVar

from fastapi import HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from gepc.maps.regions import MapRegion as Region

log = logging.getLogger("gepc.serve")
FIELD = "images"
MAX_FIELD_SIZE = 1024
MAX_NAME_LENGTH = 120

Alpha = Annotated[
    float | None,
    Field(ge=1e-9, lt=1, description="False-alarm rate; the default is 0.05, or the smallest possible rate if larger."),
]
Base64 = Annotated[str, Field(description="An image file in base64, or a data: URI.")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DetectorOptions(_Strict):
    """Options of `GET /v1/detector`."""

    alpha: Alpha = None
    rates: bool = Field(default=False, description="Include a table of false-alarm rates with their p-value limits.")


class ScoreOptions(_Strict):
    """Options of `POST /v1/score`, as query parameters, form fields or JSON; the body overrides the query."""

    alpha: Alpha = None
    group: str | None = Field(
        default=None, max_length=200, description="Group of the images, if the detector has groups."
    )
    map: bool = Field(default=False, description="Include the map as a transparent PNG (data: URI).")
    explain: bool = Field(default=False, description="Include the evidence of each part of the score, and the reason.")
    seen: bool = Field(default=False, description="Include the image as the network sees it, as a PNG (data: URI).")


class ScoreBody(ScoreOptions):
    """`POST /v1/score` as JSON."""

    images: list[Base64] = Field(min_length=1)


class MapOptions(_Strict):
    """`POST /v1/map` takes no options."""


class MapBody(MapOptions):
    """`POST /v1/map` as JSON."""

    images: list[Base64] = Field(min_length=1, max_length=1)


class MapRegion(BaseModel):
    """Where the map stands out, in pixels of the network's input; the lower and right ends are excluded."""

    top: int
    left: int
    bottom: int
    right: int
    area: int
    score: float = Field(description="Largest map value inside.")
    p_value: float | None = Field(description="Share of in-distribution images with such a value anywhere.")
    part: str | None = Field(description="The part of the map that raised it.")

    @classmethod
    def of(cls, region: Region) -> MapRegion:
        """From a region of a map."""
        box = dict(zip(("top", "left", "bottom", "right"), region.box, strict=True))
        p_value = None if math.isnan(region.p_value) else region.p_value
        return cls(**box, area=region.area, score=region.score, p_value=p_value, part=region.part)


class ImageResult(BaseModel):
    """Result for one image; `error` is the reason if it could not be scored."""

    index: int
    name: str
    score: float | None = Field(default=None, description="Higher means more out of distribution.")
    p_value: float | None = Field(default=None, description="Share of in-distribution images with at least this score.")
    alarm: bool | None = Field(default=None, description="Whether the image is out of distribution at rate `alpha`.")
    error: str | None = None
    map: str | None = None
    regions: list[MapRegion] | None = Field(default=None, description="With `map`: what stands out, largest first.")
    seen: str | None = None


class ExplainedResult(ImageResult):
    """Result for one image with the reason for it, which `explain` asks for."""

    reason: str | None = Field(description="The part of the score that speaks most for an alarm.")
    evidence: dict[str, float] = Field(description="Tail probability of each part; empty for a method without parts.")


class ScoreAnswer(BaseModel):
    """Results in the order of the images."""

    detector: str = Field(description="Identity of the detector; changes when its files change.")
    alpha: float
    guarantee: str
    map_scale: float | None = Field(description="Map value drawn at full strength, the same for all images.")
    results: list[ExplainedResult | ImageResult]


class Failure(BaseModel):
    """The reason for an error; `results` gives one per image if no image could be scored."""

    error: str
    results: list[ExplainedResult | ImageResult] | None = None


class Rate(BaseModel):
    """A false-alarm rate."""

    alpha: float
    limit: float = Field(description="p-values up to this limit raise an alarm.")
    low: float = Field(description="5 % quantile of the realised false-alarm rate over calibration sets of this size.")
    high: float = Field(description="95 % quantile of the same.")


class GuaranteeAt(Rate):
    """What is guaranteed at `alpha`."""

    calibration_images: int
    sentence: str


class Input(BaseModel):
    """Input of the network."""

    height: int
    width: int
    channels: int
    resize: str


class Limits(BaseModel):
    """Limits on a request."""

    bytes_per_request: int
    images_per_request: int
    pixels_per_image: int
    network_pixels_per_image: int = Field(description="Limit on an image as the network sees it.")
    formats: list[str]


class DetectorAnswer(BaseModel):
    """The detector, its guarantee and the limits on a request."""

    detector: str
    version: str
    method: str
    calibration: str
    backbone: str
    timesteps: list[int]
    weights: list[float]
    passes_per_image: str
    fit_images: int
    calibration_images: int
    groups: dict[str, int] = Field(description="Calibration images by group; empty for a detector without groups.")
    maps: bool
    map_scale: float | None
    smallest_alpha: float
    guarantee: GuaranteeAt
    rates: list[Rate] | None = Field(default=None, description="Increasing in `alpha`.")
    input: Input
    limits: Limits


class ReloadAnswer(BaseModel):
    """The detector in use after reloading."""

    detector: str
    changed: bool


Options = TypeVar("Options", bound=BaseModel)


@dataclass(frozen=True)
class Upload:
    """An image file as received; `data` is None if its text was not base64."""

    name: str
    data: bytes | None


class _InMemoryParser(MultiPartParser):
    """Starlette writes large parts to temporary files; the body's size is limited, so they fit in memory."""

    spool_max_size = 1 << 40


async def read_request(
    request: Request, query: Options, body: type[BaseModel], max_images: int, chunks: AsyncGenerator[bytes, None]
) -> tuple[list[Upload], Options]:
    """Read images and options from the chunks of a request's body; raises `HTTPException` if they are invalid."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        uploads, given = await _read_form(request, max_images, chunks)
        chosen = _validated(lambda: type(query).model_validate(given))
    elif kind == "application/json":
        text = b"".join([chunk async for chunk in chunks])
        uploads, chosen = await run_in_threadpool(_read_json, text, body)  # parsing megabytes would block the loop
    else:
        raise HTTPException(415, f"send multipart/form-data with the field {FIELD!r}, or application/json")
    if not uploads:
        raise HTTPException(422, f"the request contains no image; send at least one in the field {FIELD!r}")
    if len(uploads) > max_images:
        raise HTTPException(413, f"{len(uploads)} images in one request, more than the {max_images} allowed")
    update = {name: getattr(chosen, name) for name in chosen.model_fields_set & set(type(query).model_fields)}
    return uploads, query.model_copy(update=update)


async def _read_form(
    request: Request, max_images: int, chunks: AsyncGenerator[bytes, None]
) -> tuple[list[Upload], dict[str, Any]]:
    parser = _InMemoryParser(request.headers, chunks, max_files=max_images, max_fields=16, max_part_size=MAX_FIELD_SIZE)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        log.warning("a form cannot be read: %r", error.message)
        status = 413 if "Too many files" in error.message else 422
        raise HTTPException(status, f"the form cannot be read: {error.message}") from error
    except (LookupError, ValueError) as error:  # some encodings that Python knows are not for text
        log.warning("a form cannot be read: its encoding is not one of text")
        raise HTTPException(415, "the form is in an encoding that cannot be read; send UTF-8") from error
    uploads: list[Upload] = []
    try:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile) != (name == FIELD):
                raise HTTPException(422, f"send image files in the field {FIELD!r}, and files in no other field")
            if isinstance(value, UploadFile):
                uploads.append(Upload(_plain_name(value.filename, len(uploads)), await value.read()))
        return uploads, {name: value for name, value in form.multi_items() if name != FIELD}
    finally:
        await form.close()


def _plain_name(name: str | None, index: int) -> str:
    """The caller's file name without folders and control characters."""
    last = PurePosixPath(PureWindowsPath(name or "").name).name
    printable = "".join(letter for letter in last if letter.isprintable()).strip()
    return printable[:MAX_NAME_LENGTH] or f"image {index}"


def _read_json(text: bytes, body: type[BaseModel]) -> tuple[list[Upload], BaseModel]:
    chosen = _validated(lambda: body.model_validate_json(text, strict=True))
    images: list[str] = getattr(chosen, FIELD)
    return [Upload(f"image {index}", _from_base64(image)) for index, image in enumerate(images)], chosen


def _from_base64(text: str) -> bytes | None:
    with contextlib.suppress(ValueError):
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    return None


def _validated(parse: Callable[[], BaseModel]) -> BaseModel:
    try:
        return parse()
    except ValidationError as error:
        raise HTTPException(422, explain(error.errors(include_input=False, include_url=False))) from error


def explain(errors: Sequence[Any], most: int = 3) -> str:
    """What is wrong with the options, without repeating the values sent."""
    parts = []
    for error in errors[:most]:
        place = ".".join(str(part) for part in error["loc"] if part not in ("query", "body"))
        parts.append(f"{place[:60]}: {error['msg']}" if place else str(error["msg"]))
    return "; ".join(parts)

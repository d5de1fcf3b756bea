"""The API's messages as typed data: the options and the form of a request, and the answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from gepc.core.errors import nearest
from gepc.maps.regions import MapRegion as Region

FIELD = "images"

Alpha = Annotated[
    float | None,
    Field(ge=1e-9, lt=1, description="False-alarm rate; the default is 0.05, or the smallest possible rate if larger."),
]


class _Strict(BaseModel):
    """Refuses a misspelt name and says which one is meant."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        for name in values if isinstance(values, Mapping) else ():
            if name not in cls.model_fields:
                message = f"there is no field {str(name)[:60]!r}; {nearest(name, cls.model_fields)}"
                raise PydanticCustomError("unknown_field", "{message}", {"message": message})
        return values


class DetectorOptions(_Strict):
    """Options of `GET /v1/detector`."""

    alpha: Alpha = None
    rates: bool = Field(default=False, description="Include a table of false-alarm rates with their p-value limits.")


class ScoreOptions(_Strict):
    """Options of `POST /v1/score`, as form fields or query parameters; form fields override the query."""

    alpha: Alpha = None
    group: str | None = Field(
        default=None, max_length=200, description="Group of the images, if the detector has groups."
    )
    map: bool = Field(default=False, description="Include the map as a transparent PNG (data: URI).")
    explain: bool = Field(default=False, description="Include the evidence of each part of the score, and the reason.")
    seen: bool = Field(default=False, description="Include the image as the network sees it, as a PNG (data: URI).")


class ScoreForm(ScoreOptions):
    """The form of `POST /v1/score`: image files, and options."""

    images: list[UploadFile] = Field(min_length=1, description="Image files.")


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
    map_start: float = Field(default=0.0, description="Map value drawn transparent: above 0 if all of it is unusual.")
    regions: list[MapRegion] | None = Field(default=None, description="With `map`: what stands out, largest first.")
    seen: str | None = None


class ExplainedResult(ImageResult):
    """Result for one image with the reason for it, which `explain` asks for."""

    reason: str | None = Field(description="The part of the score that speaks most for an alarm.")
    evidence: dict[str, float] = Field(
        description="Tail probability of each part; empty if the score has no parts or is that of the map."
    )


class ScoreAnswer(BaseModel):
    """Results in the order of the images."""

    detector: str = Field(description="Identity of the detector; changes when its files change.")
    alpha: float
    guarantee: str
    map_scale: float | None = Field(description="Map value above `map_start` that is drawn at full strength.")
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
    passes_per_image: str
    calibration_images: int
    groups: dict[str, int] = Field(description="Calibration images by group; empty for a detector without groups.")
    maps: bool
    map_scale: float | None
    smallest_alpha: float
    guarantee: GuaranteeAt
    rates: list[Rate] | None = Field(default=None, description="Increasing in `alpha`.")
    input: Input
    limits: Limits


@dataclass(frozen=True)
class Upload:
    """An image file as received."""

    name: str
    data: bytes


def explain(errors: Sequence[Any], most: int = 3) -> str:
    """What is wrong with the options, without repeating the values sent."""
    parts: list[str] = []
    for error in errors[:most]:
        place = ".".join(str(part) for part in error["loc"] if part not in ("query", "body"))
        if place.partition(".")[0] == FIELD:
            parts.append(f"send at least one image file in the field {FIELD!r} of a form (multipart/form-data)")
        else:
            parts.append(f"{place[:60]}: {error['msg']}" if place else str(error["msg"]))
    return "; ".join(parts)

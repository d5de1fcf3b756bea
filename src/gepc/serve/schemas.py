"""What is asked and what is answered, as typed data; OpenAPI is made of these."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Alpha = Annotated[
    float | None,
    Field(
        ge=1e-9, lt=1, description="False-alarm rate of the verdict; if none is given 0.05, or the smallest possible."
    ),
]
Group = Annotated[
    str | None, Field(max_length=200, description="The images' group, for a detector calibrated within groups.")
]
Base64 = Annotated[str, Field(description="An image file in base64; a data: URI is accepted too.")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DetectorOptions(_Strict):
    """What a verdict depends on."""

    alpha: Alpha = None


class ScoreOptions(DetectorOptions):
    """What a caller may choose; in the query, in a form field or in the JSON body, which has the last word."""

    group: Group = None
    map: bool = Field(default=False, description="Also give the map, as a PNG with transparency (data: URI).")
    seen: bool = Field(default=False, description="Also give the image as the network sees it (PNG, data: URI).")


class ScoreBody(ScoreOptions):
    """`POST /v1/score` as JSON."""

    images: list[Base64] = Field(min_length=1)


class MapOptions(_Strict):
    """What a caller may choose of a map."""

    style: Literal["overlay", "heat"] = Field(
        default="overlay", description="`overlay`: the image under its map; `heat`: the map alone, transparent at 0."
    )


class MapBody(MapOptions):
    """`POST /v1/map` as JSON."""

    images: list[Base64] = Field(min_length=1, max_length=1)


class ImageResult(BaseModel):
    """What the detector says of one image; `error` says why there is nothing to say."""

    index: int
    name: str
    score: float | None = Field(default=None, description="Higher = more out of distribution.")
    p_value: float | None = Field(default=None, description="How usual it is for a normal image to look this unusual.")
    alarm: bool | None = Field(default=None, description="p_value <= alpha.")
    error: str | None = None
    map: str | None = None
    seen: str | None = None


class ScoreAnswer(BaseModel):
    """Results in the order of the images."""

    detector: str = Field(description="Identity of the detector that answered; changes with its files.")
    alpha: float
    guarantee: str
    map_scale: float | None = Field(description="The map value shown at full strength, the same for all images.")
    results: list[ImageResult]


class Failure(BaseModel):
    """Why there is no answer, in one sentence; `results` where every image of a request failed by itself."""

    error: str
    results: list[ImageResult] | None = None


class GuaranteeAt(BaseModel):
    """What is promised at `alpha`."""

    alpha: float
    calibration_images: int
    low: float = Field(description="5 % quantile of the false-alarm rate, over calibration sets of this size.")
    high: float = Field(description="95 % quantile of the same.")
    sentence: str


class Input(BaseModel):
    """What the network sees of an image."""

    height: int
    width: int
    channels: int
    resize: str


class Limits(BaseModel):
    """What a request may hold."""

    bytes_per_request: int
    images_per_request: int
    pixels_per_image: int
    formats: list[str]


class DetectorAnswer(BaseModel):
    """What the detector is, what it promises, what it accepts."""

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
    input: Input
    limits: Limits


class ReloadAnswer(BaseModel):
    """The detector now in service."""

    detector: str
    changed: bool


class Status(BaseModel):
    """`ok`, or why not."""

    status: str

"""Maps as files: pictures on one common scale, arrays, and the regions that stand out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image as PILImage
from PIL import ImageDraw

from gepc.conformal.decision import DecisionRule
from gepc.conformal.p_values import check_rates, images_needed
from gepc.core.errors import InputError, OptionError, check_choice
from gepc.core.files import replacing, write_json
from gepc.core.palette import LIGHT
from gepc.core.run_folder import storage_errors
from gepc.core.tables import write_rows
from gepc.images.preprocessing import rgb_picture, warn_about_range
from gepc.images.sources import Image, Images
from gepc.maps.regions import COLUMNS, MapRegion, Region, coco, csv_rows, in_image, map_regions
from gepc.methods.gepc_plus import MAP_PARTS
from gepc.methods.pooling import QUANTILE, Map

if TYPE_CHECKING:
    from gepc.detector.detector import Detector

SCALES = ("global", "image")
CAPTION = 20  # pixels


def with_map_part(detector: Detector, part: str) -> Detector:
    """The fitted detector with maps of that part alone; raw maps keep the scale that they were fitted with."""
    method = detector.extractor
    if not hasattr(method, "map_part"):
        raise OptionError(f"the maps of {method.name!r} have no parts; only those of gepc+ do")
    if detector.maps_ is not None and part in MAP_PARTS:
        check_choice("map_part", part, detector.maps_.names)
    shown = copy.copy(detector)
    shown.extractor = replace(method, map_part=part)  # type: ignore[type-var]
    return shown


@dataclass(frozen=True)
class MapOptions:
    """How maps are written: before calibration if `raw`, with the verdict and the regions at false-alarm rate `alpha`.

    The scale `global` draws all maps from 0 to `Detector.map_limit`, so that they can be compared; `image` draws each
    up to its own 0.99 quantile: structure shows in every picture, also in those of usual images.
    """

    scale: str = "global"
    raw: bool = False
    alpha: float = 0.05
    bands: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, SCALES)
        check_rates(alpha=self.alpha)


def write_maps(
    detector: Detector,
    images: Images,
    out: Path,
    options: MapOptions | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """For every image `NAME.npy` (the map) and `NAME.png` (image, overlay with regions, colour bar) in `out`.

    Also `regions.csv`, and `regions.json` in the format of COCO, both in pixels of the images as they were given.
    Returns one entry per image for `metadata.json`.
    """
    options = options or MapOptions()
    warn_about_range(images, detector.value_range)
    with storage_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    located: list[tuple[str, tuple[int, int], list[MapRegion]]] = []
    for index, record in enumerate(images):
        entry: dict[str, Any] = {"path": record.name, "map": None, "picture": None, "error": record.error}
        if record.pixels is not None:
            try:
                image = detector.preprocessing_.prepare(record)
            except InputError as error:
                entry["error"] = str(error)
            else:
                stem = f"{index:06d}_{_safe(Path(record.name).stem)}"
                facts, regions = _write_map(detector, image, out, stem, options)
                entry |= facts
                shape = (record.pixels.shape[0], record.pixels.shape[1])
                window, size = detector.preprocessing_.window(shape), (image.shape[1], image.shape[2])
                located.append((record.name, shape, [in_image(one, window, size) for one in regions]))
        entries.append(entry)
        if on_progress is not None:
            on_progress(1)
    write_rows(out / "regions.csv", COLUMNS, (row for path, _, found in located for row in csv_rows(path, found)))
    write_json(out / "regions.json", coco(located))
    return entries


def _write_map(
    detector: Detector, image: Image, out: Path, stem: str, options: MapOptions
) -> tuple[dict[str, Any], list[MapRegion]]:
    """Write one map and its picture; returns what `metadata.json` says of it, and its regions in pixels of the map."""
    scores, fields = detector.score_batch([image], with_maps=True, raw=options.raw)
    assert fields is not None
    field, limit = fields[detector.map_part][0], detector.map_limit(options.alpha, options.raw)
    regions = map_regions(detector, fields, 0, options.alpha, options.raw)
    verdict = _verdict(detector, scores, options.alpha)
    caption = f"score {verdict['score']:.3g}"
    if "alarm" in verdict:
        caption += f"   p = {verdict['p_value']:.2g}   {'alarm' if verdict['alarm'] else 'no alarm'}"
    top = (limit if options.scale == "global" else float(np.quantile(field, QUANTILE))) or 1.0
    with replacing(out / f"{stem}.npy") as draft, open(draft, "wb") as handle:
        np.save(handle, field)
    picture = drawn(rgb_picture(image, options.bands), field, top, regions, caption)
    with replacing(out / f"{stem}.png") as draft:
        picture.save(draft, format="PNG")
    facts = {"map": f"{stem}.npy", "picture": f"{stem}.png", "mean": float(field.mean()), "scale": top, **verdict}
    return {**facts, "regions": len(regions)}, regions


def _verdict(detector: Detector, scores: npt.NDArray[np.float64], alpha: float) -> dict[str, Any]:
    """Score, p-value and alarm of one image; the score alone where the detector has groups."""
    score = float(scores[0])
    if detector.reference_.grouped or len(detector.reference_.scores) < images_needed(alpha):
        return {"score": score}
    p_value = detector.reference_.p_values(scores)
    alarm = bool(DecisionRule(alpha).alarms(p_value, detector.reference_)[0])
    return {"score": score, "p_value": float(p_value[0]), "alarm": alarm}


def drawn(picture: Image, field: Map, scale: float, regions: Sequence[Region], caption: str) -> PILImage.Image:
    """The image beside its overlay with numbered boxes and one colour bar, under a line of text."""
    enlarge = max(1, 256 // len(picture))
    both = np.concatenate([picture, overlay(picture, field, scale)], axis=1)
    pixels = np.rint(np.clip(both, 0.0, 1.0) * 255.0).astype(np.uint8).repeat(enlarge, axis=0).repeat(enlarge, axis=1)
    pixels = np.concatenate([pixels, colour_bar(len(pixels), scale)], axis=1)
    canvas = PILImage.new("RGB", (pixels.shape[1], len(pixels) + CAPTION), "white")
    canvas.paste(PILImage.fromarray(pixels), (0, CAPTION))
    pen = ImageDraw.Draw(canvas)
    pen.text((4, 4), caption, fill="black")
    for region in regions:
        top, left, bottom, right = (side * enlarge for side in region.box)
        left, right = left + enlarge * picture.shape[1], right + enlarge * picture.shape[1]
        pen.rectangle((left, top + CAPTION, right - 1, bottom + CAPTION - 1), outline=LIGHT["inside"], width=2)
        pen.text((left + 3, top + CAPTION + 1), str(region.number), fill=LIGHT["inside"])
    return canvas


def colour_bar(height: int, scale: float, width: int = 64) -> npt.NDArray[np.uint8]:
    """(height, width, 3): the colours of `overlay` on grey from 0 below to `scale` above, with both numbers."""
    field = np.linspace(scale, 0.0, height, dtype=np.float32)[:, None].repeat(width // 4, axis=1)
    strip = overlay(np.full((*field.shape, 3), 0.5), field, scale)
    canvas = PILImage.new("RGB", (width, height), "white")
    canvas.paste(PILImage.fromarray((strip * 255.0).round().astype(np.uint8)), (4, 0))
    pen = ImageDraw.Draw(canvas)
    pen.text((width // 4 + 8, 2), f"{scale:.3g}", fill="black")
    pen.text((width // 4 + 8, max(14, height - 14)), "0", fill="black")
    return np.asarray(canvas)


def overlay(picture: npt.NDArray[np.floating[Any]], field: Map, scale: float, strength: float = 0.75) -> Any:
    """An (H, W, 3) picture in [0, 1] under its map: transparent at 0, dark red to yellow at `scale` and above."""
    level = np.clip(field / scale, 0.0, 1.0)[..., None]
    heat = np.concatenate([np.clip(2.0 * level, 0.3, 1.0), np.clip(2.0 * level - 0.8, 0.0, 1.0), 0.1 * level], axis=2)
    opacity = strength * level
    return picture * (1.0 - opacity) + heat * opacity


def resized(field: Map, size: tuple[int, int]) -> Map:
    """A map resized bilinearly to (height, width)."""
    if field.shape == size:
        return field
    return np.asarray(PILImage.fromarray(field).resize(size[::-1], PILImage.Resampling.BILINEAR), dtype=np.float32)


def _safe(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)[:60]

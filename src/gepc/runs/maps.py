"""Maps as files: pictures on one common scale, arrays, and the regions that stand out."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gepc.conformal.decision import DecisionRule
from gepc.conformal.p_values import check_rates, images_needed
from gepc.core.errors import check_choice
from gepc.core.files import replacing, write_json
from gepc.core.run_folder import storage_errors
from gepc.core.tables import write_rows
from gepc.detector.fitted import FittedDetector
from gepc.detector.stream import Result, ScoredChunk, stream
from gepc.images.preprocessing import rgb_picture
from gepc.images.sources import Images
from gepc.maps.drawing import drawn, readable_range, resized
from gepc.maps.regions import COLUMNS, MapRegion, Window, coco, csv_rows, in_image
from gepc.methods.pooling import QUANTILE

SCALES = ("readable", "global", "image")
MAP_BATCH = 8  # pictures of the original images are kept until they are drawn
LARGEST_PICTURE = 1024  # side of a picture in pixels

Located = tuple[str, tuple[int, int], list[MapRegion]]


@dataclass(frozen=True)
class MapOptions:
    """How maps are written.

    Attributes
    ----------
    scale : `readable` draws maps from 0 to `FittedDetector.map_limit`, and further where a map exceeds it; an image
        that is unusual as a whole has a frame, and its colours begin at its median. `global` draws all maps from 0 to
        the limit, so that all colours can be compared. `image` draws each map up to its own 0.99 quantile: structure
        shows in every picture, also in those of usual images.
    raw : write maps before calibration.
    alpha : false-alarm rate of the verdict and of the regions.
    bands : the bands shown as red, green and blue, or one as grey, counted from 1.
    """

    scale: str = "readable"
    raw: bool = False
    alpha: float = 0.05
    bands: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, SCALES)
        check_rates(alpha=self.alpha)


def write_maps(
    fitted: FittedDetector,
    images: Images,
    out: Path,
    options: MapOptions | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """Write for every image `NAME.npy` (the map) and `NAME.png` (image, overlay with regions, colour bar) in `out`.

    Also writes `regions.csv`, and `regions.json` in the format of COCO, both in pixels of the images as they were
    given.

    Returns
    -------
    One entry per image for `metadata.json`.
    """
    options = options or MapOptions()
    with storage_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    located: list[Located] = []
    how: dict[str, Any] = {"raw": options.raw, "batch_size": min(MAP_BATCH, fitted.batch_size)}
    scored = stream(fitted.without_groups(), images, maps=True, keep_pixels=True, on_progress=on_progress, **how)
    for chunk in scored:
        for result in chunk.results:
            if result.error is not None:
                error = result.error if result.name.isdigit() else f"{result.name} {result.error}"
                entries.append({"path": result.name, "map": None, "picture": None, "error": error})
                continue
            entry, region = _write_map(fitted, chunk, result, out, options)
            entries.append(entry)
            located.append(region)
    rows = (row for path, _, regions in located for row in csv_rows(path, regions))
    write_rows(out / "regions.csv", COLUMNS, rows)
    write_json(out / "regions.json", coco(located))
    return entries


def _write_map(
    fitted: FittedDetector, scored: ScoredChunk, result: Result, out: Path, options: MapOptions
) -> tuple[dict[str, Any], Located]:
    """Write one map and its picture; returns its entry in `metadata.json`, and its regions in pixels of the image.

    The picture shows the part of the image that the network saw, at its own resolution up to `LARGEST_PICTURE`.
    """
    assert scored.fields is not None
    row = scored.chunk.indices.index(result.index)
    field, item = scored.fields[fitted.map_part][row], scored.chunk.read[row]
    assert item.pixels is not None
    regions = fitted.regions(scored.fields, row, options.alpha, options.raw)
    limit = fitted.map_limit(options.alpha, options.raw)
    scale = (float(np.quantile(field, QUANTILE)) if options.scale == "image" else limit) or 1.0
    stem = f"{result.index:06d}_{_safe(Path(result.name).stem)}"
    with replacing(out / f"{stem}.npy") as draft, open(draft, "wb") as handle:
        np.save(handle, field)

    def located(window: Window) -> list[MapRegion]:
        return [in_image(region, window, (field.shape[0], field.shape[1])) for region in regions]

    verdict = _verdict(fitted, result, options.alpha)
    caption = f"score {verdict['score']:.3g}"
    if "alarm" in verdict:
        caption += f"   p = {verdict['p_value']:.2g}   {'alarm' if verdict['alarm'] else 'no alarm'}"
    picture = rgb_picture(fitted.preprocessing.shown(item.pixels, item.name, LARGEST_PICTURE), options.bands)
    size = (picture.shape[0], picture.shape[1])
    start, end = readable_range(field, scale) if options.scale == "readable" else (0.0, scale)
    with replacing(out / f"{stem}.png") as draft:
        drawn(picture, resized(field, size), end, located((0, 0, *size)), caption, start).save(draft, format="PNG")
    entry = {
        "path": result.name,
        "map": f"{stem}.npy",
        "picture": f"{stem}.png",
        "error": None,
        "mean": float(field.mean()),
        "scale": scale,
        **verdict,
        "regions": len(regions),
    }
    return entry, (result.name, item.shape, located(fitted.preprocessing.window(item.shape)))


def _verdict(fitted: FittedDetector, result: Result, alpha: float) -> dict[str, Any]:
    """Score, p-value and alarm of one image; the score alone where a p-value would need a group or more images."""
    if fitted.reference.grouped or len(fitted.reference.scores) < images_needed(alpha):
        return {"score": result.score}
    alarm = bool(DecisionRule(alpha).alarms([result.p_value], fitted.reference)[0])
    return {"score": result.score, "p_value": result.p_value, "alarm": alarm}


def _safe(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)[:60]

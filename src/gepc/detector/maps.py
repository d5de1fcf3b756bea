"""Heat maps on one common scale: m(h, w) = sum_t w_t mean_g mean_c r_g^2 / b_t."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError, OptionError, StorageError, ValueRangeWarning, check_choice
from gepc.core.files import replacing
from gepc.features.pooling import QUANTILE, Map
from gepc.images.preprocessing import rgb_picture, warn_about_range
from gepc.images.sources import Image, Images

if TYPE_CHECKING:
    from gepc.detector.detector import Detector

SCALES = ("global", "image")


def with_map_part(detector: Detector, part: str) -> Detector:
    """The fitted detector with maps of that part alone; the scale stays that of the map it was fitted with."""
    method = detector.extractor
    if not hasattr(method, "map_part"):
        raise OptionError(f"the maps of {method.name!r} have no parts; only those of gepc+ do")
    shown = copy.copy(detector)
    shown.extractor = replace(method, map_part=part)  # type: ignore[type-var]
    return shown


def write_maps(
    detector: Detector,
    images: Images,
    out: Path,
    scale: str = "global",
    bands: tuple[int, ...] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """For every image `NAME.npy` (the raw map) and `NAME.png` (image, overlay, colour bar) in `out`.

    With the scale `global` all pictures go from 0 to map_scale_ (v_global) and can be compared. With `image` each goes
    to its own 0.99 quantile: structure shows in every picture, also in those of usual images. `bands` are those shown,
    see `rgb_picture`. Returns one entry per image for `metadata.json`.
    """
    check_choice("scale", scale, SCALES)
    warn_about_range(images, detector.value_range)
    _make_folder(out)
    entries: list[dict[str, Any]] = []
    for index, record in enumerate(images):
        entry: dict[str, Any] = {"path": record.name, "map": None, "picture": None, "error": record.error}
        if record.pixels is not None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ValueRangeWarning)  # said once for all, above
                    field = detector.score_map([record.pixels])[0]
            except InputError as error:
                entry["error"] = str(error)
            else:
                stem = f"{index:06d}_{_safe(Path(record.name).stem)}"
                shown = detector.preprocessing_.prepare(record)
                top = (detector.map_scale_ if scale == "global" else float(np.quantile(field, QUANTILE))) or 1.0
                _write_map(out, stem, field, rgb_picture(shown, bands), top)
                entry |= {"map": f"{stem}.npy", "picture": f"{stem}.png", "mean": float(field.mean()), "scale": top}
        entries.append(entry)
        if on_progress is not None:
            on_progress(1)
    return entries


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"{out} is a file; give a folder for the maps") from error
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror or error}") from error


def _write_map(out: Path, stem: str, field: Map, picture: Image, scale: float) -> None:
    from PIL import Image as PILImage

    with replacing(out / f"{stem}.npy") as draft, open(draft, "wb") as handle:
        np.save(handle, field)
    both = np.concatenate([picture, overlay(picture, field, scale)], axis=1)
    enlarge = max(1, 256 // len(picture))
    pixels = (both * 255.0).round().astype(np.uint8).repeat(enlarge, axis=0).repeat(enlarge, axis=1)
    pixels = np.concatenate([pixels, colour_bar(len(pixels), scale)], axis=1)
    with replacing(out / f"{stem}.png") as draft:
        PILImage.fromarray(pixels).save(draft, format="PNG")


def colour_bar(height: int, scale: float, width: int = 64) -> npt.NDArray[np.uint8]:
    """(height, width, 3): the colours of `overlay` on grey from 0 below to `scale` above, with both numbers."""
    from PIL import Image as PILImage
    from PIL import ImageDraw

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


def _safe(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)[:60]

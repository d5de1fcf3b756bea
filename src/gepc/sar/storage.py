"""Radar files: patches as one `.npz` or a folder of pictures, simulated scenes, and the results of a benchmark."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError
from gepc.core.files import check_free, replacing, write_json, write_text
from gepc.core.tables import ResultTable, write_each, write_tables
from gepc.images.preprocessing import log_magnitude
from gepc.images.sources import iterate
from gepc.sar.folder import COLUMNS
from gepc.sar.patches import Patch, PatchImages
from gepc.sar.simulate import Sea, random_targets, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gepc.sar.bench import SarBench

ARRAYS = {"train": ("train_x", "train_ship_x"), "test": ("test_x", "test_ship_x")}


def stack(patches: list[Patch], log: bool = False, value_range: tuple[float, float] | None = None) -> npt.NDArray[Any]:
    """(N, H, W, 1): the pixels in their own type, or with `log` the fixed-scale log-magnitude in 16-bit steps."""
    found = []
    for record in iterate(PatchImages(patches)):
        assert record.pixels is not None
        pixels = record.pixels
        if log:
            pixels = np.rint(65535.0 * log_magnitude(pixels, value_range, record.name)).astype(np.uint16)
        found.append(pixels)
    if len({pixels.dtype for pixels in found}) > 1:
        raise InputError("the scenes have pixels of different types; give --log to bring them to one scale")
    return np.stack(found)[..., None] if found else np.empty((0, 0, 0, 1), dtype=np.uint16)


def write_npz(path: Path, arrays: dict[str, npt.NDArray[Any]], sources: dict[str, list[str]]) -> None:
    """The arrays that hold patches, each with `NAME_source`, the file, row and column of every patch."""
    named: dict[str, Any] = {}
    for name, array in arrays.items():
        if len(array):
            named |= {name: array, f"{name}_source": np.array(sources[name])}
    with replacing(path) as draft, open(draft, "wb") as handle:
        np.savez_compressed(handle, **named)


def write_folder(folder: Path, arrays: dict[str, npt.NDArray[Any]], sources: dict[str, list[str]]) -> None:
    """`NAME/000000.png` (`.npy` for float or complex pixels), and `sources.json`, written last."""
    from PIL import Image

    check_free(folder, "sources.json", "patches")
    for name, array in arrays.items():
        for index, pixels in enumerate(array[..., 0]):
            picture = pixels.dtype in (np.uint8, np.uint16)
            with replacing(folder / name / f"{index:06d}{'.png' if picture else '.npy'}") as draft:
                if picture:
                    Image.fromarray(pixels).save(draft, format="PNG")
                else:
                    with open(draft, "wb") as handle:
                        np.save(handle, pixels)
    write_json(folder / "sources.json", sources)


def write_simulation(
    folder: Path, sea: Sea, count: int, size: int, ships: int, seed: int, on_progress: Callable[[int], None]
) -> int:
    """8-bit amplitude scenes and `boxes.csv`, written last; returns the number of boxes."""
    from PIL import Image

    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; give a new folder")
    lines = [",".join(COLUMNS)]
    for index in range(count):
        targets = random_targets(ships, size, size, np.random.default_rng([seed, index, 1]))
        amplitude, boxes = simulate(
            size, size, sea, targets, seed=int(np.random.default_rng([seed, index]).integers(2**31))
        )
        name = f"{index:04d}.png"
        with replacing(folder / name) as draft:
            Image.fromarray(np.rint(255.0 * amplitude.clip(0.0, 1.0)).astype(np.uint8)).save(draft, format="PNG")
        lines += [f"{name},{box.x:.2f},{box.y:.2f},{box.width:.2f},{box.height:.2f}" for box in boxes]
        on_progress(1)
    write_text(folder / "boxes.csv", "\n".join(lines) + "\n")
    return len(lines) - 1


def write_bench(out: Path, tables: list[ResultTable], figure: Figure, bench: SarBench, command: str) -> None:
    """`results.md`, `results.json`, a CSV and a LaTeX file per table, and the figure as PNG and SVG."""
    about = {
        "command": command,
        "backbone": bench.backbone.source or bench.backbone.family,
        "sha256": bench.backbone.sha256,
        "protocol": dataclasses.asdict(bench.protocol),
    }
    write_each(out / "tables", tables)
    for kind in ("png", "svg"):
        with replacing(out / "figures" / f"sar.{kind}") as draft:
            figure.savefig(draft, format=kind, dpi=150)
    write_tables(out, "results", tables, about)

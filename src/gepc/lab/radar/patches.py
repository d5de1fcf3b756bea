"""Patches of annotated scenes: sea clutter (ID), ships (OOD), and those that are excluded, counted by reason."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gepc.core.errors import InputError
from gepc.core.files import replacing
from gepc.core.options import at_least, check_fields, checked
from gepc.images.formats import Pixels, read_pixels
from gepc.images.preprocessing import LUMA, VALUE_RANGES, accepted_channels, log_magnitude, window_starts
from gepc.images.sources import Images, Record
from gepc.lab.radar.annotations import AnnotatedScene, Box, Mask, SceneSet, box_mask, name_rank

ARRAYS = {"train": ("train_x", "train_ship_x"), "test": ("test_x", "test_ship_x")}


@dataclass(frozen=True)
class PatchRules:
    """How scenes are cut into patches, and which patches are kept.

    A patch is ID if no pixel of it lies in a box. Patches with too small a part of a ship, with no-data pixels or a
    black border, near-duplicates, and patches that overlap an image of another split are excluded.
    """

    size: int = at_least(8, 256)  # side of a patch in pixels
    # pixels from one patch to the next; None is `size`. A last patch ends at the edge if more than half would be missed
    stride: int | None = at_least(1, None)
    # a patch is OOD if it contains at least this fraction of the area of some ship's box
    ship_share: float = checked(0.5, lambda share: 0.0 < share <= 1.0, "above 0 and at most 1")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Patch:
    """One window of a scene, with the ship boxes in its own coordinates."""

    scene: AnnotatedScene
    top: int
    left: int
    size: int

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Boxes of the ships inside, clipped to the patch."""
        return tuple(box for box in map(self._clipped, self.scene.ships) if box.area > 0)

    @property
    def ship_share(self) -> float:
        """The largest fraction of a ship's box that lies in the patch."""
        return max((self._clipped(box).area / box.area for box in self.scene.ships), default=0.0)

    def _clipped(self, box: Box) -> Box:
        return Box(box.x - self.left, box.y - self.top, box.width, box.height).clipped(self.size, self.size)

    @property
    def name(self) -> str:
        """File, row and column."""
        return f"{self.scene.path.name}@{self.top},{self.left}"

    def mask(self) -> Mask:
        """True inside the boxes."""
        return box_mask(self.boxes, self.size, self.size)

    def overlaps(self, other: AnnotatedScene) -> bool:
        """Whether the patch shows ground that another crop of the same panorama shows too."""
        here, there = self.scene.place, other.place
        if here is None or there is None or here[0] != there[0]:
            return False
        x, y = here[1] + self.left - there[1], here[2] + self.top - there[2]
        return Box(x, y, self.size, self.size).clipped(other.width, other.height).area > 0


@dataclass
class Cut:
    """The patches of a scene set by class, in the order of files, rows and columns, and the reasons for exclusion."""

    clutter: list[Patch] = field(default_factory=list)
    ships: list[Patch] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


class PatchImages(Images):
    """Patches as an image collection. The last scene stays in memory, since patches are ordered by scene."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        self.items = patches
        self._scene: AnnotatedScene | None = None
        self._pixels: Pixels = np.empty((0, 0))

    def __getitem__(self, index: int) -> Record:
        patch = self.items[index]
        if patch.scene is not self._scene:
            self._scene, self._pixels = patch.scene, read_grey(patch.scene)
        window = self._pixels[patch.top : patch.top + patch.size, patch.left : patch.left + patch.size]
        return Record(patch.name, window)


def read_grey(scene: AnnotatedScene) -> Pixels:
    """The scene's pixels as (H, W) in their own type; their size must match the annotation."""
    pixels = read_pixels(scene.path)
    if pixels.shape[:2] != (scene.height, scene.width):
        rows, columns = pixels.shape[:2]
        stated = f"{scene.width}x{scene.height}"
        raise InputError(f"{scene.path} has {columns}x{rows} pixels, but its annotation says {stated}")
    if pixels.ndim == 2:
        return pixels
    if pixels.shape[2] not in accepted_channels(1):
        raise InputError(f"{scene.path} has {pixels.shape[2]} channels; give grey or RGB images")
    if pixels.shape[2] == 1:
        return np.asarray(pixels[..., 0])
    # the channels of grey saved as a colour JPEG differ by rounding
    return np.asarray(np.rint(pixels[..., :3] @ LUMA), dtype=pixels.dtype)


def cut(
    scenes: SceneSet,
    rules: PatchRules,
    apart: Sequence[AnnotatedScene] = (),
    value_range: tuple[float, float] | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Cut:
    """Cut every scene into patches and classify them. Depends on the files, their annotations and the rules only.

    Patches that show the ground of the scenes `apart`, those of another split, are excluded. `value_range` has the
    magnitudes of black and white; None takes white from the pixel type, or the largest magnitude.
    """
    found, hashes = Cut(), array("Q")
    shared = {scene.path.resolve() for scene in apart} & {scene.path.resolve() for scene in scenes.scenes}
    if shared:
        raise InputError(f"images that are in both splits: {len(shared)}, first {min(shared).name}")
    for scene in scenes.scenes:
        on_progress(1)
        if min(scene.width, scene.height) < rules.size:
            found.left_out["scene smaller than a patch"] += 1
            continue
        pixels = read_grey(scene)
        magnitude = np.abs(pixels)
        largest = float(magnitude.max(initial=0, where=np.isfinite(magnitude)))
        white = (value_range or VALUE_RANGES.get(pixels.dtype.name, (0.0, largest)))[1]
        nearby = [other for other in apart if other.source == scene.source]
        for top, left in windows(scene.height, scene.width, rules.size, rules.stride or rules.size):
            window = (slice(top, top + rules.size), slice(left, left + rules.size))
            patch = Patch(scene, top, left, rules.size)
            if 0.0 < patch.ship_share < rules.ship_share:
                reason = "a smaller share of a ship"
            elif not np.isfinite(magnitude[window]).all():
                reason = "no-data pixels"
            elif has_black_border(magnitude[window], white):
                reason = "black border"
            elif any(patch.overlaps(other) for other in nearby):
                reason = "ground of another split"
            elif is_near_duplicate(magnitude[window], hashes):
                reason = "near-duplicate"
            else:
                (found.ships if patch.ship_share > 0.0 else found.clutter).append(patch)
                continue
            found.left_out[reason] += 1
    return found


def windows(rows: int, columns: int, size: int, stride: int) -> list[tuple[int, int]]:
    """(top, left) of every patch, row by row."""
    tops, lefts = (window_starts(length, size, stride, slack=size // 2) for length in (rows, columns))
    return [(top, left) for top in tops for left in lefts]


def sample(patches: Sequence[Patch], limit: int | None, seed: int = 0) -> list[Patch]:
    """Select at most `limit` patches, in their order, by a hash of `seed` and their names.

    A larger limit adds patches to the selection of a smaller one.
    """
    if limit is None or limit >= len(patches):
        return list(patches)
    ranked = sorted(range(len(patches)), key=lambda position: name_rank(patches[position].name, seed))
    return [patches[position] for position in sorted(ranked[:limit])]


def stack(patches: list[Patch], log: bool = False, value_range: tuple[float, float] | None = None) -> Pixels:
    """Patches as one (N, H, W, 1) array, in the type of their pixels or, with `log`, as 16-bit log-magnitude.

    `value_range` has the magnitudes of black and white, which `log` needs for float and complex pixels.
    """
    found = []
    for record in PatchImages(patches):
        assert record.pixels is not None
        pixels = record.pixels
        if log:
            pixels = np.rint(65535.0 * log_magnitude(pixels, value_range, record.name)).astype(np.uint16)
        found.append(pixels)
    if len({pixels.dtype for pixels in found}) > 1:
        raise InputError("the scenes have different pixel types; use log to bring them to one scale")
    return np.stack(found)[..., None] if found else np.empty((0, 0, 0, 1), dtype=np.uint16)


def write_npz(path: Path, arrays: dict[str, Pixels], sources: dict[str, list[str]]) -> None:
    """Write the non-empty arrays, each with `NAME_source`: file, row and column of every patch."""
    named: dict[str, Any] = {}
    for name, stacked in arrays.items():
        if len(stacked):
            named |= {name: stacked, f"{name}_source": np.array(sources[name])}
    with replacing(path) as draft, open(draft, "wb") as handle:
        np.savez_compressed(handle, **named)


BLACK = 0.01  # of white
EDGE_SHARE, BLACK_SHARE = 0.95, 0.5
SAME_BITS = 4


def has_black_border(magnitude: Pixels, white: float) -> bool:
    """Whether 95 % of an edge line or half of the patch is at most 1 % of white; single black pixels are speckle."""
    black = magnitude <= BLACK * white
    edges = (black[0], black[-1], black[:, 0], black[:, -1])
    return bool(max(edge.mean() for edge in edges) >= EDGE_SHARE or black.mean() >= BLACK_SHARE)


def difference_hash(magnitude: Pixels) -> int:
    """64 bits: the patch is averaged to 8 x 9 cells, and each bit says whether a cell exceeds its left neighbour."""
    edges = [np.linspace(0, side, count + 1).astype(int) for side, count in zip(magnitude.shape, (8, 9), strict=True)]
    sums = np.add.reduceat(np.add.reduceat(magnitude.astype(np.float64), edges[0][:-1], 0), edges[1][:-1], 1)
    # a patch of 8 pixels has a cell without a pixel of its own, which `reduceat` gives the value of its neighbour
    cells = sums / np.maximum(1, np.outer(np.diff(edges[0]), np.diff(edges[1])))
    bits = (cells[:, 1:] > cells[:, :-1]).ravel()
    return int("".join("1" if bit else "0" for bit in bits), 2)


def is_near_duplicate(magnitude: Pixels, hashes: array[int]) -> bool:
    """Whether the patch's difference hash is one of the `hashes` up to 4 of its 64 bits; if not, it is added to them.

    Patches of independent speckle differ in 32 bits on average, with a standard deviation of 4.
    """
    found = difference_hash(magnitude)
    differing = (np.array(hashes, dtype=np.uint64) ^ np.uint64(found)).view(np.uint8).reshape(-1, 8)
    if (np.unpackbits(differing, axis=1).sum(axis=1) <= SAME_BITS).any():
        return True
    hashes.append(found)
    return False

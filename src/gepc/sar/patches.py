"""Patches of annotated scenes: sea clutter (ID), ships (OOD), and what is neither, counted by reason."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from gepc.core.errors import InputError, OptionError
from gepc.images.formats import Pixels, read_pixels
from gepc.images.preprocessing import LUMA, VALUE_RANGES, accepted_channels
from gepc.images.sources import Images, Record
from gepc.sar import rules
from gepc.sar.annotations import Box, Mask, Scene, SceneSet, box_mask


@dataclass(frozen=True)
class PatchRules:
    """How scenes are cut.

    Parameters
    ----------
    size, stride : pixels a side, and from one patch to the next (None: patches side by side). Where more than half a
        patch would be missed at the right or the bottom, a last one lies flush with that edge.
    ship_share : a patch is OOD when it holds at least this share of the area of some ship's box.
    land : leave land out, by `gepc.sar.rules.is_land`.

    A patch is ID when no pixel of it lies in a box. A patch with a smaller share of a ship is neither and is left out,
    as are patches with no-data pixels or a black border, near-duplicates (`gepc.sar.rules.Seen`), and patches on ground
    that an image to be kept apart shows too (`apart`).
    """

    size: int = 256
    stride: int | None = None
    ship_share: float = 0.5
    land: bool = False

    def __post_init__(self) -> None:
        if self.size < 8 or (self.stride is not None and self.stride < 1):
            raise OptionError(f"a patch has at least 8 pixels a side and a stride of 1, got {self.size}, {self.stride}")
        if not 0.0 < self.ship_share <= 1.0:
            raise OptionError(f"ship_share is a share of a ship in (0, 1], got {self.ship_share}")


@dataclass(frozen=True)
class Patch:
    """One window of a scene, with the boxes of ships in it in its own coordinates."""

    scene: Scene
    top: int
    left: int
    size: int
    boxes: tuple[Box, ...] = ()

    @property
    def name(self) -> str:
        """File, row and column."""
        return f"{self.scene.path.name}@{self.top},{self.left}"

    def mask(self) -> Mask:
        """True inside the boxes."""
        return box_mask(self.boxes, self.size, self.size)


@dataclass
class Cut:
    """The patches of one scene set by class, in the order of files, rows and columns, and why others were left out."""

    clutter: list[Patch] = field(default_factory=list)
    ships: list[Patch] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    scenes: int = 0


class PatchImages(Images):
    """Patches as a collection; the scene read last is kept, since patches come scene by scene."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        self.patches = list(patches)
        self._scene: Scene | None = None
        self._pixels: Pixels = np.empty((0, 0))

    def __len__(self) -> int:
        return len(self.patches)

    def __getitem__(self, index: int) -> Record:
        patch = self.patches[index]
        if patch.scene is not self._scene:
            self._scene, self._pixels = patch.scene, read_grey(patch.scene)
        window = self._pixels[patch.top : patch.top + patch.size, patch.left : patch.left + patch.size]
        return Record(patch.name, window)


def read_grey(scene: Scene) -> Pixels:
    """The scene's pixels as (H, W) in their own type; the annotation's size must be the file's."""
    pixels = read_pixels(scene.path)
    if pixels.shape[:2] != (scene.height, scene.width):
        rows, columns = pixels.shape[:2]
        raise InputError(
            f"{scene.path} is {columns}x{rows}, its annotation says {scene.width}x{scene.height}; one of them is wrong"
        )
    if pixels.ndim == 2:
        return pixels
    if pixels.shape[2] not in accepted_channels(1):
        raise InputError(f"{scene.path} has {pixels.shape[2]} channels; give grey or RGB images")
    first = pixels[..., 0]
    if pixels.shape[2] == 1 or all(np.array_equal(first, pixels[..., other]) for other in range(1, 3)):
        return np.asarray(first)
    # grey written as a colour JPEG has nearly equal channels
    return np.asarray(np.rint(pixels[..., :3] @ LUMA), dtype=pixels.dtype)


def cut(
    scenes: SceneSet,
    how: PatchRules,
    apart: Iterable[Scene] = (),
    value_range: tuple[float, float] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Cut:
    """Cut every scene and sort its patches. `apart` are scenes of another split, whose ground must not be seen again.

    The result is a function of the files, their annotations and the rules alone.
    """
    found, seen, others = Cut(), rules.Seen(), list(apart)
    shared = {scene.path.resolve() for scene in others} & {scene.path.resolve() for scene in scenes.scenes}
    if shared:
        raise InputError(f"{len(shared)} images are in both splits, first {sorted(shared)[0].name}")
    for scene in scenes.scenes:
        found.scenes += 1
        if min(scene.width, scene.height) < how.size:
            found.left_out["scene smaller than a patch"] += 1
        else:
            _cut_scene(scene, how, others, value_range, seen, found)
        if on_progress is not None:
            on_progress(1)
    return found


def _cut_scene(
    scene: Scene,
    how: PatchRules,
    apart: list[Scene],
    value_range: tuple[float, float] | None,
    seen: rules.Seen,
    found: Cut,
) -> None:
    pixels = read_grey(scene)
    magnitude = np.abs(pixels)
    white = (value_range or VALUE_RANGES.get(pixels.dtype.name, (0.0, float(np.nanmax(magnitude)))))[1]
    ships = box_mask((ship.box for ship in scene.ships), scene.height, scene.width)
    sea = rules.sea_level(np.nan_to_num(magnitude)) if how.land else 0.0
    neighbours = [other for other in apart if scene.place and other.place and other.place[0] == scene.place[0]]
    for top, left in windows(scene.height, scene.width, how.size, how.stride or how.size):
        window = (slice(top, top + how.size), slice(left, left + how.size))
        patch = Patch(scene, top, left, how.size, _boxes_in(scene, top, left, how.size))
        largest = _largest_share(scene, top, left, how.size)
        if 0.0 < largest < how.ship_share:
            reason = "a smaller share of a ship"
        elif rules.has_no_data(magnitude[window]):
            reason = "no-data pixels"
        elif rules.has_black_border(magnitude[window], white):
            reason = "black border"
        elif how.land and rules.is_land(magnitude[window], ships[window], sea):
            reason = "land"
        elif any(_same_ground(patch, other) for other in neighbours):
            reason = "ground of another split"
        elif not seen.is_new(magnitude[window]):
            reason = "near-duplicate"
        else:
            (found.ships if largest > 0.0 else found.clutter).append(patch)
            continue
        found.left_out[reason] += 1


def windows(rows: int, columns: int, size: int, stride: int) -> Iterator[tuple[int, int]]:
    """(top, left) of every patch, row by row."""
    for top in _starts(rows, size, stride):
        for left in _starts(columns, size, stride):
            yield top, left


def _starts(length: int, size: int, stride: int) -> list[int]:
    starts = list(range(0, length - size + 1, stride))
    return [*starts, length - size] if length - size - starts[-1] > size // 2 else starts


def _boxes_in(scene: Scene, top: int, left: int, size: int) -> tuple[Box, ...]:
    moved = (ship.box.moved(left, top).clipped(size, size) for ship in scene.ships)
    return tuple(box for box in moved if box.area > 0)


def _largest_share(scene: Scene, top: int, left: int, size: int) -> float:
    shares = (ship.box.moved(left, top).clipped(size, size).area / ship.box.area for ship in scene.ships)
    return max(shares, default=0.0)


def _same_ground(patch: Patch, other: Scene) -> bool:
    """Whether the patch shows ground of another cut of the same panorama."""
    assert patch.scene.place is not None
    assert other.place is not None
    x, y = patch.scene.place[1] + patch.left - other.place[1], patch.scene.place[2] + patch.top - other.place[2]
    return Box(x, y, patch.size, patch.size).clipped(other.width, other.height).area > 0


def sample(patches: Sequence[Patch], limit: int | None, seed: int = 0) -> list[Patch]:
    """At most `limit` of the patches, in their order: those whose names hash lowest, so that a larger limit adds."""
    if limit is None or limit >= len(patches):
        return list(patches)

    def rank(position: int) -> bytes:
        return hashlib.blake2b(f"{seed}|{patches[position].name}".encode(), digest_size=8).digest()

    return [patches[position] for position in sorted(sorted(range(len(patches)), key=rank)[:limit])]

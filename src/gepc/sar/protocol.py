"""What a radar benchmark compares, as plain data, and the patches it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gepc.backbones.schedule import Levels
from gepc.core.errors import InputError, OptionError
from gepc.features.gepc import GepcExtractor
from gepc.images.preprocessing import NORMALISATIONS
from gepc.sar.load import detect_layout, divide, open_scenes
from gepc.sar.patches import Cut, Patch, PatchRules, cut, sample
from gepc.sar.preset import LEVEL, TARGET_PIXELS, local_pooling

TOPK = "topk 0.3"


@dataclass(frozen=True)
class SarProtocol:
    """ID is sea clutter of HRSID. Nothing is chosen with a ship: the target's size is told, not found.

    Parameters
    ----------
    rules : how scenes are cut.
    hold_out : share of the training images that detectors are fitted on; a backbone is trained on the others.
    fit_limit, limit : patches to fit on, and patches of each test set, at most.
    levels, keep, group : where and how the network is asked; of several levels the `keep` most stable ones on ID count.
    target_pixels : how large a target is, by which local pooling is set.
    other_targets : further sizes, to see how much that matters; those too large for a patch are left out.
    draws : how often whole images are drawn again for an interval.
    """

    rules: PatchRules = field(default_factory=PatchRules)
    hold_out: float = 0.35
    fit_limit: int | None = 200
    limit: int | None = 200
    levels: str = str(LEVEL)
    keep: int | None = None
    group: tuple[str, ...] = ("id", "rot180")
    target_pixels: float = TARGET_PIXELS
    other_targets: tuple[float, ...] = (50, 100, 400, 800)
    normalisations: tuple[str, ...] = NORMALISATIONS
    draws: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = set(self.normalisations) - set(NORMALISATIONS)
        if unknown or not self.normalisations:
            raise OptionError(f"normalisations are {', '.join(NORMALISATIONS)}; got {', '.join(self.normalisations)}")

    @property
    def local(self) -> str:
        """Name of the pooling at the target's size."""
        return f"local {self.target_pixels:g}"

    def extractors(self) -> dict[str, GepcExtractor]:
        """By the name of their pooling; the first is the one at the target's size."""
        size = self.rules.size
        others = [other for other in self.other_targets if other != self.target_pixels and other <= size**2 / 4]
        targets = [self.target_pixels, *others]
        pools = {f"local {target:g}": local_pooling(target, size) for target in targets}
        pools[TOPK] = {"pool": "topk", "topk": 0.3}
        shared = {"levels": Levels.of(self.levels), "group": list(self.group)}
        return {name: GepcExtractor(**shared, **pool) for name, pool in pools.items()}  # type: ignore[arg-type]


@dataclass(frozen=True)
class PatchSets:
    """Clutter to fit on, clutter to test on, ships by data set, and how each was cut."""

    fit: list[Patch]
    clutter: list[Patch]
    ships: dict[str, list[Patch]]
    cuts: dict[str, Cut]

    @property
    def total(self) -> int:
        """Patches in all sets."""
        return len(self.fit) + len(self.clutter) + sum(map(len, self.ships.values()))


def gather(
    protocol: SarProtocol, data: Path, others: Sequence[Path], on_progress: Callable[[int], None] | None = None
) -> PatchSets:
    """Fit on training images held out from the backbone, test on test images, which share no ground with them."""
    if detect_layout(data) != "hrsid":
        raise InputError(f"{data}: sea clutter comes from HRSID, which has a training split; give its folder")
    train, test = open_scenes(data, "train"), open_scenes(data, "test")
    _, held_out = divide(train, protocol.hold_out)
    cuts = {
        "fit": cut(held_out, protocol.rules, test.scenes, on_progress=on_progress),
        data.name: cut(test, protocol.rules, train.scenes, on_progress=on_progress),
    }
    for other in others:
        if other.name in cuts:
            raise InputError(f"two data sets are called {other.name}")
        cuts[other.name] = cut(open_scenes(other), protocol.rules, on_progress=on_progress)
    ships = {name: sample(found.ships, protocol.limit, protocol.seed) for name, found in cuts.items() if name != "fit"}
    for name, found in ships.items():
        if not found:
            raise InputError(f"{name} has no patch of {protocol.rules.size} pixels with a ship")
    fit = sample(cuts["fit"].clutter, protocol.fit_limit, protocol.seed)
    clutter = sample(cuts[data.name].clutter, protocol.limit, protocol.seed)
    if len(fit) < 8 or len(clutter) < 2:
        raise InputError(f"{data} has {len(fit)} clutter patches to fit on and {len(clutter)} to test; too few")
    return PatchSets(fit, clutter, ships, cuts)

"""Radar: detectors for targets of a known size, and how well they and CFAR find ships in sea clutter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gepc.backbones.base import Backbone
from gepc.core.errors import InputError, OptionError, check_choice
from gepc.core.options import at_least, one_of
from gepc.core.progress import OnProgress
from gepc.core.tables import Cell, ResultTable, interval_text
from gepc.detector.detector import Detector
from gepc.detector.fitted import FittedDetector
from gepc.detector.fitting import fit_detector
from gepc.detector.plots import maps, save
from gepc.detector.registry import create_detector
from gepc.detector.stream import stream
from gepc.images.preprocessing import log_magnitude
from gepc.lab.bench import published
from gepc.lab.metrics import aupr, auroc, bootstrap_intervals, fpr_at_tpr, localisation
from gepc.lab.radar.annotations import detect_layout, divide, open_scenes
from gepc.lab.radar.patches import Cut, Patch, PatchImages, PatchRules, cut, sample
from gepc.methods.extraction import ExtractionSpec, FeatureCache, extract_all
from gepc.methods.pooling import Map, box_filter

Array = npt.NDArray[np.float64]

TARGET_PIXELS = 200
PRESET, PAPER = "gepc+:radar", "gepc:paper"
CFARS = ("ca_cfar", "os_cfar")
METHODS = (PRESET, *CFARS, "rx", PAPER)


def radar_detector(
    backbone: Backbone,
    method: str = PRESET,
    target_pixels: float = TARGET_PIXELS,
    size: int = 256,
    normalise: str = "fixed",
    **options: Any,
) -> Detector:
    """A detector for targets of about `target_pixels` pixels in radar images.

    Parameters
    ----------
    backbone : the network that predicts noise.
    method : `gepc+:radar`, `ca_cfar`, `os_cfar`, `rx`, or `gepc:paper`, the detector of the paper: seven
        group elements, the two most stable of its candidate levels, the mean of the largest 30 % of the pixels, KDE.
    target_pixels : area of a target in pixels, which sets the pooling of all methods but the paper's.
    size : side of a patch in pixels.
    normalise : `fixed` (one scale for all patches) or `patch` (mean and contrast of each patch removed). CFAR needs the
        intensity and is always on the fixed scale.
    **options : further options of the method or of `gepc.Detector`; they override those above.
    """
    check_choice("method", method, METHODS)
    name, _, preset = method.partition(":")
    given: dict[str, Any] = {"size": size, "resize": "cut", "magnitude": "log"}
    given["normalise"] = "fixed" if method in CFARS else normalise
    if method != PAPER:
        given |= local_pooling(target_pixels, size)
    if method in CFARS:
        given["scale"] = "log"
    if method in (*CFARS, "rx"):
        del given["pool"]
    return create_detector(backbone, name, preset=preset or None, **{**given, **options})


def local_pooling(target_pixels: float, size: int) -> dict[str, Any]:
    """The options `pool`, `window` and `topk` for targets of `target_pixels` pixels in patches of size x size."""
    if not 1 <= target_pixels <= size * size / 4:
        raise OptionError(f"target_pixels must be between 1 and a quarter of the patch, got {target_pixels}")
    window = 2 * round((2.0 / 3.0 * math.sqrt(target_pixels) - 1.0) / 2.0) + 1
    return {"pool": "local", "window": max(1, window), "topk": target_pixels / size**2}


@dataclass(frozen=True)
class SarProtocol(PatchRules):
    """What the benchmark compares, on which patches. In-distribution is sea clutter; nothing is tuned on ships."""

    hold_out: float = 0.35  # share of the training images (of all, if there is no training split) to fit detectors on
    fit_limit: int | None = at_least(12, None)  # largest number of patches to fit on
    limit: int | None = at_least(2, None)  # largest number of patches of each test set
    methods: tuple[str, ...] = METHODS[:-1]  # this and the next two: see `radar_detector`
    target_pixels: float = TARGET_PIXELS
    normalise: str = one_of("fixed", "patch")
    localise: bool = True  # whether to measure where the maps point
    draws: int = at_least(2, 300)  # bootstrap samples of source images for each interval
    seed: int = 0  # of the noise, and of the selection of patches

    def __post_init__(self) -> None:
        super().__post_init__()
        for method in self.methods:
            check_choice("method", method, METHODS)
        local_pooling(self.target_pixels, self.size)  # an error if a target does not fit

    def detector(self, method: str, backbone: Backbone) -> Detector:
        """The detector of a method, not fitted."""
        options = {"seed": self.seed, "maps": "raw"}  # patches are compared by raw maps
        return radar_detector(backbone, method, self.target_pixels, self.size, self.normalise, **options)


@dataclass(frozen=True)
class PatchSets:
    """Clutter to fit on, clutter to test on, ships by data set, and how each set was cut."""

    fit: list[Patch]
    clutter: list[Patch]
    ships: dict[str, list[Patch]]
    cuts: dict[str, Cut]

    @property
    def total(self) -> int:
        """Number of patches in all sets."""
        return len(self.fit) + len(self.clutter) + sum(map(len, self.ships.values()))


def gather(protocol: SarProtocol, data: Path, others: Sequence[Path]) -> PatchSets:
    """Cut and sample the patches of a protocol.

    Clutter comes from the folder `data`. Detectors are fitted on training images of HRSID held out from the backbone
    and tested on its test images; any other data set is divided by image. If `others`, folders of further data sets,
    have ships, `data` may be clutter alone.
    """
    if detect_layout(data) == "hrsid":
        train, test = open_scenes(data, "train"), open_scenes(data, "test")
        _, held_out = divide(train, protocol.hold_out)
        apart = (test.scenes, train.scenes)
    else:
        test, held_out = divide(open_scenes(data), protocol.hold_out)
        apart = ((), ())
    own = zip(("fit", data.name), (held_out, test), apart, strict=True)
    cuts = {name: cut(scenes, protocol, other) for name, scenes, other in own}
    for other in others:
        if other.name in cuts:
            raise InputError(f"two data sets are called {other.name}; rename one of the folders")
        cuts[other.name] = cut(open_scenes(other), protocol)
    ships = {name: sample(found.ships, protocol.limit, protocol.seed) for name, found in cuts.items() if name != "fit"}
    if others and not ships[data.name]:
        del ships[data.name]  # clutter alone
    for name, found in ships.items():
        if not found:
            raise InputError(f"{name} has no patch of {protocol.size} pixels with a ship")
    fit = sample(cuts["fit"].clutter, protocol.fit_limit, protocol.seed)
    clutter = sample(cuts[data.name].clutter, protocol.limit, protocol.seed)
    if len(fit) < 12 or len(clutter) < 2:
        raise InputError(f"clutter patches of {data}: {len(fit)} to fit on, {len(clutter)} to test; it needs 12 and 2")
    return PatchSets(fit, clutter, ships, cuts)


def patch_maps(fitted: FittedDetector, patches: Sequence[Patch]) -> Map:
    """Maps (N, H, W) under the box filter that the score is pooled from, if it has one."""
    maps = []
    window = getattr(fitted.method, "window", 1) if getattr(fitted.method, "pool", "local") == "local" else 1
    for chunk in stream(fitted, PatchImages(patches), maps=True, raw=True, on_error="raise"):
        assert chunk.fields is not None
        maps.append(box_filter(torch.from_numpy(chunk.fields[fitted.map_part]), window).numpy())
    return np.concatenate(maps)


@dataclass(frozen=True)
class Fitted:
    """A method fitted on clutter, and the scores of the test sets: "clutter", and ships by data set."""

    method: str
    detector: FittedDetector
    scores: dict[str, Array]


def fit_and_score(
    protocol: SarProtocol,
    method: str,
    sets: PatchSets,
    backbone: Backbone,
    cache: FeatureCache,
    on_progress: OnProgress = lambda _: None,
) -> Fitted:
    """Fit a method on clutter and score the test sets; progress is told in patches. A repeated run reads the cache."""
    detector = protocol.detector(method, backbone)
    detector.batch_size = 1  # a patch has the same score in a sample of any size, to the last bit
    fitted = fit_detector(detector, PatchImages(sets.fit), on_progress=on_progress, cache=cache)
    spec = ExtractionSpec(fitted.method, fitted.kept, fitted.seed, fitted.batch_size)
    scores = {}
    for name, patches in {"clutter": sets.clutter, **sets.ships}.items():
        table = extract_all(
            PatchImages(patches), fitted.preprocessing, backbone, spec, cache=cache, on_progress=on_progress
        )
        scores[name] = fitted.scorer.score_kept(table.columns)
    return Fitted(method, fitted, scores)


def radar_table(protocol: SarProtocol, sets: PatchSets, measured: Sequence[Fitted]) -> ResultTable:
    """How well every method detects ships, the paper's values beside its detector, and where the maps point."""
    rows: list[tuple[Cell, ...]] = []
    for name, patches in sets.ships.items():
        groups = [[patch.scene.source for patch in part] for part in (sets.clutter, patches)]
        for item in measured:
            scores = (item.scores["clutter"], item.scores[name])
            spans = bootstrap_intervals(_metrics, scores, groups, protocol.draws)
            cells: list[Cell] = [f"{name} ships", len(patches), item.method, item.detector.cost().forward]
            same = (item.method, protocol.normalise) == (PAPER, "patch") and name in published.SAR
            paper = published.SAR[name] if same else (None,) * 3
            for value, (low, high), stated in zip(_metrics(*scores), spans, paper, strict=True):
                cells += [value, interval_text(low, high), stated]
            if protocol.localise:
                cells += _where(patch_maps(item.detector, patches), patches)
            rows.append(tuple(cells))
    metrics = [(name, f"{name}: 95 % interval", f"{name}: paper") for name in ("AUROC", "FPR95", "AUPR")]
    header = ("OOD set", "patches", "method", "passes", *(heading for three in metrics for heading in three))
    backbone = measured[0].detector.backbone
    network = Path(backbone.source or backbone.family).name
    fit, tested, *_ = sets.cuts.values()
    ships = ", ".join(f"{len(part)} of {len(sets.cuts[name].ships)} {name}" for name, part in sets.ships.items())
    return ResultTable(
        f"radar-{network}-{protocol.normalise}",
        f"Ships against sea clutter, {network}, {protocol.normalise} scale",
        (*header, *(("pixel AUROC", "pointing game", "PRO") if protocol.localise else ())),
        tuple(rows),
        f"Fitted on {len(sets.fit)} of {len(fit.clutter)} clutter patches, tested on {len(sets.clutter)} of "
        f"{len(tested.clutter)}; ships: {ships} (chosen by a hash with the seed {protocol.seed}). Intervals resample "
        "whole images. The values of the paper are for an LSUN-256 network.",
    )


def _metrics(inside: Array, outside: Array) -> tuple[float, float, float]:
    """AUROC, FPR95 and AUPR."""
    return auroc(inside, outside), fpr_at_tpr(inside, outside), aupr(inside, outside)


def _where(maps: Map, patches: Sequence[Patch]) -> list[Cell]:
    """Pixel AUROC, pointing game and PRO, over the patches that a ship does not cover whole."""
    masks = np.stack([patch.mask() for patch in patches])
    partly = ~masks.all((1, 2))
    if not partly.any():
        return [None, None, None]
    found = localisation(maps[partly], masks[partly])
    return [float(found.auroc.mean()), float(found.hit.mean()), found.pro]


def write_figures(folder: Path, name: str, item: Fitted, sets: PatchSets) -> None:
    """Write `NAME-main.png` (clutter and a ship) and `NAME-appendix.png` (all sets).

    Each set is shown by the patch with the median score. Residual maps have the scale v_global, the median over
    in-distribution patches of the 0.99 quantile of their maps, so that colours compare.
    """
    images, fields, labels = [], [], []
    for title, patches in {"clutter": sets.clutter, **sets.ships}.items():
        order = np.argsort(item.scores[title], kind="stable")
        chosen = [patches[int(order[len(order) // 2])]]
        pixels = PatchImages(chosen)[0].pixels
        assert pixels is not None
        images.append(np.rint(255.0 * log_magnitude(pixels)).astype(np.uint8))
        fields.append(patch_maps(item.detector, chosen)[0])
        labels.append("ID: sea clutter" if title == "clutter" else f"OOD: {title}")
    scale = item.detector.map_limit(raw=True)
    for part, count in (("main", 2), ("appendix", len(images))):
        save(maps(images[:count], fields[:count], labels[:count], scale), folder / f"{name}-{part}", ("png",))

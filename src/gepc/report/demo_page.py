"""The demonstration's report: what was done, what came out, what it does not show."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from gepc._version import __version__
from gepc.backbones.base import Backbone
from gepc.report import figures
from gepc.report.demo import FIT_ROWS, FULL, SIDE, TEST_ROWS, Demo, Photograph, Scored, load_photograph
from gepc.report.page import Block, Bullets, Code, Facts, Numbers, Page, Picture, Pictures, Prose, Section, Table

COLUMNS = ("against", "patches", "AUROC", "95% interval", "AUPR", "FPR95", "alarms")
FACES = "celeba32-tiny"
SHOWN = 8
THUMBNAIL = 128
OWN_IMAGES = """import gepc

detector = gepc.GEPC(gepc.load_backbone("celeba32-tiny"), size=32)
detector.fit("folder/of/normal/images")
detector.score("folder/of/new/images")
detector.predict("folder/of/new/images", alpha=0.05)"""


def result_rows(demo: Demo) -> list[tuple[str, ...]]:
    """One row of text per pair, under `COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for pair in demo.pairs():
        found = pair.detection
        interval = f"{found.auroc_low:.3f} to {found.auroc_high:.3f}"
        numbers = (f"{found.auroc:.3f}", interval, f"{found.aupr:.3f}", f"{found.fpr95:.3f}")
        rows.append((pair.name, str(found.n_ood), *numbers, f"{pair.alarms} of {found.n_ood}"))
    return rows


def mean_auroc(demo: Demo) -> float:
    """The plain mean over the pairs."""
    return float(np.mean([pair.detection.auroc for pair in demo.pairs()]))


def build_page(demo: Demo, command: str) -> Page:
    """The report of a finished run; `command` is what repeats it."""
    inside, others = demo.held_out.name, f"{len(demo.others)} other photographs"
    check = demo.false_alarms()
    shown = len(demo.data.fit) + len(demo.data.calibration)
    lead = (
        f"A detector that was shown {shown} patches of {inside}, and nothing else, is asked about "
        f"{check.count} new patches of {inside} and about patches of {others}. Its scores tell the others from "
        f"{inside} with a mean AUROC of {mean_auroc(demo):.3f}. At a false-alarm rate of {demo.alpha:g} it raised "
        f"{_count(check.alarms, 'alarm')} on the {check.count} new patches of {inside}."
    )
    sections = [
        Section("Results", _results(demo)),
        Section("Photographs", _photographs(demo)),
        Section("Scores", _scores(demo)),
        Section("False alarms", _false_alarms(demo)),
        Section("Patches", _patches(demo)),
        Section("Maps", _maps(demo)),
        Section("Method and cost", [Facts(_method(demo))]),
        Section("Limits", [Bullets(_limits(demo))]),
        Section("Repeat it", _repeat(command)),
    ]
    footer = f"Made by gepc {__version__}. This page is one file and asks the network for nothing."
    return Page(f"GEPC demo: {inside} against {others}", lead, sections, footer)


def _results(demo: Demo) -> list[Block]:
    inside, check = demo.held_out.name, demo.false_alarms()
    caught = sum(other.alarms(demo.alpha) for other in demo.others)
    shown = sum(len(other.patches) for other in demo.others)
    note = (
        f"Out-of-distribution is the positive class. FPR95 is the share of {inside} patches flagged at the threshold "
        "that flags 95% of the other patches; lower is better. The interval is DeLong's, for independent patches, and "
        f"a wider, exact one where the separation is perfect. Alarms are patches with p ≤ {demo.alpha:g}."
    )
    return [
        Numbers(
            [
                (f"{mean_auroc(demo):.3f}", f"mean AUROC over {len(demo.others)} pairs"),
                (f"{check.alarms} of {check.count}", f"new {inside} patches raised a false alarm"),
                (f"{caught} of {shown}", "patches of the others raised an alarm"),
            ]
        ),
        Table(
            f"{check.count} held-out patches of {inside} against each other photograph",
            COLUMNS,
            result_rows(demo),
            note,
        ),
    ]


def _photographs(demo: Demo) -> list[Block]:
    photographs = [scored.patches.photograph for scored in demo.scored]
    names = [photograph.name for photograph in photographs]
    inside = names[0]
    text = (
        f"All of them ship inside scikit-image. Each is cut into a grid of {SIDE}x{SIDE} patches without overlap. The "
        f"patches of {inside} to fit on come from the upper {FIT_ROWS.stop} rows of the grid. The calibration and the "
        f"held-out ones are drawn at random from the lower {TEST_ROWS.stop - TEST_ROWS.start}; the row between is not "
        "used."
    )
    tiles = [_thumbnail(photograph, band=photograph.name == inside) for photograph in photographs]
    return [
        Prose([text]),
        Picture(
            figures.gallery(tiles, names, columns=3),
            "The photographs: " + "; ".join(f"{p.name}, {p.shows}" for p in photographs) + ".",
            caption=f"**{inside}** is in-distribution; the dark band parts what is fitted on, above, from what is "
            "calibrated on and held out, below. Of the others the middle is shown.",
        ),
    ]


def _thumbnail(photograph: Photograph, band: bool) -> Any:
    """The largest centred square, reduced; with `band` the rows of patches that are left out are dark."""
    from PIL import Image

    pixels = load_photograph(photograph).copy()
    if band:
        rows = slice(FIT_ROWS.stop * SIDE, TEST_ROWS.start * SIDE)
        pixels[rows] = pixels[rows] // 4
    side = min(pixels.shape[:2])
    top, left = (pixels.shape[0] - side) // 2, (pixels.shape[1] - side) // 2
    square = Image.fromarray(np.squeeze(pixels[top : top + side, left : left + side]))
    return np.asarray(square.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS))


def _scores(demo: Demo) -> list[Block]:
    inside = demo.held_out
    text = (
        f"A score is minus the logarithm of a density fitted to {inside.name}: low is typical, high is not. Right of "
        f"the dashed line a patch raises an alarm. The line comes from calibration patches of {inside.name} alone; "
        "none of the patches shown here moved it."
    )
    caption = (
        f"All histograms share one axis, linear among the scores of {inside.name} and logarithmic beyond. Last, the "
        f"share of other patches caught against the share of {inside.name} patches flagged, as the threshold moves."
    )
    areas = ", ".join(f"{pair.name} {pair.detection.auroc:.3f}" for pair in demo.pairs())
    curves = figures.roc({other.name: (inside.scores, other.scores) for other in demo.others})
    return [
        Prose([text]),
        Pictures([*_histograms(demo), Picture(curves, f"ROC curves with the area under each: {areas}.")], caption),
    ]


def _histograms(demo: Demo) -> list[Picture]:
    inside, label = demo.held_out, f"α = {demo.alpha:g}"
    limits = figures.score_limits([scored.scores for scored in demo.scored])
    pictures = []
    for other in demo.others:
        names = (inside.name, other.name)
        figure = figures.histogram(inside.scores, other.scores, demo.threshold, names, limits, label)
        alt = f"Histogram of scores: {_spread(inside)}; {_spread(other)}; the threshold is {short(demo.threshold)}."
        pictures.append(Picture(figure, alt))
    return pictures


def _spread(scored: Scored) -> str:
    low, middle, high = map(short, np.quantile(scored.scores, [0.0, 0.5, 1.0]))
    return f"{scored.name} from {low} to {high}, half of them below {middle}"


def _false_alarms(demo: Demo) -> list[Block]:
    check, guarantee = demo.false_alarms(), demo.detector.guarantee(demo.alpha)
    promise = (
        f"**The promise.** Of new patches that are like the {guarantee.n} calibration patches, at most "
        f"{100 * demo.alpha:g} in 100 raise an alarm, on average over the draw of the calibration patches. It assumes "
        "nothing of the network or the score, only that new and calibration patches are exchangeable: put in random "
        "order, nothing tells which is which."
    )
    this_set = (
        f"**This calibration set.** With {guarantee.n} patches the rate of this very detector lies between "
        f"{guarantee.low:.3f} and {guarantee.high:.3f} with probability 0.9; more calibration patches narrow it."
    )
    seen = (
        f"**What was seen.** {_count(check.alarms, 'alarm')} on {check.count} held-out patches, a rate of "
        f"{check.rate:.3f}. Exchangeable patches give {check.low} to {check.high} alarms with probability 0.9 or more. "
    )
    seen += (
        "What was seen agrees with that."
        if check.as_expected
        else "What was seen lies **outside** that range, which happens by chance in at most one of ten runs."
    )
    return [Prose([promise, this_set, seen])]


def _patches(demo: Demo) -> list[Block]:
    inside, order = demo.held_out, demo.held_out.ranked()
    ends = [(other, other.ranked()[end]) for end in (-1, 0) for other in demo.others]
    return [
        Prose(["Each patch with its score; lower is more typical."]),
        Pictures(
            [
                _tiles(f"Most typical {inside.name}", [(inside, place) for place in order[:SHOWN]], 4),
                _tiles(f"Least typical {inside.name}", [(inside, place) for place in order[::-1][:SHOWN]], 4),
                _tiles("Others, highest and lowest", ends, len(demo.others), named=True),
            ]
        ),
    ]


def _tiles(title: str, picked: Sequence[tuple[Scored, Any]], columns: int, named: bool = False) -> Picture:
    labels = [f"{scored.name} {short(scored.scores[place])}" for scored, place in picked]
    shown = labels if named else [short(scored.scores[place]) for scored, place in picked]
    figure = figures.gallery([scored.patches.pixels[place] for scored, place in picked], shown, columns)
    return Picture(figure, f"{title}; patches and scores: {', '.join(labels)}.", title)


def _maps(demo: Demo) -> list[Block]:
    inside, scale = demo.held_out.name, demo.detector.map_scale_ or 1.0
    what = (
        "Where the network's answer changes most when the noisy patch is flipped, turned or shifted by a pixel. Of "
        "every photograph the patches with the lowest, the middle and the highest score are shown, whatever they look "
        "like."
    )
    how = (
        f"Every map has the same scale: black is 0, yellow is {scale:.3g} and above, which is the median over {inside} "
        "maps of their 99% quantile. The border is bright on every patch, typical or not: there a circular shift "
        "brings opposite edges together, and the network sees no further."
    )
    return [Prose([what, how]), Pictures([_map_picture(scored, scale) for scored in demo.scored])]


def _map_picture(scored: Scored, scale: float) -> Picture:
    places = ("lowest", "middle", "highest")[-len(scored.shown) :]
    labels = [f"{place} {short(scored.scores[index])}" for place, index in zip(places, scored.shown, strict=True)]
    images = [scored.patches.pixels[index] for index in scored.shown]
    bright = ", ".join(
        f"{label}: {(field >= scale).mean():.0%}" for label, field in zip(labels, scored.maps, strict=True)
    )
    alt = f"Maps of patches of {scored.name}. Score, and share of pixels at the end of the scale: {bright}."
    return Picture(figures.maps(images, list(scored.maps), labels, scale), alt, scored.name)


def _method(demo: Demo) -> list[tuple[str, str]]:
    detector, method = demo.detector, demo.method
    features = ", ".join(f"`{name}`" for name in method.features)
    pool = f"top {method.topk:.0%} of the pixels" if method.pool == "topk" else f"{method.pool} pooling"
    kept = ", ".join(f"{t} (weight {w:.3f})" for t, w in zip(detector.kept_, detector.weights_, strict=True))
    levels = ", ".join(map(str, detector.levels_))
    return [
        ("Backbone", _backbone_text(detector.backbone)),
        (
            "Method",
            f"GEPC with the library's defaults: feature {features}, {pool}, {detector.calibration_name} calibration",
        ),
        ("Group", ", ".join(method.group.names)),
        (
            "Noise levels",
            f"timesteps {levels} of {detector.backbone.n_steps}; kept, as the steadiest on the fitted patches: {kept}",
        ),
        (
            "Fitted on",
            f"{detector.n_fit_} patches; {len(detector.calibration_scores_)} others set the p-values",
        ),
        (
            "Passes per patch",
            f"{detector.cost().forward} to score, {detector.fit_cost().forward} to fit. The paper counts "
            f"{demo.paper_passes_per_patch} to score: it includes the identity, which cannot disagree with itself",
        ),
        (
            "Passes in all",
            f"{demo.passes:,} counted by the backbone, maps included; {demo.paper_passes:,} as the paper counts",
        ),
        ("Time", f"{demo.seconds:.0f} s on {_device_text(detector.backbone)}"),
        ("Seed", f"{detector.seed}; the noise of a patch depends on the seed and on the patch, on nothing else"),
    ]


def _backbone_text(backbone: Backbone) -> str:
    name = f"`{backbone.source}`" if backbone.source else f"a {backbone.family} backbone made in Python"
    size = f", {backbone.parameters / 1e6:.2f} million parameters" if backbone.parameters else ""
    training = "trained on 32x32 pictures of faces (CelebA), " if backbone.source == FACES else ""
    weights = f"; SHA-256 of its weights begins {backbone.sha256[:16]}" if backbone.sha256 else ""
    return f"{name}{size}, {training}used as it is{weights}"


def _device_text(backbone: Backbone) -> str:
    import torch

    return _count(torch.get_num_threads(), "CPU thread") if backbone.device.type == "cpu" else backbone.device.type


def _limits(demo: Demo) -> list[str]:
    inside = demo.held_out.name
    network = (
        "**The network was trained on faces.** It is used on textures without a single step of training."
        if demo.detector.backbone.source == FACES
        else f"**The network is used as it is.** This demo did not train it on {inside}."
    )
    limits = [
        f"{network} A score says how unlike the fitted patches of {inside} a patch is to this network, and no more.",
        "**One photograph of each kind.** All patches of a photograph share its light, focus, sharpness and "
        "compression. What tells two photographs apart may be any of these rather than what they show. This is a "
        "demonstration, not a benchmark.",
        "**Few patches, and not independent.** Neighbours resemble each other, so that the intervals are narrower than "
        "they should be.",
        f"**The promise holds for this photograph.** Calibration and held-out patches were drawn from one part of it "
        f"at random. {inside.capitalize()} in another light or from another camera is not exchangeable with them.",
        f"**Nothing was tuned.** {inside.capitalize()} was picked as a natural texture before any score was seen. The "
        "parameters are the library's defaults; levels and weights come from the fitted patches alone.",
        "**One draw of noise.** Scores and maps use one draw for each level. A map shows where the network's answers "
        "disagree, which need not be where an object is.",
        "**AUPR depends on the mix** of in- and out-of-distribution patches; compare it at equal numbers only.",
    ]
    quick = "**A quick run.** It uses about a third of the patches; without `--quick` the numbers are steadier."
    return [quick, *limits] if len(demo.data.fit) < FULL.fit else limits


def _repeat(command: str) -> list[Block]:
    return [
        Prose(["The same patches, noise and scores, up to rounding between machines:"]),
        Code(command),
        Prose(["The same on your own images:"]),
        Code(OWN_IMAGES),
        Facts([("Versions", ", ".join(f"{name} {number}" for name, number in versions()))]),
    ]


def versions(
    packages: Iterable[str] = ("torch", "diffusers", "numpy", "scikit-image", "matplotlib"),
) -> list[tuple[str, str]]:
    """gepc, Python and those of `packages` that are installed, with their versions."""
    found = [("gepc", __version__), ("Python", platform.python_version())]
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found.append((package, version(package)))
    return found


def short(score: float) -> str:
    """A score in few characters: one digit after the point below 100, none above."""
    return f"{score:.{1 if abs(score) < 99.95 else 0}f}".replace("-", "−")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

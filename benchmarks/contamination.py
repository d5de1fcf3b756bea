"""Outliers among the images of `fit`: false alarms, power, trimmed calibration, and whether a test could notice them.

    python benchmarks/contamination.py cifar10.npz:test_x svhn32.npz:test_x [--repeats 200]

A share of the images to fit on, and the same share of the calibration images, is replaced by images of the other data
set. Features are computed once; every repetition draws 100 images to fit on and 100 to calibrate with, fits the scorer,
and tests on 100 in-distribution images and 80 others that neither part contains. Prints a Markdown table.

The last three columns are the power of tests for outliers among the calibration scores: the largest gap in their upper
30 %, the mean excess of their highest 5 % over the 0.8 quantile, and the gap after the scorer was fitted again on the
80 % of the images with the lowest scores. Each statistic is in units of the distance from the median to the 0.8
quantile. Its threshold is its 0.99 quantile over the repetitions without outliers, which a user does not know; so the
columns bound from above what a test at a false-warning rate of 1 % can reach.
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt

import gepc
from gepc.conformal.p_values import CalibrationScores
from gepc.core.tables import markdown_table
from gepc.images.sources import Images, open_images
from gepc.methods.extraction import ExtractionSpec, FeatureTable, extract_all

SHARES = (0.0, 0.01, 0.05, 0.1)
FIT = CALIBRATION = TEST = 100
OTHERS = 80
ALPHA = 0.05
Array = npt.NDArray[np.float64]


def features(detector: gepc.Detector, images: Images) -> FeatureTable:
    """The features of a data set at every candidate level."""
    method, backbone = detector.extractor, detector.backbone
    spec = ExtractionSpec(method.for_fitting(), method.timesteps(backbone), detector.seed, detector.batch_size)
    return extract_all(images, detector.preprocessing(), backbone, spec)


def gap(scores: Array) -> float:
    """The largest gap between neighbours among the highest 30 % of the scores."""
    ordered = np.sort(scores)
    return float(np.diff(ordered[int(0.7 * len(ordered)) :]).max()) / _unit(scores)


def excess(scores: Array) -> float:
    """The mean of the highest 5 % of the scores, minus the 0.8 quantile."""
    highest = np.sort(scores)[-max(1, len(scores) // 20) :]
    return float(highest.mean() - np.quantile(scores, 0.8)) / _unit(scores)


def _unit(scores: Array) -> float:
    return float(np.quantile(scores, 0.8) - np.median(scores))


def repetition(
    detector: gepc.Detector, tables: tuple[FeatureTable, FeatureTable], share: float, rng: np.random.Generator
) -> tuple[float, ...]:
    """False alarms and power, the same after trimming, and three statistics of the calibration scores."""
    inside, outside = (rng.permutation(len(table)) for table in tables)
    columns = [table.columns for table in tables]

    def mixed(start: int, count: int, first: int) -> Array:
        odd = round(share * count)
        usual = columns[0][inside[start : start + count - odd]]
        return np.concatenate([usual, columns[1][outside[first : first + odd]]])

    fit, calibration = mixed(0, FIT, 0), mixed(FIT, CALIBRATION, round(share * FIT))
    scorer = detector.scorer().fit(fit)
    kept = list(scorer.selection_.kept)
    reference = CalibrationScores.of(scorer.score_kept(calibration[:, kept]), None)
    tests = (columns[0][inside[-TEST:]], columns[1][outside[-OTHERS:]])
    scores = [scorer.score_kept(test[:, kept]) for test in tests]
    rates = [(reference.p_values(values) <= ALPHA).mean() for values in scores]
    trimmed = [(reference.trim(share).p_values(values) <= ALPHA).mean() for values in scores]
    usual = np.argsort(scorer.score(fit))[: int(0.8 * FIT)]
    again = detector.scorer().fit(fit[usual])
    refitted = again.score(calibration)
    return (*rates, *trimmed, gap(reference.scores), excess(reference.scores), gap(refitted))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inside", help="in-distribution images: a folder or an array")
    parser.add_argument("outside", help="other images")
    parser.add_argument("--backbone", default="photos-small")
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    detector = gepc.create_detector(gepc.load_backbone(arguments.backbone), "msma", size=32)
    counts = {arguments.inside: FIT + CALIBRATION + TEST, arguments.outside: 2 * round(max(SHARES) * FIT) + OTHERS}
    first, second = (features(detector, open_images(source).take(range(count))) for source, count in counts.items())
    found = {}
    for share in SHARES:
        rng = np.random.default_rng(0)
        found[share] = np.array([repetition(detector, (first, second), share, rng) for _ in range(arguments.repeats)])
    limits = np.quantile(found[0.0][:, 4:], 0.99, axis=0)
    rows = []
    for share, values in found.items():
        means = [*values[:, :4].mean(axis=0), *(values[:, 4:] > limits).mean(axis=0)]
        rows.append((f"{share:.0%}", *(f"{value:.3f}" for value in means)))
    rates = ("false alarms", "power", "false alarms, trimmed", "power, trimmed")
    header = ("outliers", *rates, "noticed by the gap", "by the tail", "by the gap after refitting")
    print(markdown_table(header, rows))


if __name__ == "__main__":
    main()

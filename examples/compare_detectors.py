"""Every detection method on the same backbone and the same images, with its cost.

Run it with `python examples/compare_detectors.py`. The backbone is a Gaussian fitted to the patches, with an exact
score. Its passes are cheap, so that methods with a hundred passes run in a minute, but the ranking does not carry over
to real networks; for those, see `gepc bench`. The false-alarm rate is 0.2.
"""

import os

import numpy as np
from skimage import data

import gepc
from gepc.conformal.p_values import threshold
from gepc.lab.analytic import GaussianBackbone
from gepc.lab.metrics import auroc
from gepc.methods.base import find_method

SIDE = 8
SMALL = os.environ.get("GEPC_EXAMPLE_SIZE") == "small"


def patches(image: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Random grey patches (N, 8, 8, 1), uint8."""
    rng = np.random.default_rng(seed)
    rows, columns = (rng.integers(0, side - SIDE, count) for side in image.shape[:2])
    return np.stack(
        [image[row : row + SIDE, column : column + SIDE, None] for row, column in zip(rows, columns, strict=True)]
    )


def light(method: str) -> str | None:
    """The method's cheap preset, if it has one."""
    return "light" if "light" in find_method(method).presets else None


def main(count: int = 8 if SMALL else 200) -> dict[str, float]:
    """Fit on gravel, score gravel and grass, and print one line per method."""
    gravel, grass = data.gravel(), data.grass()
    training, normal = patches(gravel[:200], 4 * count, 0), patches(gravel[200:350], 2 * count, 1)
    inside, outside = patches(gravel[350:], count, 2), patches(grass, count, 3)
    backbone = GaussianBackbone.fitted(training.transpose(0, 3, 1, 2) / 127.5 - 1)
    found = {}
    print(f"{'method':<12} {'AUROC':>6} {'alarms':>7}  cost per image")
    for method in gepc.list_detectors():
        if method in ("cfs", "energy", "encoder"):  # they need inner layers, an energy network and a feature network
            continue
        detector = gepc.create_detector(backbone, method, preset=light(method)).fit(normal)
        scores = detector.score(outside)
        found[method] = auroc(detector.score(inside), scores)
        alarms = (scores > threshold(detector.calibration_scores_, alpha=0.2)).mean()
        cost = detector.extractor.cost(backbone, (SIDE, SIDE), len(detector.kept_))
        print(f"{method:<12} {found[method]:>6.3f} {alarms:>7.0%}  {cost}")
    return found


if __name__ == "__main__":
    main()

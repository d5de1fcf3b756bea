"""A domain where the default group is unsuitable: detect handwritten digits that are upside down.

Run it with `python examples/custom_symmetry.py`. A group that contains the half turn P is blind to it: since P P = Id,

    r(P x) = P^-1 s(P P x) - s(P x) = -P (P^-1 s(P x) - s(x)) = -P r(x),

so an image and its upside-down copy have the same residual. Transforms that do not exchange the two, such as shifts,
remain useful; their lengths here are an oracle, chosen with the upside-down digits. The backbone is a mixture of ten
Gaussians, one fitted to each digit, with exact scores.
"""

import os

import numpy as np
from sklearn.covariance import ledoit_wolf
from sklearn.datasets import load_digits

import gepc
from gepc.lab.analytic import MixtureBackbone
from gepc.lab.metrics import auroc

SMALL = os.environ.get("GEPC_EXAMPLE_SIZE") == "small"
GROUPS = {
    "half turn only": ("rot180",),
    "the paper's": "paper",
    "shifts by 1": ("shift(1,0)", "shift(-1,0)", "shift(0,1)", "shift(0,-1)"),
    "shifts by 2": ("shift(2,0)", "shift(-2,0)", "shift(0,2)", "shift(0,-2)"),
}


def digits() -> tuple[np.ndarray, np.ndarray]:
    """1,797 images (N, 1, 8, 8) in [-1, 1] and their labels, in random order."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    return (found.images[order, None] / 8 - 1).astype(np.float32), found.target[order]


def mixture(images: np.ndarray, labels: np.ndarray) -> MixtureBackbone:
    """One Gaussian for each digit."""
    sets = [images[labels == digit].astype(np.float64) for digit in range(10)]
    covs = [ledoit_wolf(part.reshape(len(part), -1))[0] for part in sets]
    return MixtureBackbone([len(part) for part in sets], [part.mean(0) for part in sets], covs, (1, 8, 8))


def turned(images: np.ndarray) -> np.ndarray:
    """Upside down."""
    return np.ascontiguousarray(images[..., ::-1, ::-1])


def main(fit: int = 30 if SMALL else 300, test: int = 20 if SMALL else 200) -> dict[str, float]:
    """For each group: disagreement on upright digits, and AUROC against upside-down and mirrored digits."""
    images, labels = digits()
    backbone = mixture(images[:900], labels[:900])
    normal, upright = images[900 : 900 + fit], images[1300 : 1300 + test]
    others = {"upside down": turned(upright), "mirrored": np.ascontiguousarray(upright[..., ::-1])}
    found = {}
    print(f"{'group':<15} {'upright: 1 - cos':>17}" + "".join(f"{'AUROC ' + name:>20}" for name in others))
    for name, group in GROUPS.items():
        detector = gepc.GEPC(backbone, levels=(0.99, 0.97, 0.9), features="cos", group=group).fit(normal)
        inside, usual = detector.score(upright), detector.features(upright)["cos"].mean()
        values = [auroc(inside, detector.score(images)) for images in others.values()]
        found[name] = values[0]
        print(f"{name:<15} {usual:>17.3f}" + "".join(f"{value:>20.3f}" for value in values))

    detector = gepc.GEPC(backbone, levels=(0.99,), keep=1, features="cos", group="rot180")
    noise = np.random.default_rng(1).standard_normal((1, *upright.shape))
    gap = (
        detector.features(upright, noise=noise)["cos"] - detector.features(turned(upright), noise=turned(noise))["cos"]
    )
    found["gap"] = float(np.abs(gap).max())
    print(f"half turn only, image and noise turned together: the feature changes by at most {found['gap']:.0e}")
    return found


if __name__ == "__main__":
    main()

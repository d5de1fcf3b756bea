"""A face model applied to surfaces: the backbone was trained neither on the in-distribution nor on the other images.

Run it with `python examples/cross_domain.py`. `celeba32-tiny` was trained on faces. Patches of a brick wall are the
in-distribution images; patches of other photographs should raise alarms. The detector only learns how much the
predictions of the face model usually disagree on patches of brick.
"""

import os

import numpy as np
from skimage import data

import gepc
from gepc.conformal.p_values import threshold
from gepc.lab.metrics import auroc

SIDE = 32
SMALL = os.environ.get("GEPC_EXAMPLE_SIZE") == "small"


def patches(image: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Patches (N, 32, 32) of a grey photograph, cut from a grid without overlap."""
    cells = [(row, column) for row in range(image.shape[0] // SIDE) for column in range(image.shape[1] // SIDE)]
    chosen = np.random.default_rng(seed).permutation(len(cells))[:count]
    corners = [(SIDE * cells[k][0], SIDE * cells[k][1]) for k in chosen]
    return np.stack([image[top : top + SIDE, left : left + SIDE] for top, left in corners])


def main(fit: int = 12 if SMALL else 120, test: int = 2 if SMALL else 40, alpha: float = 0.2) -> dict[str, float]:
    """Fit on one half of the brick wall; score the other half and four other photographs."""
    backbone = gepc.load_backbone("celeba32-tiny")
    detector = gepc.GEPC(backbone, levels=(0.9999, 0.9979, 0.99), keep=2)
    wall = data.brick()
    detector.fit(patches(wall[: SIDE * 8], fit))
    normal = patches(wall[SIDE * 8 :], test)
    others = {"grass": data.grass(), "gravel": data.gravel(), "moon": data.moon(), "page": data.page()}

    inside = detector.score(normal)
    limit = threshold(detector.calibration_scores_, alpha)
    print(f"fitted on {detector.fitted.fit_images} patches; kept timesteps {detector.kept_.tolist()}")
    print(f"{'brick, held out':<16} alarms {(inside > limit).mean():>4.0%}   at a false-alarm rate of {alpha:.0%}")
    found = {}
    for name, image in others.items():
        scores = detector.score(patches(image, test))
        found[name] = auroc(inside, scores)
        print(f"{name:<16} alarms {(scores > limit).mean():>4.0%}   AUROC {found[name]:.3f}")
    return found


if __name__ == "__main__":
    main()

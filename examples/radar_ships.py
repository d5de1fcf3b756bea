"""Detect ships in sea clutter with the embedded radar model, which was trained without ships.

Run it with `python examples/radar_ships.py`. The sea is simulated (K-distributed clutter, see
`gepc.lab.radar.simulate`), so the ground truth is known and nothing is downloaded. The detector is fitted on empty sea.
Patches with a ship should raise alarms, and the maximum of the map should lie on the ship.
"""

import os

import numpy as np

import gepc
from gepc.conformal.p_values import threshold
from gepc.lab.metrics import auroc
from gepc.lab.radar.annotations import Box
from gepc.lab.radar.bench import radar_detector
from gepc.lab.radar.simulate import Sea, Target, simulate

SIDE = 32
SMALL = os.environ.get("GEPC_EXAMPLE_SIZE") == "small"


def ship(seed: int) -> Target:
    """A short ship, 14 by 5 pixels, somewhere inside the patch."""
    rng = np.random.default_rng(seed)
    x, y = rng.uniform(10, SIDE - 10, 2)
    return Target(x, y, length=14.0, width=5.0, heading=rng.uniform(0, 2 * np.pi), brightness=60.0)


def patches(count: int, first_seed: int, with_ship: bool = False) -> tuple[np.ndarray, list[Box]]:
    """Amplitudes (N, 32, 32), where white is 1, and the boxes of the ships."""
    seeds = range(first_seed, first_seed + count)
    found = [simulate(SIDE, SIDE, Sea(), (ship(seed),) if with_ship else (), seed) for seed in seeds]
    return np.stack([amplitude for amplitude, _ in found]), [boxes[0] for _, boxes in found if boxes]


def hit(field: np.ndarray, box: Box) -> bool:
    """Whether the hottest pixel of the map lies within two pixels of the ship's box."""
    row, column = np.unravel_index(field.argmax(), field.shape)
    inside_x = box.x - 2 <= column <= box.x + box.width + 2
    return bool(inside_x and box.y - 2 <= row <= box.y + box.height + 2)


def main(fit: int = 30 if SMALL else 150, test: int = 5 if SMALL else 50, alpha: float = 0.1) -> dict[str, float]:
    """Fit on empty sea; AUROC, alarms and hits on patches with a ship."""
    backbone = gepc.load_backbone("sar-small")
    detector = radar_detector(backbone, target_pixels=50, size=SIDE, value_range=(0.0, 1.0)).fit(patches(fit, 0)[0])
    sea, _ = patches(test, 10_000)
    ships, boxes = patches(test, 20_000, with_ship=True)
    empty, occupied = detector.score(sea), detector.score(ships)
    limit = threshold(detector.calibration_scores_, alpha)
    found = {
        "auroc": auroc(empty, occupied),
        "false alarms": float((empty > limit).mean()),
        "found": float((occupied > limit).mean()),
        "map on ship": float(
            np.mean([hit(field, box) for field, box in zip(detector.score_map(ships), boxes, strict=True)])
        ),
    }
    print(", ".join(f"{name} {value:.3f}" for name, value in found.items()), f"(alpha {alpha})")
    return found


if __name__ == "__main__":
    main()

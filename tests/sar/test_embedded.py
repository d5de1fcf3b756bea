"""The embedded radar backbone on simulated sea, where everything is known."""

from __future__ import annotations

import numpy as np
import pytest

import gepc
from gepc.backbones.load import WEIGHTS
from gepc.sar.annotations import box_mask
from gepc.sar.bench import sar_options
from gepc.sar.results import localise, smoothed
from gepc.sar.simulate import Sea, Target, hull_box, simulate
from gepc.scoring.metrics import auroc

SIZE = 64
SHIP = Target(SIZE / 2, SIZE / 2, length=24, width=8, heading=0.6, brightness=60.0)


def patches(count: int, first_seed: int, targets: tuple[Target, ...] = ()) -> np.ndarray:
    scenes = [simulate(SIZE, SIZE, Sea(), targets, seed)[0] for seed in range(first_seed, first_seed + count)]
    return np.stack(scenes).astype(np.float32)[..., None]


@pytest.fixture(scope="module")
def detector() -> gepc.GEPC:
    options = sar_options(target_pixels=150, size=SIZE) | {"value_range": (0.0, 1.0)}
    detector = gepc.GEPC(gepc.load_backbone("sar-tiny"), **options)
    detector.fit(patches(36, 0))
    return detector


def test_it_is_small_and_takes_one_channel(detector: gepc.GEPC) -> None:
    assert sum(path.stat().st_size for path in (WEIGHTS / "sar-tiny").iterdir()) <= 8 * 2**20
    assert detector.backbone.channels == 1
    assert detector.cost().forward == 2


def test_ships_stand_out_from_simulated_clutter(detector: gepc.GEPC) -> None:
    assert auroc(detector.score(patches(16, 100)), detector.score(patches(16, 200, (SHIP,)))) > 0.9


def test_the_map_points_at_the_ship(detector: gepc.GEPC) -> None:
    mask = box_mask([hull_box(SHIP)], SIZE, SIZE)
    maps = smoothed(detector.score_map(patches(6, 300, (SHIP,))), 9)
    found = localise(maps, np.stack([mask] * 6))
    assert found.auroc.mean() > 0.65
    assert found.hit.mean() > 0.8
    assert found.energy.mean() > 1.3 * found.area.mean()

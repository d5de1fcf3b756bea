"""The embedded radar backbone on simulated sea, where everything is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gepc
from gepc.backbones.load import WEIGHTS
from gepc.lab.metrics import auroc, localisation
from gepc.lab.radar.annotations import box_mask
from gepc.lab.radar.bench import radar_detector
from gepc.lab.radar.simulate import Sea, Target, hull_box, simulate
from gepc.methods.pooling import box_filter

SIZE = 64
SHIP = Target(SIZE / 2, SIZE / 2, length=24, width=8, heading=0.6, brightness=60.0)


def patches(count: int, first_seed: int, targets: tuple[Target, ...] = ()) -> np.ndarray:
    scenes = [simulate(SIZE, SIZE, Sea(), targets, seed)[0] for seed in range(first_seed, first_seed + count)]
    return np.stack(scenes).astype(np.float32)[..., None]


@pytest.fixture(scope="module")
def detector() -> gepc.Detector:
    backbone = gepc.load_backbone("sar-small")
    return radar_detector(backbone, target_pixels=150, size=SIZE, value_range=(0.0, 1.0)).fit(patches(36, 0))


def test_it_is_small_and_takes_one_channel(detector: gepc.Detector) -> None:
    assert sum(path.stat().st_size for path in (WEIGHTS / "sar-small").iterdir()) <= 8 * 2**20
    assert detector.backbone.channels == 1
    assert detector.cost().forward == 1


def test_ships_stand_out_from_simulated_clutter(detector: gepc.Detector) -> None:
    assert auroc(detector.score(patches(16, 100)), detector.score(patches(16, 200, (SHIP,)))) == 1.0


def test_the_map_points_at_the_ship(detector: gepc.Detector) -> None:
    mask = box_mask([hull_box(SHIP)], SIZE, SIZE)
    maps = box_filter(torch.from_numpy(detector.score_map(patches(6, 300, (SHIP,)))), 9)
    found = localisation(maps.numpy(), np.stack([mask] * 6))
    assert found.auroc.mean() > 0.8
    assert found.hit.mean() == 1.0
    assert found.pro > 0.6

"""A net and images so small that a step takes milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gepc.lab.training.recipe import Recipe

TINY: dict[str, Any] = {
    "channels": (8, 8),
    "norm_groups": 4,
    "image_channels": 1,
    "diffusion_steps": 16,
    "batch_size": 4,
    "steps": 10,
    "warmup_steps": 2,
    "learning_rate": 1e-3,
    "flips": "both",
    "checkpoint_every": 3,
    "held_out": 8,
}


@pytest.fixture(scope="session")
def tiny() -> Recipe:
    return Recipe(**TINY)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pixels = np.random.default_rng(5).integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    path = tmp_path_factory.mktemp("data") / "images.npz"
    np.savez(path, train_x=pixels)
    return path

"""benchmarks/architectures.py with a tiny network and a single step."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from architectures import CANDIDATES, LEVELS, Candidate, build, held_out_errors, table, train

from gepc.lab.training.recipe import Recipe, alphas_cumprod


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).uniform(-1.0, 1.0, (40, 3, 8, 8)).astype(np.float32)


def test_training_stops_after_its_cpu_time(images: np.ndarray) -> None:
    candidate = Candidate((8, 16), {"norm_num_groups": 1}, bfloat16=True)
    recipe = Recipe(diffusion_steps=16, image_channels=3, batch_size=4, ema_decay=0.5)
    net, steps = train(candidate, images, recipe, minutes=1e-6)
    assert steps == 1
    errors = held_out_errors(net, images, alphas_cumprod(recipe))
    assert len(errors) == len(LEVELS)
    assert all(0.1 < error < 10.0 for error in errors)


def test_the_last_candidate_is_the_default_architecture() -> None:
    chosen, default = list(CANDIDATES.values())[-1], Recipe()
    assert chosen.channels == default.channels
    assert chosen.options["norm_num_groups"] == default.norm_groups
    assert (chosen.options["resnet_time_scale_shift"] == "scale_shift") == default.scale_shift
    assert chosen.rate == default.learning_rate
    assert sum(parameter.numel() for parameter in build(chosen).parameters()) < 0.66e6


def test_one_row_for_each_candidate() -> None:
    result = {
        "candidate": asdict(Candidate()),
        "weights": 620_000,
        "kiloflop per pixel": 177.2,
        "milliseconds per pass": 2.264,
        "steps": 914,
        "held-back pictures": [0.5] * len(LEVELS),
        "synthetic outliers": {"blur": 0.5, "noise": 1.0},
    }
    row = table({"narrow": result}).splitlines()[2]
    assert row.startswith("| narrow | (16, 32, 64) | 0.62 M | 177 | 2.26 | 914 | 0.5000 |")
    assert row.endswith("| 0.750 |")

"""What the backbone tests share: a maker of small diffusers folders, and the golden answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

GOLDEN = ("improved_cosine", "guided_updown")


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """make_folder(net options, scheduler options) -> a flat diffusers folder with random weights."""

    def make(net: dict[str, Any] | None = None, scheduler: dict[str, Any] | None = None, name: str = "net") -> Path:
        from diffusers import DDPMScheduler, UNet2DModel

        torch.manual_seed(0)
        options: dict[str, Any] = {
            "sample_size": 8,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "UpBlock2D"),
            "add_attention": False,
            "norm_num_groups": 4,
        }
        folder = tmp_path / name
        UNet2DModel(**{**options, **(net or {})}).save_pretrained(folder)
        DDPMScheduler(**{"num_train_timesteps": 50, **(scheduler or {})}).save_pretrained(folder)
        return folder

    return make


@dataclass(frozen=True)
class Golden:
    """A published answer: the options, the tensors that gave it, the input and what came out."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    x: torch.Tensor
    t: torch.Tensor
    raw: torch.Tensor
    wrapped: torch.Tensor
    abar: npt.NDArray[np.float64]


@pytest.fixture(scope="session", params=GOLDEN)
def golden(request: pytest.FixtureRequest) -> Golden:
    """The golden answers, from the folder `golden` beside $GEPC_DATA."""
    if "GEPC_DATA" not in os.environ:
        pytest.skip("the golden answers need the environment variable GEPC_DATA")
    folder = Path(os.environ["GEPC_DATA"]).parent / "golden"
    if not (folder / f"{request.param}.json").is_file():
        pytest.skip(f"no golden answers: {folder}/{request.param}.json does not exist")
    recipe = json.loads((folder / f"{request.param}.json").read_text())
    with np.load(folder / f"{request.param}.npz") as answers:
        stored = {name: answers[name] for name in answers}
    size = recipe["config"]["image_size"]
    x = torch.from_numpy(np.random.default_rng(7).standard_normal((1, 3, size, size)).astype(np.float32))
    return Golden(
        config=recipe["config"],
        tensors=golden_values(recipe["parameters"], recipe["seed"]),
        x=x.expand(len(stored["t"]), -1, -1, -1),
        t=torch.from_numpy(stored["t"]),
        raw=torch.from_numpy(stored["raw"]),
        wrapped=torch.from_numpy(stored["wrapped"]),
        abar=stored["abar"],
    )


def golden_values(shapes: list[tuple[str, list[int]]], seed: int) -> dict[str, torch.Tensor]:
    """Tensors from a seed: matrices 0.7 z/sqrt(fan in), norms 1 + 0.1 z, biases 0.1 z."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes:
        z = rng.standard_normal(shape).astype(np.float32)
        if len(shape) > 1:
            z *= np.float32(0.7 / np.sqrt(np.prod(shape[1:])))
        else:
            z = 1 + np.float32(0.1) * z if name.endswith("weight") else np.float32(0.1) * z
        tensors[name] = torch.from_numpy(z)
    return tensors

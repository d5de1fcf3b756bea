"""Small things to test with: a network of one convolution, and smooth random pictures."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import gepc
from gepc.backbones.schedule import cosine_alphas_cumprod

LEVELS = (0.999, 0.99, 0.97, 0.9)


def toy_encoder() -> str:
    """The path of an ONNX file with a feature network: a random convolution with 4 pixels per cell."""
    import onnx

    path = Path(tempfile.mkdtemp(prefix="gepc-encoder-")) / "encoder.onnx"
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    weights = np.random.default_rng(7).standard_normal((6, 3, 4, 4)).astype(np.float32) / 7.0
    kind, shape = onnx.TensorProto.FLOAT, ("N", 3, "H", "W")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Conv", ["images", "weights"], ["maps"], strides=[4, 4])],
        "encoder",
        [onnx.helper.make_tensor_value_info("images", kind, shape)],
        [onnx.helper.make_tensor_value_info("maps", kind, ("N", 6, "h", "w"))],
        [onnx.numpy_helper.from_array(weights, "weights")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return str(path)


BRIEF: dict[str, dict[str, Any]] = {
    **{name: {"strata": 2} for name in ("ic", "nll_vlb", "typicality")},
    "ddpm_ood": {"steps": 6},
    "dos": {"strata": 8},
    "diffpath": {"steps": 4},
    "encoder": {"encoder": toy_encoder()},
    "eigenscore": {"k": 1, "iterations": 1, "draws": 1},
    "lmd": {"repetitions": 1, "steps": 4},
    "lr": {"levels": gepc.Levels.rho(0.1, 0.5, 2.0)},
    "nll_ode": {"steps": 2},
    "waic": {"strata": 2, "draws": 2},
}
"""Options for few passes, for what holds for any number of them."""


def toy_backbone(channels: int = 3, image_size: int | tuple[int, int] | None = 8) -> gepc.Backbone:
    """tanh of a fixed random convolution that grows stronger to the right: equivariant under nothing."""
    weights = np.random.default_rng(5).standard_normal((channels, channels, 3, 3)) / 3.0
    kernel = torch.from_numpy(weights).float()

    def eps(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        strength = torch.linspace(0.7, 1.3, x.shape[-1]) * (1.0 + t[:, None, None, None] / 1000.0)
        return torch.tanh(torch.nn.functional.conv2d(x, kernel, padding=1) * strength)

    return gepc.Backbone.from_callable(eps, cosine_alphas_cumprod(1000), channels, image_size)


class ResBlock(torch.nn.Module):
    """tanh of a fixed random convolution to more channels, stronger to the right."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        weights = np.random.default_rng(6).standard_normal((inner, channels, 3, 3)) / 3.0
        self.kernel = torch.nn.Parameter(torch.from_numpy(weights).float(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        strength = torch.linspace(0.7, 1.3, x.shape[-1])
        return torch.tanh(torch.nn.functional.conv2d(x, self.kernel, padding=1) * strength)


class ToyNet(torch.nn.Module):
    """A block of 12 channels, mixed down to the image's."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.block, self.channels = ResBlock(channels, 4 * channels), channels

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        strength = 1.0 + t[:, None, None, None] / 1000.0
        return self.block(x * strength).unflatten(1, (4, self.channels)).mean(1)


def toy_network(channels: int = 3, image_size: int | tuple[int, int] | None = 8) -> gepc.Backbone:
    """A network whose inner layer can be recorded."""
    return gepc.Backbone.from_callable(ToyNet(channels), cosine_alphas_cumprod(1000), channels, image_size)


def toy_detector(backbone: gepc.Backbone | None = None, **options: object) -> gepc.GEPC:
    """GEPC on the toy network, at levels that its schedule tells apart."""
    return gepc.GEPC(toy_backbone() if backbone is None else backbone, **{"levels": LEVELS, **options})  # type: ignore[arg-type]


def pictures(
    count: int, size: int | tuple[int, int] = 8, channels: int = 3, seed: int = 0, contrast: float = 0.5
) -> npt.NDArray[np.float32]:
    """Smooth random colour fields (N, C, H, W) in [-1, 1]."""
    height, width = (size, size) if isinstance(size, int) else size
    rng = np.random.default_rng(seed)
    rough = rng.standard_normal((count, channels, height, width))
    smooth = sum(np.roll(rough, (dy, dx), (2, 3)) for dy in range(2) for dx in range(2)) / 2.0
    return np.tanh(contrast * smooth).astype(np.float32)


def as_uint8(images: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """(N, C, H, W) in [-1, 1] as (N, H, W, C) bytes."""
    return np.rint((images.transpose(0, 2, 3, 1) + 1.0) * 127.5).astype(np.uint8)

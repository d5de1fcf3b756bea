"""The snippets of the page "Using your own backbone", run as they stand, with the packages they name if installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from families import embeddings, make, text_encoder
from safetensors.numpy import save_file

import gepc

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "own-backbone.md"
SNIPPETS = dict(
    re.findall(r"<!-- snippet: (.*?) -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
)
Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a snippet in an empty folder; gives its backbone."""
    monkeypatch.chdir(tmp_path)

    def execute(name: str, **given: Any) -> gepc.Backbone:
        names = dict(given)
        exec(compile(SNIPPETS[name], f"{PAGE.name}: {name}", "exec"), names)
        backbone = names["backbone"]
        assert isinstance(backbone, gepc.Backbone)
        return backbone

    return execute


def check(backbone: gepc.Backbone) -> None:
    """It encodes and predicts."""
    height, width = backbone.image_size or (16, 16)
    x = backbone.encode(torch.rand(2, backbone.channels, height, width) * 2 - 1)
    with torch.no_grad():
        eps = backbone.eps(x, backbone.n_steps // 2)
    assert torch.isfinite(eps).all()
    assert eps.std() > 0


def check_path(backbone: gepc.Backbone, clean: torch.Tensor, noise: torch.Tensor, t: int) -> None:
    """A network that knows the noise gives exactly it."""
    abar = float(backbone.alphas_cumprod[t])
    torch.testing.assert_close(
        backbone.eps(abar**0.5 * clean + (1 - abar) ** 0.5 * noise, t), noise, rtol=1e-3, atol=1e-3
    )


def test_every_snippet_is_run_here() -> None:
    tested = set(re.findall(r'run\("(.*?)"', Path(__file__).read_text(encoding="utf-8")))
    assert tested == set(SNIPPETS)


def test_latent(run: Run) -> None:
    make("LDM", Path("ldm-celebahq-256"))
    check(run("ldm"))
    make("DiT", Path("DiT-XL-2-256"))
    check(run("dit"))
    check(run("own encoder"))


def test_text(run: Run) -> None:
    pytest.importorskip("transformers", reason="the text encoder is a transformers model: pip install 'gepc[text]'")
    from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    make("Stable Diffusion", Path("parts"))
    StableDiffusionPipeline(
        unet=UNet2DConditionModel.from_pretrained("parts/unet"),
        vae=AutoencoderKL.from_pretrained("parts/vae"),
        scheduler=PNDMScheduler.from_pretrained("parts/scheduler"),
        **text_encoder(Path("words")),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained("stable-diffusion-v1-5")
    check(run("stable diffusion"))


def test_given_embeddings(run: Run) -> None:
    make("SD3", Path("sd3"))
    save_file(embeddings("prompt_embeds", "pooled_prompt_embeds"), "text.safetensors")
    check(run("sd3"))


def test_torchcfm(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network as it is, and the direction of time by the package's own sampler of the path."""
    if "ot" not in sys.modules:  # optimal transport, which this path does not use
        monkeypatch.setitem(sys.modules, "ot", MagicMock())
    torchcfm = pytest.importorskip("torchcfm", reason="pip install --no-deps torchcfm torchdiffeq")
    from torchcfm.models.unet import UNetModel

    torch.save(UNetModel(dim=(1, 28, 28), num_channels=32, num_res_blocks=1).state_dict(), "digits.pt")
    backbone = run("torchcfm")
    assert backbone.eps(torch.zeros(2, 1, 28, 28), 500).shape == (2, 1, 28, 28)
    noise, clean = torch.randn(2, 3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    matcher = torchcfm.ConditionalFlowMatcher(sigma=0.0)
    _, y, velocity = matcher.sample_location_and_conditional_flow(noise, clean, torch.full((3,), 0.75))
    oracle = gepc.Backbone.from_flow(lambda _, t: velocity, 1, 8, data_time=1.0, noise_time=0.0, levels=[0.25])
    check_path(oracle, clean, noise, 0)
    length = float(np.hypot(0.75, 0.25))
    torch.testing.assert_close(oracle.eps(y / length, 0), noise, rtol=1e-4, atol=1e-4)


def test_flow_matching(run: Run) -> None:
    pytest.importorskip("flow_matching", reason="pip install flow_matching")
    from flow_matching.path import CondOTProbPath

    noise, clean = torch.randn(2, 3, 1, 28, 28, generator=torch.Generator().manual_seed(0))

    class Net(torch.nn.Module):
        """The velocity that the package's path gives, whatever it is asked."""

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return CondOTProbPath().sample(x_0=noise.to(x), x_1=clean.to(x), t=t).dx_t

    backbone = run("flow_matching", net=Net())
    for t in (0, 400, 999):
        check_path(backbone, clean, noise, t)


def test_lucidrains(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ema_pytorch", reason="pip install --no-deps denoising-diffusion-pytorch ema-pytorch einops")
    for name in ("torchvision", "torchvision.transforms", "torchvision.utils"):  # for its data loader
        monkeypatch.setitem(sys.modules, name, MagicMock())
    for name in ("pytorch_fid", "pytorch_fid.fid_score", "pytorch_fid.inception"):  # for its evaluation
        monkeypatch.setitem(sys.modules, name, MagicMock())
    package = pytest.importorskip(
        "denoising_diffusion_pytorch", reason="pip install --no-deps denoising-diffusion-pytorch"
    )
    from ema_pytorch import EMA

    diffusion = package.GaussianDiffusion(package.Unet(dim=8, dim_mults=(1, 2)), image_size=16, objective="pred_v")
    torch.save({"step": 1, "model": diffusion.state_dict(), "ema": EMA(diffusion).state_dict()}, "model-1.pt")
    backbone = run("lucidrains")
    check(backbone)
    x, t = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([300, 700])
    with torch.no_grad():
        v = diffusion.model(x, t)
        expected = backbone.sqrt_abar(x, t) * v + backbone.sigma(x, t) * x
        torch.testing.assert_close(backbone.eps(x, t), expected, rtol=1e-3, atol=1e-4)


def test_monai(run: Run) -> None:
    nets = pytest.importorskip("monai.networks.nets", reason="pip install monai")
    net = nets.DiffusionModelUNet(
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        channels=(8, 16),
        num_res_blocks=1,
        norm_num_groups=4,
        attention_levels=(False, True),
        num_head_channels=8,
    )
    with torch.no_grad():  # the output layer starts at zero
        for parameter in net.out[-1].parameters():
            parameter.add_(0.1)
    torch.save(net.state_dict(), "chest.pt")
    backbone = run("monai")
    check(backbone)
    assert backbone.net is not None

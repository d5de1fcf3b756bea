"""Building a `UNet2DModel`, with three small changes that some of OpenAI's networks need beyond its config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from diffusers import UNet2DModel

# Where patches are needed, the config's `attention_head_dim` is a text that begins like this. Plain diffusers fails on
# it; with a number it would silently build a different network.
MARK = "needs gepc: "
EXTRAS = "gepc.json"  # the file beside the config that holds the patches


@dataclass(frozen=True)
class Patches:
    """Changes to a built network, each None or False where the config is enough.

    Parameters
    ----------
    encoder_heads : attention heads at every width in encoder and middle; the config only has a width per head.
    decoder_heads : the same for the decoder.
    time_channels : width of the sinusoidal time embedding, if it is not that of the first level.
    plain_resampling : average pooling and nearest neighbour without a convolution (`conv_resample=False`).
    head_channels : the config's own `attention_head_dim`, which `MARK` replaces there.
    """

    encoder_heads: int | None = None
    decoder_heads: int | None = None
    time_channels: int | None = None
    plain_resampling: bool = False
    head_channels: int | None = None

    @property
    def reasons(self) -> list[str]:
        """Why plain diffusers cannot build this network; empty if it can."""
        reasons = {
            f"{self.encoder_heads} attention heads at every width": self.encoder_heads is not None,
            f"{self.decoder_heads} heads in the decoder": self.decoder_heads != self.encoder_heads,
            f"a time embedding of {self.time_channels} channels": self.time_channels is not None,
            "resampling without convolutions": self.plain_resampling,
        }
        return [reason for reason, holds in reasons.items() if holds]

    def to_dict(self) -> dict[str, int | bool]:
        """The changes that are made, for a file."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}


def build_net(config: Mapping[str, Any], patches: Patches) -> UNet2DModel:
    """The network of that config, without memory for its weights (meta device)."""
    from diffusers import UNet2DModel

    values = dict(config)
    if str(values.get("attention_head_dim")).startswith(MARK):
        values["attention_head_dim"] = patches.head_channels
    with torch.device("meta"):
        net = UNet2DModel.from_config(values)
        if patches.encoder_heads is not None and patches.decoder_heads is not None:
            _set_heads(net, patches.encoder_heads, patches.decoder_heads)
        if patches.time_channels is not None:
            _widen_time_embedding(net, patches.time_channels)
        if patches.plain_resampling:
            _drop_resampling_convolutions(net)
    return net


def _set_heads(net: UNet2DModel, encoder: int, decoder: int) -> None:
    from diffusers.models.attention_processor import Attention

    for name, module in net.named_modules():
        if isinstance(module, Attention):
            module.heads = decoder if name.startswith("up_blocks") else encoder
            module.sliceable_head_dim = module.heads
            module.scale = (module.inner_dim // module.heads) ** -0.5


def _widen_time_embedding(net: UNet2DModel, channels: int) -> None:
    from diffusers.models.embeddings import TimestepEmbedding, Timesteps

    width = net.time_embedding.linear_2.out_features
    net.time_proj = Timesteps(channels, flip_sin_to_cos=True, downscale_freq_shift=0)
    net.time_embedding = TimestepEmbedding(channels, width)


def _drop_resampling_convolutions(net: UNet2DModel) -> None:
    from diffusers.models.downsampling import Downsample2D
    from diffusers.models.upsampling import Upsample2D

    for block in (*net.down_blocks, *net.up_blocks):
        width = block.resnets[-1].out_channels
        if getattr(block, "downsamplers", None) is not None:
            block.downsamplers = torch.nn.ModuleList([Downsample2D(width, use_conv=False, name="op")])
        if getattr(block, "upsamplers", None) is not None:
            block.upsamplers = torch.nn.ModuleList([Upsample2D(width, use_conv=False)])

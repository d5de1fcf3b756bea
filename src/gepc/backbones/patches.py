"""What some OpenAI nets need beyond a `UNet2DModel`'s config: three small changes to the modules it builds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusers import UNet2DModel

# Where patches are needed, the config's `attention_head_dim` is a text that begins like this. Plain diffusers fails on
# it; with a number there it would build another network without a word.
MARK = "needs gepc: "


@dataclass(frozen=True)
class Patches:
    """Changes to a built network, each None or False where the config says it all.

    encoder_heads, decoder_heads : a fixed number of attention heads at every width (the middle counts as encoder);
        the config only knows a fixed width per head.
    time_channels : width of the sinusoidal time embedding, where it is not the first level's.
    plain_resampling : average pooling and nearest neighbour without a convolution (`conv_resample=False`).
    head_channels : the config's own `attention_head_dim`, kept here because a mark takes its place (see `MARK`).
    """

    encoder_heads: int | None = None
    decoder_heads: int | None = None
    time_channels: int | None = None
    plain_resampling: bool = False
    head_channels: int | None = None

    @property
    def reasons(self) -> list[str]:
        """Why plain diffusers cannot build this network; empty where it can."""
        reasons = []
        if self.encoder_heads is not None:
            reasons.append(f"{self.encoder_heads} attention heads at every width")
        if self.decoder_heads != self.encoder_heads:
            reasons.append(f"{self.decoder_heads} heads in the decoder")
        if self.time_channels is not None:
            reasons.append(f"a time embedding of {self.time_channels} channels")
        if self.plain_resampling:
            reasons.append("resampling without convolutions")
        return reasons

    def apply(self, net: UNet2DModel) -> None:
        """Change `net` in place, before its weights are loaded."""
        if self.encoder_heads is not None and self.decoder_heads is not None:
            _set_heads(net, self.encoder_heads, self.decoder_heads)
        if self.time_channels is not None:
            _widen_time_embedding(net, self.time_channels)
        if self.plain_resampling:
            _drop_resampling_convolutions(net)

    def to_dict(self) -> dict[str, int | bool]:
        """The changes that are made, for a file."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}


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
    import torch
    from diffusers.models.downsampling import Downsample2D
    from diffusers.models.upsampling import Upsample2D

    for block in net.down_blocks:
        if block.downsamplers is not None:
            width = block.resnets[-1].out_channels
            block.downsamplers = torch.nn.ModuleList([Downsample2D(width, use_conv=False, name="op")])
    for block in net.up_blocks:
        if block.upsamplers is not None:
            width = block.resnets[-1].out_channels
            block.upsamplers = torch.nn.ModuleList([Upsample2D(width, use_conv=False)])

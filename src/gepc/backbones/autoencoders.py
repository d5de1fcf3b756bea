"""Encoders of latent diffusion: diffusers' autoencoders, without their decoders."""

from typing import Any

import torch

from gepc.backbones.weights import settle
from gepc.core.errors import BackboneError

PROBE = 64  # side of an image that shows how an autoencoder changes sizes


class AutoencoderEncoder:
    """z = ((mode of encode(x)) - shift) * scaling_factor, of `AutoencoderKL`, `VQModel`, `AutoencoderDC` and the like.

    For a `VQModel`, the latents before quantisation are used. With `latents_mean` and `latents_std` in its config, z is
    (mode - mean) * scaling_factor / std, per channel. The autoencoder is changed in place: its decoder is dropped. It
    runs in float32 instead of float16 where its config says `force_upcast`.
    """

    def __init__(self, autoencoder: Any, device: torch.device, dtype: torch.dtype) -> None:
        config = autoencoder.config
        upcast = dtype == torch.float16 and config.get("force_upcast", False)
        self.device, self.dtype = device, torch.float32 if upcast else dtype
        autoencoder.decoder = torch.nn.Identity()
        self.net: Any = settle(autoencoder, device, self.dtype).requires_grad_(False).eval()
        self.channels = int(config.in_channels)
        self.scale = float(config.get("scaling_factor") or 1.0)
        self.shift: float | torch.Tensor = float(config.get("shift_factor") or 0.0)
        self.spread: float | torch.Tensor = 1.0
        if config.get("latents_mean") is not None and config.get("latents_std") is not None:
            self.shift, self.spread = (
                torch.tensor(config[name], device=device, dtype=torch.float32).reshape(1, -1, 1, 1)
                for name in ("latents_mean", "latents_std")
            )
        answer = self(torch.zeros(1, self.channels, PROBE, PROBE, device=device))
        self.latent_channels, self.factor = answer.shape[1], PROBE // answer.shape[-1]
        self.settings = {
            "class": type(autoencoder).__name__,
            "factor": self.factor,
            "channels": self.latent_channels,
            "scaling_factor": self.scale,
            "shift_factor": config.get("shift_factor"),
            "precision": str(self.dtype).removeprefix("torch."),
        }

    @torch.no_grad()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """The latents of images (N, C, H, W) in [-1, 1], in the images' precision."""
        answer = self.net.encode(images.to(self.dtype), return_dict=True)
        if hasattr(answer, "latent_dist"):
            latents = answer.latent_dist.mode()
        else:
            latents = getattr(answer, "latents", getattr(answer, "latent", None))
        if not isinstance(latents, torch.Tensor):
            raise BackboneError(f"{type(self.net).__name__} is not an autoencoder that gepc knows; use with_encoder")
        return (latents.to(images.dtype) - self.shift) * (self.scale / self.spread)

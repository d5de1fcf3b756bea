"""Networks of diffusers as backbones, and its autoencoders as the encoders of latent diffusion."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.attention_processor import Attention

from gepc.backbones.base import Backbone
from gepc.backbones.calling import CLASSES, Conditions, check_embeddings, null_class
from gepc.backbones.devices import choose_device, choose_dtype
from gepc.backbones.path import GaussianPath, SigmaScheduler, look_up
from gepc.backbones.schedule import FloatArray, Scheduler, log_variances
from gepc.backbones.weights import Patches, settle
from gepc.core.errors import BackboneError, OptionError
from gepc.core.options import coerce_fields

NOT_STORED = ("scheduler", "vae", "embeddings", "device")
CPU_ROWS = 32  # more images in one call no longer fit a processor's cache, and each takes longer
PROBE = 64  # side of an image that shows how an autoencoder changes sizes
LARGE, LARGE_ROWS = 100_000_000, 4  # weights of a network whose activations are large too, and its images per call


@dataclass(frozen=True)
class LoadOptions:
    """What a caller asks `gepc.load_backbone` for, which documents each option."""

    scheduler: Any = None
    vae: Any = None
    config: str | Mapping[str, Any] | None = None
    device: str | torch.device = "auto"
    dtype: str = "float32"
    class_label: int | None = None
    prompt: str | None = None
    embeddings: str | Path | Mapping[str, Any] | None = None
    rescale_timesteps: bool | None = None
    time_scale: float = 1.0
    variant: str | None = None
    act_on: str = "latents"

    def __post_init__(self) -> None:
        coerce_fields(self)

    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value is not default and value != default}

    def check_usable(self, usable: Collection[str], reason: str) -> None:
        """Raise `OptionError` if an option is given that is not among the `usable` ones."""
        for name in self.given():
            if name not in usable:
                raise OptionError(f"{reason}; leave out `{name}`", options=(name,))

    def stored(self) -> dict[str, Any]:
        """The plain values with which a saved detector loads the same backbone again."""
        return {name: value for name, value in self.given().items() if name not in NOT_STORED}


@dataclass(frozen=True)
class Network:
    """A network with everything that its prediction depends on, as every source is read."""

    net: Any  # a network whose class is in `gepc.backbones.calling.CLASSES`
    scheduler: Scheduler | SigmaScheduler  # the noise schedule, and what the network predicts
    sha256: str
    family: str = "diffusers"
    patches: Patches = Patches()  # the changes that were made when the network was built
    autoencoder: Any = None
    embeddings: Mapping[str, Any] = field(default_factory=dict)


class DiffusersBackbone(Backbone):
    """eps from a network of diffusers on the Gaussian path of its scheduler; see `gepc.backbones.path`.

    If the network has 2C output channels, it predicts a variance too, and the first C channels are the prediction. The
    network is moved to the device and precision in place, channels last, and put in eval mode. Inputs are float32
    whatever the precision of the network, and predictions have the dtype of the input.
    """

    def __init__(self, network: Network, options: LoadOptions) -> None:
        net, scheduler, config = network.net, network.scheduler, network.net.config
        cells = CLASSES[type(net).__name__].cells
        channels = int(config.in_channels) // cells**2
        answers = int(config.get("out_channels") or config.in_channels) // cells**2
        if isinstance(scheduler, Scheduler):
            if config.get("time_embedding_type") == "fourier":
                raise BackboneError("this net takes sigma, not a timestep: use Backbone.from_denoiser")
            if options.rescale_timesteps is not None:
                scheduler = replace(scheduler, rescale_timesteps=options.rescale_timesteps)
        elif options.rescale_timesteps is not None:
            raise OptionError("rescale_timesteps does not apply to this network: it is not called with a timestep")
        self.path = GaussianPath.of_scheduler(scheduler) if isinstance(scheduler, Scheduler) else scheduler.path()
        super().__init__(self.path.alphas_cumprod, channels, _fixed_size(net), _multiple(net))
        if answers not in (channels, 2 * channels):
            possible = f"{channels}, or {2 * channels} with a learned variance"
            raise BackboneError(f"conv_out answers {answers} channels; a noise prediction has {possible}")
        check_embeddings(net, network.embeddings)
        self.scheduler, self.patches = scheduler, network.patches
        self.family, self.sha256, self.load_options = network.family, network.sha256, options.stored()
        self.learned_variance = answers == 2 * channels
        self.class_label = _check_label(net, options.class_label)
        for name, values in network.embeddings.items():
            self.conditioning[name] = torch.as_tensor(values).detach().float().cpu().numpy()
        self.device = choose_device(options.device)
        self.precision = choose_dtype(options.dtype, self.device)
        self.net = settle(net, self.device, self.precision).eval()
        self.parameters = sum(parameter.numel() for parameter in net.parameters())
        if self.device.type == "cpu":
            self.rows = CPU_ROWS if self.parameters < LARGE else LARGE_ROWS
        self.time_scale = float(options.time_scale)
        self._times = _time_table(net, self.path.times, self.time_scale).to(self.device)

    def _network(self, given: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """The network's whole answer: C channels, or 2C with a learned variance."""
        labels = None
        if self.class_label is not None:
            labels = torch.full(given.shape[:1], self.class_label, device=given.device)
        y = given.to(self.precision).contiguous(memory_format=torch.channels_last)
        tensors = {name: torch.from_numpy(values).to(y) for name, values in self.conditioning.items()}
        embeddings = {name: values.expand(y.shape[0], *values.shape[1:]) for name, values in tensors.items()}
        size = (y.shape[-2] * self.pixels_per_cell, y.shape[-1] * self.pixels_per_cell)
        call = CLASSES[type(self.net).__name__].call
        answer: torch.Tensor = call(self.net, y, self._times[t], Conditions(labels, embeddings, size))[0]
        return answer.to(dtype=given.dtype, memory_format=torch.contiguous_format)

    def _eps_and_rest(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """eps, and the channels of the answer that follow the prediction."""
        table_at = partial(look_up, x=x, t=t)
        y, given = self.path.network_input(x, table_at)
        answer = self._network(given, t)
        return self.path.eps(answer[:, : self.channels], y, table_at), answer[:, self.channels :]

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self._eps_and_rest(x, t)[0]

    def _predict_with_variance(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Learned range: log var = u log beta_t + (1 - u) log btilde_t, u = (v + 1)/2, v the net's last C channels."""
        eps, values = self._eps_and_rest(x, t)
        kind = self.scheduler.variance_type
        if self.learned_variance and kind == "learned":
            return eps, values
        large, small = (self.per_image(table, x, t) for table in log_variances(self.alphas_cumprod))
        if self.learned_variance:
            share = (values + 1.0) / 2.0
            return eps, share * large + (1.0 - share) * small
        return eps, (large if kind in ("fixed_large", "fixed_large_log") else small).expand_as(x)

    def settings(self) -> dict[str, Any]:
        """The choices that change a prediction in addition to weights and schedule."""
        kind = type(self.net).__name__
        return {
            **({} if kind == "UNet2DModel" else {"network": kind}),
            **self.scheduler.settings(),
            "class_label": self.class_label,
            "time_scale": self.time_scale,
            "precision": str(self.precision).removeprefix("torch."),
            "patches": self.patches.to_dict(),
        }

    def describe(self) -> dict[str, Any]:
        """Plain values that say what the backbone is."""
        return {
            **super().describe(),
            **self.scheduler.facts(),
            "learned_variance": self.learned_variance,
            "classes": null_class(self.net) or self.net.config.get("num_class_embeds"),
        }


def _fixed_size(net: Any) -> tuple[int, int] | None:
    """The size that a network with attention was made for; None for a fully convolutional network, which takes any."""
    size = net.config.get("sample_size")
    is_unet = hasattr(net, "down_blocks")
    if size is None or (is_unet and not any(isinstance(module, Attention) for module in net.modules())):
        return None
    rows, columns = (size, size) if isinstance(size, int) else size
    return int(rows), int(columns)


def _multiple(net: Any) -> int:
    """The number that height and width must be multiples of: by downsampling, or by patches."""
    if hasattr(net, "down_blocks"):
        return int(2 ** sum(getattr(block, "downsamplers", None) is not None for block in net.down_blocks))
    return int(net.config.get("patch_size") or 1) * CLASSES[type(net).__name__].cells


def _check_label(net: Any, label: int | None) -> int | None:
    null = null_class(net)
    if null is None and getattr(net, "class_embedding", None) is None:
        if label is not None:
            raise OptionError("class_label was given, but this net is not class-conditional")
        return None
    classes = null or net.config.num_class_embeds
    if not classes:
        raise BackboneError("this net is conditioned on an embedding, not on a class: use Backbone.from_callable")
    chosen = null if label is None else label
    if chosen is None:
        message = f"this net is class-conditional ({classes} classes): choose a class with `class_label`"
        raise OptionError(message, options=("class_label",))
    if not 0 <= chosen < classes + (null is not None):
        raise OptionError(f"class_label {label} does not exist: this net knows 0 to {classes - 1}")
    return int(chosen)


def _time_table(net: Any, path_times: FloatArray | None, scale: float) -> torch.Tensor:
    """The time that the network is called with at each index: whole numbers if its embedding is a table."""
    assert path_times is not None
    if not 0.0 < scale < np.inf:
        raise OptionError(f"time_scale must be positive, got {scale:g}")
    times = path_times * scale
    if net.config.get("time_embedding_type") != "learned":
        return torch.from_numpy(times).to(torch.float32)
    if (times != np.round(times)).any() or scale != 1.0:
        raise OptionError("this net has learned time embeddings; leave out rescale_timesteps and time_scale")
    return torch.from_numpy(times).to(torch.int64)


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

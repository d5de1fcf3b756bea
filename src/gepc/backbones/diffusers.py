"""Diffusers' `UNet2DModel` as a backbone, and where it runs in which precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Scheduler, log_variances
from gepc.backbones.weights import Patches
from gepc.core.errors import BackboneError, OptionError, check_choice

if TYPE_CHECKING:
    from diffusers import UNet2DModel

CPU_ROWS = 32  # more images in one call no longer fit a processor's cache, and each takes longer
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


class DiffusersBackbone(Backbone):
    """eps from a `UNet2DModel` that predicts noise, v or x_0.

    v: eps = sqrt(abar) v + sigma x_t. x_0: eps = (x_t - sqrt(abar) x_0)/sigma. Neither divides by abar, so a schedule
    that ends at abar = 0 is safe. Of a net with learned variance (2C output channels) the first C are the prediction.

    The network is moved to `device` and `dtype` in place, channels last, and put in eval mode. Inputs are float32
    whatever the network's own precision, and predictions have the dtype of the input.

    Parameters
    ----------
    net : the network.
    scheduler : its noise schedule and what it predicts.
    class_label : the class a class-conditional network is asked for.
    device : "auto" is CUDA if available, otherwise MPS, otherwise the CPU.
    dtype : the precision of the network.
    patches : the changes that were made to the network when it was built.
    """

    family = "diffusers"

    def __init__(
        self,
        net: UNet2DModel,
        scheduler: Scheduler,
        *,
        class_label: int | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "float32",
        patches: Patches | None = None,
    ) -> None:
        config = net.config
        channels = int(config.in_channels)
        downsamplings = sum(getattr(block, "downsamplers", None) is not None for block in net.down_blocks)
        super().__init__(scheduler.alphas_cumprod(), channels, _fixed_size(net), 2**downsamplings)
        if config.out_channels not in (channels, 2 * channels):
            raise BackboneError(
                f"conv_out answers {config.out_channels} channels to {channels}; a noise prediction has {channels}, "
                f"or {2 * channels} with a learned variance"
            )
        if config.time_embedding_type == "fourier":
            raise BackboneError("this net takes sigma, not a timestep (Fourier embedding): use Backbone.from_denoiser")
        self.scheduler = scheduler
        self.learned_variance = config.out_channels == 2 * channels
        self.class_label = _check_label(net, class_label)
        self.patches = patches or Patches()
        self.device = choose_device(device)
        self.precision = choose_dtype(dtype, self.device)
        self.net = _settle(net, self.device, self.precision).eval()
        self.rows = CPU_ROWS if self.device.type == "cpu" else None
        self.parameters = sum(parameter.numel() for parameter in net.parameters())
        self._times = _time_table(net, scheduler).to(self.device)

    def _network(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """The network's whole answer: C channels, or 2C with a learned variance."""
        labels = None
        if self.class_label is not None:
            labels = torch.full((len(x),), self.class_label, device=x.device)
        y = x.to(self.precision).contiguous(memory_format=torch.channels_last)
        answer: torch.Tensor = self.net(y, self._times[t], class_labels=labels, return_dict=False)[0]
        return answer.to(dtype=x.dtype, memory_format=torch.contiguous_format)

    def _to_eps(self, answer: torch.Tensor, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        answer = answer[:, : self.channels]
        if self.scheduler.prediction_type == "epsilon":
            return answer
        if self.scheduler.prediction_type == "v_prediction":
            return self.sqrt_abar(x, t) * answer + self.sigma(x, t) * x
        return (x - self.sqrt_abar(x, t) * answer) / self.sigma(x, t)

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self._to_eps(self._network(x, t), x, t)

    def jvp(self, x: torch.Tensor, t: int | torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """eps(x, t) and its Jacobian times `v`, see `Backbone.jvp`."""
        # the forward-mode derivative of group norm takes contiguous input only
        norms = [module for module in self.net.modules() if isinstance(module, torch.nn.GroupNorm)]
        hooks = [norm.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),)) for norm in norms]
        try:
            return super().jvp(x, t, v)
        finally:
            for hook in hooks:
                hook.remove()

    def _predict_with_variance(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Learned range: log var = u log beta_t + (1 - u) log btilde_t, u = (v + 1)/2, v the net's last C channels."""
        answer = self._network(x, t)
        eps, values = self._to_eps(answer, x, t), answer[:, self.channels :]
        kind = self.scheduler.variance_type
        if self.learned_variance and kind == "learned":
            return eps, values
        large, small = (self.per_image(table, x, t) for table in log_variances(self.alphas_cumprod))
        if self.learned_variance:
            share = (values + 1.0) / 2.0
            return eps, share * large + (1.0 - share) * small
        return eps, (large if kind in ("fixed_large", "fixed_large_log") else small).expand_as(x)

    def settings(self) -> dict[str, Any]:
        """The choices that change a prediction beside weights and schedule."""
        return {
            "prediction_type": self.scheduler.prediction_type,
            "rescale_timesteps": self.scheduler.rescale_timesteps,
            "timestep_respacing": self.scheduler.timestep_respacing,
            "class_label": self.class_label,
            "precision": str(self.precision).removeprefix("torch."),
            "patches": self.patches.to_dict(),
        }

    def describe(self) -> dict[str, Any]:
        """Plain values that say what the backbone is."""
        named = self.scheduler.trained_betas is None
        return {
            **super().describe(),
            "schedule": self.scheduler.beta_schedule if named else "trained_betas",
            "zero_terminal_snr": self.scheduler.rescale_betas_zero_snr,
            "learned_variance": self.learned_variance,
            "classes": self.net.config.num_class_embeds,
        }


def choose_device(device: str | torch.device) -> torch.device:
    """`device` if it exists here; "auto" is CUDA, otherwise MPS, otherwise the CPU."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"device {str(device)!r} cannot be used here ({reason}); try device='auto'") from error
    return chosen


def choose_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The precision of that name, after a convolution in it has run on `device`."""
    name = str(dtype).removeprefix("torch.")
    check_choice("dtype", name, DTYPES)
    chosen = DTYPES[name]
    if chosen != torch.float32:
        probe = torch.ones(1, 1, 3, 3, device=device)
        try:
            torch.nn.functional.conv2d(probe.to(chosen), probe.to(chosen))
        except (RuntimeError, TypeError) as error:
            raise OptionError(f"{device} cannot compute in {name}; leave dtype at float32") from error
    return chosen


def _settle(net: UNet2DModel, device: torch.device, dtype: torch.dtype) -> UNet2DModel:
    """Give each weight in turn memory of its own: on the device, channels last, independent of a file mapped so far."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        layout = torch.channels_last if tensor.ndim == 4 else torch.contiguous_format
        precision = dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=device, dtype=precision, copy=True, memory_format=layout)

    return net._apply(move)


def _fixed_size(net: UNet2DModel) -> tuple[int, int] | None:
    """The size a net with attention was made for; a fully convolutional one takes any."""
    from diffusers.models.attention_processor import Attention

    size = net.config.sample_size
    if size is None or not any(isinstance(module, Attention) for module in net.modules()):
        return None
    rows, columns = (size, size) if isinstance(size, int) else size
    return int(rows), int(columns)


def _check_label(net: UNet2DModel, label: int | None) -> int | None:
    if net.class_embedding is None:
        if label is not None:
            raise OptionError("class_label was given, but this net is not class-conditional")
        return None
    classes = net.config.num_class_embeds
    if net.config.class_embed_type == "identity":
        raise BackboneError("this net is conditioned on an embedding, not on a class: use Backbone.from_callable")
    if label is None:
        count = f" ({classes} classes)" if classes else ""
        raise OptionError(f"this net is class-conditional{count}: choose a class with `class_label`")
    if label < 0 or (classes and label >= classes):
        raise OptionError(f"class_label {label} does not exist: this net knows 0 to {classes - 1}")
    return int(label)


def _time_table(net: UNet2DModel, scheduler: Scheduler) -> torch.Tensor:
    """What the network is called with at each index; whole numbers where it looks its embedding up in a table."""
    times = scheduler.network_times()
    if net.config.time_embedding_type != "learned":
        return torch.from_numpy(times).to(torch.float32)
    if (times != np.round(times)).any():
        raise OptionError("this net has one learned embedding per timestep: rescale_timesteps does not apply to it")
    return torch.from_numpy(times).to(torch.int64)

"""Diffusers' `UNet2DModel` as a backbone: from a model folder, a pipeline folder, or an object in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gepc.backbones.base import Backbone
from gepc.backbones.devices import choose_device, choose_dtype
from gepc.backbones.patches import MARK, Patches
from gepc.backbones.schedule import FloatArray
from gepc.backbones.scheduler import Scheduler
from gepc.backbones.weights import check_shapes, place, read_all, weight_files
from gepc.core.errors import BackboneError, InputError, OptionError
from gepc.core.files import read_json, sha256
from gepc.core.options import build

if TYPE_CHECKING:
    from diffusers import UNet2DModel

EXTRAS = "gepc.json"
CPU_ROWS = 32  # more images in one call no longer fit a processor's cache, and each takes longer


class DiffusersBackbone(Backbone):
    """eps from a `UNet2DModel` that predicts noise, v or x_0.

    v: eps = sqrt(abar) v + sigma x_t. x_0: eps = (x_t - sqrt(abar) x_0)/sigma. Neither divides by abar, so a schedule
    that ends at abar = 0 is safe. Of a net with learned variance (2C output channels) the first C are the prediction.

    The network is moved to `device` and `dtype` in place, channels last, and stays in eval mode; answers come back in
    the input's dtype. Inputs are float32 whatever the network's own precision.
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
        if self.scheduler.prediction_type == "epsilon":
            return answer
        if self.scheduler.prediction_type == "v_prediction":
            return self.sqrt_abar(x, t) * answer + self.sigma(x, t) * x
        return (x - self.sqrt_abar(x, t) * answer) / self.sigma(x, t)

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self._to_eps(self._network(x, t)[:, : self.channels], x, t)

    def jvp(self, x: torch.Tensor, t: int | torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """eps(x, t) and its Jacobian times `v`, by forward-mode differentiation. Costs N F and N J."""
        # the forward-mode derivative of group norm takes contiguous input only
        norms = [module for module in self.net.modules() if isinstance(module, torch.nn.GroupNorm)]
        hooks = [norm.register_forward_pre_hook(_make_contiguous) for norm in norms]
        try:
            return super().jvp(x, t, v)
        finally:
            for hook in hooks:
                hook.remove()

    def eps_and_log_variance(self, x: torch.Tensor, t: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """eps(x, t) and the log of the reverse step's variance, both shaped like `x`, from the same N forward passes.

        Learned range: log var = u log beta_t + (1 - u) log btilde_t with u = (v + 1)/2 and v the net's last C
        channels; btilde_t = beta_t (1 - abar_{t-1})/(1 - abar_t), which at t = 0 takes its value at t = 1. Without a
        learned variance it is log btilde_t, or log beta_t where the scheduler says `fixed_large`.
        """
        timesteps = self._timesteps(x, t)
        with torch.set_grad_enabled(x.requires_grad):
            answer = self._network(x, timesteps)
            eps = self._to_eps(answer[:, : self.channels], x, timesteps)
        self.forward_count += len(x)
        self._check_answer(eps, x)
        return eps, self._log_variance(answer[:, self.channels :], x, timesteps)

    def _log_variance(self, values: torch.Tensor, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        kind = self.scheduler.variance_type
        if self.learned_variance and kind == "learned":
            return values
        large, small = (self._per_image(table, x, t) for table in log_variances(self.alphas_cumprod))
        if self.learned_variance:
            share = (values + 1.0) / 2.0
            return share * large + (1.0 - share) * small
        return (large if kind in ("fixed_large", "fixed_large_log") else small).expand_as(x)

    def settings(self) -> dict[str, Any]:
        """What changes an answer beside weights and schedule."""
        return {
            "prediction_type": self.scheduler.prediction_type,
            "rescale_timesteps": self.scheduler.rescale_timesteps,
            "timestep_respacing": self.scheduler.timestep_respacing,
            "class_label": self.class_label,
            "precision": str(self.precision).removeprefix("torch."),
            "patches": self.patches.to_dict(),
        }

    def describe(self) -> dict[str, Any]:
        """What `gepc info` prints, as plain values."""
        named = self.scheduler.trained_betas is None
        return {
            **super().describe(),
            "schedule": self.scheduler.beta_schedule if named else "trained_betas",
            "zero_terminal_snr": self.scheduler.rescale_betas_zero_snr,
            "learned_variance": self.learned_variance,
            "classes": self.net.config.num_class_embeds,
            **self.settings(),
            "device": str(self.device),
        }


def _settle(net: UNet2DModel, device: torch.device, dtype: torch.dtype) -> UNet2DModel:
    """Give each weight in turn memory of its own: on the device, channels last, independent of a file mapped so far."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        layout = torch.channels_last if tensor.ndim == 4 else torch.contiguous_format
        precision = dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=device, dtype=precision, copy=True, memory_format=layout)

    return net._apply(move)


def _make_contiguous(_module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (inputs[0].contiguous(),)


def log_variances(alphas_cumprod: FloatArray) -> tuple[FloatArray, FloatArray]:
    """log beta_t and log btilde_t for every t, the second with its value at t = 1 repeated at t = 0."""
    before = np.concatenate([[1.0], alphas_cumprod[:-1]])
    with np.errstate(invalid="ignore"):
        betas = np.where(before > 0.0, 1.0 - alphas_cumprod / before, 1.0)
    small = betas * (1.0 - before) / (1.0 - alphas_cumprod)
    small[0] = small[1] if len(small) > 1 else betas[0]
    return np.log(betas), np.log(small)


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
        raise OptionError(f"this net is class-conditional{count}: name one with class_label= (or --class-label)")
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


def build_net(config: Mapping[str, Any], patches: Patches) -> UNet2DModel:
    """The network of that config, without memory for its weights (meta device)."""
    from diffusers import UNet2DModel

    values = dict(config)
    if str(values.get("attention_head_dim")).startswith(MARK):
        values["attention_head_dim"] = patches.head_channels
    with torch.device("meta"):
        net = UNet2DModel.from_config(values)
        patches.apply(net)
    return net


def load_folder(
    folder: Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    class_label: int | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
) -> DiffusersBackbone:
    """A model folder (`config.json`, weights, `scheduler_config.json`) or a pipeline folder (`unet/`, `scheduler/`).

    `overrides` are fields of `Scheduler`: they replace what the folder says, or stand in for a scheduler it lacks.
    """
    model, config = _find_model(folder)
    extras = read_json(folder / EXTRAS) if (folder / EXTRAS).is_file() else {}
    patches = build(Patches, extras.get("patches", {}), str(folder / EXTRAS))
    scheduler = _find_scheduler(folder, extras.get("scheduler", {}), overrides or {})
    net = build_net(config, patches)
    files = weight_files(model)
    tensors = read_all(files, _current_name)
    check_shapes(" and ".join(map(str, files)), tensors, {n: tuple(p.shape) for n, p in net.state_dict().items()})
    place(net, tensors)
    backbone = DiffusersBackbone(net, scheduler, class_label=class_label, device=device, dtype=dtype, patches=patches)
    backbone.family = extras.get("family", backbone.family)
    backbone.source, backbone.sha256 = str(folder), sha256(*files)
    return backbone


def _find_model(folder: Path) -> tuple[Path, dict[str, Any]]:
    for model in (folder / "unet", folder):
        if (model / "config.json").is_file():
            config = read_json(model / "config.json")
            break
    else:
        raise InputError(f"{folder} has no config.json (nor unet/config.json): it is not a diffusers model or pipeline")
    kind = config.get("_class_name", "UNet2DModel") if isinstance(config, dict) else "something else"
    if kind != "UNet2DModel":
        raise BackboneError(
            f"{model / 'config.json'} describes a {kind}; gepc loads a UNet2DModel. Others: Backbone.from_callable"
        )
    return model, config


def _find_scheduler(folder: Path, extras: Mapping[str, Any], overrides: Mapping[str, Any]) -> Scheduler:
    given = build(Scheduler, overrides, "config")
    beside = [folder.parent / "scheduler"] if folder.name == "unet" else []
    for home in (folder / "scheduler", folder, *beside):
        path = home / "scheduler_config.json"
        if path.is_file():
            return Scheduler.from_config({**read_json(path), **extras, **overrides}, str(path))
    if {"beta_schedule", "trained_betas"} & set(overrides):
        return given
    raise InputError(
        f"{folder} has no scheduler_config.json, so its noise schedule is unknown; add that file, or give for instance "
        "config={'beta_schedule': 'linear', 'num_train_timesteps': 1000}"
    )


_OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def _current_name(name: str) -> str:
    """The attention tensors of folders written before diffusers 0.15, under today's names."""
    return re.sub(
        r"(attentions\.\d+\.)(query|key|value|proj_attn)\.", lambda found: f"{found[1]}{_OLD_NAMES[found[2]]}.", name
    )

"""Diffusers' networks as backbones, and where they run in which precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers.models.attention_processor import Attention

from gepc.backbones.base import Backbone
from gepc.backbones.latent import AutoencoderEncoder
from gepc.backbones.networks import CLASSES, DTYPES, Conditions, check_embeddings, null_class
from gepc.backbones.path import GaussianPath, SigmaScheduler, look_up
from gepc.backbones.schedule import FloatArray, Scheduler, log_variances
from gepc.backbones.weights import Patches, settle
from gepc.core.errors import BackboneError, OptionError, check_choice, first_line

CPU_ROWS = 32  # more images in one call no longer fit a processor's cache, and each takes longer
LARGE, LARGE_ROWS = 100_000_000, 4  # weights of a network whose activations are large too, and its images per call
MIXED = ("mixed_bfloat16", "mixed_float16")
COMPILED_GAP = 0.01


class DiffusersBackbone(Backbone):
    """eps from a network of diffusers on the Gaussian path of its scheduler; see `gepc.backbones.path`.

    Of a net with learned variance (2C output channels) the first C are the prediction. The network is moved to `device`
    and `dtype` in place, channels last, and put in eval mode. Inputs are float32 whatever the network's own precision,
    and predictions have the dtype of the input. Its class is one of `gepc.backbones.networks.CLASSES`, `patches` are
    the changes that were made when it was built, and the other parameters are those of `gepc.load_backbone`.
    """

    family = "diffusers"

    def __init__(
        self,
        net: Any,
        scheduler: Scheduler | SigmaScheduler,
        *,
        class_label: int | None = None,
        embeddings: Mapping[str, Any] | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "float32",
        patches: Patches | None = None,
    ) -> None:
        config, cells = net.config, CLASSES[type(net).__name__].cells
        channels = int(config.in_channels) // cells**2
        answers = int(config.get("out_channels") or config.in_channels) // cells**2
        self.path = GaussianPath.of_scheduler(scheduler) if isinstance(scheduler, Scheduler) else scheduler.path()
        super().__init__(self.path.alphas_cumprod, channels, _fixed_size(net), _multiple(net))
        if answers not in (channels, 2 * channels):
            raise BackboneError(
                f"conv_out answers {answers} channels to {channels}; a noise prediction has {channels}, "
                f"or {2 * channels} with a learned variance"
            )
        if config.get("time_embedding_type") == "fourier" and isinstance(scheduler, Scheduler):
            raise BackboneError("this net takes sigma, not a timestep (Fourier embedding): use Backbone.from_denoiser")
        check_embeddings(net, embeddings or {})
        self.scheduler = scheduler
        self.learned_variance = answers == 2 * channels
        self.class_label = _check_label(net, class_label)
        for name, values in (embeddings or {}).items():
            self.conditioning[name] = torch.as_tensor(values).detach().float().cpu().numpy()
        self.patches = patches or Patches()
        self.device = choose_device(device)
        self.precision, self.autocast = choose_dtype(dtype, self.device)
        self.net = settle(net, self.device, self.precision).eval()
        self.parameters = sum(parameter.numel() for parameter in net.parameters())
        if self.device.type == "cpu":
            self.rows = CPU_ROWS if self.parameters < LARGE else LARGE_ROWS
        self.offload = False
        self._compiled: Any = None
        self._times = _time_table(net, self.path.times).to(self.device)

    def with_autoencoder(self, autoencoder: Any, act_on: str = "latents", offload: bool = False) -> DiffusersBackbone:
        """The backbone behind the encoder of a diffusers autoencoder, which is changed in place.

        With `offload`, the network or the encoder stays in main memory while the other one runs on the device.
        """
        encoder = AutoencoderEncoder(autoencoder, self.device, self.precision)
        if encoder.latent_channels != self.channels:
            raise BackboneError(
                f"the {type(autoencoder).__name__} has {encoder.latent_channels} latent channels and the network takes "
                f"{self.channels}; they do not belong together"
            )
        latent = self.with_encoder(encoder, encoder.factor, encoder.channels, act_on)
        assert isinstance(latent, DiffusersBackbone)
        latent.offload = offload and self.device.type != "cpu"
        if latent.offload:
            encoder.net.to("cpu")
        return latent

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """The latents of images, see `Backbone.encode`."""
        if not self.offload:
            return super().encode(images)
        encoder: Any = self.encoder
        self.net.to("cpu")
        encoder.net.to(self.device)
        try:
            return super().encode(images)
        finally:
            encoder.net.to("cpu")
            self.net.to(self.device)

    def _network(self, given: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """The network's whole answer: C channels, or 2C with a learned variance."""
        labels = None
        if self.class_label is not None:
            labels = torch.full(given.shape[:1], self.class_label, device=given.device)
        y = given.to(self.precision).contiguous(memory_format=torch.channels_last)
        tensors = {name: torch.from_numpy(values).to(y) for name, values in self.conditioning.items()}
        embeddings = {name: values.expand(y.shape[0], *values.shape[1:]) for name, values in tensors.items()}
        size = (y.shape[-2] * self.factor, y.shape[-1] * self.factor)
        call = CLASSES[type(self.net).__name__].call
        with nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast):
            net = self.net if self._compiled is None else self._compiled
            answer: torch.Tensor = call(net, y, self._times[t], Conditions(labels, embeddings, size))[0]
        return answer.to(dtype=given.dtype, memory_format=torch.contiguous_format)

    def compile(self, **options: Any) -> DiffusersBackbone:
        """Compile the network with `torch.compile`, for all passes but those that record layers or differentiate.

        A compiler can be wrong without an error, so the compiled network is compared with the network as it is, at
        three noise levels; a relative difference of more than 1 % is a `BackboneError`. Scores change by as much as
        the floating-point rounding of the compiled kernels. `options` are those of `torch.compile`.
        """
        height, width = self.image_size or (8 * self.size_multiple,) * 2
        shape = (2, *self.network_shape((height, width)))
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.device, self.dtype)
        steps = [0, self.n_steps // 2, self.n_steps - 1]
        before, compiled = self.counts, torch.compile(self.net, **options)
        with self._as_it_is():
            expected = [self.eps(x, t) for t in steps]
        self._compiled = compiled
        try:
            for t, answer in zip(steps, expected, strict=True):
                gap = float((self.eps(x, t) - answer).norm() / answer.norm())
                if not gap < COMPILED_GAP:
                    raise BackboneError(f"the compiled network differs from the network as it is by {gap:.1%}")
        except Exception as error:
            self._compiled = None
            raise BackboneError(f"torch.compile cannot be used for this network: {error}") from error
        finally:
            self.counts = before
        return self

    @contextmanager
    def _as_it_is(self) -> Iterator[None]:
        """The network without compilation: hooks that are added later are not seen by compiled code."""
        compiled, self._compiled = self._compiled, None
        try:
            yield
        finally:
            self._compiled = compiled

    def eps_and_activations(
        self, x: torch.Tensor, t: int | torch.Tensor, layers: Sequence[str] | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """eps(x, t) and the outputs of inner layers, see `Backbone.eps_and_activations`."""
        with self._as_it_is():
            return super().eps_and_activations(x, t, layers)

    def _eps_and_rest(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """eps, and the channels of the answer that follow the prediction."""
        table_at = partial(look_up, x=x, t=t)
        y, given = self.path.network_input(x, table_at)
        answer = self._network(given, t)
        count = self.network_channels
        return self.path.eps(answer[:, :count], y, table_at), answer[:, count:]

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self._eps_and_rest(x, t)[0]

    def jvp(self, x: torch.Tensor, t: int | torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """eps(x, t) and its Jacobian times `v`, see `Backbone.jvp`."""
        # the forward-mode derivative of group norm takes contiguous input only
        norms = [module for module in self.net.modules() if isinstance(module, torch.nn.GroupNorm)]
        hooks = [norm.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),)) for norm in norms]
        try:
            with self._as_it_is():
                return super().jvp(x, t, v)
        finally:
            for hook in hooks:
                hook.remove()

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
        """The choices that change a prediction beside weights and schedule."""
        kind, mixed = type(self.net).__name__, "" if self.autocast is None else "mixed_"
        return {
            **({} if kind == "UNet2DModel" else {"network": kind}),
            **self.scheduler.settings(),
            "class_label": self.class_label,
            "precision": mixed + str(self.autocast or self.precision).removeprefix("torch."),
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
        reason = first_line(error)
        raise OptionError(f"device {str(device)!r} cannot be used here ({reason}); try device='auto'") from error
    return chosen


def choose_dtype(dtype: str | torch.dtype, device: torch.device) -> tuple[torch.dtype, torch.dtype | None]:
    """The precision of weights and that of autocast, if any, after a convolution in it has run on `device`."""
    name = str(dtype).removeprefix("torch.")
    check_choice("dtype", name, (*DTYPES, *MIXED))
    chosen = DTYPES[name.removeprefix("mixed_")]
    if chosen != torch.float32:
        probe = torch.ones(1, 1, 3, 3, device=device)
        try:
            torch.nn.functional.conv2d(probe.to(chosen), probe.to(chosen))
        except (RuntimeError, TypeError) as error:
            raise OptionError(f"{device} cannot compute in {name}; leave dtype at float32") from error
    return (torch.float32, chosen) if name in MIXED else (chosen, None)


def _fixed_size(net: Any) -> tuple[int, int] | None:
    """The size a net with attention was made for; a fully convolutional one takes any."""
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
    if net.config.get("class_embed_type") == "identity":
        raise BackboneError("this net is conditioned on an embedding, not on a class: use Backbone.from_callable")
    if label is None:
        if null is not None:
            return null
        count = f" ({classes} classes)" if classes else ""
        raise OptionError(
            f"this net is class-conditional{count}: choose a class with `class_label`", options=("class_label",)
        )
    if label < 0 or (classes and label >= classes + (null is not None)):
        raise OptionError(f"class_label {label} does not exist: this net knows 0 to {classes - 1}")
    return int(label)


def _time_table(net: Any, times: FloatArray | None) -> torch.Tensor:
    """What the network is called with at each index; whole numbers where it looks its embedding up in a table."""
    assert times is not None
    if net.config.get("time_embedding_type") != "learned":
        return torch.from_numpy(times).to(torch.float32)
    if (times != np.round(times)).any():
        raise OptionError("this net has one learned embedding per timestep: rescale_timesteps does not apply to it")
    return torch.from_numpy(times).to(torch.int64)

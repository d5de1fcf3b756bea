"""Recipes: the parameters of training runs, from YAML files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.load import list_backbones, load_backbone
from gepc.backbones.schedule import Scheduler, cosine_alphas_cumprod, linear_alphas_cumprod
from gepc.core import options
from gepc.core.errors import InputError, OptionError
from gepc.core.files import write_text
from gepc.lab.training.checkpoint import write_tensors

if TYPE_CHECKING:
    import torch
    from diffusers import DDPMScheduler, UNet2DModel

    from gepc.backbones.diffusers import DiffusersBackbone
    from gepc.lab.energy.network import EnergyNet

SCHEDULES = {"cosine": cosine_alphas_cumprod, "linear": linear_alphas_cumprod}


@dataclass(frozen=True)
class Recipe:
    """Parameters of a training run.

    Parameters
    ----------
    channels : width of the network at each resolution; the resolution halves from one to the next.
    layers_per_block : residual blocks at each resolution.
    norm_groups : groups of the group normalisation.
    scale_shift : the embedding of the timestep scales and shifts normalised features, instead of being added to them.
    attention : self-attention at the lowest resolution.
    image_channels : channels of the network; grey and colour images are converted to each other. None: as the images
        are, which is 1 if all of them are grey, and 3 if some are in colour.
    image_size : resize every image to a square of this side; None requires images of one size.
    crop : take a random square of side `image_size` from an image in every step, instead of resizing the image.
    diffusion_steps : number of timesteps of the schedule.
    schedule : `cosine` or `linear`.
    batch_size : images per step.
    steps : number of training steps.
    learning_rate : learning rate after the warm-up.
    final_learning_rate : learning rate at the end of the cosine decay.
    warmup_steps : steps of the linear warm-up.
    weight_decay : weight decay of AdamW.
    gradient_clip : largest norm of the gradient.
    ema_decay : decay of the averaged weights.
    low_noise_share : fraction of a batch whose noise level is log-uniform in rho over `rho_range`, the levels that
        detection uses; the rest is uniform in t, so that the network can also generate samples.
    rho_range : smallest and largest rho = sqrt(1/abar - 1) of that fraction.
    flips : random flips: `none`, `horizontal`, `vertical` or `both`.
    mixed_precision : `no`, `fp16`, `bf16` or `auto`, which is fp16 on an NVIDIA or AMD GPU and `no` elsewhere: the
        eight bits of bf16 are too few for the lowest noise levels, and most CPUs emulate it.
    checkpoint_every : steps between checkpoints.
    held_out : images to hold out from training, at most a quarter.
    seed : seed of the weights, the batches and the held-out images.
    value_range : values of black and white in float images; None is (-1, 1).
    init : backbone whose weights training starts from: an embedded name or a folder. None starts from random weights.
    objective : `noise`, or an energy network: `igebm`, `improved_cd` or `vaebm`, which
        `gepc.lab.training.energy_losses` describes. The other fields below are for energy networks.
    latent : dimensions of the latent of `vaebm`.
    langevin_steps : Langevin steps of a chain in each training step.
    langevin_step : step size of the gradient of the energy.
    langevin_noise : standard deviation of the noise of a step; None is sqrt(2 langevin_step).
    langevin_clip : largest gradient of the energy by a pixel; None does not clip it.
    replay : samples in the replay buffer.
    restart_share : share of the chains that start again from noise, and of those that `improved_cd` augments.
    energy_penalty : weight of the squared energies.
    kl_weight : weight of the KL term of `improved_cd`.
    kl_steps : the last Langevin steps that the KL term is differentiated through.
    """

    channels: tuple[int, ...] = (16, 32, 64)
    layers_per_block: int = options.at_least(1, 1)
    norm_groups: int = options.at_least(1, 1)
    scale_shift: bool = True
    attention: bool = False
    image_channels: int | None = options.at_least(1, None)
    image_size: int | None = options.at_least(1, None)
    crop: bool = False
    diffusion_steps: int = options.at_least(2, 1000)
    schedule: str = options.one_of("cosine", "linear")
    batch_size: int = options.at_least(1, 32)
    steps: int = options.at_least(1, 5000)
    learning_rate: float = options.positive(2e-3)
    final_learning_rate: float = options.not_negative(1e-6)
    warmup_steps: int = options.not_negative(250)
    weight_decay: float = options.not_negative(0.0)
    gradient_clip: float = options.checked(1.0, lambda value: value > 0, "positive")  # infinity does not clip
    ema_decay: float = options.checked(0.9995, lambda value: 0 <= value < 1, "at least 0 and below 1")
    low_noise_share: float = options.share(0.7)
    rho_range: tuple[float, float] = options.checked(
        (0.0075, 2.0), lambda pair: 0 < pair[0] < pair[1] < math.inf, "two positive numbers, the smaller first"
    )
    flips: str = options.one_of("horizontal", "none", "vertical", "both")
    mixed_precision: str = options.one_of("no", "auto", "fp16", "bf16")
    checkpoint_every: int = options.at_least(1, 250)
    held_out: int = options.not_negative(512)
    seed: int = options.not_negative(0)
    value_range: tuple[float, float] | None = None
    init: str | None = None
    objective: str = options.one_of("noise", "igebm", "improved_cd", "vaebm")
    latent: int | None = options.at_least(1, None)
    langevin_steps: int = options.at_least(1, 20)
    langevin_step: float = options.not_negative(10.0)
    langevin_noise: float | None = options.not_negative(0.01)
    langevin_clip: float | None = options.positive(0.03)
    replay: int = options.at_least(1, 2000)
    restart_share: float = options.share(0.05)
    energy_penalty: float = options.not_negative(0.1)
    kl_weight: float = options.not_negative(0.3)
    kl_steps: int = options.at_least(1, 1)

    def __post_init__(self) -> None:
        options.check_fields(self, "recipe: ")
        widths = f"channels must be a list of widths that are multiples of norm_groups={self.norm_groups}"
        if not self.channels or any(width < 1 or width % self.norm_groups for width in self.channels):
            raise OptionError(f"recipe: {widths}, got {self.channels}")
        if self.image_size is not None and self.image_size % self.stride:
            multiple = f"a multiple of {self.stride}, the stride of the network"
            raise OptionError(f"recipe: image_size must be {multiple}, got {self.image_size}")
        if self.schedule == "linear" and self.diffusion_steps <= 20:
            raise OptionError("recipe: diffusion_steps must be above 20 for the schedule linear, whose beta is below 1")
        if self.crop and self.image_size is None:
            raise OptionError("recipe: crop must be false unless image_size, the crop's side, is set")
        if self.init is not None and self.objective != "noise":
            raise OptionError(f"recipe: init must be left out for the objective {self.objective}")
        if (self.latent is not None) != (self.objective == "vaebm"):
            raise OptionError(f"recipe: latent must be at least 1 for vaebm, and left out otherwise, got {self.latent}")

    @property
    def stride(self) -> int:
        """The sides of an image must be multiples of this, since each resolution but the last is halved."""
        return int(2 ** (len(self.channels) - 1))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON and YAML."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def builtin_recipes() -> dict[str, Path]:
    """The recipes of the package, by name."""
    return options.shipped_files(Path(__file__).parents[1] / "recipes")


def load_recipe(
    config: str | Path | None, overrides: Mapping[str, Any] | None = None, base: Mapping[str, Any] | None = None
) -> Recipe:
    """Read a recipe: a YAML file, or the name of a recipe of the package; None for the default values.

    `overrides` replace its values; fields that neither sets are those of `base`, such as the recipe of a run that is
    resumed. With `init`, the architecture and the schedule are those of that network.
    """
    values = {} if config is None else options.read_named(config, builtin_recipes(), "recipe")
    values |= overrides or {}
    if base is None:
        fresh = ENERGIES.get(str(values.get("objective")), {})
        base = fresh if values.get("init") is None else {**FINE_TUNING, **init_fields(load_init(str(values["init"])))}
    return options.build(Recipe, {**base, **values}, "recipe")


def build_net(recipe: Recipe, height: int, width: int) -> UNet2DModel | EnergyNet:
    """A UNet2DModel for images of height x width, without attention fully convolutional; or an energy network."""
    assert recipe.image_channels is not None
    if recipe.objective != "noise":
        import torch

        from gepc.lab.energy.network import EnergyNet

        energy_net = EnergyNet(recipe.image_channels, (height, width), recipe.channels, recipe.latent)
        if recipe.objective != "vaebm":  # checkpoints keep the replay buffer, and the saved network does not
            replay = torch.rand((recipe.replay, recipe.image_channels, height, width)) * 2.0 - 1.0
            energy_net.register_buffer("replay", replay, persistent=False)
        return energy_net
    from diffusers import UNet2DModel

    deep = len(recipe.channels) - 1
    down = ["AttnDownBlock2D" if recipe.attention and level == deep else "DownBlock2D" for level in range(deep + 1)]
    up = [name.replace("Down", "Up") for name in reversed(down)]
    return UNet2DModel(
        sample_size=width if height == width else (height, width),
        in_channels=recipe.image_channels,
        out_channels=recipe.image_channels,
        block_out_channels=recipe.channels,
        layers_per_block=recipe.layers_per_block,
        down_block_types=tuple(down),
        up_block_types=tuple(up),
        norm_num_groups=recipe.norm_groups,
        resnet_time_scale_shift="scale_shift" if recipe.scale_shift else "default",
        add_attention=recipe.attention,
        attention_head_dim=min(32, recipe.channels[-1]),
    )


def build_scheduler(recipe: Recipe) -> DDPMScheduler:
    """The scheduler with the schedule of `alphas_cumprod`.

    The number of steps is given by name, because diffusers takes a positional argument for a default and leaves it out
    when another scheduler is made from the configuration.
    """
    from diffusers import DDPMScheduler

    steps = recipe.diffusion_steps
    if recipe.schedule == "cosine":
        return DDPMScheduler(num_train_timesteps=steps, beta_schedule="squaredcos_cap_v2")
    scale = 1000.0 / steps
    betas = {"beta_start": scale * 1e-4, "beta_end": scale * 0.02}
    return DDPMScheduler(num_train_timesteps=steps, beta_schedule="linear", **betas)


def alphas_cumprod(recipe: Recipe) -> npt.NDArray[np.float64]:
    """abar_t of the recipe's schedule in float64."""
    return SCHEDULES[recipe.schedule](recipe.diffusion_steps)


def save_folder(net: UNet2DModel | EnergyNet, averages: Iterable[torch.Tensor], recipe: Recipe, out: Path) -> None:
    """Write a diffusers folder, or one of an energy network in the same layout, with the weights `averages` in
    place of the network's own.

    Files are replaced as a whole and the configuration does not change during a run, so the folder can be loaded at any
    time, even after a failed write.
    """
    weights = dict(net.state_dict())
    weights.update((name, average) for (name, _), average in zip(net.named_parameters(), averages, strict=True))
    write_text(out / "config.json", net.to_json_string())
    if recipe.objective == "noise":
        write_text(out / "scheduler_config.json", build_scheduler(recipe).to_json_string())
    write_tensors(out / "diffusion_pytorch_model.safetensors", weights, {"format": "pt"})


_LATENT = {"latent": 64, "langevin_step": 0.05, "langevin_noise": None, "langevin_clip": None}
_SMALL = {"channels": (16, 32, 48, 64), "batch_size": 16, "warmup_steps": 50}  # a step costs `langevin_steps` passes
ENERGIES: dict[str, dict[str, Any]] = {
    "igebm": {"learning_rate": 2e-4, **_SMALL},
    "improved_cd": {"learning_rate": 2e-4, **_SMALL},
    "vaebm": {"learning_rate": 5e-4, **_SMALL, **_LATENT},
}
"""The objectives of energy networks, and the fields of a recipe whose defaults are different with them."""

FINE_TUNING = {"learning_rate": 2e-4, "warmup_steps": 50}
"""Fields of a recipe whose defaults are different in fine-tuning."""


def load_init(init: str) -> DiffusersBackbone:
    """Load the network to start from; `InputError` if its answer is not one that the training loss is defined for."""
    from gepc.backbones.diffusers import DiffusersBackbone

    backbone = load_backbone(init, device="cpu")
    if not isinstance(backbone, DiffusersBackbone) or type(backbone.net).__name__ != "UNet2DModel":
        raise cannot_start_from(init, "it is not a pixel-space UNet2DModel")
    scheduler = backbone.scheduler
    if not isinstance(scheduler, Scheduler) or scheduler.prediction_type != "epsilon" or backbone.learned_variance:
        raise cannot_start_from(init, "it does not predict noise alone")
    if scheduler.rescale_timesteps:
        raise cannot_start_from(init, "it is called with rescaled timesteps")
    return backbone


def init_fields(backbone: DiffusersBackbone) -> dict[str, Any]:
    """The fields of a recipe that the network to start from determines: its architecture and its noise schedule."""
    config, steps = backbone.net.config, backbone.n_steps
    schedules = [name for name, make in SCHEDULES.items() if np.allclose(make(steps), backbone.alphas_cumprod)]
    if not schedules:
        raise cannot_start_from(backbone.source, "its noise schedule is neither `cosine` nor `linear`")
    fields: dict[str, Any] = {
        "channels": tuple(config.block_out_channels),
        "layers_per_block": config.layers_per_block,
        "norm_groups": config.norm_num_groups,
        "scale_shift": config.resnet_time_scale_shift == "scale_shift",
        "attention": config.add_attention,
        "image_channels": config.in_channels,
        "diffusion_steps": steps,
        "schedule": schedules[0],
    }
    if backbone.image_size is not None and len(set(backbone.image_size)) == 1:  # with attention
        fields["image_size"] = backbone.image_size[0]
    return fields


def cannot_start_from(init: object, reason: str) -> InputError:
    """The error for a network that cannot be fine-tuned."""
    return InputError(
        f"{init} cannot be fine-tuned: {reason}. Give the folder of a network that was trained with gepc, "
        f"or an embedded backbone ({', '.join(list_backbones())})"
    )

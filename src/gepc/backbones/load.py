"""Load a backbone: an embedded name, a folder, a checkpoint, a hub id, or a diffusers object in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gepc.core.errors import BackboneError, InputError, OptionError, nearest
from gepc.core.files import read_json, sha256
from gepc.core.options import build, read_yaml
from gepc.core.plugins import plugins

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from diffusers import DiffusionPipeline, SchedulerMixin, UNet2DModel

    from gepc.backbones.base import Backbone
    from gepc.backbones.schedule import Scheduler
    from gepc.backbones.weights import Patches

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
SCHEDULER = "scheduler_config.json"
TRAINED_ON = "trained_on.safetensors"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_OTHER_COMPONENTS = ("vae", "vqvae", "movq", "text_encoder", "image_encoder", "transformer", "prior")


def list_backbones() -> list[str]:
    """The names of the backbones that ship with this package, and with others by the entry point `gepc.backbones`."""
    return sorted({path.parent.name for path in WEIGHTS.glob("*/config.json")} | set(plugins("gepc.backbones")))


def load_backbone(
    source: str | os.PathLike[str] | Backbone | UNet2DModel | DiffusionPipeline,
    *,
    scheduler: SchedulerMixin | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
    class_label: int | None = None,
    rescale_timesteps: bool | None = None,
) -> Backbone:
    """Load a network that predicts noise.

    Parameters
    ----------
    source : an embedded name (`list_backbones`), a diffusers model or pipeline folder, an OpenAI improved- or
        guided-diffusion checkpoint (`.pt` or `.safetensors`), a hub id ("org/name"), a diffusers `UNet2DModel` or
        pixel-space pipeline object (which is copied), or a `Backbone`, which is returned as it is.
    scheduler : the diffusers scheduler of a `UNet2DModel` object.
    config : for a checkpoint, OpenAI's own options as a mapping, a preset's name or a YAML or JSON file
        (`{"preset": name, ...}` changes single options); otherwise, fields of the scheduler to replace, as a mapping
        or a file.
    device : "auto" is CUDA if available, otherwise MPS, otherwise the CPU.
    dtype : the precision of the network: float32, bfloat16, float16 or float64.
    class_label : the class a class-conditional network is asked for.
    rescale_timesteps : call the network with t*1000/T; None leaves it to the checkpoint's config.
    """
    from gepc.backbones.base import Backbone
    from gepc.backbones.diffusers import DiffusersBackbone

    if isinstance(source, Backbone):
        return source
    if isinstance(source, str) and source in plugins("gepc.backbones"):
        made = plugins("gepc.backbones")[source]()
        if isinstance(made, Backbone):
            made.source = source
            return made
    if config is not None and not isinstance(config, Mapping):
        config = read_yaml(config) if Path(config).is_file() else str(config)
    if not isinstance(source, (str, os.PathLike)):
        network = _from_object(source, scheduler, config)
    elif scheduler is not None:
        raise OptionError("scheduler goes with a UNet2DModel object; for a path or a name, give its fields as config")
    else:
        path = _find(source)
        network = _from_folder(path, config) if path.is_dir() else _from_checkpoint(path, config)
    if rescale_timesteps is not None:
        network = replace(network, scheduler=replace(network.scheduler, rescale_timesteps=rescale_timesteps))
    backbone = DiffusersBackbone(
        network.net,
        network.scheduler,
        class_label=class_label,
        device=device,
        dtype=dtype,
        patches=network.patches,
    )
    backbone.family, backbone.sha256 = network.family, network.sha256
    backbone.source = str(source) if isinstance(source, (str, os.PathLike)) else None
    backbone.trained_on = network.trained_on
    options = {
        "config": dict(config) if isinstance(config, Mapping) else config,
        "dtype": None if dtype == "float32" else str(dtype).removeprefix("torch."),
        "class_label": class_label,
        "rescale_timesteps": rescale_timesteps,
    }
    backbone.load_options = {name: value for name, value in options.items() if value is not None}
    return backbone


def load_again(
    source: str | Backbone, options: Mapping[str, Any], expected: str | None, where: str = "the pickle"
) -> Backbone:
    """Load the backbone of a saved detector; a `BackboneError` unless it has the weights `expected` (SHA-256)."""
    backbone = load_backbone(source, **options)
    if None not in (expected, backbone.sha256) and expected != backbone.sha256:
        raise BackboneError(
            f"{where} was fitted with other weights than {backbone.source}: sha256 {str(expected)[:12]}... expected, "
            f"found {str(backbone.sha256)[:12]}...; fit again or pass the right backbone"
        )
    return backbone


@dataclass(frozen=True)
class Network:
    """What every source is read into."""

    net: UNet2DModel
    scheduler: Scheduler
    sha256: str
    family: str = "diffusers"
    patches: Patches | None = None
    trained_on: npt.NDArray[np.uint64] | None = None


def _from_checkpoint(path: Path, config: str | Mapping[str, Any] | None) -> Network:
    from gepc.backbones.openai.convert import convert

    converted = convert(path, config)
    return Network(converted.build(), converted.scheduler, sha256(path), "openai", converted.patches)


def _from_folder(folder: Path, config: str | Mapping[str, Any] | None) -> Network:
    """A model folder (`config.json`, weights, `scheduler_config.json`) or a pipeline folder (`unet/`, `scheduler/`)."""
    from gepc.backbones.weights import EXTRAS, Patches, build_net, check_shapes, place, read_all, weight_files

    pipeline = folder.parent if folder.name == "unet" else folder
    _check_components(str(pipeline), _components_in(pipeline))
    model = folder / "unet" if (folder / "unet" / "config.json").is_file() else folder
    if not (model / "config.json").is_file():
        raise InputError(f"{folder} has no config.json (nor unet/config.json): it is not a diffusers model or pipeline")
    values = read_json(model / "config.json")
    kind = values.get("_class_name", "UNet2DModel") if isinstance(values, dict) else "something else"
    _check_class(f"{model / 'config.json'} describes", kind)
    extras = read_json(folder / EXTRAS) if (folder / EXTRAS).is_file() else {}
    patches = build(Patches, extras.get("patches", {}), str(folder / EXTRAS))
    homes = [folder / "scheduler", folder, *([pipeline / "scheduler"] if folder.name == "unet" else [])]
    path = next((home / SCHEDULER for home in homes if (home / SCHEDULER).is_file()), None)
    found = {**read_json(path), **extras.get("scheduler", {})} if path is not None else None
    scheduler = _read_scheduler(found, f"{folder} has no {SCHEDULER}" if path is None else str(path), config)
    net, files = build_net(values, patches), weight_files(model)
    tensors = read_all(files)
    check_shapes(" and ".join(map(str, files)), tensors, {n: tuple(p.shape) for n, p in net.state_dict().items()})
    place(net, tensors)
    trained_on = read_trained_on(folder)
    return Network(net, scheduler, sha256(*files), extras.get("family", "diffusers"), patches, trained_on)


def read_trained_on(folder: Path) -> npt.NDArray[np.uint64] | None:
    """The hashes of the images that the network in `folder` was trained on; None if the folder does not list them."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = folder / TRAINED_ON
    if not path.is_file():
        return None
    try:
        return load_file(path)["hashes"]
    except (SafetensorError, OSError, KeyError) as error:
        raise InputError(f"{path} is damaged ({error}); restore it, or delete it to load the backbone") from error


def _from_object(source: Any, scheduler: Any, config: str | Mapping[str, Any] | None) -> Network:
    """A copy of a network in memory: the caller may go on training or moving the original."""
    from copy import deepcopy

    from diffusers import DiffusionPipeline, ModelMixin

    from gepc.backbones.weights import digest_of

    net, name = source, type(source).__name__
    if isinstance(source, DiffusionPipeline):
        if scheduler is not None:
            raise OptionError(f"the {name} has a scheduler of its own; give scheduler only with a UNet2DModel")
        components = {part: value for part, value in source.components.items() if value is not None}
        _check_components(f"the {name}", components)
        net, scheduler = components.get("unet"), components.get("scheduler")
    elif not isinstance(source, ModelMixin):
        raise OptionError(
            f"load_backbone takes a name, a path, a Backbone, or a diffusers UNet2DModel or pipeline, got a {name}; "
            "wrap any other network or function with Backbone.from_callable"
        )
    _check_class("this object is", type(net).__name__)
    found = getattr(scheduler, "config", None)
    if scheduler is not None and not isinstance(found, Mapping):
        raise OptionError(f"scheduler must be a diffusers scheduler, got a {type(scheduler).__name__}")
    if found is not None:
        found = {"_class_name": type(scheduler).__name__, **found}
    meaning = _read_scheduler(found, "no scheduler was given" if found is None else "the scheduler", config)
    return Network(deepcopy(net).requires_grad_(False), meaning, digest_of(net))


def _check_class(what: str, kind: str) -> None:
    if kind != "UNet2DModel":
        raise BackboneError(f"{what} a {kind}; gepc loads a UNet2DModel. Others: Backbone.from_callable")


def _components_in(folder: Path) -> set[str]:
    """The components of a pipeline folder, by its index and by the names of its folders."""
    listed = read_json(folder / "model_index.json") if (folder / "model_index.json").is_file() else {}
    found = {name for name in _OTHER_COMPONENTS if (folder / name / "config.json").is_file()}
    return found | {name for name, value in listed.items() if isinstance(value, list) and value[:1] not in ([], [None])}


def _check_components(what: str, names: Iterable[str]) -> None:
    others = sorted(set(names) - {"unet", "scheduler"})
    if others:
        raise BackboneError(
            f"{what} is a pipeline with {', '.join(others)}: its network does not predict noise in pixels. Latent, "
            "text-conditional and transformer pipelines are not supported yet; load_backbone takes pixel-space ones "
            "(unet and scheduler), and Backbone.from_callable takes any function that predicts noise in pixels"
        )


def _read_scheduler(found: Mapping[str, Any] | None, where: str, config: str | Mapping[str, Any] | None) -> Scheduler:
    """The scheduler that was found, with fields replaced by `config`, or made of `config` alone."""
    from gepc.backbones.schedule import Scheduler

    if isinstance(config, str):
        raise InputError(f"{config} does not exist")
    overrides = config or {}
    given = build(Scheduler, overrides, "config")
    if found is not None:
        return Scheduler.from_config({**found, **overrides}, where)
    if {"beta_schedule", "trained_betas"} & set(overrides):
        return given
    raise InputError(
        f"{where}, so the noise schedule is unknown; add it (scheduler= for an object), or give for instance "
        "config={'beta_schedule': 'linear', 'num_train_timesteps': 1000}"
    )


def _find(source: str | os.PathLike[str]) -> Path:
    """The folder or file of a name, a path or a hub id; what cannot be a hub id is an unknown name."""
    name = str(source)
    if isinstance(source, str) and name in list_backbones():
        return Path(plugins("gepc.backbones")[name]()) if name in plugins("gepc.backbones") else WEIGHTS / name
    if Path(source).exists():
        return Path(source)
    looks_like_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None
    if not looks_like_id or name.endswith(SUFFIXES):
        if "/" in name or "\\" in name or name.endswith(SUFFIXES):
            raise InputError(f"{name} does not exist")
        raise OptionError(f"no backbone, file or folder is called {name!r}; {nearest(name, list_backbones())}")
    from huggingface_hub import snapshot_download

    wanted = [f"{home}{pattern}" for home in ("", "unet/", "scheduler/") for pattern in ("*.json", "*.safetensors")]
    try:
        folder = Path(snapshot_download(name, allow_patterns=wanted))
        if not any(folder.rglob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*wanted, "*.bin", "unet/*.bin"]))
    except Exception as error:  # the hub client raises its own, its transport's and OSError
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BackboneError(
            f"there is no folder {name}, and the hub did not give it either ({reason}). Without a connection, download "
            f"it elsewhere (hf download {name} --local-dir FOLDER), copy the folder here and pass its path"
        ) from error
    return folder

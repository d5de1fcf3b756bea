"""The networks in diffusers' model and pipeline folders, and in objects in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers

from gepc.backbones import weights
from gepc.backbones.calling import find_class
from gepc.backbones.devices import DTYPES
from gepc.backbones.load_options import LoadOptions
from gepc.backbones.path import SigmaScheduler, read_scheduler
from gepc.backbones.prompts import TEXT_PARTS, encode_in_folder, encode_prompt, read_embeddings, without_progress_bars
from gepc.backbones.schedule import Scheduler
from gepc.backbones.weights import EXTRAS, Patches, check_shapes, weight_files
from gepc.core.errors import BackboneError, InputError, OptionError, check_names, first_line
from gepc.core.files import read_json, sha256
from gepc.core.options import build

SCHEDULER = "scheduler_config.json"
NETWORKS, AUTOENCODERS = ("unet", "transformer"), ("vae", "vqvae")
MAX_LAYERS, MAX_WIDTH = 200, 1_000_000
_UNUSED = ("scheduler", "safety_checker", "feature_extractor", "image_encoder")


@dataclass(frozen=True)
class Network:
    """A network with everything that its prediction depends on, as every source is read."""

    net: Any
    scheduler: Scheduler | SigmaScheduler
    sha256: str
    family: str = "diffusers"
    patches: Patches | None = None
    autoencoder: Any = None
    embeddings: Mapping[str, Any] = field(default_factory=dict)


def read_folder(folder: Path, options: LoadOptions) -> Network:
    """Read a model folder (`config.json`, weights, `scheduler_config.json`) or a pipeline folder (`unet/`, ...)."""
    pipeline = folder.parent if folder.name in NETWORKS else folder
    _check_components(str(pipeline), components_in(pipeline))
    model = next((folder / name for name in NETWORKS if (folder / name / "config.json").is_file()), folder)
    if not (model / "config.json").is_file():
        raise InputError(
            f"{folder} has no config.json (nor unet/config.json or transformer/config.json): it is not a diffusers "
            "model or pipeline"
        )
    values = read_json(model / "config.json")
    check_config(values, str(model / "config.json"))
    kind = values.get("_class_name", "UNet2DModel") if isinstance(values, dict) else "something else"
    needs = find_class(kind, f"{model / 'config.json'} describes").needs
    extras = read_json(folder / EXTRAS) if (folder / EXTRAS).is_file() else {}
    patches = build(Patches, extras.get("patches", {}), str(folder / EXTRAS))
    scheduler = _scheduler_in(folder, pipeline, extras.get("scheduler", {}), options.config)
    files = weight_files(model, options.variant)
    if kind == "UNet2DModel":
        net: Any = weights.build_net(values, patches)
        tensors = weights.read_all(files)
        check_shapes(" and ".join(map(str, files)), tensors, {n: tuple(p.shape) for n, p in net.state_dict().items()})
        net = weights.assign_weights(net, tensors)
    else:
        net = _pretrained(model, kind, options)
    encoder_folder = _autoencoder_folder(pipeline)
    autoencoder = None
    if encoder_folder is not None:
        encoder_kind = read_json(encoder_folder / "config.json").get("_class_name", "AutoencoderKL")
        autoencoder = _pretrained(encoder_folder, encoder_kind, options)
        files = [*files, *weight_files(encoder_folder, options.variant)]
    if options.prompt is not None and not needs:
        raise OptionError(f"`prompt` was given, but a {kind} is not conditioned on text", options=("prompt",))
    embeddings = read_embeddings(options.embeddings)
    if embeddings is None:
        embeddings = encode_in_folder(pipeline, kind, options) if needs else {}
    family = extras.get("family", "diffusers")
    return Network(net, scheduler, sha256(*files), family, patches, autoencoder, embeddings)


def _scheduler_in(
    folder: Path, pipeline: Path, extras: Mapping[str, Any], config: str | Mapping[str, Any] | None
) -> Scheduler | SigmaScheduler:
    folders = [folder / "scheduler", folder, *([pipeline / "scheduler"] if folder.name in NETWORKS else [])]
    for home in folders:
        if (home / SCHEDULER).is_file():
            return _merged_scheduler({**read_json(home / SCHEDULER), **extras}, str(home / SCHEDULER), config)
    return _merged_scheduler(None, f"{folder} has no {SCHEDULER}", config)


def _autoencoder_folder(pipeline: Path) -> Path | None:
    for name in AUTOENCODERS:
        if (pipeline / name / "config.json").is_file():
            return pipeline / name
    listed = sorted(components_in(pipeline) & set(AUTOENCODERS))
    if listed:
        raise InputError(f"{pipeline} lists an autoencoder, but has no folder for it; download {listed[0]}/ too")
    return None


def check_config(values: Any, where: str) -> None:
    """Refuse sizes that no network has before layers are made: every block and layer takes time to make."""
    for name, value in values.items() if isinstance(values, dict) else ():
        items = value if isinstance(value, list) else [value]
        numbers = [item for item in items if isinstance(item, (int, float)) and not isinstance(item, bool)]
        most = MAX_LAYERS if "layers" in name or "num_blocks" in name else MAX_WIDTH
        if len(items) > MAX_LAYERS or any(not abs(number) <= most for number in numbers):
            raise BackboneError(f"{where}: {name} is {str(value)[:60]}, beyond any network")
        if name == "sample_size" and not isinstance(value, (int, type(None))) and len(numbers) != 2:
            raise BackboneError(f"{where}: sample_size must be a number or two, got {str(value)[:60]}")


def _pretrained(folder: Path, kind: str, options: LoadOptions) -> Any:
    """Load the diffusers model in `folder`. A missing tensor is an error; diffusers would make it random."""
    cls: Any = getattr(diffusers, kind, None)
    if diffusers.ModelMixin not in getattr(cls, "__mro__", ()):
        raise BackboneError(f"{folder / 'config.json'} describes a {kind}, which is no network of this diffusers")
    first = weight_files(folder, options.variant)[0].name
    variant = re.search(r"diffusion_pytorch_model\.(\w+)[.-]", first)
    try:
        with without_progress_bars(diffusers):
            net, info = cls.from_pretrained(
                folder,
                variant=variant[1] if variant and variant[1] not in ("safetensors", "bin") else None,
                use_safetensors=".safetensors" in first,
                torch_dtype=DTYPES.get(options.dtype),
                output_loading_info=True,
                local_files_only=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise BackboneError(f"{folder} cannot be loaded: {first_line(error)}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, info.get(problem) or ()))
        if names:
            raise BackboneError(f"{folder}: the weights do not fit a {kind}: {problem[:-5]} {', '.join(names[:3])}")
    return net.requires_grad_(False)


def read_object(source: Any, options: LoadOptions) -> Network:
    """Copy a network in memory: the caller may go on training or moving the original."""
    net, vae, scheduler, name = source, options.vae, options.scheduler, type(source).__name__
    is_pipeline = isinstance(source, diffusers.DiffusionPipeline)
    if is_pipeline:
        if scheduler is not None or vae is not None:
            raise OptionError(f"the {name} has a scheduler and a vae of its own; give them only with a network")
        components = {part: value for part, value in source.components.items() if value is not None}
        _check_components(f"the {name}", components)
        net = next((components[part] for part in NETWORKS if part in components), None)
        vae = next((components[part] for part in AUTOENCODERS if part in components), None)
        scheduler = components.get("scheduler")
    elif not isinstance(source, diffusers.ModelMixin):
        raise OptionError(
            f"load_backbone takes a name, a path, a Backbone, or a diffusers network or pipeline, got a {name}; "
            "wrap any other network or function with Backbone.from_callable, from_denoiser or from_flow"
        )
    kind = type(net).__name__
    needs = find_class(kind, "this object is").needs
    meaning = _scheduler_of(scheduler, options.config)
    embeddings = read_embeddings(options.embeddings)
    if embeddings is None and needs and is_pipeline:
        embeddings = encode_prompt(source, options.prompt or "", kind)
    elif options.prompt is not None and embeddings is None:
        raise OptionError("`prompt` needs a pipeline with a text encoder", options=("prompt",))
    parts = [net] if vae is None else [net, vae]
    copies = [deepcopy(part).requires_grad_(False) for part in parts]
    return Network(
        net=copies[0],
        scheduler=meaning,
        sha256=weights.digest_as_saved(*parts),
        autoencoder=None if vae is None else copies[1],
        embeddings=embeddings or {},
    )


def _scheduler_of(scheduler: Any, config: str | Mapping[str, Any] | None) -> Scheduler | SigmaScheduler:
    if scheduler is None:
        return _merged_scheduler(None, "no scheduler was given", config)
    values = getattr(scheduler, "config", None)
    if not isinstance(values, Mapping):
        raise OptionError(f"scheduler must be a diffusers scheduler, got a {type(scheduler).__name__}")
    return _merged_scheduler({"_class_name": type(scheduler).__name__, **values}, "the scheduler", config)


def components_in(folder: Path) -> set[str]:
    """The components of a pipeline folder, by its index and by the names of its folders."""
    listed = read_json(folder / "model_index.json") if (folder / "model_index.json").is_file() else {}
    names = (*NETWORKS, *AUTOENCODERS, "movq", "prior", "image_encoder", "text_encoder")
    folders = {name for name in names if (folder / name / "config.json").is_file()}
    indexed = {name for name, value in listed.items() if isinstance(value, list) and value[:1] not in ([], [None])}
    return folders | indexed


def _check_components(what: str, names: Iterable[str]) -> None:
    known = {*NETWORKS, *AUTOENCODERS, *_UNUSED}
    others = sorted(name for name in names if name not in known and not TEXT_PARTS.fullmatch(name))
    if others:
        raise BackboneError(
            f"{what} is a pipeline with {', '.join(others)}, which gepc does not know: load its network as an object "
            "(load_backbone(unet, scheduler=..., vae=...)), or use Backbone.from_callable and with_encoder"
        )


def _merged_scheduler(
    values: Mapping[str, Any] | None, where: str, config: str | Mapping[str, Any] | None
) -> Scheduler | SigmaScheduler:
    """Build the scheduler from `values`, with fields replaced by `config`, or from `config` alone."""
    if isinstance(config, str):
        raise InputError(f"{config} does not exist")
    overrides = config or {}
    if values is not None:
        scheduler = read_scheduler({**values, **overrides}, where)
        check_names("config", overrides, scheduler.__dataclass_fields__)
        return scheduler
    given = build(Scheduler, overrides, "config")
    if {"beta_schedule", "trained_betas"} & set(overrides):
        return given
    raise InputError(
        f"{where}, so the noise schedule is unknown; add it (scheduler= for an object), or give for instance "
        "config={'beta_schedule': 'linear', 'num_train_timesteps': 1000}"
    )

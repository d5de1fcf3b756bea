"""One loader for each source of a backbone: folders, checkpoints, exported networks, objects in memory.

Each refuses the options that it cannot use.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import diffusers

from gepc.backbones import calling, weights
from gepc.backbones.base import Backbone, LatentBackbone
from gepc.backbones.devices import DTYPES, choose_device
from gepc.backbones.diffusers import AutoencoderEncoder, DiffusersBackbone, LoadOptions, Network
from gepc.backbones.onnx import OnnxBackbone
from gepc.backbones.openai.convert import convert
from gepc.backbones.path import SigmaScheduler, read_scheduler
from gepc.backbones.schedule import Scheduler
from gepc.backbones.weights import EXTRAS, Patches, check_shapes, read_trained_on, weight_files
from gepc.core.errors import BackboneError, GepcError, InputError, OptionError, check_names, raising
from gepc.core.files import read_json, sha256
from gepc.core.options import build
from gepc.core.plugins import plugins

SCHEDULER = "scheduler_config.json"
NETWORKS, AUTOENCODERS = ("unet", "transformer"), ("vae", "vqvae")
MAX_LAYERS, MAX_WIDTH = 200, 1_000_000
_UNUSED = ("scheduler", "safety_checker", "feature_extractor", "image_encoder")
# What each source uses. Every other option is refused.
OBJECT_OPTIONS = {"scheduler", "vae", "config", "device", "dtype", "class_label", "prompt", "embeddings"}
OBJECT_OPTIONS |= {"rescale_timesteps", "time_scale", "act_on"}
FOLDER_OPTIONS = OBJECT_OPTIONS - {"scheduler", "vae"} | {"variant"}
CHECKPOINT_OPTIONS = {"config", "device", "dtype", "class_label", "rescale_timesteps", "time_scale"}


def use_as_it_is(backbone: Backbone, options: LoadOptions) -> Backbone:
    """Check that `options` are those that the backbone was made with."""
    stored, same = options.stored(), backbone.load_options
    usable = {name for name, value in stored.items() if name in same and same[name] == value}
    if options.device != "auto":
        device = choose_device(options.device)
        if device.type == backbone.device.type and device.index in (None, backbone.device.index):
            usable.add("device")
    options.check_usable(usable, f"this backbone was made before, on {backbone.device}, and is used as it is")
    return backbone


def load_path(path: Path, options: LoadOptions) -> Backbone:
    """Load a file or a folder with the loader for its format."""
    if path.suffix == ".onnx":
        reason = f"{path}: an exported network has its options in it and runs on the CPU"
        options.check_usable({"device"} if str(options.device) == "cpu" else {}, reason)
        return OnnxBackbone(path)
    if not path.is_dir():
        return _load_checkpoint(path, options)
    file = path / "config.json"
    config: Any = read_json(file) if file.is_file() else None
    kind = config.get("_class_name") if isinstance(config, dict) else None
    if isinstance(kind, str) and kind not in calling.CLASSES and kind in plugins("gepc.networks"):
        return _load_registered(path, config, options)
    return _load_folder(path, options)


def _load_registered(folder: Path, config: dict[str, Any], options: LoadOptions) -> Backbone:
    """Load a folder whose class of networks a package registers by the entry point `gepc.networks`."""
    options.check_usable({"device"}, f"{folder}: a network of the class {config['_class_name']} has its options in it")
    check_config(config, str(folder / "config.json"))
    loader = plugins("gepc.networks")[config["_class_name"]]
    backbone: Backbone = loader(folder, config, choose_device(options.device))
    backbone.trained_on = read_trained_on(folder)
    return backbone


def _load_checkpoint(path: Path, options: LoadOptions) -> Backbone:
    """Load a checkpoint of OpenAI's improved-diffusion or guided-diffusion."""
    options.check_usable(CHECKPOINT_OPTIONS, f"{path} is an OpenAI checkpoint, a network in pixel space without text")
    with _reading(path):
        converted = convert(path, options.config)
        network = Network(converted.build(), converted.scheduler, sha256(path), "openai", converted.patches)
        return _backbone_of(network, options)


def _load_folder(folder: Path, options: LoadOptions) -> Backbone:
    """Load a diffusers model or pipeline folder."""
    options.check_usable(FOLDER_OPTIONS, f"{folder} is a folder of diffusers with a scheduler, see `config`")
    with _reading(folder):
        backbone = _backbone_of(read_folder(folder, options), options)
    backbone.trained_on = read_trained_on(folder)
    return backbone


def load_object(source: Any, options: LoadOptions) -> Backbone:
    """Load a diffusers network or pipeline in memory, by way of the files that `save_pretrained` writes.

    The caller may therefore go on training or moving the original, and the digest is that of a saved folder.
    """
    options.check_usable(OBJECT_OPTIONS, "an object in memory has its weights already")
    name, is_pipeline = type(source).__name__, isinstance(source, diffusers.DiffusionPipeline)
    if is_pipeline and (options.scheduler is not None or options.vae is not None):
        raise OptionError(f"the {name} has a scheduler and a vae of its own; give them only with a network")
    if not is_pipeline and not isinstance(source, diffusers.ModelMixin):
        known = "load_backbone takes a name, a path, a Backbone, or a diffusers network or pipeline"
        advice = "wrap any other network or function with Backbone.from_callable, from_denoiser or from_flow"
        raise OptionError(f"{known}, got a {name}; {advice}")
    parts = {"": source} if is_pipeline else {"unet": source, "vae": options.vae, "scheduler": options.scheduler}
    with TemporaryDirectory(prefix="gepc-") as place:
        for part, value in parts.items():
            with raising(OptionError, f"{part} must be an object of diffusers: {{error}}", AttributeError):
                if value is not None:
                    value.save_pretrained(Path(place, part))
        return _backbone_of(read_folder(Path(place), options), options)


def _reading(path: Path) -> AbstractContextManager[None]:
    """Turn any error into a `BackboneError`: the files of others may be wrong in any way."""
    message = f"{path} does not describe a network: {{kind}}: {{error}}"
    return raising(BackboneError, message, Exception, passing=GepcError)


def _backbone_of(network: Network, options: LoadOptions) -> Backbone:
    """Put a network, and the autoencoder before it if there is one, on the device."""
    backbone = DiffusersBackbone(network, options)
    if network.autoencoder is None:
        if options.act_on != LoadOptions.act_on:
            message = "`act_on` is for latent backbones, and this network sees the pixels themselves"
            raise OptionError(message, options=("act_on",))
        return backbone
    encoder = AutoencoderEncoder(network.autoencoder, backbone.device, backbone.precision)
    if encoder.latent_channels != backbone.channels:
        kind, latents = type(network.autoencoder).__name__, encoder.latent_channels
        raise BackboneError(f"the {kind} has {latents} latent channels and the network takes {backbone.channels}")
    latent = LatentBackbone(backbone, encoder, encoder.factor, encoder.channels, options.act_on)
    latent.sha256, latent.load_options = network.sha256, options.stored()
    return latent


def read_folder(folder: Path, options: LoadOptions) -> Network:
    """Read a model folder (`config.json`, weights, `scheduler_config.json`) or a pipeline folder (`unet/`, ...)."""
    pipeline = folder.parent if folder.name in NETWORKS else folder
    components = components_in(pipeline)
    _check_components(str(pipeline), components)
    model = next((folder / name for name in NETWORKS if (folder / name / "config.json").is_file()), folder)
    if not (model / "config.json").is_file():
        raise InputError(f"{folder} has no config.json (nor has unet/ or transformer/): it is not a diffusers model")
    values = read_json(model / "config.json")
    check_config(values, str(model / "config.json"))
    kind = values.get("_class_name", "UNet2DModel") if isinstance(values, dict) else "something else"
    if kind not in calling.CLASSES:
        known = ", ".join(calling.CLASSES)
        raise BackboneError(f"{model / 'config.json'} describes a {kind}; gepc loads {known}. Others: from_callable")
    needs = calling.CLASSES[kind].needs
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
    encoder_folder = next((pipeline / name for name in AUTOENCODERS if name in components), None)
    autoencoder = None
    if encoder_folder is not None:
        encoder_kind = read_json(encoder_folder / "config.json").get("_class_name", "AutoencoderKL")
        autoencoder = _pretrained(encoder_folder, encoder_kind, options)
        files = [*files, *weight_files(encoder_folder, options.variant)]
    if options.prompt is not None and not needs:
        raise OptionError(f"`prompt` was given, but a {kind} is not conditioned on text", options=("prompt",))
    embeddings = calling.read_embeddings(options.embeddings)
    if embeddings is None:
        embeddings = calling.encode_in_folder(pipeline, kind, options.prompt or "", options.variant) if needs else {}
    family = extras.get("family", "diffusers")
    return Network(net, scheduler, sha256(*files), family, patches, autoencoder, embeddings)


def _scheduler_in(
    folder: Path, pipeline: Path, extras: Mapping[str, Any], config: str | Mapping[str, Any] | None
) -> Scheduler | SigmaScheduler:
    """Read the scheduler of a folder, with fields replaced by `config`, or build it from `config` alone."""
    if isinstance(config, str):
        raise InputError(f"{config} does not exist")
    overrides = config or {}
    for home in (folder / "scheduler", folder, pipeline / "scheduler"):
        if (home / SCHEDULER).is_file():
            values = {**read_json(home / SCHEDULER), **extras, **overrides}
            scheduler = read_scheduler(values, str(home / SCHEDULER))
            check_names("config", overrides, scheduler.__dataclass_fields__)
            return scheduler
    given = build(Scheduler, overrides, "config")
    if {"beta_schedule", "trained_betas"} & set(overrides):
        return given
    unknown = f"{folder} has no {SCHEDULER}, so the noise schedule is unknown; add it (scheduler= for an object)"
    advice = "give for instance config={'beta_schedule': 'linear', 'num_train_timesteps': 1000}"
    raise InputError(f"{unknown}, or {advice}")


def check_config(values: Any, where: str) -> None:
    """Refuse sizes that no network has before layers are made: every block and layer takes time to make."""
    for name, value in values.items() if isinstance(values, dict) else ():
        items = value if isinstance(value, list) else [value]
        numbers = [item for item in items if isinstance(item, (int, float)) and not isinstance(item, bool)]
        most = MAX_LAYERS if "layers" in name or "num_blocks" in name else MAX_WIDTH
        if len(items) > MAX_LAYERS or any(not abs(number) <= most for number in numbers):
            raise BackboneError(f"{where}: {name} is {str(value)[:60]}, beyond any network")


def _pretrained(folder: Path, kind: str, options: LoadOptions) -> Any:
    """Load the diffusers model in `folder`. A missing tensor is an error; diffusers would make it random."""
    cls: Any = getattr(diffusers, kind, None)
    if diffusers.ModelMixin not in getattr(cls, "__mro__", ()):
        raise BackboneError(f"{folder / 'config.json'} describes a {kind}, which the installed diffusers does not have")
    first = weight_files(folder, options.variant)[0].name
    message = f"{folder} cannot be loaded: {{line}}"
    failing = raising(BackboneError, message, OSError, ValueError, RuntimeError, KeyError)
    with failing, calling.without_progress_bars(diffusers):
        net, info = cls.from_pretrained(
            folder,
            variant=options.variant,
            use_safetensors=".safetensors" in first,
            torch_dtype=DTYPES.get(options.dtype),
            output_loading_info=True,
            local_files_only=True,
        )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, info.get(problem) or ()))
        if names:
            raise BackboneError(f"{folder}: the weights do not fit a {kind}: {problem[:-5]} {', '.join(names[:3])}")
    return net.requires_grad_(False)


def components_in(folder: Path) -> set[str]:
    """The components of a pipeline folder, by its index and by the names of its folders."""
    listed = read_json(folder / "model_index.json") if (folder / "model_index.json").is_file() else {}
    names = (*NETWORKS, *AUTOENCODERS, "movq", "prior", "image_encoder", "text_encoder")
    folders = {name for name in names if (folder / name / "config.json").is_file()}
    indexed = {name for name, value in listed.items() if isinstance(value, list) and value[:1] not in ([], [None])}
    return folders | indexed


def _check_components(what: str, names: Iterable[str]) -> None:
    known = {*NETWORKS, *AUTOENCODERS, *_UNUSED}
    others = sorted(name for name in names if name not in known and not calling.TEXT_PARTS.fullmatch(name))
    if others:
        unknown = f"{what} is a pipeline with {', '.join(others)}, which gepc does not know"
        advice = "(load_backbone(unet, scheduler=..., vae=...)), or use Backbone.from_callable and with_encoder"
        raise BackboneError(f"{unknown}: load its network as an object {advice}")

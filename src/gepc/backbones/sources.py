"""One loader for each source of a backbone. Each refuses the options that it cannot use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gepc.backbones.autoencoders import AutoencoderEncoder
from gepc.backbones.base import Backbone, LatentBackbone
from gepc.backbones.calling import CLASSES
from gepc.backbones.devices import choose_device
from gepc.backbones.diffusers import DiffusersBackbone
from gepc.backbones.load_options import LoadOptions
from gepc.backbones.onnx import OnnxBackbone
from gepc.backbones.openai.convert import convert
from gepc.backbones.pipelines import Network, check_config, read_folder, read_object
from gepc.backbones.schedule import Scheduler
from gepc.backbones.weights import read_trained_on
from gepc.core.errors import BackboneError, GepcError, OptionError
from gepc.core.files import read_json, sha256
from gepc.core.plugins import plugins

# What each source uses. Every other option is refused.
OBJECT_OPTIONS = {"scheduler", "vae", "config", "device", "dtype", "class_label", "prompt", "embeddings"}
OBJECT_OPTIONS |= {"rescale_timesteps", "time_scale", "act_on"}
FOLDER_OPTIONS = OBJECT_OPTIONS - {"scheduler", "vae"} | {"variant", "use_safetensors"}
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
        return _load_onnx(path, options)
    if not path.is_dir():
        return _load_checkpoint(path, options)
    file = path / "config.json"
    config: Any = read_json(file) if file.is_file() else None
    kind = config.get("_class_name") if isinstance(config, dict) else None
    if isinstance(kind, str) and kind not in CLASSES and kind in plugins("gepc.networks"):
        return _load_registered(path, config, options)
    return _load_folder(path, options)


def _load_onnx(path: Path, options: LoadOptions) -> Backbone:
    """Load a network that `gepc export` wrote."""
    reason = f"{path}: an exported network has its options in it and runs on the CPU"
    options.check_usable({"device"} if str(options.device) == "cpu" else {}, reason)
    return OnnxBackbone(path)


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
        network = read_folder(folder, options)
    backbone = _backbone_of(network, options)
    backbone.trained_on = read_trained_on(folder)
    return backbone


def load_object(source: Any, options: LoadOptions) -> Backbone:
    """Load a diffusers network or pipeline in memory."""
    options.check_usable(OBJECT_OPTIONS, "an object in memory has its weights already")
    return _backbone_of(read_object(source, options), options)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn any error into a `BackboneError`: the files of others may be wrong in any way."""
    try:
        yield
    except GepcError:
        raise
    except Exception as error:
        raise BackboneError(f"{path} does not describe a network: {type(error).__name__}: {error}") from error


def _backbone_of(network: Network, options: LoadOptions) -> Backbone:
    """Put a network, and the autoencoder before it if there is one, on the device."""
    scheduler = network.scheduler
    if options.rescale_timesteps is not None:
        if not isinstance(scheduler, Scheduler):
            raise OptionError("rescale_timesteps does not apply to this network: it is not called with a timestep")
        scheduler = replace(scheduler, rescale_timesteps=options.rescale_timesteps)
    backbone = DiffusersBackbone(
        network.net,
        scheduler,
        class_label=options.class_label,
        embeddings=network.embeddings,
        device=options.device,
        dtype=options.dtype,
        time_scale=options.time_scale,
        patches=network.patches,
    )
    backbone.family, backbone.sha256, backbone.load_options = network.family, network.sha256, options.stored()
    if network.autoencoder is None:
        if options.act_on != LoadOptions.act_on:
            message = "`act_on` is for latent backbones, and this network sees the pixels themselves"
            raise OptionError(message, options=("act_on",))
        return backbone
    encoder = AutoencoderEncoder(network.autoencoder, backbone.device, backbone.precision)
    if encoder.latent_channels != backbone.channels:
        raise BackboneError(
            f"the {type(network.autoencoder).__name__} has {encoder.latent_channels} latent channels and the network "
            f"takes {backbone.channels}; they do not belong together"
        )
    latent = LatentBackbone(backbone, encoder, encoder.factor, encoder.channels, options.act_on)
    latent.sha256, latent.load_options = network.sha256, options.stored()
    return latent

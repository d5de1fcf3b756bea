"""Load a backbone: an embedded name, a folder, a checkpoint, a hub id, or an object in memory."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gepc.backbones.load_options import LoadOptions
from gepc.core.errors import BackboneError, GepcError, InputError, OptionError, first_line, nearest, raising
from gepc.core.files import read_json, sha256
from gepc.core.options import read_yaml
from gepc.core.plugins import plugins

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin

    from gepc.backbones.base import Backbone
    from gepc.backbones.pipelines import Network

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
TRAINED_ON = "trained_on.safetensors"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".onnx")
# What each source uses. Every other option is refused.
OBJECT_OPTIONS = {"scheduler", "vae", "config", "device", "dtype", "class_label", "prompt", "embeddings"}
OBJECT_OPTIONS |= {"rescale_timesteps", "act_on", "offload", "compile"}
FOLDER_OPTIONS = OBJECT_OPTIONS - {"scheduler", "vae"} | {"variant", "use_safetensors"}
CHECKPOINT_OPTIONS = {"config", "device", "dtype", "class_label", "rescale_timesteps", "compile"}


def list_backbones() -> list[str]:
    """The names of the backbones that ship with this package, and with others by the entry point `gepc.backbones`."""
    return sorted({path.parent.name for path in WEIGHTS.glob("*/config.json")} | set(plugins("gepc.backbones")))


def load_backbone(
    source: str | os.PathLike[str] | Backbone | ModelMixin | DiffusionPipeline,
    *,
    scheduler: SchedulerMixin | None = None,
    vae: ModelMixin | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
    class_label: int | None = None,
    prompt: str | None = None,
    embeddings: str | Path | Mapping[str, Any] | None = None,
    rescale_timesteps: bool | None = None,
    variant: str | None = None,
    use_safetensors: bool = True,
    act_on: str = "latents",
    offload: bool = False,
    compile: bool = False,  # noqa: A002 - what PyTorch calls it
) -> Backbone:
    """Load a network that predicts noise, or an energy network.

    An option that the source cannot use is an `OptionError`.

    Parameters
    ----------
    source : an embedded name (`list_backbones`), a diffusers model or pipeline folder, an OpenAI improved- or
        guided-diffusion checkpoint (`.pt` or `.safetensors`), a network that `gepc export` wrote (`.onnx`), the folder
        of an energy network that `gepc train` wrote, a hub id ("org/name"), a diffusers network or pipeline object
        (which is copied), or a `Backbone`, which is returned as it is. A pipeline with an autoencoder becomes a latent
        backbone.
    scheduler : the diffusers scheduler of a network object.
    vae : the diffusers autoencoder of a latent network object.
    config : for a checkpoint, OpenAI's own options as a mapping, a preset's name or a YAML or JSON file
        (`{"preset": name, ...}` changes single options); otherwise, fields of the scheduler to replace, as a mapping
        or a file.
    device : "auto" is CUDA if available, otherwise MPS, otherwise the CPU.
    dtype : the precision of the network: float32, bfloat16, float16 or float64; or mixed_bfloat16 or mixed_float16:
        weights in float32 and PyTorch's autocast, which keeps sensitive operations in float32.
    class_label : the class a class-conditional network is asked for; None is the null class of a DiT.
    prompt : the text that a text-conditional network is conditioned on; None is the empty text. Its embedding is
        computed once, by the pipeline's text encoders and the package transformers, and stored with a detector.
    embeddings : instead of encoding a prompt, `prompt_embeds` (1, tokens, width) and, where the network needs them,
        `pooled_prompt_embeds` and `prompt_attention_mask`: a mapping or a `.safetensors` file.
    rescale_timesteps : call the network with t*1000/T; None leaves it to the checkpoint's config.
    variant : load the weights of that variant of a folder, for example "fp16".
    use_safetensors : False also downloads `.bin` weights, if a hub repository has no others. They are opened without
        running code, like those of a folder.
    act_on : what a group acts on with a latent backbone, `latents` or `pixels`; see `Backbone.with_encoder`.
    offload : on a GPU, keep the encoder of a latent backbone in main memory while the network runs, and vice versa.
    compile : compile the network, see `DiffusersBackbone.compile`. Worth its minutes for many images on a GPU.

    Returns
    -------
    The backbone, ready to be given to a detector.

    Examples
    --------
    >>> import gepc
    >>> backbone = gepc.load_backbone("photos-tiny", device="cpu")
    >>> backbone.channels, backbone.n_steps
    (3, 4000)
    """
    from gepc.backbones.base import Backbone

    if config is not None and not isinstance(config, Mapping):
        config = read_yaml(config) if Path(config).is_file() else str(config)
    options = LoadOptions(
        scheduler=scheduler,
        vae=vae,
        config=config,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        class_label=class_label,
        prompt=prompt,
        embeddings=embeddings,
        rescale_timesteps=rescale_timesteps,
        variant=variant,
        use_safetensors=use_safetensors,
        act_on=act_on,
        offload=offload,
        compile=compile,
    )
    if isinstance(source, Backbone):
        return _as_it_is(source, options)
    if not isinstance(source, (str, os.PathLike)):
        return _load_object(source, options)
    located = _locate(source, options)
    if isinstance(located, Backbone):
        backbone = _as_it_is(located, options)
        backbone.source = None if backbone.sha256 is None else str(source)  # detectors name only weights they can check
    else:
        backbone = _load_path(located, options)
        backbone.source = str(source)
    backbone.load_again = load_again
    return backbone


def _as_it_is(backbone: Backbone, options: LoadOptions) -> Backbone:
    """Check that `options` are those that the backbone was made with."""
    stored, same = options.stored(), backbone.load_options
    usable = {name for name, value in stored.items() if name in same and same[name] == value}
    if options.device != "auto":
        from gepc.backbones.devices import choose_device

        device = choose_device(options.device)
        if device.type == backbone.device.type and device.index in (None, backbone.device.index):
            usable.add("device")
    options.check_usable(usable, f"this backbone was made before, on {backbone.device}, and is used as it is")
    return backbone


def _load_path(path: Path, options: LoadOptions) -> Backbone:
    """Load a file or a folder with the loader for its format."""
    from gepc.backbones.calling import CLASSES

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
    from gepc.backbones.onnx import OnnxBackbone

    reason = f"{path}: an exported network has its options in it and runs on the CPU"
    options.check_usable({"device"} if str(options.device) == "cpu" else {}, reason)
    return OnnxBackbone(path)


def _load_registered(folder: Path, config: dict[str, Any], options: LoadOptions) -> Backbone:
    """Load a folder whose class of networks a package registers by the entry point `gepc.networks`."""
    from gepc.backbones.devices import choose_device
    from gepc.backbones.pipelines import check_config

    options.check_usable({"device"}, f"{folder}: a network of the class {config['_class_name']} has its options in it")
    check_config(config, str(folder / "config.json"))
    backbone: Backbone = plugins("gepc.networks")[config["_class_name"]](folder, config, choose_device(options.device))
    backbone.trained_on = read_trained_on(folder)
    return backbone


def _load_checkpoint(path: Path, options: LoadOptions) -> Backbone:
    """Load a checkpoint of OpenAI's improved-diffusion or guided-diffusion."""
    from gepc.backbones.openai.convert import convert
    from gepc.backbones.pipelines import Network

    _refuse_parts(options)
    options.check_usable(CHECKPOINT_OPTIONS, f"{path} is an OpenAI checkpoint, a network in pixel space without text")
    with _reading(path):
        converted = convert(path, options.config)
        network = Network(converted.build(), converted.scheduler, sha256(path), "openai", converted.patches)
    return _backbone_of(network, options)


def _load_folder(folder: Path, options: LoadOptions) -> Backbone:
    """Load a diffusers model or pipeline folder."""
    from gepc.backbones.pipelines import read_folder

    _refuse_parts(options)
    options.check_usable(FOLDER_OPTIONS, f"{folder} is a folder of diffusers")
    with _reading(folder):
        network = read_folder(folder, options)
    backbone = _backbone_of(network, options)
    backbone.trained_on = read_trained_on(folder)
    return backbone


def _load_object(source: Any, options: LoadOptions) -> Backbone:
    """Load a diffusers network or pipeline in memory."""
    from gepc.backbones.pipelines import read_object

    options.check_usable(OBJECT_OPTIONS, "an object in memory has its weights already")
    return _backbone_of(read_object(source, options), options)


def _refuse_parts(options: LoadOptions) -> None:
    if options.scheduler is not None or options.vae is not None:
        raise OptionError("scheduler and vae go with a network object; otherwise give the scheduler's fields as config")


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
    from gepc.backbones.autoencoders import AutoencoderEncoder
    from gepc.backbones.base import LatentBackbone
    from gepc.backbones.diffusers import DiffusersBackbone
    from gepc.backbones.schedule import Scheduler

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
        patches=network.patches,
    )
    backbone.family, backbone.sha256, backbone.load_options = network.family, network.sha256, options.stored()
    if options.compile:
        backbone.compile()
    if network.autoencoder is None:
        for name in {"act_on", "offload"} & set(options.given()):
            raise OptionError(f"`{name}` is for latent backbones, and this network sees the pixels themselves")
        return backbone
    encoder = AutoencoderEncoder(network.autoencoder, backbone.device, backbone.precision)
    if encoder.latent_channels != backbone.channels:
        raise BackboneError(
            f"the {type(network.autoencoder).__name__} has {encoder.latent_channels} latent channels and the network "
            f"takes {backbone.channels}; they do not belong together"
        )
    backbone.pixels_per_cell = encoder.factor
    offload = options.offload and backbone.device.type != "cpu"
    latent = LatentBackbone(backbone, encoder, encoder.factor, encoder.channels, options.act_on, offload)
    latent.sha256, latent.load_options = network.sha256, options.stored()
    return latent


def load_again(
    source: str | Backbone, options: Mapping[str, Any], expected: str | None, where: str = "the pickle"
) -> Backbone:
    """Load the backbone of a saved detector; a `BackboneError` unless it has the weights `expected` (SHA-256).

    `options` are those of `load_backbone`. A `Backbone` has its own, of which the device is compared here.
    """
    if not isinstance(source, (str, os.PathLike)):
        options = {name: value for name, value in options.items() if name == "device"}
    backbone = load_backbone(source, **options)
    digest = backbone.sha256
    if None not in (expected, digest) and expected != digest:
        raise BackboneError(
            f"{where} was fitted with other weights than {backbone.source or 'this backbone'}: sha256 "
            f"{str(expected)[:12]}... expected, found {str(digest)[:12]}...; fit again or pass the right backbone"
        )
    unchecked = backbone.unchecked or (["network"] if expected is None else [])
    if unchecked:
        warnings.warn(
            f"the weights of the {' and '.join(unchecked)} cannot be compared with those that {where} was fitted with, "
            "because no torch module was found in the function; scores are wrong if they differ",
            stacklevel=4,
        )
    return backbone


def read_trained_on(folder: Path) -> npt.NDArray[np.uint64] | None:
    """The hashes of the images that the network in `folder` was trained on; None if the folder does not list them."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = folder / TRAINED_ON
    if not path.is_file():
        return None
    damaged = f"{path} is damaged ({{error}}); restore it, or delete it to load the backbone"
    with raising(InputError, damaged, SafetensorError, OSError, KeyError):
        return load_file(path)["hashes"]


def _locate(source: str | os.PathLike[str], options: LoadOptions) -> Path | Backbone:
    """The file or folder of a name, a path or a hub id, or the backbone that a plugin makes."""
    from gepc.backbones.base import Backbone

    name = str(source)
    if isinstance(source, str) and name in plugins("gepc.backbones"):
        made = plugins("gepc.backbones")[name]()
        return made if isinstance(made, Backbone) else Path(made)
    if isinstance(source, str) and name in list_backbones():
        return WEIGHTS / name
    if Path(source).exists():
        return Path(source)
    if not is_hub_id(name) or name.endswith(SUFFIXES):
        if "/" in name or "\\" in name or name.endswith(SUFFIXES):
            raise InputError(f"{name} does not exist")
        raise OptionError(f"no backbone, file or folder is called {name!r}; {nearest(name, list_backbones())}")
    try:
        return _download(name, options)
    except GepcError:
        raise
    except Exception as error:  # the hub client raises its own, its transport's and OSError
        reason = first_line(error)
        raise BackboneError(
            f"there is no folder {name}, and the hub did not give it either ({reason}). Without a connection, download "
            f"it elsewhere (hf download {name} --local-dir FOLDER), copy the folder here and pass its path"
        ) from error


def is_hub_id(name: str) -> bool:
    """Whether `name` may be a repository on the Hugging Face hub: "org/name"."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None


def _download(name: str, options: LoadOptions) -> Path:
    """Download the files of a hub repository that are needed: first its configs, then the weights that they name."""
    from huggingface_hub import snapshot_download

    from gepc.backbones.pipelines import AUTOENCODERS, NETWORKS, components_in
    from gepc.backbones.prompts import TEXT_PARTS

    folder = Path(snapshot_download(name, allow_patterns=["*.json", "tokenizer*/*"]))
    components = components_in(folder)
    mark = f".{options.variant}" if options.variant else ""
    homes = [f"{part}/" for part in (*NETWORKS, *AUTOENCODERS) if part in components] or [""]
    suffixes = ["safetensors"] if options.use_safetensors else ["safetensors", "bin"]
    stems = [f"{home}diffusion_pytorch_model{mark}" for home in homes]
    if options.embeddings is None:
        texts = [part for part in components if TEXT_PARTS.fullmatch(part) and not part.startswith("tokenizer")]
        stems += [f"{part}/{stem}{mark}" for part in texts for stem in ("model", "pytorch_model")]
    patterns = [f"{stem}{end}.{suffix}" for stem in stems for end in ("", "-*") for suffix in suffixes]
    folder = Path(snapshot_download(name, allow_patterns=["*.json", "tokenizer*/*", *patterns]))
    for home in homes:
        if not any(folder.glob(f"{home}diffusion_pytorch_model{mark}*")):
            remedy = "`use_safetensors` False also takes .bin files" if options.use_safetensors else "it has none"
            raise BackboneError(f"{name}: no weights {home}diffusion_pytorch_model{mark}.safetensors; {remedy}")
    return folder

"""Load a backbone: an embedded name, a folder, a checkpoint, a hub id, or a diffusers object in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gepc.core.errors import BackboneError, GepcError, InputError, OptionError, first_line, nearest, raising
from gepc.core.files import read_json
from gepc.core.options import read_yaml
from gepc.core.plugins import plugins

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin

    from gepc.backbones.base import Backbone
    from gepc.backbones.networks import Wanted

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
TRAINED_ON = "trained_on.safetensors"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


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

    Parameters
    ----------
    source : an embedded name (`list_backbones`), a diffusers model or pipeline folder, an OpenAI improved- or
        guided-diffusion checkpoint (`.pt` or `.safetensors`), a network that `gepc export` wrote (`.onnx`), the folder
        of an energy network that `gepc train` wrote, a hub id
        ("org/name"), a diffusers network or pipeline object (which is copied), or a `Backbone`, which is returned as it
        is. A pipeline with an autoencoder becomes a latent backbone.
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
    """
    from gepc.backbones.base import Backbone
    from gepc.backbones.diffusers import DiffusersBackbone
    from gepc.backbones.networks import Wanted, from_object, from_path, read_embeddings, rescaled

    if isinstance(source, Backbone):
        return source
    made = plugins("gepc.backbones")[source]() if source in plugins("gepc.backbones") else None
    if isinstance(made, Backbone):
        made.source = None if made.sha256 is None else str(source)  # a saved detector names only weights it can check
        return made
    if config is not None and not isinstance(config, Mapping):
        config = read_yaml(config) if Path(config).is_file() else str(config)
    fixed = {"config": config, "class_label": class_label, "prompt": prompt}
    if isinstance(source, (str, os.PathLike)) and (complete := _complete(Path(source), device, dtype, fixed)):
        return complete
    wanted = Wanted(config, dtype, prompt, read_embeddings(embeddings), variant, use_safetensors)
    if not isinstance(source, (str, os.PathLike)):
        network = from_object(source, scheduler, vae, wanted)
    elif scheduler is not None or vae is not None:
        raise OptionError("scheduler and vae go with a network object; otherwise give the scheduler's fields as config")
    else:
        network = from_path(_find(source, wanted), wanted)
    if rescale_timesteps is not None:
        network = replace(network, scheduler=rescaled(network.scheduler, rescale_timesteps))
    backbone = DiffusersBackbone(
        network.net,
        network.scheduler,
        class_label=class_label,
        embeddings=network.embeddings,
        device=device,
        dtype=dtype,
        patches=network.patches,
    )
    if network.autoencoder is not None:
        backbone = backbone.with_autoencoder(network.autoencoder, act_on, offload)
    elif act_on != "latents":
        raise OptionError(
            "`act_on` is for latent backbones, and this network sees the pixels themselves", options=("act_on",)
        )
    backbone.family, backbone.sha256 = network.family, network.sha256
    backbone.source = str(source) if isinstance(source, (str, os.PathLike)) else None
    backbone.trained_on = network.trained_on
    options = {
        "config": dict(config) if isinstance(config, Mapping) else config,
        "dtype": None if dtype == "float32" else str(dtype).removeprefix("torch."),
        "class_label": class_label,
        "prompt": prompt,
        "rescale_timesteps": rescale_timesteps,
        "variant": variant,
        "use_safetensors": None if use_safetensors else False,
        "act_on": None if act_on == "latents" else act_on,
        "offload": offload or None,
    }
    backbone.load_options = {name: value for name, value in options.items() if value is not None}
    return backbone.compile() if compile else backbone


def _complete(
    path: Path, device: str | torch.device, dtype: str | torch.dtype, options: Mapping[str, Any]
) -> Backbone | None:
    """A network that takes no options, exported or an energy network; None for any other."""
    file = path / "config.json"
    values: Any = read_json(file) if file.is_file() else None
    is_energy = isinstance(values, dict) and values.get("_class_name") == "EnergyNet"
    if path.suffix != ".onnx" and not is_energy:
        return None
    given = [name for name, value in options.items() if value is not None]
    if given or str(dtype).removeprefix("torch.") != "float32":
        kind = "an energy" if is_energy else "an exported"
        raise OptionError(f"{path}: {kind} network has its options in it; leave out `{(given or ['dtype'])[0]}`")
    if not is_energy:
        from gepc.backbones.onnx import OnnxBackbone

        if not path.is_file():
            raise InputError(f"{path} does not exist")
        return OnnxBackbone(path)
    from gepc.backbones.diffusers import choose_device
    from gepc.backbones.networks import check_config
    from gepc.lab.energy.network import load_energy

    check_config(values, str(file))
    backbone = load_energy(path, values, choose_device(device))
    backbone.source, backbone.trained_on = str(path), read_trained_on(path)
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


def _find(source: str | os.PathLike[str], wanted: Wanted) -> Path:
    """The folder or file of a name, a path or a hub id; what cannot be a hub id is an unknown name."""
    name = str(source)
    if isinstance(source, str) and name in list_backbones():
        return Path(plugins("gepc.backbones")[name]()) if name in plugins("gepc.backbones") else WEIGHTS / name
    if Path(source).exists():
        return Path(source)
    if not is_hub_id(name) or name.endswith(SUFFIXES):
        if "/" in name or "\\" in name or name.endswith(SUFFIXES):
            raise InputError(f"{name} does not exist")
        raise OptionError(f"no backbone, file or folder is called {name!r}; {nearest(name, list_backbones())}")
    try:
        return _download(name, wanted)
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


def _download(name: str, wanted: Wanted) -> Path:
    """The snapshot of a hub repository with the files that are needed: first its configs, then weights they name."""
    from huggingface_hub import snapshot_download

    from gepc.backbones.networks import AUTOENCODERS, NETWORKS, TEXT_PARTS, components_in

    folder = Path(snapshot_download(name, allow_patterns=["*.json", "tokenizer*/*"]))
    components = components_in(folder)
    mark = f".{wanted.variant}" if wanted.variant else ""
    homes = [f"{part}/" for part in (*NETWORKS, *AUTOENCODERS) if part in components] or [""]
    suffixes = ["safetensors"] if wanted.use_safetensors else ["safetensors", "bin"]
    stems = [f"{home}diffusion_pytorch_model{mark}" for home in homes]
    if wanted.embeddings is None:
        texts = [part for part in components if TEXT_PARTS.fullmatch(part) and not part.startswith("tokenizer")]
        stems += [f"{part}/{stem}{mark}" for part in texts for stem in ("model", "pytorch_model")]
    patterns = [f"{stem}{end}.{suffix}" for stem in stems for end in ("", "-*") for suffix in suffixes]
    folder = Path(snapshot_download(name, allow_patterns=["*.json", "tokenizer*/*", *patterns]))
    for home in homes:
        if not any(folder.glob(f"{home}diffusion_pytorch_model{mark}*")):
            remedy = "`use_safetensors` False also takes .bin files" if wanted.use_safetensors else "it has none"
            raise BackboneError(f"{name}: no weights {home}diffusion_pytorch_model{mark}.safetensors; {remedy}")
    return folder

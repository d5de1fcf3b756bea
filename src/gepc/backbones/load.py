"""Load a backbone: an embedded name, a folder, a checkpoint, a hub id, or an object in memory."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gepc.core.errors import BackboneError, GepcError, InputError, OptionError, nearest, raising
from gepc.core.options import read_yaml
from gepc.core.plugins import plugins

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin

    from gepc.backbones.base import Backbone
    from gepc.backbones.diffusers import LoadOptions

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
REMOVED = ("offload", "use_safetensors")  # options in detectors of 0.2 that did not change a prediction
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".onnx")


def list_backbones() -> list[str]:
    """List the backbones that ship with this package, and with others by the entry point `gepc.backbones`.

    Returns
    -------
    list of str
        Names that `load_backbone` takes, sorted.

    Examples
    --------
    >>> import gepc
    >>> "photos-small" in gepc.list_backbones()
    True

    See Also
    --------
    load_backbone : load one of them.
    """
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
    time_scale: float = 1.0,
    variant: str | None = None,
    act_on: str = "latents",
) -> Backbone:
    """Load a network that predicts noise, or an energy network.

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
    dtype : the precision of the network: float32, bfloat16, float16 or float64.
    class_label : the class on which a class-conditional network is conditioned; None is the null class of a DiT.
    prompt : the text that a text-conditional network is conditioned on; None is the empty text. Its embedding is
        computed once, by the pipeline's text encoders and the package transformers, and stored with a detector.
    embeddings : instead of encoding a prompt, `prompt_embeds` (1, tokens, width) and, where the network needs them,
        `pooled_prompt_embeds` and `prompt_attention_mask`: a mapping or a `.safetensors` file.
    rescale_timesteps : call the network with t*1000/T; None leaves it to the checkpoint's config.
    time_scale : multiply the time that is passed to the network by this number. The paper's released code passes t to a
        network that was trained on t/4, which corresponds to 4.
    variant : load the weights of that variant of a folder, for example "fp16".
    act_on : what a group acts on with a latent backbone, `latents` or `pixels`; see `Backbone.with_encoder`.

    Returns
    -------
    Backbone
        The backbone, ready to be given to a detector.

    Raises
    ------
    InputError : the path or a file of the folder does not exist or is not what was expected.
    OptionError : the name is unknown, or an option does not exist or does not apply to the source.
    BackboneError : the files do not describe a network that predicts noise, or the hub cannot be reached.

    Examples
    --------
    >>> import gepc
    >>> backbone = gepc.load_backbone("photos-small", device="cpu")
    >>> backbone.channels, backbone.n_steps
    (3, 4000)

    See Also
    --------
    Backbone.from_callable, Backbone.from_denoiser, Backbone.from_flow : make a backbone of a function or a module.
    Encoder.load : load a network that does not predict noise.
    """
    given = {name: value for name, value in locals().items() if name != "source"}

    from gepc.backbones.base import Backbone
    from gepc.backbones.diffusers import LoadOptions
    from gepc.backbones.sources import load_object, load_path, use_as_it_is

    if isinstance(config, (str, os.PathLike)):
        config = read_yaml(config) if Path(config).is_file() else str(config)
    options = LoadOptions(**{**given, "config": config, "dtype": str(dtype).removeprefix("torch.")})
    if isinstance(source, Backbone):
        return use_as_it_is(source, options)
    if not isinstance(source, (str, os.PathLike)):
        return load_object(source, options)
    located = _locate(source, options)
    if isinstance(located, Backbone):
        backbone = use_as_it_is(located, options)
        # detectors name only weights they can check
        backbone.source = backbone.location = None if backbone.sha256 is None else str(source)
    else:
        backbone = load_path(located, options)
        backbone.source = str(source)
        backbone.location = str(located.absolute() if located == Path(source) else source)
    backbone.load_again = load_again
    return backbone


def load_again(
    source: str | Backbone, options: Mapping[str, Any], expected: str | None, where: str = "the pickle"
) -> Backbone:
    """Load the backbone of a saved detector; a `BackboneError` unless it has the weights `expected` (SHA-256).

    `options` are those of `load_backbone`. A `Backbone` has its own, of which the device is compared here.
    """
    if not isinstance(source, (str, os.PathLike)):
        options = {name: value for name, value in options.items() if name == "device"}
    kept = {name: value for name, value in options.items() if name not in REMOVED}
    backbone = load_backbone(source, **kept)
    digest = backbone.sha256
    if None not in (expected, digest) and expected != digest:
        known = f"sha256 {str(expected)[:12]}... expected, found {str(digest)[:12]}..."
        other = f"other weights than {backbone.source or 'this backbone'}: {known}"
        raise BackboneError(f"{where} was fitted with {other}; fit again or pass the right backbone")
    if expected is None or backbone.unchecked:
        parts = " and ".join(backbone.unchecked or ["network"])
        reason = "no torch module was found in it" if backbone.unchecked else "the folder has no digest of them"
        lost = f"the weights of the {parts} cannot be compared with those that {where} was fitted with"
        warnings.warn(f"{lost}, because {reason}; scores are wrong if they differ", stacklevel=4)
    return backbone


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
    message = (
        f"there is no folder {name}, and the hub did not give it either ({{line}}). Without a connection, download "
        f"it elsewhere (hf download {name} --local-dir FOLDER), copy the folder here and pass its path"
    )
    # the hub client raises its own errors, its transport's and OSError
    with raising(BackboneError, message, Exception, passing=GepcError):
        return _download(name, options)


def is_hub_id(name: str) -> bool:
    """Whether `name` may be a repository on the Hugging Face hub: "org/name"."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None


def _download(name: str, options: LoadOptions) -> Path:
    """Download the configs and the weights of a hub repository, without its other variants and single-file copies.

    Weights are `.safetensors` files, or `.bin` files if there are no others; these are opened without running code.
    """
    from huggingface_hub import snapshot_download

    from gepc.backbones.sources import AUTOENCODERS, NETWORKS

    stem = "diffusion_pytorch_model" + (f".{options.variant}" if options.variant else "")
    stems = [stem, *(f"{part}/{stem}" for part in (*NETWORKS, *AUTOENCODERS))]
    if options.embeddings is None:
        text = stem.replace("diffusion_pytorch_", "")
        stems += [f"text_encoder*/{text}", f"text_encoder*/pytorch_{text}"]
    for suffix in ("safetensors", "bin"):
        patterns = [f"{stem}{end}.{suffix}" for stem in stems for end in ("", "-*")]
        folder = Path(snapshot_download(name, allow_patterns=["*.json", "tokenizer*/*", *patterns]))
        if any(folder.rglob(f"{stem}*.{suffix}")):
            return folder
    raise BackboneError(f"{name}: no weights {stem}.safetensors (or .bin)")

"""Load a backbone: an embedded name, a folder, a checkpoint, a hub id, or a diffusers object in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gepc.core.errors import (
    BackboneError,
    GepcError,
    InputError,
    OptionError,
    check_names,
    first_line,
    nearest,
    raising,
)
from gepc.core.files import read_json, sha256
from gepc.core.options import build, read_yaml
from gepc.core.plugins import plugins

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin

    from gepc.backbones.base import Backbone
    from gepc.backbones.path import SigmaScheduler
    from gepc.backbones.schedule import Scheduler
    from gepc.backbones.weights import Patches

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
SCHEDULER = "scheduler_config.json"
TRAINED_ON = "trained_on.safetensors"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
NETWORKS, AUTOENCODERS = ("unet", "transformer"), ("vae", "vqvae")
MAX_LAYERS, MAX_WIDTH = 200, 1_000_000
_TEXT = re.compile(r"(text_encoder|tokenizer)(_\d)?|bert")
_UNUSED = ("scheduler", "safety_checker", "feature_extractor", "image_encoder")


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
    wanted = Wanted(config, dtype, prompt, _read_embeddings(embeddings), variant, use_safetensors)
    if not isinstance(source, (str, os.PathLike)):
        network = _from_object(source, scheduler, vae, wanted)
    elif scheduler is not None or vae is not None:
        raise OptionError("scheduler and vae go with a network object; otherwise give the scheduler's fields as config")
    else:
        network = _from_path(_find(source, wanted), wanted)
    if rescale_timesteps is not None:
        network = replace(network, scheduler=_rescaled(network.scheduler, rescale_timesteps))
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
        raise OptionError("`act_on` is for latent backbones, and this network sees the pixels themselves")
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
    from gepc.backbones.energy import load_energy

    _check_config(values, str(file))
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


@dataclass(frozen=True)
class Wanted:
    """The options of `load_backbone` that decide what is read."""

    config: str | Mapping[str, Any] | None = None
    dtype: str | torch.dtype = "float32"
    prompt: str | None = None
    embeddings: Mapping[str, Any] | None = None
    variant: str | None = None
    use_safetensors: bool = True


@dataclass(frozen=True)
class Network:
    """What every source is read into."""

    net: Any
    scheduler: Scheduler | SigmaScheduler
    sha256: str
    family: str = "diffusers"
    patches: Patches | None = None
    trained_on: npt.NDArray[np.uint64] | None = None
    autoencoder: Any = None
    embeddings: Mapping[str, Any] = field(default_factory=dict)


def _rescaled(scheduler: Scheduler | SigmaScheduler, rescale_timesteps: bool) -> Scheduler:
    from gepc.backbones.schedule import Scheduler

    if not isinstance(scheduler, Scheduler):
        raise OptionError("rescale_timesteps does not apply to this network: it is not called with a timestep")
    return replace(scheduler, rescale_timesteps=rescale_timesteps)


def _read_embeddings(given: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    from gepc.backbones.weights import read_tensors

    if given is None or isinstance(given, Mapping):
        return given
    if Path(given).suffix != ".safetensors":
        raise OptionError(f"`embeddings` is a mapping or a .safetensors file, got {given}")
    return read_tensors(Path(given))


def _from_path(path: Path, wanted: Wanted) -> Network:
    from gepc.backbones.openai.convert import convert

    try:
        if path.is_dir():
            return _from_folder(path, wanted)
        converted = convert(path, wanted.config)
        return Network(converted.build(), converted.scheduler, sha256(path), "openai", converted.patches)
    except GepcError:
        raise
    except Exception as error:  # files of others may be wrong in any way
        raise BackboneError(f"{path} does not describe a network: {type(error).__name__}: {error}") from error


def _from_folder(folder: Path, wanted: Wanted) -> Network:
    """A model folder (`config.json`, weights, `scheduler_config.json`) or a pipeline folder (`unet/`, `vae/`, ...)."""
    from gepc.backbones.networks import find_class
    from gepc.backbones.weights import EXTRAS, Patches, build_net, check_shapes, place, read_all, weight_files

    pipeline = folder.parent if folder.name in NETWORKS else folder
    components = _components_in(pipeline)
    _check_components(str(pipeline), components)
    model = next((folder / name for name in NETWORKS if (folder / name / "config.json").is_file()), folder)
    if not (model / "config.json").is_file():
        raise InputError(
            f"{folder} has no config.json (nor unet/config.json or transformer/config.json): it is not a diffusers "
            "model or pipeline"
        )
    values = read_json(model / "config.json")
    _check_config(values, str(model / "config.json"))
    kind = values.get("_class_name", "UNet2DModel") if isinstance(values, dict) else "something else"
    needs = find_class(kind, f"{model / 'config.json'} describes").needs
    extras = read_json(folder / EXTRAS) if (folder / EXTRAS).is_file() else {}
    patches = build(Patches, extras.get("patches", {}), str(folder / EXTRAS))
    homes = [folder / "scheduler", folder, *([pipeline / "scheduler"] if folder.name in NETWORKS else [])]
    path = next((home / SCHEDULER for home in homes if (home / SCHEDULER).is_file()), None)
    found = {**read_json(path), **extras.get("scheduler", {})} if path is not None else None
    where = f"{folder} has no {SCHEDULER}" if path is None else str(path)
    scheduler = _read_scheduler(found, where, wanted.config)
    files = weight_files(model, wanted.variant)
    if kind == "UNet2DModel":
        net: Any = build_net(values, patches)
        tensors = read_all(files)
        check_shapes(" and ".join(map(str, files)), tensors, {n: tuple(p.shape) for n, p in net.state_dict().items()})
        net = place(net, tensors)
    else:
        net = _pretrained(model, kind, wanted)
    home = next((pipeline / name for name in AUTOENCODERS if (pipeline / name / "config.json").is_file()), None)
    autoencoder = None
    if home is not None:
        autoencoder = _pretrained(home, read_json(home / "config.json").get("_class_name", "AutoencoderKL"), wanted)
        files = [*files, *weight_files(home, wanted.variant)]
    elif lost := sorted(components & set(AUTOENCODERS)):
        raise InputError(f"{pipeline} lists an autoencoder, but has no folder for it; download {lost[0]}/ too")
    if wanted.prompt is not None and not needs:
        raise OptionError(f"`prompt` was given, but a {kind} is not conditioned on text")
    encode = needs and wanted.embeddings is None
    embeddings = _encode_prompt(pipeline, kind, wanted) if encode else wanted.embeddings or {}
    trained_on, family = read_trained_on(folder), extras.get("family", "diffusers")
    return Network(net, scheduler, sha256(*files), family, patches, trained_on, autoencoder, embeddings)


def _check_config(values: Any, where: str) -> None:
    """Refuse sizes that no network has before layers are made: every block and layer takes time to make."""
    for name, value in values.items() if isinstance(values, dict) else ():
        items = value if isinstance(value, list) else [value]
        numbers = [item for item in items if isinstance(item, (int, float)) and not isinstance(item, bool)]
        most = MAX_LAYERS if "layers" in name or "num_blocks" in name else MAX_WIDTH
        if len(items) > MAX_LAYERS or any(not abs(number) <= most for number in numbers):
            raise BackboneError(f"{where}: {name} is {str(value)[:60]}, beyond any network")
        if name == "sample_size" and not isinstance(value, (int, type(None))) and len(numbers) != 2:
            raise BackboneError(f"{where}: sample_size must be a number or two, got {str(value)[:60]}")


def _pretrained(folder: Path, kind: str, wanted: Wanted) -> Any:
    """The diffusers model in `folder`, whole: a missing tensor is an error, not a random one."""
    import diffusers

    from gepc.backbones.diffusers import DTYPES
    from gepc.backbones.weights import weight_files

    cls: Any = getattr(diffusers, kind, None)
    if diffusers.ModelMixin not in getattr(cls, "__mro__", ()):
        raise BackboneError(f"{folder / 'config.json'} describes a {kind}, which is no network of this diffusers")
    first = weight_files(folder, wanted.variant)[0].name
    variant = re.search(r"diffusion_pytorch_model\.(\w+)[.-]", first)
    try:
        net, info = cls.from_pretrained(
            folder,
            variant=variant[1] if variant and variant[1] not in ("safetensors", "bin") else None,
            use_safetensors=".safetensors" in first,
            torch_dtype=DTYPES.get(str(wanted.dtype).removeprefix("torch.")),
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


def _encode_prompt(pipeline: Path, kind: str, wanted: Wanted) -> dict[str, Any]:
    """The embeddings of the prompt, by the text encoders of a pipeline folder; they are not kept in memory."""
    from gepc.backbones.networks import encoded_prompt

    index = pipeline / "model_index.json"
    listed = read_json(index) if index.is_file() else {}
    texts = [name for name in listed if _TEXT.fullmatch(name) and listed[name][:1] != [None]]
    missing = [name for name in texts if not (pipeline / name).is_dir()]
    if not texts or missing:
        what = f"{', '.join(missing)} missing in {pipeline}" if missing else f"no text encoder in {pipeline}"
        raise InputError(f"a {kind} is conditioned on text: {what}; download it too, or give `embeddings`")
    if any(listed[name][0] != "transformers" for name in texts):
        raise BackboneError(f"{index} names code of its own, which is not run; give `embeddings`")
    needed = "a prompt needs transformers: pip install 'gepc[text]'; or give `embeddings`"
    with raising(OptionError, needed, ImportError):
        import transformers  # noqa: F401
        from diffusers import DiffusionPipeline
    others = {name: None for name, value in listed.items() if isinstance(value, list) and name not in texts}
    try:
        encoders = DiffusionPipeline.from_pretrained(
            pipeline,
            variant=wanted.variant,
            use_safetensors=wanted.use_safetensors or None,
            local_files_only=True,
            **others,
        )
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        reason = f"its text encoders cannot be loaded: {first_line(error)}"
        raise BackboneError(f"{pipeline}: {reason}; give `embeddings`") from error
    return encoded_prompt(encoders, wanted.prompt or "", kind)


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


def _from_object(source: Any, scheduler: Any, vae: Any, wanted: Wanted) -> Network:
    """A copy of a network in memory: the caller may go on training or moving the original."""
    from copy import deepcopy

    from diffusers import DiffusionPipeline, ModelMixin

    from gepc.backbones.networks import encoded_prompt, find_class
    from gepc.backbones.weights import digest_of

    net, name, embeddings = source, type(source).__name__, wanted.embeddings
    if isinstance(source, DiffusionPipeline):
        if scheduler is not None or vae is not None:
            raise OptionError(f"the {name} has a scheduler and a vae of its own; give them only with a network")
        components = {part: value for part, value in source.components.items() if value is not None}
        _check_components(f"the {name}", components)
        net = next((components[part] for part in NETWORKS if part in components), None)
        vae = next((components[part] for part in AUTOENCODERS if part in components), None)
        scheduler = components.get("scheduler")
    elif not isinstance(source, ModelMixin):
        raise OptionError(
            f"load_backbone takes a name, a path, a Backbone, or a diffusers network or pipeline, got a {name}; "
            "wrap any other network or function with Backbone.from_callable, from_denoiser or from_flow"
        )
    needs = find_class(type(net).__name__, "this object is").needs
    found = getattr(scheduler, "config", None)
    if scheduler is not None and not isinstance(found, Mapping):
        raise OptionError(f"scheduler must be a diffusers scheduler, got a {type(scheduler).__name__}")
    if found is not None:
        found = {"_class_name": type(scheduler).__name__, **found}
    meaning = _read_scheduler(found, "no scheduler was given" if found is None else "the scheduler", wanted.config)
    if embeddings is None and needs and isinstance(source, DiffusionPipeline):
        embeddings = encoded_prompt(source, wanted.prompt or "", type(net).__name__)
    elif wanted.prompt is not None and embeddings is None:
        raise OptionError("`prompt` needs a pipeline with a text encoder")
    digest = digest_of(net) if vae is None else digest_of(net, vae)
    copies = [None if part is None else deepcopy(part).requires_grad_(False) for part in (net, vae)]
    return Network(copies[0], meaning, digest, autoencoder=copies[1], embeddings=embeddings or {})


def _components_in(folder: Path) -> set[str]:
    """The components of a pipeline folder, by its index and by the names of its folders."""
    listed = read_json(folder / "model_index.json") if (folder / "model_index.json").is_file() else {}
    names = (*NETWORKS, *AUTOENCODERS, "movq", "prior", "image_encoder", "text_encoder")
    found = {name for name in names if (folder / name / "config.json").is_file()}
    return found | {name for name, value in listed.items() if isinstance(value, list) and value[:1] not in ([], [None])}


def _check_components(what: str, names: Iterable[str]) -> None:
    known = {*NETWORKS, *AUTOENCODERS, *_UNUSED}
    others = sorted(name for name in names if name not in known and not _TEXT.fullmatch(name))
    if others:
        raise BackboneError(
            f"{what} is a pipeline with {', '.join(others)}, which gepc does not know: load its network as an object "
            "(load_backbone(unet, scheduler=..., vae=...)), or use Backbone.from_callable and with_encoder"
        )


def _read_scheduler(
    found: Mapping[str, Any] | None, where: str, config: str | Mapping[str, Any] | None
) -> Scheduler | SigmaScheduler:
    """The scheduler that was found, with fields replaced by `config`, or made of `config` alone."""
    from gepc.backbones.path import read_scheduler
    from gepc.backbones.schedule import Scheduler

    if isinstance(config, str):
        raise InputError(f"{config} does not exist")
    overrides = config or {}
    if found is not None:
        scheduler = read_scheduler({**found, **overrides}, where)
        check_names("config", overrides, scheduler.__dataclass_fields__)
        return scheduler
    given = build(Scheduler, overrides, "config")
    if {"beta_schedule", "trained_betas"} & set(overrides):
        return given
    raise InputError(
        f"{where}, so the noise schedule is unknown; add it (scheduler= for an object), or give for instance "
        "config={'beta_schedule': 'linear', 'num_train_timesteps': 1000}"
    )


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

    folder = Path(snapshot_download(name, allow_patterns=["*.json", "tokenizer*/*"]))
    components = _components_in(folder)
    mark = f".{wanted.variant}" if wanted.variant else ""
    homes = [f"{part}/" for part in (*NETWORKS, *AUTOENCODERS) if part in components] or [""]
    suffixes = ["safetensors"] if wanted.use_safetensors else ["safetensors", "bin"]
    stems = [f"{home}diffusion_pytorch_model{mark}" for home in homes]
    if wanted.embeddings is None:
        texts = [part for part in components if _TEXT.fullmatch(part) and not part.startswith("tokenizer")]
        stems += [f"{part}/{stem}{mark}" for part in texts for stem in ("model", "pytorch_model")]
    patterns = [f"{stem}{end}.{suffix}" for stem in stems for end in ("", "-*") for suffix in suffixes]
    folder = Path(snapshot_download(name, allow_patterns=["*.json", "tokenizer*/*", *patterns]))
    for home in homes:
        if not any(folder.glob(f"{home}diffusion_pytorch_model{mark}*")):
            remedy = "`use_safetensors` False also takes .bin files" if wanted.use_safetensors else "it has none"
            raise BackboneError(f"{name}: no weights {home}diffusion_pytorch_model{mark}.safetensors; {remedy}")
    return folder

"""The network classes of diffusers: how each is called, what it is conditioned on, and how it is read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from gepc.backbones import weights
from gepc.backbones.load import read_trained_on
from gepc.backbones.openai.convert import convert
from gepc.backbones.path import SigmaScheduler, read_scheduler
from gepc.backbones.schedule import Scheduler
from gepc.backbones.weights import EXTRAS, Patches, check_shapes, weight_files
from gepc.core.errors import BackboneError, GepcError, InputError, OptionError, check_names, first_line
from gepc.core.files import read_json, sha256
from gepc.core.options import build

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
SCHEDULER = "scheduler_config.json"
NETWORKS, AUTOENCODERS = ("unet", "transformer"), ("vae", "vqvae")
MAX_LAYERS, MAX_WIDTH = 200, 1_000_000
TEXT_PARTS = re.compile(r"(text_encoder|tokenizer)(_\d)?|bert")
_UNUSED = ("scheduler", "safety_checker", "feature_extractor", "image_encoder")
PROMPT, POOLED, MASK = "prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask"
EMBEDDINGS = ("embeddings",)  # the option that messages name
Embeddings = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Conditions:
    """What a batch is conditioned on: a class per image, embeddings per image, and the images' (height, width)."""

    labels: torch.Tensor | None
    embeddings: Embeddings
    size: tuple[int, int]


Call = Callable[[Any, torch.Tensor, torch.Tensor, Conditions], Any]


def _unet(net: Any, y: torch.Tensor, time: torch.Tensor, given: Conditions) -> Any:
    return net(y, time, class_labels=given.labels, return_dict=False)


def _conditional_unet(net: Any, y: torch.Tensor, time: torch.Tensor, given: Conditions) -> Any:
    added = None
    if net.config.addition_embed_type == "text_time":  # original size, corner of the crop, size: a whole image
        sizes = y.new_tensor([[*given.size, 0, 0, *given.size]]).expand(len(y), -1)
        added = {"text_embeds": given.embeddings[POOLED], "time_ids": sizes}
    text = given.embeddings[PROMPT]
    return net(y, time, text, class_labels=given.labels, added_cond_kwargs=added, return_dict=False)


def _dit(net: Any, y: torch.Tensor, time: torch.Tensor, given: Conditions) -> Any:
    return net(y, timestep=time, class_labels=given.labels, return_dict=False)


def _pixart(net: Any, y: torch.Tensor, time: torch.Tensor, given: Conditions) -> Any:
    added: dict[str, Any] = {"resolution": None, "aspect_ratio": None}
    if net.use_additional_conditions:
        values = {"resolution": given.size, "aspect_ratio": (given.size[0] / given.size[1],)}
        added = {name: y.new_tensor([value]).expand(len(y), -1) for name, value in values.items()}
    return net(
        y,
        encoder_hidden_states=given.embeddings[PROMPT],
        encoder_attention_mask=given.embeddings.get(MASK),
        timestep=time,
        added_cond_kwargs=added,
        return_dict=False,
    )


def _sana(net: Any, y: torch.Tensor, time: torch.Tensor, given: Conditions) -> Any:
    mask, text = given.embeddings.get(MASK), given.embeddings[PROMPT]
    return net(y, encoder_hidden_states=text, encoder_attention_mask=mask, timestep=time, return_dict=False)


def _sd3(net: Any, y: torch.Tensor, time: torch.Tensor, given: Conditions) -> Any:
    text, pooled = given.embeddings[PROMPT], given.embeddings[POOLED]
    return net(y, encoder_hidden_states=text, pooled_projections=pooled, timestep=time, return_dict=False)


def _flux(net: Any, y: torch.Tensor, time: torch.Tensor, given: Conditions) -> Any:
    """Flux takes tokens of 2x2 cells, and time from 0 to 1."""
    height, width = y.shape[-2] // 2, y.shape[-1] // 2
    text = given.embeddings[PROMPT]
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([torch.zeros_like(rows), rows, columns], dim=2).reshape(-1, 3).to(y)
    guidance = y.new_ones(len(y)) if net.config.guidance_embeds else None
    (tokens,) = net(
        functional.pixel_unshuffle(y, 2).flatten(2).transpose(1, 2),
        encoder_hidden_states=text,
        pooled_projections=given.embeddings[POOLED],
        timestep=time / 1000.0,
        img_ids=places,
        txt_ids=y.new_zeros(text.shape[1], 3),
        guidance=guidance,
        return_dict=False,
    )
    return (functional.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (height, width)), 2),)


@dataclass(frozen=True)
class NetworkClass:
    """How a class of networks is called."""

    call: Call  # the network, its input, the time and the conditions -> a tuple that begins with the answer
    needs: tuple[str, ...] = ()  # the embeddings it cannot do without
    prompt: Mapping[str, int] | None = None  # where they are in the answer of a pipeline's `encode_prompt`
    cells: int = 1  # latent cells per side of what the network counts as one channel group; Flux packs 2x2


CLASSES: dict[str, NetworkClass] = {
    "UNet2DModel": NetworkClass(_unet),
    "UNet2DConditionModel": NetworkClass(_conditional_unet, (PROMPT,), {PROMPT: 0, POOLED: 2}),
    "DiTTransformer2DModel": NetworkClass(_dit),
    "Transformer2DModel": NetworkClass(_dit),
    "PixArtTransformer2DModel": NetworkClass(_pixart, (PROMPT,), {PROMPT: 0, MASK: 1}),
    "SanaTransformer2DModel": NetworkClass(_sana, (PROMPT,), {PROMPT: 0, MASK: 1}),
    "SD3Transformer2DModel": NetworkClass(_sd3, (PROMPT, POOLED), {PROMPT: 0, POOLED: 2}),
    "FluxTransformer2DModel": NetworkClass(_flux, (PROMPT, POOLED), {PROMPT: 0, POOLED: 1}, cells=2),
}


def find_class(kind: str, what: str) -> NetworkClass:
    """The entry of `CLASSES`, or a `BackboneError`; `what` begins its message."""
    if kind not in CLASSES:
        raise BackboneError(f"{what} a {kind}; gepc loads {', '.join(CLASSES)}. Others: Backbone.from_callable")
    return CLASSES[kind]


def check_embeddings(net: Any, embeddings: Mapping[str, Any]) -> None:
    """Raise `OptionError` unless the embeddings are those that the network needs, one row each."""
    check_names("embeddings", embeddings, (PROMPT, POOLED, MASK))
    needs = CLASSES[type(net).__name__].needs
    if getattr(net.config, "addition_embed_type", None) == "text_time":
        needs = (*needs, POOLED)
    if embeddings and not needs:
        raise OptionError(f"embeddings or a prompt were given, but a {type(net).__name__} is not conditioned on text")
    missing = [name for name in needs if name not in embeddings]
    if missing:
        raise OptionError(
            f"this {type(net).__name__} is conditioned on text: load a whole pipeline with its text encoder, or give "
            f"`embeddings` with {', '.join(missing)}",
            options=EMBEDDINGS,
        )
    for name, values in embeddings.items():
        if len(values) != 1 or values.ndim != {PROMPT: 3}.get(name, 2):
            wanted = "(1, tokens, width)" if name == PROMPT else "(1, length)"
            raise OptionError(f"embeddings: {name} must be {wanted}, got {tuple(values.shape)}")


def null_class(net: Any) -> int | None:
    """The null class of a transformer that is conditioned on a class, the one after its classes; None otherwise."""
    is_dit = CLASSES[type(net).__name__].call is _dit and net.config.num_embeds_ada_norm
    return int(net.config.num_embeds_ada_norm) if is_dit else None


def encoded_prompt(pipeline: Any, prompt: str, kind: str) -> dict[str, torch.Tensor]:
    """The embeddings of `prompt` by the text encoders of a diffusers pipeline with a network of class `kind`."""
    encode = getattr(pipeline, "encode_prompt", None)
    places = CLASSES[kind].prompt
    if encode is None or places is None:
        raise OptionError(
            f"the {type(pipeline).__name__} encodes no prompt for a {kind}; give `embeddings`", options=EMBEDDINGS
        )
    takes = inspect.signature(encode).parameters
    options: dict[str, Any] = {name: None for name, one in takes.items() if one.default is one.empty}
    options |= {"num_images_per_prompt": 1, "do_classifier_free_guidance": False, "device": torch.device("cpu")}
    options |= {"prompt": prompt, "prompt_2": prompt, "prompt_3": prompt}
    with torch.no_grad():
        answer: Sequence[Any] = encode(**{name: value for name, value in options.items() if name in takes})
    found = {name: answer[place] for name, place in places.items() if place < len(answer)}
    return {name: values for name, values in found.items() if values is not None}


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


def rescaled(scheduler: Scheduler | SigmaScheduler, rescale_timesteps: bool) -> Scheduler:
    """The scheduler with that choice; an `OptionError` for one without timesteps."""
    if not isinstance(scheduler, Scheduler):
        raise OptionError("rescale_timesteps does not apply to this network: it is not called with a timestep")
    return replace(scheduler, rescale_timesteps=rescale_timesteps)


def read_embeddings(given: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Embeddings as given, or from a file."""
    if given is None or isinstance(given, Mapping):
        return given
    if Path(given).suffix != ".safetensors":
        raise OptionError(f"`embeddings` is a mapping or a .safetensors file, got {given}", options=EMBEDDINGS)
    return weights.read_tensors(Path(given))


def from_path(path: Path, wanted: Wanted) -> Network:
    """The network in a diffusers folder or an OpenAI checkpoint."""
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
    pipeline = folder.parent if folder.name in NETWORKS else folder
    components = components_in(pipeline)
    _check_components(str(pipeline), components)
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
    homes = [folder / "scheduler", folder, *([pipeline / "scheduler"] if folder.name in NETWORKS else [])]
    path = next((home / SCHEDULER for home in homes if (home / SCHEDULER).is_file()), None)
    found = {**read_json(path), **extras.get("scheduler", {})} if path is not None else None
    where = f"{folder} has no {SCHEDULER}" if path is None else str(path)
    scheduler = _read_scheduler(found, where, wanted.config)
    files = weight_files(model, wanted.variant)
    if kind == "UNet2DModel":
        net: Any = weights.build_net(values, patches)
        tensors = weights.read_all(files)
        check_shapes(" and ".join(map(str, files)), tensors, {n: tuple(p.shape) for n, p in net.state_dict().items()})
        net = weights.place(net, tensors)
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
        raise OptionError(f"`prompt` was given, but a {kind} is not conditioned on text", options=("prompt",))
    encode = needs and wanted.embeddings is None
    embeddings = _encode_prompt(pipeline, kind, wanted) if encode else wanted.embeddings or {}
    trained_on, family = read_trained_on(folder), extras.get("family", "diffusers")
    return Network(net, scheduler, sha256(*files), family, patches, trained_on, autoencoder, embeddings)


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


def _pretrained(folder: Path, kind: str, wanted: Wanted) -> Any:
    """The diffusers model in `folder`, whole: a missing tensor is an error, not a random one."""
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
    index = pipeline / "model_index.json"
    listed = read_json(index) if index.is_file() else {}
    texts = [name for name in listed if TEXT_PARTS.fullmatch(name) and listed[name][:1] != [None]]
    missing = [name for name in texts if not (pipeline / name).is_dir()]
    if not texts or missing:
        what = f"{', '.join(missing)} missing in {pipeline}" if missing else f"no text encoder in {pipeline}"
        raise InputError(
            f"a {kind} is conditioned on text: {what}; download it too, or give `embeddings`", options=EMBEDDINGS
        )
    if any(listed[name][0] != "transformers" for name in texts):
        raise BackboneError(f"{index} names code of its own, which is not run; give `embeddings`", options=EMBEDDINGS)
    needed = "a prompt needs transformers: pip install 'gepc[text]'; or give `embeddings`"
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise OptionError(needed, options=EMBEDDINGS) from error
    others = {name: None for name, value in listed.items() if isinstance(value, list) and name not in texts}
    try:
        encoders = diffusers.DiffusionPipeline.from_pretrained(
            pipeline,
            variant=wanted.variant,
            use_safetensors=wanted.use_safetensors or None,
            local_files_only=True,
            **others,
        )
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        reason = f"its text encoders cannot be loaded: {first_line(error)}"
        raise BackboneError(f"{pipeline}: {reason}; give `embeddings`", options=EMBEDDINGS) from error
    return encoded_prompt(encoders, wanted.prompt or "", kind)


def from_object(source: Any, scheduler: Any, vae: Any, wanted: Wanted) -> Network:
    """A copy of a network in memory: the caller may go on training or moving the original."""
    net, name, embeddings = source, type(source).__name__, wanted.embeddings
    if isinstance(source, diffusers.DiffusionPipeline):
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
    needs = find_class(type(net).__name__, "this object is").needs
    found = getattr(scheduler, "config", None)
    if scheduler is not None and not isinstance(found, Mapping):
        raise OptionError(f"scheduler must be a diffusers scheduler, got a {type(scheduler).__name__}")
    if found is not None:
        found = {"_class_name": type(scheduler).__name__, **found}
    meaning = _read_scheduler(found, "no scheduler was given" if found is None else "the scheduler", wanted.config)
    if embeddings is None and needs and isinstance(source, diffusers.DiffusionPipeline):
        embeddings = encoded_prompt(source, wanted.prompt or "", type(net).__name__)
    elif wanted.prompt is not None and embeddings is None:
        raise OptionError("`prompt` needs a pipeline with a text encoder", options=("prompt",))
    digest = weights.digest_of(net) if vae is None else weights.digest_of(net, vae)
    copies = [None if part is None else deepcopy(part).requires_grad_(False) for part in (net, vae)]
    return Network(copies[0], meaning, digest, autoencoder=copies[1], embeddings=embeddings or {})


def components_in(folder: Path) -> set[str]:
    """The components of a pipeline folder, by its index and by the names of its folders."""
    listed = read_json(folder / "model_index.json") if (folder / "model_index.json").is_file() else {}
    names = (*NETWORKS, *AUTOENCODERS, "movq", "prior", "image_encoder", "text_encoder")
    found = {name for name in names if (folder / name / "config.json").is_file()}
    return found | {name for name, value in listed.items() if isinstance(value, list) and value[:1] not in ([], [None])}


def _check_components(what: str, names: Iterable[str]) -> None:
    known = {*NETWORKS, *AUTOENCODERS, *_UNUSED}
    others = sorted(name for name in names if name not in known and not TEXT_PARTS.fullmatch(name))
    if others:
        raise BackboneError(
            f"{what} is a pipeline with {', '.join(others)}, which gepc does not know: load its network as an object "
            "(load_backbone(unet, scheduler=..., vae=...)), or use Backbone.from_callable and with_encoder"
        )


def _read_scheduler(
    found: Mapping[str, Any] | None, where: str, config: str | Mapping[str, Any] | None
) -> Scheduler | SigmaScheduler:
    """The scheduler that was found, with fields replaced by `config`, or made of `config` alone."""
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

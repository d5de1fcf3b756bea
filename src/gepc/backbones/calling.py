"""The network classes of diffusers: how each of them is called, what it is conditioned on, and prompts."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import torch
from torch.nn import functional

from gepc.backbones.weights import read_tensors
from gepc.core.errors import BackboneError, InputError, OptionError, check_names, raising
from gepc.core.files import read_json

TEXT_PARTS = re.compile(r"(text_encoder|tokenizer)(_\d)?|bert")
PROMPT, POOLED, MASK = "prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask"
# the arguments of a network's `forward` -> the embeddings that they take
ARGUMENTS = {"encoder_hidden_states": PROMPT, "encoder_attention_mask": MASK, "pooled_projections": POOLED}
DIT = ("DiTTransformer2DModel", "Transformer2DModel")
Embeddings = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Conditions:
    """What a batch is conditioned on: a class per image, embeddings per image, and the images' (height, width)."""

    labels: torch.Tensor | None
    embeddings: Embeddings
    size: tuple[int, int]


Call = Callable[..., Any]


def _plain(net: Any, y: torch.Tensor, time: torch.Tensor, given: Conditions, **added: Any) -> Any:
    """Call a network with the conditions that its class takes."""
    conditions = {"class_labels": given.labels}
    conditions |= {argument: given.embeddings.get(name) for argument, name in ARGUMENTS.items()}
    takes = inspect.signature(type(net).forward).parameters
    accepted = {name: value for name, value in conditions.items() if name in takes}
    return net(y, timestep=time, return_dict=False, **accepted, **added)


def _conditional_unet(net: Any, y: torch.Tensor, time: torch.Tensor, given: Conditions) -> Any:
    added = None
    if net.config.addition_embed_type == "text_time":  # original size, corner of the crop, size: a whole image
        sizes = y.new_tensor([[*given.size, 0, 0, *given.size]]).expand(len(y), -1)
        added = {"text_embeds": given.embeddings[POOLED], "time_ids": sizes}
    return _plain(net, y, time, given, added_cond_kwargs=added)


def _pixart(net: Any, y: torch.Tensor, time: torch.Tensor, given: Conditions) -> Any:
    added: dict[str, Any] = {"resolution": None, "aspect_ratio": None}
    if net.use_additional_conditions:
        values = {"resolution": given.size, "aspect_ratio": (given.size[0] / given.size[1],)}
        added = {name: y.new_tensor([value]).expand(len(y), -1) for name, value in values.items()}
    return _plain(net, y, time, given, added_cond_kwargs=added)


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
    "UNet2DModel": NetworkClass(_plain),
    "UNet2DConditionModel": NetworkClass(_conditional_unet, (PROMPT,), {PROMPT: 0, POOLED: 2}),
    "DiTTransformer2DModel": NetworkClass(_plain),
    "Transformer2DModel": NetworkClass(_plain),
    "PixArtTransformer2DModel": NetworkClass(_pixart, (PROMPT,), {PROMPT: 0, MASK: 1}),
    "SanaTransformer2DModel": NetworkClass(_plain, (PROMPT,), {PROMPT: 0, MASK: 1}),
    "SD3Transformer2DModel": NetworkClass(_plain, (PROMPT, POOLED), {PROMPT: 0, POOLED: 2}),
    "FluxTransformer2DModel": NetworkClass(_flux, (PROMPT, POOLED), {PROMPT: 0, POOLED: 1}, cells=2),
}


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
        needed = f"load a whole pipeline with its text encoder, or give `embeddings` with {', '.join(missing)}"
        raise OptionError(f"this {type(net).__name__} is conditioned on text: {needed}", options=("embeddings",))
    for name, values in embeddings.items():
        if len(values) != 1 or values.ndim != {PROMPT: 3}.get(name, 2):
            wanted = "(1, tokens, width)" if name == PROMPT else "(1, length)"
            raise OptionError(f"embeddings: {name} must be {wanted}, got {tuple(values.shape)}")


def null_class(net: Any) -> int | None:
    """The null class of a transformer that is conditioned on a class, the one after its classes; None otherwise."""
    is_dit = type(net).__name__ in DIT and net.config.num_embeds_ada_norm
    return int(net.config.num_embeds_ada_norm) if is_dit else None


def read_embeddings(given: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return embeddings as they are given, or read them from a file."""
    if given is None or isinstance(given, Mapping):
        return given
    if Path(given).suffix != ".safetensors":
        raise OptionError(f"`embeddings` is a mapping or a .safetensors file, got {given}", options=("embeddings",))
    return read_tensors(Path(given))


def encode_in_folder(folder: Path, kind: str, prompt: str, variant: str | None) -> dict[str, torch.Tensor]:
    """Encode the prompt with the text encoders of a pipeline folder, which are not kept in memory.

    `kind` is the class of the network that takes the embeddings.
    """
    index = folder / "model_index.json"
    listed = read_json(index) if index.is_file() else {}
    texts = [name for name in listed if TEXT_PARTS.fullmatch(name) and listed[name][:1] != [None]]
    if not texts or not all((folder / name).is_dir() for name in texts):
        reason = f"a {kind} is conditioned on text, and {folder} has no text encoder with its tokenizer"
        raise InputError(f"{reason}; download them too, or give `embeddings`", options=("embeddings",))
    if any(listed[name][0] != "transformers" for name in texts):
        raise BackboneError(f"{index} names code, which is not run; give `embeddings`", options=("embeddings",))
    needed = "a prompt needs transformers: pip install 'gepc[text]'; or give `embeddings`"
    with raising(OptionError, needed, ImportError):
        import transformers
    others = {name: None for name, value in listed.items() if isinstance(value, list) and name not in texts}
    reason = f"{folder}: its text encoders cannot be loaded: {{line}}; give `embeddings`"
    causes = (OSError, ValueError, RuntimeError, TypeError, AttributeError)
    failing = raising(BackboneError, reason, *causes, options=("embeddings",))
    with failing, without_progress_bars(diffusers, transformers):
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, variant=variant, local_files_only=True, **others)
    return encode_prompt(pipeline, prompt, kind)


def encode_prompt(pipeline: Any, prompt: str, kind: str) -> dict[str, torch.Tensor]:
    """The embeddings of `prompt` by the text encoders of a diffusers pipeline with a network of class `kind`."""
    encode = getattr(pipeline, "encode_prompt", None)
    positions = CLASSES[kind].prompt
    if encode is None or positions is None:
        given = f"the {type(pipeline).__name__} encodes no prompt for a {kind}"
        raise OptionError(f"{given}; give `embeddings`", options=("embeddings",))
    parameters = inspect.signature(encode).parameters
    options: dict[str, Any] = {name: None for name, value in parameters.items() if value.default is value.empty}
    options |= {"num_images_per_prompt": 1, "do_classifier_free_guidance": False, "device": torch.device("cpu")}
    options |= {"prompt": prompt, "prompt_2": prompt, "prompt_3": prompt}
    for name, tokenizer in pipeline.components.items():  # a prompt is padded to the length of the tokenizer
        encoder = pipeline.components.get(name.replace("tokenizer", "text_encoder"))
        length = getattr(getattr(encoder, "config", None), "max_position_embeddings", None)
        if name.startswith("tokenizer") and length is not None and tokenizer.model_max_length > length:
            tokenizer.model_max_length = length
    unlimited = "a tokenizer of this pipeline has no `model_max_length`; set it, or give `embeddings`"
    with torch.no_grad(), raising(BackboneError, unlimited, OverflowError):
        answer: Sequence[Any] = encode(**{name: value for name, value in options.items() if name in parameters})
    embeddings = {name: answer[position] for name, position in positions.items() if position < len(answer)}
    return {name: values for name, values in embeddings.items() if values is not None}


@contextmanager
def without_progress_bars(*libraries: ModuleType) -> Iterator[None]:
    """Switch off the progress bars of diffusers or transformers in the block."""
    loggers = [library.utils.logging for library in libraries]
    shown = [logger for logger in loggers if logger.is_progress_bar_enabled()]
    for logger in shown:
        logger.disable_progress_bar()
    try:
        yield
    finally:
        for logger in shown:
            logger.enable_progress_bar()

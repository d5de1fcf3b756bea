"""The network classes of diffusers: how each of them is called, and what it is conditioned on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from gepc.core.errors import BackboneError, OptionError, check_names

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
            options=("embeddings",),
        )
    for name, values in embeddings.items():
        if len(values) != 1 or values.ndim != {PROMPT: 3}.get(name, 2):
            wanted = "(1, tokens, width)" if name == PROMPT else "(1, length)"
            raise OptionError(f"embeddings: {name} must be {wanted}, got {tuple(values.shape)}")


def null_class(net: Any) -> int | None:
    """The null class of a transformer that is conditioned on a class, the one after its classes; None otherwise."""
    is_dit = type(net).__name__ in DIT and net.config.num_embeds_ada_norm
    return int(net.config.num_embeds_ada_norm) if is_dit else None

"""Prompts: the embeddings of a text, by the text encoders of a diffusers pipeline or from a file."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import torch

from gepc.backbones.calling import CLASSES
from gepc.backbones.weights import read_tensors
from gepc.core.errors import BackboneError, InputError, OptionError, first_line, raising
from gepc.core.files import read_json

TEXT_PARTS = re.compile(r"(text_encoder|tokenizer)(_\d)?|bert")


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
    missing = [name for name in texts if not (folder / name).is_dir()]
    if not texts or missing:
        what = f"{', '.join(missing)} missing in {folder}" if missing else f"no text encoder in {folder}"
        raise InputError(
            f"a {kind} is conditioned on text: {what}; download it too, or give `embeddings`", options=("embeddings",)
        )
    if any(listed[name][0] != "transformers" for name in texts):
        raise BackboneError(
            f"{index} names code of its own, which is not run; give `embeddings`", options=("embeddings",)
        )
    needed = "a prompt needs transformers: pip install 'gepc[text]'; or give `embeddings`"
    with raising(OptionError, needed, ImportError):
        import transformers
    others = {name: None for name, value in listed.items() if isinstance(value, list) and name not in texts}
    try:
        with without_progress_bars(diffusers, transformers):
            pipeline = diffusers.DiffusionPipeline.from_pretrained(
                folder, variant=variant, local_files_only=True, **others
            )
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        reason = f"its text encoders cannot be loaded: {first_line(error)}"
        raise BackboneError(f"{folder}: {reason}; give `embeddings`", options=("embeddings",)) from error
    return encode_prompt(pipeline, prompt, kind)


def encode_prompt(pipeline: Any, prompt: str, kind: str) -> dict[str, torch.Tensor]:
    """The embeddings of `prompt` by the text encoders of a diffusers pipeline with a network of class `kind`."""
    encode = getattr(pipeline, "encode_prompt", None)
    positions = CLASSES[kind].prompt
    if encode is None or positions is None:
        raise OptionError(
            f"the {type(pipeline).__name__} encodes no prompt for a {kind}; give `embeddings`", options=("embeddings",)
        )
    parameters = inspect.signature(encode).parameters
    options: dict[str, Any] = {name: None for name, value in parameters.items() if value.default is value.empty}
    options |= {"num_images_per_prompt": 1, "do_classifier_free_guidance": False, "device": torch.device("cpu")}
    options |= {"prompt": prompt, "prompt_2": prompt, "prompt_3": prompt}
    # pipelines pad a prompt to the tokenizer's length, and one that does not know it asks for 10^30 tokens
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

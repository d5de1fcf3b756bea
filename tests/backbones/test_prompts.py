"""Prompts, end to end: pipelines with two and three text encoders, from folders and from objects in memory."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gepc
from gepc.backbones.calling import encode_prompt
from gepc.core.errors import BackboneError
from gepc.detector.registry import create_detector
from tests.families import SIDE, TOKENS, WIDTH, make, text_encoder

pytest.importorskip("transformers", reason="text encoders are transformers models")

pytestmark = pytest.mark.usefixtures("trusted")


def numbered(number: int, folder: Path, width: int = WIDTH, projection: int | None = None) -> dict[str, Any]:
    """A tiny CLIP encoder as the pipeline's encoder of that number."""
    suffix = "" if number == 1 else f"_{number}"
    found = text_encoder(folder / f"clip{number}", width, projection)
    return {f"{name}{suffix}": part for name, part in found.items()}


def t5() -> tuple[Any, Any]:
    """A tiny T5 encoder and its tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import Unigram
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    words = ["<pad>", "</s>", "<unk>", *(chr(code) for code in range(97, 123)), " "]
    tokens = Tokenizer(Unigram([(word, -float(place)) for place, word in enumerate(words)], unk_id=2))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=TOKENS
    )
    config = T5Config(vocab_size=len(words), d_model=WIDTH, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    return T5EncoderModel(config).eval(), tokenizer


def parts(folder: Path, network: str) -> dict[str, Any]:
    """Network, autoencoder and scheduler of a family, as its pipeline takes them."""
    import diffusers

    found = {}
    for name in (network, "vae", "scheduler"):
        index = json.loads((folder / "model_index.json").read_text())
        found[name] = getattr(diffusers, index[name][1]).from_pretrained(folder / name)
    return found


def stable_diffusion_xl(home: Path) -> Any:
    from diffusers import StableDiffusionXLPipeline

    make("Stable Diffusion XL", home / "net")
    texts = numbered(1, home, WIDTH // 2) | numbered(2, home, WIDTH // 2, projection=WIDTH)
    return StableDiffusionXLPipeline(**parts(home / "net", "unet"), **texts, add_watermarker=False)


def stable_diffusion_3(home: Path) -> Any:
    from diffusers import StableDiffusion3Pipeline

    make("SD3", home / "net")
    half = WIDTH // 2
    texts = numbered(1, home, half, projection=half) | numbered(2, home, half, projection=half)
    encoder, tokenizer = t5()
    net = parts(home / "net", "transformer")
    return StableDiffusion3Pipeline(**net, **texts, text_encoder_3=encoder, tokenizer_3=tokenizer)


def flux(home: Path) -> Any:
    from diffusers import FluxPipeline

    make("Flux", home / "net")
    encoder, tokenizer = t5()
    net = parts(home / "net", "transformer")
    return FluxPipeline(**net, **numbered(1, home), text_encoder_2=encoder, tokenizer_2=tokenizer)


def pixart(home: Path) -> Any:
    from diffusers import PixArtAlphaPipeline

    make("PixArt", home / "net")
    encoder, tokenizer = t5()
    return PixArtAlphaPipeline(**parts(home / "net", "transformer"), text_encoder=encoder, tokenizer=tokenizer)


PIPELINES = {
    "Stable Diffusion XL": (stable_diffusion_xl, {"prompt_embeds": 0, "pooled_prompt_embeds": 2}),
    "SD3": (stable_diffusion_3, {"prompt_embeds": 0, "pooled_prompt_embeds": 2}),
    "Flux": (flux, {"prompt_embeds": 0, "pooled_prompt_embeds": 1}),
    "PixArt": (pixart, {"prompt_embeds": 0, "prompt_attention_mask": 1}),
}


@pytest.mark.parametrize("family", PIPELINES)
def test_a_prompt_is_encoded_by_all_text_encoders_and_stored(family: str, tmp_path: Path) -> None:
    build, places = PIPELINES[family]
    torch.manual_seed(0)
    pipeline = build(tmp_path)
    folder = tmp_path / "whole"
    pipeline.save_pretrained(folder)
    takes = inspect.signature(pipeline.encode_prompt).parameters
    given = {"prompt": "ab", "prompt_2": "ab", "prompt_3": "ab", "do_classifier_free_guidance": False, "device": "cpu"}
    with torch.no_grad():
        answer = pipeline.encode_prompt(**{name: value for name, value in given.items() if name in takes})

    from_folder = gepc.load_backbone(folder, prompt="ab", device="cpu")
    from_object = gepc.load_backbone(pipeline, prompt="ab", device="cpu")
    for backbone in (from_folder, from_object):
        assert set(backbone.conditioning) == set(places)
        for name, place in places.items():
            np.testing.assert_allclose(backbone.conditioning[name], answer[place].numpy(), rtol=1e-4, atol=1e-5)
    assert gepc.load_backbone(folder, prompt="zz", device="cpu").fingerprint != from_folder.fingerprint

    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (24, 3, SIDE, SIDE)).astype(np.float32)
    detector = create_detector(from_folder, "gepc+", "single", size=SIDE, maps="raw").fit(images)
    detector.save(tmp_path / "detector")
    for part in folder.glob("t*er*"):
        if part.name.startswith(("text_encoder", "tokenizer")):
            shutil.rmtree(part)
    again = gepc.load_detector(tmp_path / "detector", trust=True)
    np.testing.assert_allclose(again.score(images[:3]), detector.score(images[:3]), rtol=1e-6)


def test_loading_prints_no_progress_bars(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The bars of diffusers and transformers are off while a pipeline is loaded, and on again after it."""
    import diffusers
    import transformers

    loggers = diffusers.utils.logging, transformers.utils.logging
    for logger in loggers:
        logger.enable_progress_bar()
    stable_diffusion_xl(tmp_path).save_pretrained(tmp_path / "whole")
    capfd.readouterr()
    gepc.load_backbone(tmp_path / "whole", prompt="ab", device="cpu")
    assert capfd.readouterr().err == ""
    assert all(logger.is_progress_bar_enabled() for logger in loggers)


def test_a_tokenizer_without_a_length_takes_that_of_its_text_encoder(tmp_path: Path) -> None:
    """A pipeline pads the prompt to the tokenizer's length, which is 10^30 where the tokenizer does not know it."""
    pipeline = stable_diffusion_xl(tmp_path)
    expected = gepc.load_backbone(pipeline, prompt="ab", device="cpu")
    pipeline.tokenizer.model_max_length = int(1e30)
    found = gepc.load_backbone(pipeline, prompt="ab", device="cpu")
    assert found.fingerprint == expected.fingerprint


def test_a_tokenizer_without_any_length_is_refused_with_a_remedy(tmp_path: Path) -> None:
    pipeline = stable_diffusion_xl(tmp_path)
    pipeline.tokenizer.model_max_length = pipeline.text_encoder.config.max_position_embeddings = int(1e30)
    with pytest.raises(BackboneError, match="has no `model_max_length`; set it, or give `embeddings`"):
        encode_prompt(pipeline, "ab", "UNet2DConditionModel")

"""Every family of networks, from the folder that its users have: loaded, scored, saved, served."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, LATENT, SIDE, TOKENS, WIDTH, embeddings, make, text_encoder
from toys import BRIEF, pictures

import gepc
from gepc.core.errors import BackboneError, InputError, OptionError
from gepc.methods.base import methods

pytestmark = pytest.mark.usefixtures("trusted")

every_family = pytest.mark.parametrize("family", list(FAMILIES))
ID = {channels: pictures(24, SIDE, channels) for channels in (3, 5)}
NEW = {channels: pictures(4, SIDE, channels, seed=1, contrast=0.9) for channels in (3, 5)}
Load = Callable[[str], gepc.Backbone]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def load(home: Path) -> Load:
    """Load a family's folder, made when first asked for."""

    def loaded(family: str) -> gepc.Backbone:
        folder = home / family.replace(" ", "-")
        return gepc.load_backbone(folder, device="cpu", **make(family, folder))

    return functools.cache(loaded)


def detector_of(backbone: gepc.Backbone, **options: Any) -> gepc.Detector:
    given = {"levels": (0.99, 0.9), "keep": None, "size": SIDE, **options}
    return gepc.create_detector(backbone, "gepc+", **given).fit(ID[backbone.channels])


# --- every method on every family ------------------------------------------------------------------------------------

CHEAP = {**BRIEF, "gepc": {"levels": (0.99, 0.9)}, "msma": {"levels": (0.99, 0.9)}}


@every_family
def test_every_method_runs_or_says_why_not(family: str, load: Load) -> None:
    """With finite features and the passes that it states, those of the encoder included."""
    backbone = load(family)
    for method, kind in methods().items():
        options = {"size": SIDE, **CHEAP.get(method, {})}
        if kind.needs not in (None, backbone.gives):
            with pytest.raises(OptionError, match=f"'{method}' needs a network that gives {kind.needs}"):
                gepc.create_detector(backbone, method, **options)
            continue
        if family in LATENT and kind.pixels_only:
            with pytest.raises(OptionError, match=f"'{method}' does not run on a latent backbone: {kind.pixels_only}"):
                gepc.create_detector(backbone, method, **options)
            continue
        detector = gepc.create_detector(backbone, method, **options)
        backbone.reset_counts()
        if method == "encoder" and backbone.channels not in (1, 3):
            with pytest.raises(InputError, match=f"images have {backbone.channels} channels, the encoder takes 3"):
                detector.features(NEW[backbone.channels][:2])
            continue
        table = detector.features(NEW[backbone.channels][:2])
        cost = detector.fit_cost()
        assert backbone.counts == (2 * cost.forward, 2 * cost.jvp, 2 * cost.encoder), method
        assert all(np.isfinite(values).all() for values in table.values()), method


# --- what the network sees, computed without gepc --------------------------------------------------------------------


@every_family
def test_scores_p_values_maps_and_costs(family: str, load: Load) -> None:
    backbone = load(family)
    backbone.reset_counts()
    detector = detector_of(backbone)
    images = NEW[backbone.channels]
    assert backbone.encoder_count == (24 + detector.map_images(16, 8) if family in LATENT else 0)
    scores = detector.score(images)
    assert np.isfinite(scores).all()
    assert len(np.unique(scores)) == 4
    assert ((detector.p_value(images) > 0) & (detector.p_value(images) <= 1)).all()
    maps = detector.score_map(images)
    assert maps.shape == (4, SIDE, SIDE)
    assert np.isfinite(maps).all()
    assert str(detector.cost()) == ("4F+0J+1E" if family in LATENT else "4F+0J")
    alone = np.concatenate([detector.score(images[i : i + 1]) for i in range(4)])
    np.testing.assert_allclose(alone, scores, rtol=1e-3)


@every_family
def test_activations_are_recorded(family: str, load: Load) -> None:
    backbone = load(family)
    x = backbone.encode(torch.from_numpy(NEW[backbone.channels]))
    eps, layers = backbone.eps_and_activations(x, 3)
    torch.testing.assert_close(eps, backbone.eps(x, 3))
    assert layers
    assert all(values.ndim == 4 and len(values) == 4 for values in layers.values())


@every_family
def test_derivatives(family: str, load: Load) -> None:
    """Forward mode agrees with a central difference, through attention too."""
    options = {"dtype": "float64", "device": "cpu", "embeddings": load(family).conditioning or None}
    backbone = gepc.load_backbone(str(load(family).source), **options)
    x = backbone.encode(torch.from_numpy(NEW[backbone.channels]).double())
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    t = backbone.n_steps // 3
    _, tangent = backbone.jvp(x, t, v)
    step = 1e-4
    difference = (backbone.eps(x + step * v, t) - backbone.eps(x - step * v, t)) / (2 * step)
    torch.testing.assert_close(tangent, difference, rtol=1e-3, atol=2e-3 * float(difference.std()))


@pytest.mark.parametrize("family", LATENT)
def test_latents_are_those_of_diffusers(family: str, load: Load, home: Path) -> None:
    """scaling_factor * (mode - shift_factor), by diffusers' own autoencoder."""
    import diffusers

    folder = load(family).source
    path = next(Path(str(folder)) / name for name in ("vae", "vqvae") if (Path(str(folder)) / name).is_dir())
    config = json.loads((path / "config.json").read_text())
    vae = getattr(diffusers, config["_class_name"]).from_pretrained(path).eval()
    images = torch.from_numpy(NEW[3])
    with torch.no_grad():
        answer = vae.encode(images)
    latents = answer.latent_dist.mode() if hasattr(answer, "latent_dist") else answer[0]
    expected = vae.config.scaling_factor * (latents - (vae.config.get("shift_factor") or 0.0))
    torch.testing.assert_close(load(family).encode(images), expected, rtol=1e-4, atol=1e-5)


def test_flux_is_packed_as_its_pipeline_packs_it(load: Load) -> None:
    pytest.importorskip("transformers", reason="FluxPipeline imports transformers")
    from diffusers import FluxPipeline

    backbone: Any = load("Flux")
    latents = torch.randn(2, 16, 4, 6, generator=torch.Generator().manual_seed(0))
    seen: dict[str, Any] = {}
    hook = backbone.net.register_forward_pre_hook(
        lambda _, inputs, options: seen.update(options, tokens=inputs[0]), with_kwargs=True
    )
    try:
        eps = backbone.eps(latents, 499)
    finally:
        hook.remove()
    s = 0.5  # index 499 of 1000
    y = latents * np.hypot(1 - s, s)
    torch.testing.assert_close(seen["tokens"], FluxPipeline._pack_latents(y, 2, 16, 4, 6))
    ids = FluxPipeline._prepare_latent_image_ids(2, 2, 3, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(seen["img_ids"], ids)
    torch.testing.assert_close(seen["timestep"], torch.full((2,), s))
    with torch.no_grad():
        answer = backbone.net(seen.pop("tokens"), **seen)[0]
    velocity = FluxPipeline._unpack_latents(answer, 4 * 2, 6 * 2, 2)
    torch.testing.assert_close(eps, y + (1 - s) * velocity, rtol=1e-4, atol=1e-5)


def test_edm_is_what_its_scheduler_says(load: Load) -> None:
    from diffusers import EDMEulerScheduler

    backbone: Any = load("EDM")
    scheduler = EDMEulerScheduler(num_train_timesteps=100)
    scheduler.set_timesteps(100)
    sigma = scheduler.sigmas[:-1].flip(0)[40]
    y = torch.from_numpy(NEW[3]) * 2
    with torch.no_grad():
        answer = backbone.net(scheduler.precondition_inputs(y, sigma), scheduler.precondition_noise(sigma))[0]
    expected = (y - scheduler.precondition_outputs(y, answer, sigma)) / sigma
    torch.testing.assert_close(backbone.eps(y / (1 + sigma**2).sqrt(), 40), expected, rtol=1e-3, atol=1e-4)


# --- conditioning ----------------------------------------------------------------------------------------------------


def test_a_dit_is_asked_for_the_null_class(load: Load) -> None:
    backbone, x = load("DiT"), torch.randn(2, 4, 4, 4)
    assert backbone.describe()["class_label"] == 10
    named = gepc.load_backbone(str(backbone.source), class_label=3, device="cpu")
    assert not torch.allclose(named.eps(x, 5), backbone.eps(x, 5))
    assert named.fingerprint != backbone.fingerprint
    with pytest.raises(OptionError, match="class_label 11 does not exist: this net knows 0 to 9"):
        gepc.load_backbone(str(backbone.source), class_label=11)


def test_embeddings_change_the_prediction_and_the_fingerprint(load: Load) -> None:
    backbone, x = load("Stable Diffusion"), torch.randn(2, 4, 4, 4)
    other = {"prompt_embeds": -embeddings("prompt_embeds")["prompt_embeds"]}
    again = gepc.load_backbone(str(backbone.source), embeddings=other, device="cpu")
    assert not torch.allclose(again.eps(x, 5), backbone.eps(x, 5))
    assert again.fingerprint != backbone.fingerprint


def test_the_size_of_the_image_is_told_to_stable_diffusion_xl(load: Load) -> None:
    backbone: Any = load("Stable Diffusion XL")
    seen: list[torch.Tensor] = []
    hook = backbone.net.register_forward_pre_hook(
        lambda _, inputs, options: seen.append(options["added_cond_kwargs"]["time_ids"]), with_kwargs=True
    )
    try:
        backbone.eps(torch.zeros(2, 4, 4, 4), 5)
    finally:
        hook.remove()
    assert seen[0].tolist() == [[16, 16, 0, 0, 16, 16]] * 2


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("Stable Diffusion", {}, "conditioned on text, and .* has no text encoder"),
        ("Stable Diffusion XL", embeddings("prompt_embeds"), "`embeddings` with pooled_prompt_embeds"),
        ("Stable Diffusion", {"prompt_embeds": np.zeros((2, 5, 8))}, r"must be \(1, tokens, width\), got \(2, 5, 8\)"),
        ("Stable Diffusion", {"prompt_embed": np.zeros((1, 5, 8))}, "did you mean 'prompt_embeds'"),
        ("DiT", embeddings("prompt_embeds"), "DiTTransformer2DModel is not conditioned on text"),
    ],
)
def test_embeddings_that_do_not_fit(family: str, given: dict[str, Any], message: str, load: Load) -> None:
    with pytest.raises((OptionError, InputError), match=message):
        gepc.load_backbone(str(load(family).source), embeddings=given or None, device="cpu")


def test_a_prompt_for_a_network_that_takes_none(load: Load) -> None:
    with pytest.raises(OptionError, match="`prompt` was given, but a UNet2DModel is not conditioned on text"):
        gepc.load_backbone(str(load("LDM").source), prompt="a cat")
    with pytest.raises(OptionError, match="`act_on` is for latent backbones"):
        gepc.load_backbone(str(load("pixels").source), act_on="pixels")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Any:
    """A whole Stable Diffusion pipeline with its text encoder."""
    pytest.importorskip("transformers", reason="the text encoder is a transformers model")
    from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    make("Stable Diffusion", home / "parts")
    return StableDiffusionPipeline(
        unet=UNet2DConditionModel.from_pretrained(home / "parts" / "unet"),
        vae=AutoencoderKL.from_pretrained(home / "parts" / "vae"),
        scheduler=PNDMScheduler.from_pretrained(home / "parts" / "scheduler"),
        **text_encoder(home / "tokenizer"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def test_a_prompt_is_encoded_once_and_stored_with_the_detector(pipeline: Any, home: Path) -> None:
    """By the folder and by the object; the saved detector needs no text encoder."""
    import shutil

    folder = home / "whole"
    pipeline.save_pretrained(folder)
    with torch.no_grad():
        tokens = pipeline.tokenizer("ab", padding="max_length", max_length=TOKENS, return_tensors="pt")
        expected = pipeline.text_encoder(tokens.input_ids)[0].numpy()
    from_folder = gepc.load_backbone(folder, prompt="ab", device="cpu")
    from_object = gepc.load_backbone(pipeline, prompt="ab", device="cpu")
    for backbone in (from_folder, from_object):
        assert backbone.conditioning["prompt_embeds"].shape == (1, TOKENS, WIDTH)
        np.testing.assert_allclose(backbone.conditioning["prompt_embeds"], expected, rtol=1e-5, atol=1e-6)
    assert from_folder.fingerprint == from_object.fingerprint
    assert gepc.load_backbone(folder, device="cpu").fingerprint != from_folder.fingerprint

    detector = detector_of(from_folder)
    detector.save(home / "prompted")
    for part in ("text_encoder", "tokenizer"):
        shutil.rmtree(folder / part)
    again = gepc.load_detector(home / "prompted")
    np.testing.assert_allclose(again.score(NEW[3]), detector.score(NEW[3]), rtol=1e-6)
    assert again.backbone.load_options["prompt"] == "ab"
    with pytest.raises(InputError, match=r"has no text encoder with its tokenizer; download them too, or give"):
        gepc.load_backbone(folder)


def test_code_in_a_pipeline_folder_is_not_run(pipeline: Any, tmp_path: Path) -> None:
    pipeline.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    (tmp_path / "own.py").write_text("raise AssertionError('this code was run')")
    (tmp_path / "text_encoder" / "own.py").write_text("raise AssertionError('this code was run')")
    for name, message in (("_class_name", "which gepc does not know"), ("text_encoder", "code, which is not run")):
        (tmp_path / "model_index.json").write_text(json.dumps({**index, name: ["own", "Own"]}))
        with pytest.raises(BackboneError, match=message):
            gepc.load_backbone(tmp_path)
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    config = json.loads((tmp_path / "vae" / "config.json").read_text())
    (tmp_path / "vae" / "config.json").write_text(json.dumps({**config, "_class_name": "DiffusionPipeline"}))
    with pytest.raises(BackboneError, match="DiffusionPipeline, which the installed diffusers does not have"):
        gepc.load_backbone(tmp_path)


# --- objects, variants -----------------------------------------------------------------------------------------------


def test_objects_in_memory_are_the_same_backbones(load: Load) -> None:
    from diffusers import DDIMScheduler, LDMPipeline, UNet2DModel, VQModel

    backbone = load("LDM")
    parts = Path(str(backbone.source))
    unet, vqvae = UNet2DModel.from_pretrained(parts / "unet"), VQModel.from_pretrained(parts / "vqvae")
    scheduler = DDIMScheduler.from_pretrained(parts / "scheduler")
    whole = gepc.load_backbone(LDMPipeline(vqvae, unet, scheduler), device="cpu")
    apart = gepc.load_backbone(unet, scheduler=scheduler, vae=vqvae, device="cpu")
    inside = gepc.load_backbone(parts / "unet", device="cpu")
    assert len({one.fingerprint for one in (backbone, whole, apart, inside)}) == 1
    images = torch.from_numpy(NEW[3])
    torch.testing.assert_close(whole.eps(whole.encode(images), 3), backbone.eps(backbone.encode(images), 3))
    assert hasattr(vqvae.decoder, "conv_in")  # the caller's autoencoder keeps its decoder


def test_an_autoencoder_of_another_network(load: Load) -> None:
    from diffusers import AutoencoderKL, DDIMScheduler, UNet2DModel

    unet = UNet2DModel.from_pretrained(Path(str(load("LDM").source)) / "unet")
    vae = AutoencoderKL.from_pretrained(Path(str(load("DiT").source)) / "vae")
    with pytest.raises(BackboneError, match="AutoencoderKL has 4 latent channels and the network takes 3"):
        gepc.load_backbone(unet, scheduler=DDIMScheduler(), vae=vae)


@pytest.mark.parametrize("index", [True, False])
def test_a_latent_folder_never_loads_as_a_pixel_network(index: bool, tmp_path: Path) -> None:
    """Its unet has as many channels as an image: alone it would give wrong answers without an error."""
    import shutil

    make("LDM", tmp_path / "ldm")
    if not index:
        (tmp_path / "ldm" / "model_index.json").unlink()
    for folder in (tmp_path / "ldm", tmp_path / "ldm" / "unet"):
        assert gepc.load_backbone(folder, device="cpu").encoder is not None
    if index:
        shutil.rmtree(tmp_path / "ldm" / "vqvae")
        for folder in (tmp_path / "ldm", tmp_path / "ldm" / "unet"):
            with pytest.raises(InputError, match=r"vqvae/config.json does not exist"):
                gepc.load_backbone(folder)


def test_weights_that_are_not_whole(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    options = make("DiT", tmp_path)
    path = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    del tensors["encoder.conv_in.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(BackboneError, match=r"do not fit a AutoencoderKL: missing encoder.conv_in.weight"):
        gepc.load_backbone(tmp_path, **options)


def test_half_precision_variants(tmp_path: Path) -> None:
    """`variant="fp16"` reads those files, in any precision."""
    options = make("Stable Diffusion", tmp_path)
    from diffusers import AutoencoderKL, UNet2DConditionModel

    for name, kind in (("unet", UNet2DConditionModel), ("vae", AutoencoderKL)):
        kind.from_pretrained(tmp_path / name).half().save_pretrained(tmp_path / name, variant="fp16")
    plain = gepc.load_backbone(tmp_path, device="cpu", **options)
    half = gepc.load_backbone(tmp_path, variant="fp16", device="cpu", **options)
    assert half.sha256 != plain.sha256
    x = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(half.eps(x, 5), plain.eps(x, 5), rtol=0.05, atol=0.01)
    for name in ("unet", "vae"):
        (tmp_path / name / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"diffusion_pytorch_model.safetensors \(or .bin\), or set `variant`"):
        gepc.load_backbone(tmp_path, **options)
    with pytest.raises(InputError, match=r"expected diffusion_pytorch_model.bf16.safetensors"):
        gepc.load_backbone(tmp_path, variant="bf16", **options)
    low = gepc.load_backbone(tmp_path, variant="fp16", dtype="bfloat16", device="cpu", **options)
    assert low.describe()["encoder"]["precision"] == "bfloat16"
    assert low.encode(torch.from_numpy(NEW[3])).dtype == torch.float32


def test_an_encoder_that_overflows_in_half_precision_stays_in_single(load: Load) -> None:
    from gepc.backbones.base import LatentBackbone
    from gepc.backbones.diffusers import DiffusersBackbone

    backbone = load("Stable Diffusion XL")
    options = {"embeddings": backbone.conditioning, "dtype": "float16", "device": "cpu"}
    try:
        half = gepc.load_backbone(str(backbone.source), **options)
    except OptionError:
        pytest.skip("this processor does not compute in float16")
    assert isinstance(half, LatentBackbone)
    assert isinstance(half.inner, DiffusersBackbone)
    assert (half.describe()["precision"], half.describe()["encoder"]["precision"]) == ("float16", "float32")


# --- saved, in other processes ---------------------------------------------------------------------------------------

FRESH_PROCESS = """
import json, sys, numpy, gepc
home, names = sys.argv[1], sys.argv[2:]
found = {}
for name in names:
    detector = gepc.load_detector(f"{home}/{name}.det")
    images = numpy.load(f"{home}/{detector.backbone.channels}.npy")
    found[name] = detector.score(images).tolist()
print(json.dumps(found))
"""


def test_detectors_of_every_family_in_a_fresh_process(load: Load, home: Path) -> None:
    expected = {}
    for family in FAMILIES:
        name = family.replace(" ", "-")
        backbone = load(family)
        detector = gepc.create_detector(backbone, "msma", levels=(0.97,), size=SIDE).fit(ID[backbone.channels])
        detector.save(home / f"{name}.det")
        expected[name] = detector.score(NEW[detector.backbone.channels])
    for channels, images in NEW.items():
        np.save(home / f"{channels}.npy", images)
    answer = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(home), *expected],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    for name, scores in json.loads(answer.stdout).items():
        np.testing.assert_allclose(scores, expected[name], rtol=1e-4, err_msg=name)

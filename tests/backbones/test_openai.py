"""OpenAI's UNets against a slow, literal re-implementation and against golden answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNet2DModel
from torch import nn

from gepc import load_backbone
from gepc.backbones.diffusers import DiffusersBackbone
from gepc.backbones.openai.convert import convert, save_folder
from gepc.backbones.openai.options import PRESETS, read_options

TOLERANCE = 1e-4  # of the answer's standard deviation, in float32
EXACT = 1e-9  # the same in float64


# the reference: the network as the two papers and their option lists describe it, one loop at a time


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels)


class ResBlock(nn.Module):
    def __init__(self, inward: int, outward: int, time: int, scale_shift: bool, resize: str | None = None) -> None:
        super().__init__()
        self.scale_shift, self.resize = scale_shift, resize
        self.in_layers = nn.Sequential(norm(inward), nn.SiLU(), nn.Conv2d(inward, outward, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(time, outward * (2 if scale_shift else 1)))
        self.out_layers = nn.Sequential(
            norm(outward), nn.SiLU(), nn.Dropout(0.3), nn.Conv2d(outward, outward, 3, padding=1)
        )
        self.skip_connection = nn.Identity() if inward == outward else nn.Conv2d(inward, outward, 1)

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        h = self.in_layers[1](self.in_layers[0](x))
        if self.resize is not None:
            h, x = resized(h, self.resize), resized(x, self.resize)
        h = self.in_layers[2](h)
        e = self.emb_layers(emb)[:, :, None, None]
        if self.scale_shift:
            scale, shift = e[:, : h.shape[1]], e[:, h.shape[1] :]
            h = self.out_layers[0](h) * (1 + scale) + shift
        else:
            h = self.out_layers[0](h + e)
        return self.skip_connection(x) + self.out_layers[3](self.out_layers[2](self.out_layers[1](h)))


def resized(x: torch.Tensor, how: str) -> torch.Tensor:
    if how == "up":
        return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    n, c, h, w = x.shape
    return x.reshape(n, c, h // 2, 2, w // 2, 2).mean((3, 5))


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int, new_order: bool) -> None:
        super().__init__()
        self.heads, self.new_order = heads, new_order
        self.norm = norm(channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        n, c, height, width = x.shape
        flat = x.reshape(n, c, height * width)
        qkv = self.qkv(self.norm(flat))
        d = c // self.heads
        answers = []
        for head in range(self.heads):
            if self.new_order:
                q, k, v = (qkv[:, part * c + head * d : part * c + (head + 1) * d] for part in range(3))
            else:
                q, k, v = (qkv[:, (3 * head + part) * d : (3 * head + part + 1) * d] for part in range(3))
            weights = torch.softmax(q.transpose(1, 2) @ k / math.sqrt(d), dim=-1)
            answers.append(v @ weights.transpose(1, 2))
        return (flat + self.proj_out(torch.cat(answers, 1))).reshape(x.shape)


class Down(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        return self.op(x)


class Up(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        return self.conv(resized(x, "up"))


class First(nn.Conv2d):
    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


DEFAULTS: dict[str, Any] = {
    "image_size": 16,
    "num_channels": 32,
    "num_res_blocks": 1,
    "channel_mult": "1,2",
    "num_heads": 4,
    "num_heads_upsample": -1,
    "num_head_channels": -1,
    "attention_resolutions": "8",
    "class_cond": False,
    "learn_sigma": True,
    "use_scale_shift_norm": True,
    "resblock_updown": False,
    "use_new_attention_order": False,
    "noise_schedule": "cosine",
    "diffusion_steps": 100,
    "rescale_timesteps": True,
}


class Reference(nn.Module):
    def __init__(self, options: dict[str, Any], image_channels: int = 3, classes: int = 5) -> None:  # noqa: C901
        super().__init__()
        o = {**DEFAULTS, **options}
        base, size = o["num_channels"], o["image_size"]
        defaults = {64: (1, 2, 3, 4), 32: (1, 2, 2, 2)}
        mult = [float(m) for m in o["channel_mult"].split(",")] if o["channel_mult"] else defaults[size]
        widths = [int(m * base) for m in mult]
        factors = {size // int(r) for r in o["attention_resolutions"].split(",")}
        time, self.base = 4 * base, base
        heads_up = o["num_heads"] if o["num_heads_upsample"] == -1 else o["num_heads_upsample"]

        def block(inward: int, outward: int, resize: str | None = None) -> ResBlock:
            return ResBlock(inward, outward, time, o["use_scale_shift_norm"], resize)

        def attention(channels: int, heads: int) -> Attention:
            if o["num_head_channels"] != -1:
                heads = channels // o["num_head_channels"]
            return Attention(channels, heads, o["use_new_attention_order"])

        self.time_embed = nn.Sequential(nn.Linear(base, time), nn.SiLU(), nn.Linear(time, time))
        if o["class_cond"]:
            self.label_emb = nn.Embedding(classes, time)
        self.input_blocks = nn.ModuleList([nn.ModuleList([First(image_channels, widths[0], 3, padding=1)])])
        skips, width, factor = [widths[0]], widths[0], 1
        for level, out in enumerate(widths):
            for _ in range(o["num_res_blocks"]):
                layers: list[nn.Module] = [block(width, out)]
                width = out
                if factor in factors:
                    layers.append(attention(width, o["num_heads"]))
                self.input_blocks.append(nn.ModuleList(layers))
                skips.append(width)
            if level < len(widths) - 1:
                down = block(width, width, "down") if o["resblock_updown"] else Down(width)
                self.input_blocks.append(nn.ModuleList([down]))
                skips.append(width)
                factor *= 2
        self.middle_block = nn.ModuleList([block(width, width), attention(width, o["num_heads"]), block(width, width)])
        self.output_blocks = nn.ModuleList()
        for level in range(len(widths) - 1, -1, -1):
            for layer in range(o["num_res_blocks"] + 1):
                layers = [block(width + skips.pop(), widths[level])]
                width = widths[level]
                if factor in factors:
                    layers.append(attention(width, heads_up))
                if level and layer == o["num_res_blocks"]:
                    layers.append(block(width, width, "up") if o["resblock_updown"] else Up(width))
                    factor //= 2
                self.output_blocks.append(nn.ModuleList(layers))
        out = image_channels * (2 if o["learn_sigma"] else 1)
        self.out = nn.Sequential(norm(width), nn.SiLU(), nn.Conv2d(width, out, 3, padding=1))

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: int | None = None) -> torch.Tensor:
        half = self.base // 2
        angles = t.float()[:, None] * torch.exp(-math.log(10000) * torch.arange(half).float() / half)
        emb = self.time_embed(torch.cat([angles.cos(), angles.sin()], 1).to(x.dtype))
        if y is not None:
            emb = emb + self.label_emb(torch.full((len(x),), y))
        stack = []
        for layers in self.input_blocks:
            for layer in layers:
                x = layer(x, emb)
            stack.append(x)
        for layer in self.middle_block:
            x = layer(x, emb)
        for layers in self.output_blocks:
            x = torch.cat([x, stack.pop()], 1)
            for layer in layers:
                x = layer(x, emb)
        return self.out(x)


def random_reference(options: dict[str, Any], image_channels: int = 3) -> Reference:
    torch.manual_seed(0)
    net = Reference(options, image_channels).eval()
    for name, parameter in net.named_parameters():
        z = torch.randn(parameter.shape)
        if parameter.ndim > 1:
            parameter.data = 0.7 * z / math.sqrt(math.prod(parameter.shape[1:]))
        else:
            parameter.data = 1 + 0.1 * z if name.endswith("weight") else 0.1 * z
    return net


def save(tensors: dict[str, torch.Tensor], path: Path) -> Path:
    torch.save(tensors, path)
    return path


def load(path: Path, config: Any, **options: Any) -> DiffusersBackbone:
    backbone = load_backbone(path, config=config, **options)
    assert isinstance(backbone, DiffusersBackbone)
    return backbone


def whole_answer(backbone: DiffusersBackbone, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """All channels that the network answers, the learned variance included."""
    with torch.no_grad():
        return backbone._network(x, t)


def distance(answer: torch.Tensor, expected: torch.Tensor) -> float:
    return float((answer - expected).abs().max() / expected.std())


# the golden answers


@torch.no_grad()
def test_the_reference_gives_the_golden_answers(golden) -> None:  # type: ignore[no-untyped-def]
    net = Reference({"channel_mult": "", **golden.config}).eval()
    net.load_state_dict(golden.tensors)
    assert [name for name, _ in net.named_parameters()] == list(golden.tensors)
    scale = 1000 / golden.config["diffusion_steps"] if golden.config["rescale_timesteps"] else 1
    assert distance(net(golden.x, golden.t), golden.raw) < TOLERANCE
    assert distance(net(golden.x, golden.t * scale), golden.wrapped) < TOLERANCE


def test_golden_answers(golden, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = save(golden.tensors, tmp_path / "net.pt")
    wrapped = load(path, golden.config)
    assert distance(whole_answer(wrapped, golden.x, golden.t), golden.wrapped) < TOLERANCE
    assert distance(wrapped.eps(golden.x, golden.t), golden.wrapped[:, :3]) < TOLERANCE
    raw = load(path, golden.config, rescale_timesteps=False)
    assert distance(whole_answer(raw, golden.x, golden.t), golden.raw) < TOLERANCE
    np.testing.assert_allclose(wrapped.alphas_cumprod, golden.abar, rtol=1e-12)


def test_golden_answers_from_plain_diffusers(golden, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    save_folder(convert(save(golden.tensors, tmp_path / "net.pt"), golden.config), tmp_path / "folder")
    net = UNet2DModel.from_pretrained(tmp_path / "folder").eval()
    with torch.no_grad():
        assert distance(net(golden.x, golden.t).sample, golden.raw) < TOLERANCE
    folder = load(tmp_path / "folder", None)
    assert distance(whole_answer(folder, golden.x, golden.t), golden.wrapped) < TOLERANCE


# the families, over their options

FAMILIES: dict[str, dict[str, Any]] = {
    "improved": {},
    "no scale shift": {"use_scale_shift_norm": False},
    "fixed variance": {"learn_sigma": False},
    "one head": {"num_heads": 1, "channel_mult": "1,2,3", "attention_resolutions": "8,4"},
    "heads at several widths": {"channel_mult": "1,2,3", "attention_resolutions": "16,8,4"},
    "heads at several widths, new order": {
        "channel_mult": "1,2,3",
        "attention_resolutions": "8,4",
        "use_new_attention_order": True,
    },
    "other heads in the decoder": {"num_heads": 4, "num_heads_upsample": 2},
    "decoder heads at several widths": {"num_heads": 1, "num_heads_upsample": 8, "channel_mult": "1,2,4"},
    "middle wider than the attention level": {"channel_mult": "1,2,4", "num_heads": 2},
    "head channels": {"num_head_channels": 16, "channel_mult": "1,2,3", "attention_resolutions": "8,4"},
    "head channels, new order": {"num_head_channels": 32, "use_new_attention_order": True, "num_heads_upsample": 3},
    "res-block resampling": {"resblock_updown": True},
    "res-block resampling, no scale shift": {"resblock_updown": True, "use_scale_shift_norm": False},
    "res-block resampling, attention everywhere": {
        "resblock_updown": True,
        "attention_resolutions": "16,8,4",
        "channel_mult": "1,2,2",
        "num_head_channels": 32,
    },
    "res-block resampling, fixed heads": {
        "resblock_updown": True,
        "channel_mult": "1,1,2,3",
        "attention_resolutions": "4,2",
        "num_heads": 4,
        "class_cond": True,
    },
    "fixed heads, new order": {
        "channel_mult": "1,2,3",
        "attention_resolutions": "8,4",
        "use_new_attention_order": True,
    },
    "half width first": {"num_channels": 64, "channel_mult": "0.5,1,2", "num_head_channels": 32},
    "double width first": {"channel_mult": "2,2", "num_heads": 2, "resblock_updown": True},
    "narrowing": {"channel_mult": "3,1", "num_heads": 2, "attention_resolutions": "16"},
    "one level": {"channel_mult": "1", "attention_resolutions": "16", "num_res_blocks": 2},
    "three res blocks": {"num_res_blocks": 3, "channel_mult": "1,2,2"},
    "classes": {"class_cond": True},
    "attention in the middle only": {"attention_resolutions": "1", "num_res_blocks": 2},
}


ONE_CHANNEL = ("improved", "res-block resampling", "classes")


@pytest.mark.parametrize(("name", "image_channels"), [*((n, 3) for n in FAMILIES), *((n, 1) for n in ONE_CHANNEL)])
@torch.no_grad()
def test_a_converted_net_computes_the_same_function(name: str, image_channels: int, tmp_path: Path) -> None:
    options = {**DEFAULTS, **FAMILIES[name]}
    net = random_reference(options, image_channels)
    label = 2 if options["class_cond"] else None
    size = options["image_size"]
    x, t = torch.randn(2, image_channels, size, size, dtype=torch.float64), torch.tensor([3, 9])
    path = save(net.state_dict(), tmp_path / "net.pt")

    backbone = load(path, options, class_label=label, dtype="float64")
    times = backbone.scheduler.network_times()[t]
    answer = whole_answer(backbone, x, t)
    expected = net.double()(x, torch.from_numpy(times), label)
    assert distance(answer, expected) < EXACT
    assert (backbone.channels, backbone.image_size) == (image_channels, (size, size))
    assert backbone.parameters == sum(parameter.numel() for parameter in net.parameters())

    converted = convert(path, options)
    save_folder(converted, tmp_path / "folder")
    again = load(tmp_path / "folder", None, class_label=label, dtype="float64")
    assert torch.equal(whole_answer(again, x, t), answer)
    assert again.scheduler == backbone.scheduler
    assert again.family == backbone.family == "openai"

    # plain diffusers computes the same, or refuses the folder: never something else
    if converted.patches.reasons:
        with pytest.raises(TypeError, match="unsupported operand"):
            UNet2DModel.from_pretrained(tmp_path / "folder")
    else:
        plain = UNet2DModel.from_pretrained(tmp_path / "folder", torch_dtype=torch.float64).eval()
        labels = None if label is None else torch.full((len(x),), label)
        assert distance(plain(x, torch.from_numpy(times), labels).sample, expected) < EXACT


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("heads at several widths", "4 attention heads at every width"),
        ("other heads in the decoder", "2 heads in the decoder"),
        ("half width first", "a time embedding of 64 channels"),
    ],
)
def test_what_plain_diffusers_cannot_express_is_said(name: str, reason: str, tmp_path: Path) -> None:
    options = {**DEFAULTS, **FAMILIES[name]}
    converted = convert(save(random_reference(options).state_dict(), tmp_path / "net.pt"), options)
    assert reason in " ".join(converted.caveats)
    assert "gepc loads it" in " ".join(converted.caveats)


def test_what_plain_diffusers_must_do_itself_is_said(tmp_path: Path) -> None:
    path = save(random_reference(DEFAULTS).state_dict(), tmp_path / "net.pt")
    assert "t*1000/100" in " ".join(convert(path, DEFAULTS).caveats)
    plain = {**DEFAULTS, "diffusion_steps": 1000}
    assert convert(path, plain).caveats == []
    assert convert(path, {**plain, "timestep_respacing": "10"}).scheduler.n_train == 1000  # it concerns sampling only


@torch.no_grad()
def test_a_converted_folder_is_a_ddpm_pipeline(tmp_path: Path) -> None:
    from diffusers import DDPMPipeline

    options = {**DEFAULTS, "diffusion_steps": 1000}
    path = save(random_reference(options).state_dict(), tmp_path / "net.pt")
    save_folder(convert(path, options), tmp_path / "folder")
    pipeline = DDPMPipeline.from_pretrained(tmp_path / "folder")
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(num_inference_steps=2, output_type="np").images
    assert images.shape == (1, 16, 16, 3)
    save_folder(convert(path, DEFAULTS), tmp_path / "rescaled")
    assert not (tmp_path / "rescaled" / "model_index.json").exists()


def test_rescaling_is_the_backbones_business(tmp_path: Path) -> None:
    """Index 136 of 4000 is called as 34."""
    options = {**DEFAULTS, "diffusion_steps": 4000}
    net = random_reference(options)
    path = save(net.state_dict(), tmp_path / "net.pt")
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        assert distance(load(path, options).eps(x, 136), net(x, torch.tensor([34.0]))[:, :3]) < TOLERANCE
        off = load(path, options, rescale_timesteps=False)
        assert distance(off.eps(x, 136), net(x, torch.tensor([136.0]))[:, :3]) < TOLERANCE


def test_x0_nets_become_noise(tmp_path: Path) -> None:
    options = {**DEFAULTS, "predict_xstart": True}
    backbone = load(save(random_reference(options).state_dict(), tmp_path / "net.pt"), options)
    x = torch.randn(1, 3, 16, 16)
    x0 = whole_answer(backbone, x, torch.tensor([50]))[:, :3]
    abar = backbone.alphas_cumprod[50]
    torch.testing.assert_close(abar**0.5 * x0 + (1 - abar) ** 0.5 * backbone.eps(x, 50), x, rtol=1e-4, atol=1e-4)


# how checkpoints come


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "ema", "net"])
def test_wrapped_checkpoints(wrapper: str, tmp_path: Path) -> None:
    tensors = random_reference(DEFAULTS).state_dict()
    x = torch.randn(1, 3, 16, 16)
    expected = load(save(tensors, tmp_path / "plain.pt"), DEFAULTS).eps(x, 3)
    prefixed = {f"module.{name}": tensor for name, tensor in tensors.items()}
    torch.save({"step": 7, wrapper: prefixed}, tmp_path / "wrapped.pt")
    assert torch.equal(load(tmp_path / "wrapped.pt", DEFAULTS).eps(x, 3), expected)


def test_averaged_weights_come_first(tmp_path: Path) -> None:
    tensors = random_reference(DEFAULTS).state_dict()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    torch.save({"model": zeros, "ema": tensors}, tmp_path / "both.pt")
    assert load(tmp_path / "both.pt", DEFAULTS).eps(torch.randn(1, 3, 16, 16), 3).abs().max() > 0


def test_other_file_formats(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = random_reference(DEFAULTS).state_dict()
    x = torch.randn(1, 3, 16, 16)
    expected = load(save(tensors, tmp_path / "net.pt"), DEFAULTS).eps(x, 3)
    save_file(tensors, tmp_path / "net.safetensors")
    assert torch.equal(load(tmp_path / "net.safetensors", DEFAULTS).eps(x, 3), expected)
    torch.save(tensors, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert torch.equal(load(tmp_path / "old.pth", DEFAULTS).eps(x, 3), expected)
    half = {name: tensor.half() for name, tensor in tensors.items()}
    answer = load(save(half, tmp_path / "half.pt"), DEFAULTS).eps(x, 3)
    assert answer.dtype == torch.float32
    assert distance(answer, expected) < 0.05


# options and presets


def test_the_architecture_needs_no_options(tmp_path: Path) -> None:
    """Only what the tensors do not show must be said."""
    path = save(random_reference({"channel_mult": "1,2,3"}).state_dict(), tmp_path / "net.pt")
    said = {"image_size": 16, "num_heads": 4, "noise_schedule": "linear", "diffusion_steps": 1000}
    net = convert(path, said).architecture
    assert (net.model_channels, net.widths, net.res_blocks) == (32, (32, 64, 96), 1)
    assert (net.attention, net.scale_shift, net.resampling) == ((False, True, False), True, "conv")
    assert (net.channels, net.out_channels, net.classes) == (3, 6, None)


def test_options_from_files(tmp_path: Path) -> None:
    import json

    (tmp_path / "options.json").write_text(json.dumps(DEFAULTS))
    (tmp_path / "options.yaml").write_text("preset: improved-cifar10\nnum_heads: 2\n")
    assert read_options(tmp_path / "options.json") == read_options(DEFAULTS)
    assert read_options(tmp_path / "options.yaml") == read_options({"preset": "improved-cifar10", "num_heads": 2})
    assert read_options("improved-cifar10") == read_options({"preset": "improved-cifar10"})


def test_channel_multipliers_in_any_form() -> None:
    for value in ("1,2", (1, 2), [1.0, 2.0]):
        assert read_options({"channel_mult": value}).multipliers == (1.0, 2.0)
    assert read_options({"channel_mult": 4}).multipliers == (4.0,)
    assert read_options({"channel_mult": ""}).multipliers is None
    assert read_options({}).multipliers is None


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_complete(name: str) -> None:
    options = read_options(name)
    assert options.missing == []
    assert options.multipliers is not None
    assert options.scheduler(learned_variance=True).n_train in (1000, 4000)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_their_nets(name: str) -> None:
    """Each published net at its real size, on the meta device: read off its shapes, agreed with, built, and placed."""
    from gepc.backbones.openai.convert import (
        _renamed,
        check_options,
        expected_shapes,
        find_patches,
        read_architecture,
        unet_config,
    )
    from gepc.backbones.weights import build_net

    options = read_options(name)
    net = read_architecture(preset_shapes(name), Path(name))
    check_options(net, options)
    with torch.device("meta"):
        tensors = {key: torch.empty(shape) for key, shape in expected_shapes(net).items()}
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == preset_shapes(name)
    patches = find_patches(net, options)
    built = build_net(unet_config(net, options, patches), patches)
    placed = dict(_renamed(net, options, tensors))
    assert {key: tuple(value.shape) for key, value in placed.items()} == {
        key: tuple(value.shape) for key, value in built.state_dict().items()
    }


def preset_shapes(name: str) -> dict[str, tuple[int, ...]]:
    options = dict(PRESETS[name])
    mult = ",".join(f"{m:g}" for m in read_options(name).multipliers or ())
    with torch.device("meta"):
        net = Reference({**options, "channel_mult": mult, "num_heads": options.get("num_heads", 4)}, classes=1000)
    return {key: tuple(value.shape) for key, value in net.state_dict().items()}


# published sizes, as the file names give them (millions of weights)
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("improved-cifar10", 50),
        ("improved-imagenet64", 100),
        ("improved-imagenet64-cond", 270),
        ("improved-lsun256", 100),
    ],
)
def test_presets_have_the_published_size(name: str, millions: int) -> None:
    count = sum(math.prod(shape) for shape in preset_shapes(name).values())
    assert count / 1e6 == pytest.approx(millions, rel=0.22)

"""Diffusers folders: what they predict, what they are called with, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gepc import load_backbone
from gepc.backbones.devices import choose_device, choose_dtype
from gepc.backbones.diffusers import CPU_ROWS, DiffusersBackbone
from gepc.backbones.schedule import Scheduler, log_variances
from gepc.core.errors import BackboneError, InputError, OptionError

Maker = Callable[..., Path]
ATTENTION = {
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "add_attention": True,
    "attention_head_dim": 8,
}


def load(folder: Path, **options: Any) -> DiffusersBackbone:
    backbone = load_backbone(folder, **options)
    assert isinstance(backbone, DiffusersBackbone)
    return backbone


def plain_net(folder: Path) -> torch.nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel.from_pretrained(folder).eval()


@torch.no_grad()
def ask(net: torch.nn.Module, x: torch.Tensor, t: Any, **options: Any) -> torch.Tensor:
    return net(x, torch.as_tensor(t), **options).sample


def test_epsilon_is_the_network_itself(make_folder: Maker) -> None:
    folder = make_folder(ATTENTION)
    backbone, x = load(folder), torch.randn(3, 3, 8, 8)
    t = torch.tensor([0, 7, 49])
    torch.testing.assert_close(backbone.eps(x, t), ask(plain_net(folder), x, t), rtol=1e-5, atol=1e-6)
    assert backbone.forward_count == 3
    assert backbone.eps(x, 0).is_contiguous()


def test_what_a_backbone_says_of_itself(make_folder: Maker) -> None:
    import hashlib

    folder = make_folder()
    backbone = load(folder)
    weights = (folder / "diffusion_pytorch_model.safetensors").read_bytes()
    assert backbone.sha256 == hashlib.sha256(weights).hexdigest()
    assert backbone.source == str(folder)
    assert backbone.parameters == sum(p.numel() for p in plain_net(folder).parameters())
    assert (backbone.channels, backbone.n_steps, backbone.family) == (3, 50, "diffusers")
    assert json.loads(json.dumps(backbone.describe()))["schedule"] == "linear"
    assert not backbone.net.training
    assert backbone.dtype == torch.float32
    assert backbone.net.conv_in.weight.is_contiguous(memory_format=torch.channels_last)


def test_v_prediction(make_folder: Maker) -> None:
    folder = make_folder(scheduler={"prediction_type": "v_prediction"})
    backbone, x = load(folder), torch.randn(2, 3, 8, 8)
    abar = backbone.alphas_cumprod[20]
    v = ask(plain_net(folder), x, 20)
    expected = abar**0.5 * v + (1 - abar) ** 0.5 * x
    torch.testing.assert_close(backbone.eps(x, 20), expected, rtol=1e-5, atol=1e-6)
    x0 = abar**0.5 * x - (1 - abar) ** 0.5 * v
    torch.testing.assert_close(abar**0.5 * x0 + (1 - abar) ** 0.5 * expected, x, rtol=1e-5, atol=1e-5)


def test_sample_prediction(make_folder: Maker) -> None:
    folder = make_folder(scheduler={"prediction_type": "sample"})
    backbone, x = load(folder), torch.randn(2, 3, 8, 8)
    abar = backbone.alphas_cumprod[20]
    x0 = ask(plain_net(folder), x, 20)
    noised = abar**0.5 * x0 + (1 - abar) ** 0.5 * backbone.eps(x, 20)
    torch.testing.assert_close(noised, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_zero_terminal_snr_does_not_divide_by_zero(make_folder: Maker, prediction: str) -> None:
    scheduler = {"prediction_type": prediction, "rescale_betas_zero_snr": True, "beta_schedule": "scaled_linear"}
    backbone, x = load(make_folder(scheduler=scheduler)), torch.randn(2, 3, 8, 8)
    assert backbone.alphas_cumprod[-1] == 0.0
    eps = backbone.eps(x, 49)
    assert torch.isfinite(eps).all()
    assert torch.isfinite(backbone.score(x, 49)).all()
    assert torch.isfinite(backbone.eps_and_log_variance(x, 49)[1]).all()
    if prediction != "epsilon":
        torch.testing.assert_close(eps, x)  # at abar = 0, x_t is the noise


def test_learned_variance_takes_the_first_channels(make_folder: Maker) -> None:
    folder = make_folder({"out_channels": 6}, {"variance_type": "learned_range"})
    backbone, x = load(folder), torch.randn(2, 3, 8, 8)
    answer = ask(plain_net(folder), x, 9)
    assert backbone.learned_variance
    torch.testing.assert_close(backbone.eps(x, 9), answer[:, :3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["fixed_small", "fixed_large", "learned", "learned_range"])
def test_log_variance_is_that_of_diffusers(make_folder: Maker, kind: str) -> None:
    from diffusers import DDPMScheduler

    channels = 6 if kind.startswith("learned") else 3
    folder = make_folder({"out_channels": channels}, {"variance_type": kind})
    backbone, x = load(folder), torch.randn(2, 3, 8, 8)
    values = ask(plain_net(folder), x, 9)[:, 3:]
    eps, log_variance = backbone.eps_and_log_variance(x, 9)
    theirs = DDPMScheduler.from_pretrained(folder)._get_variance(9, values)
    theirs = theirs if kind.startswith("learned") else torch.log(theirs)
    torch.testing.assert_close(log_variance, torch.as_tensor(theirs).expand_as(x), rtol=1e-4, atol=1e-4)
    assert torch.equal(eps, backbone.eps(x, 9))
    assert backbone.forward_count == 4


def test_log_variance_at_the_first_step_is_clipped() -> None:
    abar = Scheduler(num_train_timesteps=10).alphas_cumprod()
    large, small = log_variances(abar)
    assert small[0] == small[1]
    np.testing.assert_allclose(np.exp(large[0]), 1 - abar[0])
    assert np.isfinite(log_variances(np.array([0.5]))[1]).all()


@pytest.mark.parametrize(("channels", "outputs"), [(1, 1), (2, 2), (4, 8), (13, 13)])
def test_any_number_of_channels(make_folder: Maker, channels: int, outputs: int) -> None:
    backbone = load(make_folder({"in_channels": channels, "out_channels": outputs}))
    assert backbone.channels == channels
    assert backbone.eps(torch.randn(2, channels, 8, 8), 0).shape == (2, channels, 8, 8)


@pytest.mark.parametrize("outputs", [3, 6])
def test_large_batches_are_split(make_folder: Maker, outputs: int) -> None:
    """A processor never gets more than `rows` images at once, whatever is computed."""
    backbone = load(make_folder({"out_channels": outputs}), dtype="float64")
    assert backbone.rows == CPU_ROWS
    seen: list[int] = []
    backbone.net.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    x, v = torch.randn(2, 5, 3, 8, 8, dtype=torch.float64)
    expected = [backbone.eps(x, 5), *backbone.jvp(x, 5, v), *backbone.eps_and_log_variance(x, 5)]
    assert seen == [5, 5, 5]
    seen.clear()
    backbone.rows = 2
    found = [backbone.eps(x, 5), *backbone.jvp(x, 5, v), *backbone.eps_and_log_variance(x, 5)]
    assert seen == [2, 2, 1] * 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_convolutional_net_takes_any_size(make_folder: Maker) -> None:
    backbone = load(make_folder())
    assert (backbone.image_size, backbone.size_multiple) == (None, 2)
    assert backbone.eps(torch.randn(1, 3, 12, 20), 0).shape == (1, 3, 12, 20)


def test_a_net_with_attention_has_one_size(make_folder: Maker) -> None:
    assert load(make_folder(ATTENTION)).image_size == (8, 8)
    assert load(make_folder({**ATTENTION, "sample_size": (8, 16)}, name="wide")).image_size == (8, 16)


def test_class_conditional(make_folder: Maker) -> None:
    folder = make_folder({"num_class_embeds": 5})
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(OptionError, match=r"class-conditional \(5 classes\).*`class_label`"):
        load_backbone(folder)
    with pytest.raises(OptionError, match="class_label 5 does not exist: this net knows 0 to 4"):
        load_backbone(folder, class_label=5)
    backbone = load(folder, class_label=3)
    expected = ask(plain_net(folder), x, 4, class_labels=torch.tensor([3, 3]))
    torch.testing.assert_close(backbone.eps(x, 4), expected, rtol=1e-5, atol=1e-6)
    assert backbone.fingerprint != load(folder, class_label=2).fingerprint
    with pytest.raises(OptionError, match="not class-conditional"):
        load_backbone(make_folder(name="plain"), class_label=0)


def test_rescaled_timesteps(make_folder: Maker) -> None:
    folder = make_folder()
    net, x = plain_net(folder), torch.randn(2, 3, 8, 8)
    rescaled = load(folder, rescale_timesteps=True)
    torch.testing.assert_close(rescaled.eps(x, 7), ask(net, x, 140.0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(load(folder).eps(x, 7), ask(net, x, 7), rtol=1e-5, atol=1e-6)
    assert rescaled.fingerprint != load(folder).fingerprint


def test_the_network_is_asked_for_a_multiple_of_its_time(make_folder: Maker) -> None:
    folder = make_folder()
    net, x = plain_net(folder), torch.randn(2, 3, 8, 8)
    scaled = load(folder, time_scale=4)
    torch.testing.assert_close(scaled.eps(x, 7), ask(net, x, 28), rtol=1e-5, atol=1e-6)
    assert np.array_equal(scaled.alphas_cumprod, load(folder).alphas_cumprod)  # the level stays
    assert (scaled.load_options, scaled.describe()["time_scale"]) == ({"time_scale": 4}, 4.0)
    assert scaled.fingerprint != load(folder).fingerprint
    with pytest.raises(OptionError, match="time_scale must be positive"):
        load(folder, time_scale=0)


def test_trained_betas(make_folder: Maker) -> None:
    betas = np.linspace(0.01, 0.5, 50)
    backbone = load(make_folder(scheduler={"trained_betas": betas.tolist()}))
    np.testing.assert_allclose(backbone.alphas_cumprod, np.cumprod(1 - betas))
    assert backbone.describe()["schedule"] == "trained_betas"


def test_a_learned_time_embedding(make_folder: Maker) -> None:
    folder = make_folder({"time_embedding_type": "learned", "num_train_timesteps": 50})
    x = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(load(folder).eps(x, 7), ask(plain_net(folder), x, [7]), rtol=1e-5, atol=1e-6)
    config = {"num_train_timesteps": 300}
    with pytest.raises(OptionError, match="leave out rescale_timesteps"):
        load_backbone(folder, config=config, rescale_timesteps=True)


def test_pipeline_folder(make_folder: Maker, tmp_path: Path) -> None:
    from diffusers import DDPMPipeline, DDPMScheduler

    flat = make_folder()
    DDPMPipeline(plain_net(flat), DDPMScheduler.from_pretrained(flat)).save_pretrained(tmp_path / "pipe")
    x = torch.randn(1, 3, 8, 8)
    expected = load(flat).eps(x, 5)
    for folder in (tmp_path / "pipe", tmp_path / "pipe" / "unet"):
        backbone = load(folder)
        assert torch.equal(backbone.eps(x, 5), expected)
        assert backbone.sha256 == load(flat).sha256


def test_older_files_of_the_same_weights(make_folder: Maker) -> None:
    """`.bin` files, variants, shards, and the attention names of diffusers before 0.15."""
    from safetensors.torch import load_file, save_file

    folder = make_folder(ATTENTION)
    x = torch.randn(1, 3, 8, 8)
    expected = load(folder).eps(x, 5)
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    file.unlink()

    names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    old = {}
    for name, tensor in tensors.items():
        for today, before in names.items():
            name = name.replace(f".{today}.", f".{before}.")
        old[name] = tensor.clone()
    torch.save(old, folder / "diffusion_pytorch_model.bin")
    assert any(".query." in name for name in old)
    assert torch.equal(load(folder).eps(x, 5), expected)
    (folder / "diffusion_pytorch_model.bin").unlink()

    save_file({name: t.half() for name, t in tensors.items()}, folder / "diffusion_pytorch_model.fp16.safetensors")
    torch.testing.assert_close(load(folder, variant="fp16").eps(x, 5), expected, rtol=1e-2, atol=1e-2)
    (folder / "diffusion_pytorch_model.fp16.safetensors").unlink()

    half = len(tensors) // 2
    weight_map = {name: f"part-{int(i < half)}.safetensors" for i, name in enumerate(tensors)}
    for part in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == part}, folder / part)
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load(folder).eps(x, 5), expected)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.1), ("float16", 0.02), ("float64", 1e-5)])
def test_precisions(make_folder: Maker, dtype: str, error: float) -> None:
    folder = make_folder(ATTENTION)
    x = torch.randn(2, 3, 8, 8)
    expected = load(folder).eps(x, 5)
    answer = load(folder, dtype=dtype).eps(x, 5)
    assert answer.dtype == torch.float32
    assert (answer - expected).abs().max() < error * expected.std()


def test_double_input_comes_back_double(make_folder: Maker) -> None:
    assert load(make_folder()).eps(torch.randn(1, 3, 8, 8, dtype=torch.float64), 0).dtype == torch.float64


@pytest.mark.parametrize("net", [{}, ATTENTION], ids=["convolutions", "attention"])
def test_derivatives(make_folder: Maker, net: dict[str, Any]) -> None:
    backbone = load(make_folder(net, {"prediction_type": "v_prediction"}), dtype="float64")
    x, v = torch.randn(2, 2, 3, 8, 8, dtype=torch.float64)
    answer, tangent = backbone.jvp(x, 5, v)
    assert (backbone.forward_count, backbone.jvp_count) == (2, 2)
    torch.testing.assert_close(answer, backbone.eps(x, 5))
    step = 1e-5
    slope = (backbone.eps(x + step * v, 5) - backbone.eps(x - step * v, 5)) / (2 * step)
    torch.testing.assert_close(tangent, slope, rtol=1e-5, atol=1e-7)

    w = torch.randn_like(x)
    x = x.requires_grad_()
    (gradient,) = torch.autograd.grad((backbone.eps(x, 5) * w).sum(), x)
    torch.testing.assert_close((gradient * v).sum(), (tangent * w).sum())
    assert not backbone.eps(x.detach(), 5).requires_grad


def test_an_image_does_not_depend_on_its_batch(make_folder: Maker) -> None:
    backbone, x = load(make_folder(ATTENTION)), torch.randn(8, 3, 8, 8)
    torch.testing.assert_close(backbone.eps(x, 5)[3:4], backbone.eps(x[3:4], 5), rtol=1e-5, atol=1e-6)


def test_devices_and_precisions_that_do_not_exist(make_folder: Maker) -> None:
    folder = make_folder()
    with pytest.raises(OptionError, match=r"device 'cuda:99' cannot be used here.*auto"):
        load_backbone(folder, device="cuda:99")
    with pytest.raises(OptionError, match="device 'gpu'"):
        load_backbone(folder, device="gpu")
    with pytest.raises(OptionError, match=r"unknown dtype 'float23'.*float32"):
        load_backbone(folder, dtype="float23")


def test_a_precision_the_device_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def conv2d(*_: Any) -> None:
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(torch.nn.functional, "conv2d", conv2d)
    with pytest.raises(OptionError, match="cpu cannot compute in float16; leave dtype at float32"):
        choose_dtype("float16", torch.device("cpu"))


def test_auto_prefers_cuda_then_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto").type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto").type == "cuda"


# what is refused


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_without_config(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty has no config.json \(nor has unet/ or"):
        load_backbone(tmp_path / "empty")


def test_a_folder_with_a_broken_config(make_folder: Maker) -> None:
    folder = make_folder()
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config.json is not a readable JSON file"):
        load_backbone(folder)


def test_a_folder_without_scheduler(make_folder: Maker) -> None:
    folder = make_folder()
    (folder / "scheduler_config.json").unlink()
    with pytest.raises(InputError, match=r"no scheduler_config.json.*beta_schedule"):
        load_backbone(folder)
    backbone = load(folder, config={"beta_schedule": "squaredcos_cap_v2", "num_train_timesteps": 20})
    assert backbone.n_steps == 20


def test_an_unknown_scheduler_option(make_folder: Maker) -> None:
    with pytest.raises(OptionError, match="no option 'beta_shedule'; did you mean 'beta_schedule'"):
        load_backbone(make_folder(), config={"beta_shedule": "linear"})


def test_a_folder_without_weights(make_folder: Maker) -> None:
    folder = make_folder()
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"contains no weights: expected diffusion_pytorch_model.safetensors"):
        load_backbone(folder)


def test_another_kind_of_model(make_folder: Maker) -> None:
    folder = make_folder()
    edit(folder / "config.json", _class_name="UNet2DConditionModel")
    with pytest.raises(BackboneError, match="the weights do not fit a UNet2DConditionModel: unexpected mid_block"):
        load_backbone(folder)
    edit(folder / "config.json", _class_name="UNet3DConditionModel")
    with pytest.raises(BackboneError, match=r"UNet3DConditionModel; gepc loads UNet2DModel, .*from_callable"):
        load_backbone(folder)


def test_a_net_that_takes_sigma(make_folder: Maker) -> None:
    with pytest.raises(BackboneError, match="from_denoiser"):
        load_backbone(make_folder({"time_embedding_type": "fourier"}))


def test_a_net_that_answers_something_else(make_folder: Maker) -> None:
    with pytest.raises(BackboneError, match="answers 4 channels; a noise prediction has 3"):
        load_backbone(make_folder({"out_channels": 4}))


def test_weights_of_another_net(make_folder: Maker) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_folder()
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)

    save_file({**tensors, "conv_in.weight": torch.zeros(8, 4, 3, 3)}, file)
    with pytest.raises(
        BackboneError, match=r"safetensors: tensor conv_in.weight has shape \(8, 4, 3, 3\), expected \(8, 3, 3, 3\)"
    ):
        load_backbone(folder)
    save_file({name: tensor for name, tensor in tensors.items() if name != "conv_out.bias"}, file)
    with pytest.raises(BackboneError, match=r"tensor conv_out.bias is missing, expected shape \(3,\)"):
        load_backbone(folder)
    save_file({**tensors, "extra": torch.zeros(2)}, file)
    with pytest.raises(BackboneError, match=r"tensor extra of shape \(2,\) has no place"):
        load_backbone(folder)


def test_a_safetensors_file_cut_short(make_folder: Maker) -> None:
    folder = make_folder()
    file = folder / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BackboneError, match=r"diffusion_pytorch_model.safetensors is cut short"):
        load_backbone(folder)

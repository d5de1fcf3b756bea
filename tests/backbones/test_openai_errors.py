"""Checkpoints that are refused: each message names the file, the tensor and the expected shape."""

from __future__ import annotations

import argparse
import functools
import os
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gepc import load_backbone
from gepc.backbones.openai.convert import Architecture, convert, expected_shapes, read_architecture, save_folder
from gepc.backbones.weights import check_shapes
from gepc.core.errors import BackboneError, GepcError, InputError, OptionError

SAID = {
    "image_size": 16,
    "num_heads": 4,
    "noise_schedule": "cosine",
    "diffusion_steps": 4000,
    "rescale_timesteps": True,
}


def small(**changes: Any) -> Architecture:
    fields: dict[str, Any] = {
        "channels": 3,
        "out_channels": 6,
        "model_channels": 32,
        "widths": (32, 64),
        "res_blocks": 1,
        "attention": (False, True),
        "scale_shift": True,
        "resampling": "conv",
        "classes": None,
    }
    return Architecture(**{**fields, **changes})


def tensors_of(net: Architecture) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, 0.01) for name, shape in expected_shapes(net).items()}


def checkpoint(folder: Path, net: Architecture | None = None, name: str = "net.pt", **changes: Any) -> Path:
    """A checkpoint of that net; a change to None removes a tensor."""
    tensors = {**tensors_of(net or small()), **{key.replace("__", "."): value for key, value in changes.items()}}
    path = folder / name
    torch.save({key: tensor for key, tensor in tensors.items() if tensor is not None}, path)
    return path


# files


class Bomb:
    """A pickle of this runs code when it is loaded without care."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_carries_code_is_refused_before_it_runs(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "bomb.pt"
    torch.save({**tensors_of(small()), "x": Bomb(tmp_path / "ran")}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(BackboneError, match=r"bomb.pt was refused before anything ran.*carries code \(posix.mkdir\)"):
        load_backbone(path, config=SAID)
    assert not (tmp_path / "ran").exists()


def test_a_bare_pickle_that_carries_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.bin"
    path.write_bytes(pickle.dumps(Bomb(tmp_path / "ran"), protocol=2))
    with pytest.raises(BackboneError, match=r"bomb.bin was refused before anything ran"):
        load_backbone(path, config=SAID)
    assert not (tmp_path / "ran").exists()


def test_objects_beside_the_tensors_are_refused(tmp_path: Path) -> None:
    torch.save({"model": tensors_of(small()), "args": argparse.Namespace(lr=1)}, tmp_path / "net.pt")
    with pytest.raises(BackboneError, match=r"argparse.Namespace.*torch.save\(model.state_dict\(\)"):
        load_backbone(tmp_path / "net.pt", config=SAID)


def test_torchscript_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    with pytest.raises(BackboneError, match=r"net.pt is a TorchScript program, which carries code"):
        load_backbone(path, config=SAID)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.999])
def test_truncated_files(tmp_path: Path, zipped: bool, share: float) -> None:
    path = tmp_path / "net.pt"
    torch.save(tensors_of(small()), path, _use_new_zipfile_serialization=zipped)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(BackboneError, match=r"net.pt is (cut short|a pickle, but not one that torch.save wrote)"):
        load_backbone(path, config=SAID)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "net.pt",
            b"Dear reader,\nthis is not a checkpoint",
            r"not a PyTorch checkpoint: it begins with b'Dear reader",
        ),
        ("net.pt", b"<!DOCTYPE html><html>404</html>", r"not a PyTorch checkpoint: it begins with b'<!DOCTYPE"),
        ("net.pt", b"", r"net.pt is empty"),
        ("net.pt", pickle.dumps({"a": 1}), r"net.pt is a pickle, but not one that torch.save wrote"),
        ("net.safetensors", b"Dear reader,\nthis is not a checkpoint", r"net.safetensors is cut short or is not"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BackboneError, match=message):
        load_backbone(tmp_path / name, config=SAID)


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere/net.pt does not exist"):
        load_backbone(tmp_path / "nowhere" / "net.pt", config=SAID)


def test_a_lone_tensor(tmp_path: Path) -> None:
    torch.save(torch.zeros(3), tmp_path / "net.pt")
    with pytest.raises(BackboneError, match="holds a Tensor, not a state dict"):
        load_backbone(tmp_path / "net.pt", config=SAID)


def test_a_state_dict_of_another_network(tmp_path: Path) -> None:
    torch.save({"layer.weight": torch.zeros(3)}, tmp_path / "net.pt")
    with pytest.raises(BackboneError, match=r"not an OpenAI UNet: it holds layer.weight.*time_embed.0.weight"):
        load_backbone(tmp_path / "net.pt", config=SAID)
    torch.save({"conv_in.weight": torch.zeros(3)}, tmp_path / "net.pt")
    with pytest.raises(BackboneError, match=r"diffusers' layout: give the folder with its config.json"):
        load_backbone(tmp_path / "net.pt", config=SAID)


def test_something_that_is_not_a_tensor(tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match=r"net.pt: epoch is a int, not a tensor"):
        load_backbone(checkpoint(tmp_path, epoch=3), config=SAID)


# tensors

NETS = {
    "conv": small(),
    "resblock": small(resampling="resblock", attention=(True, True)),
    "classes": small(scale_shift=False, classes=7),
}


# the architecture is read from these: without them, or in another shape, the message may be about something else
DECISIVE = re.compile(
    r"label_emb|time_embed\.0\.weight|input_blocks\.0\.0\.weight|out\.2\.bias|middle_block\.0\.\w+\.\d\.bias"
    r"|output_blocks\.\d\.(0\.out_layers\.0\.bias|[12]\.(conv|qkv|in_layers\.2)\.weight)"
)


@pytest.mark.parametrize("kind", NETS)
def test_any_missing_or_misshapen_tensor_is_refused(kind: str) -> None:
    shapes = expected_shapes(NETS[kind])
    assert read_architecture(shapes, Path("net.pt")) == NETS[kind]
    for name, shape in shapes.items():
        if name == "label_emb.weight":
            continue  # its absence and its number of classes are read from it
        without = complaint({key: value for key, value in shapes.items() if key != name})
        longer = complaint({**shapes, name: (*shape[:-1], shape[-1] + 1)})
        flat = complaint({**shapes, name: ()})
        if DECISIVE.match(name) is None:
            assert f"net.pt: tensor {name} is missing, expected shape {shape}" in without
            assert f"tensor {name} has shape {(*shape[:-1], shape[-1] + 1)}, expected {shape}" in longer
            assert f"tensor {name} has shape (), expected {shape}" in flat
            continue
        for text in (without, longer, flat):
            own = name.rpartition(".")[0] in text
            assert own or "one damaged tensor" in text or "a multiple of 32" in text or "equal levels" in text
    assert "tensor extra of shape (2,) has no place" in complaint({**shapes, "extra": (2,)})


@functools.cache
def expected(net: Architecture) -> dict[str, tuple[int, ...]]:
    """`expected_shapes` builds a network, and hundreds of damaged checkpoints are read as one of a few."""
    return expected_shapes(net)


def complaint(shapes: dict[str, tuple[int, ...]]) -> str:
    with pytest.raises(BackboneError) as caught:
        check(shapes, Path("net.pt"))
    return str(caught.value)


def check(shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    net = read_architecture(shapes, path)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    check_shapes(path, tensors, expected(net))


def test_missing_and_surplus_tensors_are_counted(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, middle_block__1__qkv__bias=None, middle_block__1__qkv__weight=None)
    message = r"net.pt: tensor middle_block.1.qkv.weight is missing, expected shape \(192, 64, 1\) \(and 1 more"
    with pytest.raises(BackboneError, match=message):
        load_backbone(path, config=SAID)


def test_a_network_that_resamples_without_convolutions_is_refused(tmp_path: Path) -> None:
    """OpenAI's scripts cannot make it; its levels do not show."""
    tensors = {name: t for name, t in tensors_of(small()).items() if ".op." not in name and ".conv." not in name}
    torch.save(tensors, tmp_path / "net.pt")
    with pytest.raises(BackboneError, match=r"net.pt: tensor .* expected"):
        load_backbone(tmp_path / "net.pt", config=SAID)


def test_a_classifier_is_refused(tmp_path: Path) -> None:
    tensors = {name: t for name, t in tensors_of(small()).items() if not name.startswith("output_blocks")}
    torch.save(tensors, tmp_path / "net.pt")
    with pytest.raises(BackboneError, match="no output_blocks: it is an encoder"):
        load_backbone(tmp_path / "net.pt", config=SAID)


def test_an_upsampler_is_refused(tmp_path: Path) -> None:
    """It takes the small image too; one with a learned variance has as many outputs, and takes six channels."""
    with pytest.raises(BackboneError, match=r"answers 3 channels; a noise prediction has 6"):
        load_backbone(checkpoint(tmp_path, small(channels=6, out_channels=3)), config=SAID)


def test_levels_of_unequal_depth(tmp_path: Path) -> None:
    tensors = tensors_of(small(widths=(32, 32, 32), attention=(False, False, False)))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("output_blocks.5.")}
    torch.save(kept, tmp_path / "net.pt")
    with pytest.raises(BackboneError, match=r"its 5 output_blocks do not fall into 3 equal levels"):
        load_backbone(tmp_path / "net.pt", config=SAID)


def test_widths_that_no_group_norm_takes(tmp_path: Path) -> None:
    shapes = {**expected_shapes(small()), "output_blocks.1.0.out_layers.0.bias": (48,)}
    with pytest.raises(BackboneError, match="48 channels, not a multiple of 32"):
        read_architecture(shapes, tmp_path)


# options


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_channels", 64, r"num_channels=64 contradicts.*say 32"),
        ("num_res_blocks", 2, r"which say 1"),
        ("channel_mult", "1,2,2", r"which say \(1.0, 2.0\)"),
        ("channel_mult", [1, 3], r"channel_mult=\(1.0, 3.0\) contradicts the tensors, which say \(1.0, 2.0\)"),
        ("class_cond", True, r"which say False"),
        ("learn_sigma", False, r"which say True"),
        ("use_scale_shift_norm", False, r"use_scale_shift_norm=False contradicts the tensors, which say True"),
        ("resblock_updown", True, r"which say False"),
        ("num_heads", 5, r"num_heads=5, .* do not divide 64 channels"),
        ("num_heads_upsample", 3, r"num_heads_upsample=3 .* do not divide 64 channels"),
        ("num_head_channels", 48, r"num_head_channels=48 do not divide 64 channels"),
        ("image_size", 15, r"image_size=15 cannot be halved 1 times"),
    ],
)
def test_an_option_that_contradicts_the_tensors(tmp_path: Path, option: str, value: Any, message: str) -> None:
    path = checkpoint(tmp_path)
    with pytest.raises(OptionError, match=rf"net.pt: .*{message}"):
        load_backbone(path, config={**SAID, option: value})


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"num_haeds": 4}, "no option 'num_haeds'; did you mean 'num_heads'"),
        ({"noise_schedule": "cosin"}, "unknown noise_schedule 'cosin'; did you mean 'cosine'"),
        ({"num_heads": "four"}, "num_heads must be int"),
        ({"num_heads": 0}, "num_heads must be at least 1"),
        ({"channel_mult": "1;2"}, "channel_mult must be numbers"),
        ({"preset": "improved-cifar"}, "unknown preset 'improved-cifar'; did you mean 'improved-cifar10'"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    path = checkpoint(tmp_path)
    with pytest.raises(OptionError, match=message):
        load_backbone(path, config={**SAID, **said})


def test_what_the_tensors_do_not_show_is_asked_for(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    with pytest.raises(OptionError, match=r"do not show image_size, noise_schedule, diffusion_steps, num_heads \(or"):
        load_backbone(path)
    with pytest.raises(OptionError, match=r"do not show rescale_timesteps; give"):
        load_backbone(path, config={key: value for key, value in SAID.items() if key != "rescale_timesteps"})
    with pytest.raises(OptionError, match=r"or name a preset \(diffpath-celeba32, improved-cifar10, "):
        load_backbone(path, config={"image_size": 16})


def test_a_class_conditional_checkpoint_needs_a_label(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, small(classes=7))
    with pytest.raises(OptionError, match=r"class-conditional \(7 classes\)"):
        load_backbone(path, config=SAID)
    assert load_backbone(path, config=SAID, class_label=6).describe()["class_label"] == 6


# memory


def test_a_checkpoint_is_mapped_not_read(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    before = path.stat().st_size
    net = convert(path, SAID)
    built = net.build()
    assert built.conv_in.weight.data_ptr() == net.tensors["conv_in.weight"].data_ptr()
    assert not any(parameter.requires_grad for parameter in built.parameters())
    assert path.stat().st_size == before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to measure memory")
def test_a_large_checkpoint_is_never_held_twice(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, small(model_channels=224, widths=(224, 448)))
    size = path.stat().st_size
    assert size > 5e7
    load_backbone(checkpoint(tmp_path, small(), "small.pt"), config=SAID)  # imports are not counted
    assert peak_memory(lambda: load_backbone(path, config=SAID)) < 1.4 * size
    save_folder(convert(path, SAID), tmp_path / "folder")
    assert peak_memory(lambda: load_backbone(tmp_path / "folder")) < 1.4 * size


def peak_memory(work: Callable[[], object]) -> int:
    """The most that `work` adds to this process's own memory, sampled every 2 ms."""
    before, done, peak = anonymous_memory(), threading.Event(), 0

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        kept = work()
        peak = max(peak, anonymous_memory())
    finally:
        done.set()
        watcher.join()
    del kept
    return peak - before


def anonymous_memory() -> int:
    """Bytes that belong to this process alone (file mappings do not count)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def test_every_error_is_one_of_ours(tmp_path: Path) -> None:
    """Bytes at random never raise anything but a message for people."""
    path = tmp_path / "net.pt"
    generator = torch.Generator().manual_seed(0)
    for start in (b"PK\x03\x04", b"\x80\x02", b"\x80\x05", b""):
        for _ in range(20):
            noise = torch.randint(0, 256, (200,), generator=generator, dtype=torch.uint8)
            path.write_bytes(start + bytes(noise.tolist()))
            with pytest.raises(GepcError):
                load_backbone(path, config=SAID)

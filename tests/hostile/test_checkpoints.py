"""Untrusted checkpoints: memory and time in proportion to the file, and an error message whatever it holds."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gepc
from gepc.backbones.weights import MAX_PICKLE, read_tensors
from gepc.core.errors import BackboneError, GepcError, InputError


def archive(path: Path, content: bytes, kind: int = zipfile.ZIP_STORED) -> Path:
    """What torch.save writes, around any pickle."""
    with zipfile.ZipFile(path, "w", kind) as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/version", "3\n")
    return path


@pytest.fixture
def not_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.load", lambda *_, **__: pytest.fail("it was unpickled"))


@pytest.mark.usefixtures("not_unpickled")
def test_a_pickle_of_nothing_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Some kilobytes that unpack to megabytes of None, and the same uncompressed; the older format, too."""
    nothing = pickle.dumps([None] * (MAX_PICKLE + 1), protocol=2)
    for kind in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        with pytest.raises(BackboneError, match="unpacks to much more than it holds"):
            read_tensors(archive(tmp_path / "nothing.pt", nothing, kind))
    start = io.BytesIO()
    for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
        pickle.dump(value, start, protocol=2)
    (tmp_path / "old.pt").write_bytes(start.getvalue() + pickle.dumps(["x" * MAX_PICKLE, 1], protocol=2))
    with pytest.raises(BackboneError, match=f"a pickle of more than {MAX_PICKLE:,} bytes"):
        read_tensors(tmp_path / "old.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_tensor_that_repeats_its_elements_is_refused(tmp_path: Path, zipped: bool) -> None:
    """A view of one number in the shape of a large network takes memory only when it is copied, on a device."""
    large = {"model": {"w": torch.zeros(1).expand(200_000, 200_000)}}
    torch.save(large, tmp_path / "view.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(BackboneError, match=r"tensor w of shape \(200000, 200000\) is larger than the file"):
        read_tensors(tmp_path / "view.pt")


def test_a_header_that_claims_gigabytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes((1 << 33).to_bytes(8, "little") + b"{}")
    with pytest.raises(BackboneError, match="its header is too large"):
        read_tensors(tmp_path / "x.safetensors")


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("x.pt", "x.safetensors"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(GepcError):
            gepc.load_backbone(str(tmp_path / name))


@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_checkpoints_are_error_messages(saved: Path, tmp_path: Path, zipped: bool) -> None:
    content = io.BytesIO()
    tensors = gepc.load_backbone(str(saved.parent / "net")).net.state_dict()
    torch.save({"model": tensors, "step": 3}, content, _use_new_zipfile_serialization=zipped)
    whole, rng = np.frombuffer(content.getvalue(), dtype=np.uint8), np.random.default_rng(0)
    for attempt in range(24):
        damaged = whole.copy()
        places = np.minimum(rng.exponential(3_000, rng.integers(1, 8)).astype(int), len(whole) - 1)
        damaged[places if attempt % 2 else -1 - places] = rng.integers(0, 256, len(places))
        (tmp_path / "x.pt").write_bytes(damaged[: len(whole) if attempt % 3 else rng.integers(1, len(whole))].tobytes())
        with pytest.raises(GepcError, match=r"x\.pt"):
            gepc.load_backbone(str(tmp_path / "x.pt"))


WRONG: list[Any] = [None, -1, 0, 10**9, 1e308, "x", [], [10**9] * 2, {"a": 1}, [8] * 5_000]


@pytest.mark.parametrize(
    "name", ["layers_per_block", "block_out_channels", "norm_num_groups", "down_block_types", "act_fn", "sample_size"]
)
def test_a_config_with_anything_in_it(saved: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(saved.parent / "net", tmp_path / "net")
    config = json.loads((folder / "config.json").read_text())
    for new in WRONG:
        (folder / "config.json").write_text(json.dumps({**config, name: new}))
        with contextlib.suppress(GepcError):  # an error message, or a network
            gepc.load_backbone(str(folder))


def test_shards_in_another_folder_are_not_read(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved.parent / "net", tmp_path / "net")
    weights = folder / "diffusion_pytorch_model.safetensors"
    weights.rename(tmp_path / "secret.safetensors")
    index = {"weight_map": {"conv_in.weight": "../secret.safetensors"}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="names a file in another folder"):
        gepc.load_backbone(str(folder))
    for wrong in ({}, [], {"weight_map": []}, {"weight_map": {"a": 1}}):
        (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(wrong))
        with pytest.raises(GepcError):
            gepc.load_backbone(str(folder))

"""Every source of a backbone refuses the options that it cannot use, and names them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import energy_net
from toys import toy_backbone

import gepc
from gepc.backbones import load, sources
from gepc.backbones.diffusers import LoadOptions
from gepc.core.errors import BackboneError, OptionError

VALUES: dict[str, Any] = {
    "scheduler": object(),
    "vae": object(),
    "config": {"prediction_type": "sample"},
    "dtype": "bfloat16",
    "class_label": 1,
    "prompt": "a cat",
    "embeddings": {"prompt_embeds": torch.zeros(1, 2, 3)},
    "rescale_timesteps": True,
    "time_scale": 4.0,
    "variant": "fp16",
    "act_on": "pixels",
}
"""A value other than the default for every option but the device."""


def test_there_is_a_value_for_every_option() -> None:
    assert {*VALUES, "device"} == set(LoadOptions.__dataclass_fields__)
    assert set(LoadOptions(**VALUES).given()) == set(VALUES)


@pytest.mark.parametrize("name", VALUES)
def test_a_backbone_is_used_as_it_is(name: str) -> None:
    with pytest.raises(OptionError, match=rf"made before, on cpu, .* leave out `{name}`"):
        gepc.load_backbone(toy_backbone(), **{name: VALUES[name]})


def test_options_that_a_backbone_has_already_are_accepted() -> None:
    backbone = gepc.load_backbone("photos-tiny", dtype="bfloat16", device="cpu")
    assert gepc.load_backbone(backbone, dtype=torch.bfloat16, device="cpu") is backbone
    with pytest.raises(OptionError, match="leave out `dtype`"):
        gepc.load_backbone(backbone, dtype="float64")
    with pytest.raises(OptionError, match="leave out `device`"):
        gepc.load_backbone(backbone, device="meta")


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> list[gepc.Backbone]:
    """A plugin called `toy`; the list holds what its factory has made."""
    made: list[gepc.Backbone] = []

    def factory() -> gepc.Backbone:
        made.append(toy_backbone())
        return made[-1]

    monkeypatch.setattr(load, "plugins", lambda group: {"toy": factory} if group == "gepc.backbones" else {})
    return made


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.usefixtures("plugin")
def test_the_backbone_of_a_plugin_is_used_as_it_is(name: str) -> None:
    with pytest.raises(OptionError, match=f"leave out `{name}`"):
        gepc.load_backbone("toy", **{name: VALUES[name]})


def test_the_factory_of_a_plugin_runs_once(plugin: list[gepc.Backbone]) -> None:
    assert gepc.load_backbone("toy", device="cpu") is plugin[0]
    assert len(plugin) == 1


def test_the_factory_of_a_plugin_that_gives_a_folder_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def factory() -> Path:
        made.append("folder")
        return load.WEIGHTS / "photos-tiny"

    monkeypatch.setattr(load, "plugins", lambda group: {"net": factory} if group == "gepc.backbones" else {})
    assert gepc.load_backbone("net", device="cpu", dtype="bfloat16").source == "net"
    assert made == ["folder"]


def test_an_energy_network_takes_a_device_only(tmp_path: Path) -> None:
    energy_net(tmp_path)
    for name, value in VALUES.items():
        with pytest.raises(OptionError, match=f"EnergyNet has its options in it; leave out `{name}`"):
            gepc.load_backbone(tmp_path, **{name: value})
    assert gepc.load_backbone(tmp_path, device="cpu").source == str(tmp_path)


def test_a_package_registers_a_class_of_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loader gets the folder, the checked config and the device."""
    given: list[Any] = []

    def loader(*arguments: Any) -> gepc.Backbone:
        given.extend(arguments)
        return toy_backbone()

    config = {"_class_name": "MyNet", "width": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BackboneError, match="describes a MyNet; gepc loads"):
        gepc.load_backbone(tmp_path)
    monkeypatch.setattr(sources, "plugins", lambda group: {"MyNet": loader} if group == "gepc.networks" else {})
    assert gepc.load_backbone(tmp_path, device="cpu").source == str(tmp_path)
    assert given == [tmp_path, config, torch.device("cpu")]
    (tmp_path / "config.json").write_text(json.dumps({**config, "width": 10**9}))
    with pytest.raises(BackboneError, match="width is 1000000000, beyond any network"):
        gepc.load_backbone(tmp_path)


def test_loading_a_network_does_not_import_the_laboratory() -> None:
    code = "import sys, gepc; gepc.load_backbone('photos-tiny'); print([m for m in sys.modules if 'gepc.lab' in m])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_a_checkpoint_has_neither_text_nor_an_encoder(tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_bytes(b"")
    for name in ("vae", "prompt", "embeddings", "variant", "act_on"):
        with pytest.raises(OptionError, match=f"OpenAI checkpoint, .* leave out `{name}`"):
            gepc.load_backbone(tmp_path / "net.pt", **{name: VALUES[name]})


def test_a_network_in_pixel_space_has_no_encoder() -> None:
    with pytest.raises(OptionError, match="`act_on` is for latent backbones"):
        gepc.load_backbone("photos-tiny", device="cpu", act_on="pixels")


def test_options_of_older_detectors_that_changed_no_prediction_are_left_out() -> None:
    plain = gepc.load_backbone("photos-tiny", device="cpu")
    again = load.load_again("photos-tiny", {"offload": True, "device": "cpu"}, plain.sha256)
    assert again.fingerprint == plain.fingerprint


@pytest.mark.parametrize("name", ["variant"])
def test_an_object_has_its_weights_already(name: str) -> None:
    from diffusers import UNet2DModel

    net = UNet2DModel(8, block_out_channels=(8,), norm_num_groups=4, down_block_types=("DownBlock2D",),
                      up_block_types=("UpBlock2D",), layers_per_block=1)  # fmt: skip
    with pytest.raises(OptionError, match=f"has its weights already; leave out `{name}`"):
        gepc.load_backbone(net, config={"beta_schedule": "linear"}, **{name: VALUES[name]})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("class_label", "3", "class_label must be int, got '3'"),
        ("class_label", 2.5, "class_label must be int, got 2.5"),
        ("class_label", True, "class_label must be int, got True"),
        ("time_scale", "four", "time_scale must be float, got 'four'"),
        ("rescale_timesteps", "yes", "rescale_timesteps must be bool, got 'yes'"),
        ("config", 3, "config must be str, got 3"),
        ("embeddings", 3, "embeddings must be str, got 3"),
        ("variant", 16, "variant must be str, got 16"),
    ],
)
def test_a_value_of_another_type_is_refused_and_not_blamed_on_the_files(name: str, value: Any, message: str) -> None:
    """2.5 used to be the class 2."""
    with pytest.raises(OptionError, match=message):
        gepc.load_backbone("photos-tiny", device="cpu", **{name: value})


def test_numbers_of_numpy_are_stored_as_plain_numbers() -> None:
    """A saved detector is JSON."""
    backbone = gepc.load_backbone("photos-tiny", device="cpu", time_scale=np.float32(4.0))
    assert json.dumps(backbone.load_options) == '{"time_scale": 4.0}'
    options: dict[str, Any] = {"class_label": np.int64(3)}
    assert LoadOptions(**options).stored() == {"class_label": 3}

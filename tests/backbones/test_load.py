"""One call for any backbone: names, folders, hub ids, and what happens without a connection."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from families import embeddings, make

import gepc
from gepc.backbones import load
from gepc.core.errors import BackboneError, InputError, OptionError

pytestmark = pytest.mark.usefixtures("trusted")

Maker = Callable[..., Path]


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


@pytest.fixture
def embedded(make_folder: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with one backbone in it, called faces-tiny."""
    home = tmp_path / "weights"
    home.mkdir()
    shutil.move(make_folder(), home / "faces-tiny")
    monkeypatch.setattr(load, "WEIGHTS", home)
    return "faces-tiny"


@pytest.mark.usefixtures("_offline")
def test_an_embedded_backbone_needs_no_network(embedded: str) -> None:
    assert gepc.list_backbones() == [embedded]
    backbone = gepc.load_backbone(embedded)
    assert backbone.source == embedded
    assert backbone.eps(torch.randn(1, 3, 8, 8), 3).shape == (1, 3, 8, 8)


def test_embedded_backbones_load() -> None:
    for name in gepc.list_backbones():
        backbone = gepc.load_backbone(name)
        side = 8 * backbone.size_multiple if backbone.image_size is None else backbone.image_size[0]
        assert backbone.eps(torch.zeros(1, backbone.channels, side, side), 3).isfinite().all()


@pytest.mark.usefixtures("_offline", "embedded")
def test_a_misspelt_name() -> None:
    with pytest.raises(OptionError, match=r"is called 'faces-tyni'; did you mean 'faces-tiny'\?"):
        gepc.load_backbone("faces-tyni")


@pytest.mark.parametrize("name", ["./somewhere", "/nowhere/net", "weights/net.pt", "a/b/c", "net.safetensors"])
@pytest.mark.usefixtures("_offline")
def test_a_path_that_does_not_exist(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} does not exist"):
        gepc.load_backbone(name)


def test_a_backbone_is_returned_as_it_is() -> None:
    backbone = gepc.Backbone.from_callable(lambda x, t: x, [0.5])
    assert gepc.load_backbone(backbone) is backbone


def test_a_hub_id_without_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    message = r"no folder someone/net, and the hub did not give it either \(no route to host\).*hf download someone/net"
    with pytest.raises(BackboneError, match=message):
        gepc.load_backbone("someone/net")


@pytest.mark.parametrize("weights", ["safetensors", "bin"])
def test_a_hub_id_with_a_connection(make_folder: Maker, monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    folder = make_folder()
    file = folder / "diffusion_pytorch_model.safetensors"
    expected = gepc.load_backbone(folder).eps(torch.ones(1, 3, 8, 8), 3)
    asked: list[list[str]] = []
    empty = folder.parent / "empty"
    empty.mkdir()
    if weights == "bin":
        from safetensors.torch import load_file

        torch.save(load_file(file), folder / "diffusion_pytorch_model.bin")
        file.unlink()

    def download(name: str, allow_patterns: list[str]) -> str:
        """What lies in the repository and matches; a folder without files otherwise."""
        asked.append(allow_patterns)
        given = name == "someone/net" and any(f"model.{weights}" in pattern for pattern in allow_patterns)
        return str(folder if given else empty)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(BackboneError, match=r"no weights diffusion_pytorch_model.safetensors \(or .bin\)"):
        gepc.load_backbone("someone/other")
    backbone = gepc.load_backbone("someone/net")
    assert torch.equal(backbone.eps(torch.ones(1, 3, 8, 8), 3), expected)
    assert backbone.source == "someone/net"
    assert ("diffusion_pytorch_model.bin" in asked[-1]) == (weights == "bin")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], Path]:
    """Put a folder into a cache of the hub's own layout, without a connection; gives the snapshot."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: True, raising=False)

    def put(name: str, folder: Path) -> Path:
        home, commit = cache / f"models--{name.replace('/', '--')}", "a" * 40
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text(commit)
        return Path(shutil.copytree(folder, home / "snapshots" / commit))

    return put


def test_a_pipeline_in_the_cache_needs_no_connection(hub_cache: Callable[[str, Path], Path], tmp_path: Path) -> None:
    options = make("Stable Diffusion", tmp_path / "sd")
    snapshot = hub_cache("someone/sd", tmp_path / "sd")
    backbone = gepc.load_backbone("someone/sd", device="cpu", **options)
    assert backbone.source == "someone/sd"
    assert backbone.fingerprint == gepc.load_backbone(tmp_path / "sd", device="cpu", **options).fingerprint
    shutil.rmtree(snapshot / "vae")
    with pytest.raises(InputError, match=r"vae/config.json does not exist"):
        gepc.load_backbone("someone/sd", **options)
    with pytest.raises(BackboneError, match=r"hf download someone/other --local-dir FOLDER"):
        gepc.load_backbone("someone/other")


@pytest.mark.parametrize(
    ("given", "texts"), [({}, True), ({"embeddings": embeddings("prompt_embeds")}, False)], ids=["prompt", "embeddings"]
)
def test_only_the_files_that_are_needed_are_downloaded(
    given: dict[str, Any], texts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the single-file checkpoints at the root, other variants, .bin files or the safety checker."""
    from fnmatch import fnmatch

    make("Stable Diffusion", tmp_path)
    index = {
        **json.loads((tmp_path / "model_index.json").read_text()),
        "text_encoder": ["transformers", "CLIPTextModel"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "safety_checker": ["stable_diffusion", "Checker"]}))
    weights = "diffusion_pytorch_model"
    wanted = {f"unet/{weights}.safetensors", f"vae/{weights}.safetensors", f"unet/{weights}-00001-of-2.safetensors"}
    others = {"v1-5-pruned.safetensors", f"unet/{weights}.fp16.safetensors", f"unet/{weights}.bin", "unet/flax.msgpack"}
    others |= {"safety_checker/model.safetensors", "text_encoder/model.fp16.safetensors", f"unet/{weights}.non_ema.bin"}
    text = {"text_encoder/model.safetensors"}
    asked: list[list[str]] = []

    def download(_: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with contextlib.suppress(InputError):  # there is no text encoder to load
        gepc.load_backbone("someone/sd", **given)
    taken = {name for name in wanted | others | text if any(fnmatch(name, pattern) for pattern in asked[-1])}
    assert taken == wanted | (text if texts else set())


def test_scheduler_fields_from_a_file(make_folder: Maker, tmp_path: Path) -> None:
    (tmp_path / "scheduler.yaml").write_text("prediction_type: sample\nnum_train_timesteps: 10\n")
    backbone = gepc.load_backbone(make_folder(), config=tmp_path / "scheduler.yaml")
    assert backbone.n_steps == 10
    assert backbone.describe()["prediction_type"] == "sample"


@pytest.mark.parametrize("give_file", [True, False])
def test_the_options_of_a_backbone_load_it_again(make_folder: Maker, tmp_path: Path, give_file: bool) -> None:
    """From a name, a path or an object; a config file is stored by content, so it may be gone by then."""
    import json

    from diffusers import DDPMScheduler, UNet2DModel

    folder = make_folder({"num_class_embeds": 5})
    file, config = tmp_path / "scheduler.yaml", {"prediction_type": "sample"}
    file.write_text("prediction_type: sample\n")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "class_label": 2, "rescale_timesteps": True}
    first = gepc.load_backbone(folder, config=file if give_file else config, **options)
    file.unlink()
    stored = json.loads(json.dumps(first.describe()))
    assert stored["precision"] == "bfloat16"
    assert "device" not in stored
    assert gepc.load_backbone(stored["source"], **stored["load_options"]).fingerprint == first.fingerprint
    moved = shutil.move(folder, tmp_path / "moved")
    assert gepc.load_backbone(moved, **stored["load_options"]).fingerprint == first.fingerprint
    net, scheduler = UNet2DModel.from_pretrained(moved), DDPMScheduler.from_pretrained(moved)
    from_object = gepc.load_backbone(net, scheduler=scheduler, **stored["load_options"])
    assert from_object.fingerprint == first.fingerprint
    assert from_object.load_options == stored["load_options"]
    assert gepc.load_backbone(first, **stored["load_options"]) is first
    assert gepc.load_backbone(moved, class_label=2).fingerprint != first.fingerprint


# objects in memory


def diffusers_objects(folder: Path) -> tuple[Any, Any]:
    from diffusers import DDPMScheduler, UNet2DModel

    return UNet2DModel.from_pretrained(folder), DDPMScheduler.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["unet", "DDPMPipeline", "DDIMPipeline"])
def test_objects_are_their_folders(make_folder: Maker, kind: str) -> None:
    import diffusers

    folder = make_folder({"in_channels": 4, "out_channels": 4}, {"prediction_type": "v_prediction"})
    net, scheduler = diffusers_objects(folder)
    net.train()
    expected = gepc.load_backbone(folder)
    if kind == "unet":
        backbone = gepc.load_backbone(net, scheduler=scheduler)
    else:
        backbone = gepc.load_backbone(getattr(diffusers, kind)(net, scheduler))
    x = torch.randn(2, 4, 8, 8)
    assert torch.equal(backbone.eps(x, 3), expected.eps(x, 3))
    assert (backbone.channels, backbone.family, backbone.source) == (4, "diffusers", None)
    assert (backbone.sha256, backbone.fingerprint) == (expected.sha256, expected.fingerprint)


def test_an_object_is_copied(make_folder: Maker) -> None:
    """Training goes on without changing the backbone; the weights tell the two apart."""
    net, scheduler = diffusers_objects(make_folder())
    net.train()
    backbone = gepc.load_backbone(net, scheduler=scheduler, dtype="bfloat16")
    assert net.training
    assert net.dtype == torch.float32
    assert all(parameter.requires_grad for parameter in net.parameters())
    x = torch.randn(1, 3, 8, 8)
    before = backbone.eps(x, 3)
    with torch.no_grad():
        net.conv_out.bias += 1.0
    assert torch.equal(backbone.eps(x, 3), before)
    other = gepc.load_backbone(net, scheduler=scheduler, dtype="bfloat16")
    assert other.sha256 != backbone.sha256
    assert other.fingerprint != backbone.fingerprint


def test_a_detector_asks_for_its_object(make_folder: Maker, tmp_path: Path) -> None:
    """It accepts the object again, and the folder that it was saved to; the stored precision is kept."""
    import pickle

    import numpy as np

    folder = make_folder()
    net, scheduler = diffusers_objects(folder)
    backbone = gepc.load_backbone(net, scheduler=scheduler, dtype="bfloat16")
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    detector = gepc.GEPC(backbone).fit(images)
    detector.save(tmp_path / "det")
    with pytest.raises(BackboneError, match="pass it: load_detector"):
        gepc.load_detector(tmp_path / "det")
    expected = detector.score(images[:4])
    copy = pickle.loads(pickle.dumps(backbone))
    for given in (backbone, copy, str(folder)):
        assert np.array_equal(gepc.load_detector(tmp_path / "det", given).score(images[:4]), expected)
    with torch.no_grad():
        net.conv_out.bias += 1.0
    with pytest.raises(BackboneError, match="other weights"):
        gepc.load_detector(tmp_path / "det", gepc.load_backbone(net, scheduler=scheduler, dtype="bfloat16"))


def test_an_object_without_a_scheduler(make_folder: Maker) -> None:
    net, scheduler = diffusers_objects(make_folder())
    with pytest.raises(InputError, match=r"has no scheduler_config.json.*scheduler=.*beta_schedule"):
        gepc.load_backbone(net)
    backbone = gepc.load_backbone(net, config={"beta_schedule": "linear", "num_train_timesteps": 50})
    assert backbone.fingerprint == gepc.load_backbone(net, scheduler=scheduler).fingerprint


def test_a_scheduler_where_there_is_one_already(make_folder: Maker) -> None:
    from diffusers import DDPMPipeline

    folder = make_folder()
    net, scheduler = diffusers_objects(folder)
    with pytest.raises(OptionError, match="DDPMPipeline has a scheduler and a vae of its own"):
        gepc.load_backbone(DDPMPipeline(net, scheduler), scheduler=scheduler)
    with pytest.raises(OptionError, match="folder of diffusers with a scheduler, see `config`; leave out `scheduler`"):
        gepc.load_backbone(folder, scheduler=scheduler)


def test_an_object_whose_scheduler_has_no_betas(make_folder: Maker) -> None:
    from diffusers import EDMEulerScheduler, VQDiffusionScheduler

    net, _ = diffusers_objects(make_folder())
    assert gepc.load_backbone(net, scheduler=EDMEulerScheduler()).describe()["schedule"] == "EDM"
    with pytest.raises(BackboneError, match=r"VQDiffusionScheduler, which has no beta schedule.*from_denoiser"):
        gepc.load_backbone(net, scheduler=VQDiffusionScheduler(10))
    with pytest.raises(OptionError, match="rescale_timesteps does not apply"):
        gepc.load_backbone(net, scheduler=EDMEulerScheduler(), rescale_timesteps=True)
    with pytest.raises(OptionError, match="scheduler must be an object of diffusers: 'str' object has no"):
        gepc.load_backbone(net, scheduler="linear")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "name"),
    [(torch.nn.Conv2d(3, 3, 1), "Conv2d"), (None, "NoneType"), (7, "int"), (lambda x, t: x, "function")],
)
def test_other_objects(given: Any, name: str) -> None:
    with pytest.raises(OptionError, match=rf"network or pipeline, got a {name}; .*from_callable"):
        gepc.load_backbone(given)


def test_another_kind_of_network_object() -> None:
    from diffusers import VQModel

    with pytest.raises(BackboneError, match=r"a VQModel; gepc loads UNet2DModel, .*from_callable"):
        gepc.load_backbone(VQModel(block_out_channels=(8,), norm_num_groups=4))


def test_a_pipeline_with_unknown_components_is_refused(make_folder: Maker) -> None:
    import json

    folder = make_folder()
    parts = {"prior": ["diffusers", "PriorTransformer"], "unet": ["diffusers", "UNet2DModel"]}
    (folder / "model_index.json").write_text(
        json.dumps({"_class_name": "Some", "safety_checker": [None, None], **parts})
    )
    with pytest.raises(BackboneError, match=r"is a pipeline with prior, which gepc does not know.*with_encoder"):
        gepc.load_backbone(folder)


def test_imports_are_light() -> None:
    """`import gepc` and the command line's frame load neither torch nor diffusers."""
    code = "import sys, gepc, gepc.cli; gepc.list_backbones(); print({'torch', 'diffusers'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"


def test_an_edm_pickle_is_refused_and_its_network_wrapped(tmp_path: Path) -> None:
    import pickle

    with open(tmp_path / "network-snapshot.pkl", "wb") as file:
        pickle.dump({"ema": torch.nn.Conv2d(3, 3, 1)}, file)
    with pytest.raises(BackboneError, match=r"with its own code.*Backbone.from_denoiser"):
        gepc.load_backbone(tmp_path / "network-snapshot.pkl")

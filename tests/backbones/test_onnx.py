"""An exported network predicts what the original does, says what it is, and refuses what it cannot do."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toys import pictures

import gepc
from gepc.backbones.base import Backbone
from gepc.backbones.onnx import OnnxBackbone, export_onnx
from gepc.cli.app import run
from gepc.core.errors import BackboneError, InputError, OptionError
from tests.backbones.test_load_options import VALUES

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.usefixtures("trusted")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class-conditional network that predicts v and a variance, with attention, and its export."""
    from diffusers import DDPMScheduler, UNet2DModel

    place = tmp_path_factory.mktemp("onnx")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = UNet2DModel(
            sample_size=16,
            out_channels=6,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=8,
            num_class_embeds=3,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
    net.save_pretrained(place / "net")
    DDPMScheduler(num_train_timesteps=100, prediction_type="v_prediction").save_pretrained(place / "net")
    backbone = gepc.load_backbone(place / "net", device="cpu", class_label=2)
    gepc.create_detector(backbone).fit(pictures(30, size=16)).save(place / "det")
    np.save(place / "new.npy", pictures(5, size=16, seed=1))
    importlib.import_module("gepc.cli")  # registers the commands

    files = {"--out": "out", "--backbone": "net", "--images": "new.npy"}
    options = [text for name, file in files.items() for text in (name, str(place / file))]
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert run(["export", str(place / "det"), *options]) == 0
    (place / "told.txt").write_text(told.getvalue())
    return place


@pytest.fixture
def original(home: Path) -> Backbone:
    return gepc.load_backbone(home / "net", device="cpu", class_label=2)


@pytest.fixture
def exported(home: Path) -> Backbone:
    return gepc.load_backbone(home / "out" / "net.onnx")


@pytest.mark.parametrize("count", [1, 5, 40])
def test_predictions_and_activations_are_those_of_torch(original: Backbone, exported: Backbone, count: int) -> None:
    x = torch.randn((count, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    t = torch.linspace(0, 99, count).long()
    eps, maps = original.eps_and_activations(x, t)
    found, found_maps = exported.eps_and_activations(x, t)
    torch.testing.assert_close(found, eps, atol=1e-5, rtol=1e-5)
    assert list(found_maps) == list(maps)
    for name, values in maps.items():
        torch.testing.assert_close(found_maps[name], values, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(exported.eps(x, t), eps, atol=1e-5, rtol=1e-5)
    assert exported.forward_count == 2 * count


def test_the_class_is_part_of_the_file(home: Path, exported: Backbone) -> None:
    other = gepc.load_backbone(home / "net", device="cpu", class_label=0)
    x = torch.zeros(1, 3, 16, 16)
    assert not torch.allclose(other.eps(x, 50), exported.eps(x, 50), atol=1e-4)


def test_what_the_file_says_about_itself(home: Path, original: Backbone, exported: Backbone) -> None:
    assert exported.sha256 == hashlib.sha256((home / "out" / "net.onnx").read_bytes()).hexdigest()
    np.testing.assert_array_equal(exported.alphas_cumprod, original.alphas_cumprod)
    assert (exported.channels, exported.image_size) == (3, (16, 16))
    assert exported.parameters == original.parameters


def test_what_a_file_cannot_do_is_refused(exported: Backbone) -> None:
    x = torch.zeros(1, 3, 16, 16)
    with pytest.raises(BackboneError, match="no derivatives"):
        exported.jvp(x, 0, x)
    with pytest.raises(BackboneError, match="no derivatives"):
        exported.eps(x.requires_grad_(), 0)
    with pytest.raises(BackboneError, match="no variance"):
        exported.eps_and_log_variance(x.detach(), 0)
    with pytest.raises(BackboneError, match="exported with the layers"):
        exported.eps_and_activations(x.detach(), 0, ["mid_block*"])


def test_a_pickle_refuses_another_network_in_the_place_of_its_own(home: Path, tmp_path: Path) -> None:
    import onnx

    path = tmp_path / "net.onnx"
    path.write_bytes((home / "out" / "net.onnx").read_bytes())
    data = pickle.dumps(gepc.load_backbone(path))
    assert pickle.loads(data).sha256 == gepc.load_backbone(path).sha256
    model: Any = onnx.load(path)
    model.doc_string = "another one"
    onnx.save(model, path)
    with pytest.raises(BackboneError, match=r"net\.onnx holds another network than the one that was pickled"):
        pickle.loads(data)


def test_wrong_files_and_options(home: Path, tmp_path: Path) -> None:
    import onnx

    with pytest.raises(InputError, match="does not exist"):
        gepc.load_backbone(tmp_path / "no.onnx")
    (tmp_path / "cut.onnx").write_bytes((home / "out" / "net.onnx").read_bytes()[:1000])
    with pytest.raises(InputError, match="is no ONNX network"):
        gepc.load_backbone(tmp_path / "cut.onnx")
    model: Any = onnx.load(home / "out" / "net.onnx")
    for facts in ({}, {"gepc": "{}"}, {"gepc": "[]"}, {"gepc": "no JSON"}):
        del model.metadata_props[:]
        onnx.helper.set_model_props(model, facts)
        onnx.save(model, tmp_path / "foreign.onnx")
        with pytest.raises(InputError, match="not written by gepc"):
            gepc.load_backbone(tmp_path / "foreign.onnx")
    for name, value in (*VALUES.items(), ("device", "cuda")):
        with pytest.raises(OptionError, match=f"leave out `{name}`"):
            gepc.load_backbone(home / "out" / "net.onnx", **{name: value})
    path = home / "out" / "net.onnx"
    assert gepc.load_backbone(path, device="cpu").source == str(path)


def test_what_cannot_be_exported(original: Backbone, exported: Backbone, tmp_path: Path) -> None:
    function = Backbone.from_callable(lambda x, t: x, [0.9, 0.5], channels=3)
    latent = original.with_encoder(lambda images: images[..., ::2, ::2], 2)
    half = gepc.load_backbone(original.source or "", device="cpu", class_label=2, dtype="bfloat16")
    for backbone in (function, latent, half, exported):
        with pytest.raises(OptionError, match="only a torch network in pixel space"):
            export_onnx(backbone, tmp_path / "no.onnx", (16, 16))
    with pytest.raises(InputError, match="do not fit"):
        export_onnx(original, tmp_path / "no.onnx", (24, 24))


def test_the_command_exports_a_detector(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scores through onnxruntime are those of torch to 1e-4; a network that differs is not written."""
    from gepc.detector import export

    monkeypatch.chdir(home)
    told = Path("told.txt").read_text()
    assert "of the scores of 5 images" in told
    network = gepc.load_backbone("out/net.onnx")
    assert isinstance(network, OnnxBackbone)
    detector, other = gepc.load_detector("det", "net"), gepc.load_detector("out", network)
    expected = detector.score(np.load("new.npy"))
    spread = np.ptp(detector.calibration_scores_)
    np.testing.assert_allclose(other.score(np.load("new.npy")), expected, atol=1e-4 * spread, rtol=1e-4)
    assert run(["score", "out", "new.npy", "--backbone", "out/net.onnx", "--out", "scores.csv", "--alpha", "0.1"]) == 0
    assert len(Path("scores.csv").read_text().splitlines()) == 6
    assert run(["score", "out", "new.npy", "--backbone", "net", "--out", "no.csv"]) == 2
    assert "class-conditional" in capsys.readouterr().err
    # the file of another class gives other predictions
    monkeypatch.setattr(export, "export_onnx", lambda *_: _of_another_class(home))
    assert run(["export", "det", "--out", "wrong", "--backbone", "net"]) == 2
    assert "nothing was written" in capsys.readouterr().err
    assert not Path("wrong").exists()
    assert not list(home.glob(".wrong*"))


def _of_another_class(home: Path) -> Backbone:
    return gepc.load_backbone(home / "net", device="cpu", class_label=0)

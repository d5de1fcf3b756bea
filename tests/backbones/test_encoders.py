"""Feature networks as sources of activations."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file

import gepc
from gepc.backbones import encoders
from gepc.core.errors import BackboneError, InputError, OptionError
from gepc.core.known_networks import remember_network

HALF = (0.5, 0.5, 0.5)  # with this mean and deviation the network sees images in [-1, 1]


class Block(torch.nn.Module):
    """A block that halves the size behind a wider layer, as those of EfficientNet do."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.expand = torch.nn.Conv2d(inward, 2 * outward, 1)
        self.reduce = torch.nn.Conv2d(2 * outward, outward, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reduce(self.expand(x).relu())


class Tiny(torch.nn.Module):
    """Strides 2 to 32 and a classifier that takes one size only."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = (channels, 4, 6, 8, 10, 12)
        self.blocks = torch.nn.Sequential(*(Block(*pair) for pair in pairwise(widths)))
        self.head = torch.nn.Linear(12 * 16, 5)
        self.heads = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.blocks(x)
        self.heads += 1
        return self.head(features.flatten(1))


def images(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


def test_the_last_layer_of_stride_16_is_recorded() -> None:
    net, x = Tiny(), images(3, 3, 32, 48)
    encoder = gepc.Encoder.load(net, mean=HALF, std=HALF, device="cpu")
    maps = encoder.activations(x)
    assert encoder.layers == tuple(maps) == ("blocks.3",)
    torch.testing.assert_close(maps["blocks.3"], net.blocks[:4](x))
    assert maps["blocks.3"].shape == (3, 10, 2, 3)


def test_the_pass_ends_at_the_last_layer_and_leaves_no_hooks() -> None:
    """The classifier, which takes one size only, is not reached."""
    encoder = gepc.Encoder.load(net := Tiny(), ("blocks.0",), device="cpu")
    assert encoder.activations(images(1, 3, 20, 20))["blocks.0"].shape == (1, 4, 10, 10)
    assert net.heads == 0  # the module that was given is a copy's original: nothing is called on it
    assert all(not module._forward_hooks for module in net.modules())


def test_images_are_normalised_as_the_network_expects() -> None:
    net, x = Tiny(), images(2, 3, 32, 32)
    encoder = gepc.Encoder.load(net, ("blocks.0",), mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 4.0), device="cpu")
    mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (encoder.mean, encoder.std))
    expected = net.blocks[0](((x + 1) / 2 - mean) / std)
    torch.testing.assert_close(encoder.activations(x)["blocks.0"], expected)
    assert gepc.Encoder.load(net, device="cpu").mean == encoders.IMAGENET_MEAN


def test_grey_images_are_repeated_and_other_counts_refused() -> None:
    encoder, grey = gepc.Encoder.load(Tiny(), device="cpu"), images(2, 1, 32, 32)
    torch.testing.assert_close(encoder.activations(grey), encoder.activations(grey.expand(-1, 3, -1, -1)))
    with pytest.raises(InputError, match="2 channels, the encoder takes 3"):
        encoder.activations(images(1, 2, 32, 32))


def test_few_large_images_go_through_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, x = gepc.Encoder.load(Tiny(), device="cpu"), images(5, 3, 32, 32)
    whole = encoder.activations(x)
    monkeypatch.setattr(encoders, "ENCODED_PIXELS", 2 * 32 * 32)
    seen = []
    layer = "blocks.3"
    parts = gepc.Encoder(
        lambda part: seen.append(len(part)) or encoder.maps(part),  # type: ignore[func-returns-value]
        encoder.layers, encoder.sha256, encoder.mean, encoder.std, encoder.device,
    ).activations(x)  # fmt: skip
    assert seen == [2, 2, 1]
    torch.testing.assert_close(parts[layer], whole[layer])


def test_the_encoder_is_a_copy_and_has_a_digest() -> None:
    net = Tiny()
    encoder, x = gepc.Encoder.load(net, device="cpu"), images(1, 3, 32, 32)
    before = encoder.activations(x)["blocks.3"]
    with torch.no_grad():
        net.blocks[0].expand.weight.add_(1.0)
    torch.testing.assert_close(encoder.activations(x)["blocks.3"], before)
    assert len(encoder.sha256) == 64
    assert gepc.Encoder.load(net, device="cpu").sha256 != encoder.sha256
    with pytest.raises(BackboneError, match="module in memory; give the same encoder again"):
        gepc.Encoder.rebuild(encoder.describe())


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("keras:resnet", {}, "unknown encoder library 'keras'"),
        ("timm:hf-hub:someone/net", {}, "is not the name of a model of timm"),
        (Tiny(), {"weights": "x.pt"}, "`weights` goes with the name of a model"),
        ("net.onnx", {"weights": "x.pt"}, "`weights` goes with the name of a model"),
        (Tiny(), {"std": (1.0, 0.0, 1.0)}, "std above 0"),
        (Tiny(), {"layers": ("blocks.9",)}, "no module named 'blocks.9'"),
    ],
)
def test_options_that_make_no_sense(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        gepc.Encoder.load(source, device="cpu", **options)


def test_networks_that_cannot_serve() -> None:
    with pytest.raises(BackboneError, match=r"cannot take an image of shape \(3, 128, 128\)"):
        gepc.Encoder.load(torch.nn.Linear(3, 4), device="cpu")
    with pytest.raises(BackboneError, match="no layer with 16 pixels per cell; name layers"):
        gepc.Encoder.load(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)), device="cpu")


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    """A file with an inner tensor called `inner` and a map as output, for images of any size."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("AveragePool", ["image"], ["inner"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Relu", ["inner"], ["map"]),
        helper.make_node("ReduceMean", ["map"], ["logits"], axes=[2, 3], keepdims=0),
    ]
    given = [helper.make_tensor_value_info("image", floats, ["n", 3, "h", "w"])]
    made = [helper.make_tensor_value_info("map", floats, ["n", 3, "a", "b"]),
            helper.make_tensor_value_info("logits", floats, ["n", 3])]  # fmt: skip
    model = helper.make_model(helper.make_graph(nodes, "net", given, made), opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    onnx.save(model, tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def test_an_onnx_file(onnx_file: Path) -> None:
    x = images(2, 3, 8, 12)
    pooled = torch.nn.functional.avg_pool2d(x, 2)
    encoder = gepc.Encoder.load(onnx_file, mean=HALF, std=HALF)
    assert encoder.layers == ("map",)
    torch.testing.assert_close(encoder.activations(x)["map"], pooled.relu())
    inner = gepc.Encoder.load(onnx_file, ("inner", "map"), mean=HALF, std=HALF).activations(x)
    torch.testing.assert_close(inner, {"inner": pooled, "map": pooled.relu()})
    with pytest.raises(InputError, match="is no ONNX network"):
        gepc.Encoder.load(onnx_file, ("nowhere",))
    with pytest.raises(InputError, match=r"nowhere\.onnx does not exist"):
        gepc.Encoder.load(onnx_file.with_name("nowhere.onnx"))


def test_an_onnx_file_for_one_image_of_one_size(onnx_file: Path) -> None:
    """What torch.onnx.export writes by default: its images go through one by one, and others are refused."""
    import onnx

    model, x = onnx.load(onnx_file), images(2, 3, 8, 12)
    for place, side in ((0, 1), (2, 8), (3, 12)):
        model.graph.input[0].type.tensor_type.shape.dim[place].dim_value = side
    onnx.save(model, onnx_file)
    encoder = gepc.Encoder.load(onnx_file, mean=HALF, std=HALF)
    torch.testing.assert_close(encoder.activations(x)["map"], torch.nn.functional.avg_pool2d(x, 2).relu())
    with pytest.raises(InputError, match=r"takes images of 12x8 pixels .* only, got 8x8; export it") as refused:
        encoder.activations(images(2, 3, 8, 8))
    assert refused.value.options == ("size", "resize")
    with pytest.raises(InputError, match="cannot process images of 12x8 pixels"):
        gepc.Encoder.load(onnx_file, mean=(0.5,), std=(0.5,)).activations(images(1, 1, 8, 12))


def test_a_description_rebuilds_what_the_user_knows_or_trusts(
    onnx_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEPC_STATE", str(tmp_path / "state"))
    encoder, x = gepc.Encoder.load(onnx_file, ("inner",), mean=HALF, std=HALF), images(1, 3, 8, 8)
    facts = encoder.describe()
    with pytest.raises(BackboneError, match="may come from anyone"):
        gepc.Encoder.rebuild(facts)
    again = gepc.Encoder.rebuild(facts, trust=True)
    torch.testing.assert_close(again.activations(x), encoder.activations(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(encoder)).activations(x), encoder.activations(x))
    with pytest.raises(pickle.PicklingError, match="made of a module"):
        pickle.dumps(gepc.Encoder.load(Tiny(), device="cpu"))
    remember_network(encoder.sha256, onnx_file)
    assert gepc.Encoder.rebuild(facts).describe() == facts
    with pytest.raises(BackboneError, match="other weights"):
        gepc.Encoder.rebuild({**facts, "sha256": "0" * 64}, trust=True)


class _Stub(ModuleType):
    """Any part of torchvision, which timm imports and this test does not need."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock() if name == "InterpolationMode" else type(name, (torch.nn.Module,), {})


class _StubFinder:
    def find_spec(self, name: str, *_: Any) -> Any:
        return importlib.util.spec_from_loader(name, self) if name.split(".")[0] == "torchvision" else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec("torchvision") is None:
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, _StubFinder()])
    before = set(sys.modules)
    yield pytest.importorskip("timm")
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("timm", "torchvision"):
            del sys.modules[name]


def test_a_model_of_timm_with_weights_from_a_file(timm: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = timm.create_model("efficientnet_lite0", pretrained=False).eval()
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    source = "timm:efficientnet_lite0"
    encoder = gepc.Encoder.load(source, weights=tmp_path / "net.safetensors", device="cpu")
    x = images(1, 3, 64, 96)
    maps = encoder.activations(x)
    assert {name: tuple(values.shape[1:]) for name, values in maps.items()} == {"blocks.4": (112, 4, 6)}
    mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (encoder.mean, encoder.std))
    with torch.no_grad():
        expected = net.blocks[:5](net.bn1(net.conv_stem(((x + 1) / 2 - mean) / std)))
    torch.testing.assert_close(maps["blocks.4"], expected)
    assert encoder.sha256 == gepc.Encoder.load(net, device="cpu").sha256
    assert gepc.Encoder.rebuild(encoder.describe(), trust=True).layers == encoder.layers
    (tmp_path / "other.safetensors").write_bytes((tmp_path / "net.safetensors").read_bytes()[:-8])
    with pytest.raises(BackboneError, match="cut short"):
        gepc.Encoder.load(source, weights=tmp_path / "other.safetensors", device="cpu")
    with pytest.raises(BackboneError, match=r"cannot be loaded: .*no_such_model"):
        gepc.Encoder.load("timm:no_such_model", weights=tmp_path / "net.safetensors", device="cpu")


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(OptionError, match=r"needs timm: pip install 'gepc\[encoder\]'"):
        gepc.Encoder.load("timm:resnet18", device="cpu")

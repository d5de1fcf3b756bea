"""ONNX: the network of a backbone as a file, and the backbone that onnxruntime runs from it."""

import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gepc.backbones.activations import feature_map, find_layers, recorded
from gepc.backbones.base import Backbone
from gepc.core.errors import BackboneError, InputError, OptionError, raising
from gepc.core.files import sha256

KEY = "gepc"  # the name of our metadata in the file
MOST_IMAGES = 32  # in a call; some networks of diffusers take another path from 64 images on


def open_session(path: Path, tensors: Sequence[str] = ()) -> Any:
    """Open an ONNX file with onnxruntime on the CPU; `tensors` inside the network become outputs too."""
    with raising(OptionError, f"{path} needs onnx and onnxruntime: pip install 'gepc[onnx]'", ImportError):
        import onnxruntime
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # onnxruntime has a dozen errors of its own
    with raising(InputError, f"{path} is no ONNX network: {{line}}", Exception):
        content: str | bytes = str(path)
        if tensors:
            import onnx

            model = onnx.load(path)
            names = {output.name for output in model.graph.output}
            model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in names)
            content = model.SerializeToString()
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


class OnnxBackbone(Backbone):
    """A network that `export_onnx` wrote, run by onnxruntime on the CPU: predictions and activations only."""

    family = "onnx"

    def __init__(self, path: str | Path, expected: str | None = None) -> None:
        net = open_session(Path(path))
        foreign = f"{path} was not written by gepc, which names the noise schedule in it ({{kind}}: {{error}})"
        with raising(InputError, foreign, KeyError, TypeError, ValueError):
            about = json.loads(net.get_modelmeta().custom_metadata_map[KEY])
            super().__init__(about["alphas_cumprod"], about["channels"], about["size"])
            self.layers, self.parameters = about["layers"], about["parameters"]
        self.net, self.rows, self.sha256 = net, MOST_IMAGES, sha256(path)
        self.source, self.location = str(path), str(Path(path).absolute())
        if expected not in (None, self.sha256):
            raise BackboneError(f"{path} holds another network than the one that was pickled; give that one")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OnnxBackbone, (self.location, self.sha256)

    def _answers(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if x.requires_grad:
            raise BackboneError("an exported network has no derivatives, which this method needs; use the original")
        inputs = {"x": x.detach().contiguous().numpy(), "t": t.numpy()}
        return tuple(torch.from_numpy(answer) for answer in self.net.run(None, inputs))

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self._answers(x, t)[0]

    def _predict_with_variance(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise BackboneError("an exported network predicts no variance, which this method needs; use the original")

    def jvp(self, x: torch.Tensor, t: int | torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Raise `BackboneError`: the file does not contain the derivative."""
        return self.eps(x.detach().requires_grad_(), t), v

    def eps_and_activations(
        self, x: torch.Tensor, t: int | torch.Tensor, layers: Sequence[str] | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """eps(x, t) and the outputs of the exported layers, see `Backbone.eps_and_activations`."""
        if self.layers != (None if layers is None else list(layers)):
            known = self.layers or "of the default"
            raise BackboneError(f"the network was exported with the layers {known}; use these, or the original network")
        eps, *maps = self._run(self._answers, x, t)
        return eps, dict(zip([output.name for output in self.net.get_outputs()][1:], maps, strict=True))


class _Traced(torch.nn.Module):
    """A module that answers eps(x, t) and the feature maps of layers."""

    def __init__(self, backbone: Backbone, layers: Sequence[str] | None) -> None:
        super().__init__()
        self.net, self._backbone = backbone.net, [backbone]
        self._layers = find_layers(backbone.net, layers)
        self.names: list[str] = []

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with recorded(self._layers) as outputs:
            eps = self._backbone[0]._predict(x, t)
        self.names = list(outputs)
        return eps, *(feature_map(output, (x.shape[-2], x.shape[-1])) for output in outputs.values())


def export_onnx(
    backbone: Backbone, path: str | Path, size: tuple[int, int], layers: Sequence[str] | None = None
) -> OnnxBackbone:
    """Write the network of a backbone as ONNX and load it again.

    The file computes eps(x, t), and after it the activations of inner layers, from `x` (N, C, H, W) and `t` (N,), the
    indices of the noise schedule; what the network was conditioned on and what it predicts (noise, v, x_0, a velocity)
    are part of it. Its metadata `gepc` holds the schedule `alphas_cumprod` as JSON. The backbone must be a pixel-space
    network in float32 on the CPU; `size` is (H, W) of the images, and `layers` as in `Backbone.eps_and_activations`.
    """
    with raising(OptionError, "the export needs onnx and onnxscript: pip install 'gepc[onnx]'", ImportError):
        import onnx
        import onnxscript  # noqa: F401 - torch's exporter
    plain = isinstance(backbone.net, torch.nn.Module) and backbone.encoder is None and backbone.device.type == "cpu"
    if not plain or getattr(backbone, "precision", torch.float32) != torch.float32:
        raise OptionError("only a torch network in pixel space, in float32 and on the CPU, can be exported")
    backbone.check_size(*size)
    module, batch = _Traced(backbone, layers).eval(), torch.export.Dim("batch", min=1, max=MOST_IMAGES)
    inputs = torch.zeros(2, backbone.channels, *size), torch.zeros(2, dtype=torch.int64)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # else it tells of packages that are not needed
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        module(*inputs)  # gives the names of the layers in the order in which they are called
        torch.onnx.export(
            module, inputs, path, dynamo=True, external_data=False, verbose=False, input_names=["x", "t"],
            output_names=["eps", *module.names], dynamic_shapes={"x": {0: batch}, "t": {0: batch}},
        )  # fmt: skip
    model: Any = onnx.load(path)
    facts = {name: getattr(backbone, name) for name in ("channels", "parameters")}
    facts |= {"alphas_cumprod": backbone.alphas_cumprod.tolist(), "size": size, "layers": layers}
    onnx.helper.set_model_props(model, {KEY: json.dumps(facts)})
    onnx.save(model, path)
    exported = OnnxBackbone(Path(path))
    if not isinstance(exported.net.get_inputs()[0].shape[0], str):
        raise BackboneError(f"torch cannot export this {type(backbone.net).__name__} for batches of any size")
    return exported

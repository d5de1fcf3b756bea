"""Feature networks as sources of activations: models of timm and torchvision, modules in memory, ONNX files."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import PicklingError
from typing import Any

import numpy as np
import torch

from gepc.backbones.activations import feature_map, find_layers, recorded
from gepc.backbones.base import ENCODED_PIXELS, ONE_PASS
from gepc.backbones.devices import choose_device
from gepc.backbones.identity import digest_of
from gepc.backbones.onnx import open_session
from gepc.backbones.weights import WRAPPERS, check_shapes, read_tensors
from gepc.core.errors import BackboneError, InputError, OptionError, check_choice, first_line, raising
from gepc.core.files import StrPath, sha256
from gepc.core.known_networks import find_network

Maps = Callable[[torch.Tensor], dict[str, torch.Tensor]]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LIBRARIES = ("timm", "torchvision")
PROBE = 128  # side of an image that shows the sizes of a network's maps
STRIDE = 16  # pixels per cell of the layer that is recorded unless others are named


class _AllRecorded(Exception):  # noqa: N818 - it ends a forward pass and is not an error
    pass


@dataclass(frozen=True, eq=False)
class Encoder:
    """A frozen network that turns images into feature maps; `Encoder.load` makes one.

    It is not trained on the user's data and does not predict noise: its activations are a further source of features.

    Attributes
    ----------
    maps : normalised images (N, C, H, W) -> the feature map (N, C_l, H_l, W_l) of each layer.
    layers : names of the recorded layers.
    sha256 : digest of the weights (of the file, for ONNX).
    mean, std : of each channel, in units where images lie in [0, 1]: the input normalisation of the network.
    device : the device on which the network runs.
    source : "timm:NAME", "torchvision:NAME" or the path of an ONNX file; None for a module in memory.
    weights : path of the file with the weights; None if they come with the source.

    Examples
    --------
    >>> import torch
    >>> from gepc import Encoder
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, stride=2, padding=1), torch.nn.ReLU())
    >>> encoder = Encoder.load(net, layers=("0",), device="cpu")
    >>> {layer: tuple(values.shape) for layer, values in encoder.activations(torch.zeros(2, 3, 16, 24)).items()}
    {'0': (2, 4, 8, 12)}

    See Also
    --------
    Backbone.eps_and_activations : the activations of a diffusion network.
    """

    maps: Maps
    layers: tuple[str, ...]
    sha256: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    device: torch.device
    source: str | None = None
    weights: str | None = None

    @classmethod
    def load(
        cls,
        source: StrPath | torch.nn.Module,
        layers: Sequence[str] | None = None,
        *,
        weights: StrPath | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        device: str | torch.device = "auto",
    ) -> Encoder:
        """Load a feature network.

        Parameters
        ----------
        source : "timm:efficientnet_lite0" (needs `gepc[encoder]`), "torchvision:resnet18", the path of an `.onnx` file,
            or a `torch.nn.Module`, which is copied.
        layers : names of modules, with wildcards, or of outputs and inner tensors of an ONNX file. By default the last
            layer with 16 pixels per cell, or the maps among the outputs of an ONNX file.
        weights : a `.safetensors` or PyTorch file with the state dict of a named model. No code in it is run. By
            default the library downloads its own weights.
        mean, std : the input normalisation, one number for each channel, in units where images lie in [0, 1]. By
            default that of the model in timm, otherwise that of ImageNet.
        device : as in `load_backbone`. An ONNX file runs on the CPU.

        Returns
        -------
        Encoder
            The encoder. `encoder.describe()` is what `Encoder.rebuild` needs to load it again.

        Raises
        ------
        OptionError : the library or an option is unknown, or the library is not installed.
        InputError : a file does not exist or is not an ONNX network.
        BackboneError : the weights do not fit the model, or the network has no such layers.

        Examples
        --------
        >>> import torch
        >>> from gepc import Encoder
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 8, stride=8), torch.nn.Conv2d(2, 3, 2, stride=2))
        >>> Encoder.load(net, mean=(0.5,), std=(0.5,), device="cpu").layers
        ('1',)

        See Also
        --------
        load_backbone : load a network that predicts noise.
        """
        is_module = isinstance(source, torch.nn.Module)
        is_file = not is_module and Path(str(source)).suffix == ".onnx"
        if weights is not None and (is_module or is_file):
            raise OptionError("`weights` goes with the name of a model of timm or torchvision", options=("weights",))
        if is_file:
            file = Path(str(source)).resolve()
            maps, names = _onnx_maps(file, layers)
            where, normalisation = torch.device("cpu"), _normalisation(mean, std, {})
            return cls(maps, names, sha256(file), *normalisation, where, str(file))
        net = copy.deepcopy(source) if isinstance(source, torch.nn.Module) else _named_model(str(source), weights)
        where = choose_device(device)
        net = net.float().to(where).eval().requires_grad_(False)
        normalisation = _normalisation(mean, std, getattr(net, "pretrained_cfg", None) or {})
        probe = torch.zeros(1, len(normalisation[0]), PROBE, PROBE, device=where)
        maps, names = _module_maps(net, layers, probe)
        path = None if weights is None else str(Path(weights).resolve())
        named = None if is_module else str(source)
        return cls(maps, names, str(digest_of([net])), *normalisation, where, named, path)

    @torch.no_grad()
    def activations(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the feature maps of images at their own resolution.

        Few images go through the network at once if they are large, so that the memory of a pass is bounded.

        Parameters
        ----------
        images : (N, C, H, W) in [-1, 1]. Images of one channel are repeated for a network that takes three.

        Returns
        -------
        dict of str to torch.Tensor
            For each layer the map (N, C_l, H_l, W_l) in float32, on the encoder's device.

        Raises
        ------
        InputError : the images have neither one channel nor as many as the network takes.

        Examples
        --------
        >>> import torch
        >>> from gepc import Encoder
        >>> net = torch.nn.Sequential(torch.nn.AvgPool2d(4))
        >>> encoder = Encoder.load(net, ("0",), mean=(0.5,) * 3, std=(0.5,) * 3, device="cpu")
        >>> encoder.activations(torch.full((1, 1, 4, 4), -0.5))["0"].flatten().tolist()
        [-0.5, -0.5, -0.5]
        """
        channels = len(self.mean)
        if images.shape[1] not in (1, channels):
            raise InputError(f"images have {images.shape[1]} channels, the encoder takes {channels}")
        mean, std = (torch.tensor(values, device=self.device).reshape(1, -1, 1, 1) for values in (self.mean, self.std))
        rows = max(1, ENCODED_PIXELS // (images.shape[-2] * images.shape[-1]))
        parts = []
        for part in torch.split(images, rows):
            unit = (part.to(self.device, torch.float32).expand(-1, channels, -1, -1) + 1.0) / 2.0
            with ONE_PASS:
                parts.append(self.maps((unit - mean) / std))
        return {layer: torch.cat([part[layer] for part in parts]) for layer in self.layers}

    def describe(self) -> dict[str, Any]:
        """Return plain values that identify the encoder; a saved detector stores them.

        Returns
        -------
        dict
            `source`, `weights`, `sha256`, `layers`, `mean` and `std`, which `rebuild` takes.

        Examples
        --------
        >>> import torch
        >>> from gepc import Encoder
        >>> encoder = Encoder.load(torch.nn.Sequential(torch.nn.AvgPool2d(4)), layers=("0",), device="cpu")
        >>> encoder.describe()["layers"], encoder.describe()["source"]
        (['0'], None)
        """
        named = {"source": self.source, "weights": self.weights, "sha256": self.sha256}
        return {**named, "layers": list(self.layers), "mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def rebuild(cls, facts: Mapping[str, Any], device: str | torch.device = "auto", *, trust: bool = False) -> Encoder:
        """Load the encoder that `describe` gave `facts` of, and check its weights.

        The facts may come from anyone. A path in them is followed only if `trust` is set; otherwise the file is looked
        up by its digest among the networks that this user has recorded (`gepc.core.known_networks`).

        Parameters
        ----------
        facts : what `describe` returned.
        device : as in `load`.
        trust : whether to open the path that the facts name.

        Returns
        -------
        Encoder
            The encoder.

        Raises
        ------
        BackboneError : the path is not trusted, the weights have another digest, or the encoder was made from a
            module, which cannot be rebuilt: load it again and compare `sha256`.

        Examples
        --------
        >>> import torch
        >>> from gepc import Encoder
        >>> encoder = Encoder.load(torch.nn.Sequential(torch.nn.AvgPool2d(4)), layers=("0",), device="cpu")
        >>> Encoder.rebuild(encoder.describe())
        Traceback (most recent call last):
        gepc.core.errors.BackboneError: the encoder was a module in memory; give the same encoder again
        """
        source, weights = facts["source"], facts["weights"]
        if source is None:
            raise BackboneError("the encoder was a module in memory; give the same encoder again")
        if str(source).endswith(".onnx"):
            source = _trusted_path(source, facts["sha256"], trust)
        elif weights is not None:
            weights = _trusted_path(weights, facts["sha256"], trust)
        options = {name: facts[name] for name in ("layers", "mean", "std")}
        encoder = cls.load(source, weights=weights, device=device, **options)
        if encoder.sha256 != facts["sha256"]:
            raise BackboneError(f"{weights or source} has other weights than the encoder that was saved")
        return encoder

    def __reduce__(self) -> Any:
        # a pickle names the weights instead of holding them, and loading checks that they are the same
        if self.source is None:
            raise PicklingError("an encoder that was made of a module cannot be pickled; give it again")
        return partial(Encoder.rebuild, trust=True), (self.describe(), str(self.device))

    def __deepcopy__(self, memo: object) -> Encoder:
        return self  # copies of a detector share the network


def _normalisation(
    mean: Sequence[float] | None, std: Sequence[float] | None, own: Mapping[str, Any]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The given mean and standard deviation of each channel, otherwise the model's `own`, otherwise ImageNet's."""
    means, deviations = mean or own.get("mean", IMAGENET_MEAN), std or own.get("std", IMAGENET_STD)
    if len(means) != len(deviations) or min(deviations) <= 0:
        raise OptionError(f"mean and std have a number for each channel, std above 0; got {means} and {deviations}")
    return tuple(map(float, means)), tuple(map(float, deviations))


def _trusted_path(path: str, digest: str, trust: bool) -> Path:
    """The path of the network with this digest that the user has recorded, or else `path` if it is trusted."""
    known = find_network(digest)
    if known is None and not trust:
        closed = f"{path} is not opened, because the description that names it may come from anyone"
        advice = "load the encoder yourself and pass it, or trust the description"
        raise BackboneError(f"{closed}; {advice}", options=("trust",))
    return known or Path(path)


def _named_model(source: str, weights: StrPath | None) -> torch.nn.Module:
    """Build a model of timm or torchvision with its own weights, or with those of a file."""
    library, _, name = source.partition(":")
    check_choice("encoder library", library, LIBRARIES)
    if not re.fullmatch(r"[\w.]+", name):
        raise OptionError(f"{name!r} is not the name of a model of {library}")
    with raising(OptionError, f"{source} needs {library}: pip install 'gepc[encoder]' ({{error}})", ImportError):
        package = importlib.import_module(library)
    try:
        net: torch.nn.Module
        if library == "timm":
            net = package.create_model(name, pretrained=weights is None)
        else:
            net = package.models.get_model(name, weights="DEFAULT" if weights is None else None)
    except Exception as error:  # an unknown name, or a failed download: each library has its own errors
        raise BackboneError(f"{source} cannot be loaded: {first_line(error)}") from error
    if weights is not None:
        content: Any = read_tensors(Path(weights))
        content = next((content[name] for name in WRAPPERS if isinstance(content.get(name), Mapping)), content)
        check_shapes(str(weights), content, {key: tuple(value.shape) for key, value in net.state_dict().items()})
        net.load_state_dict(content)
    return net


def _module_maps(
    net: torch.nn.Module, layers: Sequence[str] | None, probe: torch.Tensor
) -> tuple[Maps, tuple[str, ...]]:
    """Return the function that gives the feature maps of a module, and the layers in the order of their calls."""
    reason = f"the encoder cannot take an image of shape {tuple(probe.shape[1:])}: {{error}}"
    failing = raising(BackboneError, reason, RuntimeError, ValueError, TypeError)
    with torch.no_grad(), failing, recorded(dict(net.named_modules())) as outputs:
        net(probe)
    chosen = [_default_layer(net, outputs)] if layers is None else list(find_layers(net, layers))
    names = tuple(name for name in outputs if name in chosen)
    if not names:
        raise BackboneError("the network calls none of the layers; name others", options=("layers",))
    modules = {name: net.get_submodule(name) for name in names}

    def stop(*_: Any) -> None:
        raise _AllRecorded

    def maps(images: torch.Tensor) -> dict[str, torch.Tensor]:
        with recorded(modules) as answers, suppress(_AllRecorded):
            ending = modules[names[-1]].register_forward_hook(stop)  # the layers behind it need not be computed
            try:
                net(images)
            finally:
                ending.remove()
        size = (images.shape[-2], images.shape[-1])
        return {name: feature_map(answers[name], size) for name in names}

    return maps, names


def _default_layer(net: torch.nn.Module, outputs: Mapping[str, Any]) -> str:
    """The last layer with `STRIDE` pixels per cell, outside of blocks that change the stride."""
    maps = {name: value for name, value in outputs.items() if name and getattr(value, "ndim", 0) == 4}
    strides = {name: PROBE / value.shape[-1] for name, value in maps.items()}
    blocks = [name for name in strides if not isinstance(net.get_submodule(name), torch.nn.Sequential)]
    changing = tuple(f"{name}." for name in blocks if strides[name] != STRIDE)
    candidates = [name for name in strides if strides[name] == STRIDE and not name.startswith(changing)]
    if not candidates:
        raise BackboneError("the network has no layer with 16 pixels per cell; name layers", options=("layers",))
    return candidates[-1]


def _onnx_maps(path: Path, layers: Sequence[str] | None) -> tuple[Maps, tuple[str, ...]]:
    """Return the function that gives outputs and inner tensors of an ONNX file, and their names."""
    session = open_session(path, layers or ())
    outputs = {output.name: len(output.shape or ()) for output in session.get_outputs()}
    names = tuple(layers or [name for name, axes in outputs.items() if axes == 4])
    if not names:
        raise InputError(f"{path} has no output that is a map (N, C, H, W); name inner tensors", options=("layers",))
    (entry, *others) = session.get_inputs()
    if others:
        raise InputError(f"{path} has {len(others) + 1} inputs; an encoder takes images only")
    fixed = [side if isinstance(side, int) else None for side in entry.shape]
    rows = fixed[0] if fixed else None

    def maps(images: torch.Tensor) -> dict[str, torch.Tensor]:
        size = (images.shape[-2], images.shape[-1])
        takes = tuple(side or own for side, own in zip(fixed[2:], size, strict=False))
        message = f"{path} cannot process images of {size[1]}x{size[0]} pixels: {{line}}"
        if takes not in ((), size):
            message = (
                f"{path} takes images of {takes[1]}x{takes[0]} pixels (width x height) only, got {size[1]}x{size[0]}; "
                "export it for images of any size, or give `size` and set `resize` to stretch"
            )
        # onnxruntime has a dozen errors of its own
        with raising(InputError, message, Exception, options=("size", "resize")):
            chunks = torch.split(images, rows or len(images))
            parts = [session.run(list(names), {entry.name: chunk.numpy()}) for chunk in chunks]
        answers = map(np.concatenate, zip(*parts, strict=True))
        return {name: feature_map(torch.from_numpy(value), size) for name, value in zip(names, answers, strict=True)}

    return maps, names

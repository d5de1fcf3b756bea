"""Inner activations of a network: which layers are recorded, and how their outputs become feature maps."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from gepc.core.errors import BackboneError, OptionError, nearest

Layers = Mapping[str, torch.nn.Module]

RESIDUAL = re.compile(r"Res(net|idual)?_?Block", re.IGNORECASE)
TRANSFORMER = re.compile(r"(Transformer|DiT)_?Block", re.IGNORECASE)


def find_layers(net: torch.nn.Module, names: Sequence[str] | None = None) -> Layers:
    """The layers to record, by name and in the order in which the network defines them.

    `names` are those of `net.named_modules()`, with wildcards (`up_blocks.*.resnets.*`). Without them, residual blocks
    are recognised by the name of their class; a network without them is recorded at its transformer blocks, and an
    unknown one at its convolutions.
    """
    modules, found = dict(net.named_modules()), dict[str, torch.nn.Module]()
    for pattern in names or ():
        matching = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not matching:
            raise OptionError(f"the network has no module named {pattern!r}; {nearest(pattern, list(modules))}")
        found |= {name: modules[name] for name in matching}
    if names is not None:
        return found
    for kind in (RESIDUAL, TRANSFORMER):
        blocks = [name for name, module in modules.items() if kind.search(type(module).__name__)]
        if blocks:
            inside = tuple(f"{name}." for name in blocks)
            return {name: modules[name] for name in blocks if not name.startswith(inside)}
    convolutions = {name: module for name, module in modules.items() if isinstance(module, torch.nn.Conv2d)}
    if not convolutions:
        missing = f"no residual block, transformer block or convolution is found in {type(net).__name__}"
        raise BackboneError(f"{missing}; name the modules to record with `layers`", options=("layers",))
    return convolutions


@contextmanager
def recorded(layers: Layers) -> Iterator[dict[str, Any]]:
    """Within the context every forward pass fills the mapping with the last output of each layer that it calls."""
    outputs: dict[str, Any] = {}

    def keep(_module: Any, _inputs: Any, output: Any, name: str) -> None:
        outputs[name] = output

    handles = [module.register_forward_hook(partial(keep, name=name)) for name, module in layers.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def feature_map(output: Any, size: tuple[int, int]) -> torch.Tensor:
    """A layer's output as (N, C, h, w).

    The tokens of a transformer, (N, h w, C), are arranged as a grid with the aspect ratio of the input's `size`; tokens
    that form none become (N, C, tokens, 1). If a layer has several outputs, the largest is taken: the tokens of the
    image rather than those of the text.
    """
    outputs = output if isinstance(output, (tuple, list)) else [output]
    tensors = [item for item in outputs if isinstance(item, torch.Tensor)]
    if not tensors:
        raise BackboneError(f"a recorded layer returned a {type(output).__name__} without tensors; choose other layers")
    field = max(tensors, key=torch.Tensor.numel)
    if field.ndim == 4:
        return field
    if field.ndim != 3:
        raise BackboneError(f"a recorded layer returned {field.ndim} dimensions; choose layers with maps or tokens")
    count, tokens, channels = field.shape
    height = round(math.sqrt(tokens * size[0] / size[1]))
    grid = (height, tokens // height) if height and tokens % height == 0 else (tokens, 1)
    return field.transpose(1, 2).reshape(count, channels, *grid)

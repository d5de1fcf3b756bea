"""Read weights from files of any origin. No code in them is run, and errors name the file and the tensor."""

import contextlib
import dataclasses
import itertools
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers import UNet2DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file

from gepc.core.errors import BackboneError, InputError, first_line, raising
from gepc.core.files import open_regular, read_json

Shape = tuple[int, ...]
TRAINED_ON = "trained_on.safetensors"
MAX_PICKLE = 4 << 20  # names and shapes of a checkpoint; a thousand tensors take some 200 kB
WRAPPERS = ("ema", "ema_model", "model_ema", "ema_state_dict", "state_dict", "model", "model_state_dict", "net")


def read_tensors(path: Path) -> dict[str, Any]:
    """Map the content of a `.safetensors` or PyTorch file into memory.

    PyTorch files are opened with `weights_only=True`: one that carries code is refused before anything runs.
    """
    check_file(path)
    with raising(BackboneError, f"{path} is cut short or is not a safetensors file: {{error}}", SafetensorError):
        content = load_file(path) if path.suffix == ".safetensors" else _read_torch(path)
    if not isinstance(content, Mapping):
        raise BackboneError(f"{path} holds a {type(content).__name__}, not a state dict; save net.state_dict()")
    _check_sizes(content, path, path.stat().st_size)
    return dict(content)


def check_file(path: Path) -> None:
    """Raise an error for a file that is not a checkpoint, or that takes more memory or time than its size allows."""
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    with open_regular(path) as handle:
        start = handle.read(64)
        handle.seek(0)
        if not start:
            raise BackboneError(f"{path} is empty")
        if path.suffix == ".safetensors":
            if int.from_bytes(start[:8], "little") > MAX_PICKLE and not start.startswith(b"PK"):
                raise BackboneError(f"{path} is cut short or is not a safetensors file: its header is too large")
        elif start.startswith(b"PK"):
            _check_archive(path)
        elif start.startswith(b"\x80"):
            _check_pickles(path, handle)
        else:
            raise BackboneError(f"{path} is not a PyTorch checkpoint: it begins with {start[:24]!r}")


def _check_pickles(path: Path, handle: IO[bytes]) -> None:
    """Check the length of the five pickles at the start of a file of torch before 1.6; raw data follow them."""
    with contextlib.suppress(Exception):  # what is damaged, torch will say
        for _ in range(5):
            for _ in pickletools.genops(handle):
                if handle.tell() > MAX_PICKLE:
                    break
    if handle.tell() > MAX_PICKLE:
        raise BackboneError(f"{path} has a pickle of more than {MAX_PICKLE:,} bytes, too large for names and shapes")


def _check_sizes(content: Any, path: Path, most: int, depth: int = 0) -> None:
    """Refuse tensors that are larger than the file: a view repeats elements, and takes memory when it is copied."""
    for name, value in content.items() if isinstance(content, Mapping) and depth < 4 else ():
        if isinstance(value, torch.Tensor) and value.numel() * value.element_size() > most:
            raise BackboneError(f"{path}: tensor {name} of shape {tuple(value.shape)} is larger than the file")
        _check_sizes(value, path, most, depth + 1)


def _read_torch(path: Path) -> Any:
    is_zip = zipfile.is_zipfile(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code is None:
            advice = "load it with its own code, and pass the network to Backbone.from_denoiser or from_callable"
            raise BackboneError(f"{path} is a pickle, but not one that torch.save wrote; {advice}") from error
        carried = f"it is a pickle that carries code ({code[1].rstrip('.')}), not only tensors"
        advice = "Ask its author for torch.save(model.state_dict(), ...) or a safetensors file"
        raise BackboneError(f"{path} was refused before anything ran: {carried}. {advice}") from error
    except Exception as error:  # a pickle may be wrong in any way
        reason = first_line(error)
        raise BackboneError(f"{path} is cut short or damaged: {reason}; copy or download it again") from error


def _check_archive(path: Path) -> None:
    if not zipfile.is_zipfile(path):
        raise BackboneError(f"{path} is cut short: its table of contents, at the end, is missing; download it again")
    with zipfile.ZipFile(path) as archive:
        names, entries = archive.namelist(), archive.infolist()
    pickles = sum(entry.file_size for entry in entries if entry.filename.endswith(".pkl"))
    if sum(entry.file_size for entry in entries) > path.stat().st_size or pickles > MAX_PICKLE:
        raise BackboneError(f"{path} unpacks to much more than it holds; torch.save does not write such files")
    if any(name.endswith("/constants.pkl") for name in names):
        raise BackboneError(f"{path} is a TorchScript program, which carries code; gepc takes only a state dict")


def unwrap(content: Mapping[str, Any], landmarks: Sequence[str], path: Path) -> dict[str, torch.Tensor]:
    """The state dict in `content`: the content itself, or an entry of it, with a name that ends in a landmark.

    Checkpoints wrap it as {"model": ...}, {"state_dict": ...} or {"ema": ...} (averaged weights are taken first) and
    prefix its names with `module.` or the like; that prefix is cut off.
    """
    entries = [entry for entry in (content, *map(content.get, WRAPPERS)) if isinstance(entry, Mapping)]
    for entry, landmark in itertools.product(entries, landmarks):
        prefixes = [name.removesuffix(landmark) for name in map(str, entry) if f".{name}".endswith(f".{landmark}")]
        if prefixes:
            for name, value in entry.items():
                if not isinstance(value, torch.Tensor):
                    raise BackboneError(f"{path}: {name} is a {type(value).__name__}, not a tensor")
            return {name.removeprefix(prefixes[0]): value for name, value in entry.items()}
    names = ", ".join(map(str, list(content)[:4]))
    hint = "; this is diffusers' layout: give the folder with its config.json" if "conv_in.weight" in content else ""
    raise BackboneError(f"{path} is not an OpenAI UNet: it holds {names}, but no tensor {landmarks[0]}{hint}")


def check_shapes(path: Path | str, given: Mapping[str, torch.Tensor], expected: Mapping[str, Shape]) -> None:
    """Raise `BackboneError` unless `given` holds every expected tensor, in its shape, and no other."""
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    problems = {
        "has shape {found}, expected {expected}": [n for n in shapes if shapes[n] != expected.get(n, shapes[n])],
        "is missing, expected shape {expected}": [n for n in expected if n not in shapes],
        "of shape {found} has no place in this network": [n for n in shapes if n not in expected],
    }
    for problem, names in problems.items():
        if names:
            text = problem.format(found=shapes.get(names[0]), expected=expected.get(names[0]))
            hint = "more of that kind; one damaged tensor, or a setting, may decide the shape of the others"
            others = f" (and {len(names) - 1} {hint})" if len(names) > 1 else ""
            raise BackboneError(f"{path}: tensor {names[0]} {text}{others}")


def assign_weights(net: UNet2DModel, tensors: Mapping[str, torch.Tensor]) -> UNet2DModel:
    """Make `tensors` the parameters of a network that was built on the meta device, without copying them."""
    net.load_state_dict(dict(tensors), strict=True, assign=True)
    return net.requires_grad_(False)


def settle(net: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Copy the weights, one after the other, from the mapped file to the device, channels last."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        layout = torch.channels_last if tensor.ndim == 4 else torch.contiguous_format
        precision = dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=device, dtype=precision, copy=True, memory_format=layout)

    settled: torch.nn.Module = net._apply(move)  # type: ignore[no-untyped-call]
    return settled


def weight_files(folder: Path, variant: str | None = None) -> list[Path]:
    """The files that hold a diffusers model's weights: one, or the shards that its index lists; safetensors first."""
    stem, mark = "diffusion_pytorch_model", "" if variant is None else f".{variant}"
    for suffix in ("safetensors", "bin"):
        index = folder / f"{stem}.{suffix}.index{mark}.json"
        names = {f"{stem}{mark}.{suffix}"}
        if not (folder / f"{stem}{mark}.{suffix}").is_file():
            names = set(read_json(index)["weight_map"].values()) if index.is_file() else set()
        if any(Path(name).name != name for name in names):
            raise InputError(f"{index} names a file in another folder")
        for name in names:
            check_file(folder / name)
        if names:
            return [folder / name for name in sorted(names)]
    raise InputError(f"{folder} contains no weights: expected {stem}{mark}.safetensors (or .bin), or set `variant`")


_OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def read_all(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The tensors of all `files` together. Attention tensors from before diffusers 0.15 get today's names."""

    def current(name: str) -> str:
        old = r"(attentions\.\d+\.)(query|key|value|proj_attn)\."
        return re.sub(old, lambda match: f"{match[1]}{_OLD_NAMES[match[2]]}.", name)

    return {current(name): tensor for path in files for name, tensor in read_tensors(path).items()}


def read_trained_on(folder: Path) -> npt.NDArray[np.uint64] | None:
    """The hashes of the images that the network in `folder` was trained on; None if the folder does not list them."""
    path = folder / TRAINED_ON
    if not path.is_file():
        return None
    damaged = f"{path} is damaged ({{error}}); restore it, or delete it to load the backbone"
    with raising(InputError, damaged, SafetensorError, OSError, KeyError):
        return load_arrays(path)["hashes"]


# Where patches are needed, the config's `attention_head_dim` is a text that begins like this. Plain diffusers fails on
# it; with a number it would silently build a different network.
MARK = "needs gepc: "
EXTRAS = "gepc.json"  # the file beside the config that holds the patches


@dataclass(frozen=True)
class Patches:
    """Changes to a built network, each None or False where the config is enough."""

    encoder_heads: int | None = None  # at every width, also in the middle; the config only has a width per head
    decoder_heads: int | None = None
    time_channels: int | None = None  # width of the sinusoidal time embedding, if it is not that of the first level
    head_channels: int | None = None  # the config's own `attention_head_dim`, which `MARK` replaces there

    @property
    def reasons(self) -> list[str]:
        """Why plain diffusers cannot build this network; empty if it can."""
        reasons = {
            f"{self.encoder_heads} attention heads at every width": self.encoder_heads is not None,
            f"{self.decoder_heads} heads in the decoder": self.decoder_heads != self.encoder_heads,
            f"a time embedding of {self.time_channels} channels": self.time_channels is not None,
        }
        return [reason for reason, holds in reasons.items() if holds]

    def to_dict(self) -> dict[str, int | bool]:
        """The changes that are made, for a file."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}


def build_net(config: Mapping[str, Any], patches: Patches) -> UNet2DModel:
    """The network of that config, without memory for its weights (meta device)."""
    values = dict(config)
    if str(values.get("attention_head_dim")).startswith(MARK):
        values["attention_head_dim"] = patches.head_channels
    with torch.device("meta"):
        net = UNet2DModel.from_config(values)
        attentions = {name: module for name, module in net.named_modules() if isinstance(module, Attention)}
        for name, module in attentions.items() if patches.encoder_heads is not None else ():
            module.heads = patches.decoder_heads if name.startswith("up_blocks") else patches.encoder_heads
            module.sliceable_head_dim = module.heads
            module.scale = (module.inner_dim // module.heads) ** -0.5
        if patches.time_channels is not None:
            width = net.time_embedding.linear_2.out_features
            net.time_proj = Timesteps(patches.time_channels, flip_sin_to_cos=True, downscale_freq_shift=0)
            net.time_embedding = TimestepEmbedding(patches.time_channels, width)
    return net

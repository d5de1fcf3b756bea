"""One call for any backbone: an embedded name, a folder, a checkpoint, a hub id, or one that is loaded already."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gepc.core.errors import BackboneError, InputError, OptionError, nearest

if TYPE_CHECKING:
    import os

    import torch

    from gepc.backbones.base import Backbone

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


def list_backbones() -> list[str]:
    """The names of the backbones that ship with the package."""
    return sorted(path.parent.name for path in WEIGHTS.glob("*/config.json"))


def load_backbone(
    source: str | os.PathLike[str] | Backbone,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
    class_label: int | None = None,
    rescale_timesteps: bool | None = None,
) -> Backbone:
    """Load what predicts noise.

    Parameters
    ----------
    source : an embedded name (`list_backbones`), a diffusers model or pipeline folder, an OpenAI improved- or
        guided-diffusion checkpoint (`.pt` or `.safetensors`), a hub id ("org/name"), or a loaded `Backbone`.
    config : for a checkpoint, OpenAI's own options as a mapping, a preset's name or a YAML or JSON file
        (`{"preset": name, ...}` changes single options); for a folder, fields of its scheduler to replace.
    device, dtype : "auto" is CUDA, else MPS, else the CPU; bfloat16 and float16 where the device has them.
    class_label : the class a class-conditional net is asked for.
    rescale_timesteps : call the net with t*1000/T; None leaves it to the checkpoint's config.
    """
    from gepc.backbones.base import Backbone

    if isinstance(source, Backbone):
        return source
    target: dict[str, Any] = {"class_label": class_label, "device": device, "dtype": dtype}
    name, path = str(source), Path(source)
    if isinstance(source, str) and source in list_backbones():
        path = WEIGHTS / name
    elif not path.exists():
        path = _from_hub(name)
    if path.is_dir():
        backbone = _load_folder(path, config, rescale_timesteps, target)
    else:
        backbone = _load_checkpoint(path, config, rescale_timesteps, target)
    backbone.source = name
    given = {
        "config": config if config is None or isinstance(config, Mapping) else str(config),
        "dtype": None if dtype == "float32" else str(dtype).removeprefix("torch."),
        "class_label": class_label,
        "rescale_timesteps": rescale_timesteps,
    }
    backbone.load_options = {option: value for option, value in given.items() if value is not None}
    return backbone


def _load_folder(
    path: Path, config: str | Path | Mapping[str, Any] | None, rescale: bool | None, target: Mapping[str, Any]
) -> Backbone:
    from gepc.backbones.diffusers import load_folder
    from gepc.core.options import read_yaml

    if isinstance(config, (str, Path)):
        config = read_yaml(config)
    overrides = dict(config or {})
    if rescale is not None:
        overrides["rescale_timesteps"] = rescale
    return load_folder(path, overrides, **target)


def _load_checkpoint(
    path: Path, config: str | Path | Mapping[str, Any] | None, rescale: bool | None, target: Mapping[str, Any]
) -> Backbone:
    import dataclasses

    from gepc.backbones.diffusers import DiffusersBackbone
    from gepc.backbones.openai.convert import convert
    from gepc.core.files import sha256

    converted = convert(path, config)
    scheduler = converted.scheduler
    if rescale is not None:
        scheduler = dataclasses.replace(scheduler, rescale_timesteps=rescale)
    backbone = DiffusersBackbone(converted.build(), scheduler, patches=converted.patches, **target)
    backbone.family = "openai"
    backbone.sha256 = sha256(path)
    return backbone


def _from_hub(name: str) -> Path:
    """The local copy of a hub repository; anything that cannot be one is an unknown name."""
    looks_like_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None
    if not looks_like_id or name.endswith(SUFFIXES):
        if "/" in name or "\\" in name or name.endswith(SUFFIXES):
            raise InputError(f"{name} does not exist")
        raise OptionError(f"no backbone, file or folder is called {name!r}; {nearest(name, list_backbones())}")
    from huggingface_hub import snapshot_download

    wanted = [f"{home}{pattern}" for home in ("", "unet/", "scheduler/") for pattern in ("*.json", "*.safetensors")]
    try:
        folder = Path(snapshot_download(name, allow_patterns=wanted))
        if not any(folder.rglob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*wanted, "*.bin", "unet/*.bin"]))
    except Exception as error:  # the hub client raises its own, its transport's and OSError
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BackboneError(
            f"there is no folder {name}, and the hub did not give it either ({reason}). Without a connection, download "
            f"it elsewhere (hf download {name} --local-dir FOLDER), copy the folder here and pass its path"
        ) from error
    return folder

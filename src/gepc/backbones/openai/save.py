"""A converted checkpoint as a folder that diffusers knows: two JSON files and one safetensors file."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gepc.backbones.diffusers import EXTRAS
from gepc.backbones.openai.convert import Converted
from gepc.core.errors import InputError, StorageError
from gepc.core.files import replacing, sha256, write_json


def save_folder(converted: Converted, out: Path) -> None:
    """Write `config.json`, `scheduler_config.json`, the weights in float32 and `gepc.json`; all of them or nothing.

    Where plain diffusers computes the same function there is a `model_index.json` too, and `DDPMPipeline` takes it.
    """
    import diffusers

    version = {"_diffusers_version": diffusers.__version__}
    with _new_folder(out) as folder:
        write_json(folder / "config.json", {**converted.config, **version})
        scheduler = {"_class_name": "DDPMScheduler", **version, **converted.scheduler.to_config()}
        write_json(folder / "scheduler_config.json", scheduler)
        write_json(folder / EXTRAS, _extras(converted))
        if not converted.caveats and converted.architecture.classes is None:
            write_json(folder / "model_index.json", _model_index(version))
        _save_weights(converted, folder / "diffusion_pytorch_model.safetensors")


def _save_weights(converted: Converted, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.float().contiguous() for name, tensor in converted.tensors.items()}
    try:
        with replacing(path) as draft:
            save_file(tensors, draft, metadata={"format": "pt"})
    except SafetensorError as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def _extras(converted: Converted) -> dict[str, Any]:
    """What gepc needs beyond diffusers' files: patches, OpenAI's timesteps, and where the weights came from."""
    scheduler, options = converted.scheduler, converted.options
    said = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != field.default
    }
    return {
        "family": "openai",
        "patches": converted.patches.to_dict(),
        "scheduler": {
            "rescale_timesteps": scheduler.rescale_timesteps,
            "timestep_respacing": scheduler.timestep_respacing,
        },
        "converted_from": {"file": converted.path.name, "sha256": sha256(converted.path), "options": said},
    }


def _model_index(version: dict[str, str]) -> dict[str, Any]:
    return {
        "_class_name": "DDPMPipeline",
        **version,
        "scheduler": ["diffusers", "DDPMScheduler"],
        "unet": ["diffusers", "UNet2DModel"],
    }


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out`; on success it becomes `out` at once, on any failure it is removed."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} already exists; choose another folder, or remove it first")
    draft = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        draft.mkdir(parents=True)
        yield draft
        os.replace(draft, out)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)

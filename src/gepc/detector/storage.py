"""A detector on disk: a folder with `detector.json` for people and `state.safetensors` for numbers. No pickle."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import shutil
import uuid
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gepc._version import __version__
from gepc.backbones.base import Backbone
from gepc.core.errors import BackboneError, InputError, OptionError, StorageError
from gepc.core.files import digest, read_json, write_arrays, write_json
from gepc.core.options import build
from gepc.detector.hub import download, is_hub_id
from gepc.images.preprocessing import Preprocessing
from gepc.scoring.calibrators import create_calibrator
from gepc.scoring.scorer import Selection
from gepc.verdicts.conformal import CalibrationScores

if TYPE_CHECKING:
    import torch

    from gepc.detector.detector import Detector

SCHEMA = 1
DESCRIPTION, STATE = "detector.json", "state.safetensors"
CONDITIONING = "conditioning/"  # the embeddings of a text-conditional backbone, among the arrays
STATED_ALPHA = 0.05
# of a backbone's description: where it lies and runs, and what is compared by itself
_MAY_DIFFER = {"source", "sha256", "load_options", "device", "parameters", "family"}


def is_detector(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder` holds a saved detector."""
    return (Path(folder) / DESCRIPTION).is_file()


def save_detector(detector: Detector, folder: str | os.PathLike[str]) -> None:
    """Write the folder beside its final place, then rename: it is whole or absent, and an old one stays until then."""
    final = Path(folder)
    if final.exists() and not (final.is_dir() and (is_detector(final) or not any(final.iterdir()))):
        raise InputError(f"{final} exists and is not a detector folder; give another place")
    draft = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        draft.mkdir(parents=True)
        write_arrays(draft / STATE, state_of(detector))
        write_json(draft / DESCRIPTION, describe(detector))
        _swap(draft, final)
    except OSError as error:
        cause = (isinstance(error, StorageError) and error.__cause__) or error
        reason = getattr(cause, "strerror", None) or cause
        raise StorageError(f"cannot write {final}: {reason}; what was there is untouched") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _swap(draft: Path, final: Path) -> None:
    if not final.exists():
        os.replace(draft, final)
        return
    old = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.old")
    os.replace(final, old)
    try:
        os.replace(draft, final)
    except OSError:
        os.replace(old, final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def describe(detector: Detector) -> dict[str, Any]:
    """All of a fitted detector that a person may want to read, and what loading needs in addition to the arrays."""
    from gepc.detector.registry import options_of

    guarantee, cost = None, dataclasses.asdict(detector.cost())
    with contextlib.suppress(OptionError):
        guarantee = detector.guarantee(STATED_ALPHA).as_dict()
    return {
        "schema": SCHEMA,
        "method": detector.extractor.name,
        "options": options_of(detector),
        "preprocessing": dataclasses.asdict(detector.preprocessing_),
        "backbone": detector.backbone.describe(),
        "fitted": {
            "timesteps": detector.levels_.tolist(),
            "cv": detector.cv_.tolist(),
            "kept": detector.kept_.tolist(),
            "weights": detector.weights_.tolist(),
            "mean_levels": detector.mean_levels_,
            "map_scale": detector.map_scale_,
            "fit_images": detector.n_fit_,
            "calibration_images": len(detector.calibration_scores_),
            "groups": list(detector.reference_.by_group),
        },
        "cost": {name: passes for name, passes in cost.items() if passes or name != "encoder"},
        "guarantee": guarantee,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    found = {"gepc": __version__, "python": platform.python_version()}
    for package in ("numpy", "torch", "diffusers", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def state_of(detector: Detector) -> dict[str, Any]:
    """The fitted arrays by name."""
    arrays = detector.scorer_.state()
    for position, scores in enumerate(detector.reference_.by_group.values()):
        arrays[f"reference/{position}"] = scores
    return arrays | {f"{CONDITIONING}{name}": values for name, values in detector.backbone.conditioning.items()}


def load_detector(
    folder: str | os.PathLike[str], backbone: Backbone | str | None = None, device: str | torch.device = "auto"
) -> Detector:
    """Load a saved detector. Its backbone is loaded from where it came from, or given, and must be the same weights.

    Parameters
    ----------
    folder : where `save` wrote it, or a repository on the Hugging Face hub ("org/name").
    backbone : used instead of the one that the detector names.
    device : where a backbone that is loaded runs: "auto" is CUDA if available, otherwise MPS, otherwise the CPU.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    folder = Path(folder)
    if not folder.exists() and is_hub_id(folder.as_posix()):
        folder = download(folder.as_posix())
    if not is_detector(folder):
        raise InputError(f"{folder} holds no {DESCRIPTION}; give a folder written by `gepc fit` or detector.save")
    description = read_json(folder / DESCRIPTION)
    schema = description.get("schema") if isinstance(description, dict) else None
    if schema != SCHEMA:
        raise InputError(f"{folder} has schema {schema!r}; this version reads {SCHEMA}")
    try:
        arrays = load_file(folder / STATE)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder / STATE} is missing or damaged: {error}") from error
    try:
        prompt = {
            name.removeprefix(CONDITIONING): arrays.pop(name) for name in list(arrays) if name.startswith(CONDITIONING)
        }
        stored = description["backbone"]
        options = {**stored["load_options"], "device": device, **({"embeddings": prompt} if prompt else {})}
        return _assemble(description, arrays, _find_backbone(stored, backbone, options, folder))
    except KeyError as error:
        raise InputError(f"{folder} is incomplete: {error} is missing") from error


def _find_backbone(
    stored: dict[str, Any], given: Backbone | str | None, options: dict[str, Any], folder: Path
) -> Backbone:
    from gepc.backbones.load import load_again

    if given is None and stored["source"] is None:
        raise BackboneError(
            f"{folder} was fitted with a backbone made in Python ({stored['family']}); "
            "pass it: load_detector(folder, backbone)"
        )
    source = stored["source"] if given is None else given
    backbone = load_again(source, options, stored["sha256"], str(folder))
    found = json.loads(json.dumps(backbone.describe()))
    for name, value in stored.items():
        if name not in _MAY_DIFFER and name in found and found[name] != value:
            raise BackboneError(
                f"{folder} was fitted with a backbone whose {name} is {value!r}, this one has {found[name]!r}; "
                "fit again or pass the right backbone: load_detector(folder, backbone)"
            )
    return backbone


def _assemble(description: dict[str, Any], arrays: dict[str, Any], backbone: Backbone) -> Detector:
    from gepc.detector.registry import create_detector

    fitted = description["fitted"]
    detector = create_detector(description["method"], backbone, **_usable(description["options"]))
    detector.preprocessing_ = build(Preprocessing, description["preprocessing"], "preprocessing")
    detector.levels_ = np.asarray(fitted["timesteps"])
    detector.kept_ = np.asarray(fitted["kept"])
    detector.map_scale_ = fitted["map_scale"]
    detector.n_fit_ = fitted["fit_images"]
    detector.mean_levels_ = fitted.get("mean_levels", float(len(detector.kept_)))
    kept = tuple(fitted["timesteps"].index(t) for t in fitted["kept"])
    selection = Selection(kept, np.asarray(fitted["weights"]), np.asarray(fitted["cv"]))
    detector.scorer_ = detector._scorer().restore(selection, arrays)
    groups = fitted["groups"]
    detector.reference_ = CalibrationScores({label: arrays[f"reference/{place}"] for place, label in enumerate(groups)})
    return detector


def _usable(options: dict[str, Any]) -> dict[str, Any]:
    """Options without those that older versions stored although the calibrator ignores them."""
    calibration = options.get("calibration")
    if calibration is None:
        return options
    calibrator = create_calibrator(calibration)
    ignored = {"aggregate": calibrator.uses_aggregate, "fuse": calibrator.uses_fuse}
    return {name: value for name, value in options.items() if ignored.get(name, True)}


def detector_digest(detector: Detector) -> str:
    """Equal for detectors that give equal scores: weights, options and fitted state, not where they are kept or run."""
    facts = describe(detector)
    options = {name: value for name, value in facts["options"].items() if name != "batch_size"}
    place = ("source", "device", "load_options")
    network = detector.backbone.fingerprint or {k: v for k, v in facts["backbone"].items() if k not in place}
    what = [facts["method"], options, facts["preprocessing"], facts["fitted"], network]
    return digest(what, state_of(detector))

"""A detector on disk: a folder with `detector.json` for people and `state.safetensors` for numbers. No pickle."""

import contextlib
import dataclasses
import json
import math
import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load

from gepc._version import __version__
from gepc.backbones.base import Backbone
from gepc.backbones.load import is_hub_id, list_backbones, load_again
from gepc.calibration.calibrators import under
from gepc.calibration.scorer import Scorer, Selection
from gepc.conformal.p_values import CalibrationScores
from gepc.core.errors import BackboneError, GepcError, InputError, OptionError, raising
from gepc.core.files import (
    StrPath,
    digest,
    open_regular,
    read_json,
    replacing_folder,
    restore_folder,
    write_arrays,
    write_json,
)
from gepc.core.known_networks import find_network, remember_network
from gepc.core.options import build
from gepc.core.parts import Part
from gepc.detector.fitted import FittedDetector
from gepc.detector.parameters import NOMINAL_SIZE, Parameters, divided, without_unused
from gepc.images.preprocessing import MOST_PIXELS, Preprocessing
from gepc.maps.statistics import MapStatistics
from gepc.methods.base import find_method

Facts = dict[str, Any]  # plain values by name, as in JSON; or arrays by name
SCHEMA = 1
DESCRIPTION, STATE = "detector.json", "state.safetensors"
CONDITIONING = "conditioning/"  # the embeddings of a text-conditional backbone, among the arrays
MAPS = "maps/"  # the statistics of calibrated maps, since 0.2
STATED_ALPHA = 0.05
# what a folder may ask for
MAX_DEPTH, MAX_LENGTH, MAX_OPTION, MAX_NUMBER, MAX_STATE = 8, 10_000, 100_000, 10**12, 1 << 30
MAX_COLUMNS = 1 << 17  # features of inner layers have some columns for every channel
MAX_BATCH, MAX_PASSES, MAX_PIXELS, MAX_SIDE, MIN_WIDTH = 4096, 1_000_000, 1 << 24, 1 << 20, 64
RETIRED = ("sequential", "background", "checkpoints")
"""Options of earlier versions, which folders name even where they were not used."""
_PARTS = {"method": str, "options": dict, "preprocessing": dict, "backbone": dict, "fitted": dict}
_PRECISIONS = {"axes": ("float32",), "samples": ("float32", "float64")}
"""The largest arrays -> the types in which they are stored; the others are float64."""
_LOAD_OPTIONS = {"config", "dtype", "class_label", "prompt", "rescale_timesteps", "variant", "use_safetensors"}
_LOAD_OPTIONS |= {"time_scale", "act_on", "offload"}
# of a backbone's description: where it lies and runs, and what is compared by itself
_MAY_DIFFER = {"source", "sha256", "load_options", "device", "parameters", "family", "unchecked"}


def is_detector(folder: StrPath) -> bool:
    """Whether `folder` holds a saved detector."""
    return (Path(folder) / DESCRIPTION).is_file()


def save_detector(fitted: FittedDetector, folder: StrPath) -> None:
    """Write the folder, which is whole or absent; an old one stays until then."""
    with replacing_detector(folder) as draft:
        for path in _network_files(fitted).values():
            if Path(folder).resolve() in path.resolve().parents:
                raise InputError(f"{path} is in {folder}, which saving replaces; give another folder, or move the file")
        write_detector(fitted, draft, Path(folder))
    remember_networks(fitted)


def replacing_detector(folder: StrPath) -> contextlib.AbstractContextManager[Path]:
    """`replacing_folder` for a folder that is new, empty or a detector; anything else is an `InputError`."""
    final = Path(folder)
    if final.exists() and not (final.is_dir() and (is_detector(final) or not any(final.iterdir()))):
        raise InputError(f"{final} exists and is not a detector folder; give another place")
    return replacing_folder(final)


def write_detector(fitted: FittedDetector, draft: Path, final: Path) -> None:
    """Write both files to `draft`, and check that they can be loaded where it is renamed to `final`."""
    write_arrays(draft / STATE, state_of(fitted))
    write_json(draft / DESCRIPTION, describe(fitted))
    _check_description(read_json(draft / DESCRIPTION), final)


def _network_files(fitted: FittedDetector) -> dict[str, Path]:
    """The files and folders of networks that the detector names, by the digest of their weights."""
    files, digest_of_weights = dict(fitted.method.network_files()), fitted.backbone.sha256
    path = Path(fitted.backbone.location or "")
    if digest_of_weights is not None and path.is_absolute() and path.exists():
        files[digest_of_weights] = path
    return files


def remember_networks(fitted: FittedDetector) -> None:
    """Record where the networks lie that the detector names, so that it can be loaded without naming them again."""
    for digest_of_weights, path in _network_files(fitted).items():
        remember_network(digest_of_weights, path)


def describe(fitted: FittedDetector) -> Facts:
    """All of a fitted detector that a person may want to read, and what loading needs in addition to the arrays."""
    guarantee, cost = None, dataclasses.asdict(fitted.cost())
    parts = fitted.scorer.calibrator_.stored_parts
    with contextlib.suppress(OptionError):
        guarantee = vars(fitted.guarantee(STATED_ALPHA))
    return {
        "schema": SCHEMA,
        "method": fitted.method.name,
        "options": {**fitted.options, "batch_size": min(fitted.batch_size, MAX_BATCH)},
        "preprocessing": dataclasses.asdict(fitted.preprocessing),
        "backbone": {**fitted.backbone.describe(), "source": fitted.backbone.location or fitted.backbone.source},
        "fitted": {
            "timesteps": list(fitted.levels),
            "cv": fitted.scorer.selection_.cv.tolist(),
            "kept": list(fitted.kept),
            "weights": fitted.weights.tolist(),
            "map_scale": fitted.map_scale,
            "map_parts": None if fitted.maps is None else list(fitted.maps.parts),
            "fit_images": fitted.fit_images,
            "calibration_images": sum(len(scores) for scores in stored_scores(fitted).values()),
            "groups": list(fitted.reference.by_group),
            "input_size": list(fitted.input_size),
            **({"group_choice": list(fitted.group_choice)} if fitted.group_choice else {}),
            **({"parts": [dataclasses.asdict(part) for part in parts]} if parts else {}),
        },
        "cost": {name: passes for name, passes in cost.items() if passes or name != "encoder"},
        "guarantee": guarantee,
        "versions": versions(),
    }


def versions(*more: str) -> dict[str, str]:
    """The versions of Python and of the packages that the numbers depend on, and of `more` packages if installed."""
    found = {"gepc": __version__, "python": platform.python_version()}
    for package in ("numpy", "torch", "diffusers", "safetensors", *more):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def stored_scores(fitted: FittedDetector) -> dict[str, np.ndarray[Any, Any]]:
    """All calibration scores by group, sorted, with those that trimming left out."""
    removed = fitted.reference.removed
    return {label: np.append(kept, removed.get(label, [])) for label, kept in fitted.reference.by_group.items()}


def state_of(fitted: FittedDetector) -> Facts:
    """The fitted arrays by name."""
    arrays = fitted.scorer.state()
    for position, scores in enumerate(stored_scores(fitted).values()):
        arrays[f"reference/{position}"] = scores
    if fitted.maps is not None:
        arrays |= {f"{MAPS}{name}": values for name, values in fitted.maps.state().items()}
    return arrays | {f"{CONDITIONING}{name}": values for name, values in fitted.backbone.conditioning.items()}


def load_fitted(
    folder: StrPath,
    backbone: Backbone | str | None = None,
    device: str | torch.device = "auto",
    trust: bool | None = None,
) -> FittedDetector:
    """Load the fitted state of a saved detector; see `gepc.load_detector`."""
    folder = Path(folder)
    restore_folder(folder)
    if not folder.exists() and is_hub_id(folder.as_posix()):
        folder = _download(folder.as_posix())
    description = read_description(folder)
    trust = os.environ.get("GEPC_TRUST") == "1" if trust is None else trust
    try:
        stored = description["backbone"]
        source = _named_network(stored, folder, trust) if backbone is None else backbone
        arrays = _read_state(folder / STATE)
        if read_json(folder / DESCRIPTION) != description:
            raise InputError(f"{folder} was replaced while it was read; load it again")
        embeddings = under("conditioning", arrays)
        options = {**stored["load_options"], "device": device, **({"embeddings": embeddings} if embeddings else {})}
        return _assemble(description, arrays, _find_backbone(stored, source, options, folder))
    except GepcError as error:
        if str(folder) not in str(error):
            error.args = (f"{folder}: {error}",)
        raise
    except KeyError as error:
        raise InputError(f"{folder} is incomplete: {error} is missing") from error
    except Exception as error:  # what is restored may be wrong in any way
        raise InputError(f"{folder} does not describe a detector: {error}") from error


def _download(repo_id: str) -> Path:
    """The folder of a detector on the hub, in the cache of huggingface_hub; only its two files are fetched."""
    from huggingface_hub import snapshot_download

    message = f"there is no folder {repo_id}, and the hub did not give it: {{line}}"
    with raising(InputError, message, OSError, ValueError):
        return Path(snapshot_download(repo_id, allow_patterns=[DESCRIPTION, STATE]))


def read_description(folder: Path) -> Facts:
    """The checked content of `detector.json`: parts of the right kinds, and no number or list out of bounds."""
    if not (folder / DESCRIPTION).exists():
        raise InputError(f"{folder} contains no {DESCRIPTION}; give a folder written by `gepc fit` or detector.save")
    return _check_description(read_json(folder / DESCRIPTION), folder)


def _check_description(description: Facts, folder: Path) -> Facts:
    schema = description.get("schema") if isinstance(description, dict) else None
    if schema != SCHEMA or isinstance(schema, bool):
        raise InputError(f"{folder} has schema {str(schema)[:40]}; this version reads {SCHEMA}")
    for name, kind in _PARTS.items():
        if name not in description:
            raise InputError(f"{folder} is incomplete: {name!r} is missing")
        if not isinstance(description[name], kind):
            raise InputError(f"{folder / DESCRIPTION}: {name} must be {'text' if kind is str else 'a mapping'}")
        largest = MAX_OPTION if name == "options" else MAX_NUMBER
        _check_bounds(description[name], f"{folder / DESCRIPTION}: {name}", largest)
    _check_network(description["backbone"], str(folder / DESCRIPTION))
    if description["options"].get("sequential") is not None:
        raise InputError(f"{folder} uses sequential scoring, which gepc 0.2 no longer has; fit the detector again")
    return description


def _check_network(backbone: Facts, where: str) -> None:
    for name in ("source", "sha256"):
        if not isinstance(backbone.get(name), (str, type(None))):
            raise InputError(f"{where}: backbone {name} must be text")
    if backbone.get("source") is not None and not re.fullmatch("[0-9a-f]{64}", backbone.get("sha256") or ""):
        raise InputError(f"{where}: the SHA-256 of the backbone's weights is missing")
    options = backbone.get("load_options")
    if not isinstance(options, dict) or not set(options) <= _LOAD_OPTIONS:
        raise InputError(f"{where}: load_options may hold {', '.join(sorted(_LOAD_OPTIONS))}")
    paths = [str(options.get(name, "")) for name in ("config", "variant") if not isinstance(options.get(name), dict)]
    if any("/" in text or "\\" in text or len(text) > 200 or Path(text).is_file() for text in paths):
        raise InputError(f"{where}: load_options must not name a path")


def _check_bounds(value: Any, where: str, largest: int, depth: int = 0) -> None:
    """Refuse values that no detector has, before anything is computed from them."""
    if isinstance(value, (dict, list)) and (depth > MAX_DEPTH or len(value) > MAX_LENGTH):
        raise InputError(f"{where} is nested too deeply or too long")
    if isinstance(value, str) and len(value) > MAX_LENGTH:
        raise InputError(f"{where} is too long")
    # the runs of a mask of ignored regions are counted in pixels
    most = 2**63 if where.endswith(": seed") else MOST_PIXELS if ": ignore: " in where else largest
    if isinstance(value, int) and abs(value) > most:
        raise InputError(f"{where} is beyond {most:,}, the largest number that makes sense")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        _check_bounds(item, f"{where}: {str(name)[:40]}", largest, depth + 1)


def _read_state(path: Path) -> Facts:
    """The arrays, each of finite numbers in double precision."""
    reason, causes = f"{path} is missing or damaged: {{error}}", (OSError, SafetensorError, KeyError, ValueError)
    with raising(InputError, reason, *causes, passing=InputError), open_regular(path) as handle:
        if os.fstat(handle.fileno()).st_size > MAX_STATE:
            raise InputError(f"{path} is larger than the {MAX_STATE:,} bytes allowed")
        arrays = load(handle.read())
    for name, array in arrays.items():
        known = array.dtype.name in _PRECISIONS.get(name.rpartition("/")[2], ("float64",))
        if array.dtype.kind not in "fiub" if name.startswith(CONDITIONING) else not known:
            raise InputError(f"{path}: {name} is {array.dtype} of shape {array.shape}; fit the detector again")
        if not np.isfinite(array).all():
            raise InputError(f"{path}: {name} holds numbers that are not finite; fit the detector again")
    return arrays


def _named_network(stored: Facts, folder: Path, trust: bool) -> str:
    """The network that a folder names: an embedded one, a path that is trusted, or this user's own with its weights."""
    source: str | None = stored["source"]
    if source is None:
        made = f"{folder} was fitted with a backbone made in Python ({stored['family']})"
        raise BackboneError(f"{made}; pass it: load_detector(folder, backbone)")
    if trust or source in list_backbones():
        return source
    known = find_network(stored["sha256"])
    if known is None:
        named = f"{folder} names the network {source[:200]!r}, and paths and hub ids in it are not followed"
        advice = "give it as `backbone`, or trust the folder (trust=True, or GEPC_TRUST=1)"
        raise BackboneError(f"{named}; if it is the right one, {advice}", options=("backbone",))
    return str(known)


def _find_backbone(stored: Facts, source: Backbone | str, options: Facts, folder: Path) -> Backbone:
    backbone = load_again(source, options, stored["sha256"], str(folder))
    found = json.loads(json.dumps(backbone.describe()))
    for name, value in {"time_scale": 1.0, **stored}.items():
        if name not in _MAY_DIFFER and name in found and found[name] != value:
            differs = f"whose {name} is {value!r}, this one has {found[name]!r}"
            raise BackboneError(f"{folder} was fitted with a backbone {differs}; pass the right backbone")
    return backbone


@dataclass(frozen=True)
class Fitted:
    """The part `fitted` of a description; `describe` says where each value comes from."""

    timesteps: tuple[int, ...]
    cv: tuple[float, ...]
    kept: tuple[int, ...]
    weights: tuple[float, ...]
    map_scale: float | None
    fit_images: int
    calibration_images: int
    groups: tuple[str, ...]
    mean_levels: float | None = None  # written by 0.1
    map_parts: tuple[str, ...] | None = None
    input_size: tuple[int, int] | None = None  # since 0.3
    group_choice: tuple[dict[str, Any], ...] = ()  # since 0.3
    parts: tuple[Part, ...] = ()  # since 0.3

    def check(self, parameters: Parameters, arrays: Facts) -> None:
        """Refuse values that contradict each other, the detector's options or the arrays."""
        method = parameters.extractor
        levels, kept, scale = method.timesteps(parameters.backbone), len(self.kept), self.map_scale
        scores = [arrays[f"reference/{place}"] for place in range(len(self.groups))]
        rules = {
            f"timesteps must be {list(levels)[:8]}, as the options say": self.timesteps == tuple(levels),
            "kept must be some of the timesteps, ascending": kept
            and list(self.kept) == sorted(set(self.kept) & set(self.timesteps)),
            "cv and weights must have a number for each level": (len(self.cv), len(self.weights))
            == (len(self.timesteps), kept),
            "weights must be shares that sum to 1": min(self.weights, default=-1.0) >= 0.0
            and abs(sum(self.weights) - 1.0) < 1e-6,
            "map_scale must be positive for a method with maps, and null otherwise": 0.0 < scale < math.inf
            if scale is not None
            else not method.has_maps,
            "fit_images must be positive": self.fit_images > 0,
            "input_size must be (height, width)": self.input_size is None or 0 < min(self.input_size) <= MAX_SIDE,
            "groups must differ, with calibration scores for each": scores
            and len(set(self.groups)) == len(scores)
            and all(len(each) for each in scores)
            and sum(each.size for each in scores) == self.calibration_images,
            "calibration scores must be sorted": all(each.ndim == 1 and (np.diff(each) >= 0).all() for each in scores),
        }
        for rule, holds in rules.items():
            if not holds:
                raise InputError(f"fitted: {rule}")


def _assemble(description: Facts, arrays: Facts, backbone: Backbone) -> FittedDetector:
    method = find_method(description["method"])
    stored = without_unused(description["options"])
    options = {name: value for name, value in stored.items() if value or name not in RETIRED}
    if options.get("maps") == "aligned":  # written by 0.2; its statistics are by position
        options["maps"] = "calibrated"
    own, shared = divided(method, options, f"method {method.name!r}")
    parameters = Parameters(backbone, method(**own), **shared)
    fitted = build(Fitted, description["fitted"], "fitted")
    fitted.check(parameters, arrays)
    if parameters.batch_size > MAX_BATCH:
        raise InputError(f"batch_size is {parameters.batch_size}, more than {MAX_BATCH}")
    kept = tuple(fitted.timesteps.index(t) for t in fitted.kept)
    selection = Selection(kept, np.asarray(fitted.weights), np.asarray(fitted.cv))
    maps = None
    if fitted.map_parts is not None:
        model = parameters.extractor.map_model
        maps = MapStatistics.restore(fitted.map_parts, selection.weights, under("maps", arrays), model)
    preprocessing = _stored_preprocessing(parameters, description["preprocessing"])
    others = ("reference/", MAPS, CONDITIONING)
    state = {name: array for name, array in arrays.items() if not name.startswith(others)}
    scores = {label: arrays[f"reference/{number}"] for number, label in enumerate(fitted.groups)}
    loaded = FittedDetector(
        method=parameters.extractor,
        options=parameters.options(),
        backbone=backbone,
        preprocessing=preprocessing,
        levels=tuple(fitted.timesteps),
        scorer=_restored(parameters, selection, state, fitted),
        reference=CalibrationScores(scores).trim(parameters.contamination),
        maps=maps,
        map_scale=fitted.map_scale,
        fit_images=fitted.fit_images,
        input_size=fitted.input_size or preprocessing.size or NOMINAL_SIZE,
        seed=parameters.seed,
        batch_size=parameters.batch_size,
        score_from=parameters.score_from,
        group_choice=fitted.group_choice,
    )
    cost = loaded.cost()
    if cost.forward + cost.jvp > MAX_PASSES:
        raise InputError(f"an image would take {cost}, more than {MAX_PASSES:,} network passes")
    return loaded


def _stored_preprocessing(parameters: Parameters, stored: Facts) -> Preprocessing:
    """As stored; it must be what the options and the backbone give, up to a size that the first image decided."""
    found, expected = build(Preprocessing, stored, "preprocessing"), parameters.preprocessing()
    if expected.is_open and found.size is not None:
        parameters.backbone.check_size(*found.size)
        expected = dataclasses.replace(expected, size=found.size, resize=found.resize)
    if found != expected:
        raise InputError("preprocessing is not what the options and the backbone give; fit the detector again")
    if found.size is not None and math.prod(found.size) > MAX_PIXELS:
        raise InputError(f"preprocessing: size is {found.size}, too large")
    return found


def _restored(parameters: Parameters, selection: Selection, state: Facts, fitted: Fitted) -> Scorer:
    """The scorer of a state whose arrays fit each other: they come back by name and shape, and give a finite score."""
    bounds = state["calibrator/bounds"].shape
    if len(bounds) != 3 or bounds[:2] != (2, len(selection.kept)) or not 1 <= bounds[2] <= MAX_COLUMNS:
        raise InputError(f"{STATE}: calibrator/bounds has shape {bounds}, not (2, {len(selection.kept)}, columns)")
    widest = max(MIN_WIDTH, bounds[1] * bounds[2], fitted.fit_images)
    for name, array in state.items():
        if any(side > widest for side in (array.shape if array.ndim == 1 else array.shape[1:])):
            raise InputError(f"{STATE}: {name} has shape {array.shape}, with more than {widest} columns")
    scorer = parameters.scorer().restore(selection, state, fitted.parts)
    if {name: array.shape for name, array in scorer.state().items()} != {n: a.shape for n, a in state.items()}:
        raise InputError(f"{STATE} holds other arrays than its calibrator has")
    if not scorer.gives_finite_scores():
        raise InputError(f"{STATE} does not give a finite score; fit the detector again")
    return scorer


def detector_digest(fitted: FittedDetector) -> str:
    """Equal for detectors that give equal scores: weights, options and fitted state, not where they are kept or run."""
    facts = describe(fitted)
    options = {name: value for name, value in facts["options"].items() if name != "batch_size"}
    elsewhere = ("source", "device", "load_options")
    network: Any = fitted.backbone.fingerprint
    if not network:
        network = {name: value for name, value in facts["backbone"].items() if name not in elsewhere}
    return digest([facts["method"], options, facts["preprocessing"], facts["fitted"], network], state_of(fitted))

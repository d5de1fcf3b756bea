"""`gepc info`, `convert` and `export`: inspect detectors and backbones; convert and export networks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from gepc.cli import options as opt
from gepc.cli.app import note, say, several, text_table
from gepc.core.errors import OptionError
from gepc.core.files import read_json

if TYPE_CHECKING:
    from gepc.backbones.base import Backbone

CheckpointSettings = Annotated[list[str] | None, opt.setting("Option of an OpenAI checkpoint, under OpenAI's name")]


@opt.with_groups
def info(
    source: Annotated[str | None, Argument(help="Detector folder, or name, folder or file of a backbone.")] = None,
    methods: Annotated[bool, Option("--methods", help="List the detection methods and their presets.")] = False,
    settings: CheckpointSettings = None,
    loading: opt.Loading = opt.DEFAULT_LOADING,
    as_json: opt.AsJson = False,
) -> None:
    """Describe a detector or a backbone, or list the detection methods.

    For a detector, the command prints its method, parameters, kept levels, cost and guarantee. For a backbone, it
    prints the family, the size, the schedule, and the time per image on this machine.

    Example: `gepc info photos-small`

    An OpenAI checkpoint: `gepc info celeba_ema.pt --architecture diffpath-celeba32`
    """
    from gepc.detector.storage import DESCRIPTION, is_detector
    from gepc.methods.base import methods as known_methods

    facts: Any
    opt.refuse_if(methods and source is not None, "give either --methods, or a detector or a backbone to describe")
    if (methods or (source is not None and is_detector(source))) and (settings or loading != opt.DEFAULT_LOADING):
        raise OptionError("--set, --device and the other options of a backbone have no effect here: none is loaded")
    if methods:
        facts = [
            {"method": name, "presets": list(kind.presets), "summary": (kind.__doc__ or "").strip().splitlines()[0]}
            for name, kind in known_methods().items()
        ]
        rows = [(one["method"], ", ".join(one["presets"]), one["summary"]) for one in facts]
        text = text_table([("method", "presets", "description"), *rows])
    elif source is None:
        raise OptionError("name a detector folder or a backbone, or give --methods")
    elif is_detector(source):
        facts = read_json(Path(source) / DESCRIPTION)
        text = detector_text(facts)
    else:
        facts = backbone_facts(loading.load(source, settings))
        text = backbone_text(facts)
    say(json.dumps(facts, indent=2) if as_json else text)


def convert(
    checkpoint: Annotated[Path, Argument(help="Checkpoint of improved- or guided-diffusion (.pt, .safetensors).")],
    out: Annotated[Path, Option(help="New folder for the backbone.")],
    architecture: opt.Architecture = None,
    config: opt.CheckpointConfig = None,
    settings: CheckpointSettings = None,
) -> None:
    """Convert an OpenAI checkpoint to a diffusers folder.

    Example: `gepc convert cifar10_uncond_50M_500K.pt --architecture improved-cifar10 --out cifar10-backbone`

    Without a published architecture: `gepc convert ema.pt --out net --set image_size=64 --set num_heads=4
    --set noise_schedule=cosine --set diffusion_steps=4000 --set rescale_timesteps=true`
    """
    from gepc.backbones.openai import convert as openai

    converted = openai.convert(checkpoint, opt.checkpoint_options(architecture, config, settings))
    openai.save_folder(converted, out)
    for caveat in converted.caveats:
        note(f"note: {caveat}")
    if not converted.caveats:
        note(f"note: plain diffusers loads it too: UNet2DModel.from_pretrained({str(out)!r})")
    say(f"{len(converted.tensors)} tensors in {out}")


def export(
    detector: opt.DetectorArgument,
    out: Annotated[Path, Option(help="New folder for net.onnx, the detector that uses it, and score.py.")],
    images: Annotated[str | None, Option(help="Images to compare the scores on; random ones by default.")] = None,
    backbone: opt.OtherBackbone = None,
) -> None:
    """Export a detector: its network as ONNX, and a script that scores images without torch and without gepc.

    The command compares their predictions and scores with those of the detector. It writes nothing if they differ.

    Example: `gepc export det --out det-onnx`
    """
    from gepc.detector.export import NETWORK, SCRIPT, export_detector
    from gepc.images.sources import open_images

    loaded = opt.open_detector(detector, backbone, device="cpu")
    made = export_detector(loaded.fitted, out, None if images is None else open_images(images))
    network = out / NETWORK
    differences = f"{made.predictions:.1e} of predictions, {made.scores:.1e} of the scores"
    compared = f"relative difference from torch at most {differences} of {several(made.images, 'image')}"
    say(f"{network}: {network.stat().st_size / 1e6:.1f} MB; {compared}")
    say(f"to score with it: gepc score {out} IMAGES --backbone {network}")
    if made.script is None:
        note(f"note: there is no {SCRIPT}: {made.why_no_script}")
    else:
        say(f"without torch and gepc: python {out / SCRIPT} IMAGES; scores differ by at most {made.script:.1e}")


def detector_text(facts: dict[str, Any]) -> str:
    """A saved detector's description; its backbone is not loaded."""
    from gepc.conformal.p_values import Guarantee, images_for_width
    from gepc.methods.base import Cost

    fitted, backbone = facts["fitted"], facts["backbone"]
    size = fitted.get("input_size") or facts["preprocessing"]["size"]
    encoder = facts["options"].get("encoder") or {}
    has_levels = any(fitted["timesteps"])  # a method without noise levels has the one entry 0
    kept = zip(fitted["kept"], fitted["weights"], strict=True)
    candidates = zip(fitted["timesteps"], fitted["cv"], strict=True)
    named = {
        "method": facts["method"],
        "backbone": f"{backbone['source'] or backbone['family']}, sha256 {str(backbone['sha256'])[:12]}",
        "encoder": encoder.get("source"),
        "input": size and opt.size_text(facts["preprocessing"]["resize"], size),
        "fitted on": f"{several(fitted['fit_images'], 'image')}, calibrated on {fitted['calibration_images']}",
        "candidates": ", ".join(f"{t} (CV {cv:.3f})" for t, cv in candidates) if has_levels else None,
        "kept": ", ".join(f"{t} (weight {weight:.3f})" for t, weight in kept) if has_levels else None,
        "map scale": fitted["map_scale"] and f"{fitted['map_scale']:.4g}",
        "cost": opt.cost_per_image(Cost(**facts["cost"])),
        "groups": ", ".join(filter(None, fitted["groups"])) or None,
        "guarantee": "none at alpha 0.05: too few calibration images",
    }
    if facts["guarantee"] is not None:
        guarantee = Guarantee(**facts["guarantee"])
        named["guarantee"] = str(guarantee)
        named[""] = f"{images_for_width(guarantee.alpha, 0.02)} calibration images would narrow that range to 0.02"
    return _facts_table(named)


def _facts_table(named: Mapping[str, object]) -> str:
    return text_table([(name, value) for name, value in named.items() if value is not None])


def shape_text(sides: Iterable[object]) -> str:
    """Sides as `32x32`."""
    return "x".join(map(str, sides))


def backbone_facts(backbone: Backbone) -> dict[str, Any]:
    """The description of a backbone, as plain values."""
    from gepc.backbones.devices import profits_from_bfloat16
    from gepc.methods import base
    from gepc.methods.gepc_plus import GepcPlus

    gives_noise = backbone.gives == GepcPlus.needs
    kinds = [GepcPlus] if gives_noise else [kind for kind in base.methods().values() if kind.needs == backbone.gives]
    method = kinds[0]()
    multiple = backbone.size_multiple
    size = backbone.image_size or (-(-32 // multiple) * multiple,) * 2
    cost = base.cost_of(method, backbone, size)
    seconds = opt.seconds_per_pass(backbone, size)
    encoding = opt.seconds_per_encoding(backbone, size) if cost.encoder else 0.0
    return {
        **backbone.describe(),
        "device": str(backbone.device),
        "processor_has_bfloat16": profits_from_bfloat16(),
        "gives": backbone.gives,
        "cost": {
            "method": method.name,
            "size": list(size),
            "seconds_per_pass": seconds,
            "per_image": str(cost),
            "seconds_per_encoding": encoding or None,
            "passes_per_image": cost.forward,
            "seconds_per_image": cost.forward * seconds + cost.encoder * encoding,
        },
    }


def backbone_text(facts: dict[str, Any]) -> str:
    """The description of a backbone, for people: all facts by name, and what its passes cost."""
    cost = facts["cost"]
    named = _facts_table({name: _plain(value) for name, value in facts.items() if name != "cost"})
    encoding, costs = cost["seconds_per_encoding"], f"{cost['method']} costs {cost['per_image']} (E: encoder passes)"
    spent = {
        "one pass": f"{opt.duration(cost['seconds_per_pass'])} per {shape_text(cost['size'])} image on this machine",
        "encoder": encoding and f"{opt.duration(encoding)} per image; {costs}",
        cost["method"]: f"{several(cost['passes_per_image'], 'pass')} per image, "
        f"about {opt.duration(cost['seconds_per_image'])}",
    }
    return f"{named}\n\n{_facts_table(spent)}"


def _plain(value: object) -> object:
    """A fact as text: numbers with separators or few digits, lists and mappings in one line; None if it is empty."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items()) or None
    if isinstance(value, list | tuple):
        return ", ".join(str(_plain(one)) for one in value) or None
    if isinstance(value, bool | None):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.7g}" if isinstance(value, float) else value

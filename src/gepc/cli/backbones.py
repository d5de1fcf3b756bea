"""`gepc info` and `gepc convert`: what a backbone is, and how to keep it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gepc.backbones.openai.options import PRESETS
from gepc.cli.app import app, note, parse_settings, say
from gepc.core.errors import OptionError
from gepc.core.files import read_json

if TYPE_CHECKING:
    from gepc.backbones.base import Backbone

PresetOption = Annotated[
    str | None, typer.Option(help=f"The published net whose options an OpenAI checkpoint has: {', '.join(PRESETS)}.")
]
ConfigOption = Annotated[
    Path | None, typer.Option(help="A YAML or JSON file with an OpenAI checkpoint's options, under OpenAI's names.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One option; it wins over --preset and --config.")
]
LabelOption = Annotated[int | None, typer.Option(help="The class to ask a class-conditional net for.")]


@app.command()
def info(
    source: Annotated[
        str,
        typer.Argument(help="A detector folder; or a backbone: an embedded name, a diffusers folder, a checkpoint."),
    ],
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    class_label: LabelOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Say what a detector or a backbone is.

    Of a detector: the method, its parameters, what it kept, its cost and its guarantee. Of a backbone: family, size,
    schedule, noise levels, and what an image costs on this machine.

    Example: `gepc info celeba32-tiny`

    An OpenAI checkpoint: `gepc info celeba_ema.pt --preset diffpath-celeba32`
    """
    from gepc.backbones.load import load_backbone
    from gepc.detector.storage import DESCRIPTION, is_detector

    if is_detector(source):
        facts = read_json(Path(source) / DESCRIPTION)
        say(json.dumps(facts, indent=2) if as_json else "\n".join(detector_lines(facts)))
        return
    options = checkpoint_options(preset, config, settings)
    backbone = load_backbone(source, config=options, class_label=class_label, device=device, dtype=dtype)
    facts = backbone_facts(backbone)
    if as_json:
        say(json.dumps(facts, indent=2))
        return
    for line in backbone_lines(facts):
        say(line)


@app.command()
def convert(
    checkpoint: Annotated[
        Path, typer.Argument(help="An improved- or guided-diffusion checkpoint (.pt, .safetensors).")
    ],
    out: Annotated[Path, typer.Option(help="The new folder.")],
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Turn an OpenAI checkpoint into a folder that diffusers loads, tensor by tensor.

    Example: `gepc convert cifar10_uncond_50M_500K.pt --preset improved-cifar10 --out cifar10-backbone`

    Without a preset: `gepc convert ema.pt --out net --set image_size=64 --set num_heads=4
    --set noise_schedule=cosine --set diffusion_steps=4000 --set rescale_timesteps=true`
    """
    from gepc.backbones.openai.convert import convert as convert_checkpoint
    from gepc.backbones.openai.convert import save_folder

    converted = convert_checkpoint(checkpoint, checkpoint_options(preset, config, settings))
    save_folder(converted, out)
    for caveat in converted.caveats:
        note(f"note: {caveat}")
    if not converted.caveats:
        note(f"note: plain diffusers loads it too: UNet2DModel.from_pretrained({str(out)!r})")
    say(f"{len(converted.tensors)} tensors in {out}")


def checkpoint_options(preset: str | None, config: Path | None, settings: list[str] | None) -> dict[str, Any] | None:
    """What the three options say together, None where nothing was said."""
    from gepc.core.options import read_yaml

    if preset is not None and config is not None:
        raise OptionError("give either --preset or --config, not both")
    values = read_yaml(config) if config is not None else {}
    if preset is not None:
        values["preset"] = preset
    return {**values, **parse_settings(settings or [])} or None


def detector_lines(facts: dict[str, Any]) -> list[str]:
    """A saved detector's description as lines for people; the backbone is not loaded."""
    from gepc.verdicts.conformal import Guarantee, images_for_width

    fitted, backbone = facts["fitted"], facts["backbone"]
    kept = zip(fitted["kept"], fitted["weights"], strict=True)
    candidates = zip(fitted["timesteps"], fitted["cv"], strict=True)
    named = {
        "method": facts["method"],
        "backbone": f"{backbone['source'] or backbone['family']}, sha256 {str(backbone['sha256'])[:12]}",
        "input": "x".join(map(str, facts["preprocessing"]["size"] or ["?"])),
        "fitted on": f"{fitted['fit_images']} images, {fitted['calibration_images']} held out for p-values",
        "candidates": ", ".join(f"{t} (CV {cv:.3f})" for t, cv in candidates),
        "kept": ", ".join(f"{t} (weight {weight:.3f})" for t, weight in kept),
        "map scale": fitted["map_scale"],
        "cost": f"{facts['cost']['forward']}F+{facts['cost']['jvp']}J per image",
        "groups": ", ".join(filter(None, fitted["groups"])) or None,
    }
    lines = [f"{name:<11} {value}" for name, value in named.items() if value is not None]
    if facts["guarantee"] is None:
        return [*lines, "guarantee   none at alpha 0.05: too few calibration images"]
    guarantee = Guarantee(**facts["guarantee"])
    more = images_for_width(guarantee.alpha, 0.02)
    return [
        *lines,
        f"guarantee   {guarantee}",
        f"            {more} calibration images would narrow that range to 0.02",
    ]


def backbone_facts(backbone: Backbone) -> dict[str, Any]:
    """What `gepc info` knows of a backbone, as plain values."""
    from gepc.features.gepc import PAPER_LEVELS, PAPER_LEVELS_CELEBA, GepcExtractor

    size = backbone.image_size or (_convenient_side(backbone),) * 2
    method = GepcExtractor()
    passes = method.cost(backbone, size).forward
    seconds = seconds_per_pass(backbone, size)
    return {
        **backbone.describe(),
        "device": str(backbone.device),
        "levels": {
            "paper": level_table(backbone, PAPER_LEVELS),
            "paper, CelebA": level_table(backbone, PAPER_LEVELS_CELEBA),
        },
        "cost": {
            "size": list(size),
            "seconds_per_pass": seconds,
            "passes_per_image": passes,
            "passes_in_paper": method.paper_cost(len(method.timesteps(backbone))).forward,
            "seconds_per_image": passes * seconds,
        },
    }


def level_table(backbone: Backbone, levels: tuple[float, ...]) -> list[dict[str, float]]:
    """For each level given as sqrt(abar): the nearest timestep, what the schedule has there, and rho."""
    from gepc.backbones.schedule import Levels, rho_of

    rows = []
    for level in sorted(levels, reverse=True):
        (timestep,) = Levels.sqrt_abar(level).timesteps(backbone.alphas_cumprod)
        abar = float(backbone.alphas_cumprod[timestep])
        rows.append({"sqrt_abar": level, "timestep": timestep, "found": abar**0.5, "rho": float(rho_of(abar))})
    return rows


def seconds_per_pass(backbone: Backbone, size: tuple[int, int], patience: float = 5.0) -> float:
    """Seconds per image and forward pass: the best of batches of 1 to 32 that should take under `patience` seconds."""
    import time

    import torch

    def measure(count: int) -> float:
        x = torch.rand((count, backbone.channels, *size), generator=torch.Generator().manual_seed(0))
        x = x.to(dtype=backbone.dtype, device=backbone.device)
        begun = time.perf_counter()
        backbone.eps(x, 0)
        return (time.perf_counter() - begun) / count

    before = backbone.forward_count
    best = measure(1)
    if best < patience:
        best = measure(1)  # the first one warmed up
    for count in (4, 8, 32):
        if count * best < patience:
            best = min(best, measure(count))
    backbone.forward_count = before
    return best


def _convenient_side(backbone: Backbone) -> int:
    """32, or the next size that the net takes."""
    return -(-32 // backbone.size_multiple) * backbone.size_multiple


def backbone_lines(facts: dict[str, Any]) -> list[str]:
    """The facts as lines for people."""
    named = {
        "family": facts["family"],
        "source": facts["source"],
        "sha256": facts["sha256"],
        "parameters": "unknown" if facts["parameters"] is None else f"{facts['parameters']:,}",
        "channels": facts["channels"],
        "size": _size_text(facts),
        "predicts": _prediction_text(facts),
        "schedule": _schedule_text(facts),
    }
    for option in ("class_label", "device", "precision"):
        if facts.get(option) is not None:
            named[option] = facts[option]
    lines = [f"{name:<11} {value}" for name, value in named.items() if value is not None]
    for name, rows in facts["levels"].items():
        lines += ["", f"levels ({name})", f"  {'sqrt(abar)':>10}  {'timestep':>8}  {'found':>9}  {'rho':>8}"]
        for row in rows:
            cells = f"{row['sqrt_abar']:>10g}  {row['timestep']:>8}  {row['found']:>9.6f}  {row['rho']:>8.5f}"
            lines.append(f"  {cells}")
    return [*lines, "", *_cost_lines(facts["cost"])]


def _size_text(facts: dict[str, Any]) -> str:
    if facts["image_size"] is None:
        return f"any, in multiples of {facts['size_multiple']}"
    return "x".join(map(str, facts["image_size"]))


def _prediction_text(facts: dict[str, Any]) -> str | None:
    kind = facts.get("prediction_type")
    return f"{kind} and a variance" if kind and facts.get("learned_variance") else kind


def _schedule_text(facts: dict[str, Any]) -> str:
    text = f"{facts['timesteps']} timesteps, abar {facts['first_abar']:.7g} to {facts['last_abar']:.4g}"
    if facts.get("schedule"):
        text = f"{facts['schedule']}, {text}"
    if facts.get("timestep_respacing"):
        text += f", respaced {facts['timestep_respacing']}"
    return f"{text}, called with t*1000/T" if facts.get("rescale_timesteps") else text


def _cost_lines(cost: dict[str, Any]) -> list[str]:
    size = "x".join(map(str, cost["size"]))
    return [
        f"one pass    {_duration(cost['seconds_per_pass'])} per image of {size} on this machine",
        f"GEPC        {cost['passes_per_image']} passes per image (the paper counts {cost['passes_in_paper']}), "
        f"about {_duration(cost['seconds_per_image'])}",
    ]


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"

"""The command line with backbones of every kind: what is asked at fitting is stored with the detector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import LATENT, SIDE, make
from PIL import Image
from safetensors.numpy import save_file
from toys import as_uint8, pictures

pytestmark = pytest.mark.usefixtures("trusted")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of photographs and of five-band TIFF files."""
    root = tmp_path_factory.mktemp("families-cli")
    for name, seed in (("normal", 0), ("new", 1)):
        (root / name).mkdir()
        (root / f"{name}5").mkdir()
        for index, picture in enumerate(as_uint8(pictures(24 if seed == 0 else 3, SIDE, seed=seed))):
            Image.fromarray(picture).save(root / name / f"{index:02d}.png")
        for index, picture in enumerate(as_uint8(pictures(24 if seed == 0 else 3, SIDE, 5, seed=seed))):
            first, *rest = [Image.fromarray(picture[..., band]) for band in range(5)]
            first.save(root / f"{name}5" / f"{index:02d}.tif", save_all=True, append_images=rest)
    return root


def backbone(place: Path, family: str) -> tuple[str, ...]:
    """The options that load a family."""
    folder = place / family.replace(" ", "-")
    options: dict[str, Any] = make(family, folder)
    if not options:
        return ("--backbone", folder.name)
    save_file(options["embeddings"], place / f"{folder.name}.safetensors")
    return ("--backbone", folder.name, "--embeddings", f"{folder.name}.safetensors")


@pytest.mark.parametrize("family", ["Stable Diffusion", "DiT", "SD3", "EDM", "five bands"])
def test_fit_score_map_and_info(family: str, place: Path, gepc: Any) -> None:
    images, five = ("normal5", "new5") if family == "five bands" else ("normal", "new"), family == "five bands"
    options = backbone(place, family)
    info = gepc("info", *options[1:], "--json")
    facts = json.loads(info.stdout)
    assert (facts["channels"], facts["device"]) == (5 if five else 3, "cpu")
    assert facts["cost"]["per_image"].endswith("E") == (family in LATENT)
    det = f"{family.replace(' ', '-')}.det"
    fit = gepc(
        "fit", images[0], "--out", det, *options, "--method", "gepc+", "--set", f"size={SIDE}", "--device", "cpu"
    )
    assert fit.returncode == 0, fit.stderr
    assert ("2F+0J+1E per image" if family in LATENT else "2F+0J per image") in fit.stdout
    score = gepc("score", det, images[1], "--device", "cpu", "--alpha", 0.2)
    assert score.returncode == 0, score.stderr
    assert len(score.stdout.splitlines()) == 4
    maps = gepc("map", det, images[1], "--out", f"{det}.maps", *(("--show-bands", "5,3,1") if five else ()))
    assert maps.returncode == 0, maps.stderr
    entry = json.loads((place / f"{det}.maps" / "metadata.json").read_text())["images"][0]
    assert np.load(place / f"{det}.maps" / entry["map"]).shape == (SIDE, SIDE)
    about = gepc("info", det).stdout
    assert ("E: encoder passes" in about) == (family in LATENT)


def test_info_of_a_latent_backbone(place: Path, gepc: Any) -> None:
    about = gepc("info", *backbone(place, "Stable Diffusion")[1:], "--act-on", "pixels").stdout
    assert "UNet2DConditionModel" in about
    for fact in ("class AutoencoderKL", "factor 4", "channels 4", "scaling_factor 0.18215"):
        assert fact in about
    assert "+2E (E: encoder passes)" in about


def test_a_class_is_chosen_at_fitting_and_stored(place: Path, gepc: Any) -> None:
    options = backbone(place, "DiT")
    fit = gepc(
        "fit", "normal", "--out", "class.det", *options, "--class-label", 3, "--dtype", "bfloat16", "--act-on", "pixels"
    )
    assert fit.returncode == 0, fit.stderr
    stored = json.loads((place / "class.det" / "detector.json").read_text())["backbone"]
    assert stored["load_options"] == {"class_label": 3, "dtype": "bfloat16", "act_on": "pixels"}
    assert gepc("score", "class.det", "new", "--alpha", 0.2).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "nowhere"), "device 'nowhere' cannot be used here"),
        (("--dtype", "int8"), "dtype"),
        (("--class-label", 99), "class_label 99 does not exist"),
        (("--prompt", "a cat"), "(on the command line: --prompt)"),
        (("--embeddings", "text.txt"), "`embeddings` is a mapping or a .safetensors file, got text.txt"),
    ],
)
def test_errors_name_the_option(arguments: tuple[Any, ...], message: str, place: Path, gepc: Any) -> None:
    run = gepc("fit", "normal", "--out", "bad.det", *backbone(place, "DiT"), *arguments)
    assert run.returncode == 2
    assert message in run.stderr


def test_a_mismatch_of_bands_names_both_counts(place: Path, gepc: Any) -> None:
    run = gepc("fit", "normal5", "--out", "bad.det", *backbone(place, "DiT"))
    assert run.returncode == 2
    assert "has 5 channels, the backbone takes 3" in run.stderr
    run = gepc("fit", "normal", "--out", "bad.det", *backbone(place, "five bands"))
    assert "has 3 channels, the backbone takes 5" in run.stderr


def test_every_command_that_loads_a_backbone_has_the_options() -> None:
    import typer

    from gepc.cli import app

    commands: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    loads = {name: commands[name] for name in ("fit", "info", "demo", "bench", "ablate")}
    loads |= {f"sar {name}": commands["sar"].commands[name] for name in ("fit", "bench")}
    for name, command in loads.items():
        options = {option for parameter in command.params for option in parameter.opts}
        wanted = {
            "--device",
            "--dtype",
            "--class-label",
            "--prompt",
            "--embeddings",
            "--variant",
            "--act-on",
        }
        assert wanted <= options, name
    for name in ("score", "map", "scene", "watch", "serve"):
        assert "--device" in {option for parameter in commands[name].params for option in parameter.opts}, name

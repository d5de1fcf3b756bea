"""The recipe of a run for which none is given: chosen for the images."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gepc.core.files import read_json
from gepc.core.options import build
from gepc.lab.training.checkpoint import RUN_FOLDER
from gepc.lab.training.data import Survey, open_training_images, survey
from gepc.lab.training.recipe import ENERGIES, Recipe, init_fields, load_init, load_recipe

SMALL_SIZE, LARGE_SIZE = 32, 64
LENGTH, FINE_TUNING_LENGTH = (50, 1000, 10_000), (20, 500, 4000)  # epochs, fewest and most steps


@dataclass(frozen=True)
class Choice:
    """A field of a recipe that was chosen for the images, its value and the reason."""

    field: str
    value: Any
    reason: str


def saved_recipe(out: str | Path) -> dict[str, Any] | None:
    """The recipe of the run in `out`, as plain values; None if there is no run."""
    path = Path(out) / RUN_FOLDER / "run.json"
    found: dict[str, Any] | None = read_json(path).get("recipe") if path.is_file() else None
    return found


def recipe_for(
    data: str | Path, out: str | Path, config: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> tuple[Recipe, list[Choice]]:
    """The recipe of a run, and what was chosen for the images if there is no recipe.

    Fields that neither the recipe `config` nor `overrides` sets are those of the run in `out`, if there is one.
    """
    given = dict(overrides or {})
    saved = saved_recipe(out)
    if config is not None or saved is not None:
        return load_recipe(config, given, saved), []
    fixed = dict(ENERGIES.get(str(given.get("objective")), {}))
    if given.get("init") is not None:
        fixed |= init_fields(load_init(str(given["init"])))
    without_crop = {name: value for name, value in {**fixed, **given}.items() if name != "crop"}
    checked = build(Recipe, without_crop, "recipe")  # crop is valid only with the image_size that is chosen below
    known = {name: getattr(checked, name) for name in without_crop}
    choices = choose(survey(open_training_images(data)), {**given, **known})
    chosen = {choice.field: choice.value for choice in choices}
    return load_recipe(None, {"mixed_precision": "auto", **chosen, **given}), choices


def choose(images: Survey, given: Mapping[str, Any]) -> list[Choice]:
    """The fields of a recipe that depend on the images, except those that are given."""
    chosen: dict[str, Choice] = {}

    def pick(field: str, value: Any, reason: str) -> Any:
        if field in given:
            return given[field]
        chosen[field] = Choice(field, value, reason)
        return value

    colours = {1: "all images are grey", 3: "images are in colour"}
    default = f"the images have {images.channels} channels"
    pick("image_channels", images.channels, colours.get(images.channels, default))
    levels = len(given.get("channels", Recipe.channels))
    size = pick("image_size", *_size(images, 2 ** (levels - 1)))
    crop = pick("crop", *_crop(images, size))
    samples = sum(images.sizes.values())
    if crop:
        samples = sum(count * (height // size) * (width // size) for (height, width), count in images.sizes.items())
    kind = "crops that do not overlap" if crop else "images"
    epochs, fewest, most = LENGTH if given.get("init") is None else FINE_TUNING_LENGTH
    steps = round(epochs * samples / given.get("batch_size", Recipe.batch_size))
    reason = f"{epochs} passes over {samples} {kind}, at least {fewest} and at most {most} steps"
    pick("steps", min(max(steps, fewest), most), reason)
    return list(chosen.values())


def _size(images: Survey, stride: int) -> tuple[int, str]:
    """The side of the network's input, and why."""
    small = -(-SMALL_SIZE // stride) * stride
    if len(images.sizes) > 1:
        return small, f"the images have {len(images.sizes)} different sizes"
    ((height, width),) = images.sizes
    side = min(height, width, LARGE_SIZE) // stride * stride
    return max(small, side), f"all images are {height}x{width}"


def _crop(images: Survey, size: int | None) -> tuple[bool, str]:
    """Whether to crop, and why. Detectors see images of one size as they are; others they resize."""
    if len(images.sizes) > 1:
        return False, "images of different sizes are resized; set `size` of a detector to the same value"
    ((height, width),) = images.sizes
    if size is None or min(height, width) < size or (height, width) == (size, size):
        return False, "the images are not larger than image_size"
    return True, "random crops keep the resolution of images of one size"

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gepc.core.errors import InputError, OptionError
from gepc.lab.training.recipe import Recipe, builtin_recipes, load_recipe


@pytest.mark.parametrize("name", sorted(builtin_recipes()))
def test_shipped_recipes_load(name: str) -> None:
    assert isinstance(load_recipe(name), Recipe)


def test_the_embedded_backbone_is_fully_convolutional_and_small() -> None:
    from gepc.lab.training.recipe import build_net

    recipe = load_recipe("celeba32-tiny")
    parameters = sum(parameter.numel() for parameter in build_net(recipe, 32, 32).parameters())
    assert not recipe.attention
    assert parameters == 1_656_515  # the model card says so; at most 2 M


@pytest.mark.parametrize("name", ["photos-small", "celeba32-small", "sar-small"])
def test_the_small_networks_have_the_default_architecture(name: str) -> None:
    from gepc.lab.training.recipe import build_net

    recipe, default = load_recipe(name), Recipe()
    names = ("channels", "layers_per_block", "norm_groups", "scale_shift", "attention")
    assert all(getattr(recipe, field) == getattr(default, field) for field in names)
    parameters = sum(parameter.numel() for parameter in build_net(recipe, 32, 32).parameters())
    assert parameters < 0.66e6


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("steps: 7\nlearning_rate: 1e-3\nchannels: [16, 32]\n")
    recipe = load_recipe(tmp_path / "mine.yaml", {"steps": 9})
    assert (recipe.steps, recipe.learning_rate, recipe.channels) == (9, 1e-3, (16, 32))


def test_plain_values_survive_a_round_trip() -> None:
    recipe = load_recipe("celeba32-tiny", {"value_range": [0, 1]})
    values = recipe.as_dict()
    assert values["channels"] == [32, 64, 96]
    assert Recipe(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}) == recipe


def test_unknown_recipe_lists_near_names() -> None:
    with pytest.raises(InputError, match="did you mean 'celeba32-tiny'"):
        load_recipe("celeba-tiny")


def test_misspelt_field_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean 'learning_rate'"):
        load_recipe("quick", {"learning_rates": 1e-3})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"channels": ()}, "channels must be a list of widths"),
        ({"channels": (12,), "norm_groups": 8}, "multiples of norm_groups=8"),
        ({"norm_groups": 0}, "norm_groups must be at least 1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive"),
        ({"rho_range": (1.0, 0.5)}, "the smaller first"),
        ({"low_noise_share": 1.5}, "between 0 and 1"),
        ({"image_channels": 0}, "image_channels must be at least 1"),
        ({"image_size": 30}, "image_size must be a multiple of 4"),
        ({"crop": True}, "crop must be false unless image_size"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"mixed_precision": "fp8"}, "unknown mixed_precision"),
    ],
)
def test_values_that_make_no_sense_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        Recipe(**change)

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gepc.core.errors import OptionError
from gepc.lab.training.choices import choose, recipe_for
from gepc.lab.training.data import Survey
from gepc.lab.training.recipe import Recipe


def values(sizes: dict[tuple[int, int], int], bands: int = 3, **given: Any) -> dict[str, Any]:
    return {choice.field: choice.value for choice in choose(Survey(Counter(sizes), bands), given)}


@pytest.mark.parametrize(
    ("sizes", "image_size", "crop"),
    [
        ({(28, 28): 50}, 32, False),
        ({(32, 32): 50}, 32, False),
        ({(50, 50): 50}, 48, True),
        ({(48, 48): 50}, 48, False),
        ({(300, 200): 50}, 64, True),
        ({(300, 20): 50}, 32, False),
        ({(300, 200): 49, (200, 300): 1}, 32, False),
    ],
)
def test_size_and_crops(sizes: dict[tuple[int, int], int], image_size: int, crop: bool) -> None:
    found = values(sizes)
    assert (found["image_size"], found["crop"]) == (image_size, crop)


def test_steps_grow_with_the_images() -> None:
    few, some, many = (values({(32, 32): count}) for count in (100, 3200, 100_000))
    assert (few["steps"], some["steps"], many["steps"]) == (1000, 5000, 10_000)
    assert values({(256, 256): 100})["steps"] == 2500  # 16 crops of 64x64 in each image


def test_given_fields_are_not_chosen_and_change_the_others() -> None:
    found = values({(100, 100): 100}, image_size=32, channels=(8, 8, 8, 8), crop=False)
    assert set(found) == {"image_channels", "steps"}
    assert values({(60, 60): 100}, channels=(8, 8, 8, 8))["image_size"] == 56
    assert values({(32, 32): 3200}, init="celeba32-tiny")["steps"] == 2000


def test_a_recipe_for_images(tmp_path: Path) -> None:
    np.savez(tmp_path / "grey.npz", train_x=np.zeros((20, 40, 40, 1), np.uint8))
    recipe, choices = recipe_for(tmp_path / "grey.npz", tmp_path / "out", overrides={"image_size": 16, "seed": 3})
    assert (recipe.image_channels, recipe.image_size, recipe.crop, recipe.seed) == (1, 16, True, 3)
    assert (recipe.channels, recipe.norm_groups) == (Recipe.channels, Recipe.norm_groups)
    assert [choice.field for choice in choices] == ["image_channels", "crop", "steps"]


@pytest.mark.parametrize("change", [{"batch_size": 0}, {"image_size": 0}, {"channels": 3}, {"chanels": [8]}])
def test_invalid_overrides_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    np.savez(tmp_path / "grey.npz", train_x=np.zeros((20, 40, 40, 1), np.uint8))
    with pytest.raises(OptionError, match=r"recipe"):
        recipe_for(tmp_path / "grey.npz", tmp_path / "out", overrides=change)

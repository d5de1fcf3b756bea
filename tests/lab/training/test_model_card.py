"""benchmarks/model_card.py on a tiny run."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gepc.core.errors import InputError
from gepc.lab.training.checkpoint import loss_log
from gepc.lab.training.evaluate import error_table, evaluate
from gepc.lab.training.loop import TrainingRun
from gepc.lab.training.recipe import Recipe


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "model_card.py"
    spec = importlib.util.spec_from_file_location("model_card", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model_card_tables(script: ModuleType) -> Callable[[Path], str]:
    return script.model_card_tables


def test_tables_of_a_finished_run(
    data: Path, tiny: Recipe, tmp_path: Path, model_card_tables: Callable[[Path], str]
) -> None:
    run = TrainingRun(dataclasses.replace(tiny, steps=20, checkpoint_every=20), data, tmp_path / "out")
    run.loop()
    errors = evaluate(run.out, run.recipe, run.images, run.held_out, run.state.step)
    text = model_card_tables(run.out)
    assert error_table(errors) in text
    assert "after 20 steps" in text
    for fact in ("parameters", "images seen", "CPU time", "mean loss"):
        assert fact in text


def test_a_model_card_needs_a_finished_run(tmp_path: Path, model_card_tables: Callable[[Path], str]) -> None:
    with pytest.raises(InputError, match=r"held_out\.json does not exist"):
        model_card_tables(tmp_path)
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "held_out.json").write_text("{}")
    loss_log(tmp_path / "training").recover()
    with pytest.raises(InputError, match="too short for a model card"):
        model_card_tables(tmp_path)


def test_two_networks_on_the_same_images(data: Path, tiny: Recipe, tmp_path: Path, script: ModuleType) -> None:
    pixels = np.load(data)["train_x"]
    np.savez(tmp_path / "both.npz", train_x=pixels, test_x=pixels[:20])
    run = TrainingRun(dataclasses.replace(tiny, steps=2), tmp_path / "both.npz", tmp_path / "out")
    run.loop()
    other = shutil.copytree(run.out, tmp_path / "other")
    text = script.comparison(run.out, str(other), tmp_path / "both.npz")
    assert "8 of held-out images, 20 of test_x" in text
    cells = [cell.strip() for cell in text.splitlines()[4].split("|")]
    assert cells[2] == cells[3]
    assert cells[4] == cells[5]

"""Every baseline has the presets `paper` and `light`, and they cost what the literature and the documentation say."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
from gaussians import ABAR

import gepc
from gepc.core.errors import OptionError
from gepc.detector.parameters import detector_options, extractor_options
from gepc.images.preprocessing import Preprocessing
from gepc.methods import base
from gepc.methods.base import find_method

OURS = ("gepc", "gepc+", "encoder")
RIVALS = [
    name
    for name in gepc.list_detectors()
    if find_method(name).presets and name not in OURS and find_method(name).needs in (None, gepc.Backbone.gives)
]
NO_LPIPS = importlib.util.find_spec("lpips") is None
LIGHT = {
    "score_norm": (3, 0),
    "nll_vlb": (33, 0),
    "ic": (33, 0),
    "typicality": (33, 0),
    "dos": (36, 0),
    "nll_ode": (32, 32),
    "msma": (10, 0),
    "diffpath": (10, 0),
    "scoped": (1, 1),
    "eigenscore": (96, 0),
    "spr": (3, 0),
    "lmd": (104, 0),
    "idecode": (6, 0),
    "cfs": (1, 0),
    "ufcod": (10, 0),
}
PAPER = {
    "score_norm": (1, 0),
    "nll_vlb": (1000, 0),
    "ic": (1000, 0),
    "typicality": (1000, 0),
    "nll_ode": (500, 500),
    "msma": (10, 0),
    "diffpath": (10, 0),
    "scoped": (2, 2),
    "eigenscore": (30_000, 0),
    "spr": (3, 0),
    "lmd": (10_000, 0),
    "idecode": (6, 0),
    "ufcod": (10, 0),
}


def backbone() -> gepc.Backbone:
    return gepc.Backbone.from_callable(lambda x, t: x, ABAR, 3, 32)


def test_every_baseline_is_here() -> None:
    assert {*LIGHT, "ddpm_ood", "waic", "lr"} <= set(RIVALS)


@pytest.mark.parametrize("name", RIVALS)
def test_both_presets_can_be_made(name: str) -> None:
    assert {"paper", "light"} <= set(find_method(name).presets)
    gepc.create_detector(backbone(), name, preset="light")
    if NO_LPIPS and name in ("lmd", "ddpm_ood"):
        with pytest.raises(OptionError, match="needs the package lpips"):
            gepc.create_detector(backbone(), name, preset="paper")
    else:
        gepc.create_detector(backbone(), name, preset="paper")


@pytest.mark.parametrize(
    ("preset", "name", "passes"),
    [("light", *item) for item in LIGHT.items()] + [("paper", *item) for item in PAPER.items()],
)
def test_stated_costs(preset: str, name: str, passes: tuple[int, int]) -> None:
    given = {"distance": "msgms"} if name == "lmd" else {}
    cost = gepc.create_detector(backbone(), name, preset=preset, **given).cost()
    assert (cost.forward, cost.jvp) == passes


def test_labels_name_what_the_figures_depend_on() -> None:
    labels = {name: gepc.create_detector(backbone(), name).extractor.label for name in RIVALS}
    assert labels["lmd"] == "lmd[msgms]"
    assert labels["ddpm_ood"] == "ddpm_ood[mse+msgms]"
    assert labels["diffpath"] == "diffpath[6-D]"
    assert labels["ic"] == "ic[png]"
    assert labels["waic"] == "waic[heuristic]"
    assert labels["msma"] == "msma"


@pytest.mark.parametrize("name", gepc.list_detectors())
def test_the_parts_of_a_preset_hold_their_own_options(name: str) -> None:
    """Parameters of the method, of preprocessing, and of scoring; none in two parts."""
    own = extractor_options(find_method(name))
    reading = {field.name for field in dataclasses.fields(Preprocessing)}
    for preset in find_method(name).presets.values():
        assert set(preset.method) <= own
        assert set(preset.preprocessing) <= reading
        assert set(preset.calibration) <= set(detector_options()) - reading - own
        assert preset.options == {**preset.method, **preset.preprocessing, **preset.calibration}


@pytest.mark.parametrize(("name", "parameter"), [("cfs", "layers"), ("encoder", "layers"), ("gepc", "features")])
def test_a_single_word_is_a_tuple_of_one(name: str, parameter: str) -> None:
    """Also where the default is None: the letters of a word are not layers."""
    word = "s" if parameter == "features" else "first"
    assert getattr(find_method(name)(**{parameter: word}), parameter) == (word,)


def test_a_name_that_ends_in_plus_is_found_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gepc_plus` is another spelling of `gepc+`, but `surplus` is not one of `sur+`."""
    monkeypatch.setitem(base._EXTRACTORS, "surplus", found := find_method("msma"))
    assert find_method("surplus") is found
    assert find_method("gepc_plus") is find_method("gepc+")

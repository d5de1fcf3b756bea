"""The examples in the docstrings of images, backbones and core run, and public names have one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import warnings
from types import FunctionType

import pytest

import gepc
from gepc.images.preprocessing import Mask

MODULES = ("backbones.base", "backbones.devices", "backbones.encoders", "backbones.identity", "backbones.load")
MODULES += ("backbones.path", "backbones.schedule", "images.formats", "images.preprocessing")
MODULES += ("core.parts", "core.rates")
PUBLIC = (gepc.load_backbone, gepc.list_backbones, gepc.deterministic, gepc.Encoder, gepc.Levels, gepc.Preprocessing)
METHODS = ("eps", "score", "jvp", "eps_and_log_variance", "eps_and_activations")
METHODS += ("from_callable", "from_denoiser", "from_flow")


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(f"gepc.{name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("thing", [*PUBLIC, gepc.Backbone], ids=lambda thing: thing.__name__)
def test_public_names_have_examples_and_relations(thing: object) -> None:
    text = inspect.getdoc(thing) or ""
    assert ">>>" in text
    assert "See Also" in text


@pytest.mark.parametrize("name", METHODS)
def test_passes_and_makers_of_backbones_say_what_they_take_and_return(name: str) -> None:
    method = getattr(gepc.Backbone, name)
    assert isinstance(method, FunctionType)
    text = inspect.getdoc(method) or ""
    assert all(section in text for section in ("Parameters\n", "Returns\n", "Examples\n", "See Also\n"))


MEMBERS = [(gepc.Encoder, name) for name in ("load", "activations", "rebuild")]
MEMBERS += [(gepc.Levels, name) for name in ("sqrt_abar", "snr", "rho", "index", "of", "timesteps")]
MEMBERS += [(Mask, name) for name in ("of", "array")]
MEMBERS += [(gepc.Backbone, name) for name in ("sigma", "sqrt_abar", "per_image", "with_encoder")]


@pytest.mark.parametrize(("owner", "name"), MEMBERS, ids=lambda part: getattr(part, "__name__", part))
def test_members_say_what_they_take_and_return(owner: type, name: str) -> None:
    text = inspect.getdoc(getattr(owner, name)) or ""
    assert all(section in text for section in ("Parameters\n", "Returns\n", "Examples\n"))

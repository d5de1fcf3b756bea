"""Untrusted detector folders: an error message or a working detector, never a traceback, a hang or a lookup."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from toys import as_uint8, pictures

import gepc
from gepc.cli.app import run as command_line
from gepc.core.errors import BackboneError, GepcError, InputError
from gepc.detector.registry import load_detector
from gepc.detector.storage import DESCRIPTION, STATE

IMAGES = as_uint8(pictures(2, 16, seed=9))
WRONG = [None, True, -1, 0, 1, 7, 40_000, 10**12, 10**30, -0.5, 0.5, 1e308, float("nan"), float("inf"), "", "x", "0.1"]
WRONG += ["/etc/passwd", [], [1], ["a"], [[]], {}, {"a": 1}, [float("nan")] * 3, [1] * 20_000, "x" * 20_000]


@pytest.fixture(scope="module")
def backbone(saved: Path) -> gepc.Backbone:
    return gepc.load_backbone(str(saved.parent / "net"))


@pytest.fixture(scope="module")
def grouped(saved: Path, backbone: gepc.Backbone) -> Path:
    """A detector with more arrays: groups, a calibrator of vectors."""
    detector = gepc.GEPC(backbone, levels=(0.99, 0.9), keep=None, size=16, calibration="knn")
    images, others = as_uint8(pictures(40, 16)), as_uint8(pictures(40, 16, seed=3))
    detector.fit(images, others, groups=["day", "night"] * 20).save(saved.parent / "grouped")
    return saved.parent / "grouped"


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for name, item in items for found in places(item, (*path, name)))][0 if path else 1 :]


def changed(value: Any, path: tuple[Any, ...], new: Any, drop: bool) -> Any:
    value = copy.deepcopy(value)
    parent = value
    for name in path[:-1]:
        parent = parent[name]
    if drop:
        del parent[path[-1]]
    else:
        parent[path[-1]] = new
    return value


def works_or_explains(folder: Path, backbone: gepc.Backbone | str) -> None:
    try:
        detector = load_detector(folder, backbone)
        groups = [next(iter(detector.fitted.reference.by_group))] * 2 if detector.fitted.reference.grouped else None
        p = detector.p_value(IMAGES, groups)
        scores = [result.score for result in detector.results(IMAGES, groups=groups)]
    except GepcError:
        return
    assert np.isfinite(scores).all()
    assert ((p > 0) & (p <= 1)).all()


COMMON = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}


@pytest.mark.parametrize("kind", ["det", "grouped"])
@settings(max_examples=30, **COMMON)
@given(data=st.data())
def test_a_description_with_anything_in_it(kind: str, saved, grouped, backbone, tmp_path: Path, data) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(saved.parent / kind, folder, dirs_exist_ok=True)
    value = json.loads((saved.parent / kind / DESCRIPTION).read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(places(value)))
        value = changed(value, path, data.draw(st.sampled_from(WRONG)), data.draw(st.booleans()))
    (folder / DESCRIPTION).write_text(json.dumps(value))
    works_or_explains(folder, backbone)


@pytest.mark.parametrize("kind", ["det", "grouped"])
@settings(max_examples=30, **COMMON)
@given(data=st.data())
def test_a_state_with_anything_in_it(kind: str, saved, grouped, backbone, tmp_path: Path, data) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(saved.parent / kind, folder, dirs_exist_ok=True)
    arrays = dict(load_file(saved.parent / kind / STATE))
    name = data.draw(st.sampled_from(sorted(arrays)))
    array = arrays[name]
    ways = {
        "dropped": lambda: arrays.pop(name),
        "renamed": lambda: arrays.update({f"{name}x": arrays.pop(name)}),
        "another type": lambda: arrays.update({name: array.astype(data.draw(st.sampled_from(["f4", "f2", "?"])))}),
        "not finite": lambda: array.flat.__setitem__(0, data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))),
        "empty": lambda: arrays.update({name: array[:0]}),
        "shorter": lambda: arrays.update({name: array[1:]}),
        "flat": lambda: arrays.update({name: array.ravel()}),
        "deeper": lambda: arrays.update({name: array[None]}),
        "wider": lambda: arrays.update({name: np.repeat(array, 3, axis=-1)}),
        "huge": lambda: arrays.update({name: np.zeros((1, 300_000))}),
        "huge vector": lambda: arrays.update({name: np.zeros(300_000)}),
        "zero": lambda: arrays.update({name: np.zeros_like(array)}),
        "large": lambda: arrays.update({name: array * 1e300}),
    }
    ways[data.draw(st.sampled_from(sorted(ways)))]()
    save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, folder / STATE)
    works_or_explains(folder, backbone)


def edited(saved: Path, tmp_path: Path, path: tuple[Any, ...], new: Any) -> Path:
    folder = shutil.copytree(saved, tmp_path / "det", dirs_exist_ok=True)
    value = json.loads((saved / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps(changed(value, path, new, drop=False)))
    return folder


@pytest.mark.parametrize(
    ("path", "new", "reason"),
    [
        (("options", "mc_samples"), 10**12, "mc_samples is beyond 100,000, the largest number"),
        (("options", "mc_samples"), 99_999, "more than 1,000,000 network passes"),
        (("options", "batch_size"), 99_999, "batch_size is 99999"),
        (("options", "seed"), 2**70, "seed is beyond .*, the largest number"),
        (("preprocessing", "size"), [40_000, 40_000], "preprocessing is not what the options"),
        (("preprocessing", "channels"), 1, "preprocessing is not what the options"),
        (("fitted", "timesteps"), list(range(9_000)), "timesteps must be"),
        (("fitted", "weights"), [-1.0, 2.0], "weights must be shares"),
        (("fitted", "calibration_images"), 10**9, "calibration scores for each"),
        (("backbone", "sha256"), None, "SHA-256 of the backbone's weights is missing"),
        (("backbone", "sha256"), "0" * 64, "was fitted with other weights"),
    ],
)
def test_what_makes_no_sense_is_named(saved, backbone, tmp_path: Path, path, new, reason: str) -> None:
    with pytest.raises((InputError, BackboneError), match=reason):
        load_detector(edited(saved, tmp_path, path, new), backbone)


def test_a_detector_that_answers_nan_is_refused(saved, backbone, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "det")
    arrays = dict(load_file(saved / STATE))
    arrays["calibrator/samples"] = arrays["calibrator/samples"] * np.nan
    save_file(arrays, folder / STATE)
    with pytest.raises(InputError, match="calibrator/samples holds numbers that are not finite"):
        load_detector(folder, backbone)


@pytest.mark.parametrize("source", ["someone/else", "/etc/passwd", "../net", "net", "https://example.org/net"])
def test_networks_that_a_folder_names_are_not_looked_for(saved, tmp_path: Path, source: str, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.setattr("gepc.backbones.load.load_backbone", lambda *_, **__: pytest.fail("a path was followed"))
    monkeypatch.chdir(saved.parent)
    folder = edited(saved, tmp_path, ("backbone", "source"), source)
    with pytest.raises(BackboneError, match="paths and hub ids in it are not followed"):
        load_detector(folder)


def test_options_of_a_network_are_not_read_from_a_path(saved, tmp_path: Path) -> None:
    folder = edited(saved, tmp_path, ("backbone", "load_options"), {"config": "/etc/passwd"})
    with pytest.raises(InputError, match="must not name a path"):
        load_detector(folder, str(saved.parent / "net"))
    folder = edited(saved, tmp_path, ("backbone", "load_options"), {"embeddings": "/etc/passwd"})
    with pytest.raises(InputError, match="load_options may hold"):
        load_detector(folder, str(saved.parent / "net"))


def test_the_word_of_the_user_is_enough(saved, monkeypatch) -> None:
    monkeypatch.chdir(saved.parent)
    expected = load_detector(saved, "net").score(IMAGES)
    assert np.array_equal(load_detector(saved, trust=True).score(IMAGES), expected)
    monkeypatch.setenv("GEPC_TRUST", "1")
    assert np.array_equal(load_detector(saved).score(IMAGES), expected)


@pytest.mark.parametrize("name", [DESCRIPTION, STATE])
def test_a_pipe_in_place_of_a_file_does_not_hang(saved, backbone, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(saved, tmp_path / "det")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(InputError, match="is a named pipe"):
        load_detector(folder, backbone)


def test_deep_nesting_is_an_error_message(saved, tmp_path: Path, capfd) -> None:
    folder = shutil.copytree(saved, tmp_path / "det")
    (folder / DESCRIPTION).write_text("[" * 200_000)
    assert command_line(["score", str(folder), str(tmp_path)]) == 2
    assert "is not a readable JSON file" in capfd.readouterr().err

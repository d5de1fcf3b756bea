"""Detectors survive pickle and joblib; weights are named, checked and never stored."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from toys import pictures, toy_detector

import gepc
from gepc.core.errors import BackboneError
from gepc.methods.groups import Group

IMAGES = pictures(24, size=16)


def _folder(net: torch.nn.Module, place: Path) -> Path:
    from diffusers import DDPMScheduler

    net.save_pretrained(place)  # type: ignore[operator]
    DDPMScheduler(num_train_timesteps=100).save_pretrained(place)
    return place


@pytest.fixture
def detector(tiny_net: torch.nn.Module, tmp_path: Path) -> gepc.Detector:
    backbone = gepc.load_backbone(_folder(tiny_net, tmp_path / "net"))
    return gepc.GEPC(backbone, levels=(0.99, 0.9)).fit(IMAGES)


def test_a_pickled_detector_gives_the_same_numbers(detector: gepc.Detector) -> None:
    data = pickle.dumps(detector)
    assert len(data) < 20_000  # the weights are not in it
    again = pickle.loads(data)
    np.testing.assert_array_equal(again.p_value(IMAGES), detector.p_value(IMAGES))
    assert again.extractor == detector.extractor


def test_joblib_does_too(detector: gepc.Detector, tmp_path: Path) -> None:
    joblib.dump(detector, tmp_path / "detector.joblib")
    np.testing.assert_array_equal(joblib.load(tmp_path / "detector.joblib").score(IMAGES), detector.score(IMAGES))


def test_a_detector_with_preset_from_a_registered_method_is_picklable(detector: gepc.Detector) -> None:
    other = gepc.create_detector(detector.backbone, "gepc+", "fast").fit(IMAGES)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(other)).score(IMAGES), other.score(IMAGES))


def test_other_weights_are_refused(detector: gepc.Detector, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    data = pickle.dumps(detector)
    (weights,) = (tmp_path / "net").glob("*.safetensors")
    changed = {name: tensor * 1.01 for name, tensor in load_file(weights).items()}
    save_file(changed, weights)
    with pytest.raises(BackboneError, match=r"the pickle was fitted with other weights than .*net: sha256 .* expected"):
        pickle.loads(data)


def test_a_function_as_backbone_says_why_it_cannot() -> None:
    detector = toy_detector().fit(pictures(24))
    with pytest.raises(pickle.PicklingError, match=r"function cannot be pickled: .* gepc\.load_detector\(folder"):
        pickle.dumps(detector)


def test_a_network_in_memory_is_pickled_with_its_weights(tiny_net: torch.nn.Module) -> None:
    from diffusers import DDPMScheduler

    backbone = gepc.load_backbone(tiny_net, scheduler=DDPMScheduler(num_train_timesteps=100))  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(backbone))
    x = torch.from_numpy(IMAGES[:2])
    torch.testing.assert_close(again.eps(x, 3), backbone.eps(x, 3), rtol=0, atol=0)
    assert again.sha256 == backbone.sha256 is not None


def test_copies_share_the_network() -> None:
    detector = toy_detector().fit(pictures(24))
    assert copy.deepcopy(detector).backbone is detector.backbone


@pytest.mark.parametrize("name", ["paper", "d4", "sign", "shift(2,-1)"])
def test_groups_come_back_equal(name: str) -> None:
    group = Group.of(name)
    again = pickle.loads(pickle.dumps(group))
    assert again == group
    assert Group.of(list(again)) == group  # known actions, not new ones under old names


def test_an_unregistered_action_is_pickled_by_its_functions() -> None:
    action = gepc.Action("own-neg", torch.neg, torch.neg)
    again = pickle.loads(pickle.dumps(action))
    assert (again.name, again.apply, again.square_only) == ("own-neg", torch.neg, False)

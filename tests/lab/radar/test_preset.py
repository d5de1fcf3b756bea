"""Detectors derived from the size of the target."""

from __future__ import annotations

import numpy as np
import pytest
from toys import toy_backbone

from gepc.calibration.evidence import combine_parts
from gepc.core.errors import OptionError
from gepc.lab.radar.bench import METHODS, local_pooling, radar_detector
from gepc.methods.pooling import Pooling


@pytest.mark.parametrize(("pixels", "window"), [(1, 1), (20, 3), (50, 5), (200, 9), (800, 19)])
def test_pooling_follows_the_targets_size(pixels: int, window: int) -> None:
    options = local_pooling(pixels, 256)
    assert options == {"pool": "local", "window": window, "topk": pixels / 65536}
    Pooling(options["pool"], options["topk"], options["window"])


@pytest.mark.parametrize("method", METHODS[:-1])
def test_every_method_is_set_to_the_target(method: str) -> None:
    detector = radar_detector(toy_backbone(1, None), method, target_pixels=50, size=128, normalise="patch")
    assert (detector.extractor.window, detector.extractor.topk) == (5, 50 / 128**2)  # type: ignore[attr-defined]
    assert (detector.magnitude, detector.resize, detector.size) == ("log", "cut", 128)
    assert detector.normalise == ("fixed" if "cfar" in method else "patch")
    assert getattr(detector.extractor, "scale", "log") == "log"
    given = radar_detector(toy_backbone(1, None), method, value_range=(0.0, 2.0), window=3)
    assert given.value_range == (0.0, 2.0)
    assert given.extractor.window == 3  # type: ignore[attr-defined]


def test_bad_options_are_refused() -> None:
    for bad in ({"target_pixels": 0}, {"target_pixels": 20000}, {"method": "cfar"}, {"normalise": "scene"}):
        with pytest.raises(OptionError):
            radar_detector(toy_backbone(1, None), **bad)  # type: ignore[arg-type]


def test_rx_gets_a_fifth_of_the_rate_of_the_others() -> None:
    """The network's error and the brightness of a target share the rate; unusual pixels weigh less."""
    detector = radar_detector(toy_backbone(1, None), size=16, target_pixels=9)
    detector.fit(np.random.default_rng(0).integers(0, 255, (40, 16, 16, 1), dtype=np.uint8))
    weights = {part.name: part.weight for part in detector.fitted.scorer.calibrator_.stored_parts if part.view}
    assert weights == {"texture and noise": 1.0, "brightness of a target": 1.0, "unusual pixels": 0.2}


def test_a_part_of_small_weight_decides_only_with_more_evidence() -> None:
    evidence = np.array([[3.0, 4.0], [3.0, 5.0]])
    assert combine_parts(evidence, "minimum", np.array([1.0, 0.2])) == pytest.approx([3.0, 5.0 + np.log(0.2)])

"""CFAR and RX: their false-alarm rate on simulated clutter is the one their closed form states."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

import gepc
from gepc.core.errors import OptionError
from gepc.images.preprocessing import from_log_magnitude, log_magnitude
from gepc.lab.analytic import GaussianBackbone
from gepc.lab.radar.cfar import (
    CFAR,
    RATIOS,
    RX,
    CellAveragingCFAR,
    OrderStatisticCFAR,
    os_log_pfa,
)
from gepc.lab.radar.simulate import Sea, Target, simulate

Array = npt.NDArray[np.float64]
PFA = 3e-3
COUNT, SIDE = 3, 320


def clutter(sea: Sea, count: int = COUNT) -> Array:
    """Intensities of mean 1, (N, H, W)."""
    rng = np.random.default_rng(7)
    return np.stack([sea.intensity(SIDE, SIDE, rng) for _ in range(count)]) / sea.mean


def rate(method: CFAR, intensity: Array, pfa: float = PFA) -> float:
    """Share of the pixels away from the border whose map exceeds -log(pfa)."""
    inner = slice(40, -40)
    maps = [method.log_pfa_of(one)[inner, inner] for one in intensity]
    return float((np.stack(maps) <= np.log(pfa)).mean())


@pytest.mark.parametrize("looks", [1.0, 4.0])
@pytest.mark.parametrize("method", [CellAveragingCFAR, OrderStatisticCFAR])
def test_the_false_alarm_rate_on_speckle_is_the_stated_one(method: type[CFAR], looks: float) -> None:
    intensity = clutter(Sea(nu=float("inf"), looks=looks))
    # 172,800 pixels: a standard deviation of 4 % of the rate, and a little more because neighbours share a ring
    assert rate(method(looks=looks), intensity) == pytest.approx(PFA, rel=0.15)
    assert rate(method(looks=looks), 300.0 * intensity) == rate(method(looks=looks), intensity)  # any gain


def test_closed_forms() -> None:
    ring = CellAveragingCFAR(guard=3, ring=5)
    field = np.ones((11, 11))
    count = 25 - 9
    field[5, 5] = threshold = count * (PFA ** (-1 / count) - 1)
    assert ring.log_pfa_of(field)[5, 5] == pytest.approx(np.log(PFA))  # the multiplier N (Pfa^(-1/N) - 1)
    numbers = 128 - np.arange(96)
    product = np.log(numbers / (numbers + RATIOS[:, None])).sum(1)
    found = os_log_pfa(128, 96, 1.0)
    likely = product > np.log(1e-12)
    assert np.allclose(found[likely], product[likely], atol=1e-6)
    assert threshold > 0


def test_the_rate_of_rx_on_gaussian_images() -> None:
    images = torch.from_numpy(np.random.default_rng(0).normal(0.1, 0.3, (4, 2, SIDE, SIDE)))
    found = RX(side=3).log_pfa(images)[:, 2:-2, 2:-2]
    assert float((found <= np.log(PFA)).double().mean()) == pytest.approx(PFA, rel=0.15)
    moved = RX(side=3).log_pfa(5.0 * images - 0.4)[:, 2:-2, 2:-2]
    assert torch.allclose(moved, found, atol=1e-3)


def test_a_ship_in_the_ring_hides_another_one_from_the_mean_but_not_from_the_rank() -> None:
    field = clutter(Sea(nu=float("inf"), looks=4.0), 1)[0]
    field[100:103, 100:103] = 6.0
    field[100:110, 128:138] = 3000.0
    averaged, ordered = (
        method(looks=4.0).log_pfa_of(field)[101, 101] for method in (CellAveragingCFAR, OrderStatisticCFAR)
    )
    assert averaged > np.log(0.5)
    assert ordered < np.log(1e-3)


def test_the_scales_of_pixels_agree() -> None:
    amplitude = np.random.default_rng(3).random((1, 1, 70, 70))
    assert np.allclose(from_log_magnitude(log_magnitude(amplitude, (0.0, 1.0))), amplitude)
    given = {
        "amplitude": amplitude,
        "intensity": amplitude**2,
        "log": log_magnitude(amplitude, (0.0, 1.0)),
    }
    found = [CellAveragingCFAR(scale=scale).log_pfa(torch.from_numpy(2 * x - 1)) for scale, x in given.items()]
    assert torch.allclose(found[0], found[1])
    assert torch.allclose(found[0], found[2])


@pytest.mark.parametrize("name", ["ca_cfar", "os_cfar", "rx"])
def test_ships_are_detected_and_located_without_a_pass(name: str) -> None:
    def patches(first: int, ships: tuple[Target, ...] = ()) -> Array:
        return np.stack([simulate(64, 64, Sea(), ships, seed)[0].clip(0, 1) for seed in range(first, first + 9)])

    backbone = GaussianBackbone(0.0, 0.1, (1, 64, 64))
    detector = gepc.create_detector(backbone, name, value_range=(0.0, 1.0)).fit(patches(0), patches(100))
    ships = patches(500, (Target(40.0, 30.0, 20.0, 8.0, brightness=80.0),))
    assert backbone.forward_count == 0
    assert detector.score(ships).min() > detector.calibration_scores_.max()
    peaks = [np.unravel_index(field.argmax(), field.shape) for field in detector.score_map(ships)]
    assert np.mean([abs(row - 30) < 8 and abs(column - 40) < 14 for row, column in peaks]) > 0.9


@pytest.mark.parametrize("bad", [{"guard": 40}, {"guard": 61}, {"looks": 0.0}, {"scale": "dB"}, {"window": 4}])
def test_bad_options_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        CellAveragingCFAR(**bad)  # type: ignore[arg-type]

"""Options derived from the size of the target."""

from __future__ import annotations

import pytest

from gepc.core.errors import OptionError
from gepc.features.pooling import Pooling
from gepc.sar.bench import local_pooling, sar_options


@pytest.mark.parametrize(("pixels", "window"), [(1, 1), (20, 3), (50, 5), (200, 9), (800, 19)])
def test_pooling_follows_the_targets_size(pixels: int, window: int) -> None:
    options = local_pooling(pixels, 256)
    assert options == {"pool": "local", "window": window, "topk": pixels / 65536}
    Pooling(options["pool"], options["topk"], options["window"])


def test_options_of_the_domain() -> None:
    assert sar_options(sides="two")["calibration"] == "kde"
    assert sar_options(normalise="patch", size=128)["topk"] == 200 / 128**2
    for bad in ({"target_pixels": 0}, {"target_pixels": 20000}, {"sides": "three"}):
        with pytest.raises(OptionError):
            sar_options(**bad)  # type: ignore[arg-type]

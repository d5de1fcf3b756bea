"""benchmarks/groups.py: the residual by angle where it is known."""

from __future__ import annotations

import numpy as np
from groups import ANGLES, residual_by_angle
from toys import pictures, toy_backbone

import gepc
from gepc.methods.base import Batch
from gepc.methods.gepc import GepcExtractor


def test_the_curve_of_a_rotation_invariant_network_is_zero() -> None:
    backbone = gepc.Backbone.from_callable(lambda x, t: x, toy_backbone().alphas_cumprod, 3, 8)
    values = residual_by_angle(GepcExtractor(), backbone, Batch(pictures(3), [b"a", b"b", b"c"]))
    assert values.shape == (3, len(ANGLES))
    assert np.abs(values).max() < 1e-10

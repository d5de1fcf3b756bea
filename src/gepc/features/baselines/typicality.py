"""Typicality (TT): is the likelihood what it usually is? Nalisnick, Matsukawa, Teh & Lakshminarayanan, 2019.

    |NLL(x) - mean of NLL over ID images|

for one image, from the variational bound. Two-sided, unlike the likelihood itself. In the paper the model is trained
on the ID set; here it is whatever the backbone was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gepc.features.base import DerivedExtractor, register
from gepc.features.baselines.nll_vlb import NllVlb


@register("typicality")
@dataclass(frozen=True)
class Typicality(DerivedExtractor, NllVlb):
    """The bound's parameters; the distance to the mean is the calibrator's, in standard deviations."""

    calibration: ClassVar[str] = "abs_z"

    def builds_on(self) -> tuple[NllVlb]:
        """The table is the likelihood's."""
        return (self.plain(),)

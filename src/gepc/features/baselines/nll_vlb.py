"""Negative log-likelihood by the variational bound, in bits per dimension; formulas in `baselines.vlb`.

Raw and one-sided: an image is OOD where the model finds it unlikely. That inverts for images simpler than the training
set (SVHN under CIFAR-10). `paper` respaces the schedule to 1000 steps; `light` looks at 32 strata and L_0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from gepc.backbones.base import Backbone
from gepc.features.base import Batch, register
from gepc.features.baselines.vlb import Bound, bits_per_dim

if TYPE_CHECKING:
    from gepc.features.templates import Features


@register("nll_vlb")
@dataclass(frozen=True)
class NllVlb(Bound):
    """(L_0 + sum_t L_t + L_T)/(D ln 2)."""

    calibration: ClassVar[str] = "raw"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"steps": 1000, "strata": None},
        "light": {"strata": 32},
        "full": {"steps": None, "strata": None},
    }

    @property
    def column_names(self) -> tuple[str, ...]:
        """Bits per dimension."""
        return ("bpd",)

    def plain(self) -> NllVlb:
        """The bound itself with the same parameters, for the methods that read it in another way."""
        return NllVlb(**{field.name: getattr(self, field.name) for field in fields(NllVlb)})

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """The sum of the terms, and `terms`: L_0, the strata and L_T, all in bits per dimension."""
        terms = bits_per_dim(self.terms(backbone, batch), batch)
        return {"bpd": terms.sum(1), "terms": terms}

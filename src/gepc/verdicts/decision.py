"""The decision: which p-values raise an alarm, and what is guaranteed of the alarms. No other module compares them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gepc.core.errors import OptionError
from gepc.verdicts.conformal import SLACK, UNGROUPED, Array, CalibrationScores, Guarantee, Labels, check_alpha, pac_rank
from gepc.verdicts.multiple_testing import check_rate, discoveries


@dataclass(frozen=True)
class DecisionRule:
    """How p-values become alarms.

    Parameters
    ----------
    alpha : false-alarm rate: an in-distribution image raises an alarm with at most this probability, on average over
        calibration sets.
    confidence : if given, the rate holds for the calibration set at hand with this probability.
    fdr : if given, control the false-discovery rate over all images at this level instead of using `alpha`.
    procedure : `bh` (Benjamini-Hochberg) or `storey`, with `fdr`.
    """

    alpha: float = 0.05
    confidence: float | None = None
    fdr: float | None = None
    procedure: str = "bh"

    def __post_init__(self) -> None:
        if self.fdr is None:
            return
        check_rate(self.fdr, self.procedure)
        if self.confidence is not None:
            raise OptionError("confidence goes with alpha; leave it out when fdr is given")

    def limits(self, reference: CalibrationScores, labels: Labels | None = None) -> Array:
        """The largest p-value that raises an alarm, for all images or, with groups, for each of them.

        Raises `OptionError` for a rate that the calibration images cannot guarantee. Undefined with `fdr`, where the
        limit depends on the p-values.
        """
        reference.check(labels)
        if labels is None:
            return np.asarray(self._limit(len(reference.by_group[UNGROUPED])))
        found = {label: self._limit(len(scores)) for label, scores in reference.by_group.items()}
        return np.array([found[str(label)] for label in labels])

    def _limit(self, n: int) -> float:
        if self.confidence is not None:
            return pac_rank(n, self.alpha, self.confidence) / (n + 1)
        check_alpha(self.alpha, n)
        return self.alpha * SLACK

    def check(self, reference: CalibrationScores, labels: Labels | None = None) -> None:
        """Refuse, before any work, a rate that the calibration images cannot guarantee."""
        if self.fdr is None:
            self.limits(reference, labels)
        else:
            reference.check(labels)

    def alarms(
        self, p_values: npt.ArrayLike, reference: CalibrationScores, labels: Labels | None = None
    ) -> npt.NDArray[np.bool_]:
        """True where a p-value raises an alarm. An image that could not be scored (NaN) does not."""
        p = np.asarray(p_values, dtype=np.float64)
        if self.fdr is None:
            return np.asarray(p <= self.limits(reference, labels))
        flags, scored = np.zeros(len(p), dtype=bool), ~np.isnan(p)
        flags[scored] = discoveries(p[scored], self.fdr, self.procedure)
        return flags

    def statement(self, reference: CalibrationScores) -> str:
        """The guarantee in words."""
        if self.fdr is not None:
            return f"on average at most {self.fdr:g} of the flagged images are false alarms ({self.procedure})"
        if self.confidence is not None:
            return (
                f"with probability {self.confidence:g} over calibration sets, at most {self.alpha:g} "
                "of in-distribution images raise an alarm"
            )
        return str(Guarantee.at(self.alpha, reference.smallest))

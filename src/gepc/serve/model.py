"""The detector in use: loaded as a whole, identified by its files, with its scores, maps and decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gepc.core.errors import GepcError, InputError, OptionError
from gepc.core.files import read_json, sha256
from gepc.detector.detector import Detector
from gepc.detector.storage import DESCRIPTION, STATE, load_detector
from gepc.features.maps import Map
from gepc.images.sources import Image
from gepc.serve.messages import GuaranteeAt, Rate
from gepc.verdicts.decision import DecisionRule

DEFAULT_ALPHA, LARGEST_ALPHA = 0.05, 0.5
N_RATES = 120
ATTEMPTS = 3


class Finding(NamedTuple):
    """A network input with its score, and its map if one was requested."""

    image: Image
    score: float
    field: Map | None


@dataclass(frozen=True, eq=False)
class Model:
    """A loaded detector and `identity`, the first digits of the SHA-256 of its files."""

    detector: Detector
    identity: str

    @classmethod
    def load(cls, folder: Path, backbone: str | None = None, former: Model | None = None) -> Model:
        """Load a detector folder, again if it is replaced meanwhile; the former model's network is kept if it fits."""
        for _ in range(ATTEMPTS):
            before = _identity(folder)
            detector = load_detector(folder, _known_backbone(folder, backbone, former))
            if _identity(folder) == before:
                return cls(detector, before)
        raise InputError("the detector's files change while they are read; try again")

    def score_batch(self, images: Sequence[Image], with_maps: bool) -> list[Finding]:
        """Scores, and maps from the same network passes, of preprocessed images."""
        scores, maps = self.detector.score_batch(images, with_maps)
        fields = [None] * len(images) if maps is None else list(maps)
        return [Finding(*found) for found in zip(images, scores.tolist(), fields, strict=True)]

    def blank(self) -> Image:
        """A grey image."""
        return np.zeros((self.detector.backbone.channels, *self.detector.input_size), dtype=np.float32)

    def warm_up(self) -> None:
        """Score a grey image, so that setting up the network does not delay the first request."""
        try:
            self.score_batch([self.blank()], with_maps=False)
        except GepcError:
            raise
        except RuntimeError as error:
            raise GepcError(f"the detector cannot score an image: {error}") from error

    def alpha(self, asked: float | None) -> float:
        """The false-alarm rate asked for; the default is 0.05, or the smallest possible rate if larger."""
        return max(DEFAULT_ALPHA, self.smallest_alpha) if asked is None else asked

    @property
    def smallest_alpha(self) -> float:
        """The smallest false-alarm rate possible with the calibration images (of the smallest group)."""
        return 1.0 / (self.detector.reference_.smallest + 1)

    def check(self, alpha: float, group: str | None) -> None:
        """Raise `OptionError` if the calibration images do not allow `alpha`, or if there is no such group."""
        reference = self.detector.reference_
        if reference.grouped and group is None:
            raise OptionError(
                f"this detector was fitted with groups; set group to one of {', '.join(reference.by_group)}"
            )
        if group is not None and not reference.grouped:
            raise OptionError("this detector was fitted without groups; leave group out")
        DecisionRule(alpha).check(reference, None if group is None else np.array([group]))

    def decide(self, scores: Sequence[float], alpha: float, group: str | None) -> tuple[list[float], list[bool]]:
        """p-values and alarms at `alpha`."""
        reference, labels = self.detector.reference_, None if group is None else np.full(len(scores), group)
        p = reference.p_values(np.asarray(scores, dtype=np.float64), labels)
        return p.tolist(), DecisionRule(alpha).alarms(p, reference, labels).tolist()

    def guarantee(self, alpha: float) -> GuaranteeAt:
        """What the calibration images guarantee at `alpha`, and the p-value limit that applies to every group."""
        reference, found = self.detector.reference_, self.detector.guarantee(alpha)
        labels = np.array(list(reference.by_group)) if reference.grouped else None
        limit = float(DecisionRule(alpha).limits(reference, labels).min())
        return GuaranteeAt(limit=limit, calibration_images=found.n, sentence=str(found), **found.as_dict())

    @cached_property
    def rates(self) -> list[Rate]:
        """False-alarm rates to choose from, rounded and about evenly spaced on a logarithmic scale."""
        spaced = np.geomspace(self.smallest_alpha, LARGEST_ALPHA, N_RATES)
        chosen = {self.smallest_alpha, self.alpha(None), *(float(f"{alpha:.2g}") for alpha in spaced)}
        return [self.guarantee(alpha) for alpha in sorted(chosen) if alpha >= self.smallest_alpha]


def _identity(folder: Path) -> str:
    try:
        return sha256(folder / DESCRIPTION, folder / STATE)[:12]
    except OSError as error:
        raise InputError(f"{folder} holds no detector; give a folder written by `gepc fit`") from error


def _known_backbone(folder: Path, given: str | None, former: Model | None) -> Any:
    """The network in memory if the folder names the same weights, else what was given."""
    if former is None:
        return given
    known = former.detector.backbone
    stored = read_json(folder / DESCRIPTION)
    wanted = stored.get("backbone", {}).get("sha256") if isinstance(stored, dict) else None
    return known if given is not None or (wanted is not None and wanted == known.sha256) else given

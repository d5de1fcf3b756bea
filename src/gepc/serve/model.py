"""A detector as the service uses it: identified by its files, whole at every moment, score and map from one pass."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gepc.core.errors import GepcError, InputError
from gepc.core.files import read_json, sha256
from gepc.detector.detector import Array, Detector
from gepc.detector.storage import DESCRIPTION, STATE, load_detector
from gepc.features.maps import Map
from gepc.images.sources import Image
from gepc.verdicts.decision import DecisionRule

USUAL_ALPHA = 0.05
ATTEMPTS = 3


@dataclass(frozen=True)
class Finding:
    """What the network says of one image; `field` is its map where one was asked for."""

    score: float
    field: Map | None = None


@dataclass(frozen=True, eq=False)
class Model:
    """A loaded detector and `identity`, the first digits of the SHA-256 of its files."""

    detector: Detector
    identity: str

    @classmethod
    def load(cls, folder: Path, backbone: str | None = None, former: Model | None = None) -> Model:
        """Read the folder; one that is replaced meanwhile is read again. A former model's network is used again."""
        for _ in range(ATTEMPTS):
            before = _identity(folder)
            detector = load_detector(folder, _known_backbone(folder, backbone, former))
            if _identity(folder) == before:
                return cls(detector, before)
        raise InputError("the detector changes on disk while it is read; try again")

    def score_batch(self, images: Sequence[Image], maps: bool) -> list[Finding]:
        """Scores, and maps from the same passes; the numbers are those of `detector.score` and `detector.score_map`."""
        scores, fields = self.detector.score_batch(images, maps)
        every: Sequence[Map | None] = [None] * len(images) if fields is None else list(fields)
        return [Finding(float(score), field) for score, field in zip(scores, every, strict=True)]

    def blank(self) -> Image:
        """A grey image, to see whether the network works."""
        return np.zeros((self.detector.backbone.channels, *self.detector.input_size), dtype=np.float32)

    def alpha(self, asked: float | None) -> float:
        """The rate asked for, or 0.05, or the smallest possible one where the calibration images are too few."""
        return max(USUAL_ALPHA, self.smallest_alpha) if asked is None else asked

    @property
    def smallest_alpha(self) -> float:
        """The smallest false-alarm rate that the calibration images (of the smallest group) allow."""
        return 1.0 / (self.detector.reference_.smallest + 1)

    def verdicts(self, scores: Sequence[float], alpha: float, group: str | None) -> tuple[Array, Any]:
        """p-values, and which of them are alarms at `alpha`. Raises `OptionError` for an alpha too small or a group."""
        labels = None if group is None else np.full(len(scores), group)
        p = self.detector.reference_.p_values(np.asarray(scores, dtype=np.float64), labels, None)
        return p, p <= self.limit(alpha, group)

    def limit(self, alpha: float, group: str | None) -> float:
        """The p-value at or below which an image of that group alarms."""
        labels = None if group is None else np.asarray([group], dtype=np.str_)
        return float(np.ravel(DecisionRule(alpha).limits(self.detector.reference_, labels))[0])


def _identity(folder: Path) -> str:
    try:
        return sha256(folder / DESCRIPTION, folder / STATE)[:12]
    except OSError as error:
        raise InputError(f"{folder} holds no detector; give a folder written by `gepc fit`") from error


def _known_backbone(folder: Path, given: str | None, former: Model | None) -> Any:
    """The network already in memory when the folder names the same weights, else what was given."""
    if former is None:
        return given
    known = former.detector.backbone
    stored = read_json(folder / DESCRIPTION)
    wanted = stored.get("backbone", {}).get("sha256") if isinstance(stored, dict) else None
    return known if given is not None or (wanted is not None and wanted == known.sha256) else given


def load_model(folder: str | os.PathLike[str], backbone: str | None = None) -> Model:
    """Load the detector and let it look at one image, so that the first caller does not wait for set-up."""
    model = Model.load(Path(folder), backbone)
    try:
        model.score_batch([model.blank()], maps=False)
    except GepcError:
        raise
    except RuntimeError as error:
        raise GepcError(f"the detector in {folder} cannot score an image: {error}") from error
    return model

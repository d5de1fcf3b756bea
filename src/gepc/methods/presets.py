"""Named sets of options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A named set of options of a method. `Extractor.presets` maps names to presets.

    Parameters
    ----------
    method : mapping
        Parameters of the method itself.
    preprocessing : mapping
        How images are read, such as `resize`.
    calibration : mapping
        How features become a score, such as `calibration` and `fuse`.

    Examples
    --------
    >>> from gepc.methods.presets import Preset
    >>> Preset({"steps": 10}, calibration={"calibration": "kde"}).options
    {'steps': 10, 'calibration': 'kde'}
    """

    method: Mapping[str, Any] = field(default_factory=dict)
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """All options together, as one dictionary."""
        return {**self.method, **self.preprocessing, **self.calibration}


Presets = Mapping[str, Preset]

"""Named sets of options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A named set of options of a method.

    Parameters
    ----------
    method : parameters of the method itself.
    preprocessing : how images are read, such as `resize`.
    calibration : how features become a score, such as `calibration` and `fuse`.
    """

    method: Mapping[str, Any] = field(default_factory=dict)
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """All options together.

        >>> from gepc.methods.presets import Preset
        >>> Preset({"steps": 10}, calibration={"calibration": "kde"}).options
        {'steps': 10, 'calibration': 'kde'}
        """
        return {**self.method, **self.preprocessing, **self.calibration}


Presets = Mapping[str, Preset]

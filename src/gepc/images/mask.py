"""Regions of images that do not count: a mask, stored as run lengths so that it is plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image as PILImage

from gepc.core.errors import InputError, OptionError
from gepc.images.formats import read_file

Flags = npt.NDArray[np.bool_]
MOST_RUNS, MOST_PIXELS = 10_000, 1 << 24


@dataclass(frozen=True)
class Mask:
    """Pixels of an image that are ignored.

    Parameters
    ----------
    size : (height, width)
        The size of the images as they are given. Images of another size have the mask stretched to theirs.
    runs : tuple of int
        The lengths of runs of pixels, row by row: counted, ignored, counted, and so on.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.images.mask import Mask
    >>> Mask.of(np.array([[False, True], [True, False]]))
    Mask(size=(2, 2), runs=(1, 2, 1))
    """

    size: tuple[int, int]
    runs: tuple[int, ...]

    def __post_init__(self) -> None:
        height, width = self.size
        if min(height, width) < 1 or height * width > MOST_PIXELS or min(self.runs, default=-1) < 0:
            raise InputError("the mask of ignored pixels has an impossible size; draw it again")
        if sum(self.runs) != height * width or sum(self.runs[1::2]) == height * width:
            raise InputError("the mask of ignored pixels does not fit its size, or ignores every pixel")

    @classmethod
    def of(cls, given: Any) -> Mask:
        """Read a mask.

        Parameters
        ----------
        given : a boolean array (H, W), True where a pixel is ignored; or the path of a picture, whose pixels that are
            not black are ignored.

        Returns
        -------
        Mask
            The mask, of the size of the array or the picture.

        Raises
        ------
        InputError : the picture cannot be read, or the mask ignores every pixel.
        OptionError : the array is not (H, W), or the mask has too many edges.

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.images.mask import Mask
        >>> Mask.of(np.array([[True, True, False]])).runs
        (0, 2, 1)
        """
        pixels = np.asarray(read_file(str(given)) if not hasattr(given, "__array__") else given)
        ignored = pixels.any(axis=2) if pixels.ndim == 3 else pixels.astype(bool)
        if ignored.ndim != 2:
            raise OptionError(f"ignore must be a picture, or a boolean array (H, W); got shape {pixels.shape}")
        flat = ignored.ravel()
        starts = np.flatnonzero(np.diff(flat, prepend=False))
        runs = np.diff(starts, prepend=0, append=flat.size)
        if len(runs) > MOST_RUNS:
            raise OptionError("the mask has too many edges; draw simpler shapes", options=("ignore",))
        return cls((ignored.shape[0], ignored.shape[1]), tuple(runs.tolist()))

    def array(self, size: tuple[int, int]) -> Flags:
        """Return the mask for images of one size.

        Parameters
        ----------
        size : (height, width) of the images.

        Returns
        -------
        bool array (height, width)
            True where a pixel is ignored.

        Examples
        --------
        >>> from gepc.images.mask import Mask
        >>> Mask(size=(1, 2), runs=(1, 1)).array((1, 4)).tolist()
        [[False, False, True, True]]
        """
        flags = np.repeat(np.arange(len(self.runs)) % 2 == 1, self.runs).reshape(self.size)
        if size == self.size:
            return flags
        return np.asarray(PILImage.fromarray(flags).resize(size[::-1], PILImage.Resampling.NEAREST))

"""Calibrated maps: what is usual in the maps of in-distribution (ID) images, and maps in units of it.

A map has parts m_p: the symmetry of the output (`residual`) and of the inner layers (`inner`), the denoising error
(`error`) and the distance of the activations of each position from those of ID images (`activations`). With
u_p = log box(m_p), c_p its median over the image, and means and standard deviations over ID images,

    z_p = (u_p - c_p - mu_p) / sigma_p    how far the pixel stands out in its image, |z_p| for the error,
    e_p = |c_p - mean c_p| / std c_p      how unusual the image is as a whole; without | | for distances to a memory,
    z   = standardised max_p z_p + max(0, max_p e_p - 2), without the last term for targets in radar images.

The maximum is over the error and the activations if the method has them, otherwise over all parts; this was chosen on
ID images with synthetic defects (`benchmarks/maps.py`). mu and sigma are functions of the distance to the border, where
padding disturbs the network, and the same for all pixels farther away. With M_i the largest value of the map of the
i-th of n ID images that fitted nothing,

    p(h, w) = (1 + #{M_i >= z(h, w)}) / (n + 1)

controls the family-wise error: with probability at least 1 - alpha no pixel of a new ID image has p <= alpha. The score
of an image by its map is the mean of the highest 0.3 % of z. A method may declare another share, other parts for the
maximum, another model of the activations, wider bands at the border, and maps that are not compared with the median of
their image (c_p = 0): see `MapModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import interpolate

from gepc.calibration.calibrators import Array, Calibrator, create_calibrator, under
from gepc.conformal.p_values import images_needed, p_values, threshold
from gepc.core.errors import InputError
from gepc.core.rates import left_out
from gepc.images.batches import prepared_chunks
from gepc.images.sources import Image
from gepc.methods.base import MapModel, MapParts
from gepc.methods.pooling import Map, Pooling, box_filter, combine, odd_eighth

Size = tuple[int, ...]
Fields = dict[str, Map]
Read = Callable[[Sequence[Image]], MapParts]  # the parts of the maps of some images of one size

Ignored = Callable[[Size], npt.NDArray[np.bool_] | None]  # the pixels of maps of a size that do not count

TOGETHER = "sum"  # the name of all parts together
CALIBRATION_IMAGES = 99
TWO_SIDED: tuple[str, ...] = ("error",)  # what is blurred is easier to denoise than usual
USUAL_OFFSET = 2.0
DEFAULT_MODEL = MapModel()
ALPHA = 0.05
BANDS = 8
VECTORS = 20_000  # positions whose activations are learnt from
AT_ONCE, MAX_PIXELS = 8, 1 << 18  # images, and their pixels, whose parts are read together
TINY, LEAST_SPREAD = 1e-30, 1e-6
STATE = ("mean", "std", "offsets", "maxima", "scores")


@dataclass
class MapStatistics:
    """The statistics of the maps of ID images."""

    parts: tuple[str, ...]  # the names of the parts
    weights: Array  # the weights of the noise levels
    mean: Array  # mu of all parts together, first, and of each: (1 + P, bands); version 0.2 also (1 + P, h, w)
    std: Array  # sigma, in the same shape
    offsets: Array  # mean and standard deviation of c_p, (P, 2)
    maxima: Array  # the largest values of the maps of the n calibration images, (1 + P, n)
    scores: Array  # the scores of these images by their maps, (n,)
    gaussian: Calibrator | None = None  # the calibrator of the activations of single positions, if they are a part
    model: MapModel = DEFAULT_MODEL  # what the method says about its maps
    trimmed: int = 0  # how many more calibration images there were, whose values `trim` has left out

    @classmethod
    def fit(
        cls,
        read: Read,
        fitting: Sequence[Image],
        calibrating: Sequence[Image],
        weights: Array,
        ignored: Ignored | None = None,
        model: MapModel = DEFAULT_MODEL,
    ) -> MapStatistics:
        """Learn mu and sigma from `fitting`, and the maxima from `calibrating`.

        Where there are activations, the first `model.learnt` of `fitting` are for the model of single positions
        instead, so that mu and sigma are those of images that it has not seen.
        """
        first = int(model.learnt * len(fitting))
        vectors: list[Array] = []
        waiting: list[tuple[MapParts, Size]] = []
        for parts, size in read_parts(read, fitting[:first]):
            if "activations" in parts:
                vectors.append(_sampled(parts["activations"], VECTORS // first + 1))
            else:
                waiting.append((parts, size))
        gaussian = create_calibrator(model.positions).fit(np.concatenate(vectors)) if vectors else None
        empty = np.empty(0)
        found = cls((), weights, empty, empty, empty, empty, empty, gaussian, model)
        fields = []
        for parts, size in chain(waiting, read_parts(read, fitting[first:])):
            found.parts = tuple(parts)
            fields.append(found._fields(parts, size))
        found._learn(fields)
        calibration = []
        for parts, size in read_parts(read, calibrating):
            z = found.z(parts, size, None if ignored is None else ignored(size))
            calibration.append(np.stack([*(field.max((1, 2)) for field in z.values()), found.map_scores(z)]))
        *maxima, found.scores = np.concatenate(calibration, axis=1).astype(np.float64)
        found.maxima = np.stack(maxima)
        return found

    def _learn(self, fields: Sequence[Fields]) -> None:
        """mu and sigma, from u of every batch."""
        centres = [np.concatenate([_centre(batch[name]).ravel() for batch in fields]) for name in self.parts]
        self.offsets = np.array([[c.mean(), max(c.std(), LEAST_SPREAD)] for c in centres], dtype=np.float64)
        width = self.model.band
        each = [_by_band([self._centred(batch[name]) for batch in fields], width) for name in self.parts]
        self.mean, self.std = (np.stack([each[0][k], *(found[k] for found in each)]) for k in (0, 1))
        self.mean[0], self.std[0] = _by_band([self._largest(self._by_part(batch)) for batch in fields], width)

    @property
    def names(self) -> tuple[str, ...]:
        """The parts, all together first."""
        return (TOGETHER, *self.parts)

    @property
    def leading(self) -> tuple[str, ...]:
        """The parts that make up the whole."""
        if "target" in self.parts:
            return ("target",)
        return tuple(name for name in self.parts if name in self.model.leading) or self.parts

    def z(self, parts: MapParts, size: Size, ignored: npt.NDArray[np.bool_] | None = None) -> Fields:
        """z of all parts together and of each part, (N, H, W) with (H, W) = `size`; 0 where pixels are ignored."""
        fields = self._fields(parts, size)
        found = self._by_part(fields)
        together = self._standardised(self._largest(found), 0)
        if self.model.centred and "target" not in self.parts:
            together += np.maximum(self._offset(fields) - USUAL_OFFSET, 0.0).astype(np.float32)
        found = {TOGETHER: together, **found}
        if ignored is None:
            return found
        return {name: np.where(ignored, np.float32(0.0), field) for name, field in found.items()}

    def _offset(self, fields: Fields) -> Map:
        """max_p e_p, (N, 1, 1)."""
        found = []
        for (name, field), (mean, std) in zip(fields.items(), self.offsets, strict=True):
            e = (_centre(field) - mean) / std
            found.append(e if name in self.model.one_sided else np.abs(e))
        return np.asarray(np.max(found, axis=0))

    def map_scores(self, z: Fields) -> Array:
        """The scores (N,) of images by their maps: one noisy pixel does not decide, and a small defect counts."""
        together = torch.from_numpy(z[TOGETHER])
        return Pooling("topk", self.model.share).pixels(together).numpy().astype(np.float64)

    def _centred(self, field: Map) -> Map:
        return field - _centre(field) if self.model.centred else field

    def trim(self, contamination: float) -> MapStatistics:
        """Leave out the largest maxima and scores of a share of the calibration images, which may be outliers."""
        trimmed = left_out(contamination, len(self.scores))
        kept = len(self.scores) - trimmed
        maxima, scores = np.sort(self.maxima, axis=1)[:, :kept], np.sort(self.scores)[:kept]
        return replace(self, maxima=maxima, scores=scores, trimmed=trimmed)

    def p_values(self, field: Map, part: str = TOGETHER) -> Array:
        """The family-wise p-value of each pixel of a map of that part."""
        return p_values(field.astype(np.float64), self.maxima[self.names.index(part)])

    def allows(self, alpha: float) -> bool:
        """Whether the calibration maps are enough for regions at this family-wise rate: alpha >= 1/(n + 1)."""
        return bool(self.maxima.shape[1] >= images_needed(alpha))

    def limit(self, part: str = TOGETHER, alpha: float = ALPHA) -> float:
        """z above which p <= alpha. For a rate that the calibration maps do not allow it is that of 1/(n + 1)."""
        maxima = self.maxima[self.names.index(part)]
        return threshold(maxima, max(alpha, 1.0 / (len(maxima) + 1)))

    def state(self) -> dict[str, Array]:
        """The numbers by name."""
        arrays = {name: getattr(self, name) for name in STATE} | {"trimmed": np.array([float(self.trimmed)])}
        gaussian = {} if self.gaussian is None else self.gaussian.state()
        return arrays | {f"gaussian/{name}": value for name, value in gaussian.items()}

    @classmethod
    def restore(
        cls,
        parts: tuple[str, ...],
        weights: Array,
        state: Mapping[str, Array],
        model: MapModel = DEFAULT_MODEL,
    ) -> MapStatistics:
        """From a `state`; refuses arrays that do not fit each other."""
        gaussian = under("gaussian", dict(state))
        mean, std, offsets, maxima, scores = (state[name] for name in STATE)
        usable = mean.shape == std.shape and mean.ndim in (2, 3) and maxima.ndim == 2 and maxima.size > 0
        usable = usable and len(mean) == len(maxima) == 1 + len(parts) and offsets.shape == (len(parts), 2)
        usable = usable and scores.shape == maxima.shape[1:]
        trimmed = state.get("trimmed", np.zeros(1))  # not written by 0.2
        usable = usable and trimmed.shape == (1,) and 0.0 <= trimmed[0] <= len(scores)  # never half of the images
        if not usable or min(std.min(), offsets[:, 1].min()) <= 0.0:
            raise InputError("the statistics of the maps do not fit each other; fit the detector again")
        if ("activations" in parts) != bool(gaussian):
            raise InputError("the model of the activations is missing; fit the detector again")
        restored = create_calibrator(model.positions).restore(gaussian) if gaussian else None
        return cls(parts, weights, mean, std, offsets, maxima, scores, restored, model, int(trimmed[0]))

    def _fields(self, parts: MapParts, size: Size) -> Fields:
        """u_p, (N, H, W), for every part."""
        window = min(self.model.window, odd_eighth(min(size)))
        found = {}
        for name in self.parts:
            levels = parts[name]
            if levels.ndim == 5 and self.gaussian is not None:  # activations: d^2 of each position
                shape = (levels.shape[1], *levels.shape[3:])
                distances = [self.gaussian.per_level(_columns(image)).T.reshape(shape) for image in levels]
                levels = np.stack(distances).astype(np.float32)
            field = torch.from_numpy(combine(levels, self.weights))
            if tuple(field.shape[1:]) != size:
                field = interpolate(field[:, None], size, mode="bilinear")[:, 0]
            found[name] = np.log(np.maximum(box_filter(field, window).numpy(), TINY))
        return found

    def _by_part(self, fields: Fields) -> Fields:
        """z of each part; its size where both directions count."""
        found = {}
        for row, (name, field) in enumerate(fields.items(), start=1):
            z = self._standardised(self._centred(field), row)
            found[name] = np.abs(z) if name in TWO_SIDED else z
        return found

    def _largest(self, z: Fields) -> Map:
        """max_p z_p over the leading parts."""
        return np.asarray(np.max([z[name] for name in self.leading], axis=0))

    def _standardised(self, field: Map, row: int) -> Map:
        mean, std = (_spread(values[row], field.shape[1:], self.model.band) for values in (self.mean, self.std))
        return np.asarray((field - mean) / std, dtype=np.float32)


def read_parts(read: Read, images: Iterable[Image]) -> Iterator[tuple[MapParts, Size]]:
    """The parts of batches of consecutive images of one size, few at a time: activations take much memory."""
    for chunk in prepared_chunks(images, AT_ONCE, MAX_PIXELS):
        yield read(chunk.images), chunk.images[0].shape[1:]


def _centre(field: Map) -> Map:
    """The median of each image, (N, 1, 1)."""
    return np.median(field, axis=(1, 2), keepdims=True)


def _columns(vectors: npt.NDArray[np.float32]) -> Array:
    """(levels, C, h, w) of one image -> (h w, levels, C)."""
    return np.moveaxis(vectors.reshape(*vectors.shape[:2], -1), 2, 0).astype(np.float64)


def _sampled(vectors: npt.NDArray[np.float32], each: int) -> Array:
    """The activations of at most that many random positions of every image, (vectors, levels, C)."""
    rng = np.random.default_rng(0)
    return np.concatenate([one[rng.permutation(len(one))[:each]] for one in map(_columns, vectors)])


def _band(size: Size, width: int) -> npt.NDArray[np.int64]:
    """The distance of every pixel to the border, (H, W), in bands of that width; `BANDS` stands for that and more."""
    lines, columns = (np.minimum(np.arange(side), np.arange(side)[::-1]) for side in size)
    return np.asarray(np.minimum(np.minimum(lines[:, None], columns[None]) // width, BANDS))


def _by_band(fields: Sequence[Map], width: int) -> tuple[Array, Array]:
    """Mean and standard deviation of the pixels in each band; on small images those of the nearest band."""
    count, total, squares = np.zeros((3, BANDS + 1))
    for field in fields:
        band = np.broadcast_to(_band(field.shape[1:], width), field.shape).ravel()
        values = field.ravel().astype(np.float64)
        count += np.bincount(band, minlength=BANDS + 1)
        total += np.bincount(band, values, BANDS + 1)
        squares += np.bincount(band, values**2, BANDS + 1)
    last = int(np.flatnonzero(count)[-1])
    known = np.minimum(np.arange(BANDS + 1), last)
    mean = (total / np.maximum(count, 1))[known]
    spread = np.sqrt(np.maximum((squares / np.maximum(count, 1))[known] - mean**2, 0.0))
    return mean, np.maximum(spread, LEAST_SPREAD)


def _spread(values: Array, size: Size, width: int) -> Array:
    """Statistics by band, or by position if version 0.2 fitted them so, for every pixel of an image."""
    if values.ndim == 1:
        return values[_band(size, width)]
    return np.asarray(interpolate(torch.from_numpy(values)[None, None], size, mode="bilinear")[0, 0].numpy())

"""The scoring stream: images in, results out. Every entrance that scores images takes its results from here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from gepc.conformal.p_values import Array, Labels
from gepc.core.errors import GepcError, InputError, check_choice
from gepc.core.parts import OUTPUT
from gepc.core.progress import Progress, reporting
from gepc.detector.fitted import FittedDetector
from gepc.images.batches import Chunk, OnBadImage, chunks
from gepc.images.noise import generator
from gepc.images.preprocessing import warn_about_range
from gepc.images.sources import Images
from gepc.maps.statistics import Fields
from gepc.methods.pooling import Map

ON_ERROR = {"raise": OnBadImage.NONE, "row": OnBadImage.ALL}
TIES = ("conservative", "random")
NOT_FINITE = "cannot be scored: the network's answer is not finite"


@dataclass(frozen=True)
class Result:
    """The result for one image.

    Attributes
    ----------
    index : position of the image in the collection.
    name : its path, or its number.
    score : higher = more out of distribution; NaN where the image could not be scored.
    p_value : the conformal p-value of the score; NaN where the image could not be scored.
    error : why the image could not be scored, or None.
    evidence : the tail probability of each part of the score by its name; empty for a method without parts.

    Examples
    --------
    >>> from gepc.detector.stream import Result
    >>> Result(0, "a.png", 2.5, 0.01, evidence={"colour": 0.02, "orientation": 0.4}).reason
    'colour'
    """

    index: int
    name: str
    score: float
    p_value: float
    error: str | None = None
    evidence: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def reason(self) -> str | None:
        """The name of the part that speaks most for an alarm, which has the smallest probability; None without parts.

        The part `output` has everything that the network answers; its views say more and are named instead.
        """
        named = {name: p for name, p in self.evidence.items() if name != OUTPUT} or self.evidence
        return min(named, key=named.__getitem__) if named else None

    @classmethod
    def failed(cls, index: int, name: str, error: str) -> Result:
        """The result for an image that could not be scored; the error does not repeat the name."""
        return cls(index, name, np.nan, np.nan, error.removeprefix(f"{name} "))


@dataclass(frozen=True)
class ScoredChunk:
    """Some consecutive images with their results.

    Attributes
    ----------
    results : one for every image, in order.
    chunk : the images that were read.
    fields : the maps (N, H, W) of the images in `chunk.images`, by part; None if they were not asked for, or if the
        images could not be scored.

    See Also
    --------
    stream : yields these chunks.

    Examples
    --------
    >>> import gepc, numpy as np
    >>> from gepc.detector.stream import stream
    >>> from gepc.images.sources import open_images
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
    >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
    >>> chunk = next(stream(detector.fitted, open_images(images[:2])))
    >>> len(chunk.results), chunk.fields is None
    (2, True)
    """

    results: tuple[Result, ...]
    chunk: Chunk
    fields: Fields | None = None

    def map_of(self, index: int, part: str) -> Map | None:
        """Return the map of one part for an image.

        Parameters
        ----------
        index : position of the image in the collection.
        part : the name of the part.

        Returns
        -------
        The map (H, W), or None if the image has none.

        Examples
        --------
        >>> from gepc.detector.stream import stream
        >>> from gepc.images.sources import open_images
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> chunk = next(stream(detector.fitted, open_images(images[:2]), maps=True))
        >>> chunk.map_of(1, "sum").shape
        (8, 8)
        """
        if self.fields is None or index not in self.chunk.indices:
            return None
        maps = self.fields[part]
        return np.asarray(maps[self.chunk.indices.index(index)])


def stream(
    fitted: FittedDetector,
    images: Images,
    *,
    maps: bool = False,
    raw: bool = False,
    labels: Labels | None = None,
    ties: str = "conservative",
    on_error: str = "row",
    indices: Iterable[int] | None = None,
    batch_size: int | None = None,
    threads: int = 1,
    keep_pixels: bool = False,
    check_range: bool = True,
    on_progress: Progress = None,
) -> Iterator[ScoredChunk]:
    """Score a collection of images in order, in bounded memory, while the next images are read.

    Parameters
    ----------
    fitted : the fitted detector.
    images : the collection.
    maps : also compute maps, from the same network passes.
    raw : compute maps before calibration.
    labels : the group of every image of the collection; required by a detector that was fitted with groups.
    ties : `conservative`, or `random` to order equal scores by a number drawn from the image's content.
    on_error : `row` gives a result with an error for an image that cannot be scored; `raise` raises `InputError`.
    indices : positions of the images to score, in that order; None scores all of them.
    batch_size : the largest number of images per network call; None takes that of the detector.
    threads : how many threads read images ahead; see `gepc.images.batches.chunks`.
    keep_pixels : keep the pixels as they were read.
    check_range : look at the first images, and warn if their values seem to be in [0, 1]; see `warn_about_range`.
    on_progress : called with the number of images of every finished chunk; True shows a progress bar.

    Returns
    -------
    An iterator of `ScoredChunk`. Wrong arguments are refused at once, before the first image is read.

    Examples
    --------
    >>> from gepc.detector.stream import stream
    >>> from gepc.images.sources import open_images
    >>> import gepc, numpy as np
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
    >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
    >>> [len(chunk.results) for chunk in stream(detector.fitted, open_images(images[:5]), batch_size=2)]
    [2, 2, 1]
    """
    check_choice("ties", ties, TIES)
    check_choice("on_error", on_error, ON_ERROR)
    fitted.reference.check(labels)
    if maps:
        fitted.check_maps()
    if check_range:
        warn_about_range(images, fitted.preprocessing.value_range)
    if batch_size is not None:
        fitted = replace(fitted, batch_size=batch_size)
    read = chunks(
        images,
        fitted.preprocessing,
        fitted.batch_size,
        ON_ERROR[on_error],
        indices=indices,
        threads=threads,
        keep_pixels=keep_pixels,
        most_pixels=fitted.method.chunk_pixels,
    )

    def judged(chunk: Chunk) -> ScoredChunk:
        own = None if labels is None else labels[chunk.indices]
        return score_chunk(fitted, chunk, own, ties, maps=maps, raw=raw, on_error=on_error)

    def scored() -> Iterator[ScoredChunk]:
        with reporting(on_progress, "scoring", known_length(images)) as advance:
            for chunk in read:
                try:
                    parts: Iterable[ScoredChunk] = [judged(chunk)]
                except GepcError:
                    if on_error == "raise":
                        raise
                    parts = map(judged, _one_by_one(chunk))
                yield from parts
                advance(len(chunk))

    return scored()


def known_length(images: Images) -> int | None:
    """How many images there are; None for a stream, which has no length."""
    return None if images.once else len(images)


def scores_of(
    fitted: FittedDetector,
    images: Images,
    on_error: str = "raise",
    indices: Iterable[int] | None = None,
    on_progress: Progress = None,
) -> Array:
    """The scores (N,) alone, whatever the groups of the images; the parameters are those of `stream`."""
    scored = stream(fitted.without_groups(), images, on_error=on_error, indices=indices, on_progress=on_progress)
    return np.array([result.score for chunk in scored for result in chunk.results], dtype=np.float64)


def score_chunk(
    fitted: FittedDetector,
    chunk: Chunk,
    labels: Labels | None = None,
    ties: str = "conservative",
    *,
    maps: bool = False,
    raw: bool = False,
    on_error: str = "row",
) -> ScoredChunk:
    """Score the images of one chunk: the step that `stream` repeats.

    `labels` are the groups of the images in `chunk.images`. The other parameters are those of `stream`. A `GepcError`
    says that the network has no answer to one of several images; a single one is a result with an error.
    """
    failed = [Result.failed(*failure) for failure in chunk.failures]
    if not chunk.indices:
        return ScoredChunk(tuple(failed), chunk)
    try:
        scores, fields, evidence = fitted.evaluate(chunk.images, chunk.keys, maps, raw)
    except GepcError as error:
        if on_error == "raise" or len(chunk.indices) > 1:
            raise
        return ScoredChunk(_in_order([*failed, Result.failed(chunk.indices[0], chunk.names[0], str(error))]), chunk)
    uniform = None
    if ties == "random":
        uniform = np.array([generator(fitted.seed, key, "ties").random() for key in chunk.keys])
    p_values = fitted.reference.p_values(scores, labels, uniform)
    results = []
    for row, (index, name) in enumerate(zip(chunk.indices, chunk.names, strict=True)):
        if np.isfinite(scores[row]):
            parts = {part: float(values[row]) for part, values in evidence.items()}
            results.append(Result(index, name, float(scores[row]), float(p_values[row]), evidence=parts))
        elif on_error == "raise":
            raise InputError(f"{name} {NOT_FINITE}")
        else:
            results.append(Result.failed(index, name, NOT_FINITE))
    return ScoredChunk(_in_order(failed + results), chunk, fields)


def _one_by_one(chunk: Chunk) -> Iterator[Chunk]:
    """Each image and each failure of a chunk by itself, because the network has no answer to one of the images."""
    parts = {failure[0]: Chunk(failures=[failure]) for failure in chunk.failures}
    for row, index in enumerate(chunk.indices):
        own = slice(row, row + 1)
        parts[index] = Chunk([index], chunk.names[own], chunk.keys[own], chunk.images[own], read=chunk.read[own])
    return (parts[index] for index in sorted(parts))


def _in_order(results: list[Result]) -> tuple[Result, ...]:
    return tuple(sorted(results, key=lambda result: result.index))

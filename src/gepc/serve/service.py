"""What the service does with a request: decode, queue, score, decide, draw."""

import asyncio
import base64
import contextlib
import io
import logging
import math
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, HTTPException
from PIL import Image as PILImage
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gepc._version import __version__
from gepc.conformal.decision import DecisionRule
from gepc.core.errors import GepcError, InputError, OptionError, raising
from gepc.detector.storage import detector_digest, load_fitted
from gepc.detector.stream import Result, score_chunk
from gepc.images.batches import prepared_chunks
from gepc.images.decoder import DecoderProcess
from gepc.images.formats import FORMATS, NPY_START
from gepc.images.preprocessing import Preprocessing, rgb_picture
from gepc.images.sources import Image, Record
from gepc.maps.drawing import overlay, readable_range
from gepc.maps.statistics import Fields
from gepc.methods.pooling import Map
from gepc.serve import messages
from gepc.serve.batching import Capacity, MicroBatcher
from gepc.serve.messages import GuaranteeAt, Rate, Upload
from gepc.serve.server import Settings

log = logging.getLogger("gepc.serve")
DECODERS, DECODE_SECONDS, SHUTDOWN_SECONDS = 2, 5.0, 3.0
NOT_SCORED = "the image could not be scored"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
DEFAULT_ALPHA, LARGEST_ALPHA, N_RATES = 0.05, 0.5, 120
LARGE, STRENGTH = 2_000_000, 0.75
_one_large_at_a_time = threading.Lock()
T = TypeVar("T")


class Metrics:
    """Prometheus metrics, in their own registry."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter("gepc_requests", "Requests by route and status.", ["route", "status"], registry=own)
        self.seconds = Histogram("gepc_request_seconds", "Response time.", ["route"], buckets=SECONDS, registry=own)
        self.images = Counter("gepc_images", "Images by outcome: normal, alarm, failed.", ["outcome"], registry=own)
        self.batches = Histogram("gepc_batch_images", "Images per network batch.", buckets=BATCH_SIZES, registry=own)
        self.network = Counter("gepc_network_seconds", "Time spent in the network.", registry=own)
        self.in_service = Gauge("gepc_images_in_service", "Images accepted and not yet answered.", registry=own)
        self.refused = Counter("gepc_refused", "Requests refused because the queue was full.", registry=own)
        self.detector = Gauge("gepc_detector_info", "The detector in use.", ["detector"], registry=own)


class Job(NamedTuple):
    """One image for the network."""

    image: Image
    with_map: bool


class Finding(NamedTuple):
    """A network input with its result, and its maps by part, (1, H, W) each, if they were requested.

    The p-value of the result does not regard groups.
    """

    image: Image
    result: Result
    maps: Fields | None


class Service:
    """One detector in use. Create it before the event loop runs; its coroutines run in one loop."""

    def __init__(self, folder: Path, settings: Settings, backbone: str | None = None) -> None:
        self.settings, self.fitted = settings, load_fitted(folder, backbone, settings.device)
        self.identity = detector_digest(self.fitted)[:12]
        self.smallest_alpha = 1.0 / (self.fitted.reference.smallest + 1)
        self.map_scale = self.fitted.map_limit() if self.fitted.method.has_maps else None
        height, width = self.fitted.input_size
        if height * width > settings.max_network_pixels:
            raise OptionError(
                f"the network sees images of {width}x{height} pixels and the service takes at most "
                f"{settings.max_network_pixels:,}: give a larger --max-network-megapixels or a smaller size"
            )
        self._warm_up()
        self.metrics = Metrics()
        self.metrics.detector.labels(self.identity).set(1)
        self.images, self.held_bytes = Capacity(settings.queue), Capacity(settings.max_held_bytes)
        self.metrics.in_service.set_function(lambda: self.images.taken)
        max_batch = min(settings.max_batch, self.fitted.batch_size)
        self._batcher: MicroBatcher[Job, Finding] = MicroBatcher(
            self._run, lambda job: job.image.shape, max_batch, settings.gap
        )
        self._threads = ThreadPoolExecutor(DECODERS, "gepc-decode", initializer=_block_interrupts)
        self._decoders = [DecoderProcess(min(DECODE_SECONDS, settings.timeout)) for _ in range(DECODERS)]
        self._free_decoders: SimpleQueue[DecoderProcess] = SimpleQueue()
        for decoder in self._decoders:
            self._free_decoders.put(decoder)

    @property
    def ready(self) -> bool:
        """Whether a request would be accepted now."""
        return self._batcher.alive and self.images.taken < self.images.places

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """At shutdown, finish what callers still wait for; images of callers that are gone are dropped."""
        yield
        for decoder in self._decoders:
            decoder.close()
        self._batcher.close(SHUTDOWN_SECONDS)
        self._threads.shutdown(cancel_futures=True)

    def busy(self) -> HTTPException:
        """503, with the approximate time until the accepted images are done."""
        self.metrics.refused.inc()
        seconds = min(60, max(1, math.ceil(self.images.taken * self._batcher.seconds_each)))
        return HTTPException(503, f"busy; try again in {seconds} s", {"Retry-After": str(seconds)})

    def _warm_up(self) -> None:
        """Score a grey image, so that setting up the network does not delay the first request."""
        grey = np.zeros((self.fitted.backbone.channels, *self.fitted.input_size), dtype=np.float32)
        with raising(GepcError, "the detector cannot score an image: {error}", RuntimeError, passing=GepcError):
            (found,) = self._score_batch([grey], with_maps=False)
            rgb_picture(grey, self.settings.bands)
        if not math.isfinite(found.result.score):
            raise GepcError("the detector does not give a finite score to a trial image; fit it again")

    def _run(self, jobs: list[Job]) -> list[Finding]:
        """Score one batch; called in the network's thread."""
        start = time.perf_counter()
        findings = self._score_batch([job.image for job in jobs], any(job.with_map for job in jobs))
        self.metrics.network.inc(time.perf_counter() - start)
        self.metrics.batches.observe(len(jobs))
        return findings

    def _score_batch(self, images: Sequence[Image], with_maps: bool) -> list[Finding]:
        """Scores, and maps from the same network passes, of preprocessed images of one size.

        A network call takes a limited number of pixels, since its memory grows with them.
        """
        fitted = self.fitted.without_groups()
        findings = []
        for chunk in prepared_chunks(images, len(images), self.settings.max_network_pixels):
            scored = score_chunk(fitted, chunk, maps=with_maps, on_error="raise")
            for row, (image, result) in enumerate(zip(chunk.images, scored.results, strict=True)):
                maps = scored.fields and {name: fields[[row]] for name, fields in scored.fields.items()}
                findings.append(Finding(image, result, maps))
        return findings

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def score(self, uploads: Sequence[Upload], options: messages.ScoreOptions) -> messages.ScoreAnswer:
        """Scores, p-values and decisions; an image that cannot be scored is a result with an error."""
        alpha = self._alpha(options.alpha)
        DecisionRule(alpha).check(self.fitted.reference, None if options.group is None else np.array([options.group]))
        findings = await self._findings(uploads, options.map and self.fitted.method.has_maps)
        results = await self._in_thread(partial(self._results, uploads, options, alpha, findings))
        for result in results:
            self.metrics.images.labels("failed" if result.error else "alarm" if result.alarm else "normal").inc()
        guarantee, scale = str(self.fitted.guarantee(alpha)), self.map_scale
        return messages.ScoreAnswer(
            detector=self.identity, alpha=alpha, guarantee=guarantee, map_scale=scale, results=results
        )

    async def _findings(self, uploads: Sequence[Upload], with_maps: bool) -> list[Finding | str]:
        """The finding of every upload, or the reason why there is none."""
        with self.images.take(len(uploads)):
            prepare = [self._in_thread(partial(self._network_input, upload)) for upload in uploads]
            images = await asyncio.gather(*prepare)
            jobs = [Job(image, with_maps) for image in images if not isinstance(image, str)]
            futures = map(asyncio.wrap_future, self._batcher.submit(jobs))
            found = iter(await asyncio.gather(*futures, return_exceptions=True))
        return [image if isinstance(image, str) else _checked(next(found)) for image in images]

    def _network_input(self, upload: Upload) -> Image | str:
        decoder = self._free_decoders.get()
        try:
            return network_input(upload.data, decoder, self.settings, self.fitted.preprocessing)
        except InputError as error:
            return str(error)
        finally:
            self._free_decoders.put(decoder)

    async def describe(self, options: messages.DetectorOptions) -> messages.DetectorAnswer:
        """The detector, its guarantee and the limits on a request, without paths."""
        fitted, settings = self.fitted, self.settings
        height, width = fitted.input_size
        prepared, calibration = fitted.preprocessing, fitted.reference
        return messages.DetectorAnswer(
            detector=self.identity,
            version=__version__,
            method=fitted.method.name,
            passes_per_image=str(fitted.cost()),
            calibration_images=len(calibration.scores),
            groups={name: len(scores) for name, scores in calibration.by_group.items()} if calibration.grouped else {},
            maps=fitted.method.has_maps,
            map_scale=self.map_scale,
            smallest_alpha=self.smallest_alpha,
            guarantee=self._guarantee(self._alpha(options.alpha)),
            rates=await self._in_thread(lambda: self._rates) if options.rates else None,
            input=messages.Input(height=height, width=width, channels=prepared.channels, resize=prepared.resize),
            limits=messages.Limits(
                bytes_per_request=settings.max_bytes,
                images_per_request=settings.max_images,
                pixels_per_image=settings.max_pixels,
                network_pixels_per_image=settings.max_network_pixels,
                formats=list(FORMATS),
            ),
        )

    def _alpha(self, asked: float | None) -> float:
        """The false-alarm rate asked for; the default is 0.05, or the smallest possible rate if larger."""
        return max(DEFAULT_ALPHA, self.smallest_alpha) if asked is None else asked

    def _guarantee(self, alpha: float) -> GuaranteeAt:
        """What the calibration images guarantee at `alpha`, and the p-value limit that applies to every group."""
        reference, found = self.fitted.reference, self.fitted.guarantee(alpha)
        labels = np.array(list(reference.by_group)) if reference.grouped else None
        limit = float(DecisionRule(alpha).limits(reference, labels).min())
        return GuaranteeAt(limit=limit, calibration_images=found.n, sentence=str(found), **vars(found))

    @cached_property
    def _rates(self) -> list[Rate]:
        """False-alarm rates to choose from, rounded and about evenly spaced on a logarithmic scale."""
        spaced = np.geomspace(self.smallest_alpha, LARGEST_ALPHA, N_RATES)
        chosen = {self.smallest_alpha, self._alpha(None), *(float(f"{alpha:.2g}") for alpha in spaced)}
        return [self._guarantee(alpha) for alpha in sorted(chosen) if alpha >= self.smallest_alpha]

    def _results(
        self,
        uploads: Sequence[Upload],
        options: messages.ScoreOptions,
        alpha: float,
        findings: Sequence[Finding | str],
    ) -> list[messages.ImageResult]:
        """Decide for the images of a request and draw what was asked for."""
        fitted, reference = self.fitted, self.fitted.reference
        scores = np.array([finding.result.score for finding in findings if isinstance(finding, Finding)])
        labels = None if options.group is None else np.full(len(scores), options.group)
        p_values = reference.p_values(scores, labels)
        alarms = DecisionRule(alpha).alarms(p_values, reference, labels)
        decided = zip(p_values.tolist(), alarms.tolist(), strict=True)
        results = []
        for index, (upload, finding) in enumerate(zip(uploads, findings, strict=True)):
            result = messages.ImageResult(index=index, name=upload.name)
            if isinstance(finding, str):
                results.append(result.model_copy(update={"error": finding}))
                continue
            if options.explain:
                reason, evidence = finding.result.reason, dict(finding.result.evidence)
                result = messages.ExplainedResult(index=index, name=upload.name, reason=reason, evidence=evidence)
            results.append(result)
            result.score = finding.result.score
            result.p_value, result.alarm = next(decided)
            if options.map and finding.maps is not None:
                result.map_start, _ = readable_range(field := finding.maps[fitted.map_part][0], fitted.map_limit())
                result.map = data_uri(heat(field - result.map_start, fitted.map_limit()))
                result.regions = [messages.MapRegion.of(one) for one in fitted.regions(finding.maps, 0, alpha)]
            if options.seen:
                result.seen = data_uri(png(rgb_picture(finding.image, self.settings.bands)))
        return results


def _block_interrupts() -> None:
    """Keep Ctrl-C, which goes to all processes of a terminal, from the decoders that this thread starts."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _checked(found: Finding | BaseException) -> Finding | str:
    if isinstance(found, Finding) and math.isfinite(found.result.score):
        return found
    if isinstance(found, GepcError):
        return str(found)
    if isinstance(found, BaseException):
        log.error("an image could not be scored", exc_info=found)
    return NOT_SCORED


def network_input(data: bytes, decoder: DecoderProcess, settings: Settings, preprocessing: Preprocessing) -> Image:
    """Decode and preprocess. Large images go one at a time, since they take much memory.

    An image that would be too large for the network is refused before it is preprocessed. Raises `InputError` with a
    message that does not repeat that of a decoding library, which may name addresses.
    """
    if not data:
        raise InputError("the file is empty")
    try:
        pixels = decoder.decode(data, settings.max_pixels)
    except InputError as error:
        raise InputError(f"the file {str(error).partition(':')[0]}") from error
    if data[: len(NPY_START)] == NPY_START:
        pixels = Record.of_array("the image", pixels, "the image").pixels_for(preprocessing.channels)
    height, width = preprocessing.network_size((pixels.shape[0], pixels.shape[1]))
    if height * width > settings.max_network_pixels:
        raise InputError(
            f"the image has {pixels.shape[1]}x{pixels.shape[0]} pixels, {width}x{height} as the network sees it, and "
            f"this service takes at most {settings.max_network_pixels:,} there; send a smaller image or a part of it, "
            "or start the service with a larger --max-network-megapixels and more memory"
        )
    with _one_large_at_a_time if pixels.size >= LARGE else contextlib.nullcontext():
        return preprocessing(pixels, "the image")


def heat(field: Map, scale: float) -> bytes:
    """The map alone as an RGBA PNG, one pixel per map pixel; drawn over the image it gives `detector.maps.overlay`."""
    level = np.clip(field / scale, 0.0, 1.0)[..., None]
    colour = overlay(np.zeros((*field.shape, 3)), np.maximum(field, 1e-3 * scale), scale, 1.0)
    # overlay multiplies by the opacity, PNG keeps them apart
    return png(np.concatenate([colour / np.maximum(level, 1e-3), STRENGTH * level], axis=2))


def data_uri(content: bytes) -> str:
    """A PNG as a data: URI."""
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii")


def png(picture: npt.NDArray[np.floating]) -> bytes:
    """A picture (H, W, 3 or 4) in [0, 1] as PNG."""
    out = io.BytesIO()
    PILImage.fromarray(np.rint(np.clip(picture, 0.0, 1.0) * 255.0).astype(np.uint8)).save(out, format="PNG")
    return out.getvalue()

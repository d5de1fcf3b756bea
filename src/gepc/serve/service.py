"""What the service does with a request: decode, queue, score, decide, draw."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from fastapi import FastAPI, HTTPException
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gepc._version import __version__
from gepc.core.errors import GepcError, InputError
from gepc.images.sources import Image
from gepc.serve import codec, messages
from gepc.serve.batching import Capacity, MicroBatcher
from gepc.serve.messages import ScoreRequest, Upload
from gepc.serve.model import Finding, Model
from gepc.serve.server import Settings

log = logging.getLogger("gepc.serve")
DECODERS = 2
NOT_SCORED = "the image could not be scored"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
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
        self.reloads = Counter("gepc_reloads", "Reloads of the detector by outcome.", ["outcome"], registry=own)
        self.detector = Gauge("gepc_detector_info", "The detector in use.", ["detector"], registry=own)


@dataclass(frozen=True, eq=False)
class Job:
    """One image for the network, with the model that prepared it: a reload does not affect accepted images."""

    model: Model
    image: Image
    with_map: bool


class Service:
    """One detector in use. Create it before the event loop runs; its coroutines run in one loop."""

    def __init__(self, folder: Path, settings: Settings, backbone: str | None = None) -> None:
        self.folder, self.settings, self.backbone = folder, settings, backbone
        self.model = Model.load(folder, backbone)
        self.model.warm_up()
        self.metrics = Metrics()
        self.metrics.detector.labels(self.model.identity).set(1)
        self.images, self.held_bytes = Capacity(settings.queue), Capacity(settings.max_held_bytes)
        self.metrics.in_service.set_function(lambda: self.images.taken)
        max_batch = min(settings.max_batch, self.model.detector.batch_size)
        self._batcher: MicroBatcher[Job, Finding] = MicroBatcher(
            self._run, lambda job: id(job.model), max_batch, settings.gap
        )
        self._threads = ThreadPoolExecutor(DECODERS, thread_name_prefix="gepc-decode")
        self._reloading = asyncio.Lock()
        codec.ignore_size_warnings()

    @property
    def ready(self) -> bool:
        """Whether a request would be accepted now."""
        return self._batcher.alive and self.images.taken < self.images.places

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Finish the accepted work at shutdown."""
        yield
        self._batcher.close()
        self._threads.shutdown()

    def busy(self) -> HTTPException:
        """503, with the approximate time until the accepted images are done."""
        self.metrics.refused.inc()
        seconds = min(60, max(1, math.ceil(self.images.taken * self._batcher.seconds_each)))
        return HTTPException(503, f"busy; try again in {seconds} s", {"Retry-After": str(seconds)})

    def _run(self, jobs: list[Job]) -> list[Finding]:
        """Score one batch; called in the network's thread."""
        start = time.perf_counter()
        findings = jobs[0].model.score_batch([job.image for job in jobs], any(job.with_map for job in jobs))
        self.metrics.network.inc(time.perf_counter() - start)
        self.metrics.batches.observe(len(jobs))
        return findings

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def score(self, request: ScoreRequest[messages.ScoreOptions]) -> messages.ScoreAnswer:
        """Scores, p-values and decisions; an image that cannot be scored is a result with an error."""
        model, options = self.model, request.options
        alpha = model.alpha(options.alpha)
        model.check(alpha, options.group)
        guarantee = str(model.detector.guarantee(alpha))
        with_maps = options.map and model.detector.extractor.has_maps
        findings = await self._findings(model, request.uploads, with_maps)
        results = await self._in_thread(lambda: _results(model, request, alpha, findings))
        for result in results:
            self.metrics.images.labels("failed" if result.error else "alarm" if result.alarm else "normal").inc()
        scale = model.detector.map_scale_
        return messages.ScoreAnswer(
            detector=model.identity, alpha=alpha, guarantee=guarantee, map_scale=scale, results=results
        )

    async def map(self, request: ScoreRequest[messages.MapOptions]) -> tuple[bytes, float]:
        """The map of one image as PNG, and the common scale."""
        model, count = self.model, len(request.uploads)
        if not model.detector.extractor.has_maps:
            raise HTTPException(422, f"the method {model.detector.extractor.name!r} has no maps")
        if count != 1:
            raise HTTPException(422, f"send exactly one image, got {count}; /v1/score returns the maps of several")
        (finding,) = await self._findings(model, request.uploads, with_maps=True)
        if isinstance(finding, str) or finding.field is None:
            raise HTTPException(422, finding if isinstance(finding, str) else NOT_SCORED)
        scale = model.detector.map_scale_ or 1.0
        heat, overlaid = partial(codec.heat, finding.field), partial(codec.overlaid, finding.image, finding.field)
        draw = heat if request.options.style == "heat" else overlaid
        return await self._in_thread(lambda: draw(scale)), scale

    async def _findings(self, model: Model, uploads: Sequence[Upload], with_maps: bool) -> list[Finding | str]:
        """The finding of every upload, or the reason why there is none."""
        with self.images.take(len(uploads)):
            prepare = [self._in_thread(partial(self._network_input, model, upload)) for upload in uploads]
            images = await asyncio.gather(*prepare)
            jobs = [Job(model, image, with_maps) for image in images if not isinstance(image, str)]
            futures = map(asyncio.wrap_future, self._batcher.submit(jobs))
            found = iter(await asyncio.gather(*futures, return_exceptions=True))
        return [image if isinstance(image, str) else _checked(next(found)) for image in images]

    def _network_input(self, model: Model, upload: Upload) -> Image | str:
        if upload.data is None:
            return "not base64"
        try:
            return codec.network_input(upload.data, self.settings.max_pixels, model.detector.preprocessing_)
        except InputError as error:
            return str(error)

    async def reload(self) -> messages.ReloadAnswer:
        """Load the detector's folder again and score an image with it; on failure the current detector stays."""
        async with self._reloading:
            former = self.model
            try:
                model = await asyncio.to_thread(Model.load, self.folder, self.backbone, former)
                await asyncio.wrap_future(self._batcher.submit([Job(model, model.blank(), with_map=False)])[0])
            except (GepcError, OSError, RuntimeError) as error:
                self.metrics.reloads.labels("failed").inc()
                log.warning("reload failed: %s", error)
                reason = "the detector on disk cannot be loaded (see the service's log); the current one stays in use"
                raise HTTPException(409, reason) from error
            changed = model.identity != former.identity
            if changed:
                self.model = model
                self.metrics.detector.clear()
                self.metrics.detector.labels(model.identity).set(1)
            self.metrics.reloads.labels("changed" if changed else "unchanged").inc()
            return messages.ReloadAnswer(detector=self.model.identity, changed=changed)

    async def describe(self, options: messages.DetectorOptions) -> messages.DetectorAnswer:
        """The detector, its guarantee and the limits on a request, without paths."""
        model, settings = self.model, self.settings
        detector, (height, width) = model.detector, model.detector.input_size
        preprocessing, calibration = detector.preprocessing_, detector.reference_
        return messages.DetectorAnswer(
            detector=model.identity,
            version=__version__,
            method=detector.extractor.name,
            calibration=detector.calibration_name,
            backbone=f"{detector.backbone.family}, {detector.backbone.n_steps} steps",
            timesteps=detector.kept_.tolist(),
            weights=detector.weights_.tolist(),
            passes_per_image=str(detector.cost()),
            fit_images=detector.n_fit_,
            calibration_images=len(detector.calibration_scores_),
            groups={name: len(scores) for name, scores in calibration.by_group.items()} if calibration.grouped else {},
            maps=detector.extractor.has_maps,
            map_scale=detector.map_scale_,
            smallest_alpha=model.smallest_alpha,
            guarantee=model.guarantee(model.alpha(options.alpha)),
            rates=await self._in_thread(lambda: model.rates) if options.rates else None,
            input=messages.Input(
                height=height, width=width, channels=preprocessing.channels, resize=preprocessing.resize
            ),
            limits=messages.Limits(
                bytes_per_request=settings.max_bytes,
                images_per_request=settings.max_images,
                pixels_per_image=settings.max_pixels,
                formats=list(codec.FORMATS),
            ),
        )


def _checked(found: Finding | BaseException) -> Finding | str:
    if isinstance(found, Finding) and math.isfinite(found.score):
        return found
    if isinstance(found, GepcError):
        return str(found)
    if isinstance(found, BaseException):
        log.error("an image could not be scored", exc_info=found)
    return NOT_SCORED


def _results(
    model: Model, request: ScoreRequest[messages.ScoreOptions], alpha: float, findings: Sequence[Finding | str]
) -> list[messages.ImageResult]:
    options, scale = request.options, model.detector.map_scale_ or 1.0
    scores = [finding.score for finding in findings if isinstance(finding, Finding)]
    decided = zip(*model.decide(scores, alpha, options.group), strict=True)
    results = []
    for index, (upload, finding) in enumerate(zip(request.uploads, findings, strict=True)):
        result = messages.ImageResult(index=index, name=upload.name)
        if isinstance(finding, str):
            result.error = finding
        else:
            result.score = finding.score
            result.p_value, result.alarm = next(decided)
            if options.map and finding.field is not None:
                result.map = codec.data_uri(codec.heat(finding.field, scale))
            if options.seen:
                result.seen = codec.data_uri(codec.network_view(finding.image))
        results.append(result)
    return results

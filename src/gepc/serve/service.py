"""What the service does with an order: decode, queue, score, decide, draw."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from fastapi import HTTPException

from gepc._version import __version__
from gepc.core.errors import GepcError, InputError, OptionError
from gepc.images.sources import Image
from gepc.serve import decoding, pictures, schemas
from gepc.serve.batching import Capacity, FullError, MicroBatcher
from gepc.serve.metrics import Metrics
from gepc.serve.model import Finding, Model, load_model
from gepc.serve.reading import ScoreRequest, Upload
from gepc.serve.settings import Settings

log = logging.getLogger("gepc.serve")
DECODERS = 2
NOT_BASE64 = "not base64"
NOT_SCORED = "the image could not be scored"
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Job:
    """One image for the network, with the model that prepared it: a new model does not change what is under way."""

    model: Model
    image: Image
    map: bool


class Service:
    """One detector in service. Made before the event loop runs; its coroutines run in one loop."""

    def __init__(self, folder: Path, settings: Settings, backbone: str | None = None) -> None:
        self.folder, self.settings, self.backbone = folder, settings, backbone
        self.model = load_model(folder, backbone)
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
        decoding.quieten()

    @property
    def ready(self) -> bool:
        """Whether a request would be served now."""
        return self._batcher.alive and self.images.taken < self.images.places

    @property
    def retry_after(self) -> int:
        """Seconds after which what is in service now will be done, roughly."""
        return min(60, max(1, math.ceil(self.images.taken * self._batcher.seconds_each)))

    def close(self) -> None:
        """Finish what was accepted."""
        self._batcher.close()
        self._threads.shutdown()

    def busy(self) -> HTTPException:
        """503, with the time after which it makes sense to try again."""
        self.metrics.refused.inc()
        seconds = self.retry_after
        return HTTPException(503, f"busy; try again in {seconds} s", {"Retry-After": str(seconds)})

    # --- the network's thread ------------------------------------------------------------------------------------

    def _run(self, jobs: list[Job]) -> list[Finding]:
        start = time.perf_counter()
        findings = jobs[0].model.score_batch([job.image for job in jobs], any(job.map for job in jobs))
        self.metrics.network.inc(time.perf_counter() - start)
        self.metrics.batches.observe(len(jobs))
        return findings

    # --- the event loop ------------------------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def score(self, order: ScoreRequest[schemas.ScoreOptions]) -> schemas.ScoreAnswer:
        """Scores, p-values and verdicts; a bad image is a result with a reason."""
        model, options = self.model, order.options
        alpha = model.alpha(options.alpha)
        try:
            model.limit(alpha, options.group)
            guarantee = str(model.detector.guarantee(alpha))
        except OptionError as error:
            raise HTTPException(422, _for_callers(error)) from error
        wanted = options.map and model.detector.extractor.has_maps
        images, findings = await self._look(model, order.uploads, wanted)
        results = await self._in_thread(lambda: _results(model, order, alpha, images, findings))
        for result in results:
            self.metrics.images.labels("failed" if result.error else "alarm" if result.alarm else "normal").inc()
        return schemas.ScoreAnswer(
            detector=model.identity,
            alpha=alpha,
            guarantee=guarantee,
            map_scale=model.detector.map_scale_,
            results=results,
        )

    async def map(self, order: ScoreRequest[schemas.MapOptions]) -> tuple[bytes, float]:
        """One image's map as PNG, and the common scale."""
        model = self.model
        if not model.detector.extractor.has_maps:
            raise HTTPException(422, f"the method {model.detector.extractor.name!r} has no maps")
        if len(order.uploads) != 1:
            raise HTTPException(422, f"a map is of one image, got {len(order.uploads)}; /v1/score gives several")
        (image,), (finding,) = await self._look(model, order.uploads, True)
        if isinstance(image, str) or isinstance(finding, str) or finding.field is None:
            raise HTTPException(422, image if isinstance(image, str) else NOT_SCORED)
        scale, field = model.detector.map_scale_ or 1.0, finding.field
        heat_only = order.options.style == "heat"
        draw = pictures.heat if heat_only else lambda field, scale: pictures.overlaid(image, field, scale)
        return await self._in_thread(lambda: draw(field, scale)), scale

    async def _look(
        self, model: Model, uploads: Sequence[Upload], maps: bool
    ) -> tuple[list[Image | str], list[Finding | str]]:
        """For every upload its image and what the network says of it, or the reason why not."""
        if not self._batcher.alive:
            raise self.busy()
        try:
            with self.images.take(len(uploads)):
                prepare = [self._in_thread(partial(self._prepared, model, upload)) for upload in uploads]
                images: list[Image | str] = list(await asyncio.gather(*prepare))
                good = [image for image in images if not isinstance(image, str)]
                futures = self._batcher.submit([Job(model, image, maps) for image in good])
                found = iter(await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True))
        except FullError:
            raise self.busy() from None
        findings = [image if isinstance(image, str) else _checked(next(found)) for image in images]
        return images, findings

    def _prepared(self, model: Model, upload: Upload) -> Image | str:
        if upload.data is None:
            return NOT_BASE64
        try:
            image: Image = decoding.prepared(upload.data, self.settings.max_pixels, model.detector.preprocessing_)
        except InputError as error:
            return str(error)
        return image

    async def reload(self) -> schemas.ReloadAnswer:
        """Read the detector's folder again and try it on an image; if that fails the one in service stays."""
        async with self._reloading:
            former = self.model
            try:
                model = await asyncio.to_thread(Model.load, self.folder, self.backbone, former)
                await asyncio.wrap_future(self._batcher.submit([Job(model, model.blank(), map=False)])[0])
            except FullError:
                raise self.busy() from None
            except (GepcError, OSError, RuntimeError) as error:
                self.metrics.reloads.labels("failed").inc()
                log.warning("reload failed: %s", error)
                reason = "the detector on disk cannot be loaded (the service's log says why); the one in service stays"
                raise HTTPException(409, reason) from error
            changed = model.identity != former.identity
            if changed:
                self.model = model
                self.metrics.detector.clear()
                self.metrics.detector.labels(model.identity).set(1)
            self.metrics.reloads.labels("changed" if changed else "unchanged").inc()
            return schemas.ReloadAnswer(detector=self.model.identity, changed=changed)

    def describe(self, asked: float | None) -> schemas.DetectorAnswer:
        """What the detector is and promises; no path, no name of a file."""
        model, detector = self.model, self.model.detector
        try:
            promise = detector.guarantee(model.alpha(asked))
        except OptionError as error:
            raise HTTPException(422, str(error)) from error
        reference, settings = detector.reference_, self.settings
        height, width = detector.input_size
        return schemas.DetectorAnswer(
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
            groups={name: len(scores) for name, scores in reference.by_group.items()} if reference.grouped else {},
            maps=detector.extractor.has_maps,
            map_scale=detector.map_scale_,
            smallest_alpha=model.smallest_alpha,
            guarantee=schemas.GuaranteeAt(
                alpha=promise.alpha,
                calibration_images=promise.n,
                low=promise.low,
                high=promise.high,
                sentence=str(promise),
            ),
            input=schemas.Input(
                height=height,
                width=width,
                channels=detector.preprocessing_.channels,
                resize=detector.preprocessing_.resize,
            ),
            limits=schemas.Limits(
                bytes_per_request=settings.max_bytes,
                images_per_request=settings.max_images,
                pixels_per_image=settings.max_pixels,
                formats=list(decoding.FORMATS),
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
    model: Model,
    order: ScoreRequest[schemas.ScoreOptions],
    alpha: float,
    images: Sequence[Image | str],
    findings: Sequence[Finding | str],
) -> list[schemas.ImageResult]:
    scores = [finding.score for finding in findings if isinstance(finding, Finding)]
    p_values, alarms = model.verdicts(scores, alpha, order.options.group)
    decided = iter(zip(p_values.tolist(), alarms.tolist(), strict=True))
    scale = model.detector.map_scale_ or 1.0
    results = []
    for index, (upload, image, finding) in enumerate(zip(order.uploads, images, findings, strict=True)):
        result = schemas.ImageResult(index=index, name=upload.name)
        if isinstance(finding, str) or isinstance(image, str):
            result.error = str(finding)
        else:
            result.score = finding.score
            result.p_value, result.alarm = next(decided)
            if order.options.map and finding.field is not None:
                result.map = pictures.data_uri(pictures.heat(finding.field, scale))
            if order.options.seen:
                result.seen = pictures.data_uri(pictures.seen(image))
        results.append(result)
    return results


def _for_callers(error: OptionError) -> str:
    """The library's sentence, with the name of the option as it is over HTTP."""
    return str(error).replace("give groups=", "say which with group").replace("leave groups out", "leave group out")

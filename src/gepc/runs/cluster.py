"""Scoring on a Ray cluster, by actors that load the detector once.

Only names are sent and only rows come back. The process that started the run writes the shards; those of a
node that dies are computed elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gepc.core.allocator import keep_freed_memory
from gepc.core.errors import GepcError, InputError, OptionError, raising
from gepc.core.files import read_json
from gepc.core.isolation import beside_interpreter
from gepc.detector.fitted import FittedDetector
from gepc.detector.storage import DESCRIPTION, STATE, load_fitted
from gepc.detector.stream import Result, stream
from gepc.images.formats import is_url
from gepc.images.sources import FileImages, Images, open_images
from gepc.runs.local import Labels
from gepc.runs.shards import ScoreRun, Shard

READING_THREADS = 4
PATIENCE = 1800.0
"""Seconds without a finished shard until pending ones are submitted again: Ray may wait for a lost node forever."""
OBJECT_STORE = 200 * 2**20  # bytes of shared memory of a cluster that is started here; it holds names and rows only


@dataclass(frozen=True)
class DetectorPayload:
    """The files of a saved detector, sent to actors; its backbone must be loadable on their nodes."""

    files: dict[str, bytes]
    batch_size: int

    @classmethod
    def of(cls, folder: Path, backbone: str | None, batch_size: int) -> DetectorPayload:
        """Read a saved detector; `backbone` replaces the place of its backbone, not the options of loading it."""
        description = read_json(folder / DESCRIPTION)
        stored = description["backbone"]
        stored["source"] = _absolute(backbone or stored["source"])
        stored["load_options"] = _absolute_options(stored["load_options"])
        files = {DESCRIPTION: json.dumps(description).encode(), STATE: (folder / STATE).read_bytes()}
        return cls(files, batch_size)

    def build(self) -> FittedDetector:
        """Load the detector."""
        with tempfile.TemporaryDirectory(prefix="gepc-") as folder:
            for name, content in self.files.items():
                (Path(folder) / name).write_bytes(content)
            fitted = load_fitted(folder, trust=True)  # whoever started the run has loaded it
        return replace(fitted, batch_size=self.batch_size)


def _absolute(source: str | None) -> str | None:
    """The absolute path of a file or folder, since actors have another working directory; other names unchanged."""
    return str(Path(source).absolute()) if source is not None and Path(source).exists() else source


def _absolute_options(options: dict[str, Any]) -> dict[str, Any]:
    config = options.get("config")
    return {**options, "config": _absolute(config)} if isinstance(config, str) else options


@dataclass(frozen=True)
class ImageLocations:
    """How actors find images: by names, or in the array file `array`, which each of them opens."""

    images: Images
    array: str | None

    @classmethod
    def of(cls, images: Images, source: str) -> ImageLocations:
        """Locations of `images`, which were opened from `source`."""
        return cls(images, None if isinstance(images, FileImages) else str(Path.cwd() / source))

    def shown(self, index: int, error: str) -> tuple[str, str]:
        """Name and error message as `gepc.runs.local` writes them: relative paths stay relative."""
        if not isinstance(self.images, FileImages):
            return str(index), error
        (name,) = self.images.between(index, index + 1).names
        return name, error.replace(str(Path(name).absolute()), name)

    def item(self, shard: Shard, labels: Labels | None) -> dict[str, Any]:
        """What an actor receives for a shard: its range, absolute paths or URLs unless the array has the images."""
        groups = [] if labels is None else [str(label) for label in labels[shard.start : shard.stop]]
        names: Sequence[str] = ()
        if isinstance(self.images, FileImages):
            names = self.images.between(shard.start, shard.stop).names
        absolute = [name if is_url(name) else str(Path(name).absolute()) for name in names]
        place = {"shard": shard.number, "start": shard.start, "stop": shard.stop}
        return {**place, "names": absolute, "labels": groups}


class ScoreActor:
    """A process of the cluster that scores shards."""

    def __init__(self, payload: DetectorPayload, array: str | None) -> None:
        keep_freed_memory()
        self.fitted = payload.build()
        self.array = None if array is None else open_images(array)

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The rows of the shards in `batch`."""
        for row in zip(*(batch[name] for name in ("shard", "start", "stop", "names", "labels")), strict=True):
            yield self._rows(*row)

    def _rows(self, shard: int, start: int, stop: int, names: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
        groups = np.asarray(labels, dtype=np.str_) if len(labels) else None
        if self.array is None:
            images: Images = FileImages([str(name) for name in names])
        else:
            images = self.array.between(int(start), int(stop))
        scored = stream(self.fitted, images, labels=groups, threads=READING_THREADS, check_range=False)
        results = [replace(result, index=result.index + int(start)) for chunk in scored for result in chunk.results]
        numbers = {name: np.array([getattr(one, name) for one in results]) for name in ("index", "score", "p_value")}
        errors = np.array([result.error or "" for result in results], dtype=object)
        return {"shard": np.full(len(results), shard), **numbers, "error": errors}


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster, and the resources of an actor."""

    address: str | None = None  # address of the cluster; None starts one on this machine
    actors: int | None = None  # number of actors; None uses the whole cluster but one processor of each node
    cpus_per_actor: float = 1.0  # processors reserved for an actor
    gpus_per_actor: float = 0.0  # GPUs reserved for an actor

    @contextlib.contextmanager
    def joined(self) -> Iterator[Any]:
        """Connect to the cluster for the time of the block."""
        ray = _import_ray()
        if ray.is_initialized():
            yield ray
            return
        own = {"include_dashboard": False, "object_store_memory": OBJECT_STORE} if self.address is None else {}
        try:
            # `local`: without an address, Ray looks for a cluster that runs or ran on this machine
            with beside_interpreter():  # Ray adds the current directory to the search path of its workers
                ray.init(address=self.address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
        except (ConnectionError, RuntimeError, ValueError) as error:
            what = "can be started here" if self.address is None else f"answers at {self.address}"
            raise InputError(f"no Ray cluster {what}: {error}") from error
        try:
            yield ray
        finally:
            ray.shutdown()

    def most_actors(self, ray: Any, work: int | None = None) -> int:
        """The number of actors to start: `actors`, or as many as fit, and not more than pieces of work."""
        if self.actors is not None:
            return self.actors
        resources = ray.cluster_resources()
        nodes = sum(node["Alive"] for node in ray.nodes())
        fitting = (resources.get("CPU", 1.0) - nodes) / self.cpus_per_actor
        if self.gpus_per_actor > 0:
            fitting = min(fitting, resources.get("GPU", 0.0) / self.gpus_per_actor)
        return max(1, int(fitting) if work is None else min(int(fitting), work))

    @property
    def actor_options(self) -> dict[str, Any]:
        """Resources of an actor, which is restarted elsewhere as often as it dies."""
        resources = {"num_cpus": self.cpus_per_actor, "num_gpus": self.gpus_per_actor}
        return {**resources, "max_restarts": -1, "max_task_retries": -1}


def score_shards_on_cluster(
    run: ScoreRun,
    payload: DetectorPayload,
    locations: ImageLocations,
    cluster: Cluster,
    labels: Labels | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Score the pending shards of a run and write each as it comes back, until none is pending.

    `labels` has the group of each image, for a detector fitted with groups; `on_progress` is called with numbers of
    images.
    """
    with cluster.joined() as ray:
        while pending := run.pending():
            for shard in pending:
                run.begin(shard)
            try:
                for shard, results in _computed(ray, pending, payload, locations, cluster, labels):
                    run.write(shard, results)
                    on_progress(len(shard))
            except (ray.exceptions.RayError, ray.data.exceptions.ExecutionTimeoutError) as error:
                # if only nodes were lost, what is missing is submitted again
                if isinstance(error, ray.exceptions.UserCodeException) or len(run.pending()) == len(pending):
                    raise GepcError(
                        f"the cluster gave up: {reason_of(error)}. Finished shards are kept; run it again to continue"
                    ) from error


def _computed(
    ray: Any,
    shards: list[Shard],
    payload: DetectorPayload,
    locations: ImageLocations,
    cluster: Cluster,
    labels: Labels | None,
) -> Iterator[tuple[Shard, list[Result]]]:
    most = cluster.most_actors(ray, len(shards))
    data = ray.data.from_items([locations.item(shard, labels) for shard in shards], override_num_blocks=len(shards))
    rows = data.map_batches(
        ScoreActor,
        batch_size=1,
        fn_constructor_args=(payload, locations.array),
        # one actor is enough to go on: a pool that must have more waits forever after a node is lost
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most, initial_size=most),
        **cluster.actor_options,
    )
    by_number = {shard.number: shard for shard in shards}
    waiting: dict[int, dict[int, Result]] = {}
    for batch in rows.iter_batches(batch_size=None, batch_format="numpy"):
        for number, index, score, p_value, error in zip(
            *(batch[name] for name in ("shard", "index", "score", "p_value", "error")), strict=True
        ):
            name, reason = locations.shown(int(index), str(error or ""))
            result = Result(int(index), name, float(score), float(p_value), reason or None)
            waiting.setdefault(int(number), {})[result.index] = result
        for number in [number for number, found in waiting.items() if len(found) == len(by_number[number])]:
            found = waiting.pop(number)
            yield by_number[number], [found[index] for index in sorted(found)]


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
    with raising(OptionError, "a cluster needs Ray: pip install 'gepc[ray]'", ImportError):
        import ray
        import ray.data
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = PATIENCE
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray


def reason_of(error: Exception) -> str:
    """The last line of an error of Ray, which holds the message of the exception in the actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

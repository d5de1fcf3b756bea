"""Scoring on a Ray cluster, by actors that load the detector once.

Only names are sent and only rows come back. The process that started the run writes the shards; those of a
node that dies are computed elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gepc.conformal.p_values import Labels
from gepc.core.allocator import keep_freed_memory
from gepc.core.errors import GepcError, InputError, OptionError, raising
from gepc.core.isolation import beside_interpreter
from gepc.detector.fitted import FittedDetector
from gepc.detector.storage import DESCRIPTION, STATE, load_fitted
from gepc.detector.stream import stream
from gepc.images.sources import FileImages, Images, open_images
from gepc.runs.shards import ScoreRun, Shard, parse_shard, shard_text

READING_THREADS = 4
PATIENCE = 1800.0
"""Seconds without a finished shard until pending ones are submitted again: Ray may wait for a lost node forever."""
OBJECT_STORE = 200 * 2**20  # bytes of shared memory of a cluster that is started here; it holds names and rows only


@dataclass(frozen=True)
class DetectorPayload:
    """The files of a saved detector, sent to actors; its backbone must be loadable on their nodes."""

    files: dict[str, bytes]
    backbone: str | None  # replaces the one that the detector names
    batch_size: int

    @classmethod
    def of(cls, folder: Path, backbone: str | None, batch_size: int) -> DetectorPayload:
        """Read a saved detector."""
        return cls({name: (folder / name).read_bytes() for name in (DESCRIPTION, STATE)}, backbone, batch_size)

    def build(self) -> FittedDetector:
        """Load the detector."""
        with tempfile.TemporaryDirectory(prefix="gepc-") as folder:
            for name, content in self.files.items():
                Path(folder, name).write_bytes(content)
            fitted = load_fitted(folder, self.backbone, trust=True)  # whoever started the run has loaded it
        return replace(fitted, batch_size=self.batch_size)


class ScoreActor:
    """A process of the cluster that scores shards.

    It works in the directory of the process that started the run, if its node has that, so that relative paths mean
    the same. `array` is the file of the images if they are not files.
    """

    def __init__(self, payload: DetectorPayload, directory: Path, array: str | None) -> None:
        keep_freed_memory()
        with contextlib.suppress(OSError):
            os.chdir(directory)
        self.fitted = payload.build()
        self.array = None if array is None else open_images(array)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The rows of the shard in `batch`, as the text of its file."""
        number, start, stop = (int(batch[name][0]) for name in ("shard", "start", "stop"))
        names, labels = (list(map(str, batch[name][0])) for name in ("names", "labels"))
        images = FileImages(names) if self.array is None else self.array.take(range(start, stop))
        groups = np.asarray(labels, dtype=np.str_) if labels else None
        scored = stream(self.fitted, images, labels=groups, threads=READING_THREADS, check_range=False)
        results = [replace(result, index=result.index + start) for chunk in scored for result in chunk.results]
        return {"shard": [number], "text": [shard_text(results)]}


def work_item(shard: Shard, images: Images, labels: Labels | None) -> dict[str, Any]:
    """What an actor receives for a shard: its range, the names of its files, and the groups of its images."""
    names = images.names[shard.start : shard.stop] if isinstance(images, FileImages) else []
    groups = [] if labels is None else [str(label) for label in labels[shard.start : shard.stop]]
    return {"shard": shard.number, "start": shard.start, "stop": shard.stop, "names": names, "labels": groups}


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
        what = "can be started here" if self.address is None else f"answers at {self.address}"
        failing = raising(InputError, f"no Ray cluster {what}: {{error}}", ConnectionError, RuntimeError, ValueError)
        with failing, beside_interpreter():  # Ray adds the current directory to the search path of its workers
            # `local`: without an address, Ray looks for a cluster that runs or ran on this machine
            ray.init(address=self.address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
        try:
            yield ray
        finally:
            ray.shutdown()

    def most_actors(self, ray: Any, work: int) -> int:
        """The number of actors to start: `actors`, or as many as fit, and not more than pieces of work."""
        if self.actors is not None:
            return self.actors
        resources = ray.cluster_resources()
        nodes = sum(node["Alive"] for node in ray.nodes())
        fitting = (resources.get("CPU", 1.0) - nodes) / self.cpus_per_actor
        if self.gpus_per_actor > 0:
            fitting = min(fitting, resources.get("GPU", 0.0) / self.gpus_per_actor)
        return max(1, min(int(fitting), work))


def score_shards_on_cluster(
    run: ScoreRun,
    payload: DetectorPayload,
    images: Images,
    source: str,
    cluster: Cluster,
    labels: Labels | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Score the pending shards of a run and write each as it comes back, until none is pending.

    Parameters
    ----------
    run : the run.
    payload : the detector.
    images, source : the images of all shards, and what they were opened from.
    cluster : the cluster.
    labels : the group of each image, for a detector fitted with groups.
    on_progress : called with numbers of images.
    """
    array = None if isinstance(images, FileImages) else source
    with cluster.joined() as ray:
        while pending := run.pending():
            for shard in pending:
                run.begin(shard)
            work = [work_item(shard, images, labels) for shard in pending]
            shards = {shard.number: shard for shard in pending}
            try:
                for row in _scored(ray, work, (payload, Path.cwd(), array), cluster):
                    shard = shards[row["shard"]]
                    run.write(shard, parse_shard(row["text"]))
                    on_progress(len(shard))
            except (ray.exceptions.RayError, ray.data.exceptions.ExecutionTimeoutError) as error:
                # if only nodes were lost, what is missing is submitted again
                if isinstance(error, ray.exceptions.UserCodeException) or len(run.pending()) == len(pending):
                    raise GepcError(f"the cluster gave up: {reason_of(error)}. Run it again to continue") from error


def _scored(ray: Any, work: list[dict[str, Any]], actor: tuple[Any, ...], cluster: Cluster) -> Iterator[dict[str, Any]]:
    """The answers of actors that are made of the arguments `actor`, one for each item of work."""
    most = cluster.most_actors(ray, len(work))
    data = ray.data.from_items(work, override_num_blocks=len(work))
    answers = data.map_batches(
        ScoreActor,
        batch_size=1,
        fn_constructor_args=actor,
        # one actor is enough to go on: a pool that must have more waits forever after a node is lost
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most, initial_size=most),
        num_cpus=cluster.cpus_per_actor,
        num_gpus=cluster.gpus_per_actor,
    )
    yield from answers.iter_rows()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # failures are exceptions here, not lines of a log
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

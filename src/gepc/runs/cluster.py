"""The engine of a cluster: Ray Data hands shards to actors, each of which has loaded the detector once.

Only names go out and only rows come back; actors read the images themselves, from a folder that every node sees or from
an address (`gepc.images.sources`). The process that started the run writes the shards, as the local engine does: a
node that dies costs the time of the shards it was at, and its shards come from another one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gepc.core.allocator import keep_freed_memory
from gepc.core.errors import GepcError, InputError, OptionError
from gepc.core.files import read_json, write_bytes
from gepc.detector.detector import Result
from gepc.detector.storage import DESCRIPTION, STATE
from gepc.images.formats import split_archive
from gepc.images.sources import FileImages, Images, UrlImages, open_images
from gepc.runs.local import DedupScorer, Labels, score_part
from gepc.runs.run_folder import Run, Shard

READING_THREADS = 4
PATIENCE = 1800.0
"""Seconds without a finished shard after which the work is handed out anew: actors of a lost node may wait for ever."""
OBJECT_STORE = 200 * 2**20
"""Bytes of shared memory of a cluster that is started here: names and rows are all that it has to hold."""


@dataclass(frozen=True)
class DetectorPayload:
    """What an actor needs to build the detector on its node; the backbone must be loadable there."""

    files: dict[str, bytes]
    backbone: str | None
    batch_size: int
    dedup: bool = False

    @classmethod
    def of(cls, folder: Path, backbone: str | None, batch_size: int, dedup: bool = False) -> DetectorPayload:
        """Of a saved detector. A backbone's path is made absolute, for actors work in another folder."""
        source = backbone or read_json(folder / DESCRIPTION)["backbone"]["source"]
        if source is not None and Path(source).exists():
            source = str(Path(source).absolute())
        same = backbone is None and source == read_json(folder / DESCRIPTION)["backbone"]["source"]
        files = {name: (folder / name).read_bytes() for name in (DESCRIPTION, STATE)}
        return cls(files, None if same else source, batch_size, dedup)

    def build(self) -> DedupScorer:
        """Load the detector."""
        from gepc.detector.storage import load_detector

        with tempfile.TemporaryDirectory(prefix="gepc-") as folder:
            for name, content in self.files.items():
                write_bytes(Path(folder) / name, content)
            detector = load_detector(folder, self.backbone)
        detector.batch_size = self.batch_size
        return DedupScorer(detector, self.dedup)


@dataclass(frozen=True)
class Source:
    """How actors find images: by names, or in an array that each opens by itself."""

    images: Images
    array: str | None

    @classmethod
    def of(cls, images: Images, source: str) -> Source:
        """`source` is what the user wrote, for images that have no names."""
        if isinstance(images, FileImages):
            return cls(images, None)
        path, key = split_archive(source) or (Path(source), None)
        return cls(images, str(path.absolute()) if key is None else f"{path.absolute()}:{key}")

    def names(self, shard: Shard) -> list[str]:
        """Where the images of that shard are; nothing for an array."""
        if isinstance(self.images, UrlImages):
            return self.images.urls[shard.start : shard.stop]
        if isinstance(self.images, FileImages):
            return [str(path.absolute()) for path in self.images.paths[shard.start : shard.stop]]
        return []

    def shown(self, index: int, error: str) -> tuple[str, str]:
        """Name and error as the local engine writes them, relative paths relative."""
        if self.array is not None:
            return str(index), error
        if isinstance(self.images, UrlImages):
            return self.images.urls[index], error
        path = self.images.paths[index]  # type: ignore[attr-defined]
        return str(path), error.replace(str(path.absolute()), str(path))


class Actor:
    """One process of the cluster: a detector, and shards one after the other."""

    def __init__(self, recipe: DetectorPayload, array: str | None) -> None:
        keep_freed_memory()
        self.score_chunk = recipe.build()
        self.array = None if array is None else open_images(array)

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The rows of the shards in `batch`."""
        for row in zip(*(batch[name] for name in ("shard", "start", "stop", "names", "labels")), strict=True):
            yield self._rows(*row)

    def _rows(self, shard: int, start: int, stop: int, names: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
        groups = np.asarray(labels, dtype=np.str_) if len(labels) else None
        results = score_part(
            self.score_chunk, self._images(int(start), int(stop), names), int(start), groups, READING_THREADS
        )
        return {
            "shard": np.full(len(results), shard),
            "index": np.array([result.index for result in results]),
            "score": np.array([result.score for result in results]),
            "p_value": np.array([result.p_value for result in results]),
            "error": np.array([result.error or "" for result in results], dtype=object),
        }

    def _images(self, start: int, stop: int, names: Sequence[str]) -> Images:
        if self.array is not None:
            from gepc.runs.reading import Records

            return Records([self.array[index] for index in range(start, stop)])
        if "://" in names[0]:
            return UrlImages([str(name) for name in names])
        return FileImages([Path(name) for name in names])


@dataclass(frozen=True)
class Cluster:
    """Which cluster, and how much of it an actor takes. Without an address one is started on this machine."""

    address: str | None = None
    actors: int | None = None
    cpus_per_actor: float = 1.0
    gpus_per_actor: float = 0.0

    @contextlib.contextmanager
    def joined(self) -> Iterator[Any]:
        """Connect, and disconnect in the end."""
        ray = _import_ray()
        if ray.is_initialized():
            yield ray
            return
        own = {"include_dashboard": False, "object_store_memory": OBJECT_STORE} if self.address is None else {}
        try:
            # `local`: without any address Ray would look for one that runs already, or ran once
            ray.init(address=self.address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
        except (ConnectionError, RuntimeError, ValueError) as error:
            what = "can be started here" if self.address is None else f"answers at {self.address}"
            raise InputError(f"no Ray cluster {what}: {error}") from error
        try:
            yield ray
        finally:
            ray.shutdown()

    def most_actors(self, ray: Any, work: int | None = None) -> int:
        """As many as asked for, or as fit with one processor of every node left free, and as there is work for."""
        if self.actors is not None:
            return self.actors
        resources = ray.cluster_resources()
        nodes = sum(node["Alive"] for node in ray.nodes())
        room = (resources.get("CPU", 1.0) - nodes) / self.cpus_per_actor
        if self.gpus_per_actor > 0:
            room = min(room, resources.get("GPU", 0.0) / self.gpus_per_actor)
        return max(1, int(room) if work is None else min(int(room), work))


def score_shards_on_cluster(
    run: Run,
    recipe: DetectorPayload,
    source: Source,
    cluster: Cluster,
    labels: Labels | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Score what the run lacks and write each shard as it comes back, until none is missing."""
    with cluster.joined() as ray:
        while pending := run.pending():
            _hand_out(ray, run, pending, _computed(ray, pending, recipe, source, cluster, labels), on_progress)


def _hand_out(
    ray: Any,
    run: Run,
    pending: list[Shard],
    computed: Iterator[tuple[Shard, list[Result]]],
    on_progress: Callable[[int], None] | None,
) -> None:
    """Write what comes back. Where nodes are lost for good, return: what is missing is then handed to those left."""
    try:
        for shard, results in computed:
            run.write(shard, results)
            if on_progress is not None:
                on_progress(len(shard))
    except (ray.exceptions.RayError, ray.data.exceptions.ExecutionTimeoutError) as error:
        if isinstance(error, ray.exceptions.UserCodeException) or len(run.pending()) == len(pending):
            raise GepcError(
                f"the cluster gave up: {reason_of(error)}. What is finished is kept; run the same command again"
            ) from error


def _computed(
    ray: Any, shards: list[Shard], recipe: DetectorPayload, source: Source, cluster: Cluster, labels: Labels | None
) -> Iterator[tuple[Shard, list[Result]]]:
    if not shards:
        return
    most = cluster.most_actors(ray, len(shards))
    data = ray.data.from_items([shard_item(shard, source, labels) for shard in shards], override_num_blocks=len(shards))
    rows = data.map_batches(
        Actor,
        batch_size=1,
        fn_constructor_args=(recipe, source.array),
        # at least one actor: a pool that must have more waits for ever when a node is lost
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most, initial_size=most),
        num_cpus=cluster.cpus_per_actor,
        num_gpus=cluster.gpus_per_actor,
        max_restarts=-1,
        max_task_retries=-1,
    )
    by_number = {shard.number: shard for shard in shards}
    waiting: dict[int, dict[int, Result]] = {}
    for batch in rows.iter_batches(batch_size=None, batch_format="numpy"):
        for number, index, score, p_value, error in zip(
            *(batch[name] for name in ("shard", "index", "score", "p_value", "error")), strict=True
        ):
            name, reason = source.shown(int(index), str(error or ""))
            result = Result(int(index), name, float(score), float(p_value), reason or None)
            waiting.setdefault(int(number), {})[result.index] = result
        for number in [number for number, found in waiting.items() if len(found) == len(by_number[number])]:
            found = waiting.pop(number)
            yield by_number[number], [found[index] for index in sorted(found)]


def shard_item(shard: Shard, source: Source, labels: Labels | None) -> dict[str, Any]:
    """What an actor gets of a shard."""
    groups = [] if labels is None else [str(label) for label in labels[shard.start : shard.stop]]
    return {
        "shard": shard.number,
        "start": shard.start,
        "stop": shard.stop,
        "names": source.names(shard),
        "labels": groups,
    }


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing about a user's run leaves the machine
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise OptionError("a cluster needs Ray: pip install 'gepc[ray]'") from error
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = PATIENCE
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray


def reason_of(error: Exception) -> str:
    """The last line that is not Ray's own, which says what went wrong in an actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

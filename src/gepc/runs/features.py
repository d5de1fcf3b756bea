"""Fitting on a cluster: chunks go to actors that have loaded the backbone once, tables and maps come back in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gepc.backbones.base import Backbone
from gepc.core.allocator import keep_freed_memory
from gepc.core.errors import GepcError
from gepc.features.extraction import Extracted, ExtractionSpec
from gepc.images.batches import Chunk
from gepc.runs.cluster import Cluster, reason_of

AHEAD = 2
"""Chunks that wait at each actor."""


class Worker:
    """One process of the cluster: a backbone, and chunks one after the other."""

    def __init__(self, backbone: Backbone | str, options: dict[str, Any]) -> None:
        from gepc.backbones.load import load_backbone

        keep_freed_memory()
        self.backbone = backbone if isinstance(backbone, Backbone) else load_backbone(backbone, **options)

    def extract(self, work: ExtractionSpec, chunk: Chunk) -> tuple[Extracted | None, int, int]:
        """What was found, and the passes it cost."""
        self.backbone.reset_counts()
        return work(self.backbone, chunk), self.backbone.forward_count, self.backbone.jvp_count


@dataclass(frozen=True)
class FeaturesOnCluster:
    """An engine for `Detector.fit`. A backbone made in Python is sent whole; others are loaded where the actors are."""

    cluster: Cluster

    def __call__(
        self, backbone: Backbone, work: ExtractionSpec, read: Iterable[Chunk]
    ) -> Iterator[tuple[Chunk, Extracted | None]]:
        """Every chunk with what was found in it, in order; an actor that dies is started again elsewhere."""
        with self.cluster.joined() as ray:
            remote = ray.remote(
                num_cpus=self.cluster.cpus_per_actor,
                num_gpus=self.cluster.gpus_per_actor,
                max_restarts=-1,
                max_task_retries=-1,
            )(Worker)
            source, options = _sent(backbone)
            actors = [remote.remote(source, options) for _ in range(self.cluster.most_actors(ray))]
            shared = ray.put(work)
            waiting: deque[tuple[Chunk, Any]] = deque()
            try:
                for number, chunk in enumerate(read):
                    waiting.append((chunk, actors[number % len(actors)].extract.remote(shared, chunk)))
                    if len(waiting) > AHEAD * len(actors):
                        yield _fetched(ray, backbone, *waiting.popleft())
                while waiting:
                    yield _fetched(ray, backbone, *waiting.popleft())
            except ray.exceptions.RayError as error:
                raise GepcError(f"the cluster gave up: {reason_of(error)}") from error
            finally:
                for actor in actors:
                    ray.kill(actor)


def _fetched(ray: Any, backbone: Backbone, chunk: Chunk, answer: Any) -> tuple[Chunk, Extracted | None]:
    found, forward, jvp = ray.get(answer)
    backbone.forward_count += forward
    backbone.jvp_count += jvp
    return chunk, found


def _sent(backbone: Backbone) -> tuple[Backbone | str, dict[str, Any]]:
    if backbone.source is None:
        return backbone, {}
    place = Path(backbone.source)
    return str(place.absolute()) if place.exists() else backbone.source, backbone.load_options

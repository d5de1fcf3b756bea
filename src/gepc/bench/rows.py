"""Images of a benchmark again, by the rows that they have in the collected tables."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gepc.bench.collect import open_split, preprocessing
from gepc.bench.evaluate import Bench
from gepc.datasets.collection import choose
from gepc.features.base import Batch
from gepc.images.batches import OnBadImage, chunks


def read_rows(bench: Bench, data: Path, name: str, split: str, rows: Iterable[int]) -> Batch:
    """The images of some rows of a part, of those that it has."""
    protocol, seed = bench.protocol, bench.protocol.seeds[0]
    part = bench.collection.parts[name, split, seed]
    images = choose(open_split(protocol, data, name, split), [part.places[row] for row in rows if row < part.count])
    (chunk,) = chunks(images, preprocessing(protocol, bench.backbone, name), len(images), OnBadImage.NONE)
    return Batch(chunk.stacked(), chunk.keys, seed, protocol.batch_size)

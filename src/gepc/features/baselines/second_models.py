"""Further networks that a method compares with the backbone: loaded once, their passes counted as the backbone's."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from gepc.backbones.base import Backbone
from gepc.core.errors import OptionError
from gepc.features.base import Batch


@functools.lru_cache(maxsize=8)
def checkpoint(source: str) -> Backbone:
    """The network at `source`, whatever `gepc.load_backbone` takes: a diffusers folder, a checkpoint, a name."""
    from gepc.backbones.load import load_backbone

    return load_backbone(source)


@contextmanager
def counted_with(backbone: Backbone, source: str, batch: Batch) -> Iterator[Backbone]:
    """The network at `source`, fit for this batch; what is asked of it inside the `with` counts as the backbone's."""
    other = checkpoint(source)
    if other.channels != backbone.channels:
        raise OptionError(f"{source} has {other.channels} channels, the backbone {backbone.channels}")
    other.check_size(*batch.size, what=f"{source}: images")
    forward, jvp = other.forward_count, other.jvp_count
    try:
        yield other
    finally:
        backbone.forward_count += other.forward_count - forward
        backbone.jvp_count += other.jvp_count - jvp

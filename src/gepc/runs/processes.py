"""Several processes on one machine, one per GPU, started by `accelerate launch -m gepc score ...` or by torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

from gepc.core.errors import GepcError, OptionError
from gepc.runs.run_folder import Shard


@dataclass(frozen=True)
class ProcessGroup:
    """The place of this process among `size`, and how to wait for the others."""

    rank: int = 0
    size: int = 1
    wait: Callable[[], None] = lambda: None

    @property
    def is_first(self) -> bool:
        """Whether this process makes the run's folder and merges its shards."""
        return self.rank == 0

    def share(self, shards: Iterable[Shard]) -> list[Shard]:
        """Every `size`-th shard, by its number: each belongs to one process, however many are finished already."""
        return [shard for shard in shards if shard.number % self.size == self.rank]


def team() -> ProcessGroup:
    """The processes that a launcher has started together; one by itself otherwise."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2:
        return ProcessGroup()
    import torch

    try:
        from accelerate import PartialState
    except ImportError as error:
        raise OptionError("several processes need accelerate: pip install 'gepc[train]'") from error
    # the first to finish waits for the last, which may take longer than the usual half an hour
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=30))
    if state.num_processes != size:
        raise OptionError(
            f"WORLD_SIZE is {size} but {state.num_processes} processes found each other; "
            "start them with accelerate launch or torchrun, or unset WORLD_SIZE for one by itself"
        )
    return ProcessGroup(state.process_index, size, lambda: _wait(state.wait_for_everyone))


def _wait(for_everyone: Callable[[], None]) -> None:
    try:
        for_everyone()
    except RuntimeError as error:  # what torch raises when a connection is lost
        raise GepcError(
            "another process of this run has ended; what is finished is kept: run the same command again"
        ) from error

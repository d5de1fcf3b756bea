"""Several scoring processes on one machine, one per GPU, started by `accelerate launch` or `torchrun`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

from gepc.core.errors import GepcError, OptionError
from gepc.runs.shards import Shard


@dataclass(frozen=True)
class ProcessGroup:
    """This process among `size` processes; `wait` returns when all of them have called it."""

    rank: int = 0
    size: int = 1
    wait: Callable[[], None] = lambda: None

    @property
    def is_first(self) -> bool:
        """Whether this process creates the run folder and merges the shards."""
        return self.rank == 0

    def share(self, shards: Iterable[Shard]) -> list[Shard]:
        """The shards of this process: every `size`-th by number, whichever are finished already."""
        return [shard for shard in shards if shard.number % self.size == self.rank]


def process_group() -> ProcessGroup:
    """The processes that a launcher started together, or this process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2:
        return ProcessGroup()
    import torch

    try:
        from accelerate import PartialState
    except ImportError as error:
        raise OptionError("several processes need accelerate: pip install 'gepc[train]'") from error
    # the first process to finish waits for the last; the default timeout is half an hour
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=30))
    if state.num_processes != size:
        raise OptionError(
            f"WORLD_SIZE is {size} but {state.num_processes} processes found each other; "
            "start them with accelerate launch or torchrun, or unset WORLD_SIZE to run one process"
        )
    return ProcessGroup(state.process_index, size, lambda: _wait(state.wait_for_everyone))


def _wait(for_everyone: Callable[[], None]) -> None:
    try:
        for_everyone()
    except RuntimeError as error:  # torch lost a connection
        raise GepcError(
            "another process of this run has ended; finished shards are kept: run it again to continue"
        ) from error

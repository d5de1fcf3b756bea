"""Several processes on one machine, one per GPU, started by `accelerate launch -m gepc score ...`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from gepc.errors import OptionError

T_ = TypeVar("T_")


@dataclass(frozen=True)
class Team:
    """The place of this process among `size`, and how to wait for the others."""

    rank: int = 0
    size: int = 1
    wait: Callable[[], None] = lambda: None

    @property
    def is_first(self) -> bool:
        """Whether this process makes the run's folder and merges its shards."""
        return self.rank == 0

    def share(self, items: Sequence[T_]) -> list[T_]:
        """Every `size`-th of the items: each belongs to one process."""
        return list(items[self.rank :: self.size])


def team() -> Team:
    """The processes that a launcher has started together; one by itself otherwise."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Team()
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise OptionError("several processes need accelerate: pip install 'gepc[train]'") from error
    # the first to finish waits for the last, which may take longer than the usual half an hour
    state = PartialState(timeout=timedelta(days=30))
    return Team(state.process_index, state.num_processes, state.wait_for_everyone)

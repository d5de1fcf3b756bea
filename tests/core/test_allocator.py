"""Freed memory is kept, and a user's own set-up is left alone. In processes of their own: there is no way back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from gepc.core.allocator import keep_freed_memory

def touch():
    np.ones(4_000_000)

if "keep" in sys.argv:
    assert keep_freed_memory()
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
SYSTEM = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "LD_PRELOAD"}
SYSTEM["NUMPY_MADVISE_HUGEPAGE"] = "0"


def run(code: str, *arguments: str, **variables: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env={**SYSTEM, **variables}, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator of Linux")
def test_a_block_that_was_freed_is_used_again() -> None:
    """32 MB ten times over are 78,000 pages of 4 KiB when they are fetched anew each time."""
    assert int(run(FAULTS, "keep")) < 1_000 < int(run(FAULTS))


@pytest.mark.parametrize(
    "variables",
    [
        {"MALLOC_ARENA_MAX": "2"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=10"},
        {"LD_PRELOAD": "libjemalloc.so"},
    ],
)
def test_the_users_own_choice_stands(variables: dict[str, str]) -> None:
    assert run("from gepc.core.allocator import keep_freed_memory as f; print(f())", **variables) == "False\n"

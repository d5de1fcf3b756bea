"""The effect of keeping freed memory between passes (`gepc.core.allocator`), as a ratio measured in one run.

    python benchmarks/allocator.py [--backbone celeba32-small] [--repeats 5]

Processes with and without it alternate; each does the same bare passes with one thread and counts its processor time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
from typing import Any

import torch
from overhead import spread

import gepc
from gepc.core.allocator import keep_freed_memory

ROWS, CALLS = 32, 20


def passes(backbone: str, keep: bool, answer: Any) -> None:
    """Send (processor seconds, page faults) of the passes."""
    if keep and not keep_freed_memory():
        raise SystemExit("this system's allocator has no such setting, or it is set already: nothing to measure")
    torch.set_num_threads(1)
    network = gepc.load_backbone(backbone)
    x = torch.randn(ROWS, network.channels, 32, 32)
    network.eps(x, 10)
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(CALLS):
        network.eps(x, 10)
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    answer.put((spent, after.ru_minflt - before.ru_minflt))


def measured(backbone: str, keep: bool) -> tuple[float, int]:
    """In a new process, since the setting cannot be undone."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=passes, args=(backbone, keep, answer))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)
    found: tuple[float, int] = answer.get()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backbone", default="celeba32-small")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    runs = [[measured(options.backbone, keep) for keep in (False, True)] for _ in range(options.repeats)]
    print("| processor time, kept / given back, median (range) | page faults, kept | given back |\n| --- | --- | --- |")
    ratio = spread([kept[0] / given[0] for given, kept in runs])
    print(f"| {ratio.strip()} | {runs[-1][1][1]:,} | {runs[-1][0][1]:,} |")


if __name__ == "__main__":
    main()

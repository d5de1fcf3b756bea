"""End a process at its k-th file operation, to test what a crash leaves behind.

`operations(work)` counts the file operations of `work`. `crash(work, k)` runs it in a forked child, which ends without
any clean-up just before the k-th of them.
"""

import builtins
import io
import os
from collections.abc import Callable

CHANGING = ("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "truncate", "chmod", "fsync", "open")
CRASHED = 77


def _install(before: Callable[[], None]) -> None:
    """Call `before` ahead of everything that changes a file or a folder in this process."""

    def wrapped(call, changes):
        def run(*arguments, **options):
            if changes(arguments, options):
                before()
            return call(*arguments, **options)

        return run

    def opens_for_writing(arguments, options):
        mode = options.get("mode", arguments[1] if len(arguments) > 1 else "r")
        return any(letter in str(mode) for letter in "wax+")

    def descriptor_for_writing(arguments, options):
        return bool(arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))

    for name in CHANGING:
        changes = descriptor_for_writing if name == "open" else lambda *_: True
        setattr(os, name, wrapped(getattr(os, name), changes))
    builtins.open = io.open = wrapped(builtins.open, opens_for_writing)


def _in_child(work: Callable[[], object], k: int, pipe: int) -> None:
    """Run `work`; the child writes the number of its operations to `pipe` unless it ends at the k-th."""
    count, leave, write = 0, os._exit, os.write

    def before() -> None:
        nonlocal count
        count += 1
        if count == k:
            leave(CRASHED)

    status = 1
    try:
        _install(before)
        work()
        write(pipe, str(count).encode())
        status = 0
    finally:
        leave(status)


def _run(work: Callable[[], object], k: int) -> tuple[int, int]:
    """The exit status of the child, and the number of its operations if it came to its end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _in_child(work, k, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as handle:
        content = handle.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(content or 0)


def operations(work: Callable[[], object]) -> int:
    """How many file operations `work` makes."""
    status, count = _run(work, 0)
    assert status == 0
    return count


def crash(work: Callable[[], object], k: int) -> None:
    """Run `work` up to its k-th file operation."""
    assert _run(work, k)[0] == CRASHED

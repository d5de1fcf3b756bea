"""Processes that end in the middle of writing: at their first, second, ... file operation."""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

CRASHED = 86
CHANGES = {"os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def crashes(action: Callable[[], object], last: int = 10_000) -> Iterator[int]:
    """Run `action` in copies of this process, each of which ends before one more change of the file system.

    The number of the change is yielded after every crash; the iteration ends when `action` has completed. Files that
    are opened for writing, renamed, removed and so on are counted, and so is `os.fsync`. The copies leave what they
    wrote: restore the first state in the loop's body where it matters. At most `last` changes are tried.

        for number in crashes(lambda: detector.save(folder)):
            assert is_whole(folder)
    """
    for number in range(1, last + 1):
        child = os.fork()
        if child == 0:
            _run(action, number)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return
        assert code == CRASHED, f"the process ended with {code} before its change number {number}"
        yield number
    raise AssertionError(f"more than {last} changes")


def _run(action: Callable[[], object], number: int) -> None:
    """Run `action` in this process, which ends before its change of this number, or afterwards."""
    changes, sync = itertools.count(1), os.fsync

    def change() -> None:
        if next(changes) == number:
            os._exit(CRASHED)

    def audited(event: str, arguments: tuple[object, ...]) -> None:
        if event in CHANGES or (event == "open" and _opened_to_write(arguments)):
            change()

    def synced(handle: int) -> None:
        change()
        sync(handle)

    try:
        os.fsync = synced
        sys.addaudithook(audited)  # there is no way to remove it: for a process that ends
        action()
        os._exit(0)
    except BaseException:  # noqa: BLE001 (nothing may return to the code of the parent)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def _opened_to_write(arguments: tuple[object, ...]) -> bool:
    path, mode, flags = arguments
    written = bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool(int(flags) & WRITING)  # type: ignore[call-overload]
    return written and not str(path).startswith(("/dev/", "/proc/"))


def tree(folder: Path) -> dict[str, bytes]:
    """The files below a folder with their content, without what interrupted writes left beside them."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = ((path.relative_to(folder), path) for path in files)
    return {name.as_posix(): path.read_bytes() for name, path in names if not str(name).startswith(".")}

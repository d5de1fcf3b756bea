"""Processes that end in the middle of writing: at their first, second, ... file operation."""

from __future__ import annotations

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
        if not crash(action, number):
            return
        yield number
    raise AssertionError(f"more than {last} changes")


def crash(action: Callable[[], object], number: int) -> bool:
    """Run `action` in a copy of this process that ends before its change of that number; False if it completed."""
    code, _ = _in_child(action, number)
    assert code in (0, CRASHED), f"the process ended with {code} before its change number {number}"
    return code == CRASHED


def changes(action: Callable[[], object]) -> int:
    """Run `action` in a copy of this process, and count its changes of the file system."""
    code, count = _in_child(action, 0)
    assert code == 0
    return count


def _in_child(action: Callable[[], object], number: int) -> tuple[int, int]:
    """The exit code of the copy, and the number of its changes if it completed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _run(action, number, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as handle:
        count = int(handle.read() or 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), count


def _run(action: Callable[[], object], number: int, pipe: int) -> None:
    """Run `action` in this process, which ends before its change of this number, or afterwards."""
    count, sync = 0, os.fsync

    def change() -> None:
        nonlocal count
        count += 1
        if count == number:
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
        os.write(pipe, str(count).encode())
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
    shown = ((name, path) for name, path in names if not any(part.startswith(".") for part in name.parts))
    return {name.as_posix(): path.read_bytes() for name, path in shown}

"""Files that are never partial: they are written under a temporary name, then renamed. Folders with one writer."""

import contextlib
import ctypes
import errno
import glob
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from gepc.core.errors import InputError, StorageError, raising

StrPath = str | os.PathLike[str]
LOCK = ".lock"
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
_WORKING_DIRECTORY, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD in fcntl.h, and a flag in linux/fs.h
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def replaceable(path: StrPath) -> Path:
    """The file or folder that a link leads to, or the path itself; an `InputError` for a device, a pipe or a socket."""
    final = Path(os.path.realpath(path)) if Path(path).is_symlink() else Path(path)
    if final.exists() and not (final.is_file() or final.is_dir()):
        raise InputError(f"{path} is not a regular file; give another name")
    return final


@contextlib.contextmanager
def replacing(path: StrPath) -> Iterator[Path]:
    """Yield a temporary path next to `path`; it replaces `path` atomically on success and is removed on failure.

    If `path` is a link, the file that it leads to is replaced. A full disk or a missing permission becomes a
    `StorageError` that names the final file. The file gets the default mode of new files (0666 less the umask).
    """
    final = replaceable(path)
    draft = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        draft.touch(exist_ok=False)  # reading the umask itself would change it for all threads
        mode = stat.S_IMODE(draft.stat().st_mode)
        draft.unlink()
        yield draft
        with open(draft, "rb+") as handle:
            os.fsync(handle.fileno())
        draft.chmod(mode)
        os.replace(draft, final)
    except OSError as error:
        raise StorageError(f"cannot write {final}: {error.strerror or error}; the file is as it was before") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


@contextlib.contextmanager
def replacing_folder(path: StrPath) -> Iterator[Path]:
    """`replacing` for a folder: yield a new one next to `path`; until it takes its place, the old one stays.

    On Linux the two exchange their names in one step. Elsewhere there is a moment without a folder of that name; if the
    process ends then, `restore_folder` brings the old one back. If `path` is a link, the folder that it leads to is
    replaced.
    """
    check_name(Path(path))
    final, mark = replaceable(path), uuid.uuid4().hex[:8]
    draft, old = (final.with_name(f".{final.name}.{mark}.{kind}") for kind in ("part", "old"))
    restore_folder(final)
    try:
        draft.mkdir(parents=True)
        yield draft
        if not (final.exists() and _exchange(draft, final)):
            _replace_folder(draft, final, old)
    except OSError as error:
        cause = (isinstance(error, StorageError) and error.__cause__) or error
        reason = getattr(cause, "strerror", None) or cause
        raise StorageError(f"cannot write {final}: {reason}; what was there is untouched") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _replace_folder(draft: Path, final: Path, old: Path) -> None:
    """Rename `draft` to `final`, if that exists by way of `old`."""
    if final.exists():
        os.replace(final, old)
    try:
        os.replace(draft, final)
    except OSError:
        if old.exists():
            os.replace(old, final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names on one file system in one step; False if the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    names = (_WORKING_DIRECTORY, os.fsencode(first), _WORKING_DIRECTORY, os.fsencode(second))
    return rename is not None and rename(*names, _RENAME_EXCHANGE) == 0


def restore_folder(path: StrPath) -> None:
    """Bring back the folder that an interrupted `replacing_folder` had put aside; remove it if it was replaced."""
    final = Path(path)
    for old in final.parent.glob(f".{glob.escape(final.name)}.*.old"):
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.replace(old, final)


def open_regular(path: StrPath) -> IO[bytes]:
    """Open a file to read its bytes; a named pipe, a device, a socket or a folder is an `OSError`, at once.

    Opening a named pipe would wait for a writer, and a device may never end.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise OSError(errno.EINVAL, f"is {_KINDS.get(stat.S_IFMT(mode), 'a device')}", str(path))
    return os.fdopen(handle, "rb")


def write_text(path: StrPath, text: str) -> None:
    """Write `text` as UTF-8, completely or not at all; bytes of file names that are not UTF-8 become escapes."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_bytes(path: StrPath, content: bytes) -> None:
    """Write `content`, completely or not at all."""
    with replacing(path) as draft:
        draft.write_bytes(content)


def write_arrays(path: StrPath, arrays: dict[str, Any]) -> None:
    """Write numpy arrays as a safetensors file, completely or not at all."""
    from safetensors.numpy import save

    # not save_file, whose error for a failed write does not mention the disk
    write_bytes(path, save({name: np.asarray(array, order="C") for name, array in arrays.items()}))


def write_json(path: StrPath, value: Any) -> None:
    """Write `value` as indented JSON, completely or not at all."""
    write_text(path, json.dumps(value, indent=2, sort_keys=False) + "\n")


def read_json(path: StrPath) -> Any:
    """Read a JSON file; a missing or broken one is an `InputError` that names it."""
    broken = f"{path} is not a readable JSON file: {{error}}"
    with (
        raising(InputError, broken, OSError, ValueError, RecursionError, passing=InputError),
        raising(InputError, f"{path} does not exist", FileNotFoundError),
        open_regular(path) as handle,
    ):
        return json.loads(handle.read().decode("utf-8"))


def check_name(folder: Path) -> None:
    """Refuse `.`, `..` and the root, which cannot be replaced as a whole."""
    if folder.name in ("", ".."):
        raise InputError(f"{folder} cannot be replaced as a whole; give a folder by its name")


def check_writable(path: Path) -> None:
    """Check before any work that a file or folder can be written: a `StorageError` if not."""
    place = replaceable(path).absolute()
    home = next(one for one in (place, *place.parents) if one.is_dir() or (one != place and one.exists()))
    with raising(StorageError, f"cannot write {path}: {{reason}}", OSError):
        tempfile.TemporaryFile(dir=home).close()


def check_free(folder: Path, mark: str, holds: str) -> None:
    """Require `folder` to be new, empty, or to contain the file `mark`; `holds` names the content in the error.

    Hidden files do not count: an interrupted write leaves its draft under a name with a dot.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder for the results")
    check_writable(folder)
    if not folder.is_dir() or (folder / mark).exists():
        return
    if any(not path.name.startswith(".") for path in folder.iterdir()):
        raise InputError(f"{folder} is not empty and contains no {holds}; give another folder for the results")


def sha256(*paths: StrPath) -> str:
    """Hexadecimal SHA-256 of the files' bytes, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with open_regular(path) as handle:
            while chunk := handle.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def only_writer(folder: Path, name: str = "") -> Iterator[None]:
    """Hold an exclusive lock on `folder`, or on its file `name`, while writing; the process's end releases it.

    The lock is a hidden file whose name ends in `.lock`. If another process holds it, an `InputError` says so at once.
    File systems without locks are used without one.
    """
    path = folder / (f".{name}{LOCK}" if name else LOCK)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        kind = "file" if name else "folder"
        raise InputError(
            f"another process is writing into {folder / name}; wait for it or give another {kind}"
        ) from error
    except NotImplementedError:
        pass
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise StorageError(f"cannot write in {folder}: {error.strerror or error}") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # while the lock is held: afterwards the file may be another process's
            path.unlink()
        lock.release()


def remove_drafts(*folders: Path) -> None:
    """Remove the unfinished files of interrupted writes; no other process may be writing into the folders."""
    for folder in folders:
        for draft in folder.glob(".*.part"):
            with contextlib.suppress(OSError):
                draft.unlink()


def digest(facts: Any, arrays: Mapping[str, npt.NDArray[Any]] | None = None, keys: Iterable[bytes] = ()) -> str:
    """Hash a JSON value, arrays with their names, types and shapes, and byte strings of equal length: 32 digits."""
    state = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16)
    for name, array in sorted((arrays or {}).items()):
        state.update(f"{name}|{array.dtype}|{array.shape}|".encode() + np.ascontiguousarray(array).tobytes())
    for key in keys:
        state.update(key)
    return state.hexdigest()
